package client

import (
	"context"
	"errors"
	"fmt"
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

// A failure of a command that was sent before the last answer counts for nothing, whatever pings have found since.
func TestBreaker_FailureBeforeAnAnswer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		rdb := mute(t)
		w, patient := watch(t, rdb, timeout), watch(t, rdb, time.Hour)
		var wg sync.WaitGroup
		slow := func() {
			_, _ = Do(t.Context(), w.Client, "slow", "k", func(ctx context.Context) (int, error) { <-ctx.Done(); return 0, ctx.Err() })
		}
		wg.Go(slow)
		time.Sleep(timeout / 8)
		_ = w.do(nil)
		wg.Go(slow)
		time.Sleep(w.least())
		if n := w.failures("slow"); n != 1 {
			t.Errorf("%d commands have failed, want 1", n)
		}
		if w.Away("k") || patient.Away("k") {
			t.Error("open after less silence than a command may take")
		}
		wg.Wait()
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

// A caller that has seen the breaker closed does not wait for its command if it has opened since.
func TestBreaker_OpensBeforeTheCommand(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := watch(t, mute(t), timeout)
		w.openBreaker()
		begun := time.Now()
		_, err := DoWithin(t.Context(), w.Client, Command{Op: "get", Key: "k", Within: timeout, Spared: true}, func(ctx context.Context) (string, error) {
			return w.Redis.Get(ctx, "k").Result()
		})
		if took := time.Since(begun); !errors.Is(err, ErrAway) || took != 0 {
			t.Errorf("%v after %v", err, took)
		}
	})
}

// The end of a cache waits for one probe, its own or another cache's.
func TestBreaker_ClosedDuringAProbe(t *testing.T) {
	t.Parallel()
	for closed := range 4 { // one of three, or all
		synctest.Test(t, func(t *testing.T) {
			rdb := mute(t)
			all := []*watcher{watch(t, rdb, timeout), watch(t, rdb, timeout), watch(t, rdb, timeout)}
			all[0].openBreaker()
			time.Sleep(timeout * 3 / 2)
			begun := time.Now()
			var wg sync.WaitGroup
			for i, w := range all {
				if closed == i || closed == len(all) {
					wg.Go(w.close)
				}
			}
			wg.Wait()
			if took := time.Since(begun); took > timeout/2 {
				t.Errorf("cache %d closed after %v; the probe had half of its time left", closed, took)
			}
		})
	}
}

// Slow commands alone open no breaker, one after the other or with pauses between, even if the server takes nearly half
// of a command's time for a ping.
func TestBreaker_SlowPing(t *testing.T) {
	t.Parallel()
	for _, ping := range []time.Duration{timeout * 3 / 10, timeout * 9 / 20} {
		for pause := time.Duration(0); pause < timeout; pause += timeout / 8 {
			runInBubble(t, fmt.Sprintf("ping %v, pause %v", ping, pause), func(t *testing.T) {
				w := watch(t, distant(t, ping), timeout)
				for range 10 {
					if _, _, err := w.Get(t.Context(), nil, "slow"); err == nil || w.AnyAway() {
						t.Fatalf("%v; open: %t", err, w.AnyAway())
					}
					time.Sleep(pause)
				}
			})
		}
	}
}

// A ping of a hasty cache, which takes it soon for unanswered, opens no breaker for a patient one, whose command was
// sent before the last answer.
func TestBreaker_HastyPing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		rdb := distant(t, timeout/4)
		patient, hasty := watch(t, rdb, timeout), watch(t, rdb, timeout*8/15)
		for _, w := range []*watcher{patient, hasty} {
			if _, _, err := w.Get(t.Context(), nil, "slow"); err == nil {
				t.Error("answered")
			}
			time.Sleep(timeout * 3 / 10) // half of its time has passed since the answer to the ping
		}
		if open := patient.reported(); len(open) > 0 {
			t.Error("the breaker has opened for the patient cache")
		}
	})
}

// distant returns a client of a server that answers after a time, and a GET of the key slow never.
func distant(t *testing.T, away time.Duration) *redis.Client {
	_, rdb := redistest.StartMini(t)
	rdb.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if len(cmd.Args()) > 1 && cmd.Args()[1] == "slow" {
			<-ctx.Done()
		}
		select {
		case <-time.After(away):
			return next(ctx, cmd)
		case <-ctx.Done():
			return ctx.Err()
		}
	}))
	var wg sync.WaitGroup
	for range 5 { // to have connections
		wg.Go(func() { redistest.Must(t, rdb.Ping(t.Context()).Err()) })
	}
	wg.Wait()
	return rdb
}

// The breaker of a node of a Cluster stays open until the node answers: also if the Client has forgotten in between
// what it knew of the node.
func TestCluster_SilentNode(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(w *watcher){
		"known": (*watcher).openBreaker,
		"forgotten": func(w *watcher) {
			w.openBreaker()
			w.nodes.of.Clear()
		},
	} {
		runInBubble(t, name, func(t *testing.T) {
			w := watchMuteCluster(t)
			open(w)
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

// watchMuteCluster returns a watcher of a Cluster whose one node is known and never answers.
func watchMuteCluster(t *testing.T) *watcher {
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{"127.0.0.1:1"}, Dialer: mute(t).Options().Dialer, DisableIdentity: true, PoolSize: 1000,
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

// A frozen node of a Cluster opens its own breaker, and only that node is no longer asked.
//
//fault:frozen-node
func TestCluster_FrozenNode(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	cluster := redistest.StartCluster(t)
	bounded := func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true }
	w := watch(t, cluster.Client(t, bounded), time.Second)
	keys := make([]string, 60)
	for i := range keys {
		keys[i] = fmt.Sprintf("key:%d", i)
	}
	get := func(key string) error {
		_, _, err := w.Get(t.Context(), nil, key)
		return err
	}
	redistest.Await(t, "the cluster answers", func() bool { return errors.Is(get(keys[0]), redis.Nil) })

	groups := ByNode(w.Client, keys, func(key string) string { return key })
	if len(groups) != len(cluster.Nodes) || len(slices.Concat(groups...)) != len(keys) {
		t.Fatalf("the keys of %d nodes are in groups %v", len(cluster.Nodes), groups)
	}
	for _, group := range groups {
		for _, key := range group {
			if cluster.Owner(t, key) != cluster.Owner(t, group[0]) {
				t.Errorf("%s and %s are on two nodes", group[0], key)
			}
		}
	}

	frozen := cluster.Owner(t, keys[0])
	frozen.Freeze()
	defer frozen.Thaw()
	dead := func(key string) bool { return w.nodeOf(key) == w.nodeOf(keys[0]) }
	var wg sync.WaitGroup
	for _, key := range keys {
		wg.Go(func() {
			for !w.Away(keys[0]) {
				if err := get(key); !dead(key) && !errors.Is(err, redis.Nil) {
					t.Errorf("a key of a living node: %v", err)
				}
			}
		})
	}
	wg.Wait()
	for _, key := range keys {
		if away := w.Away(key); away != dead(key) || away != (w.Refusal(key) != nil) {
			t.Errorf("away %t, refusal %v, of a key on the dead node: %t", away, w.Refusal(key), dead(key))
		}
		if !dead(key) && !w.answers(key) {
			t.Error("a living node is not reachable")
		}
	}
	redistest.Await(t, "the frozen node is not reachable", func() bool { // at once, unless a probe is on its way
		return !w.answers(keys[0])
	})
	frozen.Thaw()
	redistest.Await(t, "the breaker closes", func() bool { return !w.AnyAway() })
	redistest.Await(t, "both changes have been told", func() bool { return slices.Equal(w.reported(), []bool{true, false}) })
}
