package histories

import (
	"fmt"
	"maps"
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
	users  [processes]string // of every other batch
	caches bool              // histories of caches, some of them with Near

	hits                  map[string]int // faults
	nearHits              int64
	histories, operations atomic.Int64 // that were checked
	next                  atomic.Int64 // number of the next history
	stopped               atomic.Bool  // a history was bad
}

// run runs and judges the histories.
func (s *suite) run(count, batch, atOnce int) {
	s.t.Parallel()
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	s.hits = make(map[string]int)
	begun := time.Now()
	users := s.users
	if users != everyone {
		batch = min(batch, (count+1)/2)
	}
	for first := 0; first < count && !s.stopped.Load(); first += batch {
		last := min(first+batch, count)
		s.t.Run(fmt.Sprintf("%d to %d", first+1, last), func(t *testing.T) { s.batch(t, users, seed, first, last, atOnce) })
		if users == s.users {
			users = everyone
		} else {
			users = s.users
		}
	}
	if s.caches && count >= 30 && s.nearHits == 0 {
		s.t.Error("no value was served from memory")
	}
	s.t.Logf("seed %d, %v: %d histories of %d operations agree with their models", seed, time.Since(begun).Round(time.Second),
		s.histories.Load(), s.operations.Load())
	for _, fault := range slices.Sorted(maps.Keys(s.hits)) {
		s.t.Logf("%8d  fault: %s", s.hits[fault], fault)
	}
}

// everyone has the users of processes that all are the default user.
var everyone [processes]string

func (s *suite) batch(t *testing.T, users [processes]string, seed uint64, first, last, atOnce int) {
	timeouts := calm
	if s.faults {
		timeouts = hasty
	}
	f := newFleet(t, timeouts, s.faults, users)
	f.caches = s.caches
	scriptsOnly := func() bool { return slices.Contains(users[:], noScripts) && f.server.Calls("watch") == 0 }
	all, more := last-first >= allFaults, func() bool { return false }
	if s.faults {
		g := f.injectFaults(seed + uint64(first))
		missing := func() bool { return g.missing() != "" || scriptsOnly() }
		more = func() bool { return all && missing() && s.next.Load() < int64(last+30*atOnce) }
		defer func() {
			hits := g.stopped()
			for fault, n := range hits {
				s.hits[fault] += n
			}
			switch fault := g.missing(); {
			case t.Failed():
			case len(hits) == 0:
				t.Error("no fault came about")
			case all && fault != "":
				t.Errorf("fault %q never came about", fault)
			}
		}()
	}
	s.next.Store(int64(first))
	var workers sync.WaitGroup
	for range atOnce {
		workers.Go(func() {
			for !s.stopped.Load() {
				i := int(s.next.Add(1)) - 1
				if i >= last && !more() {
					return
				}
				s.one(t, f, seed, i)
			}
		})
	}
	workers.Wait()
	if trouble := f.firstTrouble(); trouble != "" && !s.faults {
		t.Errorf("an error where nothing had failed: %s", trouble)
	}
	s.nearHits += f.mostNearHits()
	if f.server.Calls("ssubscribe") == 0 && users == everyone && last-first >= 30 {
		t.Error("no process has listened for wake-ups")
	}
	if scriptsOnly() && (all || !s.faults) {
		t.Error("nobody has had to do without scripts")
	}
}

// one runs and judges one history.
func (s *suite) one(t *testing.T, f *fleet, seed uint64, i int) {
	hseed := rand.New(rand.NewPCG(seed, uint64(i))).Uint64()
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
