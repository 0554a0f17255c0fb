package client

import (
	"context"
	"errors"
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

// A breaker stays open while the server says that it does not serve, and closes by itself once it gives another answer.
// A panic of the function that the breaker reports to does not affect that.
func TestBreaker_PanickingTrace(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		w := watch(t, rdb, timeout)
		var told atomic.Int64
		w.changes.changed = func(error) { told.Add(1); panic("a bug of the user's") }
		const pong, refusal = "", "NOPERM this user has no permissions to run the 'ping' command"
		for i, answer := range []string{pong, refusal, pong} {
			m.SetError(loading)
			w.openBreaker()
			if time.Sleep(10 * timeout); !w.AnyAway() {
				t.Fatal("not open")
			}
			m.SetError(answer)
			time.Sleep(2 * timeout)
			if changes := 2 * (i + 1); w.AnyAway() || w.Refusal("k") != nil || int(told.Load()) != changes || w.failures("ping") != changes {
				t.Fatalf("open %t, refusal %v, told %d times, %d panics told", w.AnyAway(), w.Refusal("k"), told.Load(), w.failures("ping"))
			}
		}
	})
}

// A silence is noticed a command's time after the last answer, if there was one, also by those whose commands were sent
// before it, and while commands queue. So a caller that asks several caches waits for that time once.
func TestBreaker_AfterTheLastAnswer(t *testing.T) {
	t.Parallel()
	type others struct {
		callers int // which queue
		pause   time.Duration
	}
	for _, others := range []others{{}, {callers: 5}, {callers: 5, pause: timeout / 8}} {
		for _, last := range []time.Duration{0, timeout / 100, timeout / 10, timeout / 3, timeout * 9 / 10} {
			eachGet(t, fmt.Sprintf("%+v/%v", others, last), func(t *testing.T, _ string, rdb redis.UniversalClient, get getFunc) {
				a, b := watch(t, rdb, timeout), watch(t, rdb, timeout)
				a.node.alone.size, a.node.together.size = 3, 2
				begun := time.Now()
				request := func() {
					for _, w := range []*watcher{a, b, a, b} {
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

// What one user of a client learns of its server protects all users, and each reports the breaker. An
// answer to any of them closes it.
func TestBreaker_Shared(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		users, locker := []*watcher{watch(t, rdb, timeout), watch(t, rdb, timeout)}, unwatched(rdb, timeout)
		check := func(away bool, told ...bool) {
			t.Helper()
			synctest.Wait()
			for i, w := range users {
				got, err := w.reported(), w.Refusal("k")
				if w.Away("k") != away || w.AnyAway() != away || (err != nil) != away || !slices.Equal(got, told) {
					t.Errorf("user %d: away %t, any %t, refusal %v, told %v; want %t, and told %v",
						i, w.Away("k"), w.AnyAway(), err, got, away, told)
				}
			}
			if err := locker.Refusal("k"); (err != nil) != away {
				t.Errorf("a lock is refused with %v; away: %t", err, away)
			}
		}
		m.SetError(loading)
		users[0].openBreaker()
		users = append(users, watch(t, rdb, timeout)) // it comes when the breaker is open
		check(true, true)
		m.SetError("")
		_ = users[1].do(nil) // a command that is sent nevertheless, such as a Delete
		check(false, true, false)
	})
}

// A lock tries by itself when no cache probes the server any more, also if its command has to wait at the gate.
func TestBreaker_LockAfterTheLastCache(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		w := watch(t, rdb, timeout)
		locker := unwatched(rdb, timeout)
		locker.node.alone.size = 1
		m.SetError(loading)
		w.openBreaker()
		if locker.Refusal("k") == nil {
			t.Error("it tries while a cache probes")
		}
		w.close()
		if err := locker.Refusal("k"); err != nil {
			t.Error(err)
		}
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				_, err := Do(t.Context(), locker, "lock", "k", func(context.Context) (int, error) { time.Sleep(timeout / 2); return 1, nil })
				redistest.Must(t, err)
			})
		}
		wg.Wait()
		if w.node.line.Away(0) != nil {
			t.Error("open after an answer")
		}
	})
}

// A caller that asks alone waits for a silent server once, whatever its first command was: that and an unanswered ping
// open the breaker.
func TestBreaker_OneCaller(t *testing.T) {
	t.Parallel()
	const within = timeout * 19 / 20
	for name, first := range map[string]func(ctx context.Context, w *watcher) error{
		"a command that overtakes": func(ctx context.Context, w *watcher) error {
			_, err := doNow(ctx, w.Client, "now", "k", w.read)
			return err
		},
		"a command with less time": func(ctx context.Context, w *watcher) error {
			begun := time.Now()
			_, err := DoWithin(ctx, w.Client, Command{Op: "within", Key: "k", Within: within}, w.read)
			if took := time.Since(begun); took != within {
				t.Errorf("it took %v, want %v", took, within)
			}
			return err
		},
		"a script that takes": func(ctx context.Context, w *watcher) error { return w.take(ctx, nil).Err },
	} {
		runInBubble(t, name, func(t *testing.T) {
			w, begun := watch(t, mute(t), timeout), time.Now()
			if err := first(t.Context(), w); err == nil {
				t.Error("answered")
			}
			_, _, _ = w.Get(t.Context(), nil, "k")
			if took := time.Since(begun); took > timeout {
				t.Errorf("it and a GET have waited for %v", took)
			}
		})
	}
}

// When the breaker opens, commands that are on their way keep no caller waiting, whichever cache or lock has sent them.
// Callers are released before the outage is reported.
func TestBreaker_OpensForThoseThatWait(t *testing.T) {
	t.Parallel()
	eachGet(t, "", func(t *testing.T, _ string, rdb redis.UniversalClient, get getFunc) {
		a, b := watch(t, rdb, timeout), watch(t, rdb, timeout)
		locker := &watcher{Client: New(rdb, timeout, b.Client.failed, nil, nil)}
		a.node.alone.size = 100                                     // so that none queues
		a.changes.changed = func(error) { time.Sleep(time.Minute) } // the user's function, which may take long
		b.changes.changed = a.changes.changed
		begun := time.Now()
		go func() { _ = get(a, t.Context()) }()
		for range 10 {
			time.Sleep(timeout / 12)
			for name, w := range map[string]*watcher{"a cache": b, "the one that notices": a, "a lock": locker} {
				go func() {
					err := get(w, t.Context())
					if took := time.Since(begun); took > timeout || !errors.Is(err, ErrAway) && took < timeout*15/16 {
						t.Errorf("%s: %v after %v", name, err, took)
					}
				}()
			}
		}
		time.Sleep(2 * time.Minute)
		if got := b.failures("get"); got < 20 {
			t.Errorf("%d of 20 commands have failed", got)
		}
	})
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
	for _, forgotten := range []bool{false, true} {
		runInBubble(t, fmt.Sprint("forgotten=", forgotten), func(t *testing.T) {
			w := watchCluster(t, mute(t).Options().Dialer)
			w.openBreaker()
			if n := w.nodeOf("k"); forgotten {
				w.nodes.of.Clear()
			} else {
				time.Sleep(2 * idle)
				if w.nodes.forgetIdle(); w.nodeOf("k") != n {
					t.Error("forgotten while its breaker is open")
				}
			}
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
