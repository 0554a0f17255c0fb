// Package cache_test asserts promises of the cache that hold between processes: each is an OS
// process that can be killed and frozen, Redis is a server, and loads count themselves.
package cache_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

func TestMain(m *testing.M) { redistest.Ring(m) }

// A fleet is a Redis and the processes that share a namespace there.
type fleet struct {
	t         *testing.T
	server    *redistest.Server
	rdb       *redis.Client
	namespace string
	started   int
}

// newFleet starts a server. After the test, when its processes have been killed, each key of the
// namespace must have a TTL.
func newFleet(t *testing.T) *fleet {
	t.Helper()
	server := redistest.Start(t)
	f := &fleet{t: t, server: server, rdb: server.Admin(), namespace: redistest.Namespace(t)}
	t.Cleanup(func() { cachetest.CheckTTLs(t, f.rdb, f.namespace) })
	return f
}

// newPair starts a fleet of two processes.
func newPair(t *testing.T) (f *fleet, a, b *process) {
	t.Helper()
	f = newFleet(t)
	both := f.startAll(2, config{})
	return f, both[0], both[1]
}

// start starts a process with a cache, behind its own proxy.
func (f *fleet) start(c config) *process {
	f.t.Helper()
	return f.spawn(c).ready()
}

// startAll starts n processes of the same config at once.
func (f *fleet) startAll(n int, c config) []*process {
	f.t.Helper()
	processes := make([]*process, n)
	for i := range processes {
		processes[i] = f.spawn(c)
	}
	for _, p := range processes {
		p.ready()
	}
	return processes
}

func (f *fleet) spawn(c config) *process {
	f.t.Helper()
	f.started++
	c.Name = fmt.Sprint("process", f.started)
	c.Addr, c.Counters, c.Namespace = f.server.Addr, f.server.Addr, f.namespace
	p := &process{t: f.t, name: c.Name, namespace: f.namespace, polls: make(map[string]int), listens: make(map[string]bool)}
	if !c.Direct {
		p.proxy = redistest.NewProxy(f.t, f.server.Addr)
		p.proxy.On(func(cmd []string) bool { p.countPoll(cmd); return false }, redistest.Pass)
		c.Addr = p.proxy.Addr
	}
	p.Process = redistest.Spawn(f.t, workerRole)
	p.Order(order{Op: "new", Config: c})
	return p
}

// count returns a counter.
func (f *fleet) count(key string) int {
	f.t.Helper()
	n, err := f.rdb.Get(f.t.Context(), key).Int()
	if err != nil && !errors.Is(err, redis.Nil) {
		f.t.Fatal(err)
	}
	return n
}

// wantLoads asserts how many loads of key have begun in the whole fleet.
func (f *fleet) wantLoads(key string, want int) {
	f.t.Helper()
	if n := f.count(loadsKey(f.namespace, key)); n != want {
		f.t.Errorf("%d loads of %q, want %d", n, key, want)
	}
}

// wantNoOverlap asserts that no two loads of key ran at a time.
func (f *fleet) wantNoOverlap(key string) {
	f.t.Helper()
	if n := f.count(overlapsKey(f.namespace, key)); n != 0 {
		f.t.Errorf("%d loads of %q began while another ran", n, key)
	}
}

// stored returns the bytes under the value key, and locked those under the lock key; "" if there
// are none.
func (f *fleet) stored(key string) string { return f.bytes(valueKey(f.namespace, key)) }
func (f *fleet) locked(key string) string { return f.bytes(lockKey(f.namespace, key)) }

func (f *fleet) bytes(name string) string {
	f.t.Helper()
	s, _ := cachetest.Stored(f.t, f.rdb, name)
	return s
}

// lockEnd returns when the lock of key will expire, by the server's clock.
func (f *fleet) lockEnd(key string) time.Time {
	f.t.Helper()
	var now *redis.TimeCmd
	var left *redis.DurationCmd
	_, err := f.rdb.TxPipelined(f.t.Context(), func(p redis.Pipeliner) error {
		now, left = p.Time(f.t.Context()), p.PTTL(f.t.Context(), lockKey(f.namespace, key))
		return nil
	})
	if err != nil || left.Val() < 0 {
		f.t.Fatalf("lock of %q: %v left, %v", key, left.Val(), err)
	}
	return now.Val().Add(left.Val())
}

// A process is a worker as the test sees it.
type process struct {
	*redistest.Process
	t         *testing.T
	name      string
	namespace string
	proxy     *redistest.Proxy
	orders    int
	unread    []report // received, and not yet returned by await

	mu      sync.Mutex
	polls   map[string]int  // protected by mu: by value key, the scripts that the process has sent
	listens map[string]bool // protected by mu: by lock key
}

var scripts = redistest.Command("EVALSHA", "EVAL")

// countPoll counts a script by its first key, and notes the channels to which the process listens.
func (p *process) countPoll(cmd []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case scripts(cmd) && len(cmd) > 3:
		p.polls[cmd[3]]++
	case redistest.Command("SSUBSCRIBE")(cmd):
		for _, channel := range cmd[1:] {
			p.listens[channel] = true
		}
	}
}

// listensTo reports whether the process has asked to be woken for key.
func (p *process) listensTo(key string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.listens[lockKey(p.namespace, key)]
}

func (p *process) polled(key string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.polls[valueKey(p.namespace, key)]
}

func (p *process) ready() *process {
	p.t.Helper()
	p.await("new", "")
	return p
}

// await returns the first report of an event that await has not returned before.
func (p *process) await(event, tag string) report {
	p.t.Helper()
	match := func(r report) bool { return r.Event == event && r.Tag == tag }
	if i := slices.IndexFunc(p.unread, match); i >= 0 {
		r := p.unread[i]
		p.unread = slices.Delete(p.unread, i, i+1)
		return r
	}
	for {
		var r report
		p.Hear(&r)
		switch {
		case match(r):
			return r
		case r.Event == "trouble":
			p.t.Logf("%s: %s", p.name, r.Err)
		case r.Event == "unlocked":
			p.t.Errorf("%s loaded %q without the lock", p.name, r.Key)
		default:
			p.unread = append(p.unread, r)
		}
	}
}

// has reports whether an event has been reported that await has not returned.
func (p *process) has(event, tag string) bool {
	p.t.Helper()
	p.stats() // its report comes after all earlier ones
	return slices.ContainsFunc(p.unread, func(r report) bool { return r.Event == event && r.Tag == tag })
}

// do gives an order and waits until it has been carried out.
func (p *process) do(o order) report {
	p.t.Helper()
	p.orders++
	o.Tag = fmt.Sprint("order", p.orders)
	p.Order(o)
	r := p.await(o.Op, o.Tag)
	if r.Err != "" {
		p.t.Fatalf("%s of %s: %s", o.Op, p.name, r.Err)
	}
	return r
}

func (p *process) expire(key string)       { p.t.Helper(); p.do(order{Op: "expire", Key: key}) }
func (p *process) stats() singlefill.Stats { p.t.Helper(); return p.do(order{Op: "stats"}).Stats }
func (p *process) pool() redis.PoolStats   { p.t.Helper(); return p.do(order{Op: "stats"}).Pool }

// peek returns the outcome of Get.
func (p *process) peek(key string) outcome {
	p.t.Helper()
	return p.do(order{Op: "peek", Key: key}).Outcomes[0].outcome
}

// get has n goroutines call GetOrLoad.
func (p *process) get(tag, key string, n int, load plan) {
	p.t.Helper()
	p.Order(order{Op: "get", Tag: tag, Key: key, N: n, Plan: load})
}

// block has a goroutine call GetOrLoad, and returns when its load begins, which ends at the order release.
func (p *process) block(tag, key string) report {
	p.t.Helper()
	p.get(tag, key, 1, plan{Block: true})
	return p.begun(tag)
}

// wait has ten goroutines call GetOrLoad, and returns when they wait for a load in another process.
func (p *process) wait(tag, key string) {
	p.t.Helper()
	p.get(tag, key, 10, plan{})
	p.waiting(tag, key)
}

// begun waits until a load of the calls of tag begins.
func (p *process) begun(tag string) report { p.t.Helper(); return p.await("begun", tag) }

// release lets all loads of tag return.
func (p *process) release(tag string) { p.t.Helper(); p.Order(order{Op: "release", Tag: tag}) }

// joined waits until all calls of tag wait in GetOrLoad. A call that reads for itself does not yet.
func (p *process) joined(tag string) {
	p.t.Helper()
	p.Order(order{Op: "joined", Tag: tag})
	p.await("joined", tag)
}

// waiting waits until all calls of tag, which are for key, wait for a load in another process.
func (p *process) waiting(tag, key string) { p.t.Helper(); awaitWaiting(waiters{p, tag, key}) }

// waiters are the calls of tag in a process, which are for key.
type waiters struct {
	*process
	tag, key string
}

// awaitWaiting is waiting for several groups of calls at once. When all calls of a group have
// joined, its process has sent three more polls: the first may have been decided before, the second
// waits on behalf of all calls, and the third shows that the second has been answered. A process
// that listens polls rarely.
func awaitWaiting(groups ...waiters) {
	for _, g := range groups {
		g.t.Helper()
		g.joined(g.tag)
	}
	before := make([]int, len(groups))
	for i, g := range groups {
		before[i] = g.polled(g.key)
	}
	for i, g := range groups {
		redistest.Await(g.t, fmt.Sprintf("%s waits for %q", g.name, g.key), func() bool { return g.polled(g.key) >= before[i]+3 || g.listensTo(g.key) })
	}
}

// done waits until all calls of tag have returned.
func (p *process) done(tag string) map[outcome]int {
	p.t.Helper()
	m := make(map[outcome]int)
	for _, c := range p.await("done", tag).Outcomes {
		m[c.outcome] += c.N
	}
	return m
}

// allDone waits until all calls of tag in the processes have returned.
func allDone(processes []*process, tag string) map[outcome]int {
	all := make(map[outcome]int)
	for _, p := range processes {
		p.t.Helper()
		for o, n := range p.done(tag) {
			all[o] += n
		}
	}
	return all
}

// wantDone waits until all n calls of tag have returned, and asserts what.
func (p *process) wantDone(tag string, n int, kind, text string) {
	p.t.Helper()
	if got := p.done(tag); got[outcome{kind, text}] != n || len(got) != 1 {
		p.t.Errorf("%d calls %q of %s got %v, want %s %q", n, tag, p.name, got, kind, text)
	}
}

// wantUnfinished asserts that calls of tag have not returned yet.
func (p *process) wantUnfinished(tag string) {
	p.t.Helper()
	if p.has("done", tag) {
		p.t.Errorf("calls %q of %s have returned", tag, p.name)
	}
}

// wantRefused waits until the one store that the process has lost is counted.
func (p *process) wantRefused() {
	p.t.Helper()
	redistest.Await(p.t, "the refused store is counted", func() bool { return p.stats().Fenced == 1 })
}
