package near

import (
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// background runs what the tier does in the background until the test ends.
func (x *tier) background(t *testing.T) {
	var running sync.WaitGroup
	closing := make(chan struct{})
	x.Tier.background = func(run func(<-chan struct{})) { running.Go(func() { run(closing) }) }
	t.Cleanup(func() {
		close(closing)
		running.Wait()
		x.client.StopListening()
	})
}

// serve lets time pass in which values are asked for.
func (x *tier) serve(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(min(x.maxLag/8, time.Until(end))) {
		x.Get("a")
	}
	synctest.Wait()
}

// wantWoken checks that a hint of another process makes the tier read a record.
func (x *tier) wantWoken(t *testing.T, what string, other *tier) {
	t.Helper()
	x.keep("a")
	redistest.Must(t, other.Append(t.Context(), []string{"a"}))
	other.Hint(t.Context(), nil)
	time.Sleep(rest)
	synctest.Wait()
	x.want(t, what, "a", false)
}

// A server that refuses to subscribe for a moment does not cost the wake-ups for longer than a minute,
// however long MaxLag is.
//
//fault:near-lost-hints
func TestTier_ListensAgain(t *testing.T) {
	for refusal, lag := range map[string]time.Duration{
		"NOPERM for a moment":      maxLag,
		"NOPERM for another":       time.Hour,
		"CLUSTERDOWN for a moment": time.Hour,
	} {
		t.Run(refusal, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				m, rdb := redistest.StartMini(t)
				var refuse atomic.Bool
				var refused atomic.Int64
				m.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
					if !refuse.Load() || !strings.HasSuffix(strings.ToLower(cmd), "subscribe") {
						return false
					}
					refused.Add(1)
					c.WriteError(refusal)
					return true
				})
				x, other := newTier(rdb), newTier(rdb)
				x.maxLag = lag
				refuse.Store(true)
				x.background(t)
				x.serve(time.Second)
				if refused.Load() == 0 {
					t.Fatal("no subscription was refused")
				}
				refuse.Store(false)
				x.serve(time.Minute + listenEvery)
				x.wantWoken(t, "a wake-up later", other)
			})
		})
	}
}

// However many wake-ups arrive, the log is read a few times a second, and a genuine one among them is
// not lost.
//
//fault:near-forged-hints
func TestTier_Flood(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		_, rdb := redistest.StartMini(t)
		var reads atomic.Int64
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			if cmds[0].Name() == "xrange" {
				reads.Add(1)
			}
			return nil
		}))
		x, other := newTier(rdb), newTier(rdb)
		x.background(t)
		x.serve(time.Second)
		before := reads.Load()
		for range 1000 {
			redistest.Must(t, rdb.Publish(t.Context(), logKey, "forged").Err())
			time.Sleep(time.Millisecond)
			x.Get("a")
		}
		if n := reads.Load() - before; n > int64(time.Second/rest)+1 {
			t.Errorf("%d reads of the log in a second of forged wake-ups", n)
		} else if n == 0 {
			t.Error("no wake-up was heard")
		}
		x.wantWoken(t, "after a flood", other)
	})
}
