package lock_test

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A server that answers with refusals.

// A refusal is a state of a server in which it grants nothing.
type refusal struct {
	says  string // in the error
	begin func(t testing.TB, s *redistest.Server) (end func())
}

var refusals = []refusal{
	{"BUSY", redistest.KeepBusy},
	{"LOADING", redistest.Reload},
	{"OOM", redistest.Config("maxmemory", "1", "0")},
	{"NOREPLICAS", redistest.Config("min-replicas-to-write", "1", "0")},
	{"MISCONF", redistest.FailSaves},
	{"connection refused", func(_ testing.TB, s *redistest.Server) func() { s.Kill(); return s.Restart }},
	{"READONLY", func(t testing.TB, s *redistest.Server) func() {
		redistest.Do(t, s.Admin(), "replicaof", "127.0.0.1", "1") // no server is there
		return func() { redistest.Do(t, s.Admin(), "replicaof", "no", "one") }
	}},
}

// A server that answers with a refusal is ErrUnavailable and not ErrBusy, and has granted nothing.
//
//fault:busy-server
//fault:replica
//fault:refused-writes
func TestErrUnavailable_Refusals(t *testing.T) {
	for _, r := range refusals {
		t.Run(r.says, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			end := r.begin(t, s)
			var callers sync.WaitGroup
			for _, k := range locktest.Kinds {
				l := r.locker(t, k, s)
				for what, call := range map[string]func(context.Context) (*lock.Lease, error){"Acquire": l.Acquire, "TryAcquire": l.TryAcquire} {
					callers.Go(func() {
						lease, err := call(t.Context())
						r.want(t, k, what, lease, err)
					})
				}
			}
			callers.Wait()
			end()
			for _, k := range locktest.Kinds {
				k.WantFree(t, s, k.Name)
			}
		})
	}
}

func (r refusal) locker(t *testing.T, k locktest.Kind, s *redistest.Server) *locktest.Locker {
	var change []func(*redis.Options)
	if r.says == "connection refused" { // a client that retries says so too late
		change = append(change, redistest.NoRetry, func(o *redis.Options) { o.DialerRetries = 1 })
	}
	timeout := firm
	if r.says == "LOADING" { // which does not last
		timeout = hasty
	}
	return k.Locker(t, s.Client(t, change...), k.Name, timeout, locktest.Long)
}

func (r refusal) want(t *testing.T, k locktest.Kind, what string, lease *lock.Lease, err error) {
	switch {
	case lease != nil && r.says == "OOM" && k.Name == "semaphore":
		// It begins with a deletion, after which the server refuses nothing.
		locktest.Release(t, lease)
	case r.says == "LOADING" && errors.Is(err, lock.ErrAmbiguous) && errors.Is(err, context.DeadlineExceeded):
		// The server answers now and then only, and a last try has little time.
	case lease != nil || !errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrBusy) || errors.Is(err, lock.ErrAmbiguous):
		t.Errorf("%s: %s = %v, %v, want ErrUnavailable", k.Name, what, lease, err)
	case !strings.Contains(err.Error(), r.says) && !strings.Contains(err.Error(), "read only"):
		t.Errorf("%s: %s = %v, want it to say %s", k.Name, what, err, r.says)
	}
}

// A lease is renewed and released by a server without memory.
//
//fault:refused-writes
func TestLease_WithoutMemory(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	all := holdAll(t, s.Client(t), time.Second, 9*time.Second)
	redistest.Do(t, s.Admin(), "config", "set", "maxmemory", "1")
	if err := s.Admin().Set(t.Context(), "x", "y", 0).Err(); !redis.IsOOMError(err) {
		t.Fatalf("SET = %v, want OOM", err)
	}
	for _, h := range all {
		redistest.Await(t, "each is renewed, or one is refused", func() bool {
			return h.holder.Count("renewed") >= h.Size || len(h.holder.Errors()) > 0
		})
		h.release(t)
		if errs := h.holder.Errors(); len(errs) > 0 {
			t.Errorf("%s: %v", h.Name, errs)
		}
		if left, _ := locktest.Left(t, s.Admin(), h.Name); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	}
	redistest.Do(t, s.Admin(), "config", "set", "maxmemory", "0")
	for _, h := range all {
		h.WantFree(t, s, h.Name)
	}
}

// A missing right is named, and keeps no other user from the lock. Each command that the scripts
// use is forbidden in turn.
//
//fault:missing-right
func TestAcquire_MissingRight(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		s := redistest.Start(t)
		all := rights(k)
		var group sync.WaitGroup
		for rule, says := range all {
			user := s.User(t, append([]string{"~*", "&*", "+@all"}, strings.Fields(rule)...)...)
			l := k.Locker(t, s.Client(t, user), "name"+rule, hasty, 1800*time.Millisecond)
			// Without these rights only renewals fail, which do not come so soon, or only a mark.
			missed := says != "" && rule != "-pexpire" && rule != "-zadd" && rule != "-zremrangebyrank"
			group.Go(func() {
				errs := errorsOf(t.Context(), k, l)
				if len(errs) == 0 && missed {
					t.Errorf("%s: it was not missed", rule)
				}
				for _, err := range errs {
					for _, not := range []error{lock.ErrAmbiguous, lock.ErrUnavailable, lock.ErrLost} {
						if errors.Is(err, not) {
							t.Errorf("%s: %v, want it not to be %v", rule, err, not)
						}
					}
					if strings.HasPrefix(err.Error(), "lock:") && !strings.Contains(err.Error(), says) {
						t.Errorf("%s: %v, want it to say %q", rule, err, says)
					}
				}
			})
		}
		group.Wait()
		for rule := range all {
			locktest.Left(t, s.Admin(), "name"+rule) // fails the test if a key has no TTL
			k.WantFree(t, s, "name"+rule)
		}
	})
}

var callInScript = regexp.MustCompile(`redis\.(p?)call\('(\w+)'`)

// rights returns rules that take a right which the scripts of a kind use, and what the error names:
// nothing if they can do without it, as without the rights to wake waiters.
func rights(k locktest.Kind) map[string]string {
	rules := map[string]string{
		"-@scripting": "+eval and +evalsha", "-evalsha": "+eval and +evalsha",
		"resetkeys ~other:*": "the keys {name}:lock*",
	}
	for _, act := range []string{"acquire", "renew", "release", "abandon"} {
		own := strings.TrimPrefix(k.Script(act), locktest.Shared())
		for _, text := range []string{locktest.Shared(), own} {
			for _, call := range callInScript.FindAllStringSubmatch(text, -1) {
				rule := "-" + strings.ToLower(call[2])
				if text == own && call[1] == "" {
					rules[rule] = "allow the Redis user what the scripts use"
				} else if rules[rule] == "" {
					rules[rule] = ""
				}
			}
		}
	}
	return rules
}

// errorsOf takes, waits for and releases all places, twice, and returns the errors.
func errorsOf(ctx context.Context, k locktest.Kind, l *locktest.Locker) (errs []error) {
	note := func(lease *lock.Lease, err error) *lock.Lease {
		if err != nil && !errors.Is(err, lock.ErrBusy) && !errors.Is(err, context.DeadlineExceeded) {
			errs = append(errs, err)
		}
		return lease
	}
	for range 2 {
		leases := make([]*lock.Lease, k.Size)
		for i := range leases {
			leases[i] = note(l.Acquire(ctx))
		}
		if leases[k.Size-1] != nil { // one more caller has to wait, and leaves
			short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			_ = note(l.Acquire(short)).Release(ctx)
			cancel()
			note(l.TryAcquire(ctx))
		}
		for _, lease := range leases {
			note(nil, lease.Release(ctx))
		}
	}
	for _, failed := range l.Errors() {
		errs = append(errs, failed...)
	}
	return errs
}

// A missing right shows before a script changes anything that would need it: the mutex is not held,
// and no key is without a TTL. Nothing else could mend that, since cleaning up needs rights too.
//
//fault:missing-right
func TestNewFairMutex_MissingRight(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	locker := func(name string, change ...func(*redis.Options)) *locktest.Locker {
		return locktest.KindOf("fair").Locker(t, s.Client(t, change...), name, locktest.Patient, locktest.Long)
	}
	without := func(name string, rules ...string) *locktest.Locker {
		return locker(name, s.User(t, append([]string{"~*", "&*", "+@all"}, rules...)...))
	}
	exist := func(name string, parts ...string) int64 {
		keys := make([]string, len(parts))
		for i, part := range parts {
			keys[i] = locktest.Key(name) + part
		}
		return s.Admin().Exists(t.Context(), keys...).Val()
	}
	wantNamed := func(err error) {
		t.Helper()
		if err == nil || errors.Is(err, lock.ErrBusy) {
			t.Errorf("Acquire = %v, want it to say what to allow", err)
		}
	}

	l := without("endless", "-pexpire", "-zrem")
	holder := locktest.Take(t, locker("endless"))
	_, err := l.Acquire(t.Context())
	wantNamed(err)
	if n := exist("endless", ":queue", ":alive"); n != 0 {
		t.Errorf("there are %d of the queue's two keys, without a TTL", n)
	}
	locktest.Release(t, holder)

	l = without("taker", "-zrem", "-del") // without DEL what it takes stays
	holder = locktest.Take(t, locker("taker"))
	failed := make(chan error, 1)
	go func() { _, err := l.Acquire(t.Context()); failed <- err }()
	redistest.Await(t, "it waits", func() bool { return exist("taker", ":queue") == 1 })
	locktest.Release(t, holder)
	wantNamed(<-failed)
	if n := exist("taker", ""); n != 0 {
		t.Error("the server says that it holds the mutex")
	}
}
