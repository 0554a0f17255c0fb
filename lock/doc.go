// Package lock has a mutex, a first-come-first-served mutex and a counting semaphore for a fleet of processes, on
// one Redis.
//
//	index, err := lock.NewMutex(rdb, "search index", nil) // sends nothing
//	...
//	err = index.Do(ctx, func(ctx context.Context) error {
//		return write(ctx) // one process at a time; it has to stop when ctx ends
//	})
//
// # Which one do I want
//
// [Locker.Do] is what most callers want. [Locker.Acquire] and [Locker.TryAcquire] are for a lease that outlives a
// function.
//
//	at most one at a time, whoever comes           NewMutex
//	at most one at a time, in the order of coming  NewFairMutex: dearer, and slower to hand over
//	at most n at a time                            NewSemaphore
//	do it here only if nobody else does            any, with TryAcquire: ErrBusy is the answer no
//	load a value once for the whole fleet          none: singlefill.Cache.GetOrLoad
//	within one process                             none: sync.Mutex, golang.org/x/sync/semaphore
//	correct even if Redis loses data               none: a transaction, a unique index, a compare-and-set
//
// # What a lease is
//
// A [Lease] is held until it is released, or ends: TTL after it was last renewed, by the server's clock. It is
// renewed at a third of that, in the background, so [Options.TTL] is no bound on the work; it is how long the others
// wait when a holder dies. For a holder that hangs, and is alive all the same, there is [Options.MaxHold].
//
// It is not reentrant: whoever holds a mutex and acquires it again waits for itself.
//
// # When a lease is lost
//
// The context that Do gives to its function, and [Lease.Context], end with cause [ErrLost]: at the next renewal when
// Redis has lost the lease, and when it could not be asked in time, or MaxHold is over, a twentieth of TTL before
// anyone else can hold it. Stop then. What was begun may be done again by the next holder; it has to bear that.
//
// # What the errors mean
//
// They are told apart by errors.Is:
//
//   - [ErrBusy]: others hold it, or wait before us. From TryAcquire at once; from Acquire and Do with ctx.Err(),
//     when ctx ends.
//   - [ErrLost], from Do and Release: the lease had ended before it was released. What was done under it was perhaps
//     not done alone.
//   - [ErrUnavailable]: Redis cannot say, or cannot do it now. Nothing was granted. It is never told as busy.
//   - [ErrAmbiguous]: a command was sent and not answered. Nothing is held by the caller; what the server may have
//     granted is given back behind the call, or ends with TTL.
//   - [ErrNotReleased], from Do: its function has run, and the lease could not be given back.
//   - [ErrConflict]: a lock of another kind or size, or something else, has this name.
//   - any other: something to be changed, such as a missing right.
//
// Of these only ErrLost and ErrNotReleased come from Do when its function has run.
//
// # Efficiency or correctness
//
// A lease keeps work from being done twice. It does not exclude it: a process that is frozen, or held up by its
// own scheduler, goes on after its lease has ended, and finds out afterwards; and Redis may lose what it has
// granted. If doing it twice does harm, let the resource itself refuse the late one: each grant has a larger
// [Lease.Fence] than those before, and the resource keeps the largest it has seen. (Of a semaphore's holders the
// earlier ones are not late: there a fence only tells them apart.)
//
// # What one Redis can promise
//
// While the server keeps its memory: never two holders of a mutex, nor more than size of a semaphore, by its
// clock. A failover to a replica that lags, a restart without persistence, an eviction (give locks a Redis whose
// maxmemory-policy is noeviction) or a FLUSHALL loses leases: their holders are told at the next renewal, and
// others may hold them before that. This is not Redlock, and does not become safer by more servers.
//
// # Keys
//
// The lock named n has the key {n}:lock and keys that begin with it, all in one slot. None lives for ever. After
// all have released, what is left are the last fence, for a day, and marks of the attempts that have ended, by which
// a repeated or late command is recognised: the last 500, for TTL or a minute, and twice as long where a command was not
// answered. A command to acquire that arrives even later may be granted for nothing, and ends with TTL.
package lock
