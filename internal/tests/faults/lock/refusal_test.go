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
	start func(t *testing.T) *redistest.Server
	begin func(t *testing.T, s *redistest.Server) (end func())
}

func startAlone(t *testing.T) *redistest.Server { return redistest.Start(t) }

// config begins a refusal by a setting, and ends it by another value.
func config(setting, refusing, serving string) func(*testing.T, *redistest.Server) func() {
	return func(t *testing.T, s *redistest.Server) func() {
		redistest.Do(t, s.Admin(), "config", "set", setting, refusing)
		return func() { redistest.Do(t, s.Admin(), "config", "set", setting, serving) }
	}
}

var refusals = []refusal{
	{"BUSY", func(t *testing.T) *redistest.Server { return redistest.Start(t, "--busy-reply-threshold", "20") }, keepBusy},
	{"LOADING", startAlone, reload},
	{"OOM", startAlone, config("maxmemory", "1", "0")},
	{"NOREPLICAS", startAlone, config("min-replicas-to-write", "1", "0")},
	{"MISCONF", startAlone, func(t *testing.T, s *redistest.Server) func() { return redistest.FailSaves(t, s) }},
	{"connection refused", startAlone, func(_ *testing.T, s *redistest.Server) func() { s.Kill(); return s.Restart }},
	{"READONLY", func(t *testing.T) *redistest.Server { return redistest.StartReplica(t, redistest.Start(t)) },
		func(t *testing.T, s *redistest.Server) func() {
			return func() { redistest.Do(t, s.Admin(), "replicaof", "no", "one") }
		}},
}

// keepBusy lets the server run a script without end.
func keepBusy(t *testing.T, s *redistest.Server) (end func()) {
	runs, asks := s.Client(t, unbounded), s.Client(t, redistest.NoRetry)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runs.Do(context.Background(), "eval", "while true do end", 0)
	}()
	redistest.Await(t, "the server is busy", func() bool {
		return redis.HasErrorPrefix(asks.Ping(context.Background()).Err(), "BUSY")
	})
	return func() { redistest.Do(t, s.Admin(), "script", "kill"); <-ended }
}

// reload lets the server load its data for some seconds.
func reload(t *testing.T, s *redistest.Server) (end func()) {
	redistest.Do(t, s.Admin(), "debug", "populate", 10000)
	redistest.Do(t, s.Admin(), "save")
	redistest.Do(t, s.Admin(), "config", "set", "key-load-delay", "300")
	redistest.Do(t, s.Admin(), "config", "set", "loading-process-events-interval-bytes", "1024")
	runs, asks := s.Client(t, unbounded), s.Client(t, redistest.NoRetry)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runs.Do(context.Background(), "debug", "reload", "nosave")
	}()
	redistest.Await(t, "the server is loading", func() bool {
		return redis.IsLoadingError(asks.Ping(context.Background()).Err())
	})
	return func() { <-ended }
}

// A server that answers with a refusal is ErrUnavailable and not ErrBusy, and has granted nothing.
//
//fault:busy-server
//fault:refused-writes
func TestErrUnavailable_Refusals(t *testing.T) {
	for _, r := range refusals {
		t.Run(r.says, func(t *testing.T) {
			t.Parallel()
			s := r.start(t)
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
	all := holdAll(t, s, time.Second, 9*time.Second)
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
		var users []*restricted
		for rule, says := range rights(t, k) {
			u := &restricted{Kind: k, t: t, name: "name" + rule, rule: rule, says: says}
			users = append(users, u)
			u.connect(s)
		}
		var group sync.WaitGroup
		for _, u := range users {
			group.Go(u.use)
		}
		group.Wait()
		for _, u := range users {
			u.check()
			locktest.Left(t, s.Admin(), u.name) // fails the test if a key has no TTL
		}
		if t.Failed() {
			return // it may never be free
		}
		for _, u := range users {
			k.WantFree(t, s, u.name)
		}
	})
}

var callInScript = regexp.MustCompile(`redis\.(p?)call\('(\w+)'`)

// rights returns rules that take a right which the scripts of a kind use, and what the error names:
// nothing if they can do without it, as without the rights to wake waiters.
func rights(t *testing.T, k locktest.Kind) map[string]string {
	rules := map[string]string{
		"-@scripting": "+eval and +evalsha", "-evalsha": "+eval and +evalsha",
		"resetkeys ~other:*": "the keys {name}:lock*",
	}
	for _, act := range []string{"acquire", "renew", "release", "abandon"} {
		own := strings.TrimPrefix(k.Script(t, act), locktest.Shared())
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

// A restricted user lacks one right.
type restricted struct {
	locktest.Kind
	t                *testing.T
	l                *locktest.Locker
	name, rule, says string
	errs             []error
}

func (u *restricted) connect(s *redistest.Server) {
	u.t.Helper()
	user := s.User(u.t, append([]string{"~*", "&*", "+@all"}, strings.Fields(u.rule)...)...)
	const ttl = 1800 * time.Millisecond
	u.l = u.Locker(u.t, s.Client(u.t, user), u.name, hasty, ttl)
}

// use takes, waits for and releases all places, twice, and notes the errors.
func (u *restricted) use() {
	ctx := u.t.Context()
	for range 2 {
		leases := make([]*lock.Lease, u.Size)
		for i := range leases {
			leases[i] = u.acquire(ctx)
		}
		if leases[u.Size-1] != nil { // one more caller has to wait, and leaves
			short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			_ = u.acquire(short).Release(ctx)
			cancel()
			if _, err := u.l.TryAcquire(ctx); err != nil && !errors.Is(err, lock.ErrBusy) {
				u.errs = append(u.errs, err)
			}
		}
		for _, lease := range leases {
			if err := lease.Release(ctx); err != nil {
				u.errs = append(u.errs, err)
			}
		}
		for _, errs := range u.l.Errors() {
			u.errs = append(u.errs, errs...)
		}
	}
}

func (u *restricted) acquire(ctx context.Context) *lock.Lease {
	lease, err := u.l.Acquire(ctx)
	if err != nil && !errors.Is(err, lock.ErrBusy) && !errors.Is(err, context.DeadlineExceeded) {
		u.errs = append(u.errs, err)
	}
	return lease
}

func (u *restricted) check() {
	u.t.Helper()
	// Without these rights only renewals fail, which do not come so soon, or only a mark.
	late := u.says == "" || u.rule == "-pexpire" || u.rule == "-zadd" || u.rule == "-zremrangebyrank"
	if len(u.errs) == 0 && !late {
		u.t.Errorf("%s: it was not missed", u.rule)
	}
	for _, err := range u.errs {
		for _, not := range []error{lock.ErrAmbiguous, lock.ErrUnavailable, lock.ErrLost} {
			if errors.Is(err, not) {
				u.t.Errorf("%s: %v, want it not to be %v", u.rule, err, not)
			}
		}
		if strings.HasPrefix(err.Error(), "lock:") && !strings.Contains(err.Error(), u.says) {
			u.t.Errorf("%s: %v, want it to say %q", u.rule, err, u.says)
		}
	}
}
