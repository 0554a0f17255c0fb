package lock_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// The life of a lease by default.
const (
	leaseTTL    = 10 * time.Second
	leaseMargin = leaseTTL / 20
	leaseWaits  = 500 * time.Millisecond // RedisTimeout
)

// faults is a hook of a client, by which a test decides what becomes of the commands of its Lockers.
type faults struct {
	mu     sync.Mutex
	on     func(op string) fault // protected by mu; nil: none
	ops    []string              // protected by mu: the scripts that were asked for, in order
	failed int                   // protected by mu: how many commands have met a fault
}

type fault func(ctx context.Context, execute func() error) error

// What may become of a command.
func requestLost(context.Context, func() error) error { return io.ErrUnexpectedEOF }
func replyLost(_ context.Context, execute func() error) error {
	_ = execute()
	return io.ErrUnexpectedEOF
}
func silence(ctx context.Context, _ func() error) error { <-ctx.Done(); return ctx.Err() }
func refusal(text string) fault {
	return func(context.Context, func() error) error { return replyError(text) }
}
func noConnection(context.Context, func() error) error {
	return &net.OpError{Op: "dial", Err: errors.New("refused")}
}
func lostSilently(ctx context.Context, execute func() error) error {
	_ = execute()
	<-ctx.Done()
	return ctx.Err()
}

// A replyError is what a server has answered.
type replyError string

func (e replyError) Error() string { return string(e) }
func (e replyError) RedisError()   {}

// withFaults returns a client of its own, as another process would have.
func withFaults(t testing.TB, m *miniredis.Miniredis) (*redis.Client, *faults) {
	rdb, f := redistest.NewMiniClient(t, m), new(faults)
	rdb.AddHook(f)
	return rdb, f
}

// set makes commands meet f until the next set; nil is none.
func (f *faults) set(what fault, ops ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.on = func(op string) fault {
		if len(ops) > 0 && !slices.Contains(ops, op) {
			return nil
		}
		return what
	}
}

// take returns the ops since the last take.
func (f *faults) take() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer func() { f.ops = nil }()
	return strings.Join(f.ops, " ")
}

var opOfHash = func() map[string]string {
	ops := make(map[string]string)
	files, err := lua.ReadDir("lua")
	if err != nil {
		panic(err)
	}
	for _, file := range files {
		text, err := lua.ReadFile("lua/" + file.Name())
		if err != nil {
			panic(err)
		}
		_, op, _ := strings.Cut(strings.TrimSuffix(file.Name(), ".lua"), "_")
		ops[redis.NewScript(string(text)).Hash()] = op
		ops[string(text)] = op
	}
	return ops
}()

func (f *faults) DialHook(next redis.DialHook) redis.DialHook { return next }
func (f *faults) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (f *faults) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		op := cmd.Name()
		if op == "evalsha" || op == "eval" {
			op = opOfHash[cmd.Args()[1].(string)]
		}
		f.mu.Lock()
		var what fault
		if f.on != nil {
			what = f.on(op)
		}
		if op != "hello" && cmd.Name() != "eval" {
			f.ops = append(f.ops, op)
		}
		f.mu.Unlock()
		if what == nil {
			return next(ctx, cmd)
		}
		err := what(ctx, func() error { return next(ctx, cmd) })
		cmd.SetErr(err)
		if err != nil {
			f.mu.Lock()
			f.failed++
			f.mu.Unlock()
		}
		return err
	}
}

func wantLost(t testing.TB, lease *lock.Lease) {
	t.Helper()
	select {
	case <-lease.Context().Done():
		if cause := context.Cause(lease.Context()); !errors.Is(cause, lock.ErrLost) {
			t.Errorf("the cause is %v, want ErrLost", cause)
		}
	default:
		t.Error("the context has not ended")
	}
}

// awaitEnd waits for the end of the lease, but not for ever: in a bubble that would be an endless loop of renewals.
func awaitEnd(t testing.TB, lease *lock.Lease) {
	t.Helper()
	select {
	case <-lease.Context().Done():
	case <-time.After(10 * time.Minute):
		t.Error("the lease's context does not end")
	}
}

func wantHeld(t testing.TB, lease *lock.Lease) {
	t.Helper()
	if cause := context.Cause(lease.Context()); cause != nil {
		t.Errorf("the context has ended by %v", cause)
	}
}

func TestALeaseIsRenewedAtAThirdOfItsLifeForAsLongAsItIsHeld(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		var e events
		opts := &lock.Options{TTL: 6 * time.Second, Trace: e.trace()}
		lease := mustAcquire(t, newLocker(t, kind, rdb, "n", opts))
		begun := time.Now()
		for range 10 {
			time.Sleep(time.Minute)
			wantBusy(t, newLocker(t, kind, rdb, "n", nil))
		}
		wantHeld(t, lease)
		synctest.Wait()
		renewed := e.of("renewed")
		for i, r := range renewed {
			if at, want := r.at.Sub(begun), time.Duration(i+1)*2*time.Second; at != want || r.Duration != want || r.Fence != lease.Fence() || r.Name != "n" {
				t.Fatalf("renewal %d after %v: %+v", i, at, r.LeaseInfo)
			}
		}
		if len(renewed) != 300 {
			t.Errorf("%d renewals in 10m", len(renewed))
		}
		mustRelease(t, lease)
		time.Sleep(time.Minute)
		if n := len(e.of("renewed")); n != len(renewed) {
			t.Errorf("%d renewals after the release", n-len(renewed))
		}
		wantKeys(t, rdb, "n", ":fence")
	})
}

// A thousand leases cost no thousand stacks.
func TestALeaseThatIsHeldNeedsNoGoroutine(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		l, err := lock.NewSemaphore(rdb, "n", 100, nil)
		if err != nil {
			t.Fatal(err)
		}
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

//fault:flushall
func TestALossIsToldAtTheNextRenewalAndNothingIsBroughtBack(t *testing.T) {
	for what, lose := range map[string]func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client, kind string){
		"deleted": func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client, _ string) { m.Del("{n}:lock") },
		"flushed": func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client, _ string) { m.FlushAll() },
		"taken by another": func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client, kind string) {
			m.FlushAll()
			takeFor(t, rdb, kind, "n")
		},
	} {
		t.Run(what, func(t *testing.T) {
			eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
				var e events
				client, f := withFaults(t, m)
				lease := mustAcquire(t, newLocker(t, kind, client, "n", &lock.Options{Trace: e.trace()}))
				begun := time.Now()
				time.Sleep(time.Second)
				lose(t, m, rdb, kind)
				before := keysOf(t, rdb, "n")
				awaitEnd(t, lease)
				wantElapsed(t, "told", begun, leaseTTL/3)
				wantLost(t, lease)
				synctest.Wait()
				f.take()
				for range 2 {
					wantIs(t, "Release after the loss", lease.Release(t.Context()), lock.ErrLost)
				}
				time.Sleep(time.Minute)
				if ops := f.take(); ops != "" {
					t.Errorf("after the loss it has sent %s", ops)
				}
				if s := e.transitions(); s != "acquired lost" {
					t.Errorf("told %q", s)
				}
				lost := e.of("lost")[0]
				wantIs(t, "Lost is told", lost.Err, lock.ErrLost)
				if lost.Fence != lease.Fence() || lost.Name != "n" || lost.Duration != leaseTTL/3 || !strings.Contains(lost.Err.Error(), "gone from Redis") {
					t.Errorf("told %+v", lost.LeaseInfo)
				}
				time.Sleep(-time.Since(begun) + time.Second)
				for key, left := range keysOf(t, rdb, "n") {
					if _, was := before[key]; !was || left < 0 {
						t.Errorf("%q is there, for %v", key, left)
					}
				}
			})
		})
	}
}

// However Redis fails: when another can have it, its holder has been told. By the server's clock.
//
//fault:isolated-holder
func TestAHolderIsToldBeforeAnybodyElseCanHoldIt(t *testing.T) {
	for what, fails := range map[string]fault{
		"requests lost": requestLost, "silent": silence, "no connection": noConnection, "loading": refusal("LOADING Redis is loading"),
		"not allowed": refusal("NOPERM this user has no permissions to run the 'evalsha' command"),
	} {
		for renewals := range 2 {
			t.Run(fmt.Sprint(what, " after ", renewals, " renewals"), func(t *testing.T) {
				eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
					var e events
					client, f := withFaults(t, m)
					lease := mustAcquire(t, newLocker(t, kind, client, "n", &lock.Options{Trace: e.trace()}))
					last := time.Now()
					for range renewals {
						time.Sleep(leaseTTL / 3)
						synctest.Wait()
						last = time.Now()
					}
					if n := len(e.of("renewed")); n != renewals {
						t.Fatalf("%d renewals", n)
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
					awaitEnd(t, lease)
					wantElapsed(t, "told", last, leaseTTL-leaseMargin)
					wantLost(t, lease)
					if taken := (<-next).Sub(last); taken < leaseTTL-time.Millisecond || taken > leaseTTL+6*time.Millisecond {
						t.Errorf("another has it after %v", taken)
					}
					wantIs(t, "Release", lease.Release(t.Context()), lock.ErrLost)
					synctest.Wait()
					if s := e.transitions(); s != "acquired lost" {
						t.Errorf("told %q", s)
					}
					if n := len(e.of("renew")); n < 2 {
						t.Errorf("tried to renew %d times in vain", n)
					}
				})
			})
		}
	}
}

// What the grant has taken is part of the lease's life, which has begun on the server perhaps long before the reply.
func TestALeasesLifeBeginsWhenItIsAskedFor(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb, kind)
		client, f := withFaults(t, m)
		f.set(func(_ context.Context, execute func() error) error {
			err := execute()
			time.Sleep(400 * time.Millisecond)
			return err
		}, "acquire")
		begun := time.Now()
		lease := mustAcquire(t, newLocker(t, kind, client, "n", nil))
		f.set(silence)
		awaitEnd(t, lease)
		wantElapsed(t, "told", begun, leaseTTL-leaseMargin)
		wantLost(t, lease)
	})
}

//fault:short-partition
func TestALeaseSurvivesErrorsThatEnd(t *testing.T) {
	for what, fails := range map[string]fault{
		"requests lost": requestLost, "replies lost": replyLost, "silent": silence, "no connection": noConnection,
		"loading": refusal("LOADING Redis is loading"), "out of memory": refusal("OOM command not allowed"),
		"read only": refusal("READONLY You can't write against a read only replica."), "whatever": refusal("ERR some error"),
	} {
		t.Run(what, func(t *testing.T) {
			eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
				var e events
				client, f := withFaults(t, m)
				lease := mustAcquire(t, newLocker(t, kind, client, "n", &lock.Options{Trace: e.trace()}))
				for range 10 {
					f.set(fails, "renew")
					time.Sleep(leaseTTL * 4 / 10)
					f.set(nil)
					time.Sleep(leaseTTL)
				}
				wantHeld(t, lease)
				wantBusy(t, newLocker(t, kind, rdb, "n", nil))
				mustRelease(t, lease)
				if n := len(e.of("renew")); n < 10 {
					t.Errorf("%d renewals have failed, want more", n)
				}
				if s := e.transitions(); s != "acquired released" {
					t.Errorf("told %q", s)
				}
			})
		})
	}
}

func TestALeaseIsLostAfterMaxHold(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		const maxHold = 25 * time.Second
		var e events
		lease := mustAcquire(t, newLocker(t, kind, rdb, "n", &lock.Options{MaxHold: maxHold, Trace: e.trace()}))
		begun := time.Now()
		awaitEnd(t, lease)
		wantLost(t, lease)
		told := time.Since(begun)
		if told < maxHold || told > maxHold+leaseTTL-leaseMargin {
			t.Errorf("lost after %v, want it between MaxHold and a TTL later", told)
		}
		wantBusy(t, newLocker(t, kind, rdb, "n", nil)) // it is told first
		next := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
		if at := time.Since(begun); at < told || at > maxHold+leaseTTL+6*time.Millisecond {
			t.Errorf("another has it after %v", at)
		}
		synctest.Wait()
		wantIs(t, "Release", lease.Release(t.Context()), lock.ErrLost)
		wantHeld(t, next)
		mustRelease(t, next)
		if s := e.transitions(); s != "acquired lost" || !strings.Contains(e.of("lost")[0].Err.Error(), "MaxHold") {
			t.Errorf("told%s", &e)
		}
	})
}

//fault:release-twice
func TestReleaseReturnsNilOnceAndEndsTheContextAtOnce(t *testing.T) {
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
		t.Run(what, func(t *testing.T) {
			eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
				var e events
				client, f := withFaults(t, m)
				l := newLocker(t, kind, client, "n", &lock.Options{Trace: e.trace()})
				lease := mustAcquire(t, l)
				if nils, losts := release(t, lease); nils != 1 || losts != 1 {
					t.Errorf("%d nil, %d and the rest ErrLost", nils, losts)
				}
				if ops := f.take(); ops != "acquire release" {
					t.Errorf("sent %s", ops)
				}
				select {
				case <-lease.Context().Done():
				default:
					t.Error("the context has not ended")
				}
				next := mustAcquire(t, l) // the old handle has no power over the next lease of the same Locker
				wantIs(t, "Release of the old", lease.Release(t.Context()), lock.ErrLost)
				time.Sleep(time.Minute)
				wantHeld(t, next)
				mustRelease(t, next)
				if s := e.transitions(); s != "acquired released acquired released" {
					t.Errorf("told %q", s)
				}
			})
		})
	}
}

//fault:release-twice
func TestALeaseThatHoldsNothingIsHarmless(t *testing.T) {
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

// Who has not got it cannot release it, whatever is deferred.
func TestAFailedAcquireReturnsALeaseThatReleasesNothing(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		l := newLocker(t, kind, rdb, "n", nil)
		holder := mustAcquire(t, l)
		func() {
			failed, err := l.TryAcquire(t.Context())
			defer func() {
				if err := failed.Release(t.Context()); err != nil || failed != nil {
					t.Errorf("%v: Release: %v", failed, err)
				}
			}()
			wantIs(t, "TryAcquire", err, lock.ErrBusy)
		}()
		wantBusy(t, l)
		mustRelease(t, holder)
	})
}

//fault:release-twice
func TestReleaseFindsOutThatTheLeaseWasLost(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		var e events
		lease := mustAcquire(t, newLocker(t, kind, rdb, "n", &lock.Options{Trace: e.trace()}))
		m.FlushAll()
		takeFor(t, rdb, kind, "n")
		for range 2 {
			wantIs(t, "Release", lease.Release(t.Context()), lock.ErrLost)
		}
		wantBusy(t, newLocker(t, kind, rdb, "n", nil))
		if s := e.transitions(); s != "acquired lost" {
			t.Errorf("told %q", s)
		}
	})
}

// What became of it is found out behind the call, and told once; a later Release says no more than ErrLost.
func TestAReleaseThatIsNotAnsweredSaysWhatIsKnown(t *testing.T) {
	for _, c := range []struct {
		what  string
		fails fault
		lasts time.Duration
		want  error // nil: it was found out in time
	}{
		{"a reply lost", replyLost, time.Millisecond, nil},
		{"requests lost for a while", requestLost, leaseWaits / 2, nil},
		{"no connection for a while", noConnection, leaseWaits / 2, nil},
		{"loading for a while", refusal("LOADING Redis is loading"), leaseWaits / 2, nil},
		{"replies lost", replyLost, 3 * leaseWaits, lock.ErrAmbiguous},
		{"requests lost", requestLost, 3 * leaseWaits, lock.ErrAmbiguous},
		{"silent", silence, 3 * leaseWaits, lock.ErrAmbiguous},
		{"no connection", noConnection, 3 * leaseWaits, lock.ErrUnavailable},
		{"loading", refusal("LOADING Redis is loading"), 3 * leaseWaits, lock.ErrUnavailable},
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
	} {
		t.Run(c.what, func(t *testing.T) {
			eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
				learn(t, rdb, kind)
				var e events
				client, f := withFaults(t, m)
				lease := mustAcquire(t, newLocker(t, kind, client, "n", &lock.Options{Trace: e.trace()}))
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
				if c.want != nil { // it is not lost: that is found out when Redis answers
					wantIs(t, "the second Release", lease.Release(t.Context()), c.want)
				}
				time.Sleep(time.Until(ended) + 2*leaseWaits)
				if c.want != nil {
					wantIs(t, "Release when Redis answers", lease.Release(t.Context()))
				}
				wantIs(t, "Release after one that returned nil", lease.Release(t.Context()), lock.ErrLost)
				if s := e.transitions(); s != "acquired released" {
					t.Errorf("told %q", s)
				}
				wantKeys(t, rdb, "n", ":fence")
			})
		})
	}
}

type callKey struct{}

func TestReleaseIsTriedAgainAfterEveryRefusalThatMayPass(t *testing.T) {
	for _, text := range []string{
		"LOADING Redis is loading the dataset in memory", "BUSY Redis is busy running a script", "MASTERDOWN Link with MASTER is down",
		"CLUSTERDOWN The cluster is down", "TRYAGAIN Multiple keys request during rehashing of slot", "NOREPLICAS Not enough good replicas to write.",
		"MISCONF Redis is configured to save RDB snapshots", "READONLY You can't write against a read only replica.", "OOM command not allowed",
	} {
		t.Run(text, func(t *testing.T) {
			eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
				var e events
				client, f := withFaults(t, m)
				lease := mustAcquire(t, newLocker(t, kind, client, "n", &lock.Options{Trace: e.trace()}))
				f.set(refusal(text))
				begun := time.Now()
				wantIs(t, "Release", lease.Release(t.Context()), lock.ErrUnavailable)
				if took := time.Since(begun); took > leaseWaits {
					t.Errorf("Release took %v", took)
				}
				f.set(nil)
				time.Sleep(2 * leaseWaits)
				if s := e.transitions(); s != "acquired released" {
					t.Errorf("told %q", s)
				}
				wantKeys(t, rdb, "n", ":fence", ":ended")
			})
		})
	}
}

//fault:release-twice
func TestAClosedClientEndsCallsAtOnceAndLeavesNothingBehind(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		client, f := withFaults(t, m)
		l := newLocker(t, kind, client, "n", nil)
		lease, forgotten := mustAcquire(t, l), mustAcquire(t, newLocker(t, kind, client, "other", nil))
		_ = client.Close()
		begun := time.Now()
		err := lease.Release(t.Context())
		wantIs(t, "Release", err, lock.ErrUnavailable, redis.ErrClosed)
		wantIs(t, "the second Release", lease.Release(t.Context()), lock.ErrUnavailable, redis.ErrClosed)
		_, err = l.Acquire(t.Context())
		wantIs(t, "Acquire", err, lock.ErrUnavailable, redis.ErrClosed)
		_, err = l.TryAcquire(t.Context())
		wantIs(t, "TryAcquire", err, lock.ErrUnavailable, redis.ErrClosed)
		wantElapsed(t, "all that returns", begun, 0)
		f.take()
		awaitEnd(t, forgotten)
		wantElapsed(t, "the other lease is lost", begun, leaseTTL-leaseMargin)
		wantLost(t, forgotten)
		f.take()
		time.Sleep(time.Hour)
		if ops := f.take(); ops != "abandon" {
			t.Errorf("it tried %q, want once to give back what was lost", ops)
		}
	})
}

// No check by a second command, which others could come between, and nothing sent in other words except when the
// server does not know the script.
func TestAScriptIsSentAgainInFullOnlyIfTheServerDoesNotKnowIt(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb, kind)
		l := newLocker(t, kind, rdb, "n", nil)
		c := record(m)
		verbs := func() string {
			synctest.Wait()
			defer c.reset()
			var verbs []string
			for _, args := range c.all() {
				verbs = append(verbs, args[0])
			}
			return strings.Join(verbs, " ")
		}
		lease := mustAcquire(t, l)
		mustRelease(t, lease)
		if s := verbs(); s != "EVALSHA EVALSHA" {
			t.Errorf("a known script: %s", s)
		}
		flush := func() {
			if err := rdb.ScriptFlush(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
		}
		flush()
		lease = mustAcquire(t, l)
		flush()
		time.Sleep(leaseTTL / 2)
		flush()
		mustRelease(t, lease)
		if s := verbs(); s != strings.TrimSpace(strings.Repeat("EVALSHA EVAL ", 3)) {
			t.Errorf("a forgotten script: %s", s)
		}
		for _, text := range []string{"ERR some error", "NOPERM this user has no permissions", "OOM command not allowed", "LOADING Redis is loading"} {
			lease = mustAcquire(t, l)
			c.reset()
			m.SetError(text)
			if err := lease.Release(t.Context()); err == nil {
				t.Errorf("%s: Release = nil", text)
			}
			m.SetError("")
			if s := verbs(); strings.Contains(s, "EVAL ") || strings.HasSuffix(s, "EVAL") {
				t.Errorf("%s: %s", text, s)
			}
			time.Sleep(2 * leaseTTL)
		}
	})
}

type valueKey struct{}

func TestALeaseHasTheValuesOfTheContextAndOutlivesIt(t *testing.T) {
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
		if err != nil {
			t.Fatal(err)
		}
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

func TestTheFenceGrowsWithEveryGrant(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		last := time.Now().UnixMicro() - 1
		lockers := []*lock.Locker{newLocker(t, kind, rdb, "n", nil), newLocker(t, kind, rdb, "n", nil), newLocker(t, kind, redistest.NewMiniClient(t, m), "n", nil)}
		grant := func(when string) {
			t.Helper()
			for range 5 {
				for _, l := range lockers { // all at one instant of this clock
					lease := mustAcquire(t, l)
					if lease.Fence() <= last {
						t.Errorf("%s: %d after %d", when, lease.Fence(), last)
					}
					last = lease.Fence()
					mustRelease(t, lease)
				}
			}
		}
		grant("at first")
		time.Sleep(time.Millisecond)
		m.FlushAll()
		grant("after FLUSHALL")
		time.Sleep(time.Millisecond)
		m.Del("{n}:lock:fence")
		grant("after its key was lost")
		time.Sleep(48 * time.Hour)
		grant("after its key has expired")
		lease := mustAcquire(t, lockers[0])
		m.SetTime(time.Now().Add(-time.Hour)) // the server's clock is put back
		last = lease.Fence()
		mustRelease(t, lease)
		grant("after the clock was put back")
	})
}

func TestTheFenceGrowsOnEveryKindOfServer(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, kind := range kinds {
			name := redistest.Namespace(t)
			last := int64(0)
			for range 20 {
				lease := mustAcquire(t, newLocker(t, kind, rdb, name, patient(lock.Options{})))
				if n := lease.Fence(); n <= last || n < 1e15 || n > 9e15 {
					t.Errorf("%s: the fence is %d after %d", kind, n, last)
				}
				last = lease.Fence()
				mustRelease(t, lease)
			}
		}
	})
}

//fault:two-names
func TestTwoServersAndTwoNamesDoNotInteract(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		_, other := redistest.StartMini(t)
		leases := []*lock.Lease{
			mustAcquire(t, newLocker(t, kind, rdb, "n", nil)), mustAcquire(t, newLocker(t, kind, other, "n", nil)),
			mustAcquire(t, newLocker(t, kind, rdb, "n2", nil)), mustAcquire(t, newLocker(t, kind, rdb, "N", nil)),
		}
		for i, lease := range leases {
			mustRelease(t, lease)
			for _, held := range leases[i+1:] {
				wantHeld(t, held)
			}
		}
	})
}

func TestDoHoldsALeaseWhileItsFunctionRuns(t *testing.T) {
	boom := errors.New("boom")
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		var e events
		client, f := withFaults(t, m)
		l := newLocker(t, kind, client, "n", &lock.Options{Trace: e.trace()})
		other := newLocker(t, kind, rdb, "n", nil)
		reset := func() { f.set(nil); f.take(); e.list = nil }
		do := func(ctx context.Context, want string, fn func(ctx context.Context) error) (panicked any, err error) {
			t.Helper()
			reset()
			func() {
				defer func() { panicked = recover() }()
				err = l.Do(ctx, func(ctx context.Context) error {
					wantBusy(t, other)
					return fn(ctx)
				})
			}()
			time.Sleep(2 * leaseWaits)
			if s := e.transitions(); s != want {
				t.Errorf("told %q, want %q", s, want)
			}
			f.set(nil)
			mustRelease(t, mustAcquire(t, other))
			return panicked, err
		}

		if _, err := do(t.Context(), "acquired released", func(context.Context) error { time.Sleep(time.Minute); return nil }); err != nil {
			t.Errorf("nil came back as %v", err)
		}
		for _, want := range []error{boom, fmt.Errorf("wrapped: %w", boom), lock.ErrBusy, context.Canceled} {
			if _, err := do(t.Context(), "acquired released", func(context.Context) error { return want }); err != want {
				t.Errorf("%v came back as %v", want, err)
			}
		}
		if p, _ := do(t.Context(), "acquired released", func(context.Context) error { panic(boom) }); p != boom {
			t.Errorf("a panic went on as %v", p)
		}

		reset()
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			_ = l.Do(t.Context(), func(context.Context) error { runtime.Goexit(); return nil })
			t.Error("Goexit came back")
		}()
		<-gone
		if s := e.transitions(); s != "acquired released" {
			t.Errorf("Goexit: told %q", s)
		}

		// The end of ctx reaches the function, and does not keep the lease from being released.
		ctx, cancel := context.WithCancelCause(context.WithValue(t.Context(), valueKey{}, "v"))
		_, err := do(ctx, "acquired released", func(ctx context.Context) error {
			if ctx.Value(valueKey{}) != "v" {
				t.Error("the value is missing")
			}
			cancel(boom)
			<-ctx.Done()
			if cause := context.Cause(ctx); cause != boom {
				t.Errorf("cancelled with cause %v", cause)
			}
			return nil
		})
		if err != nil {
			t.Errorf("after ctx has ended: %v", err)
		}

		// The loss reaches it too, and is not told as success.
		for _, want := range []error{nil, context.Canceled, boom} {
			_, err := do(t.Context(), "acquired lost", func(ctx context.Context) error {
				m.FlushAll()
				begun := time.Now()
				<-ctx.Done()
				wantElapsed(t, "the function is told", begun, leaseTTL/3)
				if !errors.Is(context.Cause(ctx), lock.ErrLost) {
					t.Errorf("cancelled with cause %v", context.Cause(ctx))
				}
				return want
			})
			if want == boom && err != boom || want != boom && !errors.Is(err, lock.ErrLost) || want != nil && !errors.Is(err, want) {
				t.Errorf("after a loss: %v, want %v", err, want)
			}
		}
		if _, err := do(t.Context(), "acquired lost", func(context.Context) error { m.FlushAll(); return nil }); !errors.Is(err, lock.ErrLost) {
			t.Errorf("a loss found out at the end: %v", err)
		}

		// An error of Release hides no other, and no panic.
		for _, want := range []error{nil, boom} {
			_, err := do(t.Context(), "acquired", func(context.Context) error { f.set(refusal("ERR some error"), "release"); return want })
			if want == boom && err != boom || want == nil && !errors.Is(err, lock.ErrNotReleased) {
				t.Errorf("Release failed: %v, want %v", err, want)
			}
			wantIs(t, "Do", err) // what would mean that the function has not run
			time.Sleep(leaseTTL)
		}
		if p, _ := do(t.Context(), "acquired", func(context.Context) error {
			f.set(refusal("ERR some error"), "release")
			panic(boom)
		}); p != boom {
			t.Errorf("a panic went on as %v", p)
		}
		time.Sleep(leaseTTL)

		// Without a lease the function is not called.
		reset()
		f.set(refusal("OOM command not allowed"), "acquire")
		wantIs(t, "Do", l.Do(t.Context(), func(context.Context) error { t.Error("called"); return nil }), lock.ErrUnavailable)
		reset()
		holder := mustAcquire(t, other)
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		wantIs(t, "Do", l.Do(ctx, func(context.Context) error { t.Error("called"); return nil }), lock.ErrBusy, context.DeadlineExceeded)
		mustRelease(t, holder)
	})
}

// Each path of an attempt and a lease, and what Trace is told of it: each transition once.
func TestTraceIsToldOfEveryTransitionOnce(t *testing.T) {
	type scene struct {
		*testing.T
		m      *miniredis.Miniredis
		f      *faults
		l      *lock.Locker
		holder func() *lock.Lease // of another process
	}
	for what, path := range map[string]struct {
		run  func(s scene)
		want string
	}{
		"held for less than a renewal": {func(s scene) { mustRelease(s, mustAcquire(s, s.l)) }, "acquired released"},
		"held for two renewals": {func(s scene) {
			lease := mustAcquire(s, s.l)
			time.Sleep(7 * time.Second)
			mustRelease(s, lease)
		}, "acquired renewed renewed released"},
		"busy": {func(s scene) {
			defer mustRelease(s, s.holder())
			wantBusy(s, s.l)
		}, ""},
		"waited for in vain": {func(s scene) {
			defer mustRelease(s, s.holder())
			ctx, cancel := context.WithTimeout(s.Context(), time.Second)
			defer cancel()
			_, err := s.l.Acquire(ctx)
			wantIs(s, "Acquire", err, lock.ErrBusy, context.DeadlineExceeded)
		}, "waited"},
		"waited for": {func(s scene) {
			holder := s.holder()
			time.AfterFunc(time.Second, func() { mustRelease(s, holder) })
			mustRelease(s, mustAcquire(s, s.l))
		}, "waited acquired released"},
		"waited for until Redis fails": {func(s scene) {
			holder := s.holder()
			time.AfterFunc(time.Second, func() { s.f.set(refusal("OOM command not allowed")) })
			_, err := s.l.Acquire(s.Context())
			wantIs(s, "Acquire", err, lock.ErrUnavailable)
			mustRelease(s, holder)
		}, "waited"},
		"an error": {func(s scene) {
			s.f.set(refusal("OOM command not allowed"))
			_, err := s.l.Acquire(s.Context())
			wantIs(s, "Acquire", err, lock.ErrUnavailable)
		}, ""},
		"a lost reply": {func(s scene) {
			s.f.set(replyLost, "acquire")
			time.AfterFunc(time.Millisecond, func() { s.f.set(nil) })
			mustRelease(s, mustAcquire(s, s.l))
		}, "acquired released"},
		"lost replies only": {func(s scene) {
			s.f.set(replyLost, "acquire")
			_, err := s.l.Acquire(s.Context())
			wantIs(s, "Acquire", err, lock.ErrAmbiguous)
			s.f.set(nil)
			time.Sleep(time.Second)
			mustRelease(s, s.holder())
		}, ""},
		"lost, and released": {func(s scene) {
			lease := mustAcquire(s, s.l)
			s.m.FlushAll()
			awaitEnd(s, lease)
			wantIs(s, "Release", lease.Release(s.Context()), lock.ErrLost)
		}, "acquired lost"},
		"lost, found out at the release": {func(s scene) {
			lease := mustAcquire(s, s.l)
			s.m.FlushAll()
			wantIs(s, "Release", lease.Release(s.Context()), lock.ErrLost)
		}, "acquired lost"},
		"lost, never released": {func(s scene) {
			mustAcquire(s, s.l)
			s.m.FlushAll()
		}, "acquired lost"},
		"silence, and released": {func(s scene) {
			lease := mustAcquire(s, s.l)
			s.f.set(silence)
			awaitEnd(s, lease)
			wantIs(s, "Release", lease.Release(s.Context()), lock.ErrLost)
		}, "acquired lost"},
		"released without an answer": {func(s scene) {
			lease := mustAcquire(s, s.l)
			s.f.set(silence)
			wantIs(s, "Release", lease.Release(s.Context()), lock.ErrAmbiguous)
			s.f.set(nil)
		}, "acquired released"},
		"released without an answer until it has ended": {func(s scene) {
			lease := mustAcquire(s, s.l)
			s.f.set(silence)
			wantIs(s, "Release", lease.Release(s.Context()), lock.ErrAmbiguous)
			time.Sleep(3 * leaseTTL)
		}, "acquired"},
		"lost without an answer": {func(s scene) {
			lease := mustAcquire(s, s.l)
			s.f.set(silence)
			s.m.FlushAll()
			wantIs(s, "Release", lease.Release(s.Context()), lock.ErrAmbiguous)
			s.f.set(nil)
		}, "acquired lost"},
		"given back in the middle of a renewal": {func(s scene) {
			lease := mustAcquire(s, s.l)
			s.f.set(func(ctx context.Context, execute func() error) error {
				time.Sleep(leaseWaits / 2)
				return execute()
			}, "renew")
			time.Sleep(leaseTTL/3 + leaseWaits/4)
			mustRelease(s, lease)
		}, "acquired released"},
	} {
		t.Run(what, func(t *testing.T) {
			eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
				learn(t, rdb, kind)
				var e events
				client, f := withFaults(t, m)
				s := scene{T: t, m: m, f: f, l: newLocker(t, kind, client, "n", &lock.Options{Trace: e.trace()})}
				s.holder = func() *lock.Lease { return mustAcquire(t, newLocker(t, kind, rdb, "n", nil)) }
				path.run(s)
				time.Sleep(time.Minute)
				var got []string
				for _, event := range e.of("acquired", "renewed", "released", "lost", "waited") {
					got = append(got, event.what)
					if event.what == "lost" && !errors.Is(event.Err, lock.ErrLost) || event.what != "lost" && event.what != "waited" && event.Err != nil {
						t.Errorf("%s with the error %v", event.what, event.Err)
					}
				}
				f.mu.Lock()
				defer f.mu.Unlock()
				if n := len(e.of("acquire", "renew", "release", "abandon")); n != f.failed {
					t.Errorf("told %d times of a failed command, there were %d:%s", n, f.failed, &e)
				}
				if got := strings.Join(got, " "); got != path.want {
					t.Errorf("told %q, want %q", got, path.want)
				}
			})
		})
	}
}

// The last renewals were executed and not answered, so that the server would keep the lease beyond the end that its
// holder knows of.
func TestALeaseThatWasLostForWantOfAnAnswerIsGivenBack(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb, kind)
		var e events
		client, f := withFaults(t, m)
		lease := mustAcquire(t, newLocker(t, kind, client, "n", &lock.Options{Trace: e.trace()}))
		begun := time.Now()
		f.set(replyLost, "renew")
		awaitEnd(t, lease)
		wantElapsed(t, "lost", begun, leaseTTL-leaseMargin)
		other := newLocker(t, kind, rdb, "n", nil)
		synctest.Wait()
		early, err := other.TryAcquire(t.Context())
		_ = early.Release(t.Context())
		if err != lock.ErrBusy {
			t.Errorf("before its holder has had the margin to stop: %v, want ErrBusy", err)
		}
		time.Sleep(leaseMargin)
		synctest.Wait()
		next, err := other.TryAcquire(t.Context())
		if err != nil {
			t.Errorf("after that: %v", err)
		}
		_ = next.Release(t.Context())
		if s := e.transitions(); s != "acquired lost" {
			t.Errorf("told %q", s)
		}
		wantIs(t, "Release", lease.Release(t.Context()), lock.ErrLost)
		if f.failed == 0 {
			t.Error("no renewal was executed and not answered")
		}
	})
}

// However many calls a server leaves without an answer, few commands at a time try to undo what they may have done.
func TestAtASilentServerFewCommandsCleanUp(t *testing.T) {
	const calls, atOnce = 500, 8
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb, kind)
		client, f := withFaults(t, m)
		l, before := newLocker(t, kind, client, "n", nil), countMarks(m)
		var trying, most atomic.Int64
		f.set(silence)
		silent := func(ctx context.Context, execute func() error) error {
			now := trying.Add(1)
			defer trying.Add(-1)
			most.Store(max(most.Load(), now))
			return silence(ctx, execute)
		}
		var acquiring sync.WaitGroup
		for range calls {
			acquiring.Go(func() {
				_, err := l.TryAcquire(t.Context())
				wantIs(t, "TryAcquire", err, lock.ErrAmbiguous)
			})
		}
		f.set(silence, "acquire")
		f.mu.Lock()
		acquire := f.on
		f.on = func(op string) fault {
			if op == "abandon" {
				return silent
			}
			return acquire(op)
		}
		f.mu.Unlock()
		acquiring.Wait()
		time.Sleep(leaseTTL / 2)
		if n := most.Load(); n == 0 || n > atOnce {
			t.Errorf("%d commands at once, want 1 to %d", n, atOnce)
		}
		f.set(nil)
		time.Sleep(2 * leaseWaits)
		synctest.Wait()
		marks := countMarks(m)
		if marks-before != calls {
			t.Errorf("%d of %d attempts are marked as abandoned", marks-before, calls)
		}
		f.take()
		time.Sleep(time.Hour)
		if ops := f.take(); ops != "" {
			t.Errorf("afterwards it sent %s", ops)
		}
	})
}

// countMarks counts the attempts that the server knows to have ended.
func countMarks(m *miniredis.Miniredis) (n int) {
	for _, key := range m.Keys() {
		if strings.Contains(key, ":ended") {
			ended, _ := m.SortedSet(key)
			n += len(ended)
		}
	}
	return n
}
