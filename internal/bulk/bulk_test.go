package bulk

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill/internal/flight"
)

type loader struct{}

func (loader) Load(context.Context, []string, []context.Context) Outcome {
	return func(string) (any, error) { return "v", nil }
}

func (loader) Panicked(p any, _ int) Outcome { panic(p) }

func (loader) AfterAbort(func()) (stop func() bool) { return func() bool { return true } }

// A fill that comes to a bulk after another one has left it is loaded.
func TestBulk_ArrivalThatLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := flight.NewFills[int](new(flight.Clock)).NewLoad(nil)
		b := New(loader{}, time.Minute, node, flight.NewSlots(0, nil).NewShared(node), 2)
		leaves, waits := b.Seat(0), b.Seat(0)
		b.Taken(0, true)
		b.Taken(0, true)
		b.Depart()
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // no caller wants the value
		if _, err := leaves.Load(ctx, "leaves"); err != context.Canceled {
			t.Errorf("err = %v, want that of the context", err)
		}
		waits.Decided() // for another process
		time.Sleep(time.Second)
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if v, err := waits.Load(ctx, "waits"); v != "v" || err != nil {
			t.Errorf("got %v, %v", v, err)
		}
	})
}
