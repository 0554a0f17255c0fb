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

	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// Release returns nil once, ends the context at once, and has no power over the next lease of the
// Locker.
//
//fault:release-twice
func TestRelease_NilOnce(t *testing.T) {
	for what, release := range map[string]func(t *testing.T, lease *lock.Lease) (nils, losts int){
		"twice": func(t *testing.T, lease *lock.Lease) (int, int) {
			mustRelease(t, lease)
			if cause := context.Cause(lease.Context()); cause != context.Canceled {
				t.Errorf("the context has ended by %v, want it to be cancelled", cause)
			}
			wantIs(t, "the second Release", lease.Release(t.Context()), lock.ErrLost)
			return 1, 1
		},
		"ten at once": func(t *testing.T, lease *lock.Lease) (nils, losts int) {
			errs := make(chan error)
			for range 10 {
				go func() { errs <- lease.Release(t.Context()) }()
			}
			for range 10 {
				if err := <-errs; err == nil {
					nils++
				} else if errors.Is(err, lock.ErrLost) {
					losts++
				}
			}
			return nils, losts - 8
		},
		"with a context that has ended": func(t *testing.T, lease *lock.Lease) (int, int) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := lease.Release(ctx); err != nil {
				t.Error(err)
			}
			wantIs(t, "the second Release", lease.Release(ctx), lock.ErrLost)
			return 1, 1
		},
	} {
		runEachKind(t, what, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
			var e locktest.Events
			client, f := withFaults(t, m)
			l := newLocker(t, kind, client, "n", &lock.Options{Trace: e.Trace()})
			lease := mustAcquire(t, l)
			if nils, losts := release(t, lease); nils != 1 || losts != 1 {
				t.Errorf("%d nil, %d and the rest ErrLost", nils, losts)
			}
			if ops := f.take(); ops != "time acquire release" {
				t.Errorf("sent %s", ops)
			}
			select {
			case <-lease.Context().Done():
			default:
				t.Error("the context has not ended")
			}
			next := mustAcquire(t, l)
			wantIs(t, "Release of the old", lease.Release(t.Context()), lock.ErrLost)
			time.Sleep(time.Minute)
			wantHeld(t, next)
			mustRelease(t, next)
			e.WantTransitions(t, "acquired released acquired released")
		})
	}
}

// temporaryRefusals are the answers of servers that may serve later.
var temporaryRefusals = []string{
	"LOADING Redis is loading the dataset in memory", "BUSY Redis is busy running a script",
	"MASTERDOWN Link with MASTER is down", "CLUSTERDOWN The cluster is down",
	"TRYAGAIN Multiple keys request during rehashing of slot", "NOREPLICAS Not enough good replicas to write.",
	"MISCONF Redis is configured to save RDB snapshots", "READONLY You can't write against a read only replica.",
	"OOM command not allowed",
}

// A Release that is refused for now or not answered says what is known. The outcome is found out in the background and
// traced once, and a later Release returns it.
//
//fault:refused-writes
//fault:replica
func TestRelease_NotAnswered(t *testing.T) {
	type outage struct {
		what  string
		fails fault
		lasts time.Duration
		want  error // nil: it was found out in time
	}
	outages := []outage{
		{"a reply lost", replyLost, time.Millisecond, nil},
		{"requests lost for a while", requestLost, leaseWaits / 2, nil},
		{"no connection for a while", noConnection, leaseWaits / 2, nil},
		{"loading for a while", refusal("LOADING Redis is loading"), leaseWaits / 2, nil},
		{"replies lost", replyLost, 3 * leaseWaits, lock.ErrAmbiguous},
		{"requests lost", requestLost, 3 * leaseWaits, lock.ErrAmbiguous},
		{"silent", silence, 3 * leaseWaits, lock.ErrAmbiguous},
		{"no connection", noConnection, 3 * leaseWaits, lock.ErrUnavailable},
		{"replies lost for long", replyLost, leaseTTL - 2*leaseWaits, lock.ErrAmbiguous},
		{"a reply lost, then silence for long", func() fault {
			var once sync.Map
			return func(ctx context.Context, execute func() error) error {
				if _, again := once.LoadOrStore(ctx.Value(callKey{}), true); !again {
					return replyLost(ctx, execute)
				}
				return silence(ctx, execute)
			}
		}(), leaseTTL - 2*leaseWaits, lock.ErrAmbiguous},
	}
	for _, text := range temporaryRefusals {
		outages = append(outages, outage{text, refusal(text), 3 * leaseWaits, lock.ErrUnavailable})
	}
	for _, c := range outages {
		runEachKind(t, c.what, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
			learn(t, rdb)
			var e locktest.Events
			client, f := withFaults(t, m)
			lease := mustAcquire(t, newLocker(t, kind, client, "n", &lock.Options{Trace: e.Trace()}))
			f.set(c.fails)
			ended := time.Now().Add(c.lasts)
			time.AfterFunc(c.lasts, func() { f.set(nil) })
			begun := time.Now()
			err := lease.Release(context.WithValue(t.Context(), callKey{}, kind))
			if c.want == nil {
				if err != nil {
					t.Errorf("Release: %v", err)
				}
			} else {
				wantIs(t, "Release", err, c.want)
			}
			if took := time.Since(begun); took > leaseWaits {
				t.Errorf("Release took %v", took)
			}
			if context.Cause(lease.Context()) != context.Canceled {
				t.Errorf("the context has ended by %v", context.Cause(lease.Context()))
			}
			if c.want != nil { // the outcome is found out when Redis answers
				wantIs(t, "the second Release", lease.Release(t.Context()), c.want)
			}
			time.Sleep(time.Until(ended) + 2*leaseWaits)
			if c.want != nil {
				wantIs(t, "Release when Redis answers", lease.Release(t.Context()))
			}
			wantIs(t, "Release after one that returned nil", lease.Release(t.Context()), lock.ErrLost)
			e.WantTransitions(t, "acquired released")
			wantKeys(t, rdb, "n", ":fence")
		})
	}
}

type callKey struct{}

// Release, and an Acquire that gives up, take RedisTimeout at most, also while no connection is free. Then they go on
// in the background.
//
//fault:many-commands
func TestRelease_BehindALongQueue(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb)
		ring, f := ringWithFaults(t, rdb, 2)
		var e locktest.Events
		lease := mustAcquire(t, newLocker(t, kind, ring, "a", &lock.Options{Trace: e.Trace()}))
		holder := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
		var calls, others sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		calls.Go(func() {
			_, err := newLocker(t, kind, ring, "n", nil).Acquire(ctx)
			wantIs(t, "Acquire", err, lock.ErrBusy, context.Canceled)
		})
		time.Sleep(leaseWaits)
		f.set(slow(leaseWaits*4/5), "acquire")
		for i := range 20 {
			l := newLocker(t, kind, ring, fmt.Sprint("n", i), nil)
			others.Go(func() {
				lease, err := l.TryAcquire(t.Context())
				if err != nil {
					t.Errorf("TryAcquire: %v", err)
				}
				_ = lease.Release(t.Context())
			})
		}
		synctest.Wait()
		begun := time.Now()
		cancel()
		calls.Go(func() {
			err := lease.Release(t.Context())
			wantIs(t, "Release", err, lock.ErrUnavailable)
			if err == nil || !strings.Contains(err.Error(), "no answer within 500ms: ") {
				t.Errorf("Release: %v", err)
			}
		})
		calls.Wait()
		wantElapsed(t, "both return", begun, leaseWaits)
		others.Wait()
		time.Sleep(leaseTTL / 2)
		mustRelease(t, holder)
		wantKeys(t, rdb, "n", ":fence")
		wantIs(t, "Release in the end", lease.Release(t.Context()))
		e.WantTransitions(t, "acquired released")
	})
}

// A lease that was given back without a reply is not taken for lost when Redis has forgotten that, since many others
// were released.
//
//fault:killed-connections
func TestRelease_Forgotten(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb)
		var e locktest.Events
		client, f := withFaults(t, m)
		lease := mustAcquire(t, newLocker(t, kind, client, "n", &lock.Options{Trace: e.Trace()}))
		f.set(lostSilently)
		wantIs(t, "Release", lease.Release(t.Context()), lock.ErrAmbiguous)
		others := newLocker(t, kind, rdb, "n", nil)
		for range 550 {
			mustRelease(t, mustTry(t, others))
			time.Sleep(time.Millisecond)
		}
		f.set(nil)
		time.Sleep(2 * leaseWaits)
		wantIs(t, "Release when it is forgotten", lease.Release(t.Context()), lock.ErrAmbiguous)
		e.WantTransitions(t, "acquired released")
	})
}

// What Redis keeps of ended attempts is bounded for each name, whatever the TTL.
func TestRelease_MarksAreBounded(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		l := newLocker(t, kind, rdb, "n", &lock.Options{TTL: 24 * time.Hour})
		for range 530 {
			mustRelease(t, mustAcquire(t, l))
		}
		if n := countMarks(m); n > 500 {
			t.Errorf("there are %d marks", n)
		}
		time.Sleep(3 * time.Minute)
		wantKeys(t, rdb, "n", ":fence")
		if n := countMarks(m); n > 0 {
			t.Errorf("there are %d marks after 3 minutes", n)
		}
	})
}

// The marks of attempts that were not answered do not push out the mark of a release, by which a
// repeated release knows that the lease was held to the end.
//
//fault:killed-connections
func TestRelease_BesideUnansweredAttempts(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb)
		client, f := withFaults(t, m)
		l := newLocker(t, kind, client, "n", &lock.Options{RedisTimeout: 20 * time.Millisecond})
		f.set(requestLost, "acquire")
		for range 600 {
			_, err := l.TryAcquire(t.Context())
			wantIs(t, "TryAcquire", err, lock.ErrAmbiguous)
		}
		f.set(nil)
		lease := mustAcquire(t, l)
		var tries atomic.Int64
		f.decide(func(op string) fault {
			if op == "release" && tries.Add(1) == 1 {
				return replyLost
			}
			return nil
		})
		mustRelease(t, lease)
		if n := countMarks(m); tries.Load() != 2 || n < 500 || n > 1500 {
			t.Errorf("released in %d tries, beside %d marks", tries.Load(), n)
		}
	})
}
