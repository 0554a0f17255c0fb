package lock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// A waiter with time left outlasts a Redis that does not answer, or refuses, under the same token;
// one of a fair mutex keeps its place.
//
//fault:stalled-waiters
func TestAcquire_OutlastsAStall(t *testing.T) {
	for what, fails := range map[string]fault{
		"silent": silence, "replies lost": replyLost, "no connection": noConnection,
		"read only": refusal("READONLY You can't write against a read only replica."), "loading": refusal("LOADING Redis is loading"),
	} {
		for _, begins := range []bool{false, true} { // when the waiter comes, or later
			t.Run(fmt.Sprint(what, " ", begins), func(t *testing.T) {
				eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
					holder := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
					client, f := withFaults(t, m)
					l := newLocker(t, kind, client, "n", nil)
					if begins {
						f.set(fails)
					}
					ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
					defer cancel()
					var wg sync.WaitGroup
					order := make(chan int, 3)
					wait := func(i int, l *lock.Locker) {
						wg.Go(func() {
							lease, err := l.Acquire(ctx)
							if err != nil {
								t.Errorf("waiter %d: %v", i, err)
								return
							}
							order <- i
							mustRelease(t, lease)
						})
						synctest.Wait()
						time.Sleep(10 * time.Millisecond)
					}
					wait(0, l)
					wait(1, l)
					wait(2, newLocker(t, kind, rdb, "n", nil))
					f.set(fails)
					time.Sleep(1100 * time.Millisecond)
					f.set(nil)
					time.Sleep(time.Second)
					mustRelease(t, holder)
					wg.Wait()
					if first := <-order; kind == "fair" && !begins && first != 0 {
						t.Errorf("waiter %d was the first", first)
					}
				})
			})
		}
	}
}

// Without a deadline a waiter outlasts it for as long as a lease could, and a caller that comes
// then for RedisTimeout.
//
//fault:stalled-waiters
func TestAcquire_WithoutADeadline(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		holder := mustAcquire(t, newLocker(t, kind, rdb, "n", &lock.Options{TTL: time.Hour}))
		client, f := withFaults(t, m)
		l := newLocker(t, kind, client, "n", nil)
		begun := time.Now()
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				_, err := l.Acquire(t.Context())
				if !errors.Is(err, lock.ErrUnavailable) {
					t.Errorf("a waiter: %v", err)
				}
				if took := time.Since(begun); took < leaseTTL || took > leaseTTL+2*leaseWaits {
					t.Errorf("a waiter has waited for %v", took)
				}
			})
		}
		synctest.Wait()
		f.set(noConnection)
		wg.Wait()
		begun = time.Now()
		for range 20 {
			wg.Go(func() {
				_, err := l.Acquire(t.Context())
				wantIs(t, "a caller", err, lock.ErrUnavailable)
				if took := time.Since(begun); took > leaseWaits {
					t.Errorf("a caller has waited for %v", took)
				}
			})
		}
		wg.Wait()
		f.set(nil)
		mustRelease(t, holder)
	})
}

// A process that is held up while its command is answered does not take a lease for its own that
// has ended.
//
//fault:stalled-grant
func TestAcquire_HeldUpForLongerThanTTL(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		client := redistest.NewMiniClient(t, m)
		bounded := *client.Options()
		bounded.ContextTimeoutEnabled = true
		slow := redis.NewClient(&bounded)
		defer slow.Close()
		var once sync.Once
		slow.AddHook(holdUp(func(op string) {
			if op == "acquire" {
				once.Do(func() { time.Sleep(leaseTTL + time.Second) })
			}
		}))
		learn(t, rdb, kind)
		time.AfterFunc(leaseTTL+500*time.Millisecond, func() {
			other := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
			time.Sleep(4500 * time.Millisecond)
			mustRelease(t, other)
		})
		begun := time.Now()
		lease, err := newLocker(t, kind, slow, "n", nil).Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begun); took < leaseTTL+5*time.Second {
			t.Errorf("granted after %v, while another held it", took)
		}
		wantHeld(t, lease)
		wantBusy(t, newLocker(t, kind, rdb, "n", nil))
		mustRelease(t, lease)
	})
}

// A holdUp is a hook that is called when a command of a Locker has been answered.
type holdUp func(op string)

func (holdUp) DialHook(next redis.DialHook) redis.DialHook { return next }
func (holdUp) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (h holdUp) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if cmd.Name() == "evalsha" && err == nil {
			h(opOfHash[cmd.Args()[1].(string)])
		}
		return err
	}
}

// A waiter that gives up has given its place back when Acquire returns: its process may end then.
//
//fault:given-up
func TestAcquire_GivesItsPlaceBackBeforeItReturns(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		holder := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
		client := redistest.NewMiniClient(t, m)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, err := newLocker(t, kind, client, "n", nil).Acquire(ctx)
			wantIs(t, "Acquire", err, lock.ErrBusy, context.Canceled)
			_ = client.Close()
		}()
		for time.Sleep(300 * time.Millisecond); !m.Exists("{n}:lock:queue") && !m.Exists("{n}:lock:next"); {
			mustRelease(t, holder)
			holder = mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
			time.Sleep(300 * time.Millisecond)
		}
		cancel()
		<-ended
		mustRelease(t, holder)
		next, err := newLocker(t, kind, rdb, "n", nil).TryAcquire(t.Context())
		if err != nil {
			t.Fatalf("TryAcquire of the free lock: %v", err)
		}
		mustRelease(t, next)
	})
}

// What Redis keeps of attempts that have ended is bounded for each name, whatever the TTL.
func TestRelease_MarksAreBounded(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		l := newLocker(t, kind, rdb, "n", &lock.Options{TTL: 24 * time.Hour})
		for range 600 {
			mustRelease(t, mustAcquire(t, l))
		}
		if n := countMarks(m); n > 500 {
			t.Errorf("%d attempts are known to have ended", n)
		}
		time.Sleep(3 * time.Minute)
		wantKeys(t, rdb, "n", ":fence")
		if n := countMarks(m); n > 0 {
			t.Errorf("%d attempts are known to have ended after 3 minutes", n)
		}
	})
}

// A waiter of a semaphore goes on when the first holder of another size gets in, and is told if
// that lasts.
//
//fault:disagreement
func TestNewSemaphore_WaiterOfAnotherSize(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		sized := func(size int) *lock.Locker {
			l, err := lock.NewSemaphore(redistest.NewMiniClient(t, m), "n", size, nil)
			if err != nil {
				t.Fatal(err)
			}
			return l
		}
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

// A mutex does not pass the queue of a fair mutex of its name.
//
//fault:disagreement
func TestNewMutex_FairMutexOfThatName(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		fair, plain := newLocker(t, "fair", rdb, "n", nil), newLocker(t, "mutex", rdb, "n", nil)
		holder := mustAcquire(t, fair)
		got := make(chan *lock.Lease)
		go func() { got <- mustAcquire(t, newLocker(t, "fair", rdb, "n", nil)) }()
		synctest.Wait()
		_, err := plain.TryAcquire(t.Context())
		wantIs(t, "while it is held", err, lock.ErrConflict)
		mustRelease(t, holder)
		_, err = plain.TryAcquire(t.Context())
		wantIs(t, "while it is free", err, lock.ErrConflict)
		mustRelease(t, <-got)
	})
}

// A dead waiter of a fair mutex does not live for longer when the server's clock is put back.
//
//fault:clock-dead-waiter
func TestNewFairMutex_DeadWaiterAndClockPutBack(t *testing.T) {
	for _, before := range []bool{true, false} {
		t.Run(fmt.Sprint("waiter came before ", before), func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				holder := mustAcquire(t, newLocker(t, "fair", rdb, "n", nil))
				mortal := redistest.NewMiniClient(t, m)
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					_, _ = newLocker(t, "fair", mortal, "n", nil).Acquire(t.Context())
				}()
				synctest.Wait()
				got := make(chan *lock.Lease, 1)
				wait := func() {
					go func() { got <- mustAcquire(t, newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", nil)) }()
					synctest.Wait()
				}
				if before {
					wait()
				}
				_ = mortal.Close()
				<-ended
				stop := make(chan struct{})
				defer close(stop)
				go func() { // miniredis' clock stands still once it is set
					for {
						select {
						case <-stop:
							return
						case <-time.After(10 * time.Millisecond):
							m.SetTime(time.Now().Add(-time.Hour))
						}
					}
				}()
				time.Sleep(20 * time.Millisecond)
				if !before {
					wait()
				}
				mustRelease(t, holder)
				select {
				case lease := <-got:
					mustRelease(t, lease)
				case <-time.After(10 * time.Second):
					t.Error("the dead waiter keeps the others waiting")
				}
			})
		})
	}
}
