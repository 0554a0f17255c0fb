// Package fill brings the values of keys that callers have not found: a fill waits for the value that another
// process stores, or loads it and stores it.
//
// The fills that a call begins are a [set]. It is in one [phase] after the other, each of which has what only that
// phase needs: it asks Redis ([asking]) and follows the answers ([answered]), pauses or queues until it asks again
// ([pausing], [queueing]), loads ([loading]), and stores ([storing]). What an answer of Redis means for a fill is
// decided by a function without effects (decide). The fills of a set go together while they are in the same phase:
// where they part, some become another set. A set goes on in another goroutine if the goroutine of its Loader does not
// come back: after a panic or runtime.Goexit, and at LoadTimeout. A panic or runtime.Goexit of another function of the
// user ends the fills of the set.
package fill

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/revoke"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
)

// Parts are what a Filler is made of.
type Parts struct {
	Client  *client.Client
	Store   *value.Store
	Tags    *tags.Index // nil: no value has tags
	Fills   *flight.Fills[Result]
	Slots   *flight.Slots
	User    User
	Events  *event.Sink
	Keys    *revoke.Keys
	Closing <-chan struct{}

	LockTTL     time.Duration
	LoadTimeout time.Duration
	RetryAfter  time.Duration // 0: off
	FailureTTL  time.Duration // 0: off
	LoadMany    Loader        // of refreshes; nil: the Loader of the call
	MaxBatch    int
}

// refreshes gathers what calls find due within a moment, for Options.LoadMany.
type refreshes struct {
	mu  sync.Mutex // before Fills.mu
	ctx context.Context
	due []*value.Lookup // empty: no goroutine is about to refresh
}

// A Filler begins and runs the fills of one cache.
type Filler struct {
	Parts
	times     *wait.Times
	refreshes refreshes
}

func New(p Parts) *Filler { return &Filler{Parts: p, times: wait.NewTimes()} }

// A Source is from where fills load.
type Source struct {
	Loader Loader
	Anew   bool // load although the key holds a value, unless a newer value arrives; and not without Redis
}

func (f *Filler) closed() bool {
	select {
	case <-f.Closing:
		return true
	default:
		return false
	}
}

// abandon gives up an attempt to lock of which a command was not answered, or whose release was
// refused. Otherwise it could keep the lock without a load. It tries until Redis answers; what Redis
// refuses, until the lock has expired. The first command is sent also while the breaker is open: a frozen
// server executes it as soon as it goes on. When the cache is closed it tries once more.
func (f *Filler) abandon(ctx context.Context, lock filllock.Lock) {
	for end := time.Now().Add(f.LockTTL); ; {
		closed := f.closed()
		late := time.Until(lock.Late())
		switch _, err := lock.Abandon().Do(ctx, f.Client.Timeout); {
		case closed || errors.Is(err, redis.ErrClosed):
			return
		case err == nil && late > 0: // the breaker has opened before: the command may overtake this one
			f.pauseFor(late)
			continue
		case err == nil:
			return
		case client.Unreachable(err):
			end = time.Now().Add(f.LockTTL)
		case time.Now().After(end):
			return
		}
		f.pauseUntilBack(lock.Keys.Lock)
	}
}

// pauseUntilBack pauses, at least for as long as the breaker of key's node is open. Close ends it, of the cache or
// of the client.
func (f *Filler) pauseUntilBack(key string) {
	for away := true; away && !f.closed(); away = f.Client.Away(key) && !f.Client.Gone() {
		f.pauseFor(wait.MaxPause)
	}
}

// pauseFor pauses until the cache is closed.
func (f *Filler) pauseFor(d time.Duration) {
	select {
	case <-f.Closing:
	case <-time.After(d):
	}
}
