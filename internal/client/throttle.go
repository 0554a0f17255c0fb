package client

import (
	"time"

	"github.com/singlefill/singlefill/internal/line"
)

// A throttle is the gate of pipelines of many keys, so that a process does not overload its own server. A server takes
// some 10 µs for a script, and executes the scripts of all connections one after the other: a pipeline of 256 on each
// connection of a pool kept it busy for 50 ms. On a busy machine, or for several processes, that took longer than
// RedisTimeout. Then loads go on without their locks, and are not stored: the next stampede.
//
// A throttle begins with two places. It gets one more with each reply that is quick, while other pipelines wait, and
// loses half of them with each that is slow: see [group], which adapts its lengths by the same rule. BenchmarkMany has
// shown that with two places no lock is lost, and commands of other clients have to wait little; with eight, that is
// not so.
//
// A pipeline that stores values or renews locks goes first: while it waits, its locks have to be renewed, which is
// more work. A pipeline of a few keys does not wait here: on all connections they have as many keys as one long
// pipeline. See TestThrottle_Places, TestThrottle_Order, TestSet_LoadsItsOwnServer.
type throttle struct {
	gate
	places int // that may be taken, since the others count as taken; protected by mu
}

const (
	firstPlaces = 2
	fewKeys     = 16
)

func newThrottle(size int, l *line.Line) *throttle {
	t := &throttle{gate: gate{size: uint64(size), line: l}, places: min(firstPlaces, size)}
	t.state.Store(uint64(size - t.places))
	return t
}

// leave makes room for the next pipelines. The last one has taken a part of its timeout.
func (t *throttle) leave(answered bool, took, timeout time.Duration) {
	t.mu.Lock()
	free := max(0, int(t.size)-int(taken(t.state.Load())))
	places := min(int(t.size), adapted(t.places, t.places-free, t.places+1, firstPlaces, share(answered, took, timeout)))
	t.state.Add(uint64(t.places - places))
	t.places = places
	t.mu.Unlock()
	t.gate.leave(answered)
}
