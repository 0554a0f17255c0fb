// Package histories checks what the library promises between processes by what processes see. Some OS processes
// make many calls at random, on one Redis server and on one key or lock name at a time; each call is recorded with
// its begin and end on a clock that they share; and porcupine looks for an order of the calls in which each makes
// sense. If there is none, a promise is broken. One key, or one lock name, is one history.
//
// It is a module of its own, so that nobody who uses the library gets to know porcupine. Its tests are all there
// is. They run with all others, some hundreds of histories; scripts/soak makes thousands, and can check another
// copy of the library.
//
// # Time
//
// Each process reads CLOCK_MONOTONIC, which all processes of a machine share, before it begins a call and after
// the call has returned. The one who collects the reports could stamp them too, but every microsecond that is
// added to a call lets it be concurrent with more others, and so excuses more. That a call begins is told before
// it does: so what a killed process had begun is known, and may have been done, or be done, at any later time.
//
// # The cache
//
// There is one source of truth, a list on a second server that no fault touches; a version is its length. A
// Loader reads the version and takes a while to return it. A write changes the source, and then calls Delete,
// Expire, or Set with the new version. Set is called only where one thread makes all writes of a key: of two who
// change the source in one order and Set in the other, the cache would keep the wrong one, by no fault of its own.
//
// Model "register": a write, from the change of the source to the return of Delete, is one act, as is a read, by
// GetOrLoad or Get. Acts agree with a register that takes the versions in the order of the source. That is the
// strongest there is for a cache whose source is changed before the cache is told: while a write is under way
// reads may get the old version or the new one, but never the old one after the new one. It is true while nothing
// fails and no entry outlives its life, for these reasons:
//
//   - What is stored was loaded under the lock and stored while the lock was still the same grant, so each entry
//     is at least as new as those before it: a later holder has read the source later.
//   - What was loaded and refused is given only to callers that came before its load began; by then no other
//     load can have brought more to anybody who returned before they came.
//   - Everything else is a reply of the server to a command that was sent after the call began.
//   - Delete, Set and Expire take the entry and the lock away in one step: what is stored after it was loaded
//     after the source had changed.
//
// Without faults no two loads of a key run at once either, except beside one that a write has overtaken.
//
// Model "floors": a Delete, Set or Expire that has returned nil raises a floor to the version that the source had
// when it began, and a read that begins later gets nothing below. The floor of Expire is only for answers that are
// not said to be stale, if there are windows in which a stale one may be served. It says nothing of two reads:
// that is all that is true under faults and within the stale windows, where a process that cannot reach the server
// loads by itself and gets ahead of those who still read the entry. It is weaker still in two places, which the
// documentation of the library names:
//
//   - While Redis cannot be asked, callers share the load that they find under way in their process, though a
//     Delete elsewhere may have overtaken it. Such a read counts as begun with that load. Which loads those are
//     Trace tells: those that ran unlocked, and those of which a command to store or release has failed. One that
//     was not answered in time is enough, as when the process was frozen in the middle of it.
//   - A Set that has failed may still be carried out, even after a later Delete: its value is excused.
//
// A write that has failed, or whose process has died, raises no floor. Errors and misses are no answers: the model
// does not say when a read has to succeed. But a call that never returns fails the test.
//
// # The locks
//
// Model of a mutex, a semaphore of size n and a fair mutex: at most n hold it; the fence grows with each grant;
// a Release that returns nil was made by a holder; TryAcquire is busy only if there is no place, or somebody
// waits in the queue; and the grants of a fair mutex come in the order in which the first commands of the
// waiters have arrived at the server, which a hook of the client bounds by its replies.
//
// A holder is one from the return of its Acquire, or earlier, until its Release begins, or later. If its Release
// does not return nil, or its process dies, it is one until an unknown time, but not before its life has passed
// since it was granted or last renewed: an end at any time would excuse everything. That a lease's context ends
// before somebody else can hold it is not checked here: it is promised as far as the process is not held up
// itself, and on a busy machine it is. A waiter that is frozen or dies may be passed over when WaiterTTL has
// passed since it came.
//
// An Acquire that has failed, or whose process has died, may hold a place that nobody knows of. That can only
// keep others out, so it is left out, and from then on it is not judged whether TryAcquire was busy with reason.
//
// # Faults
//
// Each process reaches the server through a proxy of its own, which loses requests and replies, holds them back,
// cuts connections, and swallows everything for a while; connections are killed and scripts flushed on the
// server; processes are frozen for longer than their leases live, and killed. Each fault is counted when it has
// come about, and the test fails if one never does. Redis loses no data: what then may happen, the documentation
// of the library says, and it is not a matter of order.
package histories
