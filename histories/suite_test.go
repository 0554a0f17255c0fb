package histories

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// A suite is many histories of one kind.
type suite struct {
	t      *testing.T
	plan   func(rng *rand.Rand, faults bool) plan
	judge  func(f *fleet, p plan, ops []op, faults bool) (claims []claim, err error)
	faults bool
	caches bool // histories of caches, some of them with Near

	seed                  uint64
	hits                  map[string]int // faults
	nearHits              int64
	histories, operations atomic.Int64 // that were checked
	stopped               atomic.Bool  // a history was bad
}

// run runs and judges the histories. In every other batch of the caches a process has no right to run scripts.
func (s *suite) run(count, batch, atOnce int) {
	s.t.Parallel()
	s.seed = cmp.Or(*seedFlag, rand.Uint64())
	s.hits = make(map[string]int)
	begun := time.Now()
	if s.caches {
		batch = min(batch, (count+1)/2)
	}
	user := ""
	for first := 0; first < count && !s.stopped.Load(); first += batch {
		last := min(first+batch, count)
		if user = ""; s.caches && first/batch%2 == 0 {
			user = noScripts
		}
		s.t.Run(fmt.Sprintf("%d to %d", first+1, last), func(t *testing.T) { s.batch(t, user, first, last, atOnce) })
	}
	if s.caches && count >= 30 && s.nearHits == 0 {
		s.t.Error("no value was served from memory")
	}
	s.t.Logf("seed %d, %v: %d histories of %d operations agree with their models", s.seed, time.Since(begun).Round(time.Second),
		s.histories.Load(), s.operations.Load())
	for _, fault := range slices.Concat(faultsOf(s.caches)...) {
		if s.faults {
			s.t.Logf("%8d  fault: %s", s.hits[fault], fault)
		}
		if s.faults && s.hits[fault] == 0 && count >= allFaults && !s.t.Failed() {
			s.t.Errorf("fault %q never came about", fault)
		}
	}
}

// batch runs the histories of one fleet, whose last process is the Redis user.
func (s *suite) batch(t *testing.T, user string, first, last, atOnce int) {
	f := newFleet(t, s.faults, user)
	if s.faults {
		g := f.injectFaults(s.seed+uint64(first), faultsOf(s.caches))
		defer func() {
			for fault, n := range g.stopped() {
				s.hits[fault] += n
			}
		}()
	}
	var next atomic.Int64
	next.Store(int64(first))
	var workers sync.WaitGroup
	for range atOnce {
		workers.Go(func() {
			for !s.stopped.Load() {
				i := int(next.Add(1)) - 1
				if i >= last {
					return
				}
				s.one(t, f, i)
			}
		})
	}
	workers.Wait()
	trouble, nearHits := f.heard()
	s.nearHits += nearHits
	if s.faults { // which may keep anything from happening
		return
	}
	if trouble != "" {
		t.Errorf("an error where nothing had failed: %s", trouble)
	}
	if user == "" && last-first >= 30 && f.server.Calls("ssubscribe") == 0 {
		t.Error("no process has listened for wake-ups")
	}
	if user == noScripts && f.server.Calls("watch") == 0 {
		t.Error("nobody has had to do without scripts")
	}
}

// one runs and judges one history.
func (s *suite) one(t *testing.T, f *fleet, i int) {
	hseed := rand.New(rand.NewPCG(s.seed, uint64(i))).Uint64()
	p := s.plan(rand.New(rand.NewPCG(hseed, 0)), s.faults)
	p.History, p.Seed, p.Name = i, hseed, fmt.Sprintf("%d", i)
	ops, err := f.run(p)
	if err != nil {
		s.fail(t, p, ops, claim{}, err.Error())
		return
	}
	claims, err := s.judge(f, p, ops, s.faults)
	if err != nil {
		s.fail(t, p, ops, claim{}, err.Error())
		return
	}
	for _, c := range claims {
		if result := porcupine.CheckOperationsTimeout(c.model, c.ops, checkLimit); result != porcupine.Ok {
			s.fail(t, p, ops, c, fmt.Sprintf("model %q: %s", c.name, result))
			return
		}
	}
	s.histories.Add(1)
	s.operations.Add(int64(len(ops)))
}

func (s *suite) fail(t *testing.T, p plan, ops []op, c claim, why string) {
	if s.stopped.Swap(true) {
		return
	}
	dir, err := c.write(p, ops)
	if err != nil {
		t.Error(err)
	}
	t.Errorf("history %d (%s), of %d made so far: %s\nsee %s", p.History, p.Of, s.histories.Load(), why, dir)
}
