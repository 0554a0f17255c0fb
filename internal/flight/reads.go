package flight

import (
	"context"
	"sync"
)

// Reads lets callers of one key share reads. A caller never gets a reply that was in transit when
// it called. If no read is in flight for the key, the caller reads at once. Otherwise it joins the
// batch of callers that wait for that read to end. The member of the batch that receives its token
// reads for all of them.
type Reads[V any] struct {
	clock *Clock
	mu    sync.Mutex // no other one is taken with it
	// keys has the keys with a read in flight, each with the batch that waits for its end, or nil.
	keys map[string]*batch[V]
	idle chan struct{} // closed when no read is in flight; nil unless Drain waits
}

func NewReads[V any](clock *Clock) *Reads[V] {
	return &Reads[V]{clock: clock, keys: make(map[string]*batch[V])}
}

// A batch is a group of callers that share one read.
type batch[V any] struct {
	// token holds one value from when the batch may read until one of its members has read.
	token  chan struct{}
	done   chan struct{} // closed when result is set
	result *V
	size   int // members that have not left; guarded by Reads.mu
}

// A Turn is a caller's right to read a key. Its holder must call End.
type Turn[V any] struct {
	// Arrived is when the caller joined its batch. It is 0 if the caller reads at once, only for
	// itself.
	Arrived Stamp
	reads   *Reads[V]
	key     string
	batch   *batch[V]
}

// Arrive returns the turn of a caller. It must Wait before it reads, unless Arrived is 0.
func (r *Reads[V]) Arrive(key string) Turn[V] {
	turn := Turn[V]{reads: r, key: key}
	r.mu.Lock()
	b, busy := r.keys[key]
	if !busy {
		r.keys[key] = nil
		r.mu.Unlock()
		return turn
	}
	if b == nil {
		b = &batch[V]{token: make(chan struct{}, 1), done: make(chan struct{})}
		r.keys[key] = b
	}
	b.size++
	r.mu.Unlock()

	turn.batch, turn.Arrived = b, r.clock.Now()
	return turn
}

// Delegate runs read with this turn in another goroutine, and waits like the other members of the
// batch. It is for a caller that may leave before it has a reply.
func (t Turn[V]) Delegate(ctx context.Context, read func(Turn[V])) (turn Turn[V], found *V, err error) {
	t.reads.mu.Lock()
	t.batch.size++
	t.reads.mu.Unlock()
	go read(t)
	return t.Wait(ctx)
}

// Wait waits until the caller may read, and returns its turn; or until another caller of its batch has
// read, and returns what that caller found. It returns the error of ctx if ctx ends first.
func (t Turn[V]) Wait(ctx context.Context) (turn Turn[V], found *V, err error) {
	if t.Arrived == 0 {
		return t, nil, nil
	}
	select {
	case <-t.batch.done:
		return t, t.batch.result, nil
	case <-t.batch.token:
		if err := ctx.Err(); err != nil {
			t.End(nil)
			return t, nil, err
		}
		return t, nil, nil
	case <-ctx.Done():
		t.reads.leave(t.key, t.batch)
		return t, nil, ctx.Err()
	}
}

// Try is Wait for a caller that does not wait now. over is false if it still has to.
func (t Turn[V]) Try() (found *V, over bool) {
	select {
	case <-t.batch.done:
		return t.batch.result, true
	case <-t.batch.token:
		return nil, true
	default:
		return nil, false
	}
}

// Leave ends a wait that has not begun, or is not over.
func (t Turn[V]) Leave() { t.reads.leave(t.key, t.batch) }

// End ends a turn and gives found to the batch. A caller that leaves before it has a reply passes
// nil; another member of the batch gets its turn then. End reports whether other callers share
// found.
func (t Turn[V]) End(found *V) (shared bool) {
	r, b := t.reads, t.batch
	r.mu.Lock()
	defer r.mu.Unlock()
	if b == nil {
		r.next(t.key)
		return false
	}
	b.size--
	shared = b.size > 0
	switch {
	case !shared:
	case found == nil:
		b.token <- struct{}{}
		return false
	default:
		b.result = new(*found)
		close(b.done)
	}
	// The member of the next batch that this wakes runs before the members of this batch, which
	// were woken before it. So the next read is sent before this batch's callers use their values.
	r.next(t.key)
	return shared
}

// next lets the next batch of key read, if there is one.
func (r *Reads[V]) next(key string) {
	b := r.keys[key]
	if b == nil {
		delete(r.keys, key)
		if r.idle != nil && len(r.keys) == 0 {
			close(r.idle)
			r.idle = nil
		}
		return
	}
	r.keys[key] = nil
	b.token <- struct{}{}
}

// leave removes a caller from a batch. The last member to leave takes the token along if the batch
// has it.
func (r *Reads[V]) leave(key string, b *batch[V]) {
	r.mu.Lock()
	defer r.mu.Unlock()
	b.size--
	switch {
	case b.size > 0:
	case r.keys[key] == b:
		r.keys[key] = nil
	default:
		select {
		case <-b.token:
			r.next(key)
		default:
		}
	}
}

// Drain waits until no read is in flight. Calls must not overlap.
func (r *Reads[V]) Drain() {
	r.mu.Lock()
	idle := make(chan struct{})
	if len(r.keys) == 0 {
		close(idle)
	} else {
		r.idle = idle
	}
	r.mu.Unlock()
	<-idle
}
