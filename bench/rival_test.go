package bench

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A rival is a process that competes with others for a lock.
type rival struct {
	id      string
	holder  string // path of a file with the id of the last holder
	sent    commands
	lockers []locker
}

// A contest is an order to rivals.
type contest struct {
	Locker  string        // see lockers
	Name    string        // of the lock
	Waiters int           // goroutines of each process
	Hold    time.Duration // how long each lease is held
	Once    bool          // each goroutine holds it once

	// Commands are counted between these times. The contest begins before and ends after them.
	From, Until time.Time
}

// An outcome is the reply of a rival, and of all rivals together.
type outcome struct {
	Turns    []turn // in the order of time
	Commands int64
}

// A turn is one lease. Times of different processes agree, since they run on one machine.
type turn struct {
	Acquired time.Time // when Acquire returned
	Released time.Time // when Release was called
}

// margin is how long before and after the measured time a contest goes on.
const margin = 200 * time.Millisecond

const rivalRole = "rival"

func init() { redistest.Role(rivalRole, runRival) }

// spawnRivals starts processes.
func spawnRivals(b *testing.B, s *redistest.Server, n int) []*redistest.Process {
	holder := filepath.Join(b.TempDir(), "holder")
	rivals := make([]*redistest.Process, n)
	for i := range rivals {
		rivals[i] = redistest.Spawn(b, rivalRole, s.Addr, holder, strconv.Itoa(i))
	}
	for _, p := range rivals {
		p.Expect("ready")
	}
	return rivals
}

// start begins a contest, and returns a function that waits for its end, and returns what the rivals
// report together.
func (c contest) start(rivals []*redistest.Process) (end func() outcome) {
	for _, p := range rivals {
		p.Order(c)
	}
	return func() (all outcome) {
		for _, p := range rivals {
			var o outcome
			p.Hear(&o)
			all.Turns = append(all.Turns, o.Turns...)
			all.Commands += o.Commands
		}
		slices.SortFunc(all.Turns, func(a, b turn) int { return a.Acquired.Compare(b.Acquired) })
		return all
	}
}

func runRival(p *redistest.Child) {
	r := &rival{holder: p.Args[1], id: p.Args[2]}
	rdb := dialed(p.Args[0], r.sent.count)
	must(rdb.Ping(context.Background()).Result())
	r.lockers = lockers(rdb)
	p.Say("ready")
	for c := range redistest.Orders[contest](p) {
		p.Report(r.join(c))
	}
}

// join takes part in a contest.
func (r *rival) join(c contest) outcome {
	ctx, cancel := context.WithDeadline(context.Background(), c.Until.Add(margin))
	defer cancel()
	i := slices.IndexFunc(r.lockers, func(l locker) bool { return l.name == c.Locker })
	acquire := r.lockers[i].lock(c.Name)
	turns := make([][]turn, c.Waiters)
	var all sync.WaitGroup
	for i := range turns {
		all.Go(func() { turns[i] = r.compete(ctx, acquire, c) })
	}
	over := make(chan struct{})
	go func() {
		all.Wait()
		close(over)
	}()
	time.Sleep(time.Until(c.From))
	before := r.sent.n.Load()
	select {
	case <-time.After(time.Until(c.Until)):
	case <-over:
	}
	sent := r.sent.n.Load() - before
	<-over
	return outcome{slices.Concat(turns...), sent}
}

// compete acquires and releases until ctx ends, or once. After a release it waits until another
// process holds the lock, which would otherwise not be handed over.
func (r *rival) compete(ctx context.Context, acquire acquirer, c contest) (turns []turn) {
	for {
		release, err := acquire(ctx)
		if ctx.Err() != nil && err != nil {
			return turns
		}
		must(release, err)
		t := turn{Acquired: time.Now()}
		if !c.Once {
			must(0, os.WriteFile(r.holder, []byte(r.id), 0o600))
		}
		time.Sleep(c.Hold)
		t.Released = time.Now()
		must(0, release(context.Background()))
		turns = append(turns, t)
		if c.Once {
			return turns
		}
		for string(must(os.ReadFile(r.holder))) == r.id {
			if ctx.Err() != nil {
				return turns
			}
			time.Sleep(500 * time.Microsecond)
		}
	}
}
