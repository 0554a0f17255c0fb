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

// A manyLoader is a ManyLoader without its type.
type manyLoader interface {
	loadMany(ctx context.Context, keys []string) (values func(key string) (value any, ok bool), err error)
}

func (l ManyLoader[T]) loadMany(ctx context.Context, keys []string) (func(key string) (any, bool), error) {
	values, err := l(ctx, keys)
	return func(key string) (any, bool) {
		v, ok := values[key]
		return &v, ok
	}, err
}

// A bulk is the load of the fills that one call starts, Options.MaxBatch of them at most. They have
// one slot, and one call of the ManyLoader works for those that hold their locks.
//
// The ManyLoader is called when each fill either holds its lock or waits for another process; a
// server that has answered none of its fills is waited for no longer than gather. So no lock is held
// while another one is awaited, and calls with keys in common cannot lock each other out. A fill that
// gets its lock later loads with those that come at the same time.
type bulk struct {
	cache *engine
	load  manyLoader
	node  *flight.Load
	slot  *flight.SharedSlot
	size  int // fills

	// Protected by mu.
	mu        sync.Mutex
	undecided int          // fills that may get their locks by the commands in flight
	rows      map[int]*row // by node: see ask
	arrived   []*arrival   // fills that hold their locks, and wait for a call of the ManyLoader
	gathering *time.Timer  // calls the ManyLoader; nil: nothing has arrived
	running   *bulkCall    // nil: the ManyLoader does not run
}

// gather is how long fills that hold their locks wait for a server that has not answered, or for
// other fills that have waited for another process.
const gather = 5 * time.Millisecond

// A seat is the place of a fill in a bulk.
type seat struct {
	*bulk        // nil: the fill is of one key
	row     *row // of fills whose keys are on one server
	isKnown bool // whether the fill holds its lock; protected by the mutex of the bulk
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
type arrival struct {
	ctx   context.Context
	key   string
	row   *row
	call  *atomic.Pointer[flight.Call]
	left  bool          // no caller may have the value; protected by the mutex of the bulk
	done  chan struct{} // closed when value and err are set
	value any
	err   error
}

// A bulkCall is one call of the ManyLoader.
type bulkCall struct {
	batch   []*arrival
	cancel  context.CancelFunc
	timeout *time.Timer // abandons it
	over    bool        // protected by the mutex of the bulk
}

// newBulk returns a bulk for fills that are about to begin. outer is the load that makes the call.
func (c *engine) newBulk(load manyLoader, outer *flight.Load, fills int) *bulk {
	node := c.fills.NewLoad(outer)
	return &bulk{
		cache: c, load: load,
		node: node, slot: c.slots.NewShared(node), size: fills, undecided: fills, rows: make(map[int]*row),
	}
}

// seatIn returns a seat for a fill whose key is on a node.
func (b *bulk) seatIn(node int) seat {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.rows[node]
	if r == nil {
		r = &row{asks: new(client.Convoy)}
		b.rows[node] = r
	}
	return seat{bulk: b, row: r}
}

// taken notes whether the fill of a seat has begun. It has not if its key has another fill.
func (b *bulk) taken(node int, begun bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if begun {
		b.rows[node].fills++
	} else {
		b.decide()
	}
}

// depart is called when all fills have begun.
func (b *bulk) depart() {
	for _, r := range b.rows { // not changed any more
		r.asks.Expect(r.fills)
	}
}

// fills returns how many fills load together with this one.
func (s *seat) fills() int {
	if s.bulk == nil {
		return 1
	}
	return s.size
}

// takeSeat makes a fill one of many.
func (x *filling) takeSeat() {
	x.slot = x.seat.slot.NewShare()
	x.lock.Convoy = x.seat.row.asks
	x.load = seatLoader{x}
}

// decided notes that the fill holds its lock, or will not for now.
func (s *seat) decided() {
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
func (b *bulk) decide() {
	if b.undecided--; b.undecided == 0 {
		b.begin()
	}
}

// A seatLoader is the Loader of one fill of many: it waits for a call of the ManyLoader.
type seatLoader struct{ *filling }

func (x seatLoader) load(ctx context.Context, key string) (any, error) {
	return x.seat.loadOne(ctx, key, &x.fill.Call)
}

func (s *seat) loadOne(ctx context.Context, key string, call *atomic.Pointer[flight.Call]) (any, error) {
	a := &arrival{ctx: ctx, key: key, row: s.row, call: call, done: make(chan struct{})}
	s.arrive(a)
	s.decided()
	stop := context.AfterFunc(ctx, func() { s.leave(a) })
	defer stop()
	<-a.done
	return a.value, a.err
}

func (b *bulk) arrive(a *arrival) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.arrived = append(b.arrived, a)
	if b.gathering == nil {
		b.gathering = time.AfterFunc(gather, b.gathered)
	}
}

// gathered begins, unless a server has just begun to answer.
func (b *bulk) gathered() {
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
func (b *bulk) leave(a *arrival) {
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
	if b.running != nil && !slices.ContainsFunc(b.running.batch, func(a *arrival) bool { return !a.left }) {
		b.running.cancel()
	}
}

// begin calls the ManyLoader for the fills that have arrived, unless it is running: a place of
// MaxLoads is for one call. The caller holds b.mu.
func (b *bulk) begin() {
	if b.running != nil || len(b.arrived) == 0 {
		return
	}
	call := &bulkCall{batch: b.arrived}
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

func (b *bulk) run(ctx context.Context, call *bulkCall) {
	keys := make([]string, len(call.batch))
	calls := make([]*atomic.Pointer[flight.Call], len(call.batch))
	for i, a := range call.batch {
		keys[i], calls[i] = a.key, a.call
	}
	var values func(key string) (any, bool)
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
	values, err = b.load.loadMany(ctx, keys)
	returned = true
}

// end gives each fill its outcome. Only the first call counts.
func (b *bulk) end(call *bulkCall, values func(key string) (any, bool), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if call.over {
		return
	}
	call.over = true
	call.timeout.Stop()
	stores := make(map[*row]int)
	for _, a := range call.batch {
		if a.err = err; err == nil {
			var ok bool
			if a.value, ok = values(a.key); !ok {
				a.err = ErrNotFound
			}
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
func (s *seat) stores() *client.Convoy {
	if s.bulk == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.row.stores
}
