package histories

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// A suite is many histories of one kind.
type suite struct {
	t      *testing.T
	plan   func(rng *rand.Rand) plan
	judge  func(f *fleet, p plan, ops []op, n *tally) (claims []claim, err error)
	faults bool
	users  [processes]string // of every other batch
	caches bool              // histories of caches, some of them with Near

	n       *tally
	hits    map[string]int
	next    atomic.Int64 // number of the next history
	stopped atomic.Bool  // a history was bad
}

// run runs and judges the histories.
func (s *suite) run(count, batch, atOnce int) {
	s.t.Parallel()
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	s.n, s.hits = &tally{counts: make(map[string]int)}, make(map[string]int)
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
	if s.caches && count >= 30 && s.n.count(countNearHits) == 0 {
		s.t.Error("no value was served from memory")
	}
	s.t.Logf("seed %d, %v\n%s", seed, time.Since(begun).Round(time.Second), s.summary())
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
	if s.caches {
		for what, n := range f.counted() {
			s.n.add(what, int(n))
		}
	}
	s.n.add("wake-ups sent", int(f.server.Calls("spublish")))
	listens := f.server.Calls("ssubscribe")
	s.n.add("commands to listen", int(listens))
	if listens == 0 && users == everyone && last-first >= 30 {
		t.Error("no process has listened for wake-ups")
	}
	if scriptsOnly() && (all || !s.faults) {
		t.Error("nobody has had to do without scripts")
	}
}

// one runs and judges one history.
func (s *suite) one(t *testing.T, f *fleet, seed uint64, i int) {
	hseed := rand.New(rand.NewPCG(seed, uint64(i))).Uint64()
	p := s.plan(rand.New(rand.NewPCG(hseed, 0)))
	p.History, p.Seed, p.Name = i, hseed, fmt.Sprintf("%d", i)
	ops, err := f.run(p)
	if err != nil {
		s.fail(t, p, ops, claim{}, err.Error())
		return
	}
	s.n.add("histories", 1)
	s.n.add("histories: "+p.Of, 1)
	s.n.add("operations", len(ops))
	claims, err := s.judge(f, p, ops, s.n)
	if err != nil {
		s.fail(t, p, ops, claim{}, err.Error())
		return
	}
	begun := time.Now()
	defer func() { s.n.longest("longest search for an order, ms", time.Since(begun).Milliseconds()) }()
	for _, c := range claims {
		switch result := porcupine.CheckOperationsTimeout(c.model, c.ops, checkLimit); result {
		case porcupine.Ok:
			s.n.add("checked against the model: "+c.name, 1)
		default:
			s.fail(t, p, ops, c, fmt.Sprintf("model %q: %s", c.name, result))
			return
		}
	}
}

func (s *suite) fail(t *testing.T, p plan, ops []op, c claim, why string) {
	if s.stopped.Swap(true) {
		return
	}
	dir, err := c.write(p, ops)
	if err != nil {
		t.Error(err)
	}
	t.Errorf("history %d (%s), of %d made so far: %s\nsee %s", p.History, p.Of, s.n.count("histories"), why, dir)
}

func (s *suite) summary() string {
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	var b strings.Builder
	total := s.n.counts["histories"]
	for _, what := range slices.Sorted(maps.Keys(s.n.counts)) {
		n := s.n.counts[what]
		if strings.HasPrefix(what, "with ") {
			fmt.Fprintf(&b, "%8d  (%2.0f %%) %s\n", n, 100*float64(n)/float64(max(total, 1)), what)
		} else {
			fmt.Fprintf(&b, "%8d  %s\n", n, what)
		}
	}
	for _, fault := range slices.Sorted(maps.Keys(s.hits)) {
		fmt.Fprintf(&b, "%8d  fault: %s\n", s.hits[fault], fault)
	}
	return b.String()
}

// A tally counts what the histories have covered.
type tally struct {
	mu     sync.Mutex
	counts map[string]int // protected by mu
}

func (n *tally) add(what string, k int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.counts[what] += k
}

func (n *tally) count(what string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.counts[what]
}

func (n *tally) longest(what string, k int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.counts[what] = max(n.counts[what], int(k))
}

func (n *tally) note(what string, seen bool) {
	if seen {
		n.add(what, 1)
	}
}
