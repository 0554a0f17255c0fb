package cache_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// loadMany returns a ManyLoader of the source of c. before, if it is not nil, is called first.
func loadMany(c *cachetest.Cache, before func(keys []string)) singlefill.ManyLoader[string] {
	return func(ctx context.Context, keys []string) (map[string]string, error) {
		if before != nil {
			before(keys)
		}
		values := make(map[string]string, len(keys))
		for _, key := range keys {
			values[key], _ = c.Load(ctx, key)
		}
		return values, nil
	}
}

// mustLoadMany fails the test if GetOrLoadMany does not return the values of all keys.
func mustLoadMany(t testing.TB, c *cachetest.Cache, keys []string, load singlefill.ManyLoader[string]) {
	t.Helper()
	values, err := c.GetOrLoadMany(context.Background(), keys, load)
	if err != nil || len(values) != len(keys) {
		t.Errorf("GetOrLoadMany = %d values, %v; want %d", len(values), err, len(keys))
	}
	for _, key := range keys {
		if v := values[key]; v != "value of "+key {
			t.Errorf("the value of %q is %q", key, v)
		}
	}
}

func keysOf(prefix string, n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprint(prefix, i))
	}
	return keys
}

// wantFree fails the test if the lock of one of the keys is held.
func wantFree(t testing.TB, s *redistest.Server, c *cachetest.Cache, keys []string) {
	t.Helper()
	for _, key := range keys {
		if lock := held(s, c, key); strings.HasPrefix(lock, "H") {
			t.Errorf("the lock of %q holds %q", key, lock)
		}
	}
}

// With a frozen node, a call for keys of all nodes loads the keys of the others before the frozen node
// has failed to answer. Then it loads the keys of that node.
//
//fault:frozen-node
func TestGetOrLoadMany_FrozenNode(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	c := cachetest.New(t, cluster.Client(t), redistest.Namespace(t), cachetest.Patient)
	isFrozen := func(key string) bool { return cluster.Owner(t, c.ValueKey(key)) == cluster.Nodes[1] }
	warm, cold := keysOf("warm", 30), keysOf("cold", 30)
	hits := 0
	for _, key := range warm {
		c.AwaitCached(key)
		if !isFrozen(key) {
			hits++
		}
	}
	frozen := make(map[string]bool)
	for _, key := range slices.Concat(warm, cold) {
		frozen[key] = isFrozen(key)
	}
	before := c.Stats().Hits
	cluster.Nodes[1].Freeze()
	defer cluster.Nodes[1].Thaw()

	var mu sync.Mutex
	loaded := make(map[string]int) // protected by mu
	mustLoadMany(t, c, slices.Concat(warm, cold), loadMany(c, func(keys []string) {
		mu.Lock()
		defer mu.Unlock()
		early := 0
		for _, key := range keys {
			loaded[key]++
			if !frozen[key] {
				early++
			}
		}
		if early == 0 {
			return
		}
		if early < len(keys) {
			t.Errorf("the keys %v of all nodes are loaded together", keys)
		}
		if n := c.Log.ErrorCount(); n != 0 {
			t.Errorf("the keys %v of other nodes are loaded after %d commands for the frozen one have failed", keys, n)
		}
	}))
	if n := c.Stats().Hits - before; n != int64(hits) {
		t.Errorf("%d hits, want the %d on other nodes", n, hits)
	}
	c.WantErrors()
	for key, n := range loaded {
		if n != 1 {
			t.Errorf("%q was loaded %d times", key, n)
		}
	}
	if want := len(warm) - hits + len(cold); len(loaded) != want {
		t.Errorf("%d keys were loaded, want %d", len(loaded), want)
	}
	for _, key := range cold {
		if !frozen[key] {
			c.WantHit(key)
		}
	}
}

// The keys of a node that freezes when they are to be locked are loaded by another call of the ManyLoader, also
// while the first one hangs. They have all of LoadTimeout for their own call.
//
//fault:frozen-node
func TestGetOrLoadMany_FrozenNodeAndHangingLoader(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	rdb := cluster.Client(t)
	c := cachetest.New(t, rdb, redistest.Namespace(t), cachetest.Impatient,
		lockTTL(time.Second), func(o *singlefill.Options[string]) { o.LoadTimeout = 4 * time.Second })
	c.MustLoad("warm") // the client knows the nodes
	keys := keysOf("k", 30)
	isFrozen := make(map[string]bool)
	frozen := 0
	for _, key := range keys {
		if isFrozen[key] = cluster.Owner(t, c.ValueKey(key)) == cluster.Nodes[1]; isFrozen[key] {
			frozen++
		}
	}
	freeze := sync.OnceFunc(cluster.Nodes[1].Freeze)
	defer cluster.Nodes[1].Thaw()
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		if strings.HasPrefix(cmds[0].Name(), "eval") {
			freeze()
		}
		return nil
	}))
	hang := make(chan struct{})
	defer close(hang)
	values, err := c.GetOrLoadMany(t.Context(), keys, loadMany(c, func(keys []string) {
		if !isFrozen[keys[0]] {
			<-hang
		}
		time.Sleep(time.Second) // longer than a frozen node is waited for
	}))
	failed, ok := errors.AsType[*singlefill.ManyError](err)
	if !ok || len(failed.Errs) != len(keys)-frozen || len(values) != frozen {
		t.Errorf("GetOrLoadMany = %d values, %v; want those of the %d keys of the frozen node", len(values), err, frozen)
	}
	c.WantErrors()
}

// A server that goes away while the keys of a call queue for MaxFleetLoads delays none of them: the key
// that another process was loading, and the keys that had no slot.
//
//fault:dies-while-queued
func TestGetOrLoadMany_ServerDiesWhileKeysQueue(t *testing.T) {
	for name, restart := range map[string]bool{"for good": false, "and comes back": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			a, b := newPair(t, s.Client(t), s.Client(t), cachetest.Impatient,
				func(o *singlefill.Options[string]) { o.MaxFleetLoads = 1 })
			source := cachetest.NewSource[string](t)
			elsewhere := cachetest.GoGet(t.Context(), b.Cache, "a", source.Load)
			held := source.Next(t)
			keys := append(keysOf("cold", 99), "a")
			call := make(chan cachetest.Ending[map[string]string], 1)
			go func() {
				values, err := a.GetOrLoadMany(t.Context(), keys, loadMany(a, nil))
				call <- cachetest.Ending[map[string]string]{Value: values, Err: err}
			}()
			// Only "a" learns at once of a dead connection. The wait for a slot of the fleet has to be asleep.
			redistest.Await(t, "the keys queue, and both waits listen", func() bool {
				n := s.AllCalls()
				return a.Stats().Queued == 1 && n["subscribe"]+n["ssubscribe"] >= 2
			})
			s.Kill()
			if restart {
				redistest.Await(t, "a key is to be loaded without the lock", func() bool { return a.Stats().LoadsUnlocked > 0 })
				s.Restart()
			}
			if got := cachetest.Receive(t, "the call returns", call); got.Err != nil || len(got.Value) != len(keys) {
				t.Errorf("GetOrLoadMany = %d values, %v; want %d", len(got.Value), got.Err, len(keys))
			}
			a.WantErrors()
			a.WantLoads(int64(len(keys)))
			held.Give("value of a")
			elsewhere.Want(t, "value of a")
		})
	}
}

// A connection that is cut in the middle of a pipeline costs no key its value, and no key is loaded
// that Redis has.
//
//fault:reset
func TestGetOrLoadMany_ReplyCutShort(t *testing.T) {
	for what, match := range map[string]func(cmd []string) bool{
		"GET":         redistest.Command("GET"),
		"get_or_lock": cachetest.Script(t, "get_or_lock"),
		"store":       cachetest.Script(t, "store"),
	} {
		for client, configure := range retries {
			t.Run(what+", "+client, func(t *testing.T) {
				s, p := newWarm(t)
				c, other := newPair(t, p.Client(t, configure), s.Client(t), cachetest.Patient)
				warm, cold := keysOf("warm", 8), keysOf("cold", 8)
				for _, key := range warm {
					other.MustLoad(key)
				}
				rule := p.On(match, redistest.ResetReply).After(3).Times(1)
				mustLoadMany(t, c, slices.Concat(warm, cold), loadMany(c, nil))
				if rule.Fired() != 1 {
					t.Errorf("the fault has come about %d times", rule.Fired())
				}
				c.WantLoads(16)
				c.AwaitLoads()
				for _, key := range cold {
					other.WantHit(key)
				}
				if n := c.Stats().LoadsUnlocked; n != 0 {
					t.Errorf("%d loads ran without the lock", n)
				}
				wantFree(t, s, c, cold)
			})
		}
	}
}

// Clear says what the server refuses.
//
//fault:missing-right
func TestRefused_Clear(t *testing.T) {
	for _, right := range []string{"scan", "unlink"} {
		t.Run(right, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			c := cachetest.New(t, s.Client(t, s.User(t, "~*", "&*", "+@all", "-"+right)), redistest.Namespace(t), cachetest.Patient)
			c.MustLoad("k")
			err := c.Clear(t.Context())
			if _, refused := errors.AsType[redis.Error](err); !refused || !strings.Contains(strings.ToLower(err.Error()), right) {
				t.Errorf("Clear = %v, want an error of Redis that names %q", err, right)
			}
			if c.Stats().BreakerOpens != 0 {
				t.Error("a refusal has opened the breaker")
			}
			allowed := cachetest.New(t, s.Client(t), c.Namespace, cachetest.Patient)
			if err := allowed.Clear(t.Context()); err != nil {
				t.Errorf("Clear of a user who may = %v", err)
			}
			c.WantMiss("k")
		})
	}
}
