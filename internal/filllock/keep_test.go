package filllock

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

const keepTTL = 6 * time.Second

// A keeper is a held lock that Keep renews, in a bubble.
type keeper struct {
	*Lock
	mini  *miniredis.Miniredis
	admin *redis.Client
	nudge chan struct{}
	stop  context.CancelFunc
	ended chan struct{}
	// lost is set when the lock was lost. Read it after ended.
	lost bool
	// renewals returns when the lock was renewed, counted from its grant.
	renewals func() []time.Duration
	fail     func(on bool)
}

func keep(t *testing.T) *keeper {
	m, rdb := redistest.StartMini(t)
	redistest.Planted(t, "v:{k}:lock")
	k := &keeper{mini: m, admin: redistest.NewMiniClient(t, m), nudge: make(chan struct{}, 1), ended: make(chan struct{})}
	c := client.New(rdb, time.Second, func(context.Context, string, error) {}, nil, nil)
	k.Lock = New(c, Pair{"v:{k}", "v:{k}:lock"}, keepTTL)
	begun := time.Now()
	if r, err := k.GetOrLock(t.Context(), time.Second, Query{Take: true}); err != nil || r.Status != Locked {
		t.Fatalf("answered %+v, %v", r, err)
	}
	if _, err := k.Renew(t.Context()); err != nil { // now the server knows the script
		t.Fatal(err)
	}
	var mu sync.Mutex
	var times []time.Duration // protected by mu
	failing := false          // protected by mu
	m.Server().SetPreHook(func(p *server.Peer, cmd string, args ...string) bool {
		if cmd == "EVALSHA" && args[0] == redis.NewScript(wake.Lua+renewLua).Hash() {
			mu.Lock()
			defer mu.Unlock()
			times = append(times, time.Since(begun))
			if failing {
				p.WriteError("ERR some error")
			}
			return failing
		}
		return false
	})
	k.renewals = func() []time.Duration {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(times)
	}
	k.fail = func(on bool) {
		mu.Lock()
		defer mu.Unlock()
		failing = on
	}
	ctx, cancel := context.WithCancel(t.Context())
	k.stop = cancel
	go func() {
		defer close(k.ended)
		k.Keep(ctx, k.nudge, func() { k.lost = true })
	}()
	t.Cleanup(func() { cancel(); <-k.ended })
	return k
}

// Keep renews the lock at a third of its TTL until it is stopped.
func TestKeep_RenewsAtThirdOfTTL(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := keep(t)
		time.Sleep(7 * time.Second)
		want := []time.Duration{2 * time.Second, 4 * time.Second, 6 * time.Second}
		if got := k.renewals(); !slices.Equal(got, want) {
			t.Errorf("renewed at %v, want %v", got, want)
		}
		if left := k.admin.PTTL(t.Context(), k.key).Val(); left != keepTTL-time.Second {
			t.Errorf("the lock lives for %v, a second after a renewal", left)
		}
		k.stop()
		<-k.ended
		time.Sleep(keepTTL)
		if got := k.renewals(); !slices.Equal(got, want) || k.lost {
			t.Errorf("after its end: renewed at %v, lost %t", got, k.lost)
		}
		if n := k.admin.Exists(t.Context(), k.key).Val(); n != 0 {
			t.Error("the lock outlives its holder")
		}
	})
}

// Keep notices a lost lock at its next renewal, or at once when it is woken.
func TestKeep_NoticesLoss(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		lose  func(k *keeper)
		nudge bool
		at    time.Duration
	}{
		{"deleted", func(k *keeper) { k.mini.Del(k.key) }, false, 2 * time.Second},
		{"taken by another", func(k *keeper) { _ = k.mini.Set(k.key, "H"+other+stamp) }, false, 2 * time.Second},
		{"flushed", func(k *keeper) { k.mini.FlushAll() }, false, 2 * time.Second},
		{"deleted, with a nudge", func(k *keeper) { k.mini.Del(k.key) }, true, 500 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := keep(t)
				begun := time.Now()
				time.Sleep(500 * time.Millisecond)
				c.lose(k)
				if c.nudge {
					k.nudge <- struct{}{}
				}
				<-k.ended
				if took := time.Since(begun); !k.lost || took != c.at {
					t.Errorf("lost %t after %v, want it after %v", k.lost, took, c.at)
				}
				if c.name == "taken by another" {
					if v, _ := k.mini.Get(k.key); v != "H"+other+stamp {
						t.Errorf("the other's lock holds %q", v)
					}
				} else if k.mini.Exists(k.key) {
					t.Error("the lock is back")
				}
			})
		})
	}
}

// Keep goes on through errors until the lock is lost.
func TestKeep_Errors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := keep(t)
		k.fail(true)
		time.Sleep(5 * time.Second)
		failures := len(k.renewals())
		if failures < 2 {
			t.Fatalf("tried %d times, want more", failures)
		}
		k.fail(false)
		time.Sleep(time.Second)
		if left := k.admin.PTTL(t.Context(), k.key).Val(); left <= keepTTL-time.Second || len(k.renewals()) == failures {
			t.Errorf("the lock lives for %v after the errors are over", left)
		}
		time.Sleep(time.Minute)
		if left := k.admin.PTTL(t.Context(), k.key).Val(); left < keepTTL/2 {
			t.Errorf("the lock lives for %v a minute later", left)
		}

		k.fail(true)
		time.Sleep(keepTTL) // the lock expires
		k.fail(false)
		<-k.ended
		if !k.lost || k.mini.Exists(k.key) {
			t.Errorf("lost %t, the key exists %t", k.lost, k.mini.Exists(k.key))
		}
	})
}

// Keep answers many wakes with few renewals.
func TestKeep_ManyWakes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := keep(t)
		for range 1000 {
			select {
			case k.nudge <- struct{}{}:
			default:
			}
			time.Sleep(time.Millisecond)
		}
		if n := len(k.renewals()); n == 0 || n > 101 {
			t.Errorf("%d renewals in a second of nudges", n)
		}
		if k.lost {
			t.Error("lost")
		}
	})
}
