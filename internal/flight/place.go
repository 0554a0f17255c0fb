package flight

import (
	"context"

	"golang.org/x/sync/semaphore"
)

// A Place is one flight's claim to one of a limited number of places to load. Only the flight's own goroutine
// uses it. The semaphore serves those who queue in the order of their coming.
type Place struct {
	sem     *semaphore.Weighted // nil: no claim is needed
	held    bool
	granted chan bool // while in the queue: true is sent when the place is ours
	leave   context.CancelFunc
}

// NewPlace returns a claim; sem may be nil, for no limit.
func NewPlace(sem *semaphore.Weighted) *Place { return &Place{sem: sem} }

// Try takes a place if one is free and nobody queues for it.
func (p *Place) Try() bool {
	switch {
	case p.sem == nil || p.held:
		return true
	case p.granted != nil:
		return false
	}
	p.held = p.sem.TryAcquire(1)
	return p.held
}

// Queue stands in line for a place. When a value has come over the channel, Enter is to be called.
func (p *Place) Queue() <-chan bool {
	if p.granted == nil {
		var ctx context.Context
		ctx, p.leave = context.WithCancel(context.Background())
		granted := make(chan bool, 1)
		p.granted = granted
		go func() { granted <- p.sem.Acquire(ctx, 1) == nil }()
	}
	return p.granted
}

// Enter takes the place for which Queue has waited.
func (p *Place) Enter() {
	p.leave()
	p.granted, p.held = nil, true
}

// Free gives back the place, or the place in the queue.
func (p *Place) Free() {
	if p.granted != nil {
		p.leave()
		p.held = <-p.granted
		p.granted = nil
	}
	if p.held {
		p.held = false
		p.sem.Release(1)
	}
}

// Exempt makes the claim need no place.
func (p *Place) Exempt() {
	p.Free()
	p.sem = nil
}
