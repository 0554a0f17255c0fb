package flight

import "testing"

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
	l.take([]*member{new(member)})
	return l
}

// itsFill returns the fill of a load.
func itsFill(l *Load) *member {
	for f := range l.fills {
		return f
	}
	return nil
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
	both.take([]*member{stays, moves})
	left := p.NewSlot(both)
	if !outer.load.waitFor(moves) || !left.Try(false) {
		t.Fatal("no slot is lent")
	}
	own := newLoad(nil, nil)
	own.take([]*member{moves})
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
