package flight

import (
	"math"
	"sync/atomic"
)

// A Stamp is a point in the order of events of one cache: a caller arrives, a command is sent, a
// load begins. The zero Stamp precedes all others.
type Stamp int64

// Always follows every other Stamp: every caller may take a result that is valid from Always.
const Always Stamp = math.MaxInt64

// A Clock counts Stamps. Times would not do, since two readings of a clock can be equal.
type Clock struct{ last atomic.Int64 }

// Now returns a stamp that follows all stamps returned before. To learn what a command proves, take
// the stamp before the command is sent.
func (c *Clock) Now() Stamp { return Stamp(c.last.Add(1)) }
