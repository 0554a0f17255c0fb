package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// BenchmarkOutage shows what an outage of Redis costs the callers. Sixteen goroutines make requests, each
// of which asks four caches of one client in turn, with default options, a life of 1 s and loads of 2 ms.
// It reports the requests of each window of 2 s since the outage began, to 6 s after its end, and the
// times of all these requests. Run it with -benchtime 1x.
func BenchmarkOutage(b *testing.B) {
	for _, servers := range []struct {
		name  string
		start func(b *testing.B) target
	}{{"one server", outageOfServer}, {"one node of three", outageOfNode}} {
		for _, bounded := range []bool{false, true} {
			for _, o := range outages {
				b.Run(fmt.Sprintf("%s/ContextTimeoutEnabled=%t/%s", servers.name, bounded, o.name), func(b *testing.B) {
					for range b.N {
						t := servers.start(b)
						newOutage(b, t.open(bounded)).run(b, o.lasts, func() { o.begin(t) }, func() { o.end(t) })
					}
				})
			}
		}
	}
}

var outages = []struct {
	name       string
	lasts      time.Duration
	begin, end func(t target)
}{
	{"frozen for 1 s", time.Second, target.freeze, target.thaw},
	{"frozen for 6 s", 6 * time.Second, target.freeze, target.thaw},
	{"frozen for 30 s", 30 * time.Second, target.freeze, target.thaw},
	{"killed, back after 6 s", 6 * time.Second, target.kill, target.restart},
	{"black hole for 6 s", 6 * time.Second, target.swallow, target.deliver},
}

// A target is the server that has the outage, and the proxy in front of it. open returns a client.
type target struct {
	server *redistest.Server
	proxy  *redistest.Proxy
	open   func(bounded bool) redis.UniversalClient
}

func (t target) freeze()  { t.server.Freeze() }
func (t target) thaw()    { t.server.Thaw() }
func (t target) kill()    { t.server.Kill() }
func (t target) restart() { t.server.Restart() }
func (t target) swallow() { t.proxy.BlackHole(true) }
func (t target) deliver() { t.proxy.BlackHole(false) }

func outageOfServer(b *testing.B) target {
	s := redistest.Start(b)
	p := redistest.NewProxy(b, s.Addr)
	return target{s, p, func(bounded bool) redis.UniversalClient {
		rdb := redis.NewClient(&redis.Options{
			Addr: p.Addr, ContextTimeoutEnabled: bounded, MaintNotificationsConfig: maintOff(),
		})
		b.Cleanup(func() { _ = rdb.Close() })
		return rdb
	}}
}

func outageOfNode(b *testing.B) target {
	c := redistest.StartCluster(b)
	s := c.Nodes[1]
	p := redistest.NewProxy(b, s.Addr)
	return target{s, p, func(bounded bool) redis.UniversalClient {
		rdb := redis.NewClusterClient(&redis.ClusterOptions{
			Addrs: []string{c.Nodes[0].Addr, c.Nodes[2].Addr}, ContextTimeoutEnabled: bounded, MaintNotificationsConfig: maintOff(),
			Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
				if addr == s.Addr {
					addr = p.Addr
				}
				return new(net.Dialer).DialContext(ctx, network, addr)
			},
		})
		b.Cleanup(func() { _ = rdb.Close() })
		return rdb
	}}
}

func maintOff() *maintnotifications.Config {
	return &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
}

// An outageRun is a program that goes on during an outage.
type outageRun struct {
	caches []*singlefill.Cache[string]

	mu       sync.Mutex
	requests []timeSpan
}

type timeSpan struct{ begun, ended time.Time }

func newOutage(b *testing.B, rdb redis.UniversalClient) *outageRun {
	r := new(outageRun)
	for i := range 4 {
		c := must(singlefill.New[string](rdb, fmt.Sprint("cache", i), time.Second, nil))
		b.Cleanup(func() { _ = c.Close() })
		r.caches = append(r.caches, c)
	}
	return r
}

func (r *outageRun) run(b *testing.B, lasts time.Duration, begin, end func()) {
	const before, after, window = 2 * time.Second, 6 * time.Second, 2 * time.Second
	ctx, stop := context.WithCancel(context.Background())
	var callers sync.WaitGroup
	for range 16 {
		callers.Go(func() {
			for ctx.Err() == nil {
				r.request(b)
			}
		})
	}
	time.Sleep(before)
	begun := time.Now()
	begin()
	time.Sleep(lasts)
	end()
	time.Sleep(after)
	ended := time.Now()
	stop()
	callers.Wait()

	windows := make([]int, (lasts+after)/window)
	var took []time.Duration
	for _, q := range r.requests {
		if q.ended.After(begun) && q.begun.Before(ended) {
			took = append(took, q.ended.Sub(q.begun))
			if at := int(q.ended.Sub(begun) / window); at < len(windows) {
				windows[at]++
			}
		}
	}
	slices.Sort(took)
	b.ReportMetric(0, "ns/op") // it says nothing here
	for _, p := range []struct {
		name string
		at   int
	}{{"p50-ms", len(took) / 2}, {"p99-ms", len(took) * 99 / 100}, {"max-ms", len(took) - 1}} {
		b.ReportMetric(float64(took[p.at].Microseconds())/1000, p.name)
	}
	b.Log("requests in windows of 2 s:", windows)
}

// request asks all caches for one key after the other.
func (r *outageRun) request(b *testing.B) {
	key := fmt.Sprint(rand.N(100))
	begun := time.Now()
	for _, c := range r.caches {
		v, err := c.GetOrLoad(context.Background(), key, func(context.Context, string) (string, error) {
			time.Sleep(2 * time.Millisecond)
			return "value", nil
		})
		if v != "value" || err != nil {
			b.Errorf("GetOrLoad: %q, %v", v, err)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests = append(r.requests, timeSpan{begun, time.Now()})
}
