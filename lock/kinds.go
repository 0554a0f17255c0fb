package lock

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/singlefill/singlefill/internal/client"
)

// A kind is what a mutex, a fair mutex and a semaphore do differently. Each step is one script.
type kind interface {
	acquire(ctx context.Context, o *owner, within time.Duration, r request) (reply, error)
	renew(ctx context.Context, o *owner, sent *time.Time) (held bool, err error)
	release(ctx context.Context, o *owner, within time.Duration) (released client.Reply[bool])
	abandon(ctx context.Context, o *owner) error
	queues() bool // waiters have places in a queue
	places() int  // how many may hold it
}

// A mutex is a key that holds the token of the holder.
type mutex struct{}

func (mutex) acquire(ctx context.Context, o *owner, within time.Duration, r request) (reply, error) {
	reserved, since, waiting := o.waits(r)
	return o.runAcquire(ctx, within, mutexAcquire, []string{o.keys.reservation, o.keys.waiting, o.keys.queue}, reserved, since, waiting)
}

func (mutex) renew(ctx context.Context, o *owner, sent *time.Time) (bool, error) {
	return o.runRenew(ctx, sent, mutexRenew, []string{o.keys.lock, o.keys.ended})
}

func (mutex) release(ctx context.Context, o *owner, within time.Duration) client.Reply[bool] {
	return o.runRelease(ctx, within, mutexRelease, o.keys.lock, o.keys.ended, o.keys.reservation, o.keys.waiting, o.keys.fence)
}

func (mutex) abandon(ctx context.Context, o *owner) error {
	return o.runAbandon(ctx, mutexAbandon, o.keys.lock, o.keys.ended, o.keys.reservation, o.keys.waiting, o.keys.fence)
}

func (mutex) queues() bool { return false }
func (mutex) places() int  { return 1 }

// A fair mutex is a mutex behind a queue. The holder is not in the queue.
//
// Each process with waiters has a time until which it counts as alive. That time has a fraction, which is
// the life of the process, so that a clock that is set back does not keep a dead one in the queue. See
// TestNewFairMutex_DeadWaiterAndClockPutBack.
//
// A waiter of a fair mutex has a number, not a time of arrival. Two waiters can arrive in one
// microsecond, and a clock can be set back. See TestNewFairMutex_OrderInOneProcess.
type fair struct{ mutex }

func (fair) acquire(ctx context.Context, o *owner, within time.Duration, r request) (reply, error) {
	enqueue := 0
	if r.enqueue {
		enqueue = 1
	}
	args := append(make([]any, 0, 2+len(r.others)), o.opts.WaiterTTL.Milliseconds(), enqueue)
	for _, token := range r.others {
		args = append(args, token)
	}
	reply, err := o.runAcquire(ctx, within, fairAcquire, []string{o.keys.queue, o.keys.alive}, args...)
	places := reply.expired
	reply.expired = nil
	if reply.state == held && len(places) > 0 {
		if places[0] != "" {
			reply.expired = places[:1]
		}
		places = places[1:]
	}
	for _, place := range places {
		n, _ := strconv.ParseInt(place, 10, 64) // otherwise the attempt finds out when it asks itself
		reply.places = append(reply.places, n)
	}
	return reply, err
}

func (fair) release(ctx context.Context, o *owner, within time.Duration) client.Reply[bool] {
	return o.runRelease(ctx, within, fairRelease, o.keys.lock, o.keys.ended, o.keys.queue, o.keys.fence)
}

func (fair) abandon(ctx context.Context, o *owner) error {
	return o.runAbandon(ctx, fairAbandon, o.keys.lock, o.keys.ended, o.keys.queue, o.keys.alive, o.keys.fence)
}

func (fair) queues() bool { return true }

// A semaphore is a set of holders, each with the end of its lease. While processes disagree on the size,
// the largest one counts.
type semaphore struct{ size int }

func (s semaphore) acquire(ctx context.Context, o *owner, within time.Duration, r request) (reply, error) {
	reserved, since, waiting := o.waits(r)
	keys := []string{o.keys.reservation, o.keys.waiting, o.keys.details}
	return o.runAcquire(ctx, within, semaphoreAcquire, keys, reserved, since, waiting, s.size)
}

// renew prolongs a lease.
//
// A renewal prolongs the time for which the size of a semaphore counts. Processes may hold their
// places for as long as they live. If only grants counted, processes with the smaller size would
// find no place beside them. A grant to a process with a larger size wakes a waiter, as a release
// does: its size may be the smaller one. See TestSemaphoreScripts and TestNewSemaphore_LargerSizeWakesWaiter.
func (s semaphore) renew(ctx context.Context, o *owner, sent *time.Time) (bool, error) {
	return o.runRenew(ctx, sent, semaphoreRenew, []string{o.keys.lock, o.keys.ended, o.keys.details}, s.size)
}

func (semaphore) release(ctx context.Context, o *owner, within time.Duration) client.Reply[bool] {
	return o.runRelease(ctx, within, semaphoreRelease, o.keys.lock, o.keys.ended, o.keys.reservation, o.keys.waiting, o.keys.details)
}

func (semaphore) abandon(ctx context.Context, o *owner) error {
	return o.runAbandon(ctx, semaphoreAbandon, o.keys.lock, o.keys.ended, o.keys.reservation, o.keys.waiting, o.keys.details)
}

func (semaphore) queues() bool  { return false }
func (s semaphore) places() int { return s.size }

// waits returns the lives in ms of what the request asks for, a reservation and a place among the
// waiters that a release wakes, and since when its process has been waiting.
func (o *owner) waits(r request) (reserved int64, since string, waiting int64) {
	if r.reserves {
		reserved = o.reservationLife()
	}
	if r.waitingSince != 0 {
		since = fmt.Sprintf("%020d", r.waitingSince)
	}
	if r.listens {
		waiting = waitingLife.Milliseconds()
	}
	return reserved, since, waiting
}
