package lock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

const (
	needsScripts = "locks need scripts: allow the Redis user +eval and +evalsha"
	needsRights  = "allow the Redis user what the scripts use (+get +set"
)

var failures = []struct {
	what  string
	fails fault
	want  error // nil: none of this package
	says  string
	takes time.Duration // 0: returns at once; -1: may take RedisTimeout
}{
	{"refused connection", noConnection, lock.ErrUnavailable, "refused", leaseWaits},
	{"no connection is free", func(context.Context, func() error) error { return redis.ErrPoolTimeout }, lock.ErrUnavailable, "pool", leaseWaits},
	{"loading", refusal("LOADING Redis is loading the dataset in memory"), lock.ErrUnavailable, "LOADING", leaseWaits},
	{"busy", refusal("BUSY Redis is busy running a script"), lock.ErrUnavailable, "BUSY", leaseWaits},
	{"cluster down", refusal("CLUSTERDOWN The cluster is down"), lock.ErrUnavailable, "CLUSTERDOWN", leaseWaits},
	{"silent", silence, lock.ErrAmbiguous, "deadline", leaseWaits},
	{"silent after it was done", lostSilently, lock.ErrAmbiguous, "deadline", leaseWaits},
	{"cut", requestLost, lock.ErrAmbiguous, "", leaseWaits},
	{"cut after it was done", replyLost, lock.ErrAmbiguous, "", leaseWaits},
	{"reset", func(context.Context, func() error) error {
		return &net.OpError{Op: "read", Err: errors.New("connection reset by peer")}
	}, lock.ErrAmbiguous, "reset", leaseWaits},

	{"out of memory", refusal("OOM command not allowed when used memory > 'maxmemory'. script: 0, on @user_script:1."), lock.ErrUnavailable, "OOM", -1},
	{"read only", refusal("READONLY You can't write against a read only replica. script: 0, on @user_script:1."), lock.ErrUnavailable, "READONLY", -1},
	{"no scripts", refusal("NOPERM this user has no permissions to run the 'evalsha' command"), nil, needsScripts, 0},
	{"no scripts, on Redis 7.2", refusal("NOPERM User app has no permissions to run the 'evalsha' command"), nil, needsScripts, 0},
	{"scripts are not there", refusal("ERR unknown command 'evalsha', with args beginning with: "), nil, needsScripts, 0},
	{"a right is missing inside a script", refusal("ERR The user executing the script can't run this command or subcommand script: 0, on @user_script:1."), nil, needsRights, 0},
	{"a right is missing inside a script, as of Redis 8", refusal("ERR ACL failure in script: User u has no permissions to run the 'set' command script: 0, on @user_script:1."), nil, needsRights, 0},
	{"the same before Redis 7", refusal("ERR Error running script (call to f_0): @user_script:1: @user_script: 1: -NOPERM this user has no permissions to run the 'get' command or its subcommand"), nil, needsRights, 0},
	{"a key is forbidden", refusal("NOPERM this user has no permissions to access one of the keys used as arguments"), nil, "the keys {name}:lock*", 0},
	{"a key is forbidden, on Redis 7", refusal("NOPERM No permissions to access a key"), nil, "the keys {name}:lock*", 0},
	{"a key of another type", refusal("WRONGTYPE Operation against a key holding the wrong kind of value script: 0, on @user_script:1."), lock.ErrConflict, "choose another name", 0},
	{"the same before Redis 7", refusal("ERR Error running script (call to f_0): @user_script:1: WRONGTYPE Operation against a key holding the wrong kind of value"), lock.ErrConflict, "choose another name", 0},
	{"a key without an end", refusal("FOREIGN the key has no expiry, so it is no lock of ours script: 0, on @user_script:1."), lock.ErrConflict, "choose another name", 0},
}

// Each failure is one of the errors of this package, and says how to mend it if that can be done. A
// refusal ends the call at once, an unreachable server after RedisTimeout.
//
//fault:unreachable-lock
//fault:silence
func TestErrors_Kinds(t *testing.T) {
	for _, c := range failures {
		runEachKind(t, c.what, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
			learn(t, rdb)
			client, f := withFaults(t, m)
			l := newLocker(t, kind, client, "some name", nil)
			mustRelease(t, mustAcquire(t, l)) // so that the time of the server is known
			time.Sleep(time.Millisecond)      // so that it has not answered while the next caller waits
			for op, call := range map[string]func() error{
				"Acquire": func() error { _, err := l.Acquire(t.Context()); return err },
				"TryAcquire": func() error {
					lease, err := l.TryAcquire(t.Context())
					if lease != nil {
						t.Error("it has given a lease")
					}
					return err
				},
				"Do": func() error { return l.Do(t.Context(), func(context.Context) error { t.Error("called"); return nil }) },
				"Release": func() error {
					f.set(nil)
					lease := mustAcquire(t, l)
					f.set(c.fails)
					return lease.Release(t.Context())
				},
			} {
				f.set(c.fails)
				begun := time.Now()
				err := call()
				took := time.Since(begun)
				wantIs(t, op, err, c.want)
				if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), `"some name"`) {
					t.Errorf("%s: %v; want it to say %q, and the name", op, err, c.says)
				}
				if c.takes == 0 && took != 0 || took > leaseWaits || c.takes > 0 && took < c.takes/2 {
					t.Errorf("%s has taken %v", op, took)
				}
				f.set(nil)
				time.Sleep(2 * leaseTTL)
				mustRelease(t, mustAcquire(t, newLocker(t, kind, rdb, "some name", nil)))
			}
		})
	}
}

// When the context of an Acquire ends during a command, the error says what the Acquire has seen: ErrBusy
// if the last answer was that the lock is busy, the failure if the last command failed, and otherwise that
// no answer came. It is ErrAmbiguous only if a command was sent.
func TestErrors_ContextEnds(t *testing.T) {
	const early, late = 200 * time.Millisecond, 2700 * time.Millisecond // while the first command, or a later one, runs
	for _, c := range []struct {
		what string
		then fault         // for the first command, or those from one second on
		ends time.Duration // of the context
		want error         // nil: none of this package
		says string
	}{
		{"busy, and a slow reply", slow(400 * time.Millisecond), late, lock.ErrBusy, "busy"},
		{"busy, then silence", silence, late, lock.ErrAmbiguous, "deadline"},
		{"busy, then no connection", noConnection, late, lock.ErrUnavailable, "refused"},
		{"a slow reply", slow(400 * time.Millisecond), early, lock.ErrAmbiguous, "no answer came before the context ended"},
		{"silence", silence, early, lock.ErrAmbiguous, "no answer came before the context ended"},
		{"no connection", noConnection, early, lock.ErrUnavailable, "refused"},
		{"not allowed", refusal("NOPERM this user has no permissions to run the 'evalsha' command"), early, nil, needsScripts},
	} {
		runEachKind(t, c.what, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
			learn(t, rdb)
			redistest.Mute(m) // so that waiters ask often
			holder := mustAcquire(t, newLocker(t, kind, rdb, "some name", nil))
			client, f := withFaults(t, m)
			l := newLocker(t, kind, client, "some name", nil)
			calls := map[string]func(context.Context) (*lock.Lease, error){"Acquire": l.Acquire}
			if c.ends == early { // what earlier calls have seen does not count
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				_, err := l.Acquire(ctx)
				cancel()
				wantIs(t, "Acquire before", err, lock.ErrBusy, context.DeadlineExceeded)
				f.set(c.then)
				calls["TryAcquire"] = l.TryAcquire
			}
			for op, call := range calls {
				ctx, cancel := context.WithTimeout(t.Context(), c.ends)
				if c.ends == late {
					time.AfterFunc(time.Second, func() { f.set(c.then) })
				}
				_, err := call(ctx)
				cancel()
				if c.want == nil {
					wantIs(t, op, err)
				} else {
					wantIs(t, op, err, c.want, context.DeadlineExceeded)
				}
				if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), `"some name"`) {
					t.Errorf("%s: %v; want it to say %q, and the name", op, err, c.says)
				}
			}
			f.set(nil)
			mustRelease(t, holder)
			time.Sleep(2 * leaseTTL)
			mustRelease(t, mustTry(t, newLocker(t, kind, rdb, "some name", nil)))
		})
	}
}

// An Acquire whose context ends before a command was sent, or before the first waiter of its process
// had an answer, is not ErrBusy, and its text does not call Redis unavailable.
func TestErrors_ContextEndsUnasked(t *testing.T) {
	const text = `lock: acquire "n": no answer came before the context ended: context deadline exceeded`
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		options := *redistest.NewMiniClient(t, m).Options()
		options.Dialer = func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		client := redis.NewClient(&options)
		defer client.Close()
		l := newLocker(t, kind, client, "n", nil)
		var callers sync.WaitGroup
		for range 3 {
			for op, call := range map[string]func(context.Context) (*lock.Lease, error){"Acquire": l.Acquire, "TryAcquire": l.TryAcquire} {
				callers.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), leaseWaits/2)
					defer cancel()
					_, err := call(ctx)
					wantIs(t, op, err, lock.ErrUnavailable, context.DeadlineExceeded)
					if err == nil || err.Error() != text {
						t.Errorf("%s: %v, want %s", op, err, text)
					}
				})
			}
			time.Sleep(time.Millisecond)
		}
		callers.Wait()
	})
}

// A function or context that is nil is an error that names it, and nothing is sent.
func TestErrors_Nil(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		client, f := withFaults(t, m)
		l := newLocker(t, kind, client, "n", nil)
		lease := mustAcquire(t, l)
		f.take()
		fn := func(context.Context) error { t.Error("called"); return nil }
		var none context.Context
		for _, c := range []struct {
			want string
			call func() error
		}{
			{`lock: acquire "n": ctx is nil: a context is needed`, func() error { _, err := l.Acquire(none); return err }},
			{`lock: acquire "n": ctx is nil: a context is needed`, func() error { _, err := l.TryAcquire(none); return err }},
			{`lock: acquire "n": ctx is nil: a context is needed`, func() error { return l.Do(none, fn) }},
			{`lock: do "n": fn is nil: a function is needed`, func() error { return l.Do(t.Context(), nil) }},
			{`lock: check "n": ctx is nil: a context is needed`, func() error { return l.Check(none) }},
			{`lock: release "n": ctx is nil: a context is needed`, func() error { return lease.Release(none) }},
		} {
			if err := c.call(); err == nil || err.Error() != c.want {
				t.Errorf("%v, want %s", err, c.want)
			}
		}
		if ops := f.take(); ops != "" {
			t.Errorf("sent %s", ops)
		}
		mustRelease(t, lease)
	})
}

// foreignData are commands that put something else under a key.
var foreignData = map[string][]any{"a list": {"rpush", "x"}, "a text without a TTL": {"set", "some text"}}

// A foreign key is named and left alone, and nothing is taken beside it. When it is gone, the lock can be had.
//
//fault:foreign-key
func TestErrConflict_ForeignKey(t *testing.T) {
	suffixes := map[string][]string{
		"mutex": {"", ":fence", ":ended"}, "fair": {"", ":fence", ":ended", ":queue", ":alive"}, "semaphore": {"", ":fence", ":ended", ":details"},
	}
	eachKind(t, func(t *testing.T, kind string) {
		_, mini := redistest.StartMini(t)
		for _, rdb := range []*redis.Client{mini, redistest.Shared(t).Client(t)} {
			for _, suffix := range suffixes[kind] {
				for what, put := range foreignData {
					name := redistest.Namespace(t)
					key := locktest.Key(name) + suffix
					redistest.Planted(t, key)
					redistest.Must(t, rdb.Do(t.Context(), append([]any{put[0], key}, put[1:]...)...).Err())
					before := dump(t, rdb, key)
					l := newLocker(t, kind, rdb, name, patient(lock.Options{}))
					for _, acquire := range []func(context.Context) (*lock.Lease, error){l.TryAcquire, l.Acquire} {
						lease, err := acquire(t.Context())
						wantIs(t, "Acquire", err, lock.ErrConflict)
						if lease != nil || err == nil || !strings.Contains(err.Error(), "its key holds something else") {
							t.Errorf("%q is %s: Acquire: %v, %v", suffix, what, lease, err)
						}
					}
					if after := dump(t, rdb, key); after != before {
						t.Errorf("the key held %q, and holds %q", before, after)
					}
					for other := range keysOf(t, rdb, name) {
						if other != suffix && !strings.HasPrefix(other, ":ended") {
							t.Errorf("%q is %s: %q is left", suffix, what, other)
						}
					}
					redistest.Must(t, rdb.Del(t.Context(), key).Err())
					mustRelease(t, mustTry(t, l))
				}
			}
		}
	})
}

// dump returns the value of a key and its TTL, or its type where there is no DUMP, as on miniredis.
func dump(t *testing.T, rdb redis.UniversalClient, key string) string {
	t.Helper()
	s, err := rdb.Dump(t.Context(), key).Result()
	if err != nil {
		s, err = rdb.Type(t.Context(), key).Result()
	}
	redistest.Must(t, err)
	return fmt.Sprint(s, " for ", rdb.TTL(t.Context(), key).Val())
}
