package lock_test

import (
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A killed holder is replaced when its lease has ended, and not earlier.
//
//fault:killed-holder
func TestAcquire_KilledHolder(t *testing.T) {
	eachFleet(t, func(t *testing.T, f fleet) {
		holder, next := f.spawn(1, hasty, hastyTTL)[0], f.spawn(1, patient, patientTTL)[0]
		_, before := f.take(holder, "holder")
		next.Send("acquire next")
		next.Expect("next: asks")
		holder.Kill()
		if n := f.Holders(t, f.s.Admin(), f.Name); n != f.Size {
			t.Errorf("%d hold it, want %d until their leases end", n, f.Size)
		}
		if fence := acquired(t, next, "next"); fence <= before {
			t.Errorf("fence %d after %d", fence, before)
		}
		order(t, next, "release", "next", "released", "nil")
	})
}

// A frozen holder is replaced. When it wakes, it learns of the loss, and neither its writes nor its
// release affect the next holder.
//
//fault:frozen-holder
func TestAcquire_FrozenHolder(t *testing.T) {
	eachFleet(t, func(t *testing.T, f fleet) {
		holder, next := f.spawn(1, hasty, hastyTTL)[0], f.spawn(1, patient, patientTTL)[0]
		held, before := f.take(holder, "holder")
		for _, tag := range held {
			order(t, holder, "write", tag, "wrote", "1")
		}
		holder.Freeze()
		frozen := time.Now()
		tags, fence := f.take(next, "next")
		if fence <= before {
			t.Errorf("fence %d after %d", fence, before)
		}
		order(t, next, "write", tags[0], "wrote", "1")
		state := f.State(t, f.s.Admin(), f.Name)
		redistest.Await(t, "two TTLs are over", func() bool { return time.Since(frozen) > 2*hastyTTL })
		for _, tag := range held { // it may write before it does anything else
			holder.Send("write " + tag)
		}
		holder.Thaw()
		for tag, got := range sayings(holder, 2*f.Size) {
			if !strings.Contains(got, "told") || !strings.Contains(got, "wrote 0") {
				t.Errorf("%s: %s, want it told of the loss and its write refused", tag, got)
			}
		}
		for _, tag := range held {
			order(t, holder, "release", tag, "released", "lost")
		}
		if now := f.State(t, f.s.Admin(), f.Name); now != state || state == "" {
			t.Errorf("the lock had %s, and has %s", state, now)
		}
		for _, tag := range tags {
			order(t, next, "release", tag, "released", "nil")
		}
	})
}
