package flight

import (
	"context"
	"sync"
)

// A SharedSlot is one slot for the fills of a group. It is held while one of them holds a [Share]
// of it. So a Loader that works for all of them needs one slot.
type SharedSlot struct {
	mu      sync.Mutex // after Bulk.mu, before graph
	slot    *Slot
	users   int               // shares that are held or queue
	waiting map[*Share]func() // of fills that have queued; to be called when there may be shares
	loading bool              // the Loader runs in the slot
	asking  bool              // a fill tries to get a lease: the slot is left alone
	asked   sync.Cond         // of mu: asking has become false
	noLease bool              // TryLease has failed
}

// NewShared returns the request of a group, which holds no slot yet.
func (p *Slots) NewShared(l *Load) *SharedSlot {
	s := &SharedSlot{slot: p.NewSlot(l), waiting: make(map[*Share]func())}
	s.asked.L = &s.mu
	return s
}

// lock takes the mutex when the slot may be used.
func (s *SharedSlot) lock() {
	s.mu.Lock()
	for s.asking {
		s.asked.Wait()
	}
}

// tryLease asks for a lease without the mutex, which the caller holds.
func (s *SharedSlot) tryLease(ctx context.Context) bool {
	s.asking = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.asking = false
		s.asked.Broadcast()
	}()
	return s.slot.TryLease(ctx)
}

// BeginLoad notes that the Loader begins. Until EndLoad no other fill gets a share: it could need
// the Loader a second time in this slot.
func (s *SharedSlot) BeginLoad() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loading = true
}

func (s *SharedSlot) EndLoad() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loading = false
	s.wake()
}

// granted is called when the slot is granted.
func (s *SharedSlot) granted() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wake()
}

// wake lets the fills that have queued try again. The caller holds the mutex.
func (s *SharedSlot) wake() {
	for _, granted := range s.waiting {
		granted()
	}
	clear(s.waiting)
}

// A Share is what one fill has of a SharedSlot. Its methods are those of a [Slot].
type Share struct {
	of           *SharedSlot
	held, queued bool // protected by the mutex of the SharedSlot
}

func (s *SharedSlot) NewShare() *Share { return &Share{of: s} }

func (s *Share) Held() bool {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	return s.held
}

func (s *Share) Try(local bool) bool {
	return s.try(func() bool { return s.of.slot.Try(local) })
}

// TryLease asks Redis once for all fills of the group. The others wait for the answer.
func (s *Share) TryLease(ctx context.Context) bool {
	return s.try(func() bool {
		s.of.noLease = s.of.noLease || !s.of.tryLease(ctx)
		return !s.of.noLease
	})
}

func (s *Share) try(slot func() bool) bool {
	s.of.lock()
	defer s.of.mu.Unlock()
	if s.held {
		return true
	}
	if s.of.loading || !slot() {
		return false
	}
	s.use()
	s.held, s.queued = true, false
	delete(s.of.waiting, s)
	s.of.wake() // a slot that was taken out of the queue is granted to none of them
	return true
}

// Queue is that of a Slot. granted is also called when the Loader has returned.
func (s *Share) Queue(granted func()) {
	s.of.lock()
	defer s.of.mu.Unlock()
	s.of.waiting[s] = granted
	if s.of.loading {
		return
	}
	s.use()
	s.queued = !s.held
	s.of.slot.Queue(func() { go s.of.granted() })
}

// use counts the share. The caller holds the mutex of the SharedSlot.
func (s *Share) use() {
	if !s.held && !s.queued {
		s.of.users++
	}
}

func (s *Share) Release() {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	delete(s.of.waiting, s)
	if !s.held && !s.queued {
		return
	}
	s.held, s.queued = false, false
	if s.of.users--; s.of.users == 0 {
		s.of.slot.Release()
	}
}
