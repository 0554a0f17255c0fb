package histories

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// The ops of a cache's history, each of which is about one key. A write is a change of the source and
// then a Delete, Set, SetMany or Expire.
const (
	opGetOrLoad = "GetOrLoad"
	opGet       = "Get"
	opLoad      = "load"   // a Loader, on behalf of a GetOrLoad
	opChange    = "change" // of the source; the value is the new version
	opDelete    = "Delete" // belongs to a change, like Set and Expire
	opSet       = "Set"
	opExpire    = "Expire"

	opGetOrLoadMany = "GetOrLoadMany"
	opGetMany       = "GetMany"
	opSetMany       = "SetMany"
)

// Marks of a load.
const (
	markProved   = "proved"   // Redis stored or refused the loaded value
	markUnproved = "unproved" // Redis could not be asked
	markRefused  = "refused"  // Redis refused the loaded value
)

// isAbsent reports whether the source has no value in a version. Before the first change the
// version is 0.
func isAbsent(version int64) bool { return version%5 == 0 }

func isRead(o op) bool {
	switch o.Name {
	case opGetOrLoad, opGetOrLoadMany, opGet, opGetMany:
		return o.Result == resultOK || o.Result == resultAbsent
	}
	return false
}

func isMany(o op) bool { return o.Name == opGetMany || o.Name == opGetOrLoadMany }

// isBare reports whether a read does not tell how old its value is.
func isBare(o op) bool { return o.Name == opGet || isMany(o) }

func isInvalidation(o op) bool {
	return o.Name == opDelete || o.Name == opExpire || isSet(o)
}

func isSet(o op) bool { return o.Name == opSet || o.Name == opSetMany }

func describe(in, _ any) string { return in.(op).String() }

func operation(o op) porcupine.Operation {
	return porcupine.Operation{ClientId: o.Process, Input: o, Call: o.Begin, Return: o.End}
}

// register is the model of a source that is read through the cache. A write lasts from the change
// of the source until Delete returns. The versions have the order of the source.
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

// asRegister converts each write to one operation.
func asRegister(ops []op) (out []porcupine.Operation) {
	ends := make(map[[2]int]int64)
	for _, o := range ops {
		if isInvalidation(o) {
			ends[[2]int{o.Process, o.Of}] = o.End
		}
	}
	for _, o := range ops {
		switch {
		case o.Name == opChange:
			o.End = cmp.Or(ends[[2]int{o.Process, o.ID}], never)
			out = append(out, operation(o))
		case isRead(o):
			if ofRefused(ops, o) {
				o.End = never
			}
			out = append(out, operation(o))
		}
	}
	return out
}

// ofRefused reports whether a read may have the value of a load of its process that Redis refused. Redis may have an
// older value until the write is over: so the read may take effect after it has returned.
func ofRefused(ops []op, read op) bool {
	return slices.ContainsFunc(ops, func(l op) bool {
		return l.Name == opLoad && l.Process == read.Process && l.Marks[markRefused] != 0 && sameValue(l, read) &&
			read.Begin <= l.Begin && l.End <= read.End
	})
}

// checkFloors checks Delete's promise: no read that begins after it gets a value that was loaded before it. It does not
// order reads, so it needs no search. Each change takes effect as early as it can, and each invalidation as late as it
// can: whatever order a read agrees with, it agrees with this one. An invalidation raises the floor to its value, one
// by Expire only for values that are not stale.
func checkFloors(ops []op) error {
	changes := slices.DeleteFunc(slices.Clone(ops), func(o op) bool { return o.Name != opChange })
	slices.SortFunc(changes, func(a, b op) int { return cmp.Compare(a.Value, b.Value) })
	since := []int64{math.MinInt64} // by versions: from when it may have been the newest one
	for i, o := range changes {
		since = append(since, max(since[i], o.Begin))
		if o.Value != int64(i)+1 || since[i+1] > o.End {
			return fmt.Errorf("version %d of process %d is not the one after %d", o.Value, o.Process, i)
		}
	}
	for _, read := range ops {
		if isRead(read) && !slices.ContainsFunc(versionsOf(read, len(since)), func(v int64) bool {
			until := read.End
			for _, o := range ops {
				if isInvalidation(o) && o.Value > v && !(o.Name == opExpire && read.Stale) {
					until = min(until, o.End)
				}
			}
			return max(read.Begin, since[v]) <= until
		}) {
			return fmt.Errorf("%v, of process %d, from %d to %d, is below the floor or above the newest version", read, read.Process, read.Begin, read.End)
		}
	}
	return nil
}

// versionsOf returns the versions, of the first n, that a read may have returned.
func versionsOf(read op, n int) (all []int64) {
	for v := range int64(n) {
		if read.Result == resultAbsent && isAbsent(v) || read.Result != resultAbsent && v == read.Value {
			all = append(all, v)
		}
	}
	return all
}

// asFloors selects the operations of checkFloors. windows says whether stale values may be
// served. log has the versions of the changes, even of processes that died before they reported
// them.
func asFloors(ops []op, windows bool, log map[[2]int]int64) (out []op) {
	// The Set failed, and may still be executed, even after a later Delete.
	haunting := make(map[int64]bool)
	for _, o := range ops {
		if isSet(o) && o.Result != resultOK {
			haunting[o.Value] = true
		}
	}
	for _, o := range ops {
		switch {
		case o.Name == opChange:
			o.Value = cmp.Or(o.Value, log[[2]int{o.Process, o.ID}])
			if o.Value == 0 {
				continue // it did not reach the source
			}
		case isInvalidation(o) && o.Result == resultOK:
			o.Value = versionAt(ops, o)
			if o.Name == opExpire && !windows {
				o.Name = opDelete // the same, without windows
			}
		case isRead(o) && !haunting[o.Value]:
			o.Begin = sharedSince(ops, o)
			o.Stale = o.Stale || isBare(o) && windows
		default:
			continue
		}
		out = append(out, o)
	}
	return out
}

// asNear selects what checkFloors is to say of the reads of one process whose caches have Near. Each
// invalidation of another process takes effect MaxLag after it has returned. An old value that
// replaced an error may be older: memory may have it from before Redis could not be asked.
// GetOrLoadMany does not tell whether a value did.
func asNear(ops []op, process int, maxLag time.Duration, windows, faults bool,
	log map[[2]int]int64) (out []op) {
	for _, o := range asFloors(ops, windows, log) {
		switch {
		case isRead(o) && (o.Process != process || faults && (o.Fallback || o.Name == opGetOrLoadMany && windows)):
			continue
		case isInvalidation(o) && o.Process != process:
			o.End += maxLag.Nanoseconds()
		}
		out = append(out, o)
	}
	return out
}

// versionAt returns the version that the source was known to have when o began. A load that begins
// after o returns at least that version.
func versionAt(ops []op, o op) int64 {
	v := o.Value
	for _, c := range ops {
		if c.Name == opChange && c.End < o.Begin {
			v = max(v, c.Value)
		}
	}
	return v
}

// sharedSince returns the time at which a read counts as begun. While Redis cannot be asked,
// callers share the load that is in flight in their process, however old it is; such reads count as
// begun with the load.
func sharedSince(ops []op, read op) int64 {
	since := read.Begin
	for _, l := range ops {
		if l.Name != opLoad || l.Process != read.Process || l.Result != "" && !sameValue(l, read) {
			continue
		}
		if l.Marks[markProved] != 0 {
			continue
		}
		end := int64(never) // the process died before it reported the result
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

// ofKey returns the ops of one key.
func ofKey(ops []op, key int) (of []op) {
	for _, o := range ops {
		if o.Key == key {
			of = append(of, o)
		}
	}
	return of
}

// loadsAlone returns an error if two loads of the key ran at once although no write had superseded
// one of them since their calls began: a load may have held the lock since then.
func loadsAlone(ops []op) error {
	var loads, invalidations []op
	begun := make(map[[2]int]int64)
	for _, o := range ops {
		begun[[2]int{o.Process, o.ID}] = o.Begin
		switch {
		case o.Name == opLoad:
			loads = append(loads, o)
		case isInvalidation(o):
			invalidations = append(invalidations, o)
		}
	}
	for i, first := range loads {
		for _, second := range loads[i+1:] { // which began later
			if !first.overlaps(second) {
				continue
			}
			superseded := false
			since := min(begun[[2]int{first.Process, first.Of}], begun[[2]int{second.Process, second.Of}])
			for _, b := range invalidations {
				superseded = superseded || b.Begin <= second.Begin && since <= b.End
			}
			if !superseded {
				return fmt.Errorf("two loads at once, of processes %d and %d, begun at %d and %d",
					first.Process, second.Process, first.Begin, second.Begin)
			}
		}
	}
	return nil
}
