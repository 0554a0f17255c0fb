package lock

import (
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A process has waited since the server's time of its first answer, however old the lease is then,
// and also when the last fence has expired: then it is 0, and the lease seems to be as old as time.
// So waiters of different processes keep their order.
func TestWaitQueue_WaitsBehindAnOldLease(t *testing.T) {
	const now = int64(1_800_000_000_000_000) // µs
	for _, last := range []int64{now - 1, now - (25 * time.Hour).Microseconds(), 0} {
		r, err := parseReply([]any{"busy", int64(5000), int64(-1), last, now - last, int64(0)})
		redistest.Must(t, err)
		l := &Locker{kind: mutex{}, shared: new(shared)}
		a := &attempt{owner: &owner{Locker: l}, wake: make(chan struct{}, 1)}
		l.waiters.noteBusy(a, r)
		if since := l.waiters.bypass.since; since != now {
			t.Errorf("with a last fence of %d it waits since %d, want %d", last, since, now)
		}
		if d := a.pause(time.Millisecond, r); d <= 0 || d > 2*maxPause {
			t.Errorf("with a last fence of %d it pauses for %v", last, d)
		}
	}
}
