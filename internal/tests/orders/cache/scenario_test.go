// Package cache_test asserts promises of the cache that hold in every order in which the commands
// of several processes can reach Redis: see package schedule. With -short or -race each test runs a
// small sample.
package cache_test

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/schedule"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

func TestMain(m *testing.M) {
	debug.SetGCPercent(400) // an order leaves little memory in use and much behind
	redistest.Main(m)
}

// explore runs a scenario in all orders of plan. run ends it.
func explore(t *testing.T, plan schedule.Plan, opts singlefill.Options[string], run func(s *scenario)) {
	t.Helper()
	if redistest.Quick() || redistest.Race {
		plan.AtLeast, plan.Sample = 0, 10
	}
	schedule.Explore(t, plan, func(w *schedule.World) {
		s := newScenario(w, opts)
		run(s)
		for _, c := range s.caches { // what they still do is aside
			redistest.Must(t, c.Close())
		}
	})
}

// An order is a scenario, what its processes do, and in which orders.
type order struct {
	name string
	plan schedule.Plan
	opts singlefill.Options[string]
	run  func(s *scenario) // to its end
}

// exploreEach explores each scenario, as a subtest.
func exploreEach(t *testing.T, orders ...order) {
	t.Helper()
	for _, o := range orders {
		t.Run(o.name, func(t *testing.T) {
			t.Parallel()
			explore(t, o.plan, o.opts, o.run)
		})
	}
}

// Times are whole steps of the scheduler.
const (
	ttl          = time.Hour
	lockTTL      = 9 * schedule.Step
	redisTimeout = 2 * schedule.Step
	loadTimeout  = 30 * time.Second
)

// A scenario is what processes do in one schedule. They cache the value of a source, of the key "k":
// "v1", then "v2" and so on. The scenario checks which values calls get.
type scenario struct {
	*schedule.World
	admin *redis.Client // its commands do not wait for the scheduler
	opts  singlefill.Options[string]

	loadErr error // of all loads, or only of those in process failing
	failing string

	mayBeStale bool // calls may get an expired value after a change has been announced

	mu        sync.Mutex                           // guards the following fields
	caches    map[string]*singlefill.Cache[string] // by process
	version   int                                  // of the value
	begun     int                                  // announcements that have begun
	ended     int                                  // announcements that have ended
	announced int                                  // the version that was announced last
	loads     []*load                              // in the order in which they began
}

// A load runs in process, for a call that began after so many announcements had ended.
type load struct {
	process string
	ended   int
	over    bool
}

func newScenario(w *schedule.World, opts singlefill.Options[string]) *scenario {
	w.Scripts(cachetest.Scripts())
	opts.Codec, opts.Jitter, opts.EarlyRefresh = singlefill.JSON, -1, -1
	opts.LockTTL, opts.RedisTimeout, opts.LoadTimeout = lockTTL, redisTimeout, loadTimeout
	s := &scenario{World: w, admin: w.Admin(), opts: opts, version: 1, caches: make(map[string]*singlefill.Cache[string])}
	w.Executed, w.Aside = s.wantTTLs, aside
	return s
}

// aside reports whether a command asks what no other command changes, or is about keys that no other call touches:
// those that Clear plants, and the log of processes with memory, of which there is none.
func aside(args []string) bool {
	own := func(arg string) bool {
		return strings.HasPrefix(arg, "ns:{%check:") || strings.HasPrefix(arg, "ns:log")
	}
	return args[0] == "info" || len(args) > 1 && slices.ContainsFunc(args, own)
}

func (s *scenario) wantTTLs() {
	for _, key := range s.Server.Keys() {
		if s.Server.TTL(key) <= 0 {
			s.Errorf("key %q has no TTL", key)
		}
	}
}

// cache returns the cache of a process.
func (s *scenario) cache(process string) *singlefill.Cache[string] {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.caches[process] == nil {
		s.opts.Trace = &singlefill.Trace{LoadDone: s.loadDone}
		s.caches[process] = s.newCache(s.Client(process))
	}
	return s.caches[process]
}

func (s *scenario) newCache(rdb *redis.Client) *singlefill.Cache[string] {
	c, err := singlefill.New(rdb, "ns", ttl, &s.opts)
	if err != nil {
		panic(err)
	}
	return c
}

// goGet starts an actor that calls GetOrLoad.
func (s *scenario) goGet(process, caller string) {
	s.Go(process, caller, func() { _, _ = s.get(process, caller) })
}

// endedKey is the context key of how many announcements had ended when a call began.
type endedKey struct{}

// get calls GetOrLoad in a process, and checks the result.
func (s *scenario) get(process, caller string) (string, error) {
	s.mu.Lock()
	announced, ended := s.announced, s.ended
	s.mu.Unlock()
	s.Note(process, fmt.Sprint(caller, announced, ended))
	ctx := context.WithValue(context.Background(), endedKey{}, ended)
	v, info, err := s.cache(process).GetOrLoadInfo(ctx, "k", func(context.Context, string) (string, error) {
		return s.load(process, ended)
	})
	switch {
	case err == nil && versionOf(v) < announced && !(info.Stale && s.mayBeStale):
		s.Errorf("%s got %s (%+v), but v%d had been announced before the call", caller, v, info, announced)
	case err != nil && s.loadErr == nil:
		s.Errorf("%s: %v", caller, err)
	}
	return v, err
}

// load reads the source. It checks that no other load runs, unless an announcement that began
// after the calls of both loads may have superseded the other one.
func (s *scenario) load(process string, ended int) (string, error) {
	s.mu.Lock()
	for _, other := range s.loads {
		if !other.over && s.begun <= min(other.ended, ended) {
			s.Errorf("%s loads while %s does", process, other.process)
		}
	}
	l := &load{process: process, ended: ended}
	s.loads = append(s.loads, l)
	v := fmt.Sprint("v", s.version)
	s.mu.Unlock()
	var err error
	if s.failing == "" || s.failing == process {
		err = s.loadErr
	}
	s.At(process, fmt.Sprintf("loads %s, %v", v, err))
	s.mu.Lock()
	defer s.mu.Unlock()
	l.over = true
	return v, err
}

// loadDone checks that a load is refused only if an announcement began after its call.
func (s *scenario) loadDone(ctx context.Context, info singlefill.LoadInfo) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if info.Fenced && ctx.Value(endedKey{}) == s.begun {
		s.Errorf("a load is refused without a reason: %+v", info)
	}
}

// versionOf returns the version of a value, or 0 if it is none of the source.
func versionOf(value string) (n int) {
	fmt.Sscanf(value, "v%d", &n)
	return n
}

// An announcement tells a cache that the source has changed.
type announcement func(context.Context, *singlefill.Cache[string]) error

func deletes(ctx context.Context, c *singlefill.Cache[string]) error { return c.Delete(ctx, "k") }
func sets(ctx context.Context, c *singlefill.Cache[string]) error    { return c.Set(ctx, "k", "v2") }
func expires(ctx context.Context, c *singlefill.Cache[string]) error { return c.Expire(ctx, "k") }
func clears(ctx context.Context, c *singlefill.Cache[string]) error  { return c.Clear(ctx) }

// change changes the source and announces it.
func (s *scenario) change(process string, announce announcement) {
	s.mu.Lock()
	s.version++
	s.begun++
	version, begun := s.version, s.begun
	s.mu.Unlock()
	if err := announce(context.Background(), s.cache(process)); err != nil {
		s.Errorf("%s cannot announce a change: %v", process, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.announced, s.ended = version, begun
}

// goChange starts an actor that changes the source, and then calls GetOrLoad in another process.
func (s *scenario) goChange(changer, process string, announce announcement) {
	s.Go(changer, changer, func() {
		s.change(changer, announce)
		s.At(process, "begins")
		_, _ = s.get(process, process+", after the change,")
	})
}

// fillAndExpire stores the value, and lets time pass until it is stale.
func (s *scenario) fillAndExpire() {
	c := s.newCache(s.admin)
	defer c.Close()
	if err := c.Set(context.Background(), "k", "v1"); err != nil {
		panic(err)
	}
	time.Sleep(ttl + ttl/2)
}

// end runs the schedule to its end, closes the caches, and checks what they have left in Redis.
func (s *scenario) end() {
	s.Run()
	if record, _ := s.Server.Get("ns:{k}:lock"); strings.HasPrefix(record, "H") {
		s.Errorf("the lock is left behind: %q", record)
	}
	s.Go("Z", "Z", func() {
		for _, c := range s.caches {
			if err := c.Close(); err != nil {
				s.Errorf("Close: %v", err)
			}
		}
	})
	s.Run()
	reader := s.newCache(s.admin)
	defer reader.Close()
	if v, err := reader.Get(context.Background(), "k"); err == nil && versionOf(v) < s.announced && !s.mayBeStale {
		s.Errorf("the cache has %s in the end, but v%d was announced", v, s.announced)
	}
}

func (s *scenario) wantLoads(want int) {
	if len(s.loads) != want {
		s.Errorf("%d loads, want %d", len(s.loads), want)
	}
}
