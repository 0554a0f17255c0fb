package schedule

import (
	"fmt"
	"hash/maphash"
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

	// Pauses is how many steps of time may pass in one schedule while an actor waits to begin, or
	// in At. Otherwise time passes only when nothing waits.
	Pauses int

	// Faults is how many of the following faults may happen in one schedule.
	Faults int
	// Break breaks a connection while a command is in transit: the command arrives later, without
	// a reply.
	Break  bool
	Hold   []time.Duration // a command, a reply or a point is held up for this long
	Cut    []time.Duration // a process is cut off for this long
	Cancel []string        // the context of one of these actors is cancelled

	Hit        []string // the processes affected by Break, Hold and Cut; empty: all
	OnlyPoints bool     // they affect points, not commands
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

// choose picks one of options. ok is false if they lead to nothing new. state returns the state of
// the run.
func (e *explorer) choose(options []option, state func() uint64) (picked int, ok bool) {
	if len(options) == 1 {
		return 0, true
	}
	e.choices++
	if e.random != nil {
		e.seen[state()] = true
		return e.pickRandom(options), true
	}
	hash := hashOf(options)
	if e.at < len(e.path) {
		c := e.path[e.at]
		if c.options != hash {
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
	e.path = append(e.path, choice{0, len(options), hash})
	e.at++
	return 0, true
}

// pickRandom picks at random: sometimes a fault, otherwise one of the regular options.
func (e *explorer) pickRandom(options []option) int {
	regular := 0
	for regular < len(options) && !options[regular].fault {
		regular++
	}
	if regular < len(options) && (regular == 0 || e.random.IntN(8) == 0) {
		return regular + e.random.IntN(len(options)-regular)
	}
	return e.random.IntN(regular)
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

var hashSeed = maphash.MakeSeed()

func hashOf(options []option) uint64 {
	var h maphash.Hash
	h.SetSeed(hashSeed)
	for _, o := range options {
		h.WriteString(o.what)
		h.WriteByte(0)
	}
	return h.Sum64()
}
