package lock_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// In these tests Redis, or the way to it, fails. What is asserted throughout: never two holders where one may be,
// nothing left that keeps others waiting, and an error that says what is known.

const (
	// faultHasty is the RedisTimeout of a Locker that is to give up.
	faultHasty = 500 * time.Millisecond

	// faultFirm is the RedisTimeout of a Locker that is to see nothing but refusals: its last try has half of it.
	faultFirm = 2 * time.Second

	// faultPatient is the RedisTimeout of a Locker that is to see no errors but those that a test has made.
	faultPatient = 8 * time.Second

	// faultLong is a TTL that no test waits for: what has gone, somebody has given back.
	faultLong = 10 * time.Minute

	// faultBound tells what RedisTimeout bounds from what the client's own settings do: 5 s and more.
	faultBound = 4 * time.Second
)

// A faultKind is one of the kinds of locks.
type faultKind struct {
	name string
	size int // how many may hold it
	open func(rdb redis.UniversalClient, name string, opts *lock.Options) (*lock.Locker, error)
}

var faultKinds = []faultKind{
	{"mutex", 1, lock.NewMutex},
	{"fair", 1, lock.NewFairMutex},
	{"semaphore", 2, func(rdb redis.UniversalClient, name string, opts *lock.Options) (*lock.Locker, error) {
		return lock.NewSemaphore(rdb, name, 2, opts)
	}},
}

func faultEachKind(t *testing.T, run func(t *testing.T, k faultKind)) {
	t.Parallel()
	for _, k := range faultKinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			run(t, k)
		})
	}
}

// source is the script by which the kind does act.
func (k faultKind) source(t testing.TB, act string) string {
	t.Helper()
	kind := k.name
	if kind == "fair" && (act == "renew" || act == "release") {
		kind = "mutex"
	}
	src, err := os.ReadFile(filepath.Join("lua", kind+"_"+act+".lua"))
	if err != nil {
		t.Fatal(err)
	}
	return string(src)
}

// act matches the commands of one act. The server is made to know the scripts before, so that the first command
// is the one that does it.
func (k faultKind) act(t testing.TB, s *redistest.Server, act string) func(cmd []string) bool {
	t.Helper()
	src := k.source(t, act)
	sha, err := s.Admin().ScriptLoad(t.Context(), src).Result()
	if err != nil {
		t.Fatal(err)
	}
	return func(cmd []string) bool {
		return len(cmd) > 1 && (strings.EqualFold(cmd[0], "evalsha") && cmd[1] == sha ||
			strings.EqualFold(cmd[0], "eval") && cmd[1] == src)
	}
}

func faultKey(name string) string { return "{" + name + "}:lock" }

// holders returns how many hold a lock, by the server.
func (k faultKind) holders(t testing.TB, admin *redis.Client, name string) int {
	t.Helper()
	ctx := context.Background()
	var n int64
	var err error
	if k.name == "semaphore" {
		now := admin.Time(ctx).Val().UnixMilli()
		n, err = admin.ZCount(ctx, faultKey(name), fmt.Sprintf("(%d", now), "+inf").Result()
	} else {
		n, err = admin.Exists(ctx, faultKey(name)).Result()
	}
	if err != nil {
		t.Fatal(err)
	}
	return int(n)
}

// faultLeft returns the keys of a lock other than the fence and the marks of attempts that have ended. All must
// have a TTL.
func faultLeft(t testing.TB, admin *redis.Client, name string) (left, marks []string) {
	t.Helper()
	ctx := context.Background()
	keys, err := admin.Keys(ctx, "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if !strings.HasPrefix(key, faultKey(name)) {
			continue
		}
		if ttl := admin.PTTL(ctx, key).Val(); ttl == -1 {
			t.Errorf("%s is without a TTL", key)
		}
		switch rest := strings.TrimPrefix(key, faultKey(name)); {
		case strings.HasPrefix(rest, ":ended"):
			marks = admin.ZRange(ctx, key, 0, -1).Val()
		case rest != ":fence":
			left = append(left, key)
		}
	}
	return left, marks
}

// free waits until nothing is left of a lock, and checks that all its places can be had again. Who takes a place of a
// semaphore removes those that have ended, which would stay until then for as long as any lease that came after them.
func (k faultKind) free(t testing.TB, s *redistest.Server, name string) {
	t.Helper()
	probe := k.locker(t, s.Client(t), name, faultPatient, faultLong)
	redistest.Await(t, "nothing is left of the lock", func() bool {
		if l, err := probe.TryAcquire(context.Background()); err == nil {
			faultRelease(t, l)
		}
		left, _ := faultLeft(t, s.Admin(), name)
		return len(left) == 0
	})
	for _, l := range k.fill(t, k.locker(t, s.Client(t), name, faultPatient, faultLong)) {
		faultRelease(t, l)
	}
	if left, _ := faultLeft(t, s.Admin(), name); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// A faultLocker is a Locker and what its Trace was told.
type faultLocker struct {
	*lock.Locker
	mu     sync.Mutex
	events map[string]int     // protected by mu: by the name of Trace's field
	losses map[int64]error    // protected by mu: what Trace.Lost was told, by fence
	failed map[string][]error // protected by mu: by op
}

func (k faultKind) locker(t testing.TB, rdb redis.UniversalClient, name string, redisTimeout, ttl time.Duration) *faultLocker {
	t.Helper()
	f := &faultLocker{events: make(map[string]int), losses: make(map[int64]error), failed: make(map[string][]error)}
	event := func(what string) func(context.Context, lock.LeaseInfo) {
		return func(_ context.Context, info lock.LeaseInfo) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.events[what]++
			if what == "lost" {
				f.losses[info.Fence] = info.Err
			}
		}
	}
	_ = rdb.Ping(context.Background()) // a first connection takes longer than a command
	var err error
	f.Locker, err = k.open(rdb, name, &lock.Options{
		TTL: ttl, RedisTimeout: redisTimeout, WaiterTTL: 4 * redisTimeout,
		Trace: &lock.Trace{
			Acquired: event("acquired"), Released: event("released"), Lost: event("lost"), Renewed: event("renewed"),
			RedisError: func(_ context.Context, op string, err error) {
				f.mu.Lock()
				defer f.mu.Unlock()
				f.failed[op] = append(f.failed[op], err)
			},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *faultLocker) told(what string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.events[what]
}

func (f *faultLocker) errors() map[string][]error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.failed)
}

// faultTake takes a lease that is given back at the end of the test, if it is still there.
func faultTake(t testing.TB, l *faultLocker) *lock.Lease {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	lease, err := l.Acquire(ctx)
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	t.Cleanup(func() { _ = lease.Release(context.Background()) })
	return lease
}

// fill takes all places.
func (k faultKind) fill(t testing.TB, l *faultLocker) (leases []*lock.Lease) {
	t.Helper()
	for range k.size {
		leases = append(leases, faultTake(t, l))
	}
	return leases
}

func faultRelease(t testing.TB, l *lock.Lease) {
	t.Helper()
	if err := l.Release(context.Background()); err != nil {
		t.Errorf("Release = %v", err)
	}
}

// wait begins an Acquire and returns when it has begun to ask.
func (k faultKind) wait(t testing.TB, l *faultLocker) (got func() *lock.Lease) {
	t.Helper()
	leases := make(chan *lock.Lease, 1)
	waits := &faultAsked{Context: context.Background(), asked: make(chan struct{})}
	go func() {
		lease, err := l.Acquire(waits)
		if err != nil {
			t.Errorf("a waiter's Acquire = %v", err)
		}
		leases <- lease
	}()
	<-waits.asked
	return func() *lock.Lease {
		t.Helper()
		select {
		case lease := <-leases:
			if lease == nil {
				t.FailNow()
			}
			t.Cleanup(func() { _ = lease.Release(context.Background()) })
			return lease
		case <-time.After(30 * time.Second):
			t.Fatal("the waiter is stuck")
			return nil
		}
	}
}

// A faultAsked is a context that tells when its Done has been asked for: by a waiter, at the latest between two
// commands.
type faultAsked struct {
	context.Context
	once  sync.Once
	asked chan struct{}
}

func (c *faultAsked) Done() <-chan struct{} {
	c.once.Do(func() { close(c.asked) })
	return nil
}

// lost waits until the context of a lease has ended, and checks its cause, and that Release and Trace agree.
func (f *faultLocker) lost(t testing.TB, lease *lock.Lease, because string) {
	t.Helper()
	select {
	case <-lease.Context().Done():
	case <-time.After(30 * time.Second):
		t.Fatal("the holder is not told")
	}
	if err := context.Cause(lease.Context()); !errors.Is(err, lock.ErrLost) {
		t.Errorf("the lease's context has ended by %v, want ErrLost", err)
	}
	if err := lease.Release(context.Background()); !errors.Is(err, lock.ErrLost) {
		t.Errorf("Release = %v, want ErrLost", err)
	}
	var why error
	redistest.Await(t, "Trace is told of the loss", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		why = f.losses[lease.Fence()]
		return why != nil
	})
	if !errors.Is(why, lock.ErrLost) || !strings.Contains(why.Error(), because) {
		t.Errorf("Trace was told %v, want ErrLost because %q", why, because)
	}
}

// A faultHeld is a lock of some kind, named by it, and those who hold all its places.
type faultHeld struct {
	faultKind
	holder *faultLocker
	leases []*lock.Lease
}

// faultHold has all places of a lock of each kind held. A test in which time has to go by does it once for all.
func faultHold(t testing.TB, s *redistest.Server, redisTimeout, ttl time.Duration) (all []faultHeld) {
	t.Helper()
	for _, k := range faultKinds {
		h := faultHeld{faultKind: k, holder: k.locker(t, s.Client(t), k.name, redisTimeout, ttl)}
		h.leases = k.fill(t, h.holder)
		all = append(all, h)
	}
	return all
}

// renewed waits until each lease has been renewed.
func (h faultHeld) renewed(t testing.TB) {
	t.Helper()
	redistest.Await(t, "each is renewed", func() bool { return h.holder.told("renewed") >= h.size })
}

func (h faultHeld) release(t testing.TB) {
	t.Helper()
	for _, l := range h.leases {
		faultRelease(t, l)
	}
	if n := h.holder.told("lost"); n != 0 {
		t.Errorf("%s: Trace was told of %d lost", h.name, n)
	}
}

const (
	faultGone       = "gone from Redis"
	faultNotRenewed = "not be renewed"
)

func faultOnce(o *redis.Options) { o.MaxRetries = -1 }

// faultImpatient makes a client that soon gives up a connection on which nothing comes.
func faultImpatient(o *redis.Options) { o.ReadTimeout = 100 * time.Millisecond }

// faultWays are the ways to lose a command such that there is time to try it again.
var faultWays = []struct {
	name    string
	action  redistest.Action
	cut     bool // the connection, when the fault has come about
	clients map[string]func(*redis.Options)
}{
	{"request lost", redistest.CloseBefore, false, map[string]func(*redis.Options){"client tries again": func(*redis.Options) {}, "client does not": faultOnce}},
	{"reply lost", redistest.HoldReply, true, map[string]func(*redis.Options){"client tries again": func(*redis.Options) {}, "client does not": faultOnce}},
	{"request lost in silence", redistest.DropRequest, false, map[string]func(*redis.Options){"client gives up": faultImpatient}},
	{"reply lost in silence", redistest.MuteReply, false, map[string]func(*redis.Options){"client gives up": faultImpatient}},
}

func faultEachWay(t *testing.T, run func(t *testing.T, k faultKind, s *redistest.Server, p *redistest.Proxy, rdb *redis.Client, fault func(act string) *redistest.Rule)) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		for _, way := range faultWays {
			for client, change := range way.clients {
				t.Run(way.name+", "+client, func(t *testing.T) {
					s := redistest.Shared(t)
					p := redistest.NewProxy(t, s.Addr)
					run(t, k, s, p, p.Client(t, change), func(act string) *redistest.Rule {
						rule := p.On(k.act(t, s, act), way.action).Times(1)
						if way.cut {
							go func() {
								select {
								case <-rule.Hit():
									p.Cut()
								case <-t.Context().Done():
								}
							}()
						}
						return rule
					})
				})
			}
		}
	})
}

func faultFired(t testing.TB, rule *redistest.Rule) {
	t.Helper()
	select {
	case <-rule.Hit():
	case <-time.After(30 * time.Second):
		t.Fatal("the fault has not come about")
	}
}

//fault:lost-request
func TestALostAcquireIsTriedAgainAndTakesOnce(t *testing.T) {
	faultEachWay(t, func(t *testing.T, k faultKind, s *redistest.Server, p *redistest.Proxy, rdb *redis.Client, fault func(string) *redistest.Rule) {
		name := redistest.Namespace(t)
		before := faultTake(t, k.locker(t, s.Client(t), name, faultPatient, faultLong))
		faultRelease(t, before)
		rule := fault("acquire")
		l := k.locker(t, rdb, name, faultPatient, faultLong)
		lease := faultTake(t, l)
		faultFired(t, rule)
		if n := k.holders(t, s.Admin(), name); n != 1 {
			t.Errorf("%d hold it, want 1", n)
		}
		if last, _ := s.Admin().Get(t.Context(), faultKey(name)+":fence").Int64(); lease.Fence() != last || last <= before.Fence() {
			t.Errorf("fence %d, in Redis %d, before %d", lease.Fence(), last, before.Fence())
		}
		faultRelease(t, lease)
		if a, r, n := l.told("acquired"), l.told("released"), l.told("lost"); a != 1 || r != 1 || n != 0 {
			t.Errorf("Trace was told of %d acquired, %d released, %d lost", a, r, n)
		}
		k.free(t, s, name)
	})
}

//fault:lost-reply
func TestALostReplyOfAnAcquireDoesNotChangeItsFence(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		s := redistest.Shared(t)
		p := redistest.NewProxy(t, s.Addr)
		name := redistest.Namespace(t)
		rule := p.On(k.act(t, s, "acquire"), redistest.HoldReply).Times(1)
		got := k.wait(t, k.locker(t, p.Client(t, faultOnce), name, faultPatient, faultLong))
		faultFired(t, rule)
		granted := s.Admin().Get(t.Context(), faultKey(name)+":fence").Val()
		p.Cut()
		if lease := got(); fmt.Sprint(lease.Fence()) != granted {
			t.Errorf("fence %d, want %s", lease.Fence(), granted)
		}
	})
}

//fault:lost-request
func TestALostReleaseIsTriedAgainAndReturnsNil(t *testing.T) {
	faultEachWay(t, func(t *testing.T, k faultKind, s *redistest.Server, p *redistest.Proxy, rdb *redis.Client, fault func(string) *redistest.Rule) {
		name := redistest.Namespace(t)
		l := k.locker(t, rdb, name, faultPatient, faultLong)
		lease := faultTake(t, l)
		rule := fault("release")
		faultRelease(t, lease)
		faultFired(t, rule)
		if left, _ := faultLeft(t, s.Admin(), name); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
		if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrLost) {
			t.Errorf("the second Release = %v, want ErrLost", err)
		}
		if r, n := l.told("released"), l.told("lost"); r != 1 || n != 0 {
			t.Errorf("Trace was told of %d released and %d lost", r, n)
		}
		k.free(t, s, name)
	})
}

// All of one client at once, since each waits for its renewal.
//
//fault:lost-request
func TestALostRenewalIsTriedAgainAndLosesNothing(t *testing.T) {
	t.Parallel()
	s := redistest.Shared(t)
	for _, k := range faultKinds {
		for _, way := range faultWays {
			p := redistest.NewProxy(t, s.Addr)
			for what, change := range way.clients {
				l := k.locker(t, p.Client(t, change), redistest.Namespace(t), time.Second, 9*time.Second)
				rule := p.On(k.act(t, s, "renew"), way.action).Times(1)
				lease := faultTake(t, l)
				defer func() {
					faultFired(t, rule)
					p.Cut()
					redistest.Await(t, "it is renewed", func() bool { return l.told("renewed") > 0 })
					faultRelease(t, lease)
					if n := l.told("lost"); n != 0 {
						t.Errorf("%s, %s, %s: Trace was told of %d lost", k.name, way.name, what, n)
					}
				}()
				break // the client's own retries are of no matter here: one of them will do
			}
		}
	}
}

//fault:silence
func TestASilentRedisCostsAnAcquireOneRedisTimeoutAndNothingIsLeft(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		for what, action := range map[string]redistest.Action{"request lost": redistest.DropRequest, "reply lost": redistest.MuteReply} {
			t.Run(what, func(t *testing.T) {
				s := redistest.Shared(t)
				p := redistest.NewProxy(t, s.Addr)
				name := redistest.Namespace(t)
				rule := p.On(k.act(t, s, "acquire"), action).Times(1)
				l := k.locker(t, p.Client(t), name, faultHasty, faultLong)
				begun := time.Now()
				lease, err := l.Acquire(t.Context())
				if took := time.Since(begun); took > faultBound {
					t.Errorf("Acquire took %v", took)
				}
				if lease != nil || !errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, lock.ErrBusy) || errors.Is(err, lock.ErrUnavailable) {
					t.Fatalf("Acquire = %v, %v, want ErrAmbiguous", lease, err)
				}
				faultFired(t, rule)
				k.free(t, s, name)
			})
		}
	})
}

//fault:silence
func TestASilentRedisCostsAReleaseOneRedisTimeoutAndItIsGivenBackBehindTheCall(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		for what, action := range map[string]redistest.Action{"request lost": redistest.DropRequest, "reply lost": redistest.MuteReply} {
			t.Run(what, func(t *testing.T) {
				s := redistest.Shared(t)
				p := redistest.NewProxy(t, s.Addr)
				name := redistest.Namespace(t)
				l := k.locker(t, p.Client(t), name, faultHasty, faultLong)
				lease := faultTake(t, l)
				rule := p.On(k.act(t, s, "release"), action).Times(1)
				begun := time.Now()
				err := lease.Release(t.Context())
				if took := time.Since(begun); took > faultBound {
					t.Errorf("Release took %v", took)
				}
				if !errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, lock.ErrLost) {
					t.Errorf("Release = %v, want ErrAmbiguous", err)
				}
				faultFired(t, rule)
				redistest.Await(t, "it is told to be released", func() bool { return l.told("released") == 1 })
				if n := l.told("lost"); n != 0 {
					t.Errorf("Trace was told of %d lost", n)
				}
				k.free(t, s, name)
			})
		}
	})
}

// Every reply to an acquire is lost. The cleaning up may meet faults of its own.
//
//fault:no-reply
func TestAnAcquireThatIsNeverAnsweredIsAmbiguousAndUndone(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		for what, abandon := range map[string]redistest.Action{
			"cleaned up at once":                   redistest.Pass,
			"cleaning up: request lost":            redistest.CloseBefore,
			"cleaning up: request lost in silence": redistest.DropRequest,
			"cleaning up: reply lost":              redistest.DropReply,
			"cleaning up: reply lost in silence":   redistest.MuteReply,
		} {
			t.Run(what, func(t *testing.T) {
				s := redistest.Shared(t)
				p := redistest.NewProxy(t, s.Addr)
				name := redistest.Namespace(t)
				rule := p.On(k.act(t, s, "acquire"), redistest.DropReply)
				cleans := p.On(k.act(t, s, "abandon"), abandon).Times(1)
				lease, err := k.locker(t, p.Client(t, faultOnce), name, faultHasty, faultLong).Acquire(t.Context())
				if lease != nil || !errors.Is(err, lock.ErrAmbiguous) {
					t.Fatalf("Acquire = %v, %v, want ErrAmbiguous", lease, err)
				}
				if rule.Fired() < 2 {
					t.Errorf("it was tried %d times, want more", rule.Fired())
				}
				faultFired(t, cleans)
				k.free(t, s, name)
			})
		}
	})
}

// What comes after the lost reply says nothing about the command before it: it has been executed.
//
//fault:lost-reply-then-refused
func TestALostReplyIsNotForgottenWhenRedisCannotBeReachedAfterIt(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		for client, change := range map[string]func(*redis.Options){
			"client tries again": func(o *redis.Options) { o.DialerRetries = 1 },
			"client does not":    func(o *redis.Options) { o.DialerRetries, o.MaxRetries = 1, -1 },
		} {
			for _, act := range []string{"acquire", "release"} {
				t.Run(act+", "+client, func(t *testing.T) {
					s := redistest.Shared(t)
					p := redistest.NewProxy(t, s.Addr)
					name := redistest.Namespace(t)
					rule := p.On(k.act(t, s, act), redistest.HoldReply).Times(1)
					l := k.locker(t, p.Client(t, change), name, time.Second, faultLong)
					failed := make(chan error, 1)
					go func() {
						lease, err := l.Acquire(context.Background())
						if act == "release" && err == nil {
							err = lease.Release(context.Background())
						}
						failed <- err
					}()
					faultFired(t, rule)
					p.Refuse(true)
					p.Cut()
					if err := <-failed; !errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, lock.ErrUnavailable) {
						t.Errorf("%v, want ErrAmbiguous", err)
					}
					p.Refuse(false)
					k.free(t, s, name)
				})
			}
		}
	})
}

// faultExecuted waits until the server has executed one more script than before release was called.
func faultExecuted(t testing.TB, s *redistest.Server, release func()) {
	t.Helper()
	before := s.Calls("evalsha")
	release()
	redistest.Await(t, "the late command is executed", func() bool { return s.Calls("evalsha") > before })
}

//fault:late-command
func TestAnAcquireThatArrivesWhenItsCallerHasGivenUpTakesNothing(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		for _, what := range []string{"after RedisTimeout", "with its context"} {
			t.Run(what, func(t *testing.T) {
				s := redistest.Start(t)
				p := redistest.NewProxy(t, s.Addr)
				name := redistest.Namespace(t)
				rule := p.On(k.act(t, s, "acquire"), redistest.HoldRequest).Times(1)
				k.act(t, s, "abandon")
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				timeout := faultHasty
				if what == "with its context" {
					timeout = faultPatient
					go func() { <-rule.Hit(); cancel() }()
				}
				lease, err := k.locker(t, p.Client(t, faultOnce), name, timeout, faultLong).Acquire(ctx)
				if lease != nil || !errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, context.Canceled) != (ctx.Err() != nil) {
					t.Fatalf("Acquire = %v, %v, want ErrAmbiguous", lease, err)
				}
				redistest.Await(t, "the attempt is marked as abandoned", func() bool {
					_, marks := faultLeft(t, s.Admin(), name)
					return len(marks) == 1
				})
				faultExecuted(t, s, rule.Release)
				if left, _ := faultLeft(t, s.Admin(), name); len(left) > 0 {
					t.Errorf("the late command has left %q", left)
				}
				k.free(t, s, name)
			})
		}
	})
}

// The same, where a second try has been answered, and its lease is over.
//
//fault:late-command
func TestAnAcquireThatArrivesAfterTheReleaseTakesNothing(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		s := redistest.Start(t)
		p := redistest.NewProxy(t, s.Addr)
		name := redistest.Namespace(t)
		rule := p.On(k.act(t, s, "acquire"), redistest.HoldRequest).Times(1)
		k.act(t, s, "release")
		got := k.wait(t, k.locker(t, p.Client(t, faultOnce), name, faultPatient, faultLong))
		faultFired(t, rule)
		p.Cut() // it tries again, on another connection
		faultRelease(t, got())
		faultExecuted(t, s, rule.Release)
		if left, _ := faultLeft(t, s.Admin(), name); len(left) > 0 {
			t.Errorf("the late command has left %q", left)
		}
		k.free(t, s, name)
	})
}

// holding returns what is known about the holders.
func (k faultKind) holding(t testing.TB, admin *redis.Client, name string) string {
	t.Helper()
	ctx := context.Background()
	if k.name == "semaphore" {
		return fmt.Sprint(admin.ZRangeWithScores(ctx, faultKey(name), 0, -1).Val(), admin.HGetAll(ctx, faultKey(name)+":details").Val())
	}
	return admin.Get(ctx, faultKey(name)).Val()
}

//fault:late-command
func TestARenewalThatArrivesLateBringsNothingBackAndTouchesNoSuccessor(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		for _, what := range []string{"nobody holds it", "others hold it"} {
			t.Run(what, func(t *testing.T) {
				s := redistest.Start(t)
				p := redistest.NewProxy(t, s.Addr)
				admin, name := s.Admin(), redistest.Namespace(t)
				rule := p.On(k.act(t, s, "renew"), redistest.HoldRequest).Times(1)
				l := k.locker(t, p.Client(t, faultOnce), name, faultHasty, 1800*time.Millisecond)
				lease := faultTake(t, l)
				faultFired(t, rule)
				p.Refuse(true) // no other renewal
				l.lost(t, lease, faultNotRenewed)
				redistest.Await(t, "the lease has ended", func() bool { return k.holders(t, admin, name) == 0 })
				if what == "others hold it" {
					k.fill(t, k.locker(t, s.Client(t), name, faultPatient, faultLong))
				}
				before, left := k.holding(t, admin, name), admin.PTTL(t.Context(), faultKey(name)).Val()
				faultExecuted(t, s, rule.Release)
				if now := k.holding(t, admin, name); now != before {
					t.Errorf("the lock had %s, and has %s", before, now)
				}
				if now := admin.PTTL(t.Context(), faultKey(name)).Val(); now > left || left > 0 && now < left/2 {
					t.Errorf("the lock had %v to live, and has %v", left, now)
				}
			})
		}
	})
}

//fault:late-command
func TestAReleaseThatArrivesLateDoesNotHitTheSuccessor(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		s := redistest.Start(t)
		p := redistest.NewProxy(t, s.Addr)
		admin, name := s.Admin(), redistest.Namespace(t)
		l := k.locker(t, p.Client(t, faultOnce), name, faultHasty, faultLong)
		lease := faultTake(t, l)
		rule := p.On(k.act(t, s, "release"), redistest.HoldRequest).Times(1)
		if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("Release = %v, want ErrAmbiguous", err)
		}
		faultFired(t, rule)
		redistest.Await(t, "another try has released it", func() bool { return l.told("released") == 1 })
		k.fill(t, k.locker(t, s.Client(t), name, faultPatient, faultLong))
		before := k.holding(t, admin, name)
		faultExecuted(t, s, rule.Release)
		if now := k.holding(t, admin, name); now != before || before == "" {
			t.Errorf("the lock had %s, and has %s", before, now)
		}
	})
}

// Every command is delivered once more, at once or when all is over.
//
//fault:repeated-command
func TestACommandThatIsDeliveredTwiceCountsOnce(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		s := redistest.Shared(t)
		p := redistest.NewProxy(t, s.Addr)
		admin, name := s.Admin(), redistest.Namespace(t)
		var mu sync.Mutex
		seen := make(map[string][]any) // the last one of each act
		for _, act := range []string{"acquire", "renew", "release", "abandon"} {
			match := k.act(t, s, act)
			p.On(func(cmd []string) bool {
				if match(cmd) {
					mu.Lock()
					defer mu.Unlock()
					seen[act] = nil
					for _, arg := range cmd {
						seen[act] = append(seen[act], arg)
					}
				}
				return false
			}, redistest.Pass)
		}
		again := func(act string) string {
			t.Helper()
			mu.Lock()
			cmd := seen[act]
			mu.Unlock()
			if cmd == nil {
				t.Fatalf("there was no %s", act)
			}
			v, err := admin.Do(t.Context(), cmd...).Result()
			if err != nil {
				t.Fatalf("%s again: %v", act, err)
			}
			return fmt.Sprint(v)
		}
		l := k.locker(t, p.Client(t), name, time.Second, 4*time.Second)
		lease := faultTake(t, l)
		if got, want := again("acquire"), fmt.Sprint(lease.Fence()); got != want {
			t.Errorf("a second acquire was answered %s, want %s", got, want)
		}
		if n := k.holders(t, admin, name); n != 1 {
			t.Errorf("%d hold it after a second acquire", n)
		}
		redistest.Await(t, "it is renewed", func() bool { return l.told("renewed") > 0 })
		if got := again("renew"); got != "1" {
			t.Errorf("a second renewal was answered %s, want 1", got)
		}
		if n := k.holders(t, admin, name); n != 1 {
			t.Errorf("%d hold it after a second renewal", n)
		}
		faultRelease(t, lease)

		others := k.fill(t, k.locker(t, s.Client(t), name, faultPatient, faultLong))
		before := k.holding(t, admin, name)
		for act, want := range map[string]string{"release": "1", "renew": "0", "acquire": "[refused 0"} {
			if got := again(act); !strings.HasPrefix(got, want) {
				t.Errorf("a %s after the release was answered %s, want %s", act, got, want)
			}
		}
		_, known := faultLeft(t, admin, name)
		// One that waits and leaves, for an abandon; its command is lost, or a mutex would have nothing to undo.
		rule := p.On(k.act(t, s, "acquire"), redistest.DropReply)
		if _, err := l.Acquire(t.Context()); !errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("Acquire = %v, want ErrAmbiguous", err)
		}
		faultFired(t, rule)
		redistest.Await(t, "the attempt is abandoned", func() bool {
			_, marks := faultLeft(t, admin, name)
			return len(marks) == len(known)+1
		})
		if got := again("abandon"); got != "0" {
			t.Errorf("a second abandon was answered %s, want 0", got)
		}
		if got := again("acquire"); !strings.HasPrefix(got, "[refused 0") {
			t.Errorf("an acquire after its abandon was answered %s, want it refused", got)
		}
		if now := k.holding(t, admin, name); now != before {
			t.Errorf("the lock had %s, and has %s", before, now)
		}
		for _, other := range others {
			faultRelease(t, other)
		}
		k.free(t, s, name)
	})
}

// A faultHole is a hook that lets every reply come late by slow, and while it is on swallows what is sent: that
// fails when its context ends, as with a silent server.
type faultHole struct {
	on   atomic.Bool
	slow time.Duration
}

func (h *faultHole) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h *faultHole) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if h.on.Load() {
			<-ctx.Done()
			cmd.SetErr(ctx.Err())
			return ctx.Err()
		}
		defer time.Sleep(h.slow)
		return next(ctx, cmd)
	}
}
func (h *faultHole) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Time is the bubble's: nobody is held up, so that the order of ends and grants is exact. Replies take longer than
// the margin, which must not be needed for them.
//
//fault:isolated-holder
func TestAHolderThatIsCutOffIsToldBeforeAnotherAcquires(t *testing.T) {
	const ttl, timeout = 3 * time.Second, 500 * time.Millisecond
	for _, k := range faultKinds {
		for _, cut := range []time.Duration{0, ttl / 6, ttl/3 - 1, ttl / 3, ttl / 2, ttl, 5 * ttl / 2} { // after the grant
			t.Run(fmt.Sprintf("%s cut off after %v", k.name, cut), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					m, rdb := redistest.StartMini(t)
					hole := faultHole{slow: ttl / 8}
					far := redistest.NewMiniClient(t, m)
					far.AddHook(&hole)
					for _, act := range []string{"acquire", "renew"} {
						rdb.ScriptLoad(t.Context(), k.source(t, act)) // or the first of each takes two commands
					}
					holder := k.locker(t, far, "name", timeout, ttl)
					leases := k.fill(t, holder)
					time.Sleep(cut)
					hole.on.Store(true)
					begun := time.Now()
					next, err := k.locker(t, rdb, "name", timeout, ttl).Acquire(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					if took := time.Since(begun); took > ttl+200*time.Millisecond {
						t.Errorf("another has acquired it after %v, later than TTL and a pause", took)
					}
					lost := 0
					for _, l := range leases {
						if l.Context().Err() != nil {
							lost++
							if err := context.Cause(l.Context()); !errors.Is(err, lock.ErrLost) {
								t.Errorf("the cause is %v, want ErrLost", err)
							}
						}
					}
					if lost == 0 {
						t.Error("another has acquired it, and no holder knows yet")
					}
					time.Sleep(3*ttl - time.Since(begun))
					hole.on.Store(false)
					for _, l := range leases {
						holder.lost(t, l, faultNotRenewed)
					}
					if err := next.Release(t.Context()); err != nil {
						t.Errorf("the successor's Release = %v", err)
					}
				})
			})
		}
	}
}

//fault:short-partition
func TestAPartitionShorterThanTheTTLLosesNothing(t *testing.T) {
	const ttl, timeout = 3 * time.Second, 500 * time.Millisecond
	for _, k := range faultKinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				m, rdb := redistest.StartMini(t)
				var hole faultHole
				far := redistest.NewMiniClient(t, m)
				far.AddHook(&hole)
				holder := k.locker(t, far, "name", timeout, ttl)
				leases := k.fill(t, holder)
				other := k.locker(t, rdb, "name", timeout, ttl)
				for range 20 {
					// The partition begins at the renewal, at worst: from then on there are two thirds of a TTL,
					// less the margin, a command under way and the time until the next one.
					hole.on.Store(true)
					time.Sleep(ttl - ttl/3 - ttl/20 - timeout - ttl/10)
					hole.on.Store(false)
					time.Sleep(ttl/3 + 7*time.Millisecond) // so that the next one begins elsewhere
					if _, err := other.TryAcquire(t.Context()); !errors.Is(err, lock.ErrBusy) {
						t.Fatalf("TryAcquire of another = %v, want ErrBusy", err)
					}
				}
				if len(holder.errors()["renew"]) == 0 {
					t.Error("no renewal has failed")
				}
				for _, l := range leases {
					faultRelease(t, l)
				}
				if n := holder.told("lost"); n != 0 {
					t.Errorf("Trace was told of %d lost", n)
				}
			})
		})
	}
}

//fault:isolated-holder
func TestABlackHoleLosesTheLeaseAndOthersGetIt(t *testing.T) {
	t.Parallel()
	const ttl = 1800 * time.Millisecond
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	type cut struct {
		faultHeld
		before string
		others []*lock.Lease
	}
	var all []cut
	for _, k := range faultKinds {
		c := cut{faultHeld: faultHeld{faultKind: k, holder: k.locker(t, p.Client(t), k.name, faultHasty, ttl)}}
		c.leases = k.fill(t, c.holder)
		all = append(all, c)
	}
	begun := time.Now()
	p.BlackHole(true)
	for i := range all {
		c := &all[i]
		c.others = c.fill(t, c.locker(t, s.Client(t), c.name, faultPatient, faultLong))
		c.before = c.holding(t, s.Admin(), c.name)
		for _, l := range c.leases {
			c.holder.lost(t, l, faultNotRenewed)
		}
	}
	redistest.Await(t, "three TTLs are over", func() bool { return time.Since(begun) > 3*ttl })
	p.BlackHole(false)
	for _, c := range all {
		if _, err := c.locker(t, p.Client(t), c.name, faultPatient, faultLong).TryAcquire(t.Context()); !errors.Is(err, lock.ErrBusy) {
			t.Errorf("%s: TryAcquire = %v, want ErrBusy", c.name, err)
		}
		if now := c.holding(t, s.Admin(), c.name); now != c.before {
			t.Errorf("the lock had %s, and has %s", c.before, now)
		}
		for _, l := range c.others {
			faultRelease(t, l)
		}
		c.free(t, s, c.name)
	}
}

// From here on it is the server that fails.

//fault:script-flush
func TestScriptFlushesAreNotSeen(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				if err := s.Admin().ScriptFlush(context.Background()).Err(); err != nil {
					t.Error(err)
				}
			}
		}
	}()
	for _, k := range faultKinds {
		a := k.locker(t, s.Client(t), k.name, faultPatient, faultLong)
		b := k.locker(t, s.Client(t), k.name, faultPatient, faultLong)
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for range 10 {
					lease, err := []*faultLocker{a, b}[i%2].Acquire(context.Background())
					if err != nil {
						t.Errorf("Acquire = %v", err)
						return
					}
					faultRelease(t, lease)
				}
			})
		}
		wg.Wait()
		for _, l := range []*faultLocker{a, b} {
			if errs := l.errors(); len(errs) > 0 {
				t.Errorf("%s: %v", k.name, errs)
			}
		}
		k.free(t, s, k.name)
	}
	renewed := faultKinds[2].locker(t, s.Client(t), "renewed", 500*time.Millisecond, 3*time.Second)
	faultTake(t, renewed)
	redistest.Await(t, "it is renewed", func() bool { return renewed.told("renewed") > 0 })
	close(stop)
	<-stopped
	if s.Calls("script|flush") < 10 || s.Calls("eval") == 0 {
		t.Errorf("the fault has not come about: %v", s.AllCalls())
	}
}

// Redis forgets everything, in one way or another, while leases are held and waited for.
//
//fault:flushall
func TestWhenRedisForgetsHoldersAreToldAndWaitersGoOn(t *testing.T) {
	t.Parallel()
	for what, forget := range map[string]func(t *testing.T, s *redistest.Server){
		"by FLUSHALL": func(t *testing.T, s *redistest.Server) { faultDo(t, s)("flushall") },
		"by a crash":  func(t *testing.T, s *redistest.Server) { s.Restart() },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			all := faultHold(t, s, time.Second, 6*time.Second)
			waiters := make(map[string][]func() *lock.Lease)
			for _, h := range all {
				for range h.size {
					waiters[h.name] = append(waiters[h.name], h.wait(t, h.locker(t, s.Client(t), h.name, faultPatient, faultLong)))
				}
			}
			forget(t, s)
			for _, h := range all {
				var fences []int64
				for _, got := range waiters[h.name] {
					fences = append(fences, got().Fence())
				}
				before := h.holding(t, s.Admin(), h.name)
				for _, l := range h.leases {
					h.holder.lost(t, l, faultGone) // by a renewal, not by the want of one
					if slices.Min(fences) <= l.Fence() {
						t.Errorf("fences %v after %d", fences, l.Fence())
					}
				}
				if now := h.holding(t, s.Admin(), h.name); now != before {
					t.Errorf("the lock had %s, and has %s after the old holders' Release", before, now)
				}
			}
		})
	}
}

// A release before the holder knows is refused as well.
//
//fault:flushall
func TestAReleaseAfterAFlushIsLostAndTouchesNothing(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		s := redistest.Start(t)
		l := k.locker(t, s.Client(t), "name", faultPatient, faultLong)
		lease := faultTake(t, l)
		if err := s.Admin().FlushAll(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		k.fill(t, k.locker(t, s.Client(t), "name", faultPatient, faultLong))
		before := k.holding(t, s.Admin(), "name")
		if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrLost) {
			t.Errorf("Release = %v, want ErrLost", err)
		}
		if now := k.holding(t, s.Admin(), "name"); now != before {
			t.Errorf("the lock had %s, and has %s", before, now)
		}
		if r, n := l.told("released"), l.told("lost"); r != 0 || n != 1 {
			t.Errorf("Trace was told of %d released and %d lost", r, n)
		}
	})
}

// Somebody deletes one key, or puts something else there, while leases are held and waited for. Whatever it is,
// everybody hears of it or goes on, and when the foreign key is gone all is well.
//
//fault:foreign-key
func TestNobodyIsStuckWhenOneKeyIsLostOrForeign(t *testing.T) {
	suffixes := map[string][]string{
		"mutex":     {"", ":fence"},
		"fair":      {"", ":fence", ":queue", ":alive"},
		"semaphore": {"", ":fence", ":details"},
	}
	damages := map[string][]any{
		"deleted":  nil,
		"a list":   {"rpush", "x"},
		"a string": {"set", "x"},
		"a zset":   {"zadd", 1, "x"},
		"a hash":   {"hset", "x", "y"},
	}
	faultEachKind(t, func(t *testing.T, k faultKind) {
		s := redistest.Start(t)
		admin := s.Admin()
		type victim struct {
			name, key string
			leases    []*lock.Lease
			waits     chan error
		}
		var victims []victim
		for _, suffix := range suffixes[k.name] {
			for what, damage := range damages {
				name := "the key " + suffix + " is " + what
				v := victim{name: name, key: faultKey(name) + suffix, waits: make(chan error, 1)}
				v.leases = k.fill(t, k.locker(t, s.Client(t), name, 400*time.Millisecond, 2*time.Second))
				waiter := k.locker(t, s.Client(t), name, 400*time.Millisecond, 2*time.Second)
				waits := &faultAsked{Context: context.Background(), asked: make(chan struct{})}
				go func() {
					lease, err := waiter.Acquire(waits)
					if err == nil {
						err = lease.Release(context.Background())
					}
					v.waits <- err
				}()
				<-waits.asked
				if k.name == "fair" {
					redistest.Await(t, "the waiter is in the queue", func() bool {
						return admin.ZCard(context.Background(), faultKey(name)+":queue").Val() == 1
					})
				}
				var was *redis.IntCmd
				if _, err := admin.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
					was = p.Del(t.Context(), v.key)
					if damage != nil {
						p.Do(t.Context(), append([]any{damage[0], v.key}, damage[1:]...)...)
					}
					return nil
				}); err != nil || was.Val() != 1 {
					t.Errorf("%s: %d deleted, %v", name, was.Val(), err)
				}
				victims = append(victims, v)
			}
		}
		says := func(v victim, who string, err error) {
			t.Helper()
			if err != nil && !strings.Contains(err.Error(), "holds something else") && !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrLost) {
				t.Errorf("%s: %s was told %v", v.name, who, err)
			}
			if errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, lock.ErrBusy) {
				t.Errorf("%s: %s was told %v", v.name, who, err)
			}
		}
		for _, v := range victims {
			for _, lease := range v.leases {
				says(v, "a holder", lease.Release(t.Context()))
			}
			select {
			case err := <-v.waits:
				says(v, "the waiter", err)
			case <-time.After(30 * time.Second):
				t.Fatalf("%s: the waiter is stuck", v.name)
			}
			admin.Del(t.Context(), v.key)
		}
		for _, v := range victims {
			k.free(t, s, v.name)
		}
	})
}

//fault:short-freeze
func TestAServerFrozenForLessThanTheTTLLosesNothing(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	all := faultHold(t, s, faultHasty, 9*time.Second)
	s.Freeze()
	for _, h := range all {
		redistest.Await(t, "a renewal of each has failed", func() bool { return len(h.holder.errors()["renew"]) >= h.size })
	}
	s.Thaw()
	for _, h := range all {
		h.renewed(t)
		if _, err := h.locker(t, s.Client(t), h.name, faultPatient, faultLong).TryAcquire(t.Context()); !errors.Is(err, lock.ErrBusy) {
			t.Errorf("TryAcquire of another = %v, want ErrBusy", err)
		}
		h.release(t)
		h.free(t, s, h.name)
	}
}

//fault:long-freeze
func TestAServerSilentForTwoTTLsCostsTheLeaseAndNobodyElse(t *testing.T) {
	t.Parallel()
	const ttl = 1800 * time.Millisecond
	for what, silence := range map[string]func(t *testing.T, s *redistest.Server) (end func()){
		"frozen": func(t *testing.T, s *redistest.Server) func() { s.Freeze(); return s.Thaw },
		"writes paused": func(t *testing.T, s *redistest.Server) func() {
			faultDo(t, s)("client", "pause", 600_000, "write")
			return func() { faultDo(t, s)("client", "unpause") }
		},
		"paused": func(t *testing.T, s *redistest.Server) func() {
			faultDo(t, s)("client", "pause", (2 * ttl).Milliseconds(), "all")
			return func() {}
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			var others []*faultLocker
			for _, k := range faultKinds {
				others = append(others, k.locker(t, s.Client(t), k.name, faultHasty, ttl))
			}
			all := faultHold(t, s, faultHasty, ttl)
			end := silence(t, s)
			begun := time.Now()
			for i, h := range all {
				if _, err := others[i].Acquire(t.Context()); !errors.Is(err, lock.ErrAmbiguous) {
					t.Errorf("%s: Acquire meanwhile = %v, want ErrAmbiguous", h.name, err)
				}
				for _, l := range h.leases {
					h.holder.lost(t, l, faultNotRenewed)
				}
			}
			redistest.Await(t, "two TTLs are over", func() bool { return time.Since(begun) > 2*ttl })
			end()
			for _, h := range all {
				h.free(t, s, h.name)
			}
		})
	}
}

// faultDo returns a function that sends the server a command, of which only the success matters.
func faultDo(t testing.TB, s *redistest.Server) func(args ...any) {
	return func(args ...any) {
		t.Helper()
		if err := s.Admin().Do(context.Background(), args...).Err(); err != nil {
			t.Errorf("%v: %v", args, err)
		}
	}
}

func faultPatientOnce(o *redis.Options) { o.MaxRetries, o.ReadTimeout = -1, -1 }

// A server that answers nothing but a refusal has granted nothing, and is not somebody else who holds it.
//
//fault:busy-server
func TestARefusalIsUnavailableAndNotBusy(t *testing.T) {
	for _, c := range []struct {
		says  string
		start func(t *testing.T) (s *redistest.Server, begin, end func())
	}{
		{"BUSY", func(t *testing.T) (*redistest.Server, func(), func()) {
			s := redistest.Start(t, "--busy-reply-threshold", "20")
			looped := make(chan struct{})
			return s, func() {
					once, asks := s.Client(t, faultPatientOnce), s.Client(t, faultOnce)
					go func() {
						defer close(looped)
						once.Do(context.Background(), "eval", "while true do end", 0)
					}()
					redistest.Await(t, "the server is busy", func() bool {
						return redis.HasErrorPrefix(asks.Ping(context.Background()).Err(), "BUSY")
					})
				}, func() {
					faultDo(t, s)("script", "kill")
					<-looped
				}
		}},
		{"LOADING", func(t *testing.T) (*redistest.Server, func(), func()) {
			s := redistest.Start(t)
			reloaded := make(chan struct{})
			return s, func() {
				do := faultDo(t, s)
				do("debug", "populate", 10000)
				do("save")
				do("config", "set", "key-load-delay", "300")
				do("config", "set", "loading-process-events-interval-bytes", "1024")
				once, asks := s.Client(t, faultPatientOnce), s.Client(t, faultOnce)
				go func() {
					defer close(reloaded)
					once.Do(context.Background(), "debug", "reload", "nosave")
				}()
				redistest.Await(t, "the server is loading", func() bool {
					return redis.IsLoadingError(asks.Ping(context.Background()).Err())
				})
			}, func() { <-reloaded }
		}},
		{"OOM", func(t *testing.T) (*redistest.Server, func(), func()) {
			s := redistest.Start(t)
			return s, func() { faultDo(t, s)("config", "set", "maxmemory", "1") },
				func() { faultDo(t, s)("config", "set", "maxmemory", "0") }
		}},
		{"NOREPLICAS", func(t *testing.T) (*redistest.Server, func(), func()) {
			s := redistest.Start(t)
			return s, func() { faultDo(t, s)("config", "set", "min-replicas-to-write", "1") },
				func() { faultDo(t, s)("config", "set", "min-replicas-to-write", "0") }
		}},
		{"connection refused", func(t *testing.T) (*redistest.Server, func(), func()) {
			s := redistest.Start(t)
			return s, s.Kill, s.Restart
		}},
		{"READONLY", func(t *testing.T) (*redistest.Server, func(), func()) {
			s := redistest.StartReplica(t, redistest.Start(t))
			return s, func() {}, func() { faultDo(t, s)("replicaof", "no", "one") }
		}},
	} {
		t.Run(c.says, func(t *testing.T) {
			t.Parallel()
			s, begin, end := c.start(t)
			begin()
			for _, k := range faultKinds {
				var once []func(*redis.Options)
				if c.says == "connection refused" { // by its own tries a client takes longer to say so than there is time
					once = append(once, faultOnce, func(o *redis.Options) { o.DialerRetries = 1 })
				}
				timeout := faultFirm
				if c.says == "LOADING" { // which does not last
					timeout = faultHasty
				}
				l := k.locker(t, s.Client(t, once...), k.name, timeout, faultLong)
				for what, acquire := range map[string]func(context.Context) (*lock.Lease, error){"Acquire": l.Acquire, "TryAcquire": l.TryAcquire} {
					lease, err := acquire(t.Context())
					if lease != nil && c.says == "OOM" && k.name == "semaphore" {
						faultRelease(t, lease) // it begins with a deletion, after which the server refuses nothing
						continue
					}
					if c.says == "LOADING" && errors.Is(err, lock.ErrAmbiguous) && errors.Is(err, context.DeadlineExceeded) {
						continue // it answers now and then only, and a last try has little time
					}
					if lease != nil || !errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrBusy) || errors.Is(err, lock.ErrAmbiguous) {
						t.Errorf("%s: %s = %v, %v, want ErrUnavailable", k.name, what, lease, err)
					} else if text := err.Error(); !strings.Contains(text, c.says) && !strings.Contains(text, "read only") {
						t.Errorf("%s: %s = %v, want it to say %s", k.name, what, err, c.says)
					}
				}
			}
			end()
			for _, k := range faultKinds {
				k.free(t, s, k.name)
			}
		})
	}
}

//fault:refused-writes
func TestALeaseIsRenewedAndReleasedWithoutMemory(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	all := faultHold(t, s, time.Second, 9*time.Second)
	faultDo(t, s)("config", "set", "maxmemory", "1")
	if err := s.Admin().Set(t.Context(), "x", "y", 0).Err(); !redis.IsOOMError(err) {
		t.Fatalf("SET = %v, want OOM", err)
	}
	for _, h := range all {
		redistest.Await(t, "each is renewed, or one is refused", func() bool {
			return h.holder.told("renewed") >= h.size || len(h.holder.errors()) > 0
		})
		h.release(t)
		if errs := h.holder.errors(); len(errs) > 0 {
			t.Errorf("%s: %v", h.name, errs)
		}
		if left, _ := faultLeft(t, s.Admin(), h.name); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	}
	faultDo(t, s)("config", "set", "maxmemory", "0")
	for _, h := range all {
		h.free(t, s, h.name)
	}
}

// What the server refuses for now is tried again: a renewal until the lease ends, a release behind the call.
//
//fault:refused-writes
func TestWhatIsRefusedForNowIsTriedAgain(t *testing.T) {
	for _, op := range []string{"renew", "release"} {
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			timeout, ttl := faultFirm, faultLong
			if op == "renew" {
				timeout, ttl = faultHasty, 9*time.Second
			}
			all := faultHold(t, s, timeout, ttl)
			faultDo(t, s)("config", "set", "min-replicas-to-write", "1")
			for _, h := range all {
				if op == "release" {
					for _, l := range h.leases {
						if err := l.Release(t.Context()); !errors.Is(err, lock.ErrUnavailable) {
							t.Errorf("%s: Release = %v, want ErrUnavailable", h.name, err)
						}
					}
				}
				redistest.Await(t, "each is refused", func() bool { return len(h.holder.errors()[op]) >= h.size })
			}
			faultDo(t, s)("config", "set", "min-replicas-to-write", "0")
			for _, h := range all {
				if op == "renew" {
					h.renewed(t)
					h.release(t)
				}
				redistest.Await(t, "each is told to be released", func() bool { return h.holder.told("released") == h.size })
				h.free(t, s, h.name)
			}
		})
	}
}

//fault:eviction
func TestAnEvictedLeaseIsLostToItsHolderAlone(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		const names = 20
		s := redistest.Start(t, "--maxmemory-policy", "allkeys-random", "--maxmemory-samples", "1")
		admin := s.Admin()
		leases := make(map[string]*lock.Lease)
		lockers := make(map[string]*faultLocker)
		rdb := s.Client(t)
		for i := range names {
			name := fmt.Sprint("name", i)
			lockers[name] = k.locker(t, rdb, name, time.Second, 5*time.Second)
			leases[name] = faultTake(t, lockers[name])
		}
		used := admin.InfoMap(t.Context(), "memory").Item("Memory", "used_memory")
		var limit int64
		fmt.Sscan(used, &limit)
		faultDo(t, s)("config", "set", "maxmemory", limit+200_000)
		churn := 0
		redistest.Await(t, "a lease is evicted", func() bool {
			for range 50 {
				churn++
				_ = admin.Set(t.Context(), fmt.Sprint("churn", churn), strings.Repeat("x", 2000), 0).Err()
			}
			for name := range leases {
				if k.holders(t, admin, name) == 0 {
					return true
				}
			}
			return false
		})
		faultDo(t, s)("config", "set", "maxmemory", 0)
		lost := 0
		for name, l := range leases {
			if k.holders(t, admin, name) > 0 {
				faultRelease(t, l)
				continue
			}
			lost++
			next := k.fill(t, k.locker(t, s.Client(t), name, faultPatient, faultLong))
			before := k.holding(t, admin, name)
			lockers[name].lost(t, l, faultGone)
			if now := k.holding(t, admin, name); now != before || before == "" {
				t.Errorf("the lock had %s, and has %s after the old holder's Release", before, now)
			}
			for _, l := range next {
				faultRelease(t, l)
			}
		}
		if n := admin.InfoMap(t.Context(), "stats").Item("Stats", "evicted_keys"); lost == 0 || n == "0" {
			t.Errorf("%d leases lost, %s keys evicted", lost, n)
		}
		for name := range leases {
			k.free(t, s, name)
		}
	})
}

// A replica knows who holds a lock, and can neither grant nor release it.
//
//fault:replica
func TestAReplicaGrantsNothingAndReleasesNothing(t *testing.T) {
	t.Parallel()
	master := redistest.Start(t)
	replica := redistest.StartReplica(t, master)
	all := faultHold(t, master, time.Second, 5*time.Second)
	for _, h := range all {
		redistest.Await(t, "the replica has the lock", func() bool { return h.holders(t, replica.Admin(), h.name) == h.size })
		lease, err := h.locker(t, replica.Client(t), h.name, faultHasty, faultLong).TryAcquire(t.Context())
		if lease != nil || !errors.Is(err, lock.ErrBusy) && !errors.Is(err, lock.ErrUnavailable) {
			t.Errorf("%s: TryAcquire on a replica = %v, %v, want ErrBusy or ErrUnavailable", h.name, lease, err)
		}
	}

	// The two change places, and the clients do not know.
	faultDo(t, replica)("replicaof", "no", "one")
	host, port, _ := strings.Cut(replica.Addr, ":")
	faultDo(t, master)("replicaof", host, port)
	for _, h := range all {
		if err := h.leases[0].Release(t.Context()); !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("%s: Release on a replica = %v, want ErrUnavailable or ErrAmbiguous", h.name, err)
		}
	}
	for _, h := range all {
		for _, l := range h.leases[1:] {
			h.holder.lost(t, l, faultNotRenewed)
		}
		h.free(t, replica, h.name)
	}
}

// Each command that the scripts use is forbidden in turn. Whoever meets that is told what to allow, and others,
// who may, have it soon.
//
//fault:missing-right
func TestAMissingRightIsNamedAndLeavesNobodyStuck(t *testing.T) {
	const ttl = 1800 * time.Millisecond
	calls := regexp.MustCompile(`redis\.p?call\('(\w+)'`)
	faultEachKind(t, func(t *testing.T, k faultKind) {
		rules := map[string]string{ // to what the error has to name
			"-@scripting": "+eval and +evalsha", "-evalsha": "+eval and +evalsha",
			"resetkeys ~other:*": "the keys {name}:lock*",
		}
		for _, act := range []string{"acquire", "renew", "release", "abandon"} {
			for _, call := range calls.FindAllStringSubmatch(k.source(t, act), -1) {
				rules["-"+strings.ToLower(call[1])] = "allow the Redis user what the scripts use"
			}
		}
		s := redistest.Start(t)
		type victim struct{ name, rule, says string }
		var victims []victim
		for rule, says := range rules {
			v := victim{name: "name" + rule, rule: rule, says: says}
			user := fmt.Sprint("user", len(victims))
			victims = append(victims, v)
			args := []any{"acl", "setuser", user, "on", ">pw", "~*", "&*", "+@all"}
			for word := range strings.FieldsSeq(rule) {
				args = append(args, word)
			}
			faultDo(t, s)(args...)
			l := k.locker(t, s.Client(t, func(o *redis.Options) { o.Username, o.Password = user, "pw" }), v.name, faultHasty, ttl)
			var errs []error
			acquire := func(ctx context.Context) *lock.Lease {
				lease, err := l.Acquire(ctx)
				if err != nil && !errors.Is(err, lock.ErrBusy) && !errors.Is(err, context.DeadlineExceeded) {
					errs = append(errs, err)
				}
				return lease
			}
			for range 2 {
				leases := make([]*lock.Lease, k.size)
				for i := range leases {
					leases[i] = acquire(t.Context())
				}
				if leases[k.size-1] != nil { // one more, who has to wait and leaves
					ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
					_ = acquire(ctx).Release(t.Context())
					cancel()
					if _, err := l.TryAcquire(t.Context()); err != nil && err != lock.ErrBusy {
						errs = append(errs, err)
					}
				}
				for _, lease := range leases {
					if err := lease.Release(t.Context()); err != nil {
						errs = append(errs, err)
					}
				}
				for _, op := range l.errors() {
					errs = append(errs, op...)
				}
			}
			if len(errs) == 0 && v.rule != "-pexpire" && v.rule != "-zadd" && v.rule != "-zremrangebyrank" { // those of a renewal alone, which nobody has waited for
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
		}
		for _, v := range victims {
			faultLeft(t, s.Admin(), v.name) // fails the test if a key has no TTL
		}
		if t.Failed() {
			return // it may never be free
		}
		for _, v := range victims {
			k.free(t, s, v.name)
		}
	})
}

// A server that stops before it has read the acquire executes it later, in whatever order with its undoing.
//
//fault:long-freeze
func TestAServerThatThawsAfterAcquireHasGivenUpLeaksNothing(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		s := redistest.Start(t)
		for _, act := range []string{"acquire", "abandon"} {
			k.act(t, s, act)
		}
		for i := range 20 {
			name := fmt.Sprint("name", i)
			l := k.locker(t, s.Client(t, faultOnce), name, 30*time.Millisecond, faultLong) // connected, so that the command is sent
			s.ResetCalls()
			s.Freeze()
			if _, err := l.Acquire(t.Context()); !errors.Is(err, lock.ErrAmbiguous) {
				t.Errorf("Acquire = %v, want ErrAmbiguous", err)
			}
			s.Thaw()
			redistest.Await(t, "the acquire is executed, and undone or refused", func() bool {
				calls := s.AllCalls()
				_, marks := faultLeft(t, s.Admin(), name)
				return calls["zscore"] > 0 && len(marks) == 1
			})
			if left, _ := faultLeft(t, s.Admin(), name); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		}
	})
}
