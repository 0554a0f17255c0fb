package flight

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// group returns the request of a group, and shares of it.
func group(p *Slots, n int) (*SharedSlot, []*Share) {
	s := p.NewShared(new(Load))
	shares := make([]*Share, n)
	for i := range shares {
		shares[i] = s.NewShare()
	}
	return s, shares
}

// waitsFor reports whether a share that queues is not told at once. It runs in a bubble.
func waitsFor(s *Share) bool {
	synctest.Wait() // an earlier grant has been passed on
	granted := queue(s)
	synctest.Wait()
	return !told(granted)
}

func wantHeld(t *testing.T, want bool, shares ...*Share) {
	t.Helper()
	for i, s := range shares {
		if s.Held() != want {
			t.Errorf("share %d is held: %t, want %t", i, s.Held(), want)
		}
	}
}

// A group without a slot has one place in the queue. The slot that it is granted belongs to the fills
// that queue for it, also while none of them has taken its share.
func TestSharedSlot_Queue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := NewSlots(1, nil)
		holder := holding(t, p)
		_, shares := group(p, 3)
		for _, s := range slices.Concat(shares[:2], shares[:2]) {
			if s.Try(false) || s.Held() || !waitsFor(s) {
				t.Error("a fill of the group has a share of a slot that another fill holds")
			}
		}
		if p.Queued() != 1 {
			t.Errorf("the group has %d places in the queue, want 1", p.Queued())
		}
		holder.Release()
		for _, s := range shares {
			if waitsFor(s) {
				t.Error("a fill of the group is not told of the slot")
			}
		}
		shares[0].Release() // it gives up
		if !shares[1].Try(false) {
			t.Error("the slot is lost when a fill gives up")
		}
		shares[2].Release()
		shares[1].Release()
		wantFree(t, p, 1)
	})
}

// A fill of a queued group may take a slot that the group has not been granted, as it does while Redis
// does not answer. That wakes the other fills.
func TestSharedSlot_TakenFromTheQueue(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p, l := leased(2)
		_, shares := group(p, 3)
		woken := []<-chan struct{}{queue(shares[0]), queue(shares[1]), queue(shares[2])}
		synctest.Wait()
		if l.asked != 1 || told(woken[0]) {
			t.Fatal("the group does not wait for a lease")
		}
		if !shares[0].Try(true) {
			t.Fatal("there is no slot")
		}
		for i, s := range shares[1:] {
			if !told(woken[i+1]) || !s.Try(true) {
				t.Errorf("fill %d sleeps although the group has a slot", i+1)
			}
		}
		if told(woken[0]) {
			t.Error("the fill that took the slot is woken, too")
		}
		for _, s := range shares {
			s.Release()
		}
		synctest.Wait()
		wantFree(t, p, 2)
	})
}

// While the Loader runs no other fill gets a share, in any way, and every fill in the queue learns of its
// end. Fills that have their shares keep them.
func TestSharedSlot_Load(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := NewSlots(2, nil)
		s, shares := group(p, 4)
		first, queued, late, gone := shares[0], shares[1], shares[2], shares[3]
		first.Try(false)
		queue(queued) // the slot is held, so it could take its share at once
		s.BeginLoad()
		for _, other := range shares[1:] {
			if other.Try(false) || other.Try(true) || other.TryLease(t.Context()) || other.Held() {
				t.Error("a fill has a share while the Loader runs")
			}
			if !waitsFor(other) {
				t.Error("a fill is told of a share while the Loader runs")
			}
		}
		if !first.Try(false) || !first.TryLease(t.Context()) || !first.Held() {
			t.Error("a fill has lost its share")
		}
		gone.Release() // it has no share to release
		first.Release()
		wantFree(t, p, 1) // held for the fill that queued before the load
		over := []<-chan struct{}{queue(queued), queue(late)}
		s.EndLoad()
		for _, end := range over {
			if !told(end) {
				t.Error("a fill is not told that the Loader has returned")
			}
		}
		if !queued.Try(false) || !late.Try(false) {
			t.Error("a fill has no share after the load")
		}
		queued.Release()
		wantFree(t, p, 1)
		late.Release()
		wantFree(t, p, 2)
	})
}

// While a fill of a group asks for a lease, the others can be looked at and leave; those that need the answer wait
// for it.
func TestSharedSlot_TryLeaseInFlight(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p, l := leased(2)
		l.slow = true
		_, shares := group(p, 4)
		begun := time.Now()
		for _, s := range shares[:2] {
			go func() {
				if !s.TryLease(t.Context()) {
					t.Error("a fill has no share")
				}
			}()
		}
		synctest.Wait()
		wantHeld(t, false, shares...)
		shares[3].Release()
		if time.Since(begun) != 0 {
			t.Error("a fill that needs no lease waits for one")
		}
		if !shares[2].Try(true) || l.asked != 1 {
			t.Errorf("a fill has no share, or %d leases are asked for, want 1", l.asked)
		}
		synctest.Wait()
		for _, s := range shares {
			s.Release()
		}
		if l.back != 1 {
			t.Errorf("%d leases are given back, want 1", l.back)
		}
		wantFree(t, p, 2)
	})
}

// A group keeps the slot that it has borrowed when the lender's wait ends before its loads do. So loads may
// exceed the limit by one for each lender, and by no more: a slot that is lent is not lent again.
//
//fault:nested-loads
func TestSharedSlot_OutlivesTheWaitOfItsLender(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := NewSlots(1, nil)
		lender := holding(t, p)
		s, shares := group(p, 2)
		lender.load.waitFor(s.slot.load)
		for _, share := range shares {
			if !share.Try(false) {
				t.Error("no slot is lent")
			}
		}
		lender.load.leave(s.slot.load) // it has the key that it needs
		wantHeld(t, true, shares...)
		next, granted := nested(t, p, lender), make(chan struct{})
		if next.Try(false) || !lender.Held() {
			t.Error("the slot is lent twice")
		}
		next.Queue(func() { close(granted) })
		if other := newSlot(p); other.Try(false) {
			t.Error("a load that is not nested has a slot")
		}
		shares[0].Release()
		if told(granted) {
			t.Error("the slot is lent to a second load while the group has it")
		}
		shares[1].Release()
		if !told(granted) {
			t.Error("the slot is not lent to the next load")
		}
		lender.load.leave(next.load)
		lender.Release()
		next.Release()
		wantFree(t, p, 1)
	})
}
