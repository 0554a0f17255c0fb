package singlefilltest_test

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
	"github.com/singlefill/singlefill/singlefilltest"
)

// lockScenes leave something to a lock's background when their bubble ends.
var lockScenes = map[string]func(t *testing.T, rdb *redis.Client, l *lock.Locker){
	"released without Redis": func(t *testing.T, rdb *redis.Client, l *lock.Locker) {
		lease, err := l.Acquire(t.Context())
		redistest.Must(t, err)
		singlefilltest.Disconnect(t, rdb)
		if err := lease.Release(t.Context()); err == nil {
			t.Error("Release without Redis returned nil")
		}
	},
	"released in silence": func(t *testing.T, rdb *redis.Client, l *lock.Locker) {
		lease, err := l.Acquire(t.Context())
		redistest.Must(t, err)
		singlefilltest.Silence(t, rdb)
		_ = lease.Release(t.Context())
	},
	"acquired in silence": func(t *testing.T, rdb *redis.Client, l *lock.Locker) {
		singlefilltest.Silence(t, rdb)
		_, _ = l.TryAcquire(t.Context())
	},
	"lost without Redis": func(t *testing.T, rdb *redis.Client, l *lock.Locker) {
		lease, err := l.Acquire(t.Context())
		redistest.Must(t, err)
		singlefilltest.Disconnect(t, rdb)
		<-lease.Context().Done()
	},
	"waited for": func(t *testing.T, rdb *redis.Client, l *lock.Locker) {
		lease, err := l.Acquire(t.Context())
		redistest.Must(t, err)
		var waiter sync.WaitGroup
		waiter.Go(func() {
			_ = l.Do(t.Context(), func(context.Context) error { return nil })
		})
		time.Sleep(time.Second)
		_ = lease.Release(t.Context())
		waiter.Wait()
	},
	"used": func(t *testing.T, _ *redis.Client, l *lock.Locker) {
		go func() {
			_ = l.Do(t.Context(), func(context.Context) error { select {} })
		}()
		synctest.Wait()
	},
	"not released": func(t *testing.T, rdb *redis.Client, l *lock.Locker) {
		_, err := l.Acquire(t.Context())
		redistest.Must(t, err)
	},
}

// A bubble with a lock ends, whatever the lock has left to do in the background. If a call has not
// returned, that is reported before synctest ends the process.
func TestRedis_LockInABubble(t *testing.T) {
	scene := lockScenes[os.Getenv("LOCK_SCENE")]
	if scene == nil {
		for name := range lockScenes {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				cmd := exec.Command(os.Args[0], "-test.run", "^TestRedis_LockInABubble$")
				cmd.Env = append(os.Environ(), "LOCK_SCENE="+name)
				out, err := cmd.CombinedOutput()
				reported := strings.Contains(string(out), "singlefilltest: the bubble ends, and a call of a lock has not returned")
				if used := name == "used"; reported != used || (err != nil) != used {
					t.Errorf("%v:\n%.3000s", err, out)
				}
			})
		}
		return
	}
	synctest.Test(t, func(t *testing.T) {
		rdb := singlefilltest.Redis(t)
		l, err := lock.NewMutex(rdb, "n", nil)
		redistest.Must(t, err)
		scene(t, rdb, l)
	})
}
