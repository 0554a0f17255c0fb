package flight

import (
	"container/list"
	"context"
)

// Slots limits how many loads of one cache run at once. Fills that find no place free queue for one, first come,
// first served.
//
// A load that waits for another one lends it its place, to one at a time: otherwise loads that hold all places
// and wait for others would wait for ever. So a chain of nested loads needs one place.
type Slots struct {
	// Lease, if it is set, gets what a place needs besides: a place of the whole fleet. It returns what gives that
	// back, or nil, and false if there is none, which with wait means that ctx has ended. NoLease reports that
	// none can be asked for now: a place in this process is enough. Behind runs a function for which the owner
	// of the places waits before it ends.
	Lease   func(ctx context.Context, wait bool) (release func(), ok bool)
	NoLease func() bool
	Behind  func(run func())

	// Guarded by graph.
	unlimited bool
	free      int
	queue     list.List // of *Slot
	stopLease func()    // ends the lease that is being waited for; nil: there is none
}

// NewSlots returns n places; 0 means no limit.
func NewSlots(n int) *Slots { return &Slots{free: n, unlimited: n == 0} }

// Queued returns how many fills wait for a place.
func (p *Slots) Queued() int {
	graph.Lock()
	defer graph.Unlock()
	return p.queue.Len()
}

// A Slot is one fill's claim to a place. Only the goroutine that runs the fill uses its methods.
type Slot struct {
	pool *Slots
	load *Load

	// Guarded by graph.
	place   *place        // nil: none
	lender  *Slot         // whose place it is; nil: the fill's own
	lentTo  *Slot         // who runs in this place now
	queued  *list.Element // nil: not in the queue
	granted chan struct{} // receives a value when a place is granted to a fill in the queue
}

// A place is the right to run one load.
type place struct {
	pool    *Slots
	release func() // gives back its lease; nil: there is none
}

// keep makes the owner of the places wait for a lease that another load goes on with.
func (p *place) keep() {
	if p.release == nil {
		return
	}
	release, over := p.release, make(chan struct{})
	p.pool.Behind(func() {
		<-over
		release()
	})
	p.release = func() { close(over) }
}

// NewSlot returns the claim of a fill.
func (p *Slots) NewSlot(l *Load) *Slot {
	s := &Slot{pool: p, load: l}
	graph.Lock()
	defer graph.Unlock()
	l.slot = s
	return s
}

// Held reports whether the fill has a place.
func (s *Slot) Held() bool {
	graph.Lock()
	defer graph.Unlock()
	return s.place != nil
}

// Try takes a place if that is possible without waiting, and without a lease unless local is set: a place in this
// process is enough then.
func (s *Slot) Try(local bool) bool {
	graph.Lock()
	defer graph.Unlock()
	if s.place == nil && (local || s.pool.Lease == nil) && s.pool.takeFree(local) {
		s.leaveQueue()
		s.place = &place{pool: s.pool}
	}
	return s.place != nil || s.borrow()
}

// TryLease is Try that asks for a lease, but waits for none.
func (s *Slot) TryLease(ctx context.Context) bool {
	if s.pool.Lease == nil || s.Held() {
		return s.Try(false)
	}
	graph.Lock()
	free := s.pool.takeFree(false)
	graph.Unlock()
	if !free {
		return false
	}
	release, ok := s.pool.Lease(ctx, false)
	graph.Lock()
	defer graph.Unlock()
	if ok {
		s.place = &place{s.pool, release}
	} else {
		s.pool.put()
	}
	return ok
}

// Queue waits in line for a place. The channel receives a value when the fill has one.
func (s *Slot) Queue() <-chan struct{} {
	graph.Lock()
	defer graph.Unlock()
	if s.place != nil { // granted since the fill last tried
		s.granted = make(chan struct{}, 1)
		s.granted <- struct{}{}
	} else if s.queued == nil {
		s.granted = make(chan struct{}, 1)
		s.queued = s.pool.queue.PushBack(s)
		s.pool.serve()
		if s.place == nil {
			s.borrow()
		}
	}
	return s.granted
}

// Release gives back the place, or leaves the queue. A place that is lent goes to the load that runs in it.
func (s *Slot) Release() {
	graph.Lock()
	s.leaveQueue()
	p, lender, borrower := s.place, s.lender, s.lentTo
	s.place, s.lender, s.lentTo = nil, nil, nil
	var release func()
	switch {
	case p == nil:
	case borrower != nil:
		if borrower.lender = lender; lender != nil {
			lender.lentTo = borrower
		} else {
			p.keep()
		}
	case lender != nil:
		lender.lentTo = nil
		lender.lend()
	default:
		release = p.release
		p.pool.put()
	}
	graph.Unlock()
	if release != nil {
		release()
	}
}

// The functions below are called with graph locked.

// takeFree takes a free place that no fill queues for. With local set, fills that wait for a lease are passed over.
func (p *Slots) takeFree(local bool) bool {
	if p.unlimited {
		return true
	}
	if p.free == 0 || p.queue.Len() > 0 && !(local && p.Lease != nil) {
		return false
	}
	p.free--
	return true
}

// put makes a place free again.
func (p *Slots) put() {
	p.free++
	p.serve()
}

// serve grants free places to fills in the queue.
func (p *Slots) serve() {
	for p.queue.Len() > 0 && (p.free > 0 || p.unlimited) {
		if p.Lease != nil && !(p.NoLease != nil && p.NoLease()) {
			p.waitForLease()
			return
		}
		p.free--
		p.queue.Front().Value.(*Slot).grant(&place{pool: p}, nil)
	}
}

// waitForLease gets a lease for the first fill in the queue. One is waited for at a time.
func (p *Slots) waitForLease() {
	if p.stopLease != nil {
		return
	}
	p.free--
	ctx, stop := context.WithCancel(context.Background())
	p.stopLease = stop
	p.Behind(func() {
		release, ok := p.Lease(ctx, true)
		stop()
		graph.Lock()
		p.stopLease = nil
		if first := p.queue.Front(); ok && first != nil {
			first.Value.(*Slot).grant(&place{p, release}, nil)
			release = nil
			p.serve()
		} else {
			p.put()
		}
		graph.Unlock()
		if release != nil {
			release()
		}
	})
}

// grant gives a fill in the queue a place.
func (s *Slot) grant(p *place, lender *Slot) {
	s.leaveQueue()
	s.place, s.lender = p, lender
	s.granted <- struct{}{}
}

func (s *Slot) leaveQueue() {
	if s.queued == nil {
		return
	}
	s.pool.queue.Remove(s.queued)
	s.queued = nil
	if s.pool.queue.Len() == 0 && s.pool.stopLease != nil {
		s.pool.stopLease()
	}
}

// borrow takes the place of a load that waits for this one, if there is one that has not lent it.
func (s *Slot) borrow() bool {
	for outer := range s.load.waiters {
		if outer.slot.canLend() {
			outer.slot.lendTo(s)
			return true
		}
	}
	return false
}

// lend lends the place of s to a fill in a queue for which its load waits, if there is one.
func (s *Slot) lend() {
	for other := range s.load.waits {
		if s.canLend() {
			s.offer(other.slot)
		}
	}
}

// offer lends the place of s to a fill in a queue.
func (s *Slot) offer(to *Slot) {
	if s.canLend() && to != nil && to.queued != nil {
		s.lendTo(to)
	}
}

func (s *Slot) canLend() bool { return s != nil && s.place != nil && s.lentTo == nil }

func (s *Slot) lendTo(to *Slot) {
	s.lentTo = to
	if to.queued != nil {
		to.grant(s.place, s)
	} else {
		to.place, to.lender = s.place, s
	}
}
