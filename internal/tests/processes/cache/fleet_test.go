// Package cache_test asserts promises of the cache that hold between processes: each is an OS
// process that can be killed and frozen, Redis is a server, and loads count themselves.
package cache_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

func TestMain(m *testing.M) { redistest.Ring(m) }

// A cold key is loaded once in the fleet, and all callers get its value.
//
//fault:very-many
//fault:cold-key
func TestGetOrLoad_ColdKey(t *testing.T) {
	const callers, rounds = 100, 20
	f := newFleet(t)
	processes := f.start(8, config{})
	for round := range rounds {
		key := fmt.Sprint("round", round)
		for _, p := range processes {
			p.Order(order{Op: "get", Tag: key, Key: key, N: callers, Sleep: 50 * time.Millisecond})
		}
		got := allDone(processes, key)
		f.wantLoads(key, 1)
		for o, n := range got {
			if !strings.HasPrefix(o, value("")) || n != len(processes)*callers {
				t.Fatalf("round %d: %d callers got %s", round, n, o)
			}
		}
	}
	for _, p := range processes {
		if s := p.stats(); s.LoadsUnlocked+s.RedisErrors+s.Fenced+s.LocksLost+s.BadValues > 0 {
			t.Errorf("Stats of %s are %+v", p.name, s)
		}
	}
}

// A fleet is a Redis and the processes that share a namespace there.
type fleet struct {
	t         *testing.T
	server    *redistest.Server
	rdb       *redis.Client
	namespace string
	started   int
}

// newFleet starts a server.
func newFleet(t *testing.T) *fleet {
	t.Helper()
	server := redistest.Start(t)
	return &fleet{t: t, server: server, rdb: server.Admin(), namespace: redistest.Namespace(t)}
}

// start starts n processes with a cache, each behind its own proxy.
func (f *fleet) start(n int, c config) []*process {
	f.t.Helper()
	processes := make([]*process, n)
	for i := range processes {
		f.started++
		p := &process{t: f.t, name: fmt.Sprint("process", f.started), proxy: redistest.NewProxy(f.t, f.server.Addr)}
		c.Name, c.Addr, c.Counters, c.Namespace = p.name, p.proxy.Addr, f.server.Addr, f.namespace
		p.Process = redistest.Spawn(f.t, workerRole)
		p.Order(order{Op: "new", Config: c})
		processes[i] = p
	}
	for _, p := range processes {
		p.await("new", "")
	}
	return processes
}

// wantLoads asserts how many loads of key have begun in the whole fleet.
func (f *fleet) wantLoads(key string, want int) {
	f.t.Helper()
	n, err := f.rdb.Get(f.t.Context(), loadsKey(f.namespace, key)).Int()
	if n != want || err != nil && !errors.Is(err, redis.Nil) {
		f.t.Errorf("%d loads of %q, %v; want %d", n, key, err, want)
	}
}

// stored returns the bytes under the value key, and locked those under the lock key; "" if there
// are none.
func (f *fleet) stored(key string) string { return f.bytes(f.valueKey(key)) }
func (f *fleet) locked(key string) string { return f.bytes(f.lockKey(key)) }

func (f *fleet) valueKey(key string) string { return f.namespace + ":{" + key + "}" }
func (f *fleet) lockKey(key string) string  { return f.valueKey(key) + ":lock" }

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
		now, left = p.Time(f.t.Context()), p.PTTL(f.t.Context(), f.lockKey(key))
		return nil
	})
	if err != nil || left.Val() < 0 {
		f.t.Fatalf("lock of %q: %v left, %v", key, left.Val(), err)
	}
	return now.Val().Add(left.Val())
}

// wait has ten goroutines of each process call GetOrLoad, and returns when they wait for a load in
// another process, and the processes listen for its end.
func (f *fleet) wait(tag, key string, processes ...*process) {
	f.t.Helper()
	for _, p := range processes {
		p.get(tag, key, 10)
		p.joined(tag)
	}
	redistest.Await(f.t, "the processes listen", func() bool {
		heard, err := f.rdb.PubSubShardNumSub(f.t.Context(), f.lockKey(key)).Result()
		return err == nil && heard[f.lockKey(key)] == int64(len(processes))
	})
}

// A process is a worker as the test sees it.
type process struct {
	*redistest.Process
	t      *testing.T
	name   string
	proxy  *redistest.Proxy
	orders int
	unread []report // received, and not yet returned by await
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
			p.t.Logf("%s: %s", p.name, r.Value)
		case r.Event == "unlocked":
			p.t.Errorf("%s loaded %q without the lock", p.name, r.Value)
		default:
			p.unread = append(p.unread, r)
		}
	}
}

// heard returns the first report of an event that await has not returned. It does not wait for one.
func (p *process) heard(event string) (r report, found bool) {
	p.t.Helper()
	p.stats() // its report comes after all earlier ones
	if i := slices.IndexFunc(p.unread, func(r report) bool { return r.Event == event }); i >= 0 {
		return p.unread[i], true
	}
	return r, false
}

// loading returns the process in which a load has begun that await has not returned, and its report.
func loading(processes []*process) (*process, report) {
	for _, p := range processes {
		if r, found := p.heard("begun"); found {
			return p, r
		}
	}
	return nil, report{}
}

// do gives an order and waits until it has been carried out.
func (p *process) do(o order) report {
	p.t.Helper()
	p.orders++
	o.Tag = fmt.Sprint("order", p.orders)
	p.Order(o)
	return p.await(o.Op, o.Tag)
}

func (p *process) stats() singlefill.Stats { p.t.Helper(); return p.do(order{Op: "stats"}).Stats }

// peek returns the outcome of Get.
func (p *process) peek(key string) string {
	p.t.Helper()
	return p.do(order{Op: "peek", Key: key}).Value
}

// get has n goroutines call GetOrLoad.
func (p *process) get(tag, key string, n int) {
	p.t.Helper()
	p.Order(order{Op: "get", Tag: tag, Key: key, N: n})
}

// block has n goroutines call GetOrLoad, whose load ends at the order release.
func (p *process) block(tag, key string, n int) {
	p.t.Helper()
	p.Order(order{Op: "get", Tag: tag, Key: key, N: n, Block: true})
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

// allDone waits until all calls of tag in the processes have returned. It returns how many have which outcome.
func allDone(processes []*process, tag string) map[string]int {
	all := make(map[string]int)
	for _, p := range processes {
		p.t.Helper()
		for o, n := range p.await("done", tag).Outcomes {
			all[o] += n
		}
	}
	return all
}

// wantDone waits until all n calls of tag have returned, and asserts what.
func (p *process) wantDone(tag string, n int, want string) {
	p.t.Helper()
	if got := p.await("done", tag).Outcomes; got[want] != n || len(got) != 1 {
		p.t.Errorf("%d calls %q of %s got %v, want %q", n, tag, p.name, got, want)
	}
}

// wantRefused waits until the one store that the process has lost is counted.
func (p *process) wantRefused() {
	p.t.Helper()
	redistest.Await(p.t, "the refused store is counted", func() bool { return p.stats().Fenced == 1 })
}
