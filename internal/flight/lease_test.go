package flight

import (
	"context"
	"testing"
	"testing/synctest"
)

// A landlord grants leases when its test lets it.
type landlord struct {
	asked, given, back, stopped int
	let                         chan struct{}
	stubborn                    bool // a wait goes on when its context has ended
	aborting                    chan struct{}
}

func (l *landlord) Away() bool        { return false }
func (l *landlord) Behind(run func()) { go run() }

func (l *landlord) Aborting() <-chan struct{} { return l.aborting }

func (l *landlord) Lease(ctx context.Context, wait bool) (release func(), ok bool) {
	l.asked++
	switch {
	case !wait:
		return func() { l.back++ }, true
	case l.stubborn:
		ctx = context.WithoutCancel(ctx)
	}
	select {
	case <-l.let:
		l.given++
		return func() { l.back++ }, true
	case <-ctx.Done():
		l.stopped++
		return nil, false
	}
}

func leased(n int) (*Slots, *landlord) {
	l := &landlord{let: make(chan struct{}, 10), aborting: make(chan struct{})}
	return NewSlots(n, l), l
}

// One lease at a time is waited for, for the first fill in the queue, and is released with its
// slot.
func TestSlots_OneLeaseAtATime(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p, l := leased(3)
		var slots []*Slot
		for range 4 {
			s := newSlot(p)
			if s.Try(false) {
				t.Error("a slot without a lease")
			}
			queue(s)
			slots = append(slots, s)
		}
		for i, s := range slots[:3] {
			synctest.Wait()
			if l.asked != i+1 || s.Held() {
				t.Errorf("%d leases have been asked for, want %d", l.asked, i+1)
			}
			l.let <- struct{}{}
			synctest.Wait()
			if !s.Held() {
				t.Errorf("number %d has no slot", i)
			}
		}
		if l.asked != 3 || p.Queued() != 1 {
			t.Errorf("%d leases have been asked for with three slots", l.asked)
		}
		slots[0].Release()
		synctest.Wait()
		l.let <- struct{}{}
		synctest.Wait()
		for _, s := range slots[1:] {
			if !s.Held() {
				t.Error("a fill in the queue has no slot")
			}
			s.Release()
		}
		if l.given != 4 || l.back != 4 {
			t.Errorf("%d leases given, %d given back, want 4", l.given, l.back)
		}
		wantFree(t, p, 3)
	})
}

// An empty queue ends the wait for a lease; a lease that is granted nevertheless is released.
func TestSlots_LeaseForAnEmptyQueue(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p, l := leased(1)
		s := newSlot(p)
		queue(s)
		synctest.Wait()
		s.Release()
		synctest.Wait()
		if l.stopped != 1 {
			t.Error("a lease is still waited for")
		}
		wantFree(t, p, 1)

		l.stubborn = true
		queue(s)
		s.Release()
		l.let <- struct{}{}
		synctest.Wait()
		if l.given != 1 || l.back != 1 {
			t.Errorf("%d leases given, %d given back, want 1", l.given, l.back)
		}
		wantFree(t, p, 1)
	})
}

// A free slot belongs to the fills that queue for a lease; only a fill that needs no lease
// overtakes them.
func TestSlots_TryLeaseBehindAQueue(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p, l := leased(3)
		first := newSlot(p)
		queue(first)
		synctest.Wait()
		s := newSlot(p)
		if s.TryLease(t.Context()) {
			t.Error("a fill that does not queue has a slot before one that does")
		}
		if !s.Try(true) {
			t.Error("a fill that needs no lease has no slot")
		}
		s.Release()
		l.let <- struct{}{}
		synctest.Wait()
		if !first.Held() {
			t.Error("the first fill has no slot")
		}
		first.Release()
		wantFree(t, p, 3)
	})
}

// The lease of a slot that another load has borrowed, and keeps, is given back when the owner waits for no load any more.
func TestSlots_LentLeaseAtShutdown(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p, l := leased(1)
		lender := newSlot(p)
		if !lender.TryLease(t.Context()) {
			t.Fatal("no slot")
		}
		borrower := nested(t, NewSlots(1, nil), lender)
		holding(t, borrower.pool) // the borrower finds no other slot
		if !borrower.Try(false) {
			t.Fatal("no slot is lent")
		}
		lender.Release()
		if synctest.Wait(); l.back != 0 {
			t.Error("the lease is given back while a load uses it")
		}
		close(l.aborting)
		if synctest.Wait(); l.back != 1 {
			t.Errorf("%d leases are given back at the end, want 1", l.back)
		}
		borrower.Release()
		wantFree(t, p, 1)
	})
}
