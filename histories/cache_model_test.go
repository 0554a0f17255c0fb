package histories

import (
	"cmp"
	"fmt"

	"github.com/anishathalye/porcupine"
)

// The ops of a cache's history. A write is a change of the source and then one of the other three.
const (
	opGetOrLoad = "GetOrLoad"
	opGet       = "Get"
	opLoad      = "load"   // a Loader; of the call in whose name it runs
	opChange    = "change" // of the source; the value is the new version
	opDelete    = "Delete" // of a change, like the next two
	opSet       = "Set"
	opExpire    = "Expire"
)

// Marks of a load.
const (
	markProved   = "proved"   // Redis has stored or refused what it brought
	markUnproved = "unproved" // Redis could not be asked
)

// isAbsent tells the versions in which the source has nothing. The first one, before all changes, is 0.
func isAbsent(version int64) bool { return version%5 == 0 }

func isRead(o op) bool {
	return (o.Name == opGetOrLoad || o.Name == opGet) && (o.Result == resultOK || o.Result == resultAbsent)
}

func isBreak(o op) bool { return o.Name == opDelete || o.Name == opSet || o.Name == opExpire }

func isWrite(o op) bool { return o.Name == opChange || isBreak(o) }

func describe(in, _ any) string { return in.(op).String() }

func operation(o op) porcupine.Operation {
	return porcupine.Operation{ClientId: o.Process, Input: o, Call: o.Begin, Return: o.End}
}

// register is the model of a source that is read through the cache: a write is everything from the change of the
// source to the return of Delete. The versions come in the order that the source has given them.
var register = porcupine.Model{
	Init: func() any { return int64(0) },
	Step: func(state, in, _ any) (bool, any) {
		version, o := state.(int64), in.(op)
		switch {
		case o.Name == opChange:
			return o.Value == version+1, o.Value
		case o.Result == resultAbsent:
			return isAbsent(version), version
		}
		return o.Value == version, version
	},
	DescribeOperation: describe,
}

// asRegister makes each write one op.
func asRegister(ops []op) (out []porcupine.Operation) {
	ends := make(map[[2]int]int64)
	for _, o := range ops {
		if isBreak(o) {
			ends[[2]int{o.Process, o.Of}] = o.End
		}
	}
	for _, o := range ops {
		switch {
		case o.Name == opChange:
			o.End = cmp.Or(ends[[2]int{o.Process, o.ID}], never)
			out = append(out, operation(o))
		case isRead(o):
			out = append(out, operation(o))
		}
	}
	return out
}

// A bounds is the state of floors: what a read may return.
type bounds struct {
	floor int64 // the oldest version, by Delete and Set
	fresh int64 // and if it is not said to be stale, by Expire too
	top   int64 // the newest version
}

// floors is the model of what Delete promises: no read that follows it gets what was loaded before it. It says
// nothing of reads that follow each other.
var floors = porcupine.Model{
	Init: func() any { return bounds{} },
	Step: func(state, in, _ any) (bool, any) {
		b, o := state.(bounds), in.(op)
		switch {
		case o.Name == opChange:
			ok := o.Value == b.top+1
			b.top = o.Value
			return ok, b
		case isBreak(o):
			b.fresh = max(b.fresh, o.Value)
			if o.Name != opExpire {
				b.floor = max(b.floor, o.Value)
			}
			return true, b
		}
		oldest := b.fresh
		if o.Stale {
			oldest = b.floor
		}
		if o.Result == resultAbsent { // which version that was, nobody knows
			return b.top-b.top%5 >= oldest, b
		}
		return oldest <= o.Value && o.Value <= b.top, b
	},
	DescribeOperation: describe,
	DescribeState: func(state any) string {
		b := state.(bounds)
		return fmt.Sprintf("%d (fresh: %d) to %d", b.floor, b.fresh, b.top)
	},
}

// asFloors takes what floors is about. windows says that an expired value may be served, as stale; log has the
// versions of the changes of processes that have died before they could tell.
func asFloors(ops []op, windows bool, log map[[2]int]int64) (out []porcupine.Operation) {
	haunting := make(map[int64]bool) // Set has failed, and may still be carried out, even after a later Delete
	for _, o := range ops {
		if o.Name == opSet && o.Result != resultOK {
			haunting[o.Value] = true
		}
	}
	for _, o := range ops {
		switch {
		case o.Name == opChange:
			o.Value = cmp.Or(o.Value, log[[2]int{o.Process, o.ID}])
			if o.Value == 0 {
				continue // it never reached the source
			}
		case isBreak(o) && o.Result == resultOK:
			o.Value = versionAt(ops, o)
			if o.Name == opExpire && !windows {
				o.Name = opDelete // to which it comes then
			}
		case isRead(o) && !haunting[o.Value]:
			o.Begin = sharedSince(ops, o)
			o.Stale = o.Stale || o.Name == opGet && windows // Get does not tell
		default:
			continue
		}
		out = append(out, operation(o))
	}
	return out
}

// versionAt is what the source was known to hold when o began: a load that begins after o brings that at least.
func versionAt(ops []op, o op) int64 {
	v := o.Value
	for _, c := range ops {
		if c.Name == opChange && c.End < o.Begin {
			v = max(v, c.Value)
		}
	}
	return v
}

// sharedSince is the time as of which the value of a read is to be judged. While Redis cannot be asked callers
// share the load that they find under way in their process, as old as it may be: such a read counts as begun
// with the load.
func sharedSince(ops []op, read op) int64 {
	since := read.Begin
	for _, l := range ops {
		if l.Name != opLoad || l.Process != read.Process || l.Result != "" && !sameValue(l, read) {
			continue
		}
		if l.Marks[markProved] != 0 {
			continue
		}
		end := int64(never) // the process has died before it could tell what became of the load
		if at := l.Marks[markUnproved]; at != 0 {
			end = at
		}
		if l.Begin < since && read.Begin <= end {
			since = l.Begin
		}
	}
	return since
}

func sameValue(l, read op) bool {
	return l.Result == read.Result && (l.Value == read.Value || l.Result == resultAbsent)
}

// loadsAlone looks for loads that ran side by side although nothing had overtaken one of them, since the call began
// in whose name it runs: it has had the lock for perhaps so long.
func loadsAlone(ops []op) error {
	var loads, breaks []op
	begun := make(map[[2]int]int64)
	for _, o := range ops {
		begun[[2]int{o.Process, o.ID}] = o.Begin
		switch {
		case o.Name == opLoad:
			loads = append(loads, o)
		case isBreak(o):
			breaks = append(breaks, o)
		}
	}
	for i, first := range loads {
		for _, second := range loads[i+1:] { // which has begun later
			if !first.overlaps(second) {
				continue
			}
			overtaken := false
			since := min(begun[[2]int{first.Process, first.Of}], begun[[2]int{second.Process, second.Of}])
			for _, b := range breaks {
				overtaken = overtaken || b.Begin <= second.Begin && since <= b.End
			}
			if !overtaken {
				return fmt.Errorf("two loads at once, of processes %d and %d, begun at %d and %d",
					first.Process, second.Process, first.Begin, second.Begin)
			}
		}
	}
	return nil
}
