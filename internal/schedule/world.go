package schedule

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/mini"
)

// Step is the step in which time passes.
const Step = 500 * time.Millisecond

// A World is the environment of one schedule.
type World struct {
	Server *miniredis.Miniredis

	// Executed, if set, is called after the server has executed a command of a process, while
	// nothing else happens. what is the name of the command or script, and its arguments.
	Executed func(process, what string)

	// Aside, if set, reports whether it makes no difference when the server executes a command. Then
	// the command does not wait for the scheduler.
	Aside func(args []string) bool

	t        *testing.T
	explorer *explorer
	plan     Plan
	wire     *wire
	begun    time.Time
	story    []string // what has happened, for people

	mu      sync.Mutex // guards the following fields
	over    bool
	actors  int // those that are not done
	clients []*redis.Client
	waiting []*item // for the scheduler
	instant time.Time
	ticks   int // of the server's clock, at this instant
	pauses  int // that are left
	faults  int // that are left
	cancels map[string]canceller
	cut     map[string]time.Time // processes that are cut off, and until when
	history map[string]uint64    // hash of everything that a process has seen
	names   map[string]string    // of random tokens
	drawn   map[string]int       // how many of them each process has
}

// A canceller cancels the context of an actor.
type canceller struct {
	process string
	cancel  context.CancelFunc
}

func newWorld(t *testing.T, e *explorer) *World {
	w := &World{
		Server: miniredis.NewMiniRedis(),
		t:      t, explorer: e, plan: e.plan, begun: time.Now(), pauses: e.plan.Pauses, faults: e.plan.Faults,
		cancels: make(map[string]canceller), cut: make(map[string]time.Time), history: make(map[string]uint64),
		names: make(map[string]string), drawn: make(map[string]int),
	}
	w.Server.ClockTTL(true)
	t.Cleanup(func() { mini.Close(w.Server) }) // a cache of Admin may be dialling to listen
	w.wire = newWire(t, w.Server)
	return w
}

// givenUp is the panic that ends a run before its scenario ends.
type givenUp struct{}

func (w *World) run(scenario func(w *World)) {
	defer func() {
		switch p := recover(); p {
		case nil:
		case givenUp{}:
			w.end()
		default:
			panic(p)
		}
		if w.t.Failed() {
			w.t.Logf("schedule %d, %s:\n%s", w.explorer.runs, w.explorer.kind(), strings.Join(w.story, "\n"))
		}
	}()
	scenario(w)
}

// end lets all goroutines of a run that was given up end. It ignores what they find.
func (w *World) end() {
	w.mu.Lock()
	w.over = true
	for _, i := range w.waiting {
		i.goes <- false
	}
	for _, rdb := range w.clients {
		_ = rdb.Close()
	}
	w.mu.Unlock()
	time.Sleep(time.Hour)
}

// Errorf fails the schedule.
func (w *World) Errorf(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over {
		w.t.Errorf("%8v  "+format, append([]any{time.Since(w.begun)}, args...)...)
	}
}

// Go starts an actor of a process, which begins when the scheduler picks it. Its ctx is cancelled
// only if the plan says so.
func (w *World) Go(process, name string, run func(ctx context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	w.mu.Lock()
	defer w.mu.Unlock()
	w.actors++
	if slices.Contains(w.plan.Cancel, name) {
		w.cancels[name] = canceller{process, cancel}
	}
	go func() {
		defer w.done(name, cancel)
		w.At(process, name+" begins")
		run(ctx)
	}()
}

func (w *World) done(name string, cancel context.CancelFunc) {
	cancel()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.actors--
	delete(w.cancels, name)
}

// At waits until the scheduler lets process continue.
func (w *World) At(process, what string) {
	w.wait(&item{process: process, kind: point, what: what})
}

// Note adds something to the state of process that the checks of a scenario depend on, and that
// does not follow from what single processes have seen.
func (w *World) Note(process, what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.saw(process, "notes "+what)
}

// wait waits for the scheduler, and reports whether the item may continue.
func (w *World) wait(i *item) bool {
	i.goes = make(chan bool, 1)
	w.mu.Lock()
	if w.over {
		i.goes <- false
	} else {
		w.waiting = append(w.waiting, i)
	}
	w.mu.Unlock()
	return <-i.goes
}

// Run lets things happen until all actors are done and nothing waits.
func (w *World) Run() { w.Settle(0) }

// limit is how long actors may wait for anything to happen.
const limit = 10 * time.Minute

// Settle is Run, and then lets time pass until nothing has happened for d.
func (w *World) Settle(d time.Duration) {
	for idle := time.Duration(0); ; {
		synctest.Wait()
		options, busy := w.options()
		if len(options) > 0 {
			picked, ok := w.explorer.choose(options, w.state)
			if !ok {
				panic(givenUp{})
			}
			o := options[picked]
			w.story = append(w.story, fmt.Sprintf("%8v  %.400s", time.Since(w.begun), o.what))
			if w.do(o) {
				idle = 0
				continue
			}
		}
		switch {
		case !busy && idle >= d:
			return
		case idle > d+limit:
			w.Errorf("nothing has happened for %v", idle)
			panic(givenUp{})
		}
		time.Sleep(Step)
		w.tick()
		idle += Step
	}
}

// tick makes every command arrive a microsecond after the previous one, by the server's clock.
func (w *World) tick() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now := time.Now(); !now.Equal(w.instant) {
		w.instant, w.ticks = now, 0
	}
	w.ticks++
	w.Server.SetTime(w.instant.Add(time.Duration(w.ticks) * time.Microsecond))
}

// do reports whether the option takes no time.
func (w *World) do(o option) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if o.pass != nil {
		o.pass()
		return false
	}
	o.do()
	return true
}
