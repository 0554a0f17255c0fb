package lock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

var errBoom = errors.New("boom")

// A doScene calls Do. It checks the calls of Trace, and that the lock is free afterwards.
type doScene struct {
	*testing.T
	m     *miniredis.Miniredis
	f     *faults
	l     *lock.Locker
	e     *locktest.Events
	other *lock.Locker // of another process
}

func eachDoScene(t *testing.T, run func(s doScene)) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		e := new(locktest.Events)
		client, f := withFaults(t, m)
		l := newLocker(t, kind, client, "n", &lock.Options{Trace: e.Trace()})
		run(doScene{T: t, m: m, f: f, l: l, e: e, other: newLocker(t, kind, rdb, "n", nil)})
	})
}

// do calls Do with fn, while which the lock is held, and expects transitions of the lease.
func (s doScene) do(ctx context.Context, transitions string, fn func(ctx context.Context) error) (panicked any, err error) {
	s.Helper()
	s.e.Reset()
	func() {
		defer func() { panicked = recover() }()
		err = s.l.Do(ctx, func(ctx context.Context) error {
			wantBusy(s, s.other)
			return fn(ctx)
		})
	}()
	time.Sleep(2 * leaseWaits)
	s.e.WantTransitions(s, transitions)
	s.f.set(nil)
	mustRelease(s, mustAcquire(s, s.other))
	return panicked, err
}

// Do holds a lease while its function runs, and returns the function's error unchanged.
func TestDo_ReturnsTheError(t *testing.T) {
	eachDoScene(t, func(s doScene) {
		for _, want := range []error{nil, errBoom, fmt.Errorf("wrapped: %w", errBoom), lock.ErrBusy, context.Canceled} {
			_, err := s.do(s.Context(), "acquired released", func(context.Context) error { time.Sleep(time.Minute); return want })
			if err != want {
				s.Errorf("%v came back as %v", want, err)
			}
		}
	})
}

// A panic and a Goexit of the function go on, and the lease is released.
func TestDo_Panic(t *testing.T) {
	eachDoScene(t, func(s doScene) {
		if p, _ := s.do(s.Context(), "acquired released", func(context.Context) error { panic(errBoom) }); p != errBoom {
			s.Errorf("a panic went on as %v", p)
		}
		s.e.Reset()
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			_ = s.l.Do(s.Context(), func(context.Context) error { runtime.Goexit(); return nil })
			s.Error("Goexit came back")
		}()
		<-gone
		s.e.WantTransitions(s, "acquired released")
	})
}

// The end of ctx reaches the function, and does not keep the lease from being released.
func TestDo_ContextEnds(t *testing.T) {
	eachDoScene(t, func(s doScene) {
		ctx, cancel := context.WithCancelCause(context.WithValue(s.Context(), valueKey{}, "v"))
		_, err := s.do(ctx, "acquired released", func(ctx context.Context) error {
			if ctx.Value(valueKey{}) != "v" {
				s.Error("the value is missing")
			}
			cancel(errBoom)
			<-ctx.Done()
			if cause := context.Cause(ctx); cause != errBoom {
				s.Errorf("cancelled with cause %v", cause)
			}
			return nil
		})
		if err != nil {
			s.Errorf("after ctx has ended: %v", err)
		}
	})
}

// A loss reaches the function. Do and Release say of which lock it was, and why, but Do returns an error of
// the function unchanged unless it is the error of its context.
func TestDo_LostLease(t *testing.T) {
	for why, lose := range map[string]func(m *miniredis.Miniredis, f *faults) (told time.Duration){
		"it was held for MaxHold": func(*miniredis.Miniredis, *faults) time.Duration {
			return 6*(leaseTTL/3) + leaseTTL - leaseMargin // after the sixth renewal
		},
		"it is gone from Redis": func(m *miniredis.Miniredis, _ *faults) time.Duration { m.FlushAll(); return leaseTTL / 3 },
		"it could not be renewed in time": func(_ *miniredis.Miniredis, f *faults) time.Duration {
			f.set(silence)
			return leaseTTL - leaseMargin
		},
	} {
		runEachKind(t, why, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
			var e locktest.Events
			client, f := withFaults(t, m)
			l := newLocker(t, kind, client, "some name", &lock.Options{MaxHold: 2 * leaseTTL, Trace: e.Trace()})
			want := `lock: lost: "some name": ` + why
			for _, after := range []error{nil, context.Canceled, errBoom} {
				err := l.Do(t.Context(), func(ctx context.Context) error {
					begun := time.Now()
					told := lose(m, f)
					<-ctx.Done()
					wantElapsed(t, "told", begun, told)
					if cause := context.Cause(ctx); !errors.Is(cause, lock.ErrLost) || cause.Error() != want {
						t.Errorf("the cause is %v, want %s", cause, want)
					}
					return after
				})
				all := want
				if after == context.Canceled {
					all += ": " + after.Error()
				}
				if after == errBoom && err != errBoom || after != errBoom && (!errors.Is(err, lock.ErrLost) || err.Error() != all) {
					t.Errorf("Do: %v, want %s", err, all)
				}
				f.set(nil)
				time.Sleep(2 * leaseTTL)
			}
			lease := mustAcquire(t, l)
			lose(m, f)
			<-lease.Context().Done()
			f.set(nil)
			for range 2 {
				if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrLost) || err.Error() != want {
					t.Errorf("Release: %v, want %s", err, want)
				}
			}
			time.Sleep(2 * leaseTTL)
			e.WantTransitions(t, "acquired lost acquired lost acquired lost acquired lost")
			gone := why == "it is gone from Redis" // otherwise it is given back
			if ops := f.take(); strings.Contains(ops, "abandon") == gone {
				t.Errorf("sent %s", ops)
			}
			lease = mustAcquire(t, l)
			mustRelease(t, lease)
			if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrLost) || err.Error() != `lock: lost: "some name": it has been released already` {
				t.Errorf("a second Release: %v", err)
			}
		})
	}
}

// A loss that the release finds out is an error, too.
func TestDo_LostAtTheEnd(t *testing.T) {
	eachDoScene(t, func(s doScene) {
		_, err := s.do(s.Context(), "acquired lost", func(context.Context) error { s.m.FlushAll(); return nil })
		if !errors.Is(err, lock.ErrLost) {
			s.Errorf("Do: %v, want ErrLost", err)
		}
	})
}

// A function that gets the loss of another lock, whose context it was given, has not lost this one.
func TestDo_AnotherIsLost(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		outer, inner := newLocker(t, "mutex", rdb, "outer", nil), newLocker(t, "mutex", rdb, "inner", nil)
		err := outer.Do(t.Context(), func(ctx context.Context) error {
			err := inner.Do(ctx, func(ctx context.Context) error {
				m.Del("{outer}:lock")
				<-ctx.Done()
				return ctx.Err()
			})
			if err != context.Canceled {
				t.Errorf("Do of the inner lock: %v, want the error of its function", err)
			}
			return nil
		})
		if !errors.Is(err, lock.ErrLost) || !strings.Contains(err.Error(), `"outer"`) {
			t.Errorf("Do of the outer lock: %v", err)
		}
	})
}

// An error of the release hides no other error, and no panic.
func TestDo_ReleaseFails(t *testing.T) {
	refuse := refusal("ERR some error")
	eachDoScene(t, func(s doScene) {
		for _, want := range []error{nil, errBoom} {
			_, err := s.do(s.Context(), "acquired lost", func(context.Context) error { s.f.set(refuse, "release"); return want })
			if want == errBoom && err != errBoom || want == nil && !errors.Is(err, lock.ErrNotReleased) {
				s.Errorf("Release failed: %v, want %v", err, want)
			}
			wantIs(s, "Do", err) // none of the errors which mean that the function has not run
			time.Sleep(leaseTTL)
		}
		p, _ := s.do(s.Context(), "acquired lost", func(context.Context) error { s.f.set(refuse, "release"); panic(errBoom) })
		if p != errBoom {
			s.Errorf("a panic went on as %v", p)
		}
	})
}
