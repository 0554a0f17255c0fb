package fill

import (
	"testing"

	"github.com/singlefill/singlefill/internal/filllock"
)

// The next step of a fill follows from the reply, from whether a caller waits, and from whether the
// value can end it.
func TestDecide(t *testing.T) {
	none := view{}
	wanted, servable, both := view{wanted: true}, view{servable: true}, view{wanted: true, servable: true}
	for _, test := range []struct {
		status string
		view   view
		want   step
	}{
		{filllock.Hit, none, askAgain},
		{filllock.Hit, wanted, askAgain},
		{filllock.Hit, servable, takeValue},
		{filllock.Hit, both, takeValue},
		{filllock.Locked, none, takeLock},
		{filllock.Locked, wanted, takeLock},
		{filllock.Locked, servable, takeLock},
		{filllock.Locked, both, takeLock},
		{filllock.Busy, none, leaveKey},
		{filllock.Busy, wanted, waitForLock},
		{filllock.Busy, servable, leaveKey},
		{filllock.Busy, both, waitForLock},
		{filllock.Failed, none, takeFailure},
		{filllock.Failed, wanted, takeFailure},
		{filllock.Failed, servable, takeFailure},
		{filllock.Failed, both, takeFailure},
		{filllock.Free, none, leaveKey},
		{filllock.Free, wanted, waitForSlot},
		{filllock.Free, servable, leaveKey},
		{filllock.Free, both, waitForSlot},
		{filllock.Gone, none, leaveKey},
		{filllock.Gone, wanted, askAgain},
		{filllock.Gone, servable, leaveKey},
		{filllock.Gone, both, askAgain},
		{filllock.Refused, none, retryNew},
		{filllock.Refused, wanted, retryNew},
		{filllock.Refused, servable, retryNew},
		{filllock.Refused, both, retryNew},
	} {
		if got := decide(filllock.Reply{Status: test.status}, test.view); got != test.want {
			t.Errorf("%s, %+v: step %d, want %d", test.status, test.view, got, test.want)
		}
	}
}
