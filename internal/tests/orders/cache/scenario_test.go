package cache_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/schedule"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Times are whole steps of the scheduler.
const (
	ttl          = time.Hour
	lockTTL      = 9 * schedule.Step
	redisTimeout = 2 * schedule.Step
	loadTimeout  = 30 * time.Second
)

// A scenario is what processes do in one schedule. They cache one key, whose value in the source is
// "v1", then "v2" and so on. The scenario checks which values calls get.
type scenario struct {
	*schedule.World
	admin *redis.Client // its commands do not wait for the scheduler
	opts  singlefill.Options[string]

	loadErr  error         // of all loads, or only of those in process failing
	failing  string        //
	loadTime time.Duration // how long each load takes at least

	mayOverlap bool // two loads of the key may run at a time, since there are faults
	mayBeStale bool // calls may get an expired value after a change has been announced

	mu        sync.Mutex
	caches    map[string]*singlefill.Cache[string] // protected by mu: by process
	version   int                                  // protected by mu: of the value in the source
	begun     int                                  // protected by mu: announcements that have begun
	ended     int                                  // protected by mu: announcements that have ended
	announced int                                  // protected by mu: the version that was announced last
	changer   string                               // protected by mu: the process that announced it
	at        time.Time                            // protected by mu: when the announcement had ended
	loads     []*load                              // protected by mu: in the order in which they began
}

// A load runs in process, for a call that began after so many announcements had ended.
type load struct {
	process string
	ended   int
	over    bool
}

func newScenario(t *testing.T, w *schedule.World, opts singlefill.Options[string]) *scenario {
	w.Scripts(cachetest.Scripts(t), ".")
	opts.Codec, opts.Jitter, opts.EarlyRefresh = singlefill.JSON, -1, -1
	opts.LockTTL, opts.RedisTimeout, opts.LoadTimeout = lockTTL, redisTimeout, loadTimeout
	s := &scenario{World: w, admin: w.Admin(), opts: opts, version: 1, caches: make(map[string]*singlefill.Cache[string])}
	w.Executed = s.wantTTLs
	return s
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
	s.Go(process, caller, func(ctx context.Context) { _, _ = s.get(ctx, process, caller) })
}

// get calls GetOrLoad in a process, and checks the result.
func (s *scenario) get(ctx context.Context, process, caller string) (string, error) {
	s.mu.Lock()
	announced, ended := s.announced, s.ended
	if near := s.opts.Near; near != nil && process != s.changer && time.Since(s.at) <= near.MaxLag {
		announced = 0
	}
	s.mu.Unlock()
	s.Note(process, fmt.Sprint(caller, announced, ended))
	inside := context.WithValue(ctx, endedKey{}, ended)
	v, info, err := s.cache(process).GetOrLoadInfo(inside, "k", func(context.Context, string) (string, error) {
		return s.load(process, ended)
	})
	switch {
	case err == nil && versionOf(v) < announced && !(info.Stale && s.mayBeStale):
		s.Errorf("%s got %s (%+v), but v%d had been announced before the call", caller, v, info, announced)
	case err != nil && s.loadErr == nil && err != ctx.Err():
		s.Errorf("%s: %v", caller, err)
	}
	return v, err
}

func (s *scenario) load(process string, ended int) (string, error) {
	v, over := s.begin(process, ended)
	defer over()
	var err error
	if s.failing == "" || s.failing == process {
		err = s.loadErr
	}
	time.Sleep(s.loadTime)
	s.At(process, fmt.Sprintf("loads %s, %v", v, err))
	return v, err
}

// begin reads the source. It checks that no other load runs, unless an announcement that began
// after the calls of both loads may have superseded the other one.
func (s *scenario) begin(process string, ended int) (v string, over func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.loads {
		if !s.mayOverlap && !other.over && s.begun <= min(other.ended, ended) {
			s.Errorf("%s loads while %s does", process, other.process)
		}
	}
	l := &load{process: process, ended: ended}
	s.loads = append(s.loads, l)
	return fmt.Sprint("v", s.version), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		l.over = true
	}
}

// endedKey is the context key of how many announcements had ended when a call began.
type endedKey struct{}

// loadDone checks that a load is refused only if an announcement began after its call.
func (s *scenario) loadDone(ctx context.Context, info singlefill.LoadInfo) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ended := ctx.Value(endedKey{}); info.Fenced && !s.mayOverlap && ended == s.begun {
		s.Errorf("a load is refused without a reason: %+v", info)
	}
}

func versionOf(value string) (n int) {
	fmt.Sscanf(value, "v%d", &n)
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
	s.mu.Lock()
	s.version++
	s.begun++
	version, begun := s.version, s.begun
	s.mu.Unlock()
	err := announce(ctx, s.cache(process))
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.announced, s.ended, s.changer, s.at = version, begun, process, time.Now()
	}
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
	if v, err := reader.Get(context.Background(), "k"); err == nil && versionOf(v) < s.announced && !s.mayBeStale {
		s.Errorf("the cache has %s in the end, but v%d was announced", v, s.announced)
	}
}

func (s *scenario) wantLoads(want int) {
	if len(s.loads) != want {
		s.Errorf("%d loads, want %d", len(s.loads), want)
	}
}
