package singlefill

import (
	"testing"

	"github.com/singlefill/singlefill/internal/fill"
)

// What a fill does next follows from the reply of Redis, and from whether a caller waits, or a
// value found can end it.
func TestDecide(t *testing.T) {
	none := view{}
	wanted, servable, both := view{wanted: true}, view{servable: true}, view{wanted: true, servable: true}
	for _, test := range []struct {
		status string
		view   view
		want   step
	}{
		{fill.Hit, none, askAgain},
		{fill.Hit, wanted, askAgain},
		{fill.Hit, servable, takeValue},
		{fill.Hit, both, takeValue},
		{fill.Locked, none, loadLocked},
		{fill.Locked, wanted, loadLocked},
		{fill.Locked, servable, loadLocked},
		{fill.Locked, both, loadLocked},
		{fill.Busy, none, leave},
		{fill.Busy, wanted, waitForLock},
		{fill.Busy, servable, leave},
		{fill.Busy, both, waitForLock},
		{fill.Failed, none, takeFailure},
		{fill.Failed, wanted, takeFailure},
		{fill.Failed, servable, takeFailure},
		{fill.Failed, both, takeFailure},
		{fill.Free, none, leave},
		{fill.Free, wanted, waitForSlot},
		{fill.Free, servable, leave},
		{fill.Free, both, waitForSlot},
		{fill.Gone, none, leave},
		{fill.Gone, wanted, askAgain},
		{fill.Gone, servable, leave},
		{fill.Gone, both, askAgain},
		{fill.Refused, none, retryNew},
		{fill.Refused, wanted, retryNew},
		{fill.Refused, servable, retryNew},
		{fill.Refused, both, retryNew},
	} {
		if got := decide(fill.Reply{Status: test.status}, test.view); got != test.want {
			t.Errorf("%s, %+v: step %d, want %d", test.status, test.view, got, test.want)
		}
	}
}
