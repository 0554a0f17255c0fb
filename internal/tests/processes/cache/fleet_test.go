// Package cache_test asserts promises of the cache that hold between processes: each is an OS
// process that can be killed and frozen, Redis is a server, and loads count themselves.
package cache_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
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
	rdb       *redis.Client
	namespace string
	cache     *singlefill.Cache[string] // of the test, which is a process as well
	started   int
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{t: t, rdb: redistest.Start(t).Admin(), namespace: redistest.Namespace(t)}
	f.cache = cachetest.NewCacheIn(t, f.rdb, f.namespace, config{Stale: true}.options())
	return f
}

// start starts n processes with a cache.
func (f *fleet) start(n int, c config) []*process {
	f.t.Helper()
	processes := make([]*process, n)
	for i := range processes {
		f.started++
		c.Name, c.Addr, c.Namespace = fmt.Sprint("process", f.started), f.rdb.Options().Addr, f.namespace
		arg, err := json.Marshal(c)
		redistest.Must(f.t, err)
		processes[i] = &process{Process: redistest.Spawn(f.t, workerRole, string(arg)), t: f.t, config: c}
	}
	for _, p := range processes {
		p.await("ready", "")
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

// stored returns the bytes under the value key of k; "" if there are none.
func (f *fleet) stored() string {
	f.t.Helper()
	s, _ := cachetest.Stored(f.t, f.rdb, f.namespace+":{k}")
	return s
}

func (f *fleet) lockKey() string { return f.namespace + ":{k}:lock" }

// lockEnd returns when the lock of k will expire, by the server's clock.
func (f *fleet) lockEnd() time.Time {
	f.t.Helper()
	var now *redis.TimeCmd
	var left *redis.DurationCmd
	_, err := f.rdb.TxPipelined(f.t.Context(), func(p redis.Pipeliner) error {
		now, left = p.Time(f.t.Context()), p.PTTL(f.t.Context(), f.lockKey())
		return nil
	})
	if err != nil || left.Val() < 0 {
		f.t.Fatalf("the lock: %v left, %v", left.Val(), err)
	}
	return now.Val().Add(left.Val())
}

// wait has ten goroutines of each process call GetOrLoad, and returns when the processes listen for the end of a load
// in another process.
func (f *fleet) wait(processes ...*process) {
	f.t.Helper()
	for _, p := range processes {
		p.Order(order{Tag: "waits", Key: "k", N: 10})
	}
	redistest.Await(f.t, "the processes listen", func() bool {
		heard, err := f.rdb.PubSubShardNumSub(f.t.Context(), f.lockKey()).Result()
		return err == nil && heard[f.lockKey()] == int64(len(processes))
	})
}

// A process is a worker as the test sees it.
type process struct {
	*redistest.Process
	config
	t      *testing.T
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
			if !p.Mortal {
				p.t.Errorf("%s: %s", p.Name, r.Value)
			}
		default:
			p.unread = append(p.unread, r)
		}
	}
}

// block has a call of a process load k, until the order to release. It returns when the load has begun.
func (p *process) block(tag string) report {
	p.t.Helper()
	p.Order(order{Tag: tag, Key: "k", N: 1, Block: true})
	return p.await("begun", tag)
}

// release lets all loads of tag return.
func (p *process) release(tag string) { p.t.Helper(); p.Order(order{Tag: tag}) }

// wantDone waits until all n calls of tag have returned, and asserts what.
func (p *process) wantDone(tag string, n int, want string) {
	p.t.Helper()
	if got := p.await("done", tag).Outcomes; got[want] != n || len(got) != 1 {
		p.t.Errorf("%d calls %q of %s got %v, want %q", n, tag, p.Name, got, want)
	}
}
