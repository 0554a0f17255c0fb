package otel_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
	sfotel "github.com/singlefill/singlefill/otel"
)

func (x *telemetry) lockTrace(t testing.TB) *lock.Trace {
	t.Helper()
	tr, err := sfotel.LockTrace("jobs", &x.Options)
	redistest.Must(t, err)
	return tr
}

// Leases and waits are counted under the label that the program has chosen, not under the name. A wait
// has a span, and an error if it did not get the lock. With Keys its span names the lock.
func TestLockTrace(t *testing.T) {
	t.Parallel()
	x := newTelemetry(t)
	tr, info := x.lockTrace(t), lock.LeaseInfo{Name: "of one user", Duration: time.Minute}
	tr.Acquired(t.Context(), info)
	tr.Acquired(t.Context(), info)
	tr.Acquired(t.Context(), info)
	tr.Released(t.Context(), info)
	tr.Lost(t.Context(), info)
	tr.Expired(t.Context(), info)
	request, parent := x.request(t.Context())
	for _, err := range []error{nil, fmt.Errorf("%w: %w", lock.ErrBusy, context.DeadlineExceeded), errors.New("no")} {
		info.Err = err
		tr.Waited(request, info)
	}
	x.wantSpans(t, "wait jobs: lock=jobs result=acquired",
		`wait jobs: error.type=*fmt.wrapErrors lock=jobs result=busy, Error ""`,
		`wait jobs: error.type=*errors.errorString lock=jobs result=error, Error ""`)
	for _, s := range x.spans.Ended() {
		if s.Parent().SpanID() != parent.SpanID() || took(s) < time.Minute {
			t.Errorf("the span took %v, with the parent %v", took(s), s.Parent().SpanID())
		}
	}
	tr.RedisError(t.Context(), "acquire", errors.New("no"))
	x.wantValues(t, map[string]float64{
		"lock.held lock=jobs": 1, "lock.acquired lock=jobs": 3, "lock.lost lock=jobs": 1, "lock.expired lock=jobs": 1, "lock.hold.duration lock=jobs": 2,
		"lock.wait.duration lock=jobs result=acquired": 1, "lock.wait.duration lock=jobs result=busy": 1,
		"lock.wait.duration lock=jobs result=error": 1, "lock.redis.errors lock=jobs op=acquire": 1,
	})
	named := newTelemetry(t)
	named.Keys = true
	named.lockTrace(t).Waited(t.Context(), lock.LeaseInfo{Name: "of one user", Holder: "web-1"})
	named.wantSpans(t, "wait jobs: lock.holder=web-1 lock.name=of one user lock=jobs result=acquired")
}

// useAllOfLock calls all functions of a Trace once.
func useAllOfLock(t *testing.T, tr *lock.Trace) {
	tr.Acquired(t.Context(), lock.LeaseInfo{})
	tr.Released(t.Context(), lock.LeaseInfo{})
	tr.Lost(t.Context(), lock.LeaseInfo{})
	tr.Expired(t.Context(), lock.LeaseInfo{})
	tr.Waited(t.Context(), lock.LeaseInfo{})
	tr.RedisError(t.Context(), "acquire", errors.New("no"))
}
