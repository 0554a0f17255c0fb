// Package singlefill is a typed, namespaced cache on Redis whose GetOrLoad never stampedes: singleflight runs
// a function once per process; singlefill fills a key once per fleet.
//
//	users, err := singlefill.New[User](rdb, "users", 5*time.Minute, nil)
//	...
//	u, err := users.GetOrLoad(ctx, id, loadUser) // loadUser(ctx, id) asks the database
//
// # The path of one GetOrLoad
//
//  1. Read. One plain GET; a fresh entry is decoded and returned. A hit never touches a lock. If the entry is
//     about to expire, or stale within Options.StaleWhileRevalidate, it is refreshed behind the call.
//  2. Join. Everything else joins what this process has under way for the key; each caller waits with its
//     own context.
//  3. Get or lock. One script returns a value that has come meanwhile, or takes the fill lock of the key for
//     this attempt, or names the process that holds it.
//  4. Wait. While another process holds the lock, step 3 is asked again: rarely until loads of the key usually
//     end, as far as that is known, densely around that time, then ever more rarely, every 250 ms at least,
//     but after twice the time that Redis takes to answer at the earliest; a new caller brings the next time
//     forward, to 10 to 50 ms. So a waiter learns alike of the value, of a failed load and of a dead holder,
//     and no connection is held in between.
//  5. Load. The Loader runs with a deadline of its own; its lock is renewed meanwhile.
//  6. Store and release. One script stores the entry and gives the lock back, only while the lock is still
//     held by this attempt. Delete and Set take the lock away, so what was loaded before them is refused.
//
// # Values that can still be served
//
// An entry is fresh for its life (ttl, TTLFunc, NotFoundTTL; less the jitter). In the last of it hits may
// refresh it in the background (Options.EarlyRefresh). After it the entry is stale: for StaleWhileRevalidate
// it is served at once and refreshed behind; for StaleIfError it is served if the load fails. Redis keeps it
// for its life and the longer of the two, and past its own window it is not served.
//
// A refresh is a load like any other, under the lock, fenced, with LoadTimeout, in a place of MaxLoads. It is
// nobody's: it has the values of the context of the call that began it, nobody waits for it, and it gives up if
// another process holds the lock or others wait for a place. Only a call that finds nothing to serve any more joins it. If it fails,
// a mark in the lock key, by the server's clock, keeps the fleet off the source for RetryAfter, except for
// calls that have nothing to serve.
//
// Delete leaves nothing to serve, and Set a fresh value. Expire leaves a stale one.
//
// # What is promised
//
// At most one load per key runs at a time in a process, always, and in the fleet while Redis answers. (A load
// that a Delete or Set has overtaken, or that LoadTimeout has left behind, does not count any more.)
// A value whose load began before a Delete or Set is never stored after it, and a GetOrLoad that begins after
// Delete has returned, in any process, never gets it. A caller's context ends that caller's wait and nothing
// else. A holder that dies costs LockTTL and one poll; one that hangs, LoadTimeout + LockTTL. A failed load is
// shared by all who waited for it, in every process; who comes later tries anew. Redis trouble never breaks a
// read that the source could serve. Stored bytes that make no sense are a miss.
//
// # What is not
//
// This reduces work; it does not exclude side effects. A load may run twice when Redis loses data or fails
// over, when a process is frozen for longer than LockTTL, and after a Delete or Set; the late one is refused
// at the store. While Redis cannot be asked, callers share the load they find under way here, though a Delete
// elsewhere may have overtaken it. A hit that a lagging replica or the client's own cache (client-side caching) answers may be
// older than promised, by as much as the replica lags or the invalidation takes.
//
// Whether an entry is fresh or in a window, its reader judges by its own clock, against times that its writer
// took from its own. Between clocks that are a minute apart, life and windows end up to a minute early or late,
// but never later than Redis, by its own clock, ends the entry: after its life and the longer window. (A process
// whose clock is behind may answer a call with it whose load began before that and failed after.) With a life
// of less than that minute the process that is ahead refreshes at nearly every read, one load at a time. What
// Expire has made stale is stale by all clocks. Nothing else depends on them: locks and RetryAfter go by the
// server's.
package singlefill
