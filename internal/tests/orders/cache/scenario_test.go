// Package cache_test asserts promises of the cache that hold in every order in which the commands
// of several processes can reach Redis: see package schedule. A plan with faults has too
// many orders, so a sample of them is run. With -short or -race each test runs a small sample.
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
	schedule.Explore(t, plan, func(w *schedule.World) { run(newScenario(t, w, opts)) })
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

// A scenario is what processes do in one schedule. They cache the values of sources, most of them of
// one key. The scenario checks which values calls get.
type scenario struct {
	*schedule.World
	*source                    // of the key "k"
	sources map[string]*source // all of them, by key
	admin   *redis.Client      // its commands do not wait for the scheduler
	opts    singlefill.Options[string]

	loadErr error // of all loads, or only of those in process failing
	failing string

	mayBeStale bool // calls may get an expired value after a change has been announced

	unroll map[string][]string // keys, by process: see unroller; nil: pipelines stay as they are

	mu     sync.Mutex
	caches map[string]*singlefill.Cache[string] // protected by mu: by process
}

// A source has the value of one key: "v1", then "v2" and so on, with the key in front if it is one of
// several. It checks what calls get.
type source struct {
	world  *schedule.World
	key    string
	prefix string // of the value

	mayOverlap bool // two loads of the key may run at a time, since there are faults

	mu        sync.Mutex
	version   int       // protected by mu: of the value
	begun     int       // protected by mu: announcements that have begun
	ended     int       // protected by mu: announcements that have ended
	announced int       // protected by mu: the version that was announced last
	changer   string    // protected by mu: the process that announced it
	at        time.Time // protected by mu: when the announcement had ended
	loads     []*load   // protected by mu: in the order in which they began
}

// A load runs in process, for a call that began after so many announcements had ended.
type load struct {
	process string
	ended   int
	over    bool
}

func newScenario(t *testing.T, w *schedule.World, opts singlefill.Options[string]) *scenario {
	w.Scripts(cachetest.Scripts(), ".")
	opts.Codec, opts.Jitter, opts.EarlyRefresh = singlefill.JSON, -1, -1
	opts.LockTTL, opts.RedisTimeout, opts.LoadTimeout = lockTTL, redisTimeout, loadTimeout
	k := &source{world: w, key: "k", version: 1}
	s := &scenario{
		World: w, source: k, sources: map[string]*source{"k": k},
		admin: w.Admin(), opts: opts, caches: make(map[string]*singlefill.Cache[string]),
	}
	w.Executed, w.Aside = s.wantTTLs, aside
	return s
}

// aside reports whether a command asks what no other command changes, or is about the keys that Clear plants: no
// other call touches them.
func aside(args []string) bool {
	planted := func(arg string) bool { return strings.HasPrefix(arg, "ns:{%check:") }
	return args[0] == "info" || len(args) > 1 && slices.ContainsFunc(args, planted)
}

// wantTTLs is called after each command.
func (s *scenario) wantTTLs(string, string) {
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
		rdb := s.Client(process)
		if s.unroll != nil {
			rdb.AddHook(s.unrollerOf(process))
		}
		s.caches[process] = s.newCache(rdb)
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
	s.Go(process, caller, func(ctx context.Context) { _, _ = s.get(ctx, process, caller) })
}

// get calls GetOrLoad in a process, and checks the result.
func (s *scenario) get(ctx context.Context, process, caller string) (string, error) {
	return s.getKey(ctx, s.source, process, caller)
}

func (s *scenario) getKey(ctx context.Context, of *source, process, caller string) (string, error) {
	announced, ended := s.known(of, process)
	s.Note(process, fmt.Sprint(caller, announced, ended))
	inside := context.WithValue(ctx, endedKey(of.key), ended)
	v, info, err := s.cache(process).GetOrLoadInfo(inside, of.key, func(context.Context, string) (string, error) {
		return s.load(of, process, ended)
	})
	switch {
	case err == nil && of.versionOf(v) < announced && !(info.Stale && s.mayBeStale):
		s.Errorf("%s got %s (%+v), but v%d had been announced before the call", caller, v, info, announced)
	case err != nil && s.loadErr == nil && err != ctx.Err():
		s.Errorf("%s: %v", caller, err)
	}
	return v, err
}

// known returns which version a call that begins now in a process must get at least, and how many
// announcements have ended.
func (s *scenario) known(of *source, process string) (announced, ended int) {
	of.mu.Lock()
	defer of.mu.Unlock()
	if near := s.opts.Near; near != nil && process != of.changer && time.Since(of.at) <= near.MaxLag {
		return 0, of.ended
	}
	return of.announced, of.ended
}

func (s *scenario) load(of *source, process string, ended int) (string, error) {
	v, over := of.begin(process, ended)
	defer over()
	var err error
	if s.failing == "" || s.failing == process {
		err = s.loadErr
	}
	s.At(process, fmt.Sprintf("loads %s, %v", v, err))
	return v, err
}

// begin reads the source. It checks that no other load runs, unless an announcement that began
// after the calls of both loads may have superseded the other one.
func (s *source) begin(process string, ended int) (v string, over func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.loads {
		if !s.mayOverlap && !other.over && s.begun <= min(other.ended, ended) {
			s.world.Errorf("%s loads %s while %s does", process, s.key, other.process)
		}
	}
	l := &load{process: process, ended: ended}
	s.loads = append(s.loads, l)
	return fmt.Sprint(s.prefix, "v", s.version), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		l.over = true
	}
}

// endedKey is the context key of how many announcements of a key had ended when a call began.
type endedKey string

// loadDone checks that a load is refused only if an announcement began after its call.
func (s *scenario) loadDone(ctx context.Context, info singlefill.LoadInfo) {
	of := s.sources[info.Key]
	of.mu.Lock()
	defer of.mu.Unlock()
	if ended := ctx.Value(endedKey(of.key)); info.Fenced && !of.mayOverlap && ended == of.begun {
		s.Errorf("a load is refused without a reason: %+v", info)
	}
}

// versionOf returns the version of a value, or 0 if it is none of the source.
func (s *source) versionOf(value string) (n int) {
	fmt.Sscanf(value, s.prefix+"v%d", &n)
	return n
}

// An announcement tells a cache that the source has changed.
type announcement func(context.Context, *singlefill.Cache[string]) error

func deletes(ctx context.Context, c *singlefill.Cache[string]) error { return c.Delete(ctx, "k") }
func sets(ctx context.Context, c *singlefill.Cache[string]) error    { return c.Set(ctx, "k", "v2") }
func expires(ctx context.Context, c *singlefill.Cache[string]) error { return c.Expire(ctx, "k") }

// announcements are all ways to announce a change.
var announcements = []struct {
	name     string
	announce announcement
}{{"Delete", deletes}, {"Set", sets}, {"Expire", expires}}

// change changes the source and announces it.
func (s *scenario) change(ctx context.Context, process string, announce announcement) {
	_ = s.changeKey(ctx, s.source, process, announce)
}

func (s *scenario) changeKey(ctx context.Context, of *source, process string, announce announcement) error {
	of.mu.Lock()
	of.version++
	of.begun++
	version, begun := of.version, of.begun
	of.mu.Unlock()
	err := announce(ctx, s.cache(process))
	of.mu.Lock()
	defer of.mu.Unlock()
	if err == nil {
		of.announced, of.ended, of.changer, of.at = version, begun, process, time.Now()
	}
	return err
}

// goChange starts an actor that changes the source, and then calls GetOrLoad in another process.
func (s *scenario) goChange(changer, process string, announce announcement) {
	s.Go(changer, changer, func(ctx context.Context) {
		s.change(ctx, changer, announce)
		s.At(process, "begins")
		_, _ = s.get(ctx, process, process+", after the change,")
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
	if s.mayOverlap { // a lock that no process could release expires
		s.Settle(lockTTL + schedule.Step)
	}
	for key := range s.sources {
		if record, _ := s.Server.Get("ns:{" + key + "}:lock"); strings.HasPrefix(record, "H") {
			s.Errorf("the lock of %s is left behind: %q", key, record)
		}
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
	for key, of := range s.sources {
		if v, err := reader.Get(context.Background(), key); err == nil && of.versionOf(v) < of.announced && !s.mayBeStale {
			s.Errorf("the cache has %s in the end, but v%d was announced", v, of.announced)
		}
	}
}

func (s *source) wantLoads(want int) {
	if len(s.loads) != want {
		s.world.Errorf("%d loads of %s, want %d", len(s.loads), s.key, want)
	}
}
