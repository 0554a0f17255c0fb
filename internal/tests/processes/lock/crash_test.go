package lock_test

import (
	"fmt"
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

// Killed waiters do not keep a later waiter from the lock.
//
//fault:killed-waiters
func TestAcquire_KilledWaiters(t *testing.T) {
	eachFleet(t, func(t *testing.T, f fleet) {
		dying := f.spawn(2, hasty, hastyTTL)
		all := f.spawn(2, patient, patientTTL)
		held, _ := f.take(all[0], "holder")
		for i := range 10 {
			tag := fmt.Sprint("dies", i)
			dying[i%2].Send("acquire " + tag)
			dying[i%2].Expect(tag + ": asks")
		}
		if f.Name == "fair" {
			f.awaitQueue(10)
		}
		all[1].Send("acquire next")
		all[1].Expect("next: asks")
		for _, p := range dying {
			p.Kill()
		}
		for _, tag := range held {
			order(t, all[0], "release", tag, "released", "nil")
		}
		acquired(t, all[1], "next")
		order(t, all[1], "release", "next", "released", "nil")
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

// Do in a frozen process ends the context of its function, and returns ErrLost.
//
//fault:frozen-holder
func TestDo_FrozenProcess(t *testing.T) {
	eachFleet(t, func(t *testing.T, f fleet) {
		holder, next := f.spawn(1, hasty, hastyTTL)[0], f.spawn(1, patient, patientTTL)[0]
		for i := range f.Size {
			holder.Send(fmt.Sprint("do work", i))
			holder.Expect(fmt.Sprintf("work%d: doing", i))
		}
		holder.Freeze()
		tags, _ := f.take(next, "next")
		holder.Thaw()
		said := sayings(holder, 2*f.Size)
		for i := range f.Size {
			if got := said[fmt.Sprint("work", i)]; got != "told lost, done lost, " {
				t.Errorf("work %d: %s, want it told of the loss, and Do to return ErrLost", i, got)
			}
		}
		// Undisturbed work is not told anything.
		for _, tag := range tags {
			order(t, next, "release", tag, "released", "nil")
		}
		next.Send("do more")
		next.Expect("more: doing")
		order(t, next, "finish", "more", "done", "nil")
	})
}
