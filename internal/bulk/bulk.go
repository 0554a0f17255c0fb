// Package bulk gathers the loads of the fills that one call for many keys starts: one call of the
// ManyLoader works for all that hold their locks.
package bulk

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/flight"
)

// A Bulk is the load of the fills that one call starts, Options.MaxBatch of them at most. They have
// one slot, and one call of the ManyLoader works for those that hold their locks.
//
// The ManyLoader is called when each fill either holds its lock or waits for another process; a
// server that has answered none of its fills is waited for no longer than Gather. So no lock is held
// while another one is awaited, and calls with keys in common cannot lock each other out. A fill that
// gets its lock later loads with those that come at the same time.
type Bulk struct {
	load    Loader
	timeout time.Duration
	node    *flight.Load
	slot    *flight.SharedSlot
	size    int // fills

	// Protected by mu, which is taken before the mutexes of the slot and of convoys.
	mu        sync.Mutex
	undecided int          // fills that may get their locks by the commands in flight
	rows      map[int]*row // by node: see ask
	arrived   []*arrival   // fills that hold their locks, and wait for a call of the ManyLoader
	gathering *time.Timer  // calls the ManyLoader; nil: nothing has arrived
	running   *bulkCall    // nil: the ManyLoader does not run
}

// A Loader loads keys.
type Loader interface {
	// Load returns the outcome of each key. loads are the contexts that the fills of keys have given to Seat.Load.
	Load(ctx context.Context, keys []string, loads []context.Context) Outcome

	// Panicked is the outcome of a Load for so many keys that has panicked with the argument p, or has called
	// runtime.Goexit, for which p is nil.
	Panicked(p any, keys int) Outcome

	// AfterAbort calls run in its own goroutine when no load may go on, unless stop is called first.
	AfterAbort(run func()) (stop func() bool)
}

// An Outcome returns the value of a key, or why there is none.
type Outcome func(key string) (value any, err error)

// Closed is the outcome of loads that were aborted.
func Closed(string) (any, error) { return nil, flight.ErrClosed }

// ErrAbandoned is returned by Seat.Load if the Loader has taken longer than the timeout of the bulk.
var ErrAbandoned = errors.New("bulk: the Loader takes too long")

// Gather is how long fills that hold their locks wait for a server that has not answered, or for
// other fills that have waited for another process.
const Gather = 5 * time.Millisecond

// A Seat is the place of a fill in a bulk. A nil Seat is that of a fill of one key.
type Seat struct {
	bulk    *Bulk
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
	stop    func() bool // no longer aborts it
	over    bool        // protected by the mutex of the bulk
}

// New returns a bulk for fills that are about to begin. node is theirs in the graph of loads. A Loader
// that runs for longer than timeout is abandoned.
func New(load Loader, timeout time.Duration, node *flight.Load, slot *flight.SharedSlot, fills int) *Bulk {
	return &Bulk{
		load: load, timeout: timeout,
		node: node, slot: slot, size: fills, undecided: fills, rows: make(map[int]*row),
	}
}

// Node is the node of the fills in the graph of loads.
func (b *Bulk) Node() *flight.Load { return b.node }

// Seat returns a seat for a fill whose key is on a server.
func (b *Bulk) Seat(server int) *Seat {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.rows[server]
	if r == nil {
		r = &row{asks: new(client.Convoy)}
		b.rows[server] = r
	}
	return &Seat{bulk: b, row: r}
}

// Taken notes whether the fill of a seat has begun. It has not if its key has another fill.
func (b *Bulk) Taken(server int, begun bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if begun {
		b.rows[server].fills++
	} else {
		b.decide()
	}
}

// Depart is called when all fills have begun.
func (b *Bulk) Depart() {
	for _, r := range b.rows { // not changed any more
		r.asks.Expect(r.fills)
	}
}

// Node is the node of the fill in the graph of loads; nil: it gets one of its own.
func (s *Seat) Node() *flight.Load {
	if s == nil {
		return nil
	}
	return s.bulk.node
}

// Fills returns how many fills load together with this one.
func (s *Seat) Fills() int {
	if s == nil {
		return 1
	}
	return s.bulk.size
}

// NewShare returns the fill's share of the slot.
func (s *Seat) NewShare() *flight.Share { return s.bulk.slot.NewShare() }

// Asks returns with what the commands go that ask for the lock.
func (s *Seat) Asks() *client.Convoy { return s.row.asks }

// Decided notes that the fill holds its lock, or will not for now.
func (s *Seat) Decided() {
	if s == nil {
		return
	}
	s.bulk.mu.Lock()
	known := s.isKnown
	if !known {
		s.isKnown = true
		s.row.decided++
		s.bulk.decide()
	}
	s.bulk.mu.Unlock()
	if !known {
		s.row.asks.Leave() // it has asked, or will not ask together with the others
	}
}

// decide counts a fill that is decided. The caller holds b.mu.
func (b *Bulk) decide() {
	if b.undecided--; b.undecided == 0 {
		b.begin()
	}
}

// Load is the Loader of one fill: it waits for a call of the ManyLoader, whose time begins with the call.
func (s *Seat) Load(ctx context.Context, key string) (any, error) {
	a := &arrival{ctx: ctx, key: key, row: s.row, done: make(chan struct{})}
	s.bulk.arrive(a)
	s.Decided()
	stop := context.AfterFunc(ctx, func() { s.bulk.leave(a) })
	defer stop()
	<-a.done
	return a.value, a.err
}

func (b *Bulk) arrive(a *arrival) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.arrived = append(b.arrived, a)
	if b.gathering == nil {
		b.gathering = time.AfterFunc(Gather, b.gathered)
	}
}

// gathered begins, unless a server has just begun to answer.
func (b *Bulk) gathered() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.rows {
		if r.decided > 0 && r.decided < r.fills && b.gathering != nil {
			b.gathering.Reset(Gather)
			return
		}
	}
	b.begin()
}

// leave is called when no caller may have the value of a fill any more. If that is so for all of
// them, the context of the ManyLoader ends.
func (b *Bulk) leave(a *arrival) {
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
func (b *Bulk) begin() {
	if b.running != nil || len(b.arrived) == 0 {
		return
	}
	call := &bulkCall{batch: b.arrived}
	b.gathering.Stop()
	b.arrived, b.gathering = nil, nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(call.batch[0].ctx), b.timeout)
	call.cancel = cancel
	b.running = call
	b.slot.BeginLoad()
	// A ManyLoader that ignores its context is abandoned. Not context.AfterFunc, since the context also
	// ends when the fills have left, a moment before its deadline.
	call.timeout = time.AfterFunc(b.timeout, func() { b.end(call, nil) })
	call.stop = b.load.AfterAbort(func() {
		b.end(call, Closed)
		cancel()
	})
	go b.run(ctx, call)
}

func (b *Bulk) run(ctx context.Context, call *bulkCall) {
	keys := make([]string, len(call.batch))
	loads := make([]context.Context, len(call.batch))
	for i, a := range call.batch {
		keys[i], loads[i] = a.key, a.ctx
	}
	left := b.node.Begin()
	var outcome Outcome
	defer func() {
		if outcome == nil {
			outcome = b.load.Panicked(recover(), len(keys))
		}
		left()
		b.end(call, outcome)
		call.cancel()
	}()
	outcome = b.load.Load(ctx, keys, loads)
}

// end gives each fill its outcome; with nil, the Loader has been abandoned. Only the first call counts.
func (b *Bulk) end(call *bulkCall, outcome Outcome) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if call.over {
		return
	}
	call.over = true
	call.timeout.Stop()
	call.stop()
	stores := make(map[*row]int)
	for _, a := range call.batch {
		if a.err = ErrAbandoned; outcome != nil {
			a.value, a.err = outcome(a.key)
		}
		if !a.left {
			stores[a.row]++
		}
	}
	for r, n := range stores {
		r.stores = new(client.Convoy)
		r.stores.Expect(n)
	}
	for _, a := range call.batch {
		close(a.done)
	}
	b.running = nil
	b.slot.EndLoad()
	b.begin() // for fills that arrived during the call
}

// Stores returns with what the command goes that stores what Load has returned.
func (s *Seat) Stores() *client.Convoy {
	if s == nil {
		return nil
	}
	s.bulk.mu.Lock()
	defer s.bulk.mu.Unlock()
	return s.row.stores
}
