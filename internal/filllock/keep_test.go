package filllock

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/redistest"
)

// Keep prolongs the lock until it is stopped. It notices a lost lock at once when it is woken, does not
// bring it back, and leaves another holder's lock alone. When it renews is tested in package renew.
func TestKeep(t *testing.T) {
	t.Parallel()
	const ttl, key = 6 * time.Second, "v:{k}:lock"
	for what, now := range map[string]string{"stopped": "", "deleted": "", "taken by another": "H" + other + stamp} {
		synctest.Test(t, func(t *testing.T) {
			m, rdb := redistest.StartMini(t)
			redistest.Planted(t, key)
			c := client.New(rdb, time.Second, func(context.Context, string, error) {}, nil, nil)
			l := New(c, Pair{"v:{k}", key}, ttl)
			if r, err := l.GetOrLock(t.Context(), time.Second, Query{Take: true}); err != nil || r.Status != Locked {
				t.Fatalf("answered %+v, %v", r, err)
			}
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			wake, lost, ended := make(chan struct{}, 1), false, make(chan struct{})
			go func() {
				defer close(ended)
				Keep(ctx, []*Lock{l}, wake, func(*Lock) { lost = true })
			}()
			time.Sleep(ttl/3 + time.Second)
			if left := m.TTL(key); left != ttl-time.Second {
				t.Errorf("the lock lives for %v, a second after a renewal", left)
			}
			begun := time.Now()
			if what == "stopped" {
				stop()
			} else {
				m.Del(key)
				if now != "" {
					redistest.Must(t, m.Set(key, now))
					m.SetTTL(key, time.Hour)
				}
				wake <- struct{}{}
			}
			<-ended
			if took := time.Since(begun); lost != (what != "stopped") || took != 0 {
				t.Errorf("%s: lost %t after %v", what, lost, took)
			}
			time.Sleep(ttl)
			if got, _ := m.Get(key); got != now {
				t.Errorf("%s: the lock key holds %q, want %q", what, got, now)
			}
		})
	}
}
