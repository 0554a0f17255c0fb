// Package singlefill is a typed, namespaced cache on Redis whose GetOrLoad never stampedes: singleflight runs
// a function once per process; singlefill fills a key once per fleet.
//
//	users, err := singlefill.New[User](rdb, "users", 5*time.Minute, nil) // once per process
//	...
//	user, err := users.GetOrLoad(ctx, "42", func(ctx context.Context, id string) (User, error) {
//		user, err := db.User(ctx, id) // once, however many processes ask
//		if errors.Is(err, sql.ErrNoRows) {
//			return user, singlefill.ErrNotFound // remembered, too
//		}
//		return user, err
//	})
//	...
//	err = users.Delete(ctx, "42") // after the user has been changed
//
// That is all that most services need. The rest is for those who want more, or to know what they can rely on.
//
// # The path of one GetOrLoad
//
// A call goes as far down this list as it must:
//
//  1. Read. One plain GET. An entry that is fresh, or stale within StaleWhileRevalidate, is decoded and returned:
//     a hit takes no lock and runs no script.
//  2. Join. Everything else joins what this process has under way for the key; each caller waits with its
//     own context.
//  3. Get or lock. One script returns a value that has come meanwhile, or takes the fill lock of the key for
//     this attempt, or names the process that holds it.
//  4. Wait. While another process holds the lock, step 3 is asked again: rarely until loads of the key usually
//     end, as far as that is known, densely around that time, then ever more rarely, every 250 ms at least,
//     but after twice the time that Redis takes to answer at the earliest; a new caller brings the next time
//     forward, to 10 to 50 ms. So a waiter learns alike of the value, of a failed load and of a dead holder,
//     and no connection is held in between.
//  5. Load. The [Loader] runs with a deadline of its own; its lock is renewed meanwhile.
//  6. Store and release. One script stores the entry and gives the lock back, if it is still this attempt's.
//
// # Choosing a ttl
//
// The ttl given to [New] is how old a value may be when nobody has deleted it: choose it as if every Delete could
// fail. [Options.Jitter] makes each life up to a tenth shorter, never longer, so that what was written together
// does not expire together. [Options.TTLFunc] gives each value a life of its own.
//
// A short ttl costs loads, not waiting: shortly before the end of a life a hit refreshes the value in the background,
// the sooner the longer the load takes ([Options.EarlyRefresh]). A key that nobody reads is not refreshed.
//
// # Values that can still be served
//
// After its life an entry is stale, and a miss unless the options say what an old value is good for. For
// [Options.StaleWhileRevalidate] it is served at once and refreshed behind; for [Options.StaleIfError] it is served
// if the load fails, or if the caller's deadline comes first. Both begin at the life's end. Redis keeps an entry for
// its life and the longer of the two, and past its own window it is not served. [Cache.GetOrLoadInfo] tells
// whether a value is stale, how old, and why.
//
// A refresh is a load like any other, under the lock, fenced, with LoadTimeout, in a place of MaxLoads. It is
// nobody's: it has the values of the context of the call that began it, nobody waits for it, and it gives up if
// another process holds the lock or others wait for a place. Only a call that finds nothing to serve any more
// joins it. If it fails, a mark in the lock key, by the server's clock, keeps the fleet off the source for
// [Options.RetryAfter], except for calls that have nothing to serve.
//
// # What is not there
//
// A Loader that finds nothing returns [ErrNotFound], bare or wrapped. That is remembered like a value, for
// [Options.NotFoundTTL], so that asking for what does not exist costs the source little. Whoever creates the thing
// deletes the key, as after any other change. Other errors are not remembered.
//
// # Keys and namespaces
//
// A key names all that its value depends on, such as a language. Any string but the empty one will do. In Redis the
// key 42 of the namespace users is users:{42}, and its fill lock users:{42}:lock, both in the slot of 42; no two meet.
//
// All who use a namespace must agree on the type, the codec and the meaning of a key. When one of them changes,
// change the namespace ("users/2"): then old and new processes run side by side, and the old entries expire.
//
// # When the source changes
//
// [Cache.Delete] after the change has been committed: the next call loads anew. It also takes the lock from a load
// under way, which may have read what was there before; the value of that is refused at the store. [Cache.Set]
// does the same and leaves a value: for what is at hand, by a single writer, since of two the later Set wins and not
// the later change. [Cache.Expire] leaves the old values to be served as the stale windows say while they are
// refreshed: for many keys at once, or a change that may show a little later.
//
// All three return errors, which a caller must not drop: the old value may then be served until its end. Try again
// (from an outbox, if it has to be certain), or live with the ttl.
//
// # Errors
//
// What GetOrLoad returns, and what to do with it:
//
//   - [ErrNotFound], by errors.Is: there is none. A 404.
//   - An error of the Loader, as it is (== still holds): it has just failed. The next call tries anew.
//   - [*RemoteError], by errors.As: it has failed in another process. Only the text has come, so errors.Is finds
//     nothing in it. Handle both alike. The text goes through Redis: put no secrets into errors.
//   - [*PanicError], by errors.As: the Loader panicked, or called runtime.Goexit. A bug: log its Stack.
//   - ctx.Err(), bare: this caller could wait no longer. The load goes on, and a later call may find its value.
//   - An error that wraps context.DeadlineExceeded, while ctx has not ended: the load took longer than
//     [Options.LoadTimeout].
//   - [ErrClosed]: the cache is closed. [ErrRecursive]: a Loader waits for itself.
//
// It returns no error of Redis: see [Stats] and [Trace]. [Cache.Get] returns [ErrMiss] and, like Set, Delete and
// Expire, errors that wrap those of Redis.
//
// # Contexts
//
// Give each call a deadline: without one it may wait for LoadTimeout and more, behind a process that hangs or in the
// line for [Options.MaxLoads].
//
// The Loader's context has the values of the first caller's and ends after LoadTimeout, with no caller, or when its key
// is deleted and no earlier caller waits. Pass it on: a load begun inside a Loader can then use that load's place, and
// loads of this process that wait in a circle are detected. Values that end with a request, such as a transaction, are not for a Loader.
//
// # Watching it
//
// [Cache.Stats] is for a metrics library to collect, [Trace] for logs, spans and histograms:
//
//	expvar.Publish("users", expvar.Func(func() any { return users.Stats() }))
//
//	prometheus.MustRegister(prometheus.NewCounterFunc(
//		prometheus.CounterOpts{Name: "users_cache_misses_total"},
//		func() float64 { return float64(users.Stats().Misses) },
//	))
//
// BreakerOpen says that Redis does not answer; StoreErrors that it refuses what is loaded, or that it cannot be encoded;
// BadValues that somebody else writes there, or with another codec; Fenced, where nobody deletes, that locks are lost.
//
// # Testing
//
// A miniredis will do for the code that uses a cache, if its keys may expire: mini.ClockTTL(true). Delete makes a key
// cold, Expire a value stale, mini.Close shows life without Redis. In a bubble of testing/synctest time is free:
//
//	synctest.Test(t, func(t *testing.T) {
//		mini := miniredis.NewMiniRedis()
//		defer mini.Close()
//		mini.ClockTTL(true)
//		rdb := redis.NewClient(&redis.Options{
//			Addr:   "127.0.0.1:6379", // an address, since a name would be looked up; nothing is dialled
//			Dialer: func(context.Context, string, string) (net.Conn, error) { return mini.Dial() },
//		})
//		defer rdb.Close()
//		...
//		time.Sleep(5 * time.Minute) // what was loaded before has expired
//	})
//
// # Promise: once
//
// At most one load per key runs at a time in a process, always, and in the fleet while Redis answers. A load that a
// Delete or Set has overtaken, or that LoadTimeout has left behind, does not count any more.
//
// This reduces work; it does not exclude side effects. Do nothing in a Loader that must not happen twice. A load may
// run twice when Redis loses data, evicts the lock or fails over, when a process is frozen for longer than
// [Options.LockTTL], and after a Delete or Set; the late one is refused at the store.
//
// # Promise: Delete and Set win
//
// A value whose load began before a Delete or Set is never stored after it, in any process, and a GetOrLoad that
// begins after Delete has returned, in any process, never gets it. Expire is like Delete in this.
//
// While Redis cannot be asked, callers share the load that runs here, although a Delete in another process may have
// overtaken it. A caller that came after the load began asks Redis once more at its end, and takes the value only if
// there is still no answer. At a server that hangs this takes two RedisTimeouts at most. A hit that a lagging replica or the client's own cache (client-side caching) answers may be older
// than promised, by as much as the replica lags or the invalidation takes. And no cache is newer than what its
// Loader reads: a lagging replica of the database gives back what was deleted.
//
// # Promise: nobody's cancellation hurts another
//
// A caller's context ends that caller's wait and nothing else: at its deadline, or when it is cancelled, at once while
// waiting for a load and within RedisTimeout in the middle of a command. The load goes on, when all callers have
// left, too: so impatient callers of a slow source do not keep a key cold for ever.
//
// # Promise: the dead and the hung cost a bounded time
//
// A holder that dies costs those who wait LockTTL and one poll; one that hangs, LoadTimeout + LockTTL. A Loader that
// ignores its context is left behind at LoadTimeout. No key lives without a TTL, whoever dies. A shorter LockTTL
// replaces the dead sooner, and has a process that is frozen for so long lose its load.
//
// # Promise: a failed load is shared
//
// All who waited for it, in every process, get its failure, a panic too; they do not queue up to fail one by one. Who
// comes later tries anew, so a source that is down is asked by one load after the other for each key.
// [Options.StaleIfError] with RetryAfter spares it; MaxLoads and [Options.MaxFleetLoads] bound what it has to bear.
//
// # Promise: Redis trouble breaks no read
//
// A read that the source could serve is served. Each command is bounded by [Options.RedisTimeout] from the moment at which
// it can be sent. After five failures in a row, and no answer for as long, Redis is not asked any more until it answers a
// probe in the background. In a Cluster each node is judged by itself, so a dead one costs its own keys only. Meanwhile each process loads each key once at a time, and nothing is stored: the source has to bear the
// reads that were hits. So let MaxLoads times the number of processes be what it can bear.
//
// # Promise: bad bytes are a miss
//
// Stored bytes that make no sense are counted, and overwritten by the load. With [MsgPack], [JSON] and [Raw] they cost
// no memory out of proportion to their length. What the codec drops of a value is gone all the same: see [Codec].
//
// # Clocks
//
// Whether an entry is fresh or in a window, its reader judges by its own clock, against times that its writer
// took from its own. Between clocks that are a minute apart, life and windows end up to a minute early or late,
// but never later than Redis, by its own clock, ends the entry: after its life and the longer window. (A process
// whose clock is behind may answer a call with it whose load began before that and failed after.) With a life
// of less than that minute the process that is ahead refreshes at nearly every read, one load at a time. What
// Expire has made stale is stale by all clocks. Nothing else depends on them: locks and RetryAfter go by the
// server's.
package singlefill
