// Package lock has a mutex, a first-come-first-served mutex and a counting semaphore for a fleet of processes, on
// one Redis.
//
//	cron, err := lock.NewMutex(rdb, "nightly-report", nil)
//	...
//	err = cron.Do(ctx, func(ctx context.Context) error { return report(ctx) })
//
// # Which one do I want
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
// A lease is held until it is released, or ends: TTL after it was last renewed, by the server's clock. It is
// renewed at a third of that, in the background, so TTL is no bound on the work; it is how long the others wait
// when a holder dies. Lease.Context ends before the lease does: stop then.
//
// # Efficiency or correctness
//
// A lease keeps work from being done twice. It does not exclude it: a process that is frozen, or held up by its
// own scheduler, goes on after its lease has ended, and finds out afterwards; and Redis may lose what it has
// granted. If doing it twice does harm, let the resource itself refuse the late one: each grant has a larger
// Lease.Fence than those before, and the resource keeps the largest it has seen.
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
// all have released, what is left are the last fence, for a day, and, for a little more than TTL, a mark for each
// release, by which a repeated or late command is recognised.
package lock
