package client

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Breaker spares callers the wait for a server that does not answer. After Limit failures in a row it
// opens; then it asks by itself, in the background, until there is an answer, so that no caller is spent on
// trying. A command whose caller has left counts by its own outcome, never by the caller's impatience.
type Breaker struct {
	failures   atomic.Int64 // in a row
	open       atomic.Bool
	last       atomic.Pointer[error]
	probe      func() error
	every      time.Duration
	changed    func(open bool)
	background func(run func(closing <-chan struct{}))
}

// Limit is how many failures in a row open a Breaker.
const Limit = 5

// Check returns an error, without any asking, while the breaker is open.
func (b *Breaker) Check() error {
	if !b.open.Load() {
		return nil
	}
	return fmt.Errorf("redis does not answer: %w", *b.last.Load())
}

// Open reports whether the breaker is open.
func (b *Breaker) Open() bool { return b.open.Load() }

func (b *Breaker) succeeded() {
	if b.failures.Load() != 0 {
		b.failures.Store(0)
	}
}

func (b *Breaker) noteFailure(err error) {
	b.last.Store(&err)
	if b.failures.Add(1) >= Limit && b.open.CompareAndSwap(false, true) {
		b.changed(true)
		b.background(b.recover)
	}
}

// recover probes until the server answers, in any way, and closes the breaker then. It gives up when its
// owner closes, or when the user has closed the client.
func (b *Breaker) recover(closing <-chan struct{}) {
	tick := time.NewTicker(b.every)
	defer tick.Stop()
	for {
		select {
		case <-closing:
			return
		case <-tick.C:
		}
		err := b.probe()
		if errors.Is(err, redis.ErrClosed) {
			return
		}
		if !Unreachable(err) {
			b.failures.Store(0)
			b.open.Store(false)
			b.changed(false)
			return
		}
	}
}
