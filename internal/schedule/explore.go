package schedule

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"testing/synctest"
	"time"
)

// A Plan configures Explore.
type Plan struct {
	// AtLeast fails a test that ran fewer schedules: a scheduler that schedules nothing must not
	// pass.
	AtLeast int

	// Sample, if not 0, is the number of random schedules to try instead of all. The seed is
	// printed; it is 1 unless SCHEDULE_SEED is set in the environment. SCHEDULES in the environment
	// multiplies the number.
	Sample int

	// Together makes a command and its reply one step, where the time between them does not matter.
	Together bool
}

// Explore runs scenario under all schedules of plan, or a sample of them, and stops at the first
// that fails. Each time the scenario creates clients, actors and what they share, calls Run, and
// checks the result. It must not have subtests, nor share anything between runs.
func Explore(t *testing.T, plan Plan, scenario func(w *World)) {
	t.Helper()
	e := &explorer{plan: plan, seen: make(map[uint64]bool), seed: variable("SCHEDULE_SEED", 1)}
	e.plan.Sample *= int(variable("SCHEDULES", 1))
	begun := time.Now()
	for again := true; again; again = !t.Failed() && e.next() {
		e.begin()
		synctest.Test(t, func(t *testing.T) { newWorld(t, e).run(scenario) })
	}
	t.Logf("%d schedules, %s: %d states, %d choices, %d lost, in %v",
		e.runs, e.kind(), len(e.seen), e.choices, e.lost, time.Since(begun).Round(time.Millisecond))
	if complaint := e.complaint(); complaint != "" && !t.Failed() {
		t.Error(complaint)
	}
}

func variable(name string, otherwise uint64) uint64 {
	n, err := strconv.ParseUint(os.Getenv(name), 10, 64)
	if err != nil {
		return otherwise
	}
	return n
}

// An explorer explores choices depth first: it repeats the previous run up to the last choice that
// has an alternative left, and takes that alternative.
type explorer struct {
	plan    Plan
	seed    uint64
	random  *rand.Rand // for a sample
	path    []choice
	at      int             // position of the run on path
	seen    map[uint64]bool // states
	runs    int
	choices int
	lost    int // runs that met other choices than the run they repeat
}

type choice struct {
	taken, of int
	options   uint64 // a hash of them
}

func (e *explorer) begin() {
	e.at = 0
	if e.plan.Sample > 0 {
		e.random = rand.New(rand.NewPCG(e.seed, uint64(e.runs)))
	}
	e.runs++
}

// choose picks one of items. ok is false if they lead to nothing new. state returns the state of
// the run.
func (e *explorer) choose(items []*item, state func() uint64) (picked int, ok bool) {
	if len(items) == 1 {
		return 0, true
	}
	e.choices++
	if e.random != nil {
		e.seen[state()] = true
		return e.random.IntN(len(items)), true
	}
	options := hash(items)
	if e.at < len(e.path) {
		c := e.path[e.at]
		if c.options != options {
			e.lost++
			e.path = e.path[:e.at]
			return 0, false
		}
		e.at++
		return c.taken, true
	}
	s := state()
	if e.seen[s] { // what follows it has been explored, or will be
		return 0, false
	}
	e.seen[s] = true
	e.path = append(e.path, choice{0, len(items), options})
	e.at++
	return 0, true
}

// next moves the path to the next alternative, and reports whether there is one.
func (e *explorer) next() bool {
	if e.plan.Sample > 0 {
		return e.runs < e.plan.Sample
	}
	for len(e.path) > 0 {
		last := &e.path[len(e.path)-1]
		if last.taken++; last.taken < last.of {
			return true
		}
		e.path = e.path[:len(e.path)-1]
	}
	return false
}

func (e *explorer) kind() string {
	if e.plan.Sample > 0 {
		return fmt.Sprintf("at random (SCHEDULE_SEED=%d)", e.seed)
	}
	return "all"
}

// complaint returns why the exploration proves less than it should, or "".
func (e *explorer) complaint() string {
	switch {
	case e.runs < e.plan.AtLeast:
		return fmt.Sprintf("only %d schedules, want at least %d: does anything wait for the scheduler?",
			e.runs, e.plan.AtLeast)
	// Some are lost because of how long a command has waited, which affects its waiter.
	case e.lost > e.runs/5:
		return fmt.Sprintf("%d of %d schedules were lost, because something else than the schedule decides", e.lost, e.runs)
	}
	return ""
}
