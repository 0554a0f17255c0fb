package read

import (
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/near"
	"github.com/singlefill/singlefill/internal/value"
)

// An ask is a key of a call.
type ask struct {
	Key           string
	*value.Lookup // what a read has found under the key
	turn          flight.Turn[value.Lookup]
	state         state
	by            by
	wait          *flight.Waiter[fill.Result] // nil: the call has joined no fill
	memory        *near.Copy                  // what memory has, if it is to be refreshed

	value any // which the call returns, or err
	err   error
}

// A state is how far a call has come with an ask. Only the goroutine of the call sets it.
type state int8

const (
	missed   state = iota // nothing is found yet: it is to join a fill
	reading               // its key is being read
	found                 // its read is a hit, to be answered
	joined                // it waits for a fill
	answered              // value and err are set
)

// by tells which call has read the key of an ask.
type by int8

const (
	none       by = iota
	self          // the call
	other         // another call
	background    // another goroutine, for this call and others
)

func newAsks(keys []string) []*ask {
	all, asks := make([]ask, len(keys)), make([]*ask, len(keys)) // two allocations
	for i, key := range keys {
		asks[i] = &all[i]
		asks[i].reset(key)
	}
	return asks
}

// Turn lets Reads have the turn.
func (a *ask) Turn() *flight.Turn[value.Lookup] { return &a.turn }

// nothing is what a call has found that has not looked.
var nothing value.Lookup

func (a *ask) reset(key string) {
	*a = ask{}
	a.Key, a.Lookup = key, &nothing
}

// look gives asks that are to be read something to read into.
func look(asks []*ask) {
	all := make([]value.Lookup, len(asks))
	for i, a := range asks {
		all[i].Key = a.Key
		a.Lookup = &all[i]
	}
}

// those returns the asks for which is returns true. Mostly all are equal: then it allocates nothing.
func those(asks []*ask, is func(a *ask) bool) []*ask {
	n := 0
	for _, a := range asks {
		if is(a) {
			n++
		}
	}
	if n == len(asks) {
		return asks
	}
	some := make([]*ask, 0, n)
	for _, a := range asks {
		if is(a) {
			some = append(some, a)
		}
	}
	return some
}

func lookups(asks []*ask) []*value.Lookup {
	all := make([]*value.Lookup, len(asks))
	for i, a := range asks {
		all[i] = a.Lookup
	}
	return all
}

func waits(asks []*ask) []*flight.Waiter[fill.Result] {
	all := make([]*flight.Waiter[fill.Result], len(asks))
	for i, a := range asks {
		all[i] = a.wait
	}
	return all
}
