package client

import (
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// A clock is the clock of a server as it was last seen.
type clock struct {
	begun time.Time
	ahead atomic.Int64 // of the time since begun, in µs; 0: not known
	seen  atomic.Int64 // when, in ns since begun

	mu     sync.Mutex
	glance *glance // that is on its way, or nil; protected by mu
}

// lookAgain is how long what is known of a clock is relied on. A clock that is being adjusted runs by
// 0.05 % too fast or too slow at most, which is 0.3 s in this time.
const lookAgain = 10 * time.Minute

func (k *clock) known() bool {
	return k.ahead.Load() != 0 && time.Since(k.begun)-time.Duration(k.seen.Load()) < lookAgain
}

// see notes the time of the server, in µs, in a reply that has just arrived.
func (k *clock) see(micros int64) {
	now := time.Since(k.begun)
	k.ahead.Store(micros - now.Microseconds())
	k.seen.Store(int64(now))
}

// at returns what the server's clock, in µs, shows at a time of this process, or a little less: the time
// in a reply is of before the reply arrived. So a command that is given this time is never executed for a
// caller that has left by then. Nor is a command refused whose reply would have come in time, unless that
// reply were quicker than the reply that brought the time; then the refusal brings a better time.
func (k *clock) at(t time.Time) int64 {
	ahead := k.ahead.Load()
	if ahead == 0 { // the server refuses to tell
		return math.MaxInt64 / 2
	}
	return t.Sub(k.begun).Microseconds() + ahead
}

// A glance is a command that asks for the time.
type glance struct {
	over chan struct{} // closed when err is set
	err  error
}

// errNoTime is the outcome of a question that Trace.RedisError has left by runtime.Goexit.
var errNoTime = errors.New("the time of the server is not known")

// look asks for the time. Commands that need it at the same time share one question. A singleflight.Group would never
// tell them of a question that has ended by runtime.Goexit.
func (k *clock) look(ask func() (micros int64, err error)) *glance {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.glance != nil {
		return k.glance
	}
	g := &glance{over: make(chan struct{})}
	if k.known() { // since the caller has looked
		close(g.over)
		return g
	}
	k.glance = g
	go func() {
		g.err = errNoTime
		defer func() {
			k.mu.Lock()
			k.glance = nil
			k.mu.Unlock()
			close(g.over)
		}()
		var now int64
		if now, g.err = ask(); now != 0 && g.err == nil {
			k.see(now)
		}
	}()
	return g
}
