package cache_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A cold key is loaded once in the fleet, and all callers get its value.
//
//fault:very-many
//fault:cold-key
func TestGetOrLoad_ColdKey(t *testing.T) {
	const callers, rounds = 100, 20
	f := newFleet(t)
	processes := f.startAll(8, config{Direct: true})
	for round := range rounds {
		tag := fmt.Sprint("round", round)
		for _, p := range processes {
			p.order(order{Op: "get", Tag: tag, Key: tag, N: callers, Start: true, Plan: plan{Sleep: 10 * time.Millisecond}})
		}
		for _, p := range processes {
			p.await("ready", tag)
		}
		for _, p := range processes {
			p.order(order{Op: "start", Tag: tag})
		}
		got := allDone(processes, tag)
		f.wantLoads(tag, 1)
		f.wantNoOverlap(tag)
		for o, n := range got {
			if o.Kind != gotValue || n != len(processes)*callers {
				t.Errorf("round %d: %d callers got %v", round, n, o)
			}
		}
		if t.Failed() {
			break
		}
	}
	for _, p := range processes {
		if s := p.stats(); s.LoadsUnlocked+s.RedisErrors+s.Fenced+s.LocksLost+s.BadValues > 0 {
			t.Errorf("Stats of %s are %+v", p.name, s)
		}
	}
}

// Many cold keys are loaded once each, while a load of another key blocks.
//
//fault:everything-cold
func TestGetOrLoad_ManyColdKeys(t *testing.T) {
	t.Parallel()
	const keys, callers = 200, 20
	f := newFleet(t)
	processes := f.startAll(4, config{Direct: true})
	blocker := processes[0]
	blocker.get("blocked", "another key", 1, plan{Block: true})
	blocker.begun("blocked")

	for _, p := range processes {
		p.order(order{Op: "sweep", Tag: "sweep", N: callers, Keys: keys, Plan: plan{Sleep: 2 * time.Millisecond}})
	}
	got := make(map[outcome]int)
	for _, p := range processes {
		for o, n := range counted(p.await("sweep", "sweep").Outcomes) {
			got[o] += n
		}
	}
	for o, n := range got {
		if o.Kind != gotValue || n != len(processes)*callers {
			t.Errorf("%d callers got %v", n, o)
		}
	}
	if len(got) != keys {
		t.Errorf("%d different outcomes for %d keys", len(got), keys)
	}
	for i := range keys {
		f.wantLoads(fmt.Sprint("key", i), 1)
	}
	blocker.release("blocked")
	blocker.wantDone("blocked", 1, gotValue, blocker.name+"/1")
}

// A hit takes no part in the lock: it is a GET, even while the lock is held.
func TestGetOrLoad_HitDespiteLock(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	processes := f.startAll(3, config{})
	a, b := processes[0], processes[1]
	a.set("k", "v")
	// The lock of a holder that neither renews nor releases it.
	a.get("another", "another", 1, plan{Block: true})
	a.begun("another")
	foreign := f.locked("another")
	redistest.Must(t, f.rdb.Set(t.Context(), lockKey(f.namespace, "k"), foreign, time.Minute).Err())
	for _, p := range processes {
		gets := p.proxy.On(redistest.Command("GET"), redistest.Pass)
		others := p.proxy.On(func(cmd []string) bool { return !strings.EqualFold(cmd[0], "HELLO") }, redistest.Pass)
		p.get("hits", "k", 100, plan{})
		p.wantDone("hits", 100, gotValue, "v")
		if gets.Fired() == 0 || others.Fired() != 0 {
			t.Errorf("%s: %d GETs, %d other commands", p.name, gets.Fired(), others.Fired())
		}
		if s := p.stats(); s.Hits != 100 || s.Waits+s.Misses != 0 {
			t.Errorf("Stats of %s are %+v", p.name, s)
		}
	}
	if got := f.locked("k"); got != foreign {
		t.Errorf("the lock key holds %q", got)
	}

	// Without the value callers wait for the holder.
	redistest.Must(t, f.rdb.Del(t.Context(), valueKey(f.namespace, "k")).Err())
	a.get("waits", "k", 1, plan{})
	a.waiting("waits", "k")
	b.set("k", "v2")
	a.wantDone("waits", 1, gotValue, "v2")
	f.wantLoads("k", 0)
}

// MaxFleetLoads bounds the loads of all processes.
func TestMaxFleetLoads_FourProcesses(t *testing.T) {
	t.Parallel()
	const keys, limit = 50, 5
	f := newFleet(t)
	processes := f.startAll(4, config{Direct: true, MaxFleetLoads: limit})
	for _, p := range processes {
		for k := range keys {
			key := fmt.Sprint(p.name, k)
			p.get(key, key, 1, plan{Sleep: 5 * time.Millisecond})
		}
	}
	for _, p := range processes {
		for k := range keys {
			if got := p.done(fmt.Sprint(p.name, k)); len(got) != 1 {
				t.Errorf("%s, key %d: %v", p.name, k, got)
			}
		}
	}
	most, err := f.rdb.ZScore(t.Context(), mostRunningKey(f.namespace), "most").Result()
	if err != nil || most > limit || most < 2 {
		t.Errorf("%v loads at a time, %v; want more than one, and %d at most", most, err, limit)
	}
}
