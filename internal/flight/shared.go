package flight

import (
	"context"
	"sync"
)

// A SharedSlot is one slot for the fills of a group. It is held while one of them holds a [Share]
// of it. So a Loader that works for all of them needs one slot.
type SharedSlot struct {
	mu      sync.Mutex
	slot    *Slot
	users   int           // shares that are held or queue
	loading chan struct{} // closed when the Loader that runs in the slot has returned; nil: none runs
	noLease bool          // TryLease has failed
}

// NewShared returns the request of a group, which holds no slot yet.
func (p *Slots) NewShared(l *Load) *SharedSlot { return &SharedSlot{slot: p.NewSlot(l)} }

// BeginLoad notes that the Loader begins. Until EndLoad no other fill gets a share: it could need
// the Loader a second time in this slot.
func (s *SharedSlot) BeginLoad() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loading = make(chan struct{})
}

func (s *SharedSlot) EndLoad() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.loading)
	s.loading = nil
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
	return s.try(func(slot *Slot) bool { return slot.Try(local) })
}

// TryLease asks Redis once for all fills of the group.
func (s *Share) TryLease(ctx context.Context) bool {
	return s.try(func(slot *Slot) bool {
		s.of.noLease = s.of.noLease || !slot.TryLease(ctx)
		return !s.of.noLease
	})
}

func (s *Share) try(slot func(*Slot) bool) bool {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	if s.held {
		return true
	}
	if s.of.loading != nil || !slot(s.of.slot) {
		return false
	}
	s.use()
	s.held, s.queued = true, false
	return true
}

func (s *Share) Queue() <-chan struct{} {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	if s.of.loading != nil {
		return s.of.loading
	}
	s.use()
	s.queued = !s.held
	return s.of.slot.Queue()
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
	if !s.held && !s.queued {
		return
	}
	s.held, s.queued = false, false
	if s.of.users--; s.of.users == 0 {
		s.of.slot.Release()
	}
}
