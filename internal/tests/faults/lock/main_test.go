package lock_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// In these tests Redis, or the network before it, fails. They check throughout that there are never
// too many holders, that nothing is left which keeps other callers waiting, and that an error says
// what is known.

func TestMain(m *testing.M) { redistest.Ring(m) }

const (
	// hasty is the RedisTimeout of a Locker that has to give up.
	hasty = 500 * time.Millisecond

	// firm is the RedisTimeout of a Locker that has to see nothing but refusals: its last try has
	// half of it.
	firm = 2 * time.Second

	stuckAfter = 30 * time.Second
)

// A heldLock is a lock whose places are all held. It is named after its kind.
type heldLock struct {
	locktest.Kind
	holder *locktest.Locker
	leases []*lock.Lease
}

// holdAll makes a heldLock of each kind. Tests in which time has to pass do it once for all kinds.
func holdAll(t testing.TB, rdb redis.UniversalClient, redisTimeout, ttl time.Duration) (all []heldLock) {
	t.Helper()
	for _, k := range locktest.Kinds {
		all = append(all, hold(t, k, rdb, k.Name, redisTimeout, ttl))
	}
	return all
}

func hold(t testing.TB, k locktest.Kind, rdb redis.UniversalClient,
	name string, redisTimeout, ttl time.Duration) heldLock {
	t.Helper()
	h := heldLock{Kind: k, holder: k.Locker(t, rdb, name, redisTimeout, ttl)}
	h.leases = k.Fill(t, h.holder)
	return h
}

// awaitRenewal waits until each lease has been renewed.
func (h heldLock) awaitRenewal(t testing.TB) {
	t.Helper()
	redistest.Await(t, "each is renewed", func() bool { return h.holder.Count("renewed") >= h.Size })
}

// release releases the leases, none of which must have been lost.
func (h heldLock) release(t testing.TB) {
	t.Helper()
	for _, l := range h.leases {
		locktest.Release(t, l)
	}
	if n := h.holder.Count("lost"); n != 0 {
		t.Errorf("%s: Trace was told of %d lost", h.Name, n)
	}
}

// A contestedLock is a heldLock with a waiter.
type contestedLock struct {
	heldLock
	got func() *lock.Lease
}

func contestAll(t testing.TB, rdb redis.UniversalClient, all []heldLock) (contested []contestedLock) {
	t.Helper()
	for _, h := range all {
		contested = append(contested, contestedLock{h, h.Wait(t, h.Locker(t, rdb, h.Name, locktest.Patient, locktest.Long))})
	}
	return contested
}

// handOver checks that the leases are still held, and that the waiter gets one after their release.
func (c contestedLock) handOver(t testing.TB) {
	t.Helper()
	c.awaitRenewal(t)
	c.release(t)
	locktest.Release(t, c.got())
}

// awaitFault waits until a fault has come about.
func awaitFault(t testing.TB, rule *redistest.Rule) {
	t.Helper()
	select {
	case <-rule.Hit():
	case <-time.After(stuckAfter):
		t.Fatal("the fault has not come about")
	}
}

// impatient makes a client that soon gives up a silent connection.
func impatient(o *redis.Options) { o.ReadTimeout = 100 * time.Millisecond }

// A proxied lock is reached by some clients through a proxy, and by others directly.
type proxied struct {
	locktest.Kind
	t     *testing.T
	s     *redistest.Server
	proxy *redistest.Proxy
	name  string
}

// behindProxy makes a proxied lock. Tests that count the calls of a server start one.
func behindProxy(t *testing.T, k locktest.Kind, s *redistest.Server) proxied {
	return proxied{Kind: k, t: t, s: s, proxy: redistest.NewProxy(t, s.Addr), name: redistest.Namespace(t)}
}

// on lets the proxy meet the commands of an act with an action.
func (p proxied) on(act string, action redistest.Action) *redistest.Rule {
	p.t.Helper()
	return p.proxy.On(p.Command(p.t, p.s, act), action)
}

// through makes a Locker behind the proxy, whose leases are long.
func (p proxied) through(redisTimeout time.Duration, change ...func(*redis.Options)) *locktest.Locker {
	p.t.Helper()
	return p.Locker(p.t, p.proxy.Client(p.t, change...), p.name, redisTimeout, locktest.Long)
}

// left returns the keys and the marks of the lock.
func (p proxied) left() (keys, marks []string) {
	p.t.Helper()
	return locktest.Left(p.t, p.s.Admin(), p.name)
}

// wantNothing checks that no keys but the fence and the marks are left.
func (p proxied) wantNothing() {
	p.t.Helper()
	if keys, _ := p.left(); len(keys) > 0 {
		p.t.Errorf("left behind: %q", keys)
	}
}

func (p proxied) wantFree() {
	p.t.Helper()
	p.WantFree(p.t, p.s, p.name)
}
