package histories

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/anishathalye/porcupine"
)

// never is the end of what has not been seen to end.
const never = math.MaxInt64

// An op is one operation of a history. Who makes it says so before it begins, and reads the clock before that and
// after it has returned: so the time between Begin and End contains all that it can have done, and no more than
// the report of it besides; and one whose process dies in the middle is known, with an end that nobody knows.
type op struct {
	Process int    // which of those that took part
	ID      int    // unique in its process
	Of      int    `json:",omitempty"` // ID of the op to which this one belongs
	Name    string // what was called
	Begin   int64
	End     int64
	Result  string `json:",omitempty"` // empty: unknown
	Value   int64  `json:",omitempty"` // a version of the source, or a fence
	Stale   bool   `json:",omitempty"`
	Error   string `json:",omitempty"`

	Marks map[string]int64 `json:",omitempty"` // when what else was seen of it
}

// What ops end in. All else is an error's text, and the op has perhaps done what it was to do.
const (
	resultOK     = "ok"
	resultAbsent = "absent" // the source has no such thing
	resultMiss   = "miss"
	resultBusy   = "busy"
	resultLost   = "lost"
	resultLeft   = "left" // its context ended
	resultFailed = "failed"
)

func (o op) String() string {
	s := o.Name
	if o.Value != 0 {
		s += fmt.Sprintf(" %d", o.Value)
	}
	if o.Stale {
		s += " stale"
	}
	return s + ": " + cmp.Or(o.Result, "unknown")
}

func (o op) overlaps(other op) bool { return o.Begin <= other.End && other.Begin <= o.End }

// A report is how a process tells of an op.
type report struct {
	History int
	Event   string // begin, end, mark, done: the process has no more to tell of this history
	op
	At int64
}

// A history is what several processes have done with one key, or one lock.
type history struct {
	plan plan

	mu      sync.Mutex
	ops     map[[2]int]*op // protected by mu, by process and ID
	waiting map[int]bool   // protected by mu: the processes that have more to tell
	over    chan struct{}  // closed when all have told all
}

func newHistory(p plan, processes int) *history {
	h := &history{plan: p, ops: make(map[[2]int]*op), waiting: make(map[int]bool), over: make(chan struct{})}
	for i := range processes {
		h.waiting[i] = true
	}
	return h
}

func (h *history) note(process int, r report) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.waiting[process] {
		return
	}
	id := [2]int{process, r.ID}
	switch o := h.ops[id]; r.Event {
	case "begin":
		r.op.Process, r.Begin, r.End = process, r.At, never
		h.ops[id] = &r.op
	case "end":
		o.End, o.Result, o.Stale, o.Error = r.At, r.Result, r.Stale, r.Error
		o.Value = cmp.Or(r.Value, o.Value)
	case "mark":
		if o.Marks == nil {
			o.Marks = make(map[string]int64)
		}
		o.Marks[r.Name] = r.At
	case "done":
		h.leave(process)
	}
}

// gone says that a process has died.
func (h *history) gone(process int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.leave(process)
}

func (h *history) leave(process int) {
	if h.waiting[process] {
		delete(h.waiting, process)
		if len(h.waiting) == 0 {
			close(h.over)
		}
	}
}

// all returns the ops in the order of their beginnings.
func (h *history) all() []op {
	h.mu.Lock()
	defer h.mu.Unlock()
	var ops []op
	for _, o := range h.ops {
		ops = append(ops, *o)
	}
	slices.SortFunc(ops, func(a, b op) int { return cmp.Compare(a.Begin, b.Begin) })
	return ops
}

// A claim is a part of a history that has to agree with a model.
type claim struct {
	name  string
	model porcupine.Model
	ops   []porcupine.Operation
}

// write leaves a history behind, and what porcupine shows of it, in a new directory.
func (c claim) write(p plan, ops []op) (dir string, err error) {
	if dir, err = os.MkdirTemp("", "singlefill-history-"); err != nil {
		return "", err
	}
	text, err := json.MarshalIndent(struct {
		Plan plan
		Ops  []op
	}{p, ops}, "", "  ")
	if err != nil {
		return dir, err
	}
	if err := os.WriteFile(filepath.Join(dir, "history.json"), text, 0o644); err != nil {
		return dir, err
	}
	if c.ops == nil {
		return dir, nil
	}
	_, info := porcupine.CheckOperationsVerbose(c.model, c.ops, checkLimit)
	return dir, porcupine.VisualizePath(c.model, info, filepath.Join(dir, "history.html"))
}
