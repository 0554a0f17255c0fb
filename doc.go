// Package singlefill is a typed, namespaced cache on Redis whose GetOrLoad never stampedes:
// singleflight runs a function once per process; singlefill fills a key once per fleet.
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
// Most services need no more than that. The rest of this page is about options and guarantees.
//
// # The path of one GetOrLoad
//
// A call takes these steps until it has a value:
//
//  1. Read. One plain GET. An entry that is fresh, or stale within StaleWhileRevalidate, is decoded
//     and returned: a hit takes no lock and runs no script.
//  2. Join. The call joins the fill of the key in this process, or starts one. It waits with its
//     own context.
//  3. Get or lock. One script returns a value that has arrived, or takes the fill lock of the key,
//     or names the process that holds the lock.
//  4. Wait. While another process holds the lock, the fill repeats step 3: rarely until loads of
//     the key usually end, if that is known, often around that time, then less and less often. It
//     pauses for 250 ms at most, and at least twice as long as Redis takes to answer. A new caller
//     shortens the pause to 10 to 50 ms. The same command tells a waiter that the value arrived,
//     that the load failed, or that the holder died. No connection is held between two commands.
//  5. Load. The [Loader] runs, with a deadline, while its lock is renewed.
//  6. Store and release. One script stores the entry and releases the lock, if this fill still
//     holds it.
//
// # Choosing a ttl
//
// The ttl given to [New] is how old a value may become if no process deletes it: choose it as if
// every Delete could fail. [Options.Jitter] makes each life up to a tenth shorter, never longer, so
// that entries written together do not expire together. [Options.TTLFunc] returns the life of a
// single value.
//
// A short ttl costs loads, but normally no waiting: a hit shortly before a value expires refreshes
// it in the background, and the longer a load takes, the sooner ([Options.EarlyRefresh]). A key
// without readers is not refreshed.
//
// # Stale values
//
// An expired entry is stale. These options control how long it may still be served:
//
//   - [Options.StaleWhileRevalidate]: it is served at once, and refreshed in the background.
//   - [Options.StaleIfError]: it is served if the load fails, or if the deadline of the caller
//     comes first.
//   - [Options.StaleAfter]: within StaleIfError it is served when the load has been in flight for
//     that long. So a source that hangs does not take its readers along.
//
// Stale values are in Redis: while Redis does not answer, there is none to serve.
//
// Both windows begin when the value expires. Redis keeps an entry for its life and the longer
// window. [Cache.GetOrLoadInfo] tells whether a value is stale, how old it is, and why.
//
// A refresh is a load like any other: under the lock, fenced, with LoadTimeout, in a slot of
// MaxLoads. No caller waits for it. It inherits the context values of the call that started it. It
// gives up if another process holds the lock, or if other loads wait for a slot. A call that finds
// nothing to serve joins it. If it fails, a mark in the lock key keeps the fleet off the source for
// [Options.RetryAfter], by the clock of the server, except for calls that have nothing to serve.
//
// # Near
//
// [Options.Near] keeps decoded values in the memory of each process, so that a hit is no round
// trip. Delete, Set and Expire append what they have invalidated to a log in Redis, a stream named
// after the namespace and ":log". Each process that serves values from memory reads the log at
// least twice in [Near].MaxLag, and at once when Redis wakes it.
//
// In the process that calls Delete, Set or Expire memory is exact. In any other process a call that
// begins more than MaxLag after that has returned never gets the old value. This depends on no
// message and no timer: a process serves from memory only while the last answered read of the log
// was sent less than MaxLag ago. Otherwise it asks Redis. If a part of the log is lost, it drops
// everything. If Redis loses what it has acknowledged, the end of the value's life, or of Near.TTL,
// is the bound. The age of a proof counts by the monotonic clock, which stands still while the
// machine is suspended.
//
// While Redis does not answer, memory serves nothing as current. If the load fails as well, what it
// has within [Options.StaleIfError] is returned as stale.
//
// # Values that do not exist
//
// A Loader that finds nothing returns [ErrNotFound], bare or wrapped. The cache remembers it like a
// value, for [Options.NotFoundTTL], so that asking for a missing value costs the source little.
// After creating the value, delete the key, as after any other change. The cache remembers no other
// error.
//
// # Keys and namespaces
//
// A key names everything that its value depends on, such as a language. Any string but the empty
// one is a key. In Redis the key 42 of the namespace users is users:{42}, and its fill lock is
// users:{42}:lock, both in one slot.
//
// All processes that use a namespace must agree on the type, the codec and the meaning of a key.
// When one of these changes, change the namespace ("users/2"): old and new processes then run side
// by side, and the old entries expire.
//
// # When the source changes
//
// Call [Cache.Delete] after the change has been committed: the next call loads again. By then the
// client may have gone, and with the context of its request Delete would delete nothing:
//
//	if err := db.Rename(ctx, id, name); err != nil { // commits
//		return err
//	}
//	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
//	defer cancel()
//	err := users.Delete(ctx, id)
//
// Delete also takes the lock away from a load in flight, which may have read the old state; its
// value is refused at the store. [Cache.Set] does the same and leaves a value. It suits a single
// writer: of two calls the later Set wins, not the later change. [Cache.Expire] lets the old values
// be served within the stale windows while they are refreshed. It suits many keys at once, or a
// change that may show a little later.
//
// All three return errors. After an error, or if the process dies after the commit, the old value
// may be served until it expires. Accept the ttl, or use an outbox: write the key to a table in the
// transaction of the change. A worker deletes the keys of the table from the cache, retries until
// that succeeds, and only then deletes them from the table. examples/server does so.
//
// # Errors
//
// GetOrLoad returns:
//
//   - [ErrNotFound], by errors.Is: the source has no such value. An HTTP handler answers 404.
//   - An error of the Loader, unchanged (== still holds): the load failed. The next call loads
//     again.
//   - [*RemoteError], by errors.As: the load failed in another process. Only the text has arrived,
//     and the identity of the errors that [Options.Errors] names: errors.Is finds those. Handle it
//     like an error of the Loader. The text goes through Redis: put no secrets into errors.
//   - [*PanicError], by errors.As: the Loader panicked, or called runtime.Goexit. Log its Stack.
//   - ctx.Err(), bare: the context of this caller ended. The load goes on, and a later call may
//     find its value.
//   - An error that wraps context.DeadlineExceeded while ctx has not ended: the load took longer
//     than [Options.LoadTimeout].
//   - [ErrClosed]: the cache is closed. [ErrRecursive]: a Loader waits for itself.
//
// It returns no error of Redis: see [Stats] and [Trace]. [Cache.Get] returns [ErrMiss] and, like
// Set, Delete and Expire, errors that wrap those of Redis. [Cache.GetOrLoadMany] returns the errors
// of single keys in a [*ManyError].
//
// # Contexts
//
// Give each call a deadline. Without one it may wait for LoadTimeout and longer, behind a process
// that hangs or in the queue for [Options.MaxLoads].
//
// The context of a Loader has the values of the first caller's context. It ends after LoadTimeout,
// or when the key is deleted and no earlier caller waits; it does not end with a caller. Pass it
// on: a nested GetOrLoad then reuses the slot of its parent, and loads of this process that wait
// for each other in a circle are detected. A Loader must not use values that end with a request,
// such as a transaction.
//
// # Rights
//
// With an ACL a cache of the namespace shop needs
//
//	~shop:* +get +getrange +set +setrange +del +pexpire +pttl +time +eval +evalsha +multi +exec +ping
//
// and for [Cache.Clear] also +scan +unlink, for [Options.MaxFleetLoads] +@sortedset +@hash +pexpireat,
// for [Options.Near] +xadd +xrange +xrevrange.
//
// Scripts and MULTI run these commands, so a category such as +@read is not enough: TIME and EVAL
// are in others. For a user without EVAL and EVALSHA, +watch and +unwatch replace them. The client
// has needs beside these, such as +client|setinfo or, in a Cluster, +cluster|slots and +readonly.
//
// A missing right breaks no read, but nothing may be stored. [Cache.Check] names what is refused, when a
// process starts; Stats.Refused counts it. Check is no health check, since the cache survives an outage.
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
// Worth an alert: BreakerOpen (Redis does not answer), Refused (a right is missing, or Redis is out
// of memory), StoreErrors (Redis refuses values, or they cannot be encoded), BadValues (other
// programs write to the keys, or with another codec), and Fenced where no process deletes (locks
// are lost).
//
// # Testing
//
// Package singlefilltest has a Redis for one test, which can hang or go away, a source that counts its
// loads and can be held, and a Codec that reports fields which a codec drops. Delete makes a key cold,
// Expire makes a value stale, and in a bubble of testing/synctest time.Sleep ages all values. With
// another miniredis call ClockTTL(true), so that keys expire; FastForward makes no value stale, since
// a reader judges by its own clock.
//
// # Seeing it in production
//
// [Cache.Stats] has counts, and [Trace] tells of each event. [LogTrace] writes to slog what an operator
// has to know. The modules prometheus and otel beside this package have metrics and spans, grafana has
// a dashboard and alert rules, and the command cmd/singlefill shows what is in a namespace.
//
// # Promise: one load
//
// At most one load per key runs at a time in a process, always, and in the fleet while Redis
// answers. A load that was superseded by Delete or Set, or abandoned at LoadTimeout, does not
// count.
//
// This reduces work; it does not exclude side effects. A Loader must do nothing that may not happen
// twice. A load may run twice when Redis loses data, evicts the lock or fails over, when a process
// is frozen for longer than [Options.LockTTL], and after a Delete or Set; the store refuses the
// value of the late one.
//
// # Promise: Delete and Set win
//
// A value whose load began before a Delete or Set is never stored after it, in any process, and no
// GetOrLoad that begins after Delete has returned gets it, in any process. The same holds for
// Expire.
//
// The limits:
//
//   - While Redis does not answer, callers share the load of their process, although a Delete in
//     another process may have superseded it. A caller that joined after the load began asks Redis
//     once more when the load ends, and takes the value only if there is still no answer. At a
//     server that hangs this takes two RedisTimeouts at most.
//   - A hit from a lagging replica, or from client-side caching, may be older than promised: by the
//     lag of the replica, or by the time that the invalidation takes.
//   - No cache is newer than its source: a Loader that reads a lagging replica of the database
//     returns the state from before the Delete.
//
// # Promise: a cancelled caller affects no other
//
// The context of a caller ends the wait of that caller only: at its deadline, or when it is
// cancelled, at once while it waits for a load and within RedisTimeout during a command. The load
// goes on, also when all callers have left: so impatient callers of a slow source do not keep a key
// cold for ever.
//
// # Promise: dead and hung processes cost a bounded time
//
// If the holder of a lock dies, waiters wait for LockTTL and one poll. If it hangs, they wait for
// LoadTimeout + LockTTL. A Loader that ignores its context is abandoned at LoadTimeout. Every key
// has a TTL, whichever process dies. With a shorter LockTTL a dead process is replaced sooner, and
// a process that is frozen for that long loses its load.
//
// # Promise: callers share a failure
//
// All callers that waited for a load get its failure, in every process, also a panic; they do not
// retry one by one. The next call loads again, so a source that is down gets one load after the
// other for each key. [Options.StaleIfError] with RetryAfter spares it; MaxLoads and
// [Options.MaxFleetLoads] bound its load.
//
// # Promise: Redis trouble fails no read
//
// A read that the source could serve is served. [Options.RedisTimeout] bounds each command from the
// moment it is sent. After five failures in a row, and no answer for RedisTimeout, the cache sends
// no more commands until the server answers a probe in the background. In a Cluster each node is
// judged separately, so a dead node affects its own keys only.
//
// Until then each process loads each key at most once at a time, and nothing is stored: the source
// serves all reads. So choose MaxLoads such that the source can bear MaxLoads times the number of
// processes.
//
// # Promise: bad bytes are a miss
//
// Stored bytes that cannot be decoded are counted, and the load overwrites them. With [MsgPack],
// [JSON] and [Raw] they take no memory out of proportion to their length. Fields that the codec
// drops are lost without an error: see [Codec].
//
// # Clocks
//
// A reader judges by its own clock whether an entry is fresh or within a window, against times from
// the clock of the writer. Between clocks that are a minute apart, lives and windows end up to a
// minute early or late, but never later than Redis ends the entry by its own clock: after its life
// and the longer window. (A process whose clock is behind may return it to a call whose load began
// before that and failed after.) If a life is shorter than the difference, the process that is
// ahead refreshes at nearly every read, one load at a time. An entry made stale by Expire is stale
// by all clocks. Nothing else depends on clocks of clients: locks and RetryAfter use the clock of
// the server.
package singlefill
