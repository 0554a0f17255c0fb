package schedule

import (
	"cmp"
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

	// Executed, if set, is called after the server has executed a command, while nothing else happens.
	Executed func()

	// Aside, if set, reports whether it makes no difference when the server executes a command. Then
	// the command does not wait for the scheduler.
	Aside func(args []string) bool

	t        *testing.T
	explorer *explorer
	wire     *wire
	begun    time.Time
	story    []string // what has happened, for people

	mu      sync.Mutex // guards the following fields
	over    bool
	actors  int // those that are not done
	clients []*redis.Client
	waiting []*item // for the scheduler
	instant time.Time
	ticks   int               // of the server's clock, at this instant
	history map[string]uint64 // hash of everything that a process has seen
	names   map[string]string // of random tokens
	drawn   map[string]int    // how many of them each process has
}

// An item waits for the scheduler.
type item struct {
	process string
	kind    kind
	what    string
	goes    chan bool // true: it continues; false: it never will
}

type kind int

const (
	point kind = iota
	request
	reply
)

func (i *item) String() string {
	return i.process + [...]string{" ", " asks: ", " is told: "}[i.kind] + i.what
}

func newWorld(t *testing.T, e *explorer) *World {
	w := &World{
		Server: miniredis.NewMiniRedis(),
		t:      t, explorer: e, begun: time.Now(), history: make(map[string]uint64),
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

// Go starts an actor of a process, which begins when the scheduler picks it.
func (w *World) Go(process, name string, run func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.actors++
	go func() {
		defer func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.actors--
		}()
		w.At(process, name+" begins")
		run()
	}()
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

// limit is how long actors may wait for anything to happen.
const limit = 10 * time.Minute

// Run lets things happen until all actors are done and nothing waits.
func (w *World) Run() {
	for idle := time.Duration(0); ; {
		synctest.Wait()
		items, busy := w.items()
		if len(items) > 0 {
			picked, ok := w.explorer.choose(items, w.state)
			if !ok {
				panic(givenUp{})
			}
			w.story = append(w.story, fmt.Sprintf("%8v  %.400s", time.Since(w.begun), items[picked]))
			w.goOn(items[picked])
			idle = 0
			continue
		}
		switch {
		case !busy:
			return
		case idle > limit:
			w.Errorf("nothing has happened for %v", idle)
			panic(givenUp{})
		}
		time.Sleep(Step)
		w.tick()
		idle += Step
	}
}

// items returns what waits, in an order that is the same when the schedule is repeated. busy reports
// whether anything can still happen if nothing does.
func (w *World) items() (items []*item, busy bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	slices.SortStableFunc(w.waiting, func(a, b *item) int {
		return cmp.Or(strings.Compare(a.process, b.process), int(a.kind-b.kind), strings.Compare(a.what, b.what))
	})
	return slices.Clone(w.waiting), w.actors > 0
}

// goOn lets an item continue.
func (w *World) goOn(i *item) {
	w.mu.Lock()
	defer w.mu.Unlock()
	at := slices.Index(w.waiting, i)
	w.waiting = slices.Delete(w.waiting, at, at+1)
	if i.kind != request { // a request that arrives shows its process nothing yet
		w.saw(i.process, i.String())
	}
	i.goes <- true
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
