package cache_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// The tests TestRefused_… are about what servers refuse, each in its own words. .ci/run runs them
// on Valkey, too.

// Without memory hits work, misses load, and no lock is left behind.
//
//fault:refused-writes
func TestRefused_OutOfMemory(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	admin := s.Admin()
	fill := redistest.Config("maxmemory", "1", "0")
	c := cachetest.New(t, s.Client(t), redistest.Namespace(t), cachetest.Patient)
	c.MustLoad("kept")
	c.MustLoad("deleted")

	empty := fill(t, s)
	c.WantHit("kept")
	c.MustLoad("kept")
	c.WantLoads(2)
	for i := range 20 {
		c.MustLoad(fmt.Sprintf("missing-%d", i))
	}
	c.WantLoads(22)
	c.WantErrors()
	if told := fmt.Sprint(c.Log.Errors()["lock"]); !strings.Contains(told, "OOM") {
		t.Errorf("Trace reported %s for the lock, want OOM", told)
	}
	if c.Stats().BreakerOpens != 0 {
		t.Error("a refusal has opened the breaker")
	}
	// Set is a transaction, whose EXEC says only that an error came before it.
	if err := c.Set(t.Context(), "kept", "v"); !redis.IsOOMError(err) {
		t.Errorf("Set = %v, want an OOM", err)
	}
	if err := c.Delete(t.Context(), "deleted"); err != nil {
		t.Errorf("Delete = %v: it needs no memory", err)
	}
	c.WantMiss("deleted")

	// The memory may also run out between lock and store.
	boom := errors.New("boom")
	for _, want := range []error{nil, boom, singlefill.ErrNotFound} {
		empty()
		key := fmt.Sprintf("loading-%v", want)
		_, err := c.GetOrLoad(t.Context(), key, func(context.Context, string) (string, error) {
			if !redistest.Exists(t, admin, c.LockKey(key)) {
				t.Error("no lock is held")
			}
			fill(t, s)
			return "v", want
		})
		if err != want {
			t.Errorf("GetOrLoad = %v, want %v", err, want)
		}
		if redistest.Exists(t, admin, c.LockKey(key)) {
			t.Errorf("the lock of a load that ended with %v is left behind", want)
		}
		c.WantMiss(key)
	}
	c.WantStat("StoreErrors", 2)

	empty()
	c.MustLoad("missing-0")
	c.WantHit("missing-0")
}

// A user without a right gets values, and errors from writes that need the right.
//
//fault:missing-right
//fault:lost-wake-ups
func TestRefused_MissingRight(t *testing.T) {
	for _, user := range []struct {
		rule    string // of the ACL, on top of all rights
		quiet   bool   // no error: the library does without the right
		cached  bool   // loaded values are stored
		deletes bool   // Delete works
		sets    bool   // Set works
	}{
		{rule: "-@scripting", quiet: true, cached: true, deletes: true, sets: true},
		{rule: "-evalsha", quiet: true, cached: true, deletes: true, sets: true},
		{rule: "-eval", quiet: true, cached: true, deletes: true, sets: true},
		{rule: "-ping", quiet: true, cached: true, deletes: true, sets: true},
		{rule: "resetchannels", quiet: true, cached: true, deletes: true, sets: true}, // no wake-ups
		{rule: "-multi", quiet: true, cached: true, deletes: true},
		{rule: "-get", deletes: true, sets: true},
		{rule: "-set", deletes: true},
		{rule: "-del", cached: true},
		{rule: "-@scripting -watch", deletes: true, sets: true},
		{rule: "-@scripting -get", deletes: true, sets: true},
		{rule: "-@scripting -exec", deletes: true},
		{rule: "-@write"},
		{rule: "resetkeys ~other:*"},
		{rule: "resetkeys %R~*"}, // a user that may only read
		{rule: "-@all"},
		{rule: "off"}, // not even AUTH works
	} {
		t.Run(user.rule, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			admin := s.Admin()
			asUser := s.User(t, append([]string{"~*", "&*", "+@all"}, strings.Fields(user.rule)...)...)
			namespace := redistest.Namespace(t)
			a := cachetest.New(t, s.Client(t, asUser), namespace, cachetest.Patient)
			b := cachetest.New(t, s.Client(t, asUser), namespace, cachetest.Patient) // with its own source

			if user.cached {
				var wg sync.WaitGroup
				a.During = func(string) { goWait(t, &wg, b, s, "k") }
				a.MustLoad("k")
				wg.Wait()
				a.WantHit("k")
				a.During = nil
			}
			for i := range 2 * breakerLimit {
				a.MustLoad("k")
				b.MustLoad(fmt.Sprintf("k%d", i%2))
			}
			if user.cached {
				a.WantLoads(1)
				b.WantLoads(2)
			} else {
				a.WantLoads(2 * breakerLimit)
				b.WantLoads(2 * breakerLimit)
			}
			if user.quiet {
				wantNoErrors(a, b)
			} else {
				a.WantErrors()
			}
			if left := redistest.Exists(t, admin, a.LockKey("k")); left && user.rule != "-del" {
				t.Error("the lock is left behind")
			}

			// A write that needs the right fails. A Delete that works refuses the load.
			if err := a.Delete(t.Context(), "k"); (err == nil) != user.deletes {
				t.Errorf("Delete = %v", err)
			}
			a.During = func(key string) {
				if err := b.Delete(context.Background(), key); (err == nil) != user.deletes {
					t.Errorf("Delete = %v", err)
				}
			}
			a.MustLoad("fenced")
			a.AwaitLoads()
			if stored := redistest.Exists(t, admin, a.ValueKey("fenced")); stored && user.deletes {
				t.Error("a value was stored that was deleted during its load")
			}
			if err := a.Set(t.Context(), "k", "set"); (err == nil) != user.sets {
				t.Errorf("Set = %v", err)
			}
			for _, c := range []*cachetest.Cache{a, b} {
				if c.Stats().BreakerOpens != 0 {
					t.Errorf("a refusal has opened the breaker: %v", c.Log.Errors())
				}
			}
		})
	}
}

// A server that refuses everything for a while, or all writes, breaks no read. The breaker opens
// only for a server that answers nothing.
//
//fault:busy-server
//fault:replica
func TestRefused_ByBusyServer(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]struct {
		says  string // nothing where the connection may be gone before the reply is read
		opens bool   // the breaker
		begin func(t testing.TB, s *redistest.Server) (end func())
	}{
		"loading":           {"LOADING", true, redistest.Reload},
		"busy":              {"BUSY", true, redistest.KeepBusy},
		"no replicas":       {"NOREPLICAS", false, redistest.Config("min-replicas-to-write", "1", "0")},
		"read-only replica": {"read only", false, redistest.LoseMaster},
		"master down": {"MASTERDOWN", true, func(t testing.TB, s *redistest.Server) func() {
			redistest.Do(t, s.Admin(), "config", "set", "replica-serve-stale-data", "no")
			redistest.Do(t, s.Admin(), "config", "set", "replica-read-only", "no")
			return redistest.LoseMaster(t, s)
		}},
		"too many clients": {"", true, func(t testing.TB, s *redistest.Server) func() {
			end := redistest.Config("maxclients", "1", "1000")(t, s)
			redistest.Do(t, s.Admin(), "client", "kill", "type", "normal", "skipme", "yes")
			return end
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			c := cachetest.New(t, s.Client(t), redistest.Namespace(t), 300*time.Millisecond)
			c.AwaitCached("kept")
			end := fault.begin(t, s)
			n := 0
			redistest.Await(t, "the breaker is open, or there were refusals enough to open it", func() bool {
				n++
				c.MustLoad(fmt.Sprintf("k%d", n))
				return c.Stats().BreakerOpen || !fault.opens && n > 2*breakerLimit
			})
			if err := c.Delete(t.Context(), "k1"); err == nil {
				t.Error("Delete = nil")
			}
			if err := c.Set(t.Context(), "k1", "v"); err == nil {
				t.Error("Set = nil")
			}
			if !fault.opens {
				c.WantHit("kept")
				c.WantStat("BreakerOpens", 0)
			}
			c.WantErrors()
			if told := fmt.Sprint(c.Log.Errors()); !strings.Contains(told, fault.says) {
				t.Errorf("Trace reported %s, want %s", told, fault.says)
			}
			end()
			c.AwaitRecovery()
		})
	}
}
