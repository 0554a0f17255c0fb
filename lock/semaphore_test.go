package lock_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

func semaphore(t testing.TB, rdb redis.UniversalClient, name string, size int, opts *lock.Options) *lock.Locker {
	t.Helper()
	l, err := lock.NewSemaphore(rdb, name, size, opts)
	redistest.Must(t, err)
	return l
}

// A semaphore never has more holders than its size when fifty goroutines compete on a real server.
func TestNewSemaphore_ManyRounds(t *testing.T) {
	t.Parallel()
	rounds := 40
	if testing.Short() {
		rounds = 4
	}
	s, name := redistest.Shared(t), redistest.Namespace(t)
	c := &locktest.Crowd{Kind: locktest.Kind{Name: "semaphore", Size: 5}}
	for range 10 {
		c.Lockers = append(c.Lockers, c.Locker(t, s.Client(t), name, locktest.Patient, locktest.Long))
	}
	c.Run(t, 5, func(turns int) bool { return turns < rounds })
	c.Want(t, 50*rounds)
	wantKeys(t, s.Admin(), name, ":fence")
}

// A caller with another size gets ErrConflict, which names both sizes, while a lease is held.
//
//fault:disagreement
func TestNewSemaphore_OtherSize(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		name := redistest.Namespace(t)
		of := func(size int) *lock.Locker { return semaphore(t, rdb, name, size, patient(lock.Options{})) }
		wantRefused := func(here, there int) {
			t.Helper()
			_, err := of(here).Acquire(t.Context())
			wantIs(t, "Acquire", err, lock.ErrConflict)
			want := fmt.Sprintf("size of %q is %d here, and %d with", name, here, there)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want it to say %q", err, want)
			}
		}
		a, b := mustTry(t, of(3)), mustTry(t, of(3))
		wantRefused(33, 3)
		mustRelease(t, a)
		wantRefused(2, 3)
		mustRelease(t, b)
		c := mustTry(t, of(33))
		wantRefused(3, 33)
		mustRelease(t, c)
	})
}

// A waiter goes on when the first holder of another size gets in, and gets ErrConflict if that
// lasts.
//
//fault:disagreement
func TestNewSemaphore_WaiterOfAnotherSize(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		redistest.Mute(m) // so that no waiter asks at the instant of a release
		sized := func(size int) *lock.Locker { return semaphore(t, redistest.NewMiniClient(t, m), "n", size, nil) }
		other := sized(2)
		holder := mustAcquire(t, sized(1))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := sized(1).Acquire(ctx)
			wantIs(t, "a waiter until ctx has ended", err, lock.ErrConflict, context.DeadlineExceeded)
		})
		wg.Go(func() { mustRelease(t, mustAcquire(t, sized(1))) })
		synctest.Wait()
		time.Sleep(100 * time.Millisecond)
		_, err := other.Acquire(t.Context())
		wantIs(t, "another size at first", err, lock.ErrConflict)
		mustRelease(t, holder)
		if holder, err = other.TryAcquire(t.Context()); err != nil {
			t.Fatal(err) // no time has passed in which a waiter could ask
		}
		time.Sleep(5 * time.Second)
		mustRelease(t, holder)
		wg.Wait()
	})
}

// Dead holders are replaced right after their TTL: no pause of a waiter lasts beyond the next end
// of a lease.
//
//fault:killed-holder
func TestNewSemaphore_DeadHolders(t *testing.T) {
	for _, apart := range []time.Duration{0, 70 * time.Millisecond} {
		runInBubble(t, fmt.Sprint(apart, " apart"), func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			const n = 4
			opts := &lock.Options{TTL: time.Second, RedisTimeout: 100 * time.Millisecond}
			ends := time.Now().Add(opts.TTL)
			for range n {
				mortal := redistest.NewMiniClient(t, m)
				mustTry(t, semaphore(t, mortal, "n", n, opts))
				_ = mortal.Close()
				time.Sleep(apart)
			}
			l := semaphore(t, rdb, "n", n, nil)
			wantBusy(t, l)
			got := make(chan *lock.Lease)
			for range n {
				go func() { got <- mustAcquire(t, l) }()
			}
			for range n {
				defer mustRelease(t, <-got)
				if late := time.Since(ends); late < 0 || late > 6*time.Millisecond {
					t.Errorf("a place was granted %v after its end", late)
				}
				ends = ends.Add(apart)
			}
			wantBusy(t, l)
		})
	}
}
