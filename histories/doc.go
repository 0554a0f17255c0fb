// Package histories checks the promises between processes by what processes see. Several OS
// processes make many random calls to one Redis server, each history on one lock name or on up to
// three keys. Each call is recorded with its begin and end on a clock that they share. Then porcupine searches for
// an order of the calls that agrees with a model. If there is none, a promise is broken.
//
// The module is separate, so that users of the library do not depend on porcupine. It has only
// tests. They run with all others, a hundred and some histories of the cache and of the locks each;
// scripts/soak runs thousands, also every night, and can check another copy of the library.
//
// # Time
//
// Each process reads CLOCK_MONOTONIC, which all processes of a machine share, before a call begins
// and after it has returned. The parent, which collects the reports, could do so instead. But each
// microsecond added to a call makes it concurrent with more calls, and so hides more errors. A
// process reports a call before it begins. So the unfinished calls of a killed process are known;
// they may take effect at any later time.
//
// # The cache
//
// The source of truth is a list on a second server, which no fault affects; a version is its
// length. A Loader reads the version and returns it after a while. A write changes the source, and
// then calls Delete, Expire, or Set with the new version. Set is called only where one thread makes
// all writes of a key. If two threads changed the source in one order and called Set in the other,
// the cache would keep the wrong value, though it works correctly.
//
// The outcome of each key of a call for many keys is a separate operation, which begins and ends with
// the call: the keys of a call are neither read nor written in one step. The models are models of one
// key, and each key is judged by itself. What a Clear does, package internal/tests/orders shows.
//
// Model "register": a write, from the change of the source until Delete returns, is one operation,
// and so is a read by GetOrLoad or Get. The operations agree with a register that takes the
// versions in the order of the source. A cache whose source is changed before the cache cannot
// promise more: during a write reads may get the old or the new version. They get the old version
// after the new one only if Redis refused the new one, as below. The model holds while nothing fails
// and no entry is served stale, for these reasons:
//
//   - A stored value was loaded under the lock, and stored under the same grant of the lock. So
//     each entry is at least as new as the entries before it: a later holder read the source later.
//   - A value that was loaded and refused is given only to callers that came before its load began.
//     No call that returned before they came can have got a newer value. A call that comes after
//     them may get an older one until the write is over: the lock was lost during the load, and the
//     next holder has read the source earlier, and stored. So the read of a refused value may take effect
//     after it has returned.
//   - Any other value is a reply of the server to a command that was sent after the call began.
//   - Delete, Set and Expire remove the entry and the lock in one step. A value that is stored
//     afterwards was loaded after the source had changed.
//
// Without faults, two loads of a key do not run at once either, unless a write has superseded one.
//
// Model "floors": a Delete, Set or Expire that returned nil raises a floor to the version that
// the source had when it began. A read that begins later gets no older version. Where stale values may
// be served, the floor of Expire applies only to values that are not stale. Get, GetMany and
// GetOrLoadMany do not tell whether a value is stale, so it does not apply to theirs. The model does
// not order reads: no more is true under faults and within the stale windows, where a process that
// cannot reach the server loads by itself and gets ahead of readers of the entry. So each read is checked by
// itself, without a search, whose time can grow with the factorial of the reads. The model is weaker
// in two cases, which the documentation of the library names:
//
//   - While Redis cannot be asked, callers share the load that is in flight in their process,
//     though a Delete elsewhere may have superseded it. Such reads count as begun with that load.
//     Trace shows these loads: those that ran unlocked, and those whose command to store or release
//     failed. One unanswered command is enough, for example if the process was frozen.
//   - A Set that failed may still be executed, even after a later Delete: its value is allowed.
//
// Model "floors after MaxLag" is for caches with Near. Each process has its own floors: its own
// invalidations raise them when they have returned, invalidations of other processes MaxLag later.
// While there are faults, an old value that replaces an error may be older: when Redis cannot be
// asked, memory may have it from before the Delete. MaxLag is short, so that histories outlast it:
// it must be kept however busy the machine is.
//
// A write that failed, or whose process died, raises no floor. Errors and misses are no values: the
// model does not say when a read must succeed. But a call that never returns fails the test.
//
// # The locks
//
// The model of a mutex, a semaphore of size n and a fair mutex: at most n leases are held; the
// fence grows with each grant; a Release that returned nil was called by a holder; and TryAcquire
// returns busy only if all n leases are held. The model does not judge the order of the waiters of a
// fair mutex, nor whether one of them made it busy: lock/fair_test.go shows the order.
//
// A lease is held from the return of Acquire, or earlier, until Release begins, or later. If
// Release does not return nil, or the process dies, the end is unknown, but not before the TTL has
// passed since the grant or the last renewal: an end at any time would allow everything. The tests
// do not check that the context of a lease ends before another holder can have it. That is promised
// only while the process is not stalled, which on a busy machine it is.
//
// An Acquire that failed, or whose process died, may hold a lease without a known holder. That can
// only keep others out, so it is left out of the history. From then on the model does not judge
// whether TryAcquire was right to return busy.
//
// # Faults
//
// Each process reaches the server through its own proxy, which loses requests and replies, holds
// them, cuts connections, and swallows everything for a while. Connections are killed and scripts
// flushed on the server. Processes are frozen for longer than the TTLs of their leases, and killed.
// Logs of Near are removed and trimmed. Each fault is counted when it happens, and the test fails
// if one never does. Redis loses no other data: the documentation of the library says what may
// happen then, and it is not a matter of order.
package histories
