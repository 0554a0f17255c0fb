package histories

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// The lock threads of a process.

// kinds are the kinds of locks, with their sizes.
var kinds = map[string]int{"mutex": 1, "fair": 1, "semaphore 2": 2, "semaphore 3": 3}

func (x *process) locker(p plan) *lock.Locker {
	opts := &lock.Options{
		TTL: x.Timeouts.TTL, WaiterTTL: x.Timeouts.TTL, RedisTimeout: x.Timeouts.RedisTimeout,
		Trace: &lock.Trace{
			RedisError: func(_ context.Context, op string, err error) { x.trouble(op, err) },
			Renewed: func(ctx context.Context, _ lock.LeaseInfo) {
				c := callOf(ctx)
				c.mark(markRenewed, c.sent.Load())
				c.mark(markRenewal, c.before.Load())
			},
		},
	}
	name, _, _ := strings.Cut(p.Of, " ")
	l, err := locktest.Kind{Name: name, Size: kinds[p.Of]}.Open(x.rdb, "lock "+p.Name, opts)
	must(err)
	return l
}

func (x *process) lockThread(p plan) func(rng *rand.Rand, _ bool) {
	locker := x.locker(p)
	return func(rng *rand.Rand, _ bool) {
		c, lease := x.acquire(p, rng, locker)
		if lease == nil {
			return
		}
		hold := upTo(rng, p.Pause)
		if p.LongHolds && rng.IntN(12) == 0 {
			hold = x.Timeouts.TTL * 3 / 2
		}
		time.Sleep(hold)
		x.release(p, c, lease)
	}
}

func (x *process) acquire(p plan, rng *rand.Rand, locker *lock.Locker) (c *call, lease *lock.Lease) {
	var err error
	if rng.IntN(4) == 0 {
		c = x.begin(p, opTryAcquire, 0, 0)
		lease, err = locker.TryAcquire(c.context())
	} else {
		c = x.begin(p, opAcquire, 0, 0)
		ctx, cancel := context.WithCancel(c.context())
		defer cancel()
		if rng.IntN(6) == 0 {
			defer time.AfterFunc(upTo(rng, 3*p.Pause), cancel).Stop()
		}
		lease, err = locker.Acquire(ctx)
	}
	switch {
	case err == nil:
		c.end(op{Result: resultOK, Value: lease.Fence()})
	case errors.Is(err, context.Canceled):
		c.end(op{Result: resultLeft, Error: err.Error()})
	case errors.Is(err, lock.ErrBusy):
		c.end(op{Result: resultBusy})
	default:
		c.end(op{Result: resultFailed, Error: err.Error()})
		x.trouble("acquire", err)
	}
	return c, lease
}

func (x *process) release(p plan, acquired *call, lease *lock.Lease) {
	c := x.begin(p, opRelease, acquired.id, 0)
	switch err := lease.Release(context.Background()); {
	case err == nil:
		c.end(op{Result: resultOK})
	case errors.Is(err, lock.ErrLost):
		c.end(op{Result: resultLost})
	default:
		c.end(op{Result: resultFailed, Error: err.Error()})
		x.trouble("release", err)
	}
}

// noteCommands is a hook that notes whether an acquire repeats its command, and when the last renewal of its
// lease was sent.
func noteCommands(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	c := callOf(ctx)
	// A new connection sends HELLO first.
	if c == nil || !c.asks || !strings.HasPrefix(cmd.Name(), "eval") {
		return next(ctx, cmd)
	}
	if cmd.Name() != "eval" { // which follows an EVALSHA that the server did not know
		c.before.Store(c.over.Load())
	}
	if c.once && c.before.Load() != 0 && !c.ended.Load() {
		c.mark(markAgain, now())
	}
	c.sent.Store(now())
	defer func() { c.over.Store(now()) }()
	return next(ctx, cmd)
}
