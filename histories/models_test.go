package histories

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// A control is a small history and whether a model accepts it. The real histories show what the models
// accept, so most controls are bad. Each line is a process and an op: its begin and end in ms,
// its name, its value or -, its result, and its marks or its key. Behind a comma there is another op, which belongs to
// the first one: the invalidation to a change, the Release to an acquire, the load to a call. MaxLag is 50 ms.
type control struct {
	model string
	what  string
	good  bool
	ops   string
}

var controls = []control{
	{"register", "reads during a write, of the new value and then of the old one", false, `
		0 0-2 change 1 ok, 3-9 Delete 1 ok
		1 3-4 GetOrLoad 1 ok
		2 5-6 GetOrLoad - absent`},
	{"register", "an old value after Delete", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 4-5 change 2 ok, 6-7 Delete 2 ok
		1 8-9 GetOrLoad 1 ok`},

	{"register", "the new value of a load that was refused, and then the old one", true, `
		0 0-1 change 1 ok, 19-20 Delete 1 ok
		1 0-10 GetOrLoad 1 ok, 2-8 load 1 ok refused=9
		2 12-13 GetOrLoad - absent`},
	{"register", "the same of a load that was not refused", false, `
		0 0-1 change 1 ok, 19-20 Delete 1 ok
		1 0-10 GetOrLoad 1 ok, 2-8 load 1 ok
		2 12-13 GetOrLoad - absent`},
	{"register", "an old value of a load that was refused, after Delete", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 4-5 change 2 ok, 6-7 Delete 2 ok
		1 8-20 GetOrLoad 1 ok, 9-10 load 1 ok refused=11`},

	{"floors", "an old value after Delete", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		1 4-5 GetOrLoad - absent`},
	{"floors", "a value that the source has never had", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		1 4-5 GetOrLoad 2 ok`},
	{"floors", "an old value after Expire", false, `
		0 0-1 change 1 ok, 2-3 Expire 1 ok
		1 4-5 GetOrLoad - absent`},
	{"floors", "an old value joined in a load that Redis could not be asked about", true, `
		1 0-20 GetOrLoad 1 ok, 2-9 load 1 ok unproved=12
		0 0-1 change 1 ok
		0 3-4 change 2 ok, 5-6 Delete 2 ok
		1 8-19 GetOrLoad 1 ok`},
	{"floors", "the same in a load that was refused", false, `
		1 0-20 GetOrLoad 1 ok, 2-9 load 1 ok proved=12
		0 0-1 change 1 ok
		0 3-4 change 2 ok, 5-6 Delete 2 ok
		1 8-19 GetOrLoad 1 ok`},
	{"floors", "the same in the load of another process", false, `
		1 0-20 GetOrLoad 1 ok, 2-9 load 1 ok unproved=12
		0 0-1 change 1 ok
		0 3-4 change 2 ok, 5-6 Delete 2 ok
		2 8-19 GetOrLoad 1 ok`},

	{"floors", "an old value by GetOrLoadMany after SetMany", false, `
		0 0-1 change 1 ok, 2-3 SetMany 1 ok
		1 4-5 GetOrLoadMany - absent`},
	{"floors", "an old value of the second key after a Delete of both", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 0-1 change 1 ok key=1, 2-3 Delete 1 ok key=1
		1 4-5 GetOrLoadMany 1 ok
		1 4-5 GetOrLoadMany - absent key=1`},

	{"windows", "an old value after Expire, said to be stale", true, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 4-5 change 2 ok, 6-7 Expire 2 ok
		1 8-9 GetOrLoad 1 stale`},
	{"windows", "an old value after Delete, said to be stale", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 4-5 change 2 ok, 6-7 Delete 2 ok
		1 8-9 GetOrLoad 1 stale`},

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
	{"near", "the MaxLag of a later Delete does not excuse a value older than the first one's", false, `
		0 0-1 change 1 ok, 2-3 Delete 1 ok
		0 40-41 change 2 ok, 42-43 Delete 2 ok
		1 60-61 GetOrLoad - absent`},

	{"loads", "two loads at once", false, `
		0 0-9 GetOrLoad - absent, 1-6 load - absent
		1 0-9 GetOrLoad - absent, 5-8 load - absent`},
	{"loads", "a load beside one that a Delete has superseded", true, `
		0 0-9 GetOrLoad - absent, 1-6 load - absent
		2 3-4 Delete 0 ok
		1 3-9 GetOrLoad 1 ok, 5-8 load 1 ok`},

	{"mutex", "two at once", false, `
		0 0-1 Acquire 1 ok, 7-8 Release - ok
		1 2-3 Acquire 2 ok, 10-11 Release - ok`},
	{"mutex", "a fence that does not grow", false, `
		0 0-1 Acquire 2 ok, 2-3 Release - ok
		1 4-5 Acquire 2 ok, 6-7 Release - ok`},
	{"mutex", "busy while it is free", false, `
		0 0-1 Acquire 1 ok, 2-3 Release - ok
		1 4-5 TryAcquire - busy`},
	{"mutex", "the next one after the holder has died, before its life is over", false, `
		0 0-1 Acquire 1 ok
		1 2-80 Acquire 2 ok, 103-104 Release - ok`},
	{"mutex", "the next one before the life of the last renewal is over", false, `
		0 0-1 Acquire 1 ok renewed=33
		1 2-120 Acquire 2 ok, 123-124 Release - ok`},
	{"mutex", "a release, said to be of a lease held to the end, after somebody else has held it", false, `
		0 0-1 Acquire 1 ok, 113-114 Release - ok
		1 100-110 Acquire 2 ok, 111-112 Release - ok`},
	{"mutex", "a renewal while somebody else holds it", false, `
		0 0-1 Acquire 1 ok renewed=115, 123-124 Release - lost
		1 100-110 Acquire 2 ok, 121-122 Release - ok`},
	{"mutex", "a lease lost before the time of its last renewal", false, `
		0 0-1 Acquire 1 ok renewal=33 renewed=34, 110-111 Release - lost`},

	{"semaphore 2", "three at once", false, `
		0 0-1 Acquire 1 ok, 7-8 Release - ok
		1 2-3 Acquire 2 ok, 10-11 Release - ok
		2 4-5 Acquire 3 ok, 10-11 Release - ok`},
	{"semaphore 2", "busy while there is a place", false, `
		0 0-1 Acquire 1 ok, 7-8 Release - ok
		2 4-5 TryAcquire - busy`},
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
	switch c.model {
	case "loads":
		return loadsAlone(ops) == nil
	case "register":
		return porcupine.CheckOperations(register, asRegister(ops))
	case "near":
		for process := range processes {
			if checkFloors(asNear(ops, process, 50*time.Millisecond, false, true, nil)) != nil {
				return false
			}
		}
		return true
	case "floors", "windows":
		return checkFloors(asFloors(ops, c.model == "windows", nil)) == nil
	}
	return porcupine.CheckOperations(lockModel(kinds[c.model]), asSteps(ops, 100*time.Millisecond))
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
	o := op{Begin: number(t, from) * 1e6, End: number(t, to) * 1e6, Name: fields[1], Result: fields[3], Marks: make(map[string]int64)}
	if fields[2] != "-" {
		o.Value = number(t, fields[2])
	}
	if o.Result == "stale" {
		o.Result, o.Stale = resultOK, true
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
