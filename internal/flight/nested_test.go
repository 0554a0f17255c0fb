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

// A world is two caches whose loads call for other keys.
type world struct {
	caches  [2]*Fills[string]
	pools   [2]*Slots
	slots   int64
	asks    [][][]int // by key: groups of keys; a group of several is called for in goroutines
	loaded  []atomic.Bool
	running atomic.Int64 // loads that wait for no other load
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
			w.pools[i] = NewSlots(n, nil)
			w.slots += int64(n)
		}
	}
	for key := range w.asks {
		w.asks[key] = ask(key)
	}
	return w
}

func (w *world) run(n int64) {
	if w.running.Add(n) > w.slots {
		w.tooMany.Store(true)
	}
}

func (w *world) get(ctx context.Context, key int) {
	if w.loaded[key].Load() {
		return
	}
	g := w.caches[key%2]
	waiter := join(g, fmt.Sprint(key), &Caller{Outer: LoadOf(ctx)}, func(f *Fill[string], l *Load, over func()) {
		w.fill(ctx, f, l, key)
		over()
	})
	if waiter.Err != nil {
		w.refused.Add(1)
		return
	}
	wait(ctx, g, waiter)
}

func (w *world) fill(ctx context.Context, f *Fill[string], l *Load, key int) {
	g, s := w.caches[key%2], w.pools[key%2].NewSlot(l)
	if !s.Try(false) {
		select {
		case <-queue(s):
		case <-ctx.Done():
		}
	}
	ctx = l.Inside(ctx)
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

// Nested loads of any keys end, unless they wait in a circle, which is refused; no more of them run
// at once than there are slots.
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
		t.Errorf("seed %d: more loads run than there are slots", seed)
	}
	free := int64(0)
	for i, p := range w.pools {
		if i == 0 || p != w.pools[0] {
			free += int64(p.free)
		}
	}
	if free != w.slots {
		t.Errorf("seed %d: %d slots are free at the end, want %d", seed, free, w.slots)
	}
}
