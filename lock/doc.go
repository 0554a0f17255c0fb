// Package lock provides a mutex, a first-come-first-served mutex and a counting semaphore for a
// fleet of processes that share one Redis.
//
//	index, err := lock.NewMutex(rdb, "search index", nil) // sends nothing
//	...
//	err = index.Do(ctx, func(ctx context.Context) error {
//		return write(ctx) // one process at a time; it has to stop when ctx ends
//	})
//
// # Which one to choose
//
// [Locker.Do] is what most callers want. [Locker.Acquire] and [Locker.TryAcquire] are for a lease
// that outlives a function.
//
//	one holder at a time, in any order          NewMutex
//	one holder at a time, in order of arrival   NewFairMutex: its waiters ask more often
//	n holders at a time                         NewSemaphore
//	do it unless another caller is doing it     any kind, with TryAcquire: ErrBusy means no
//	load a value once for the whole fleet       none: singlefill.Cache.GetOrLoad
//	within one process                          none: sync.Mutex, golang.org/x/sync/semaphore
//	correct even if Redis loses data            none: a transaction, a unique index, compare-and-set
//
// # Leases
//
// A [Lease] is held until it is released or ends. By the server's clock, it ends [Options.TTL]
// after its last renewal. It is renewed in the background at a third of TTL, so TTL does not bound
// the work: it bounds how long waiters wait after a holder has died. [Options.MaxHold] bounds a
// holder that hangs but is alive.
//
// Locks are not reentrant: a holder of a mutex that acquires it again waits for itself.
//
// # When a lease is lost
//
// The context that Do passes to its function, and [Lease.Context], end with a cause that is [ErrLost] by
// errors.Is, and says of which lock and why:
//
//   - at the next renewal, when Redis has lost the lease;
//   - a twentieth of TTL before another caller can hold it, when Redis could not be asked in time
//     or MaxHold is over.
//
// The holder has to stop then. The next holder may repeat its work, which has to tolerate that.
//
// # Errors
//
// Tell them apart with errors.Is:
//
//   - [ErrBusy]: another caller holds the lock or is ahead in its queue. TryAcquire returns it at
//     once; Acquire and Do return it together with ctx.Err() when ctx ends.
//   - [ErrLost], from Do and Release: the lease ended before it was released. Another holder may have
//     worked at the same time.
//   - [ErrUnavailable]: Redis cannot answer, or cannot write now, or ctx ended before it could be asked.
//     Nothing was granted. A Redis whose last command has failed is never reported as ErrBusy.
//   - [ErrAmbiguous]: a command was sent and not answered. The caller holds nothing. What the server
//     may have granted is given back in the background, or ends after TTL.
//   - [ErrNotReleased], from Do: its function has run, and the lease could not be given back.
//   - [ErrConflict]: a lock of another kind, or some other data, uses this name.
//   - Any other error: a setting has to change, for example a missing permission.
//
// After its function has run, Do returns that function's error, unchanged, ErrLost or ErrNotReleased.
//
// # Who holds it
//
// The name of a holder, [Options.Holder], is in the text of ErrBusy, in [Trace] of its waiters and in the
// output of the command singlefill locks. A caller that finds that the lease of another one ended without a
// release, because its process was killed for example, reports it to [Trace].Expired. The page
// docs/operate.md of this module says how to break a lock by hand.
//
// # Efficiency or correctness
//
// A lease keeps work from being done twice, but cannot guarantee it: a frozen or stalled
// process continues after its lease has ended and notices afterwards, and Redis may lose what it
// has granted. If duplicate work does harm, let the resource itself reject the late holder: each
// grant has a larger [Lease.Fence] than all grants before it, and the resource keeps the largest it
// has seen. The holders of a semaphore are not late when their fence is smaller; there, a fence
// only tells them apart.
//
// # What one Redis can promise
//
// While the server keeps its data, a mutex never has two holders and a semaphore never has more
// than size holders, by the server's clock. While processes have different sizes, the largest one counts. Leases are
// lost by a failover to a lagging replica, a restart without persistence, an eviction and a FLUSHALL. Their holders
// learn it at the next renewal; other processes may hold the lock before that. Give locks a Redis whose
// maxmemory-policy is noeviction. This is not Redlock, and more servers do not make it safer.
//
// # Without Redis
//
// A Locker needs a Redis. A program for which Redis is optional calls its locks through an interface
// that has the method Do. Behind it is a Locker, or for the goroutines of one process a channel: see the
// example of [Locker.Do].
//
// # Rights
//
// With an ACL a lock named n needs
//
//	~{n}:lock* +get +set +del +exists +pexpire +pexpireat +pttl +time +ping +eval +evalsha
//	+zadd +zrem +zscore +zrank +zcard +zcount +zrange +zrangebyscore +zremrangebyscore
//	+zremrangebyrank +zpopmin +hget +hset +hdel +hlen
//
// A category such as +@keyspace would add FLUSHALL and KEYS, which no key pattern restricts.
// [Locker.Check] names what Redis refuses. A release wakes a waiter by a message if the user also has
//
//	&{n}:lock:* +spublish +ssubscribe +sunsubscribe
//
// before Redis 7 +publish +subscribe +unsubscribe. Without these rights, and while messages get lost, waiters poll.
//
// # Keys
//
// The lock named n uses the key {n}:lock and keys that begin with {n}:lock, all in one slot. Each
// key has a TTL. Waiters listen on channels whose names begin with {n}:lock, over one connection for
// all locks of the process on a server; it is closed ten seconds after the last wait. After all leases have been
// released, two things remain:
//
//   - the last fence, for a day, some 200 bytes for each name; after a holder that did not release a mutex,
//     with its token;
//   - marks of some hundred ended attempts, which make repeated and late commands harmless. A mark
//     lives for TTL, at most a minute, and 2 × RedisTimeout, or twice as long if a command was not answered.
//
// A command to acquire that arrives even later than its mark lives may be granted although no
// caller waits for it. That lease ends after TTL.
package lock
