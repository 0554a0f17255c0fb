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
// [NewLocal] needs no Redis, and has no fleet: its values are in the memory of the process.
//
// The pages in docs say how the cache works and is operated, where each promise ends (promises.md), and
// what stays within v1 (compatibility.md).
//
// # Keys, namespaces and the ttl
//
// A key names everything that its value depends on, such as a language. Any string but the empty one
// is a key. In Redis the key 42 of the namespace users is users:{42}, and its fill lock is
// users:{42}:lock, both in one slot. All processes that use a namespace must agree on the type, the
// codec and the meaning of a key; when one of these changes, change the namespace ("users/2"). If T
// only gets another field, raise [Options.Version].
//
// A value is fresh for the ttl given to [New], or for what [Options.TTLFunc] returns, if no process
// deletes it: choose it as if every Delete could fail. Then the stale windows begin. No value is served
// after its life and the longer of its windows, by the clock of the server. While Redis does not answer,
// only the memory of [Options.Near] has a stale value to serve.
//
// # When the source changes
//
// Call [Cache.Delete] after the change has been committed. By then the client may have gone, and with
// the context of its request Delete would delete nothing:
//
//	if err := db.Rename(ctx, id, name); err != nil { // commits
//		return err
//	}
//	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
//	defer cancel()
//	err := users.Delete(ctx, id)
//
// After an error, or if the process dies after the commit, the old value may be served until it
// expires. docs/invalidate.md has an outbox, with which no Delete is lost.
//
// # Errors
//
// GetOrLoad returns:
//
//   - [ErrNotFound], by errors.Is: the source has no such value. An HTTP handler answers 404.
//   - An error of the Loader, unchanged (== still holds): the load failed. The next call loads again.
//   - [*RemoteError], by errors.As: the load failed in another process, or a failure is remembered
//     ([Options.FailureTTL]). Handle it like an error of the Loader. Its text went through Redis: put no
//     secrets into errors.
//   - [*PanicError], by errors.As: the Loader panicked, or called runtime.Goexit. Log its Stack.
//   - ctx.Err(), bare: the context of this caller ended. The load goes on, and a later call may find
//     its value.
//   - An error that wraps context.DeadlineExceeded while ctx has not ended: the load took longer than
//     [Options.LoadTimeout].
//   - [ErrEmptyKey]: the key is empty; a handler answers 400. [ErrClosed]: the cache is closed.
//     [ErrRecursive]: a Loader waits for itself.
//
// It returns no error of Redis: see [Stats] and [Trace]. [Cache.Get] returns [ErrMiss] and, like Set,
// Delete and Expire, errors that wrap the errors of Redis.
//
// # Contexts
//
// Give each call a deadline: without one it may wait for LoadTimeout and longer, behind a process that
// hangs or in the queue for [Options.MaxLoads]. A Loader passes its context on: nested loads then reuse
// its slot, and a circle of loads is detected.
package singlefill
