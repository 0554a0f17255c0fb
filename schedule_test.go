package singlefill_test

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/schedule"
)

// The tests in here hold in every order in which the commands of several processes can reach Redis: see package
// schedule. Where faults are added the orders may be too many, and a sample of them is run.

//go:embed internal/fill/lua/*.lua
var fillScripts embed.FS

// Whole steps of the scheduler.
const (
	stepTTL     = time.Hour
	stepLockTTL = 9 * schedule.Step
	stepTimeout = 2 * schedule.Step
	stepLoad    = 30 * time.Second
)

// The truth is what the processes of one schedule cache: it is "v1", then "v2" and so on. It knows which values a
// call may still get.
type truth struct {
	*schedule.World
	admin   *redis.Client // its commands do not wait
	opts    singlefill.Options[string]
	fails   error // what loads end with, if not nil; of one process only, if failing is one
	failing string

	mayOverlap bool // loads, since there are faults
	mayBeStale bool // the old value may be served after a change has been announced, as a stale one

	mu       sync.Mutex // guards what follows
	caches   map[string]*singlefill.Cache[string]
	version  int     // of the value
	changing int     // announcements that have begun
	changed  int     // and that have ended
	floor    int     // the version that the last of them has announced
	loads    []*load // in the order of their beginning
}

// A load runs in process, for a call that came when so many changes had been announced.
type load struct {
	process string
	changed int
	over    bool
}

func newTruth(w *schedule.World, opts singlefill.Options[string]) *truth {
	w.Scripts(fillScripts, "internal/fill/lua")
	opts.Codec, opts.Jitter, opts.EarlyRefresh = singlefill.JSON, -1, -1
	opts.LockTTL, opts.RedisTimeout, opts.LoadTimeout = stepLockTTL, stepTimeout, stepLoad
	s := &truth{World: w, admin: w.Admin(), opts: opts, version: 1, caches: make(map[string]*singlefill.Cache[string])}
	w.Executed = s.wantTTLs
	return s
}

// wantTTLs is called after each command.
func (s *truth) wantTTLs(string, string) {
	for _, key := range s.Server.Keys() {
		if s.Server.TTL(key) <= 0 {
			s.Errorf("key %q has no TTL", key)
		}
	}
}

// cache returns the one that a process has.
func (s *truth) cache(process string) *singlefill.Cache[string] {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.caches[process] == nil {
		s.opts.Trace = &singlefill.Trace{LoadDone: s.loadDone}
		s.caches[process] = s.newCache(s.Client(process))
	}
	return s.caches[process]
}

func (s *truth) newCache(rdb *redis.Client) *singlefill.Cache[string] {
	c, err := singlefill.New(rdb, "ns", stepTTL, &s.opts)
	if err != nil {
		panic(err)
	}
	return c
}

// goGet starts an actor that calls GetOrLoad.
func (s *truth) goGet(process, who string) {
	s.Go(process, who, func(ctx context.Context) { _, _ = s.get(ctx, process, who) })
}

// get calls GetOrLoad in a process, and checks what it gets.
func (s *truth) get(ctx context.Context, process, who string) (string, error) {
	s.mu.Lock()
	floor, changed := s.floor, s.changed
	s.mu.Unlock()
	s.Note(process, fmt.Sprint(who, floor, changed))
	inside := context.WithValue(ctx, changedKey{}, changed)
	v, info, err := s.cache(process).GetOrLoadInfo(inside, "k", func(context.Context, string) (string, error) {
		return s.load(process, changed)
	})
	switch {
	case err == nil && versionOf(v) < floor && !(info.Stale && s.mayBeStale):
		s.Errorf("%s got %s (%+v), but v%d had been announced when it asked", who, v, info, floor)
	case err != nil && s.fails == nil && err != ctx.Err():
		s.Errorf("%s: %v", who, err)
	}
	return v, err
}

func (s *truth) load(process string, changed int) (string, error) {
	v, over := s.begin(process, changed)
	defer over()
	var err error
	if s.failing == "" || s.failing == process {
		err = s.fails
	}
	s.At(process, fmt.Sprintf("loads %s, %v", v, err))
	return v, err
}

// begin reads the source, and checks that the load is alone: nothing that has been announced since the calls
// came for which the two run may have broken the other one.
func (s *truth) begin(process string, changed int) (v string, over func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.loads {
		if !s.mayOverlap && !other.over && s.changing <= min(other.changed, changed) {
			s.Errorf("%s loads while %s does", process, other.process)
		}
	}
	me := &load{process: process, changed: changed}
	s.loads = append(s.loads, me)
	return fmt.Sprint("v", s.version), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		me.over = true
	}
}

// changedKey is that of what changed was when a call came, in its context.
type changedKey struct{}

// loadDone checks that a load is refused only if a change has been announced since the call came for which it ran.
func (s *truth) loadDone(ctx context.Context, info singlefill.LoadInfo) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if changed := ctx.Value(changedKey{}); info.Fenced && !s.mayOverlap && changed == s.changing {
		s.Errorf("what has been loaded is refused: %+v", info)
	}
}

func versionOf(value string) (n int) {
	fmt.Sscanf(value, "v%d", &n)
	return n
}

// An announcement tells a cache that the source has changed.
type announcement func(context.Context, *singlefill.Cache[string]) error

// change changes the source and announces that.
func (s *truth) change(ctx context.Context, process string, announce announcement) {
	s.mu.Lock()
	s.version++
	s.changing++
	version, changing := s.version, s.changing
	s.mu.Unlock()
	err := announce(ctx, s.cache(process))
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.floor, s.changed = version, changing
	}
}

// goChange starts an actor that changes the source, and then asks for the value in another process.
func (s *truth) goChange(changer, process string, announce announcement) {
	s.Go(changer, changer, func(ctx context.Context) {
		s.change(ctx, changer, announce)
		s.At(process, "begins")
		_, _ = s.get(ctx, process, process+", after the change,")
	})
}

func deletes(ctx context.Context, c *singlefill.Cache[string]) error { return c.Delete(ctx, "k") }
func sets(ctx context.Context, c *singlefill.Cache[string]) error    { return c.Set(ctx, "k", "v2") }
func expires(ctx context.Context, c *singlefill.Cache[string]) error { return c.Expire(ctx, "k") }

// end runs the schedule to its end, closes the caches, and checks what they have left.
func (s *truth) end() {
	s.Run()
	if s.mayOverlap { // what a process could not give back, or a late command has taken for nobody, ends by itself
		s.Settle(stepLockTTL + schedule.Step)
	}
	if record, _ := s.Server.Get("ns:{k}:lock"); strings.HasPrefix(record, "H") {
		s.Errorf("the lock is left behind: %q", record)
	}
	s.Go("Z", "Z", func(context.Context) {
		for _, c := range s.caches {
			if err := c.Close(); err != nil {
				s.Errorf("Close: %v", err)
			}
		}
	})
	s.Run()
	reader := s.newCache(s.admin)
	defer reader.Close()
	if v, err := reader.Get(context.Background(), "k"); err == nil && versionOf(v) < s.floor && !s.mayBeStale {
		s.Errorf("the cache holds %s in the end, but v%d was announced", v, s.floor)
	}
}

func (s *truth) wantLoads(want int) {
	if len(s.loads) != want {
		s.Errorf("%d loads, want %d", len(s.loads), want)
	}
}

func TestInEveryOrderAColdKeyIsLoadedOnce(t *testing.T) {
	t.Parallel()
	schedule.Explore(t, schedule.Plan{AtLeast: 200, Together: true}, func(w *schedule.World) {
		s := newTruth(w, singlefill.Options[string]{})
		for _, p := range []string{"A", "B", "C"} {
			s.goGet(p, p)
		}
		s.end()
		s.wantLoads(1)
	})
}

// announcements are all ways to announce a change.
var announcements = []struct {
	name     string
	announce announcement
}{{"Delete", deletes}, {"Set", sets}, {"Expire", expires}}

func TestInEveryOrderNobodyGetsWhatWasLoadedBeforeItWasInvalidated(t *testing.T) {
	for _, how := range announcements {
		t.Run(how.name, func(t *testing.T) {
			t.Parallel()
			schedule.Explore(t, schedule.Plan{AtLeast: 50}, func(w *schedule.World) {
				s := newTruth(w, singlefill.Options[string]{})
				s.goGet("A", "A")
				s.goChange("B", "C", how.announce)
				s.end()
			})
		})
	}
}

func TestInEveryOrderCallersOfOneProcessNeverJoinWhatIsTooOldForThem(t *testing.T) {
	for _, test := range []struct {
		name, changer string
		plan          schedule.Plan
		callers       []string
	}{
		{"deleted here", "A", schedule.Plan{AtLeast: 50}, []string{"early"}},
		{"deleted elsewhere", "B", schedule.Plan{AtLeast: 50}, []string{"early"}},
		{"deleted here, three callers", "A", schedule.Plan{Sample: 150}, []string{"early", "perhaps late"}},
		{"deleted elsewhere, three callers", "B", schedule.Plan{Sample: 150}, []string{"early", "perhaps late"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			schedule.Explore(t, test.plan, func(w *schedule.World) {
				s := newTruth(w, singlefill.Options[string]{})
				for _, who := range test.callers {
					s.goGet("A", who)
				}
				s.goChange(test.changer, "A", deletes)
				s.end()
			})
		})
	}
}

// What may happen to a process: a connection breaks under a command, which arrives later; a command is held up for
// longer than its caller waits; a process is cut off for longer than its lock lives; a caller gives up.
var (
	breaks = schedule.Plan{AtLeast: 100, Together: true, Pauses: 1, Faults: 1, Hit: []string{"A"}, Break: true}
	delays = schedule.Plan{
		AtLeast: 100, Together: true, Faults: 1, Hit: []string{"A"}, Cancel: []string{"A"},
		Hold: []time.Duration{3 * schedule.Step}, Cut: []time.Duration{stepLockTTL + 2*schedule.Step},
	}
	troubles = schedule.Plan{
		Sample: 150, Pauses: 2, Faults: 2, Cancel: []string{"A", "B"}, Break: true,
		Hold: []time.Duration{3 * schedule.Step}, Cut: []time.Duration{stepLockTTL + 2*schedule.Step},
	}
)

func TestInEveryOrderWithFaultsNobodyGetsWhatWasLoadedBeforeItWasInvalidated(t *testing.T) {
	for _, test := range []struct {
		name     string
		announce announcement
		plan     schedule.Plan
	}{
		{"Delete, a connection breaks", deletes, breaks},
		{"Delete, a delay", deletes, delays},
		{"Delete, two of all", deletes, troubles},
		{"Set, a connection breaks", sets, breaks},
		{"Set, two of all", sets, troubles},
		{"Expire, two of all", expires, troubles},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			schedule.Explore(t, test.plan, func(w *schedule.World) {
				s := newTruth(w, singlefill.Options[string]{})
				s.mayOverlap = true
				s.goGet("A", "A")
				s.goChange("B", "C", test.announce)
				s.end()
			})
		})
	}
}

func TestInEveryOrderASlowLoadKeepsItsLock(t *testing.T) {
	t.Parallel()
	plan := schedule.Plan{
		AtLeast: 50, Together: true, Faults: 1, Hold: []time.Duration{stepLockTTL + 2*schedule.Step}, OnlyPoints: true,
	}
	schedule.Explore(t, plan, func(w *schedule.World) {
		s := newTruth(w, singlefill.Options[string]{})
		for _, p := range []string{"A", "B"} {
			s.goGet(p, p)
		}
		s.end()
		s.wantLoads(1)
	})
}

func TestInEveryOrderAFailedLoadLeavesTheLockOfAnotherAlone(t *testing.T) {
	t.Parallel()
	schedule.Explore(t, schedule.Plan{AtLeast: 50, Together: true}, func(w *schedule.World) {
		s := newTruth(w, singlefill.Options[string]{})
		s.fails, s.failing = errors.New("no answer"), "A"
		s.goGet("A", "A")
		s.goChange("B", "C", deletes)
		s.end()
	})
}

func TestInEveryOrderALockThatHasBeenGivenUpIsNotTakenByALateCommand(t *testing.T) {
	t.Parallel()
	plan := schedule.Plan{AtLeast: 50, Pauses: 1, Faults: 1, Break: true, Hold: []time.Duration{3 * schedule.Step}}
	schedule.Explore(t, plan, func(w *schedule.World) {
		s := newTruth(w, singlefill.Options[string]{})
		s.goGet("A", "A")
		s.end()
	})
}

// fillAndExpire stores the value, and lets time pass until it is stale.
func (s *truth) fillAndExpire() {
	c := s.newCache(s.admin)
	defer c.Close()
	if err := c.Set(context.Background(), "k", "v1"); err != nil {
		panic(err)
	}
	time.Sleep(stepTTL + stepTTL/2)
}

func TestInEveryOrderARefreshDoesNotUndoAnInvalidation(t *testing.T) {
	for _, how := range announcements {
		t.Run(how.name, func(t *testing.T) {
			t.Parallel()
			schedule.Explore(t, schedule.Plan{AtLeast: 50}, func(w *schedule.World) {
				s := newTruth(w, singlefill.Options[string]{StaleWhileRevalidate: stepTTL})
				s.mayBeStale = how.name == "Expire"
				s.fillAndExpire()
				s.goGet("A", "A")
				s.goChange("B", "C", how.announce)
				s.end()
			})
		})
	}
}

func TestInEveryOrderAFailedRefreshHoldsTheFleetOffTheSource(t *testing.T) {
	t.Parallel()
	schedule.Explore(t, schedule.Plan{AtLeast: 50}, func(w *schedule.World) {
		s := newTruth(w, singlefill.Options[string]{StaleWhileRevalidate: stepTTL, RetryAfter: time.Minute})
		s.fails = errors.New("no answer")
		s.fillAndExpire()
		for _, p := range []string{"A", "B"} {
			w.Go(p, p, func(ctx context.Context) {
				if v, err := s.get(ctx, p, p); v != "v1" || err != nil {
					w.Errorf("%s got %q, %v; want the stale value", p, v, err)
				}
			})
		}
		s.end()
		s.wantLoads(1)
	})
}

func TestInEveryOrderWhoFindsNothingToServeLoadsInSpiteOfAFailedRefresh(t *testing.T) {
	t.Parallel()
	schedule.Explore(t, schedule.Plan{AtLeast: 50}, func(w *schedule.World) {
		s := newTruth(w, singlefill.Options[string]{StaleWhileRevalidate: stepTTL, RetryAfter: time.Minute})
		s.fails = errors.New("no answer")
		s.fillAndExpire()
		var errA, errC error
		w.Go("A", "A", func(ctx context.Context) { _, errA = s.get(ctx, "A", "A") })
		w.Go("B", "B", func(ctx context.Context) {
			s.change(ctx, "B", deletes)
			w.At("C", "begins")
			_, errC = s.cache("C").GetOrLoad(ctx, "k", func(context.Context, string) (string, error) {
				w.At("C", "loads")
				return "v2", nil
			})
		})
		s.end()
		if errC != nil && errA == nil {
			w.Errorf("got %v: only a load that somebody waited for may fail others", errC)
		}
	})
}

func TestInEveryOrderThoseWhoWaitedForAFailedLoadShareItsFailure(t *testing.T) {
	for _, test := range []struct {
		name string
		load singlefill.Loader[string]
	}{
		{"an error", func(context.Context, string) (string, error) { return "", io.ErrUnexpectedEOF }},
		{"a panic", func(context.Context, string) (string, error) { panic("a bug") }},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			schedule.Explore(t, schedule.Plan{AtLeast: 50}, func(w *schedule.World) {
				s := newTruth(w, singlefill.Options[string]{})
				for _, p := range []string{"A", "B"} {
					var loaded, waited atomic.Bool
					s.opts.Trace = &singlefill.Trace{WaitDone: func(context.Context, singlefill.WaitInfo) { waited.Store(true) }}
					c := s.newCache(w.Client(p))
					s.caches[p] = c
					w.Go(p, p, func(ctx context.Context) {
						_, err := c.GetOrLoad(ctx, "k", func(ctx context.Context, key string) (string, error) {
							loaded.Store(true)
							w.At(p, "loads")
							return test.load(ctx, key)
						})
						var remote *singlefill.RemoteError
						switch {
						case err == nil:
							w.Errorf("%s got no error", p)
						case waited.Load() && (loaded.Load() || !errors.As(err, &remote)):
							w.Errorf("%s waited for a load that failed, and got %v; loaded by itself: %v", p, err, loaded.Load())
						}
					})
				}
				s.end()
				if w.Server.Exists("ns:{k}") {
					w.Errorf("a failure is stored")
				}
			})
		})
	}
}
