package flight

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func newSlot(p *Slots) *Slot { return p.NewSlot(new(Load)) }

// holding returns a slot that has a place.
func holding(t *testing.T, p *Slots) *Slot {
	t.Helper()
	s := newSlot(p)
	if !s.Try(false) || !s.Held() {
		t.Fatal("there is no place")
	}
	return s
}

// queueing returns a slot in the queue.
func queueing(t *testing.T, p *Slots) (*Slot, <-chan struct{}) {
	t.Helper()
	s := newSlot(p)
	if s.Try(false) {
		t.Fatal("there is a place")
	}
	return s, s.Queue()
}

// nested returns a slot for whose load the loads of outer wait.
func nested(t *testing.T, p *Slots, outer ...*Slot) *Slot {
	t.Helper()
	s := newSlot(p)
	for _, o := range outer {
		if !o.load.waitFor(s.load) {
			t.Fatal("waiting is refused")
		}
	}
	return s
}

func wantFree(t *testing.T, p *Slots, n int) {
	t.Helper()
	if p.free != n || p.Queued() != 0 {
		t.Errorf("%d places are free and %d fills queue, want %d and 0", p.free, p.Queued(), n)
	}
}

// Without a limit every fill has a place.
func TestSlots_NoLimit(t *testing.T) {
	t.Parallel()
	p := NewSlots(0)
	for range 100 {
		holding(t, p)
	}
}

// No more than the limit have a place, and each has it once and gives it back once.
func TestSlots_Limit(t *testing.T) {
	t.Parallel()
	p := NewSlots(2)
	a, b := holding(t, p), holding(t, p)
	c := newSlot(p)
	if !a.Try(false) || c.Try(false) || c.Try(true) || c.Held() {
		t.Error("want places for two, also when they try again, and none for a third")
	}
	a.Release()
	a.Release()
	if !c.Try(false) || a.Try(false) {
		t.Error("want one place after Release, not two")
	}
	b.Release()
	c.Release()
	wantFree(t, p, 2)
}

// Places are granted in the order of the queue, and a newcomer does not overtake it.
func TestSlots_FirstComeFirstServed(t *testing.T) {
	t.Parallel()
	p := NewSlots(1)
	holder := holding(t, p)
	var slots []*Slot
	for i := range 10 {
		s, granted := queueing(t, p)
		if s.Queue() != granted || p.Queued() != i+1 {
			t.Error("a fill that queues queues again")
		}
		slots = append(slots, s)
	}
	for i, s := range slots {
		granted := s.granted
		if s.Try(false) {
			t.Errorf("number %d has a place while another fill holds it", i)
		}
		holder.Release()
		for j, other := range slots[i:] {
			if other.Held() != (j == 0) {
				t.Errorf("after %d turns number %d has a place: %t", i, i+j, other.Held())
			}
		}
		if len(granted) != 1 || newSlot(p).Try(false) {
			t.Error("the first in the queue is not told, or a newcomer overtakes it")
		}
		holder = s
	}
	holder.Release()
	wantFree(t, p, 1)
}

// A fill that leaves the queue loses no place, and takes none along.
func TestSlots_LeavingTheQueue(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"before its turn", "when granted"} {
		t.Run(when, func(t *testing.T) {
			p := NewSlots(1)
			holder := holding(t, p)
			s, _ := queueing(t, p)
			next, granted := queueing(t, p)
			if when == "before its turn" {
				s.Release()
				holder.Release()
			} else {
				holder.Release()
				s.Release()
			}
			if len(granted) != 1 || !next.Held() || s.Held() {
				t.Error("the next fill has no place")
			}
			next.Release()
			wantFree(t, p, 1)
		})
	}
}

// A load lends its place to one load at a time that it waits for, and to the next when that one ends.
func TestSlots_Lend(t *testing.T) {
	t.Parallel()
	p := NewSlots(1)
	outer := holding(t, p)
	inner := make([]*Slot, 5)
	for i := range inner {
		inner[i] = nested(t, p, outer)
		if got := inner[i].Try(false); got != (i == 0) {
			t.Fatalf("load %d has a place: %t", i, got)
		}
		if i > 0 {
			inner[i].Queue()
		}
	}
	for range inner {
		var running *Slot
		for _, s := range inner {
			if s.Held() && running != nil {
				t.Fatal("the place is lent twice")
			} else if s.Held() {
				running = s
			}
		}
		if running == nil {
			t.Fatal("the place is not lent again")
		}
		running.Release()
		outer.load.leave(running.load)
	}
	if outer.lentTo != nil || !outer.Held() {
		t.Error("the lender has lost its place")
	}
	outer.Release()
	wantFree(t, p, 1)
}

// A load in the queue gets the place of a load that begins to wait for it.
func TestSlots_LendToTheQueue(t *testing.T) {
	t.Parallel()
	p := NewSlots(1)
	outer := holding(t, p)
	_, first := queueing(t, p)
	s, granted := queueing(t, p)
	if !outer.load.waitFor(s.load) {
		t.Fatal("waiting is refused")
	}
	if len(granted) != 1 || len(first) != 0 || p.Queued() != 1 {
		t.Error("want the place lent to the load that the holder waits for, not to the first in the queue")
	}
}

// A chain of nested loads needs one place, whatever pools they are of.
func TestSlots_Chain(t *testing.T) {
	t.Parallel()
	p, q := NewSlots(1), NewSlots(1)
	holding(t, q)
	chain := []*Slot{holding(t, p)}
	for i := range 10 {
		s := nested(t, []*Slots{p, q}[i%2], chain[i])
		if !s.Try(false) {
			t.Fatalf("load %d of the chain has no place", i)
		}
		if stranger := nested(t, p, chain[i]); stranger.Try(false) {
			t.Fatalf("the place of load %d is lent twice", i)
		}
		chain = append(chain, s)
	}
	for i := len(chain) - 1; i >= 0; i-- {
		chain[i].Release()
	}
	wantFree(t, p, 1)
}

// When a lender ends, its borrower has the place: of its own, or of the lender's lender.
func TestSlots_LenderEndsFirst(t *testing.T) {
	t.Parallel()
	for _, order := range [][]int{{0, 1, 2}, {1, 0, 2}, {1, 2, 0}, {0, 2, 1}, {2, 1, 0}, {2, 0, 1}} {
		p := NewSlots(1)
		a := holding(t, p)
		b := nested(t, p, a)
		b.Try(false)
		c := nested(t, p, b)
		c.Try(false)
		slots := []*Slot{a, b, c}
		waiting, granted := queueing(t, p)
		for i, n := range order {
			if len(granted) != 0 {
				t.Errorf("order %v: the place is free with %d loads in it", order, len(order)-i)
			}
			slots[n].Release()
		}
		if len(granted) != 1 {
			t.Errorf("order %v: the place is lost", order)
		}
		waiting.Release()
		wantFree(t, p, 1)
	}
}

// A borrower whose lender has ended lends the place on to what it waits for.
func TestSlots_LendingAfterTheLendersEnd(t *testing.T) {
	t.Parallel()
	p := NewSlots(1)
	a := holding(t, p)
	b := nested(t, p, a)
	b.Try(false)
	a.Release()
	c, d := nested(t, p, b), nested(t, p, b)
	if !c.Try(false) || d.Try(false) {
		t.Error("want the place lent once")
	}
	granted := d.Queue()
	c.Release()
	if len(granted) != 1 {
		t.Error("the place is not lent again")
	}
}

// A load that has given back its place lends nothing, however long its context is kept.
func TestSlots_LoadThatIsOver(t *testing.T) {
	t.Parallel()
	p := NewSlots(1)
	over := holding(t, p)
	over.Release()
	other := holding(t, p)
	for range 3 {
		s := nested(t, p, over)
		if s.Try(false) || len(s.Queue()) != 0 {
			t.Error("a load runs in the place of one that is over")
		}
	}
	other.Release()
	if p.Queued() != 2 {
		t.Errorf("%d loads queue, want 2", p.Queued())
	}
}

// A load that several holders wait for runs in the place of one of them; the others can lend theirs.
func TestSlots_SeveralLenders(t *testing.T) {
	t.Parallel()
	p := NewSlots(2)
	a, b := holding(t, p), holding(t, p)
	shared := nested(t, p, a, b)
	if !shared.Try(false) {
		t.Fatal("no place is lent")
	}
	if s := nested(t, p, a, b); !s.Try(false) {
		t.Error("the second place is not lent")
	}
	if s := nested(t, p, a, b); s.Try(false) {
		t.Error("a place is lent twice")
	}
}

// Nested loads.

// A world is two caches whose loads ask for other keys.
type world struct {
	caches  [2]*Fills[string]
	pools   [2]*Slots
	places  int64
	asks    [][][]int // by key: groups of keys; a group of several is asked for in goroutines
	loaded  []atomic.Bool
	running atomic.Int64 // loads that wait for no other one
	tooMany atomic.Bool
	refused atomic.Int64
}

func newWorld(rnd *rand.Rand, keys, pools int, ask func(key int) [][]int) *world {
	w := &world{asks: make([][][]int, keys), loaded: make([]atomic.Bool, keys)}
	clock := new(Clock)
	for i := range w.caches {
		w.caches[i] = NewFills[string](clock)
		w.pools[i] = w.pools[0]
		if i < pools {
			n := 1 + rnd.IntN(3)
			w.pools[i] = NewSlots(n)
			w.places += int64(n)
		}
	}
	for key := range w.asks {
		w.asks[key] = ask(key)
	}
	return w
}

func (w *world) run(n int64) {
	if w.running.Add(n) > w.places {
		w.tooMany.Store(true)
	}
}

func (w *world) get(ctx context.Context, key int) {
	if w.loaded[key].Load() {
		return
	}
	g := w.caches[key%2]
	waiter, err := g.Join(fmt.Sprint(key), &Caller{Outer: LoadOf(ctx)}, func(f *Fill[string], over func()) {
		w.fill(ctx, f, key)
		over()
	})
	if err != nil {
		w.refused.Add(1)
		return
	}
	g.Wait(ctx, waiter)
}

func (w *world) fill(ctx context.Context, f *Fill[string], key int) {
	g, s := w.caches[key%2], w.pools[key%2].NewSlot(&f.Load)
	if !s.Try(false) {
		select {
		case <-s.Queue():
		case <-ctx.Done():
		}
	}
	ctx = f.Load.Inside(ctx)
	g.BeginLoad(f, func() {})
	w.run(+1)
	time.Sleep(time.Duration(key%3) * time.Millisecond)
	for _, group := range w.asks[key] {
		w.run(-1)
		if len(group) == 1 {
			w.get(ctx, group[0])
		} else {
			var wg sync.WaitGroup
			for _, other := range group {
				wg.Go(func() { w.get(ctx, other) })
			}
			wg.Wait()
		}
		w.run(+1)
		time.Sleep(time.Millisecond)
	}
	w.run(-1)
	w.loaded[key].Store(true)
	s.Release()
	endWith(g, f, "v", Always)
}

// Loads that ask for any other keys end, unless they wait for each other in a circle, which is refused; and no
// more of them run at once than there are places.
func TestSlots_NestedLoads(t *testing.T) {
	t.Parallel()
	const keys = 12
	for name, ask := range map[string]func(rnd *rand.Rand, key int) [][]int{
		"without circles": func(rnd *rand.Rand, key int) (groups [][]int) {
			for key < keys-1 && rnd.IntN(4) > 0 && len(groups) < 3 {
				groups = append(groups, nil)
				for i := len(groups) - 1; i == len(groups)-1 && len(groups[i]) < 3; {
					groups[i] = append(groups[i], key+1+rnd.IntN(keys-key-1))
					if rnd.IntN(2) == 0 {
						break
					}
				}
			}
			return groups
		},
		"with circles": func(rnd *rand.Rand, key int) (groups [][]int) {
			for range rnd.IntN(3) {
				groups = append(groups, []int{rnd.IntN(keys)})
			}
			return groups
		},
	} {
		t.Run(name, func(t *testing.T) {
			refused := int64(0)
			for seed := range uint64(300) {
				for pools := 1; pools <= 2; pools++ {
					rnd := rand.New(rand.NewPCG(seed, uint64(pools)))
					w := newWorld(rnd, keys, pools, func(key int) [][]int { return ask(rnd, key) })
					synctest.Test(t, func(t *testing.T) { w.ask(t, seed) })
					refused += w.refused.Load()
				}
			}
			if (name == "with circles") != (refused > 0) {
				t.Errorf("%d calls were refused", refused)
			}
		})
	}
}

func (w *world) ask(t *testing.T, seed uint64) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	var callers sync.WaitGroup
	for key := range w.asks {
		callers.Go(func() { w.get(ctx, key) })
	}
	callers.Wait()
	if ctx.Err() != nil {
		t.Fatalf("seed %d: loads wait for each other: %v", seed, w.asks)
	}
	for _, g := range w.caches {
		g.Drain()
	}
	if w.tooMany.Load() {
		t.Errorf("seed %d: more loads run than there are places", seed)
	}
	free := int64(0)
	for i, p := range w.pools {
		if i == 0 || p != w.pools[0] {
			free += int64(p.free)
		}
	}
	if free != w.places {
		t.Errorf("seed %d: %d places are free at the end, want %d", seed, free, w.places)
	}
}

// Leases.

// A landlord gives leases when its test lets it.
type landlord struct {
	asked, given, back, stopped int
	let                         chan struct{}
}

func (l *landlord) lease(ctx context.Context, wait bool) (release func(), ok bool) {
	if !wait {
		return func() { l.back++ }, true
	}
	l.asked++
	select {
	case <-l.let:
		l.given++
		return func() { l.back++ }, true
	case <-ctx.Done():
		l.stopped++
		return nil, false
	}
}

func leased(n int) (*Slots, *landlord) {
	p, l := NewSlots(n), &landlord{let: make(chan struct{}, 10)}
	p.Lease = l.lease
	p.Behind = func(run func()) { go run() }
	return p, l
}

// One lease is waited for at a time, for the first fill in the queue, and each is given back with its place.
func TestSlots_OneLeaseAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, l := leased(3)
		var slots []*Slot
		for range 4 {
			s := newSlot(p)
			if s.Try(false) {
				t.Error("a place without a lease")
			}
			s.Queue()
			slots = append(slots, s)
		}
		for i, s := range slots[:3] {
			synctest.Wait()
			if l.asked != i+1 || s.Held() {
				t.Errorf("%d leases have been asked for, want %d", l.asked, i+1)
			}
			l.let <- struct{}{}
			synctest.Wait()
			if !s.Held() {
				t.Errorf("number %d has no place", i)
			}
		}
		if l.asked != 3 || p.Queued() != 1 {
			t.Errorf("%d leases have been asked for with three places", l.asked)
		}
		slots[0].Release()
		synctest.Wait()
		l.let <- struct{}{}
		synctest.Wait()
		for _, s := range slots[1:] {
			if !s.Held() {
				t.Error("a fill in the queue has no place")
			}
			s.Release()
		}
		if l.given != 4 || l.back != 4 {
			t.Errorf("%d leases given, %d given back, want 4", l.given, l.back)
		}
		wantFree(t, p, 3)
	})
}

// When the queue has emptied, a lease is not waited for any more; one that comes all the same is given back.
func TestSlots_LeaseForAnEmptyQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, l := leased(1)
		s := newSlot(p)
		s.Queue()
		synctest.Wait()
		s.Release()
		synctest.Wait()
		if l.stopped != 1 {
			t.Error("a lease is still waited for")
		}
		wantFree(t, p, 1)

		ignoresItsEnd := l.lease
		p.Lease = func(_ context.Context, wait bool) (func(), bool) { return ignoresItsEnd(t.Context(), wait) }
		s.Queue()
		s.Release()
		l.let <- struct{}{}
		synctest.Wait()
		if l.given != 1 || l.back != 1 {
			t.Errorf("%d leases given, %d given back, want 1", l.given, l.back)
		}
		wantFree(t, p, 1)
	})
}

// A fill that queues just as the lease for an emptied queue is stopped gets one.
func TestSlots_LeaseForANewQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, l := leased(1)
		s := newSlot(p)
		s.Queue()
		synctest.Wait()
		s.Release()
		next := newSlot(p)
		next.Queue()
		l.let <- struct{}{}
		synctest.Wait()
		if !next.Held() {
			t.Error("the new one has no place")
		}
		next.Release()
		wantFree(t, p, 1)
	})
}

// Without a lease to wait for, TryLease has a place or none at once, and a place without a lease needs local.
func TestSlots_TryLease(t *testing.T) {
	t.Parallel()
	p, l := leased(1)
	s, other := newSlot(p), newSlot(p)
	if !s.TryLease(t.Context()) || !s.TryLease(t.Context()) || other.TryLease(t.Context()) {
		t.Error("want a place for one")
	}
	s.Release()
	if l.back != 1 {
		t.Error("the lease is not given back")
	}
	p.Lease = func(context.Context, bool) (func(), bool) { return nil, false }
	if s.TryLease(t.Context()) || s.Try(false) {
		t.Error("a place without a lease")
	}
	wantFree(t, p, 1)
	if !s.Try(true) || other.Try(true) {
		t.Error("want a local place for one")
	}
	s.Release()
	wantFree(t, p, 1)
}

// A place that is free belongs to the fills that queue for a lease. Only one that needs no lease passes them.
func TestSlots_TryLeaseBehindAQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, l := leased(3)
		first := newSlot(p)
		first.Queue()
		synctest.Wait()
		s := newSlot(p)
		if s.TryLease(t.Context()) {
			t.Error("a fill that does not queue has a place before one that does")
		}
		if !s.Try(true) {
			t.Error("a fill that needs no lease has no place")
		}
		s.Release()
		l.let <- struct{}{}
		synctest.Wait()
		if !first.Held() {
			t.Error("the first fill has no place")
		}
		first.Release()
		wantFree(t, p, 3)
	})
}

// A nested load needs no lease, and its place keeps the lease of the lender that has ended.
func TestSlots_LentLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, l := leased(1)
		outer := newSlot(p)
		outer.TryLease(t.Context())
		inner := nested(t, p, outer)
		if !inner.Try(false) {
			t.Fatal("no place is lent")
		}
		outer.Release()
		synctest.Wait()
		if l.back != 0 {
			t.Error("the lease is given back with a load in its place")
		}
		inner.Release()
		synctest.Wait()
		if l.back != 1 {
			t.Error("the lease is not given back")
		}
		wantFree(t, p, 1)
	})
}
