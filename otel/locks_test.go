package otel_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
	sfotel "github.com/singlefill/singlefill/otel"
)

func newMutex(t testing.TB, x *telemetry, name string) (l *lock.Locker, flush func()) {
	t.Helper()
	m, rdb := redistest.StartMini(t)
	l, err := lock.NewMutex(rdb, name, nil)
	if err != nil {
		t.Fatal(err)
	}
	tr, err := sfotel.LockTrace("jobs", &x.Options)
	if err != nil {
		t.Fatal(err)
	}
	l.AddTrace(tr)
	return l, m.FlushAll
}

// Leases and waits are counted under the label that the program has chosen, not under the name. A wait
// has a span.
func TestLockTrace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x := newTelemetry(t)
		l, flush := newMutex(t, x, "of one user")
		lease, err := l.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		x.wantValues(t, map[string]float64{"lock.held lock=jobs": 1, "lock.acquired lock=jobs": 1})
		request, parent := x.request(t.Context())
		ctx, cancel := context.WithTimeout(request, 50*time.Millisecond)
		defer cancel()
		if _, err := l.Acquire(ctx); !errors.Is(err, lock.ErrBusy) {
			t.Errorf("err = %v, want ErrBusy", err)
		}
		x.wantSpans(t, `wait jobs: error.type=*fmt.wrapErrors lock=jobs result=busy, Error ""`)
		s := x.spans.Ended()[0]
		if d := s.EndTime().Sub(s.StartTime()); s.Parent().SpanID() != parent.SpanID() || d < 50*time.Millisecond {
			t.Errorf("the span took %v, with the parent %v", d, s.Parent().SpanID())
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if lease, err = l.Acquire(t.Context()); err != nil {
			t.Fatal(err)
		}
		flush()
		if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrLost) {
			t.Errorf("err = %v, want ErrLost", err)
		}
		x.wantValues(t, map[string]float64{
			"lock.acquired lock=jobs": 2, "lock.lost lock=jobs": 1, "lock.hold.duration lock=jobs": 2,
			"lock.wait.duration lock=jobs result=busy": 1,
		})
	})
}

// A wait that gets the lock has no error. With Keys its span names the lock.
func TestLockTrace_Acquired(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x := newTelemetry(t)
		x.Keys = true
		l, _ := newMutex(t, x, "of one user")
		lease, err := l.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			lease, err := l.Acquire(t.Context())
			if err == nil {
				err = lease.Release(t.Context())
			}
			done <- err
		}()
		synctest.Wait()
		if err := errors.Join(lease.Release(t.Context()), <-done); err != nil {
			t.Fatal(err)
		}
		x.wantSpans(t, "wait jobs: lock.name=of one user lock=jobs result=acquired")
		x.wantValues(t, map[string]float64{
			"lock.acquired lock=jobs": 2, "lock.hold.duration lock=jobs": 2,
			"lock.wait.duration lock=jobs result=acquired": 1,
		})
	})
}

// useAllOfLock calls all functions of a Trace once.
func useAllOfLock(t *testing.T, tr *lock.Trace) {
	tr.Acquired(t.Context(), lock.LeaseInfo{})
	tr.Released(t.Context(), lock.LeaseInfo{})
	tr.Lost(t.Context(), lock.LeaseInfo{})
	tr.Waited(t.Context(), lock.LeaseInfo{})
	tr.RedisError(t.Context(), "acquire", errors.New("no"))
}
