package histories

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// A control is a small history and whether a model accepts it. Each line is a process and an op: its
// begin and end in ms (? if the end was not seen), its name, its value or -, its result, and its
// marks or its key. Behind a comma there is another op, which belongs to the first one: the
// invalidation to a change, the Release to an acquire, the load to a call. MaxLag is 50 ms.
type control struct {
	model string
	what  string
	good  bool
	ops   string
}

var controls = []control{
	{"register", "a write, then reads of it", true, `
		0 0-2 change 1 ok, 3-5 Delete 1 ok
		1 6-7 GetOrLoad 1 ok
		2 8-9 Get 1 ok`},
	{"register", "reads during a write, of the new value and then of the old one", false, `
		0 0-2 change 1 ok, 3-9 Delete 1 ok
		1 3-4 GetOrLoad 1 ok
		2 5-6 GetOrLoad - absent`},
	{"register", "an old value after Delete", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 4-5 change 2 ok, 6-7 Delete 2 ok
		1 8-9 GetOrLoad 1 ok`},
	{"floors", "reads during a write that is not over, of the new value and then of the old one", true, `
		0 0-2 change 1 ok, 3-9 Delete 1 ok
		1 3-4 GetOrLoad 1 ok
		2 5-6 GetOrLoad - absent`},
	{"floors", "an old value after Delete", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		1 4-5 GetOrLoad - absent`},
	{"floors", "a value that the source had before the Delete of an older one began", false, `
		0 0-1 change 1 ok, 4-5 Delete 1 ok
		1 2-3 change 2 ok
		2 6-7 GetOrLoad 1 ok`},
	{"windows", "an old value by GetOrLoadMany after Expire", true, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 4-5 change 2 ok, 6-7 Expire 2 ok
		1 8-9 GetOrLoadMany 1 ok`},
	{"windows", "an old value by GetOrLoadMany after Clear", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 4-5 change 2 ok, 6-7 Clear 2 ok
		1 8-9 GetOrLoadMany 1 ok`},
	{"windows", "an old value after Expire, said to be fresh", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 4-5 change 2 ok, 6-7 Expire 2 ok
		1 8-9 GetOrLoad 1 ok`},
	{"near", "an old value in another process, MaxLag after Delete", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		1 54-55 GetOrLoad - absent`},
	{"near", "an old value in another process, within MaxLag", true, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		1 52-60 GetOrLoad - absent
		1 53-54 GetOrLoad - absent`},
	{"near", "an old value in the process that has called Delete", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 4-5 GetOrLoad - absent`},
	{"near windows", "an old value by GetOrLoadMany, perhaps in place of an error, MaxLag after Delete", true, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 4-5 change 2 ok, 6-7 Delete 2 ok
		1 100-101 GetOrLoadMany 1 ok`},
	{"loads", "two loads one after the other", true, `
		0 0-9 GetOrLoad - absent, 1-4 load - absent
		1 0-9 GetOrLoad - absent, 5-8 load - absent`},
	{"loads", "two loads at once", false, `
		0 0-9 GetOrLoad - absent, 1-6 load - absent
		1 0-9 GetOrLoad - absent, 5-8 load - absent`},
	{"mutex", "one after the other", true, `
		0 0-1 Acquire 1 ok, 7-8 Release - ok
		1 0-9 Acquire 2 ok, 10-11 Release - ok`},
	{"mutex", "two at once", false, `
		0 0-1 Acquire 1 ok, 7-8 Release - ok
		1 2-3 Acquire 2 ok, 10-11 Release - ok`},
	{"mutex", "a fence that does not grow", false, `
		0 0-1 Acquire 2 ok, 2-3 Release - ok
		1 4-5 Acquire 2 ok, 6-7 Release - ok`},
	{"semaphore 2", "two at once", true, `
		0 0-1 Acquire 1 ok, 7-8 Release - ok
		1 2-3 Acquire 2 ok, 10-11 Release - ok
		2 4-5 TryAcquire - busy`},
	{"semaphore 2", "three at once", false, `
		0 0-1 Acquire 1 ok, 7-8 Release - ok
		1 2-3 Acquire 2 ok, 10-11 Release - ok
		2 4-5 Acquire 3 ok, 10-11 Release - ok`},
	{"semaphore 2", "busy while there is a place", false, `
		0 0-1 Acquire 1 ok, 7-8 Release - ok
		2 4-5 TryAcquire - busy`},
	{"fair", "in the order of coming", true, `
		0 0-1 Acquire 1 ok arrived=1, 6-7 Release - ok
		1 2-20 Acquire 2 ok arrived=3, 21-22 Release - ok
		2 4-30 Acquire 3 ok arrived=5, 31-32 Release - ok`},
	{"fair", "superseded", false, `
		0 0-1 Acquire 1 ok arrived=1, 6-7 Release - ok
		1 2-30 Acquire 3 ok arrived=3, 31-32 Release - ok
		2 4-20 Acquire 2 ok arrived=5, 21-22 Release - ok`},
	{"fair", "overtaking one who is going to leave", false, `
		0 0-1 Acquire 1 ok arrived=1, 6-7 Release - ok
		1 2-30 Acquire - left arrived=3 leaving=28
		2 4-20 Acquire 2 ok arrived=5, 21-22 Release - ok`},
}

// The models accept good histories and refuse bad ones.
func TestModels(t *testing.T) {
	for _, c := range controls {
		t.Run(c.model+"/"+c.what, func(t *testing.T) {
			if good := c.judge(parse(t, c.ops)); good != c.good {
				t.Errorf("accepted: %v, want %v", good, c.good)
			}
		})
	}
}

// judge judges each key by itself.
func (c control) judge(ops []op) bool {
	for key := range 2 {
		if !c.judgeKey(ofKey(ops, key)) {
			return false
		}
	}
	return true
}

func (c control) judgeKey(ops []op) bool {
	model, steps := floors, []porcupine.Operation(nil)
	switch c.model {
	case "loads":
		return loadsAlone(ops) == nil
	case "register":
		model, steps = register, asRegister(ops)
	case "near", "near windows":
		for process := range processes {
			steps := asNear(ops, process, 50*time.Millisecond, c.model == "near windows", true, nil)
			if !porcupine.CheckOperations(floors, steps) {
				return false
			}
		}
		return true
	case "floors", "windows":
		steps = asFloors(ops, c.model == "windows", nil)
	default:
		fair := c.model == "fair"
		model = lockModel(kinds[c.model], fair)
		steps = asSteps(ops, fair, ttls{Lease: 100 * time.Millisecond, Waiter: 100 * time.Millisecond})
	}
	return porcupine.CheckOperations(model, steps)
}

func parse(t *testing.T, text string) (ops []op) {
	for line := range strings.Lines(strings.TrimSpace(text)) {
		process, line, _ := strings.Cut(strings.TrimSpace(line), " ")
		first := 0
		for text := range strings.SplitSeq(line, ", ") {
			o := parseOp(t, strings.Fields(text))
			o.Process, o.ID, o.Of = int(number(t, process)), len(ops)+1, first
			first = cmp.Or(first, o.ID)
			ops = append(ops, o)
		}
	}
	return ops
}

func parseOp(t *testing.T, fields []string) op {
	from, to, _ := strings.Cut(fields[0], "-")
	o := op{Begin: number(t, from) * 1e6, End: never, Name: fields[1], Result: fields[3], Marks: make(map[string]int64)}
	if to != "?" {
		o.End = number(t, to) * 1e6
	}
	if fields[2] != "-" {
		o.Value = number(t, fields[2])
	}
	switch o.Result {
	case "unknown":
		o.Result = ""
	case "stale":
		o.Result, o.Stale = resultOK, true
	case "fallback":
		o.Result, o.Stale, o.Fallback = resultOK, true, true
	}
	for _, f := range fields[4:] {
		mark, at, _ := strings.Cut(f, "=")
		if mark == "key" {
			o.Key = int(number(t, at))
			continue
		}
		o.Marks[mark] = number(t, at) * 1e6
	}
	return o
}

func number(t *testing.T, s string) (n int64) {
	if _, err := fmt.Sscan(s, &n); err != nil {
		t.Fatalf("%q: %v", s, err)
	}
	return n
}
