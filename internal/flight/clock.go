package flight

import (
	"math"
	"sync/atomic"
)

// A Stamp is a point in the order of what happens in one cache: callers arriving, commands being sent, loads beginning.
// The zero Stamp precedes all others.
type Stamp int64

// Always follows every other Stamp: all callers may take a result that is true as of Always.
const Always Stamp = math.MaxInt64

// A Clock counts Stamps. Times would not do: two readings can be equal.
type Clock struct{ last atomic.Int64 }

// Now returns a stamp that follows all those returned before. To learn what a command proves, take it before the
// command is sent.
func (c *Clock) Now() Stamp { return Stamp(c.last.Add(1)) }
