package singlefill

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/singlefill/singlefill/internal/flight"
)

// Between the try that failed and the queueing others may have given theirs back.
func TestAPlaceThatComesFreeBeforeTheQueueingIsTaken(t *testing.T) {
	t.Parallel()
	places := semaphore.NewWeighted(1)
	other, m := flight.NewPlace(places), &claim{place: flight.NewPlace(places)}
	if !other.Try() || m.try() {
		t.Fatal("a limit of one does not let one in")
	}
	other.Free()
	select {
	case <-m.queue(context.Background()):
	case <-time.After(10 * time.Second):
		t.Fatal("it waits for a place that is free")
	}
	m.enter(context.Background())
	if !m.try() || other.Try() {
		t.Error("the place that was waited for is not held")
	}
	m.free(context.Background())
	if !other.Try() {
		t.Error("the place is not given back")
	}
}
