package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// loadCounts counts the loads of each key.
type loadCounts struct{ of sync.Map }

func (l *loadCounts) load(_ context.Context, key string) (string, error) {
	n, _ := l.of.LoadOrStore(key, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
	time.Sleep(10 * time.Millisecond)
	return "value of " + key, nil
}

func (l *loadCounts) count(key string) int64 {
	if n, ok := l.of.Load(key); ok {
		return n.(*atomic.Int64).Load()
	}
	return 0
}

func testKeys(prefix string, n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprint(prefix, i))
	}
	return keys
}

// askAll asks for all keys at once, with a goroutine for each.
func askAll(t *testing.T, f *faultCache, keys []string, load singlefill.Loader[string], wg *sync.WaitGroup) {
	for _, key := range keys {
		wg.Go(func() {
			if v, err := f.GetOrLoad(t.Context(), key, load); v != "value of "+key || err != nil {
				t.Errorf("GetOrLoad(%s) = %q, %v", key, v, err)
			}
		})
	}
}

// A healthy Redis is not taken for a dead one when many more keys are cold than the client has connections.
//
//fault:many-commands
func TestAdmission_ColdKeys(t *testing.T) {
	t.Parallel()
	keys := testKeys("k", 5000)
	if testing.Short() {
		keys = keys[:1000]
	}
	s, ns := redistest.Start(t), redistest.Namespace(t)
	var loads loadCounts
	var wg sync.WaitGroup
	var caches []*faultCache
	for range 2 {
		rdb := s.Client(t, func(o *redis.Options) { o.PoolSize = 10 })
		f := newFaultCache(t, rdb, ns, time.Second)
		caches = append(caches, f)
		askAll(t, f, keys, loads.load, &wg)
	}
	redistest.Await(t, "commands wait to be sent", func() bool { return caches[0].Stats().CommandsQueued > 0 })
	wg.Wait()
	for _, key := range keys {
		if n := loads.count(key); n != 1 {
			t.Errorf("%s has been loaded %d times", key, n)
		}
	}
	for _, f := range caches {
		f.wantNoErrors()
		if n := f.Stats(); n.LoadsUnlocked != 0 || n.BreakerOpens != 0 {
			t.Errorf("Stats are %+v", n)
		}
	}
}

// Hits of a Redis that is some milliseconds away are hits, however many there are at a time.
//
//fault:many-commands
func TestAdmission_Hits(t *testing.T) {
	const redisTimeout, roundTrip = 100 * time.Millisecond, 2 * time.Millisecond
	for kind, bounded := range map[string]bool{"default": false, "minds deadlines": true} {
		synctest.Test(t, func(t *testing.T) {
			rdb := distantMini(t, 10, bounded, roundTrip)
			f := newFaultCache(t, rdb, "ns", redisTimeout)
			keys := testKeys("k", 3000)
			for _, key := range keys {
				if err := f.Set(t.Context(), key, "value of "+key); err != nil {
					t.Fatal(err)
				}
			}
			var wg sync.WaitGroup
			askAll(t, f, keys, func(context.Context, string) (string, error) { return "", errors.New("loaded") }, &wg)
			synctest.Wait()
			if n := f.Stats().CommandsQueued; n != int64(len(keys)-10) {
				t.Errorf("%s: %d commands wait to be sent, want %d", kind, n, len(keys)-10)
			}
			wg.Wait()
			if n := f.Stats(); n.Loads != 0 || n.Hits != int64(len(keys)) || n.RedisErrors != 0 || n.CommandsQueued != 0 {
				t.Errorf("%s: Stats are %+v", kind, n)
			}
			_ = f.Close()
			time.Sleep(time.Minute)
		})
	}
}

// A slowConn takes its time for each command.
type slowConn struct {
	net.Conn
	takes time.Duration
}

func (c slowConn) Write(b []byte) (int, error) {
	time.Sleep(c.takes)
	return c.Conn.Write(b)
}

// distantMini is a client of a miniredis with as many connections as said, to which a round trip takes a while.
func distantMini(t *testing.T, connections int, bounded bool, roundTrip time.Duration) *redis.Client {
	m, _ := redistest.StartMini(t)
	opt := *redistest.NewMiniClient(t, m).Options()
	opt.PoolSize, opt.ContextTimeoutEnabled = connections, bounded
	dial := opt.Dialer
	opt.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return slowConn{conn, roundTrip}, err
	}
	rdb := redis.NewClient(&opt)
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// A caller whose read waits for a connection leaves at its deadline or its cancellation. The callers beside it wait on.
//
//fault:many-commands
func TestAdmission_ImpatientCaller(t *testing.T) {
	const redisTimeout, takes, impatience = 300 * time.Millisecond, 100 * time.Millisecond, 800 * time.Millisecond
	for kind, bounded := range map[string]bool{"default": false, "minds deadlines": true} {
		for end, cancelAt := range map[string]time.Duration{"deadline": time.Hour, "cancelled": impatience} {
			synctest.Test(t, func(t *testing.T) {
				rdb := distantMini(t, 1, bounded, takes)
				f := newFaultCache(t, rdb, "ns", redisTimeout)
				var loads loadCounts
				var wg sync.WaitGroup
				for i := range 20 { // which take two seconds
					wg.Go(func() { _, _ = f.Get(t.Context(), fmt.Sprint("other", i)) })
					synctest.Wait()
				}
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(cancelAt, cancel)
				if end == "deadline" {
					ctx, cancel = context.WithTimeout(t.Context(), impatience)
				}
				defer cancel()
				begun := time.Now()
				wg.Go(func() {
					_, err := f.GetOrLoad(ctx, "k", loads.load)
					if took := time.Since(begun); err != ctx.Err() || err == nil || took != impatience {
						t.Errorf("%s, %s: %v after %v, want it after %v", kind, end, err, took, impatience)
					}
				})
				synctest.Wait()
				askAll(t, f, []string{"k"}, loads.load, &wg)
				wg.Wait()
				if n := f.Stats(); loads.count("k") != 1 || n.LoadsUnlocked != 0 || n.RedisErrors != 0 {
					t.Errorf("%s, %s: %d loads, %+v", kind, end, loads.count("k"), n)
				}
				_ = f.Close()
				time.Sleep(time.Minute)
			})
		}
	}
}

// A frozen node of a Cluster costs the keys of the others nothing, and those of its own RedisTimeout once.
//
//fault:frozen-node
func TestAdmission_FrozenClusterNode(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	f := newFaultCache(t, cluster.Client(t), redistest.Namespace(t), time.Second)
	var living, dead []string
	for _, key := range testKeys("k", 60) {
		redistest.Await(t, "the value is cached", func() bool {
			f.mustLoad(key)
			_, err := f.Get(t.Context(), key)
			return err == nil
		})
		if cluster.Owner(t, f.value(key)) == cluster.Nodes[1] {
			dead = append(dead, key)
		} else {
			living = append(living, key)
		}
	}
	var loads loadCounts
	cluster.Nodes[1].Freeze()
	defer cluster.Nodes[1].Thaw()
	var stop atomic.Bool
	var living1, dead1 sync.WaitGroup
	for _, key := range living {
		living1.Go(func() {
			for !stop.Load() {
				if _, err := f.GetOrLoad(t.Context(), key, loads.load); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	askAll(t, f, dead, loads.load, &dead1)
	dead1.Wait()
	redistest.Await(t, "the breaker of the frozen node opens", func() bool {
		askAll(t, f, dead, loads.load, &dead1)
		dead1.Wait()
		return f.Stats().BreakerOpen
	})
	failed := func() (n int) { // but for those by which the breaker itself asks
		for op, errs := range f.log.errors() {
			if op != "ping" {
				n += len(errs)
			}
		}
		return n
	}
	before := failed()
	for range 20 {
		askAll(t, f, dead, loads.load, &dead1)
		dead1.Wait()
	}
	if n := failed() - before; n != 0 {
		t.Errorf("%d commands were sent to a node whose breaker is open", n)
	}
	stop.Store(true)
	living1.Wait()
	for _, key := range living {
		if n := loads.count(key); n != 0 {
			t.Errorf("%s, on a living node, has been loaded %d times", key, n)
		}
	}
	if f.Stats().BreakerOpens != 1 {
		t.Errorf("the breaker has opened %d times", f.Stats().BreakerOpens)
	}
}

// Deleting many keys of a dead Redis takes RedisTimeout once, also while the breaker is open, and says so once.
//
//fault:delete-many
func TestAdmission_DeleteOfManyKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, rdb := muteClient(t)
		f := newFaultCache(t, rdb, "ns", impatience)
		keys := testKeys("k", 5000)
		d.mute.Store(true)
		ctx, cancel := context.WithTimeout(t.Context(), impatience/2)
		defer cancel()
		if err := f.Delete(ctx, keys...); err != context.DeadlineExceeded {
			t.Errorf("at the caller's deadline: %v", err)
		}
		for range 10 {
			begun := time.Now()
			err := f.Delete(t.Context(), keys...)
			if took := time.Since(begun); err == nil || took > impatience || f.Stats().BreakerOpen && took > impatience {
				t.Errorf("%v after %v", err, took)
			}
		}
		if !f.Stats().BreakerOpen {
			t.Fatal("the breaker is closed")
		}
		begun := time.Now()
		if err := f.Delete(t.Context(), keys...); err == nil || time.Since(begun) != impatience {
			t.Errorf("with the breaker open: %v after %v, want one try", err, time.Since(begun))
		}
		_ = f.Close()
		time.Sleep(time.Minute)
	})
}
