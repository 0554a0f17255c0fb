package lock_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
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

// The default times of a lease.
const (
	leaseTTL    = 10 * time.Second
	leaseMargin = leaseTTL / 20
	leaseWaits  = 500 * time.Millisecond // RedisTimeout
)

// A lease is renewed at a third of its life for as long as it is held, also by a server that forgets scripts.
//
//fault:script-flush
func TestLease_Renewals(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		var e locktest.Events
		opts := &lock.Options{TTL: 6 * time.Second, Trace: e.Trace()}
		lease := mustAcquire(t, newLocker(t, kind, rdb, "n", opts))
		begun := time.Now()
		for range 10 {
			time.Sleep(time.Minute)
			redistest.Must(t, rdb.ScriptFlush(t.Context()).Err())
			wantBusy(t, newLocker(t, kind, rdb, "n", nil))
		}
		wantHeld(t, lease)
		synctest.Wait()
		renewed := e.Of("renewed")
		for i, r := range renewed {
			if at, want := r.At.Sub(begun), time.Duration(i+1)*2*time.Second; at != want || r.Duration != want || r.Fence != lease.Fence() || r.Name != "n" {
				t.Fatalf("renewal %d after %v: %+v", i, at, r.LeaseInfo)
			}
		}
		if len(renewed) != 300 {
			t.Errorf("%d renewals in 10m", len(renewed))
		}
		mustRelease(t, lease)
		time.Sleep(time.Minute)
		if n := len(e.Of("renewed")); n != len(renewed) {
			t.Errorf("%d renewals after the release", n-len(renewed))
		}
		wantKeys(t, rdb, "n", ":fence")
	})
}

// Renewals that are due at the same moment share round trips. So they need few connections, and a
// server that is slow, but answers in time, costs no lease.
func TestLease_RenewalsTogether(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		const leases, few = 300, 40
		learn(t, rdb)
		client := redis.NewClient(&redis.Options{
			Addr: rdb.Options().Addr, Dialer: rdb.Options().Dialer, PoolSize: 10,
			DisableIdentity: true, MaintNotificationsConfig: rdb.Options().MaintNotificationsConfig,
		})
		defer client.Close()
		var trips, lasting atomic.Int64 // round trips of scripts, and how long each lasts
		client.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			if strings.HasPrefix(cmds[0].Name(), "eval") {
				trips.Add(1)
				time.Sleep(time.Duration(lasting.Load()))
			}
			return nil
		}))
		var e locktest.Events
		var held []*lock.Lease
		for i := range leases {
			held = append(held, mustAcquire(t, newLocker(t, kind, client, fmt.Sprint("n", i), &lock.Options{Trace: e.Trace()})))
		}
		time.Sleep(leaseTTL / 6)
		for round, slow := range []time.Duration{time.Millisecond, leaseWaits / 5} {
			trips.Store(0)
			lasting.Store(int64(slow))
			time.Sleep(leaseTTL / 3)
			if n, want := len(e.Of("renewed")), (round+1)*leases; n != want || len(e.Of("renew"))+len(e.Of("lost")) > 0 {
				t.Fatalf("round trips of %v: %d renewals, want %d; failed: %d, lost: %d", slow, n, want, len(e.Of("renew")), len(e.Of("lost")))
			}
			if n := trips.Load(); n > few {
				t.Errorf("round trips of %v: %d for %d renewals, want %d at most", slow, n, leases, few)
			}
		}
		lasting.Store(0)
		for _, lease := range held {
			mustRelease(t, lease)
		}
	})
}

// A held lease needs no goroutine, so a thousand leases cost no thousand stacks.
func TestLease_NoGoroutine(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		l := semaphore(t, rdb, "n", 100, nil)
		for range 100 {
			defer mustRelease(t, mustAcquire(t, l))
		}
		for _, d := range []time.Duration{0, time.Minute} { // before a renewal, and after some
			time.Sleep(d + time.Second)
			synctest.Wait()
			stacks := make([]byte, 1<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			if n := bytes.Count(stacks, []byte("singlefill/internal/renew.")); n >= 50 {
				t.Errorf("%v after 100 leases were acquired there are %d goroutines that wait for renewals", d, n)
			}
		}
	})
}

// However Redis fails, a holder learns of the loss before another caller can hold the lock, by the
// server's clock.
//
//fault:isolated-holder
func TestLease_LostBeforeItsEnd(t *testing.T) {
	for what, fails := range map[string]fault{
		"requests lost": requestLost, "silent": silence, "no connection": noConnection, "loading": refusal("LOADING Redis is loading"),
		"not allowed": refusal("NOPERM this user has no permissions to run the 'evalsha' command"),
	} {
		for _, after := range []time.Duration{0, leaseTTL / 6, leaseTTL/3 - 1, leaseTTL / 3, leaseTTL / 2, leaseTTL} {
			what := fmt.Sprint(what, " after ", after)
			runEachKind(t, what, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
				var e locktest.Events
				client, f := withFaults(t, m)
				lease := mustAcquire(t, newLocker(t, kind, client, "n", &lock.Options{Trace: e.Trace()}))
				last := time.Now()
				time.Sleep(after)
				synctest.Wait()
				for _, renewal := range e.Of("renewed") {
					last = renewal.At
				}
				f.set(fails)
				next := make(chan time.Time)
				go func() {
					lease, err := newLocker(t, kind, rdb, "n", nil).Acquire(t.Context())
					next <- time.Now()
					if err == nil {
						err = lease.Release(t.Context())
					}
					if err != nil {
						t.Error(err)
					}
				}()
				wantLost(t, lease)
				wantElapsed(t, "told", last, leaseTTL-leaseMargin)
				if taken := (<-next).Sub(last); taken < leaseTTL-time.Millisecond || taken > leaseTTL+6*time.Millisecond {
					t.Errorf("another has it after %v", taken)
				}
				wantIs(t, "Release", lease.Release(t.Context()), lock.ErrLost)
				synctest.Wait()
				e.WantTransitions(t, "acquired lost")
				if n := len(e.Of("renew")); n < 2 {
					t.Errorf("%d renewals have failed, want more", n)
				}
			})
		}
	}
}

// The life of a lease begins when its command is sent: the server may have granted it long before
// the reply.
func TestLease_LifeBeginsWhenSent(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb)
		client, f := withFaults(t, m)
		f.set(slow(400*time.Millisecond), "acquire")
		begun := time.Now()
		lease := mustAcquire(t, newLocker(t, kind, client, "n", nil))
		f.set(silence)
		wantLost(t, lease)
		wantElapsed(t, "told", begun, leaseTTL-leaseMargin)
	})
}

// A lease that was lost because Redis did not answer is given back: its last renewals were executed
// and not answered, so that the server would keep it beyond the end that its holder knows.
func TestLease_LostUnanswered(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb)
		var e locktest.Events
		client, f := withFaults(t, m)
		lease := mustAcquire(t, newLocker(t, kind, client, "n", &lock.Options{Trace: e.Trace()}))
		begun := time.Now()
		f.set(replyLost, "renew")
		wantLost(t, lease)
		wantElapsed(t, "lost", begun, leaseTTL-leaseMargin)
		other := newLocker(t, kind, rdb, "n", nil)
		synctest.Wait()
		early, err := other.TryAcquire(t.Context())
		_ = early.Release(t.Context())
		if !errors.Is(err, lock.ErrBusy) {
			t.Errorf("before its holder has had the margin to stop: %v, want ErrBusy", err)
		}
		time.Sleep(leaseMargin)
		synctest.Wait()
		next, err := other.TryAcquire(t.Context())
		if err != nil {
			t.Errorf("after that: %v", err)
		}
		_ = next.Release(t.Context())
		e.WantTransitions(t, "acquired lost")
		wantIs(t, "Release", lease.Release(t.Context()), lock.ErrLost)
		if len(e.Of("renew")) == 0 {
			t.Error("no renewal was executed and not answered")
		}
	})
}

// A lease that holds nothing is harmless.
//
//fault:release-twice
func TestLease_Zero(t *testing.T) {
	t.Parallel()
	for what, lease := range map[string]*lock.Lease{"nil": nil, "zero": {}} {
		for range 2 {
			if err := lease.Release(t.Context()); err != nil {
				t.Errorf("%s: Release: %v", what, err)
			}
		}
		if n := lease.Fence(); n != 0 {
			t.Errorf("%s: the fence is %d", what, n)
		}
		wantLost(t, lease)
	}
}

// A lease has the values of the context of Acquire, and outlives it.
func TestLease_ContextOfAcquire(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), valueKey{}, "v"), time.Second)
		seen := make(map[string]any)
		note := func(what string) func(context.Context, lock.LeaseInfo) {
			return func(ctx context.Context, _ lock.LeaseInfo) { seen[what] = ctx.Value(valueKey{}) }
		}
		client, f := withFaults(t, m)
		lease, err := newLocker(t, kind, client, "n", &lock.Options{Trace: &lock.Trace{
			Acquired: note("acquired"), Renewed: note("renewed"), Released: note("released"),
			RedisError: func(ctx context.Context, _ string, _ error) { seen["error"] = ctx.Value(valueKey{}) },
		}}).Acquire(ctx)
		redistest.Must(t, err)
		cancel()
		time.Sleep(time.Minute)
		f.set(requestLost, "renew")
		time.Sleep(leaseTTL / 2)
		f.set(nil)
		wantHeld(t, lease)
		if _, ok := lease.Context().Deadline(); ok || lease.Context().Value(valueKey{}) != "v" {
			t.Errorf("the lease's context: deadline %t, value %v", ok, lease.Context().Value(valueKey{}))
		}
		if err := lease.Release(ctx); err != nil {
			t.Error(err)
		}
		for _, what := range []string{"acquired", "renewed", "released", "error"} {
			if seen[what] != "v" {
				t.Errorf("%s was told with the value %v", what, seen[what])
			}
		}
	})
}

type valueKey struct{}
