package lock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// What has happened is told apart by errors.Is, and an error that somebody can mend says how. A refusal ends the call
// at once, a server that cannot be asked after RedisTimeout.
func TestEveryFailureIsToldByItsKind(t *testing.T) {
	const scripts, rights = "locks need scripts: allow the Redis user +eval and +evalsha", "allow the Redis user what the scripts use (+@string"
	const foreign = "choose another name"
	for _, c := range []struct {
		what  string
		fails fault
		want  error // nil: none of the four
		says  string
		takes time.Duration
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
		{"no scripts", refusal("NOPERM this user has no permissions to run the 'evalsha' command"), nil, scripts, 0},
		{"no scripts, on Redis 7.2", refusal("NOPERM User app has no permissions to run the 'evalsha' command"), nil, scripts, 0},
		{"scripts are not there", refusal("ERR unknown command 'evalsha', with args beginning with: "), nil, scripts, 0},
		{"a right is missing inside a script", refusal("ERR The user executing the script can't run this command or subcommand script: 0, on @user_script:1."), nil, rights, 0},
		{"a right is missing inside a script, as of Redis 8", refusal("ERR ACL failure in script: User u has no permissions to run the 'set' command script: 0, on @user_script:1."), nil, rights, 0},
		{"the same before Redis 7", refusal("ERR Error running script (call to f_0): @user_script:1: @user_script: 1: -NOPERM this user has no permissions to run the 'get' command or its subcommand"), nil, rights, 0},
		{"a key is forbidden", refusal("NOPERM this user has no permissions to access one of the keys used as arguments"), nil, "the keys {name}:lock*", 0},
		{"a key is forbidden, on Redis 7", refusal("NOPERM No permissions to access a key"), nil, "the keys {name}:lock*", 0},
		{"a key of another type", refusal("WRONGTYPE Operation against a key holding the wrong kind of value script: 0, on @user_script:1."), nil, foreign, 0},
		{"the same before Redis 7", refusal("ERR Error running script (call to f_0): @user_script:1: WRONGTYPE Operation against a key holding the wrong kind of value"), nil, foreign, 0},
		{"a key without an end", refusal("FOREIGN the key has no expiry, so it is no lock of ours script: 0, on @user_script:1."), nil, foreign, 0},
	} {
		t.Run(c.what, func(t *testing.T) {
			eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
				learn(t, rdb, kind)
				client, f := withFaults(t, m)
				l := newLocker(t, kind, client, "some name", nil)
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
					if c.want == nil {
						wantIs(t, op, err)
					} else {
						wantIs(t, op, err, c.want)
					}
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
		})
	}
}

// Names may be long; errors are not.
func TestErrorsShortenTheName(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		client, f := withFaults(t, m)
		f.set(refusal("OOM"))
		_, err := newLocker(t, kind, client, strings.Repeat("n", 64<<10), nil).Acquire(t.Context())
		if n := len(err.Error()); n > 300 {
			t.Errorf("%d bytes: %.500v", n, err)
		}
	})
}

// Keys of others are left alone, and nothing is taken beside them.
//
//fault:foreign-key
func TestAKeyThatHoldsSomethingElseIsNamedAndLeftAlone(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"mini", "real"} {
		for _, kind := range kinds {
			suffixes := map[string][]string{"mutex": {"", ":fence"}, "fair": {"", ":fence", ":queue", ":alive"}, "semaphore": {"", ":fence", ":details"}}[kind]
			for _, suffix := range suffixes {
				for what, put := range map[string]func(rdb redis.UniversalClient, key string) error{
					"a list": func(rdb redis.UniversalClient, key string) error {
						return rdb.RPush(context.Background(), key, "x").Err()
					},
					"a text without an end": func(rdb redis.UniversalClient, key string) error {
						return rdb.Set(context.Background(), key, "some text", 0).Err()
					},
				} {
					t.Run(fmt.Sprint(where, " ", kind, suffix, " ", what), func(t *testing.T) {
						t.Parallel()
						var rdb redis.UniversalClient
						if where == "mini" {
							_, rdb = redistest.StartMini(t)
						} else {
							rdb = redistest.Shared(t).Client(t)
						}
						name := redistest.Namespace(t)
						key := "{" + name + "}:lock" + suffix
						redistest.Planted(t, key)
						if err := put(rdb, key); err != nil {
							t.Fatal(err)
						}
						dump := func() string {
							s, err := rdb.Dump(t.Context(), key).Result()
							if where == "mini" { // it has no DUMP of lists
								s, err = rdb.Type(t.Context(), key).Result()
							}
							if err != nil {
								t.Fatal(err)
							}
							return s
						}
						before := dump()
						l := newLocker(t, kind, rdb, name, patient(lock.Options{}))
						for range 2 {
							lease, err := l.TryAcquire(t.Context())
							wantIs(t, "Acquire", err)
							defer lease.Release(t.Context())
							if lease != nil || err == nil || !strings.Contains(err.Error(), "its key holds something else") {
								t.Errorf("Acquire: %v, %v", lease, err)
							}
						}
						if after := dump(); after != before {
							t.Errorf("the key held %q, and holds %q", before, after)
						}
						keys := keysOf(t, rdb, name)
						delete(keys, suffix)
						for other := range keys {
							if !strings.HasPrefix(other, ":ended") {
								t.Errorf("%q is left", other)
							}
						}
					})
				}
			}
		}
	}
}

//fault:disagreement
func TestThoseWhoAskForAnotherSizeAreToldBoth(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		name := redistest.Namespace(t)
		of := func(size int) *lock.Locker {
			l, err := lock.NewSemaphore(rdb, name, size, patient(lock.Options{}))
			if err != nil {
				t.Fatal(err)
			}
			return l
		}
		lease := mustAcquire(t, of(3))
		for _, size := range []int{2, 4} {
			_, err := of(size).TryAcquire(t.Context())
			wantIs(t, "TryAcquire", err)
			if want := fmt.Sprintf("is %d here, and 3 with", size); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("size %d: %v, want it to say %q", size, err, want)
			}
		}
		mustRelease(t, lease)
		mustRelease(t, mustAcquire(t, of(2)))
	})
}

// go-redis dials five times, with pauses, so that the time of a command may pass before it gives up. Nothing has
// been sent then, which is not the same as no answer.
//
//fault:unreachable-lock
func TestAServerThatIsNotThereIsUnavailableHoweverLongTheClientDials(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr})
	t.Cleanup(func() { _ = rdb.Close() })
	held := make(map[string]*lock.Lease)
	for _, kind := range kinds {
		held[kind] = mustAcquire(t, newLocker(t, kind, rdb, kind, nil))
	}
	s.Kill()
	for _, kind := range kinds {
		l := newLocker(t, kind, rdb, kind, nil)
		if _, err := l.TryAcquire(t.Context()); !errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("%s: TryAcquire: %v, want ErrUnavailable", kind, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := l.Acquire(ctx); !errors.Is(err, lock.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: Acquire: %v, want ErrUnavailable and the end of ctx", kind, err)
		}
		err := held[kind].Release(t.Context())
		if !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous) { // it may have been sent over the old connection
			t.Errorf("%s: Release: %v", kind, err)
		}
	}
}

// A caller whose patience ends while Redis refuses is not told that somebody else holds it.
//
//fault:unreachable-lock
func TestAServerThatIsNotThereIsNeverBusy(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	rdb := s.Client(t, func(o *redis.Options) { o.MaxRetries, o.DialerRetries = -1, 1 })
	s.Kill()
	for _, kind := range kinds {
		l := newLocker(t, kind, rdb, kind, nil)
		for patience := range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+10*patience)*time.Millisecond)
			if _, err := l.TryAcquire(ctx); errors.Is(err, lock.ErrBusy) || err == nil {
				t.Errorf("%s: TryAcquire: %v", kind, err)
			}
			cancel()
		}
	}
}

// What was refused while it cleaned up behind a waiter is done when it can be: the place in the queue goes.
//
//fault:missing-right
func TestAFairWaiterThatMayNotWriteLeavesTheQueueAsSoonAsItMay(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	holder, waiter := newLocker(t, "fair", s.Client(t), "n", nil), newLocker(t, "fair", s.Client(t), "n", &lock.Options{WaiterTTL: time.Hour})
	lease := mustAcquire(t, holder)
	ended := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	go func() { _, err := waiter.Acquire(ctx); ended <- err }()
	queued := func() bool { return s.Admin().ZCard(t.Context(), "{n}:lock:queue").Val() == 1 }
	redistest.Await(t, "it queues", queued)
	if err := s.Admin().ConfigSet(t.Context(), "min-replicas-to-write", "1").Err(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous) {
		t.Errorf("Acquire: %v, want it to tell of Redis", err)
	}
	if err := s.Admin().ConfigSet(t.Context(), "min-replicas-to-write", "0").Err(); err != nil {
		t.Fatal(err)
	}
	redistest.Await(t, "it has left", func() bool { return !queued() })
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A right that is missing is found out before anything is done that would need it: nobody holds the mutex who was
// told otherwise, and no key is left without an end. Nothing else would mend that, since cleaning up needs rights too.
func TestAFairAcquireThatMayNotGoOnHasDoneNothing(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	user := func(name string, rules ...any) *lock.Locker {
		rules = append([]any{"acl", "setuser", name, "on", ">pw", "~*", "&*", "+@all"}, rules...)
		if err := s.Admin().Do(t.Context(), rules...).Err(); err != nil {
			t.Fatal(err)
		}
		rdb := s.Client(t, func(o *redis.Options) { o.Username, o.Password = name, "pw" })
		return newLocker(t, "fair", rdb, name, patient(lock.Options{}))
	}
	exist := func(name string, parts ...string) int64 {
		keys := make([]string, len(parts))
		for i, part := range parts {
			keys[i] = "{" + name + "}:lock" + part
		}
		return s.Admin().Exists(t.Context(), keys...).Val()
	}

	l := user("endless", "-pexpire", "-zrem")
	holder := mustAcquire(t, newLocker(t, "fair", s.Admin(), "endless", nil))
	if _, err := l.Acquire(t.Context()); err == nil || errors.Is(err, lock.ErrBusy) {
		t.Errorf("Acquire = %v, want it to say what to allow", err)
	}
	if n := exist("endless", ":queue", ":alive"); n != 0 {
		t.Errorf("it stands in %d of the queue's two keys, which have no end", n)
	}
	if err := holder.Release(t.Context()); err != nil {
		t.Error(err)
	}

	l = user("taker", "-zrem")
	holder = mustAcquire(t, newLocker(t, "fair", s.Admin(), "taker", nil))
	failed := make(chan error)
	go func() {
		_, err := l.Acquire(t.Context())
		failed <- err
	}()
	redistest.Await(t, "it waits", func() bool { return exist("taker", ":queue") == 1 })
	if err := holder.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-failed; err == nil || errors.Is(err, lock.ErrBusy) {
		t.Errorf("Acquire = %v, want it to say what to allow", err)
	}
	if n := exist("taker", ""); n != 0 {
		t.Error("it holds the mutex, and nobody knows")
	}
}
