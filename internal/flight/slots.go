package flight

import (
	"container/list"
	"context"
)

// Slots limits how many loads of one cache run at once. It is a semaphore: fills that find no free
// slot queue for one, first come, first served.
//
// A load that waits for another load lends its slot to it, to one load at a time. Otherwise loads
// that hold all slots and wait for other loads would wait for ever. So a chain of nested loads
// needs one slot. A borrower that outlives the wait keeps the slot, although its lender goes on: it holds locks, with
// which it must not queue, since a holder of a fleet slot may wait for them. A part of a borrower for whose
// fills the lender does not wait keeps it, too, while the lender lends the slot to the other part.
// semaphore.Weighted cannot lend.
type Slots struct {
	leases Leases // nil: a slot needs none

	// Guarded by graph.
	unlimited bool
	free      int
	queue     list.List // of *Slot
	stopLease func()    // ends the wait for a lease; nil: none
}

// Leases are what each slot needs besides, if the loads of the whole fleet are limited.
type Leases interface {
	// Lease acquires one. It returns a function that releases it, or nil. It returns false if there
	// is none; with wait, only if ctx has ended.
	Lease(ctx context.Context, wait bool) (release func(), ok bool)

	// Away reports that none can be acquired now, so that a slot of this process is enough.
	Away() bool

	// Behind runs a function that the owner of the Slots waits for before it ends.
	Behind(run func())

	// Aborting is closed when the owner waits for no load any more.
	Aborting() <-chan struct{}
}

// NewSlots returns n free slots; 0 means no limit. leases may be nil.
func NewSlots(n int, leases Leases) *Slots { return &Slots{free: n, unlimited: n == 0, leases: leases} }

// Leased reports whether a slot needs a lease.
func (p *Slots) Leased() bool { return p.leases != nil }

// Queued returns how many fills wait for a slot.
func (p *Slots) Queued() int {
	graph.Lock()
	defer graph.Unlock()
	return p.queue.Len()
}

// A Slot is one load's request for a slot, and the slot once it is granted. Only the goroutine that
// runs the fill uses its methods.
type Slot struct {
	pool *Slots
	load *Load

	// Guarded by graph.
	permit  *permit       // nil: none
	lender  *Slot         // whose permit it is; nil: the fill's own
	lentTo  *Slot         // runs under this permit now
	queued  *list.Element // nil: not in the queue
	granted func()        // to be called when a queued fill is granted a slot
}

// A permit is the right to run one load.
type permit struct {
	pool    *Slots
	release func() // releases its lease; nil: none
}

// keep makes the owner of the Slots wait for a lease that another load keeps using.
func (p *permit) keep() {
	if p.release == nil {
		return
	}
	release, over := p.release, make(chan struct{})
	p.pool.leases.Behind(func() {
		select {
		case <-over:
		case <-p.pool.leases.Aborting(): // the load may be another cache's, which goes on
		}
		release()
	})
	p.release = func() { close(over) }
}

// NewSlot returns the request of a fill, which holds no slot yet.
func (p *Slots) NewSlot(l *Load) *Slot {
	s := &Slot{pool: p, load: l}
	graph.Lock()
	defer graph.Unlock()
	l.slot = s
	return s
}

// Held reports whether the fill holds a slot.
func (s *Slot) Held() bool {
	graph.Lock()
	defer graph.Unlock()
	return s.permit != nil
}

// Try takes a free slot, or borrows one, without waiting. It acquires no lease: where free slots
// need one, it takes them only if local is set, which says that a slot of this process is enough.
func (s *Slot) Try(local bool) bool {
	graph.Lock()
	defer graph.Unlock()
	if s.permit == nil && (local || s.pool.leases == nil) && s.pool.takeFree(local) {
		s.leaveQueue()
		s.permit = &permit{pool: s.pool}
	}
	return s.permit != nil || s.borrow()
}

// TryLease is Try, but acquires a lease if that needs no wait. A fill in the queue leaves it to the
// queue.
func (s *Slot) TryLease(ctx context.Context) bool {
	graph.Lock()
	free := s.pool.leases != nil && s.permit == nil && s.queued == nil && s.pool.takeFree(false)
	graph.Unlock()
	if !free {
		return s.Try(false)
	}
	release, ok := s.pool.leases.Lease(ctx, false)
	graph.Lock()
	defer graph.Unlock()
	if ok {
		s.permit = &permit{s.pool, release}
	} else {
		s.pool.put()
	}
	return ok
}

// Queue puts the fill in line for a slot. granted is called when it has one, with graph locked.
func (s *Slot) Queue(granted func()) {
	graph.Lock()
	defer graph.Unlock()
	s.granted = granted
	if s.permit != nil { // since the fill last tried
		granted()
	} else if s.queued == nil {
		s.queued = s.pool.queue.PushBack(s)
		s.pool.serve()
		if s.permit == nil {
			s.borrow()
		}
	}
}

// Release releases the slot, or leaves the queue. A slot that is lent passes to its borrower.
func (s *Slot) Release() {
	graph.Lock()
	s.leaveQueue()
	p, lender, borrower := s.permit, s.lender, s.lentTo
	s.permit, s.lender, s.lentTo = nil, nil, nil
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

// The functions below require that the caller holds graph.

// part is called when fills have moved to another load, or have ended. If a load has borrowed its slot for them, its
// lender may need the slot for that load: this one goes on beside it, as a borrower that outlives the wait.
func (s *Slot) part() {
	if s == nil || s.lender == nil {
		return
	}
	for _, f := range s.load.fills {
		if f.waiters[s.lender.load] > 0 {
			return
		}
	}
	lender := s.lender
	s.permit, s.lender, lender.lentTo = &permit{pool: s.pool}, nil, nil
	s.pool.free--
	lender.lend()
}

// takeFree takes a slot that is free and that no fill queues for. With local, it overtakes fills
// that wait for a lease.
func (p *Slots) takeFree(local bool) bool {
	if p.unlimited {
		return true
	}
	if p.free <= 0 || p.queue.Len() > 0 && !(local && p.leases != nil) {
		return false
	}
	p.free--
	return true
}

// put frees a slot.
func (p *Slots) put() {
	p.free++
	p.serve()
}

// serve grants free slots to queued fills.
func (p *Slots) serve() {
	for p.queue.Len() > 0 && (p.free > 0 || p.unlimited) {
		if p.leases != nil && !p.leases.Away() {
			p.waitForLease()
			return
		}
		p.free--
		p.queue.Front().Value.(*Slot).grant(&permit{pool: p}, nil)
	}
}

// waitForLease acquires a lease for the first fill in the queue. At most one such wait runs at a
// time.
func (p *Slots) waitForLease() {
	if p.stopLease != nil {
		return
	}
	p.free--
	ctx, stop := context.WithCancel(context.Background())
	p.stopLease = stop
	p.leases.Behind(func() {
		release, ok := p.leases.Lease(ctx, true)
		stop()
		graph.Lock()
		p.stopLease = nil
		if first := p.queue.Front(); ok && first != nil {
			first.Value.(*Slot).grant(&permit{p, release}, nil)
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

// grant gives a queued fill a slot.
func (s *Slot) grant(p *permit, lender *Slot) {
	s.leaveQueue()
	s.permit, s.lender = p, lender
	s.granted()
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

// borrow borrows the slot of a load that waits for this one, if one has not lent its slot.
func (s *Slot) borrow() bool {
	for _, f := range s.load.fills {
		for outer := range f.waiters {
			if outer.slot.canLend() {
				outer.slot.lendTo(s)
				return true
			}
		}
	}
	return false
}

// lend lends the slot to a queued fill that its load waits for, if there is one.
func (s *Slot) lend() {
	for f := range s.load.waits {
		if s.canLend() && f.open() {
			s.offer(f.load.slot)
		}
	}
}

// offer lends the slot to a fill if that is queued.
func (s *Slot) offer(to *Slot) {
	if s.canLend() && to != nil && to.queued != nil {
		s.lendTo(to)
	}
}

func (s *Slot) canLend() bool { return s != nil && s.permit != nil && s.lentTo == nil }

func (s *Slot) lendTo(to *Slot) {
	s.lentTo = to
	if to.queued != nil {
		to.grant(s.permit, s)
	} else {
		to.permit, to.lender = s.permit, s
	}
}
