package client

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Breaker spares callers the wait for a server that does not answer. It opens after Limit failures in a row
// if there has been no answer for as long as a command may take: quick failures alone, as of a server that is
// just being restarted, cost nobody anything. Then it asks by itself, in the background, until there is an
// answer, so that no caller is spent on trying. A command whose caller has left counts by its own outcome,
// never by the caller's impatience.
//
// There is one for all nodes of a Cluster: an answer of any keeps it closed.
type Breaker struct {
	failures   atomic.Int64 // in a row
	since      atomic.Int64 // when the first of them was sent, Unix ns
	answers    atomic.Int64
	open       atomic.Bool
	last       atomic.Pointer[error]
	probe      func() error
	every      time.Duration // also how long there must have been no answer
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

// Answers counts the commands that the server has answered: one that grows shows a server that is there.
func (b *Breaker) Answers() int64 { return b.answers.Load() }

func (b *Breaker) succeeded() {
	b.answers.Add(1)
	if b.failures.Load() != 0 {
		b.failures.Store(0)
	}
}

func (b *Breaker) noteFailure(sent time.Time, err error) {
	b.last.Store(&err)
	n := b.failures.Add(1)
	if n == 1 {
		b.since.Store(sent.UnixNano())
	}
	silent := time.Since(time.Unix(0, b.since.Load()))
	if n >= Limit && silent >= b.every && b.open.CompareAndSwap(false, true) {
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
		select {
		case <-closing: // a probe may take as long as the tick, so that both are always ready
			return
		default:
		}
		err := b.probe()
		if errors.Is(err, redis.ErrClosed) {
			return
		}
		if !Unreachable(err) {
			b.failures.Store(0)
			b.changed(false)
			b.open.Store(false)
			return
		}
	}
}
