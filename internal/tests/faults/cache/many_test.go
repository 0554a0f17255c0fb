package cache_test

import (
	"context"
	"errors"
	"fmt"
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
		return cachetest.OneByOne(c.Load)(ctx, keys)
	}
}

func keysOf(prefix string, n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprint(prefix, i))
	}
	return keys
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
			elsewhere, held := source.Begin(t.Context(), t, b.Cache, "a")
			keys := append(keysOf("cold", 99), "a")
			call := cachetest.GoGetMany(t.Context(), a.Cache, keys, loadMany(a, nil))
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
			if values, err := call.Result(t); err != nil || len(values) != len(keys) {
				t.Errorf("GetOrLoadMany = %d values, %v; want %d", len(values), err, len(keys))
			}
			a.WantErrors()
			a.WantLoads(int64(len(keys)))
			held.Give("value of a")
			elsewhere.Want(t, "value of a")
		})
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
