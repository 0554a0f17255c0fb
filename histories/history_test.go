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
	"time"

	"github.com/anishathalye/porcupine"
)

// never is the end of an op that was not seen to end.
const never = math.MaxInt64

// An op is one operation of a history. Its process reports it before it begins, and reads the clock
// before it begins and after it has returned. So the time between Begin and End contains all its
// effects, and little more. If the process dies, the op is known, and its end is not.
type op struct {
	Process int    // index of the process
	ID      int    // unique within the process
	Of      int    `json:",omitempty"` // ID of the op that this op belongs to
	Key     int    `json:",omitempty"` // index of the key
	Name    string // of the method that was called
	Begin   int64
	End     int64
	Result  string `json:",omitempty"` // empty: unknown
	Value   int64  `json:",omitempty"` // a version of the source, or a fence
	Stale   bool   `json:",omitempty"`
	Error   string `json:",omitempty"`

	// Fallback is set if the value replaced an error.
	Fallback bool `json:",omitempty"`

	Marks map[string]int64 `json:",omitempty"` // when other events of the op were seen
}

// The results of ops. After any other result, which is an error's text, the op may have taken
// effect.
const (
	resultOK     = "ok"
	resultAbsent = "absent" // the source has no such value
	resultMiss   = "miss"
	resultBusy   = "busy"
	resultLost   = "lost"
	resultLeft   = "left" // its context ended
	resultFailed = "failed"
)

func (o op) String() string {
	s := o.Name
	if o.Key != 0 {
		s += fmt.Sprintf(" [key %d]", o.Key)
	}
	if o.Value != 0 {
		s += fmt.Sprintf(" %d", o.Value)
	}
	if o.Stale {
		s += " stale"
	}
	return s + ": " + cmp.Or(o.Result, "unknown")
}

func (o op) overlaps(other op) bool { return o.Begin <= other.End && other.Begin <= o.End }

// A report is sent by a process about one op.
type report struct {
	History int
	Event   string // begin, end, mark, or done: the process has no more reports for this history
	op
	At       int64
	NearHits int64 `json:",omitempty"` // with done: values that the process has served from memory so far
}

// A history is what several processes did with one key or lock.
type history struct {
	plan    plan
	silence *time.Timer // fires when nothing has been reported for historyLimit

	mu      sync.Mutex
	ops     map[[2]int]*op // protected by mu, by process and ID
	waiting map[int]bool   // protected by mu: processes that have more to report
	over    chan struct{}  // closed when all processes have reported everything
}

func newHistory(p plan, processes int) *history {
	h := &history{plan: p, ops: make(map[[2]int]*op), waiting: make(map[int]bool), over: make(chan struct{})}
	h.silence = time.NewTimer(historyLimit)
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
	h.silence.Reset(historyLimit)
	id := [2]int{process, r.ID}
	switch o := h.ops[id]; r.Event {
	case "begin":
		r.op.Process, r.Begin, r.End = process, r.At, never
		h.ops[id] = &r.op
	case "end":
		o.End, o.Result, o.Stale, o.Fallback, o.Error = r.At, r.Result, r.Stale, r.Fallback, r.Error
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

// gone notes that a process has died.
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

// all returns the ops in the order in which they began.
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

// A claim is a part of a history that must agree with a model.
type claim struct {
	name  string
	model porcupine.Model
	ops   []porcupine.Operation
}

// write writes a history, and porcupine's visualization of it, to a new directory.
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
