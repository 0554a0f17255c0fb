package lock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// An attempt is one call of Acquire.
type attempt struct {
	*ticket
	begun   time.Time
	pauses  int
	queued  bool // there may be a place in a queue to leave
	inDoubt bool // a command was not answered, and may still arrive
}

const (
	firstPause = 2 * time.Millisecond
	maxPause   = 100 * time.Millisecond
)

func (a *attempt) run(ctx context.Context, wait bool) (*Lease, error) {
	backoff, ahead := firstPause, int64(-1)
	for {
		r, sent, err := a.insist(ctx, wait)
		switch {
		case err != nil:
			return nil, a.explain(ctx, err)
		case r.state == held:
			return &Lease{ticket: a.ticket, fence: r.number, taken: sent}, nil
		case r.state == otherSize:
			return nil, fmt.Errorf("lock: size of %.100q is %d here, and %d with those who hold it", a.name, a.kind.(semaphore).size, r.number)
		case r.state != busy:
			return nil, fmt.Errorf("lock: acquire %.100q: unexpected state %q", a.name, r.state)
		case !wait:
			return nil, ErrBusy
		}
		if r.ahead != ahead { // the queue has moved: the holders are quick
			backoff, ahead = firstPause, r.ahead
		}
		a.pauses++
		if !client.Sleep(ctx, a.pause(backoff, r)) {
			return nil, fmt.Errorf("%w: %w", ErrBusy, ctx.Err())
		}
		backoff = min(2*backoff, maxPause)
	}
}

// pause returns how long to sleep before asking again: about backoff, and longer for those far back in a queue,
// but not past the time at which the holder's lease ends, nor so long that a place in the queue could be lost.
func (a *attempt) pause(backoff time.Duration, r reply) time.Duration {
	d := backoff * time.Duration(1+min(r.ahead, 20))
	d = time.Duration(float64(d) * (0.5 + rand.Float64()))
	left := time.Duration(min(r.number, int64(time.Hour/time.Millisecond))) * time.Millisecond
	d = min(d, left+time.Millisecond+rand.N(4*time.Millisecond))
	if a.kind.queues() {
		d = min(d, a.opts.WaiterTTL/3)
	}
	return d
}

// insist asks until there is a reply, for as long as one command may take.
func (a *attempt) insist(ctx context.Context, wait bool) (r reply, sent time.Time, err error) {
	r, err = client.Insist(ctx, a.opts.RedisTimeout, client.Unreachable, func(within time.Duration) (reply, error) {
		sent = time.Now()
		a.queued = a.queued || wait
		r, err := a.kind.acquire(ctx, a.ticket, within, wait)
		a.inDoubt = a.inDoubt || mayHaveArrived(err)
		return r, err
	})
	return r, sent, err
}

// mayHaveArrived reports whether a command that failed may have reached the server, or still reach it.
func mayHaveArrived(err error) bool {
	if err == nil {
		return false
	}
	var reply redis.Error
	var op *net.OpError
	switch {
	case errors.As(err, &reply) || errors.Is(err, redis.ErrClosed) || errors.Is(err, redis.ErrPoolTimeout):
		return false
	case errors.As(err, &op) && op.Op == "dial":
		return false
	}
	return true
}

// explain says what a failed command means to the caller.
func (a *attempt) explain(ctx context.Context, err error) error {
	switch {
	case a.inDoubt && a.sent.Load():
		return fmt.Errorf("%w: acquire %.100q: %w", ErrAmbiguous, a.name, cmp.Or(ctx.Err(), err))
	case a.inDoubt:
		return fmt.Errorf("%w: acquire %.100q: %w", ErrUnavailable, a.name, cmp.Or(ctx.Err(), err))
	case ctx.Err() != nil: // perhaps in the pause after a refusal, which says nothing of others
		return fmt.Errorf("%w: acquire %.100q: %w: %w", ErrUnavailable, a.name, ctx.Err(), err)
	}
	return explain("acquire", a.name, err)
}

// leave cleans up behind an attempt that ends without a lease: a place in a queue, and what a command that was
// not answered may have taken, or may still take.
func (a *attempt) leave(ctx context.Context) {
	if a.inDoubt || a.queued && a.kind.queues() {
		a.giveUp(client.Detach(ctx))
	}
}
