package lock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A call returns at the instant at which its context ends.
//
//fault:cancelled
func TestAcquire_ContextEnds(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb)
		holder := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
		var e locktest.Events
		l := newLocker(t, kind, rdb, "n", &lock.Options{Trace: e.Trace()})
		c := record(m)
		for name, slow := range map[string]time.Duration{"in a pause": 0, "in the middle of a command": 400 * time.Millisecond} {
			want := []error{lock.ErrBusy}
			if slow > 0 {
				want[0] = lock.ErrAmbiguous
			}
			for _, d := range []time.Duration{1234567, 50*time.Millisecond + 1, 3*time.Second + 7} {
				if slow > 0 {
					d = slow/4 + d%slow/2
				}
				c.delay(slow)
				begun := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), d)
				_, err := l.Acquire(ctx)
				cancel()
				wantElapsed(t, name+", at the deadline", begun, d)
				wantIs(t, name, err, append(want, context.DeadlineExceeded)...)

				begun = time.Now()
				ctx, cancel = context.WithCancel(t.Context())
				time.AfterFunc(d, cancel)
				_, err = l.Acquire(ctx)
				wantElapsed(t, name+", when cancelled", begun, d)
				wantIs(t, name, err, append(want, context.Canceled)...)
				c.delay(0)
				time.Sleep(time.Minute) // for the clean-up
			}
		}
		if kind == "fair" {
			wantKeys(t, rdb, "n", "", ":fence")
		}
		c.reset()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for what, call := range map[string]func(context.Context) (*lock.Lease, error){"Acquire": l.Acquire, "TryAcquire": l.TryAcquire} {
			if lease, err := call(ctx); lease != nil || err != context.Canceled {
				t.Errorf("%s with a context that has ended: %v, %v", what, lease, err)
			}
		}
		err := l.Do(ctx, func(context.Context) error { t.Error("Do has called"); return nil })
		if n := len(c.all()); n != 0 || err != context.Canceled {
			t.Errorf("with a context that has ended: %d commands, Do says %v", n, err)
		}
		mustRelease(t, holder)
		e.WantTransitions(t, "")
	})
}

// A waiter with a place in a queue leaves at once when its context ends, also while Redis answers nothing to
// the waiter before it.
//
//fault:cancelled
func TestAcquire_ContextEndsInSilence(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb)
		holder := mustAcquire(t, newLocker(t, "fair", rdb, "n", nil))
		client, f := withFaults(t, m)
		l := newLocker(t, "fair", client, "n", nil)
		var waiters sync.WaitGroup
		for _, d := range []time.Duration{5 * time.Second, 3 * time.Second} {
			waiters.Go(func() {
				begun := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), d)
				defer cancel()
				_, err := l.Acquire(ctx)
				wantElapsed(t, "it returns", begun, d)
				if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, lock.ErrBusy) {
					t.Errorf("Acquire in silence: %v", err)
				}
			})
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
		}
		if queue, err := m.ZMembers("{n}:lock:queue"); len(queue) != 2 {
			t.Fatalf("%d have places, %v", len(queue), err)
		}
		time.Sleep(time.Second)
		f.set(silence)
		waiters.Wait()
		f.set(nil)
		mustRelease(t, holder)
	})
}

// A waiter holds no connection between two commands.
//
//fault:waiting-callers
func TestAcquire_HoldsNoConnection(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		takeFor(t, rdb, kind, "n")
		waits := redistest.NewMiniClient(t, m)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = newLocker(t, kind, waits, "n", nil).Acquire(ctx)
		}()
		for range 50 {
			time.Sleep(97 * time.Millisecond)
			synctest.Wait()
			if s := waits.PoolStats(); s.IdleConns != s.TotalConns || s.TotalConns == 0 {
				t.Errorf("%d connections, %d idle", s.TotalConns, s.IdleConns)
			}
		}
		<-done
	})
}

// A waiter that gives up has given its place back when Acquire returns: its process may end then.
//
//fault:given-up
func TestAcquire_GivesItsPlaceBackBeforeItReturns(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		redistest.Mute(m) // with wake-ups the waiter may have the lock before it reserves it
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

// A waiter with time left outlasts a Redis that does not answer, or refuses, with the same token; a
// waiter of a fair mutex keeps its place.
//
//fault:stalled-waiters
func TestAcquire_OutlastsAStall(t *testing.T) {
	for what, fails := range map[string]fault{
		"silent": silence, "replies lost": replyLost, "no connection": noConnection,
		"read only": refusal("READONLY You can't write against a read only replica."), "loading": refusal("LOADING Redis is loading"),
	} {
		for _, begins := range []bool{false, true} { // when the waiter arrives, or later
			what := fmt.Sprintf("%s, from the beginning %v", what, begins)
			runEachKind(t, what, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
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
		}
	}
}

// Without a deadline a waiter outlasts a stall for as long as a lease could, and a later caller for
// RedisTimeout.
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
		for _, apart := range []time.Duration{0, leaseWaits / 13} { // so that some come while another one is asking
			longest := leaseWaits
			if apart > 0 {
				longest *= 2
			}
			for range 40 {
				wg.Go(func() {
					begun := time.Now()
					_, err := l.Acquire(t.Context())
					wantIs(t, "a caller", err, lock.ErrUnavailable)
					if took := time.Since(begun); took < leaseWaits*7/10 || took > longest {
						t.Errorf("a caller that comes %v after another has waited for %v", apart, took)
					}
				})
				time.Sleep(apart)
			}
			wg.Wait()
		}
		f.set(nil)
		mustRelease(t, holder)
	})
}

// A process that is stalled while its command is answered does not take an ended lease for its own.
//
//fault:stalled-grant
func TestAcquire_StalledForLongerThanTTL(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		client := redistest.NewMiniClient(t, m)
		bounded := *client.Options()
		bounded.ContextTimeoutEnabled = true
		slow := redis.NewClient(&bounded)
		defer slow.Close()
		f := new(faults)
		slow.AddHook(f)
		learn(t, rdb)
		var once sync.Once
		f.set(func(_ context.Context, execute func() error) error {
			err := execute()
			once.Do(func() { time.Sleep(leaseTTL + time.Second) })
			return err
		}, "acquire")
		time.AfterFunc(leaseTTL+500*time.Millisecond, func() {
			other := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
			time.Sleep(4500 * time.Millisecond)
			mustRelease(t, other)
		})
		begun := time.Now()
		lease, err := newLocker(t, kind, slow, "n", nil).Acquire(t.Context())
		redistest.Must(t, err)
		if took := time.Since(begun); took < leaseTTL+5*time.Second {
			t.Errorf("granted after %v, while another held it", took)
		}
		wantHeld(t, lease)
		wantBusy(t, newLocker(t, kind, rdb, "n", nil))
		mustRelease(t, lease)
	})
}

// The wait for a connection is no part of a lease: neither before the command that acquires it, which may wait for
// longer than TTL, nor before one that renews it.
//
//fault:many-commands
func TestAcquire_AfterALongQueue(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		const connections, callers, takes, ttl = 10, 60, 400 * time.Millisecond, 2 * time.Second
		learn(t, rdb)
		ring, f := ringWithFaults(t, rdb, connections)
		var e locktest.Events
		held := mustAcquire(t, newLocker(t, kind, ring, "n", &lock.Options{TTL: 3 * ttl, Trace: e.Trace()}))
		time.Sleep(ttl / 2)

		f.set(slow(takes), "acquire")
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		begun := time.Now()
		var acquiring sync.WaitGroup
		leases := make(chan *lock.Lease, callers)
		for i := range callers {
			l := newLocker(t, kind, ring, fmt.Sprint("n", i), &lock.Options{TTL: ttl})
			acquiring.Go(func() {
				lease, err := l.TryAcquire(ctx)
				if err != nil {
					t.Errorf("TryAcquire of a free lock: %v", err)
				}
				leases <- lease
			})
		}
		acquiring.Wait()
		wantElapsed(t, "all are granted", begun, callers/connections*takes)
		time.Sleep(2 * ttl)
		for range callers {
			_ = (<-leases).Release(t.Context()) // its renewal may have waited for too long
		}
		renewed := e.Of("renewed")
		if len(renewed) < 2 || renewed[0].Duration <= ttl || renewed[1].At.Sub(renewed[0].At) != ttl {
			t.Errorf("renewed: %+v, want it late, and then after %v", renewed, ttl)
		}
		mustRelease(t, held)
	})
}

// However many calls a server leaves unanswered, few commands at a time undo what they may have
// done, also with a Locker for each call.
func TestCleanup_FewCommands(t *testing.T) {
	const calls, atOnce = 500, 8
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb)
		client, f := withFaults(t, m)
		before := countMarks(m)
		var trying, most, ambiguous atomic.Int64
		f.decide(func(op string) fault {
			switch op {
			case "acquire":
				return silence
			case "abandon":
				return func(ctx context.Context, execute func() error) error {
					now := trying.Add(1)
					defer trying.Add(-1)
					most.Store(max(most.Load(), now))
					return silence(ctx, execute)
				}
			}
			return nil
		})
		var acquiring sync.WaitGroup
		for range calls {
			l := newLocker(t, kind, client, "n", nil)
			acquiring.Go(func() {
				_, err := l.TryAcquire(t.Context())
				if errors.Is(err, lock.ErrUnavailable) { // there was no connection: nothing was sent
					return
				}
				ambiguous.Add(1)
				wantIs(t, "TryAcquire", err, lock.ErrAmbiguous)
			})
		}
		acquiring.Wait()
		time.Sleep(leaseTTL / 2)
		if n := most.Load(); n == 0 || n > atOnce {
			t.Errorf("%d commands at once, want 1 to %d", n, atOnce)
		}
		f.set(nil)
		time.Sleep(2 * leaseWaits)
		synctest.Wait()
		if marks, sent := countMarks(m)-before, int(ambiguous.Load()); sent < calls/4 || marks < sent || marks > calls {
			t.Errorf("%d attempts are marked as abandoned, want those %d of %d calls that were sent", marks, sent, calls)
		}
		f.take()
		time.Sleep(time.Hour)
		if ops := f.take(); ops != "" {
			t.Errorf("afterwards it sent %s", ops)
		}
	})
}

// countMarks counts the marks of ended attempts on the server.
func countMarks(m *miniredis.Miniredis) (n int) {
	for _, key := range m.Keys() {
		if strings.Contains(key, ":ended") {
			ended, _ := m.SortedSet(key)
			n += len(ended)
		}
	}
	return n
}
