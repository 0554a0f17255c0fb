package singlefill

import (
	"context"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/flight"
)

// A ManyLoader asks the source for the values of keys, which are Options.MaxBatch at most. It is to
// GetOrLoadMany what a [Loader] is to GetOrLoad, whose rules hold. A key that it leaves out does not
// exist; the cache remembers that. An error is the outcome of each of the keys. No two values may
// share memory, since their callers own them.
type ManyLoader[T any] func(ctx context.Context, keys []string) (map[string]T, error)

// A bulk is the load of the fills that one call starts, Options.MaxBatch of them at most. They have
// one slot, and one call of the ManyLoader works for those that hold their locks.
//
// The ManyLoader is called when each fill either holds its lock or waits for another process; a
// server that has answered none of its fills is waited for no longer than gather. So no lock is held
// while another one is awaited, and calls with keys in common cannot lock each other out. A fill that
// gets its lock later loads with those that come at the same time.
type bulk[T any] struct {
	cache *Cache[T]
	load  ManyLoader[T]
	node  *flight.Load
	slot  *flight.SharedSlot
	size  int // fills

	// Protected by mu.
	mu        sync.Mutex
	undecided int           // fills that may get their locks by the commands in flight
	rows      map[int]*row  // by node: see ask
	arrived   []*arrival[T] // fills that hold their locks, and wait for a call of the ManyLoader
	gathering *time.Timer   // calls the ManyLoader; nil: nothing has arrived
	running   *bulkCall[T]  // nil: the ManyLoader does not run
}

// gather is how long fills that hold their locks wait for a server that has not answered, or for
// other fills that have waited for another process.
const gather = 5 * time.Millisecond

// A seat is the place of a fill in a bulk.
type seat[T any] struct {
	*bulk[T]      // nil: the fill is of one key
	row      *row // of fills whose keys are on one server
	isKnown  bool // whether the fill holds its lock; protected by the mutex of the bulk
}

// A row is the fills of a bulk whose keys are on one server. Their commands go together.
type row struct {
	asks *client.Convoy

	// Protected by the mutex of the bulk.
	fills   int // that have begun
	decided int // of them
	stores  *client.Convoy
}

// An arrival is a fill that waits for the ManyLoader.
type arrival[T any] struct {
	ctx   context.Context
	key   string
	row   *row
	call  *atomic.Pointer[flight.Call]
	left  bool          // no caller may have the value; protected by the mutex of the bulk
	done  chan struct{} // closed when value and err are set
	value T
	err   error
}

// A bulkCall is one call of the ManyLoader.
type bulkCall[T any] struct {
	batch   []*arrival[T]
	cancel  context.CancelFunc
	timeout *time.Timer // abandons it
	over    bool        // protected by the mutex of the bulk
}

// newBulk returns a bulk for fills that are about to begin. outer is the load that makes the call.
func (c *Cache[T]) newBulk(load ManyLoader[T], outer *flight.Load, fills int) *bulk[T] {
	node := c.fills.NewLoad(outer)
	return &bulk[T]{
		cache: c, load: load,
		node: node, slot: c.slots.NewShared(node), size: fills, undecided: fills, rows: make(map[int]*row),
	}
}

// seatIn returns a seat for a fill whose key is on a node.
func (b *bulk[T]) seatIn(node int) seat[T] {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.rows[node]
	if r == nil {
		r = &row{asks: new(client.Convoy)}
		b.rows[node] = r
	}
	return seat[T]{bulk: b, row: r}
}

// taken notes whether the fill of a seat has begun. It has not if its key has another fill.
func (b *bulk[T]) taken(node int, begun bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if begun {
		b.rows[node].fills++
	} else {
		b.decide()
	}
}

// depart is called when all fills have begun.
func (b *bulk[T]) depart() {
	for _, r := range b.rows { // not changed any more
		r.asks.Expect(r.fills)
	}
}

// fills returns how many fills load together with this one.
func (s *seat[T]) fills() int {
	if s.bulk == nil {
		return 1
	}
	return s.size
}

// takeSeat makes a fill one of many.
func (x *filling[T]) takeSeat() {
	x.slot = x.seat.slot.NewShare()
	x.lock.Convoy = x.seat.row.asks
	x.load = func(ctx context.Context, key string) (T, error) { return x.seat.loadOne(ctx, key, &x.fill.Call) }
}

// decided notes that the fill holds its lock, or will not for now.
func (s *seat[T]) decided() {
	if s.bulk == nil {
		return
	}
	s.mu.Lock()
	known := s.isKnown
	if !known {
		s.isKnown = true
		s.row.decided++
		s.decide()
	}
	s.mu.Unlock()
	if !known {
		s.row.asks.Leave() // it has asked, or will not ask together with the others
	}
}

// decide counts a fill that is decided. The caller holds b.mu.
func (b *bulk[T]) decide() {
	if b.undecided--; b.undecided == 0 {
		b.begin()
	}
}

// loadOne is the Loader of one fill: it waits for a call of the ManyLoader.
func (s *seat[T]) loadOne(ctx context.Context, key string, call *atomic.Pointer[flight.Call]) (T, error) {
	a := &arrival[T]{ctx: ctx, key: key, row: s.row, call: call, done: make(chan struct{})}
	s.arrive(a)
	s.decided()
	stop := context.AfterFunc(ctx, func() { s.leave(a) })
	defer stop()
	<-a.done
	return a.value, a.err
}

func (b *bulk[T]) arrive(a *arrival[T]) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.arrived = append(b.arrived, a)
	if b.gathering == nil {
		b.gathering = time.AfterFunc(gather, b.gathered)
	}
}

// gathered begins, unless a server has just begun to answer.
func (b *bulk[T]) gathered() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.rows {
		if r.decided > 0 && r.decided < r.fills && b.gathering != nil {
			b.gathering.Reset(gather)
			return
		}
	}
	b.begin()
}

// leave is called when no caller may have the value of a fill any more. If that is so for all of
// them, the context of the ManyLoader ends.
func (b *bulk[T]) leave(a *arrival[T]) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a.left = true
	if i := slices.Index(b.arrived, a); i >= 0 {
		b.arrived = slices.Delete(b.arrived, i, i+1)
		a.err = a.ctx.Err()
		close(a.done)
		if len(b.arrived) == 0 { // the next one sets it again
			b.gathering.Stop()
			b.gathering = nil
		}
	}
	if b.running != nil && !slices.ContainsFunc(b.running.batch, func(a *arrival[T]) bool { return !a.left }) {
		b.running.cancel()
	}
}

// begin calls the ManyLoader for the fills that have arrived, unless it is running: a place of
// MaxLoads is for one call. The caller holds b.mu.
func (b *bulk[T]) begin() {
	if b.running != nil || len(b.arrived) == 0 {
		return
	}
	call := &bulkCall[T]{batch: b.arrived}
	b.gathering.Stop()
	b.arrived, b.gathering = nil, nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(call.batch[0].ctx), b.cache.opts.loadTimeout)
	call.cancel = cancel
	b.running = call
	b.slot.BeginLoad()
	// A ManyLoader that ignores its context is abandoned. Not context.AfterFunc, since the context also
	// ends when the fills have left, a moment before its deadline.
	call.timeout = time.AfterFunc(b.cache.opts.loadTimeout, func() { b.end(call, nil, context.DeadlineExceeded) })
	go b.run(ctx, call)
}

func (b *bulk[T]) run(ctx context.Context, call *bulkCall[T]) {
	keys := make([]string, len(call.batch))
	calls := make([]*atomic.Pointer[flight.Call], len(call.batch))
	for i, a := range call.batch {
		keys[i], calls[i] = a.key, a.call
	}
	var values map[string]T
	var err error
	returned := false
	left := b.node.Begin()
	defer func() {
		if !returned {
			p := recover()
			if p == nil {
				p = "runtime.Goexit was called"
			}
			err = &PanicError{Value: p, Stack: debug.Stack()}
			b.cache.counters.loadPanics.Add(int64(len(keys)))
		}
		left()
		b.end(call, values, err)
		call.cancel()
	}()
	ctx = b.cache.loadStart(ctx, keys[0], calls...)
	values, err = b.load(ctx, keys)
	returned = true
}

// end gives each fill its outcome. Only the first call counts.
func (b *bulk[T]) end(call *bulkCall[T], values map[string]T, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if call.over {
		return
	}
	call.over = true
	call.timeout.Stop()
	stores := make(map[*row]int)
	for _, a := range call.batch {
		v, ok := values[a.key]
		switch {
		case err != nil:
			a.err = err
		case ok:
			a.value = v
		default:
			a.err = ErrNotFound
		}
		if !a.left {
			stores[a.row]++
		}
	}
	for r, n := range stores {
		r.stores = new(client.Convoy)
		r.stores.Expect(n)
		if err == context.DeadlineExceeded { // the fills end by themselves
			r.stores = nil
		}
	}
	for _, a := range call.batch {
		close(a.done)
	}
	b.running = nil
	b.slot.EndLoad()
	b.begin() // for fills that arrived during the call
}

// stores returns with what the command goes that stores what loadOne has returned.
func (s *seat[T]) stores() *client.Convoy {
	if s.bulk == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.row.stores
}
