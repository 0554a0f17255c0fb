package flight

import (
	"context"
	"testing"
	"testing/synctest"
)

// told reports whether a queued fill has been told of its slot.
func told(granted <-chan struct{}) bool {
	select {
	case <-granted:
		return true
	default:
		return false
	}
}

// queue queues for a slot. The channel is closed when it is granted.
func queue(s interface{ Queue(granted func()) }) <-chan struct{} {
	granted := make(chan struct{})
	s.Queue(func() { close(granted) })
	return granted
}

// aLoad returns a load of a cache with one fill.
func aLoad() *Load {
	l := newLoad(nil, nil)
	l.take(new(member))
	return l
}

// itsFill returns the fill of a load.
func itsFill(l *Load) *member {
	return l.fills[0]
}

func newSlot(p *Slots) *Slot { return p.NewSlot(aLoad()) }

// holding returns a request that holds a slot.
func holding(t *testing.T, p *Slots) *Slot {
	t.Helper()
	s := newSlot(p)
	if !s.Try(false) || !s.Held() {
		t.Fatal("there is no slot")
	}
	return s
}

// queueing returns a request in the queue.
func queueing(t *testing.T, p *Slots) (*Slot, <-chan struct{}) {
	t.Helper()
	s := newSlot(p)
	if s.Try(false) {
		t.Fatal("there is a slot")
	}
	return s, queue(s)
}

// nested returns a request for whose load the loads of outer wait.
func nested(t *testing.T, p *Slots, outer ...*Slot) *Slot {
	t.Helper()
	s := newSlot(p)
	for _, o := range outer {
		if !o.load.waitFor(itsFill(s.load)) {
			t.Fatal("waiting is refused")
		}
	}
	return s
}

func wantFree(t *testing.T, p *Slots, n int) {
	t.Helper()
	if p.free != n || p.Queued() != 0 {
		t.Errorf("%d slots are free and %d fills queue, want %d and 0", p.free, p.Queued(), n)
	}
}

// A chain of nested loads needs one slot, even across caches.
func TestSlots_Chain(t *testing.T) {
	t.Parallel()
	p, q := NewSlots(1, nil), NewSlots(1, nil)
	holding(t, q)
	chain := []*Slot{holding(t, p)}
	for i := range 10 {
		s := nested(t, []*Slots{p, q}[i%2], chain[i])
		if !s.Try(false) {
			t.Fatalf("load %d of the chain has no slot", i)
		}
		if stranger := nested(t, p, chain[i]); stranger.Try(false) {
			t.Fatalf("the slot of load %d is lent twice", i)
		}
		chain = append(chain, s)
	}
	for i := len(chain) - 1; i >= 0; i-- {
		chain[i].Release()
	}
	wantFree(t, p, 1)
}

// The borrower of a lender that ends owns the slot, or borrows it from the lender's lender.
func TestSlots_LenderEndsFirst(t *testing.T) {
	t.Parallel()
	for _, order := range [][]int{{0, 1, 2}, {1, 0, 2}, {1, 2, 0}, {0, 2, 1}, {2, 1, 0}, {2, 0, 1}} {
		p := NewSlots(1, nil)
		a := holding(t, p)
		b := nested(t, p, a)
		b.Try(false)
		c := nested(t, p, b)
		c.Try(false)
		slots := []*Slot{a, b, c}
		waiting, granted := queueing(t, p)
		for i, n := range order {
			if told(granted) {
				t.Errorf("order %v: the slot is free with %d loads in it", order, len(order)-i)
			}
			slots[n].Release()
		}
		if !told(granted) {
			t.Errorf("order %v: the slot is lost", order)
		}
		waiting.Release()
		wantFree(t, p, 1)
	}
}

// A load keeps the slot that it has borrowed when the lender's wait ends before it does. So loads may
// exceed the limit by one for each lender, and by no more: a slot that is lent is not lent again.
//
//fault:nested-loads
func TestSlots_OutlivesTheWaitOfItsLender(t *testing.T) {
	t.Parallel()
	p := NewSlots(1, nil)
	lender := holding(t, p)
	s := nested(t, p, lender)
	if !s.Try(false) {
		t.Error("no slot is lent")
	}
	lender.load.leave(itsFill(s.load)) // it has the key that it needs
	next, granted := nested(t, p, lender), make(chan struct{})
	if next.Try(false) || !lender.Held() || !s.Held() {
		t.Error("the slot is lent twice")
	}
	next.Queue(func() { close(granted) })
	if other := newSlot(p); other.Try(false) {
		t.Error("a load that is not nested has a slot")
	}
	if told(granted) {
		t.Error("the slot is lent to a second load")
	}
	s.Release()
	if !told(granted) {
		t.Error("the slot is not lent to the next load")
	}
	lender.load.leave(itsFill(next.load))
	lender.Release()
	next.Release()
	wantFree(t, p, 1)
}

// A fill that moves to another load takes its waiters with it: its new load is lent a slot, and no load waits for the
// old one any more. The old one keeps the slot that it has borrowed for the fill, beside the lender's.
func TestSlots_FillThatMoves(t *testing.T) {
	t.Parallel()
	p := NewSlots(1, nil)
	outer := holding(t, p)
	both := newLoad(nil, nil)
	stays, moves := new(member), new(member)
	both.take(stays)
	both.take(moves)
	left := p.NewSlot(both)
	if !outer.load.waitFor(moves) || !left.Try(false) {
		t.Fatal("no slot is lent")
	}
	own := newLoad(nil, nil)
	own.take(moves)
	both.parted()
	borrower := p.NewSlot(own)
	if !borrower.Try(false) || !left.Held() {
		t.Error("the load of the fill that has moved has no slot to borrow, or the other one has lost its own")
	}
	inLoader(both)
	if !both.waitFor(moves) || both.waitFor(stays) || both.Awaited() || !own.Awaited() {
		t.Error("a load waits for itself, or not for a fill that it has not any more")
	}
	if newSlot(p).Try(false) {
		t.Error("a stranger has a slot")
	}
	for _, s := range []*Slot{left, borrower, outer} {
		s.Release()
	}
	wantFree(t, p, 1)
}

// A load that has released its slot lends nothing, however long its context is kept.
//
//fault:nested-loads
func TestSlots_LoadThatIsOver(t *testing.T) {
	t.Parallel()
	p := NewSlots(1, nil)
	over := holding(t, p)
	over.Release()
	other := holding(t, p)
	for range 3 {
		s := nested(t, p, over)
		if s.Try(false) || told(queue(s)) {
			t.Error("a load runs in the slot of one that is over")
		}
	}
	other.Release()
	if p.Queued() != 2 {
		t.Errorf("%d loads queue, want 2", p.Queued())
	}
}

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

// The lease of a slot that another load has borrowed, and keeps, is given back when its owner waits for no load.
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
