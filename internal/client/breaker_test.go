package client

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A panic of the function that the breaker reports to does not affect the breaker.
func TestBreaker_PanickingTrace(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		w := watch(t, rdb, timeout)
		var told atomic.Int64
		w.changes.changed = func(error) { told.Add(1); panic("a bug of the user's") }
		for i := 1; i <= 3; i++ {
			m.SetError(loading)
			w.openBreaker()
			if !w.AnyAway() {
				t.Fatal("not open")
			}
			m.SetError("")
			time.Sleep(2 * timeout)
			if w.AnyAway() || w.Refusal("k") != nil || int(told.Load()) != 2*i || w.failures("ping") != 2*i {
				t.Fatalf("open %t, refusal %v, told %d times, %d panics told", w.AnyAway(), w.Refusal("k"), told.Load(), w.failures("ping"))
			}
		}
	})
}

// A silence is noticed a command's time after the last answer, if there was one, also by those whose commands were sent
// before it, and while commands queue. So a caller that asks several caches waits for that time once.
func TestBreaker_AfterTheLastAnswer(t *testing.T) {
	t.Parallel()
	for kind, open := range muteKinds() {
		if kind == "wrapped" { // by a value: two caches on it share nothing
			continue
		}
		for way, get := range gets {
			for _, others := range []struct {
				callers int // which queue
				pause   time.Duration
			}{{}, {callers: 5}, {callers: 5, pause: timeout / 8}} {
				for _, last := range []time.Duration{0, timeout / 100, timeout / 10, timeout / 3, timeout * 9 / 10} {
					runInBubble(t, fmt.Sprintf("%s/%s/%+v/%v", kind, way, others, last), func(t *testing.T) {
						rdb := open(t)
						a, b := watch(t, rdb, timeout), watch(t, rdb, timeout)
						a.node.alone.size, a.node.together.size = 3, 2
						begun := time.Now()
						request := func() {
							for _, w := range []*watcher{a, b, a, b} {
								if err := w.Refusal("k"); err != nil { // a caller asks this first
									continue
								}
								if err := get(w, t.Context()); err == nil {
									t.Error("answered")
								}
							}
							if took := time.Since(begun); took > last+timeout {
								t.Errorf("four commands of two caches have waited for %v", took)
							}
						}
						var wg sync.WaitGroup
						wg.Go(func() {
							_, _ = Do(t.Context(), a.Client, "last", "k", func(context.Context) (int, error) { time.Sleep(last); return 0, nil })
						})
						wg.Go(request)
						time.Sleep(last + others.pause)
						for range others.callers {
							wg.Go(request)
						}
						wg.Wait()
					})
				}
			}
		}
	}
}

// When the user has closed the client, the breaker stays open, and nothing waits any more for it to close.
func TestBreaker_ClientClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rdb := mute(t)
		var running atomic.Int64
		c := New(rdb, timeout, func(context.Context, string, error) {}, func(error) {}, func(run func(<-chan struct{})) {
			running.Add(1)
			go func() { run(nil); running.Add(-1) }()
		})
		(&watcher{Client: c}).openBreaker()
		if !c.Away("k") || running.Load() == 0 {
			t.Fatalf("away %t, with %d functions in the background", c.Away("k"), running.Load())
		}
		redistest.Must(t, rdb.Close())
		time.Sleep(2 * timeout)
		synctest.Wait()
		if !c.AnyAway() || !c.Gone() || running.Load() != 0 {
			t.Errorf("away %t, gone %t, with %d functions in the background", c.AnyAway(), c.Gone(), running.Load())
		}
	})
}

// The breaker of a node of a Cluster stays open until the node answers: also if the Client has forgotten in between
// what it knew of the node. When the Cluster changes, such a node is not forgotten: each new look at it would begin to
// watch it again.
func TestCluster_SilentNode(t *testing.T) {
	t.Parallel()
	for name, meanwhile := range map[string]func(t *testing.T, w *watcher){
		"known": func(t *testing.T, w *watcher) {
			n := w.nodeOf("k")
			time.Sleep(2 * idle)
			if w.nodes.forgetIdle(); w.nodeOf("k") != n {
				t.Error("forgotten while its breaker is open")
			}
		},
		"forgotten": func(_ *testing.T, w *watcher) { w.nodes.of.Clear() },
	} {
		runInBubble(t, name, func(t *testing.T) {
			w := watchCluster(t, mute(t).Options().Dialer)
			w.openBreaker()
			meanwhile(t, w)
			for range 10 {
				if !w.Away("k") {
					t.Fatal("not open")
				}
				time.Sleep(timeout)
			}
			if got := w.reported(); !slices.Equal(got, []bool{true}) {
				t.Errorf("told %v", got)
			}
			for range 8 {
				_ = w.do(nil)
				time.Sleep(timeout / 4) // probes are on their way
			}
			if got := w.reported(); w.Away("k") || w.AnyAway() || !slices.Equal(got, []bool{true, false}) {
				t.Errorf("after an answer: away %t, any %t, told %v", w.Away("k"), w.AnyAway(), got)
			}
			w.close()
		})
	}
}

// watchCluster returns a watcher of a Cluster whose one node is known.
func watchCluster(t *testing.T, dial func(context.Context, string, string) (net.Conn, error)) *watcher {
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{"127.0.0.1:1"}, Dialer: dial, DisableIdentity: true, PoolSize: 1000,
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: "127.0.0.1:2"}}}}, nil
		},
	})
	t.Cleanup(func() { _ = rdb.Close() })
	redistest.Must(t, rdb.ForEachMaster(t.Context(), func(context.Context, *redis.Client) error { return nil }))
	w := watch(t, rdb, timeout)
	_, _ = Do(t.Context(), w.Client, "test", "", func(context.Context) (int, error) { return 0, nil })
	if w.nodeOf("k") == w.node {
		t.Fatal("the node is not known")
	}
	return w
}
