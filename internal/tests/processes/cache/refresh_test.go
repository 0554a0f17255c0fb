package cache_test

import (
	"cmp"
	"fmt"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

// The order of events shows that no reader waits for a load: the test blocks the load, and every
// reader goes on.

// An expired value is refreshed by one load in the fleet, for which no reader waits.
func TestRefresh_EachExpiry(t *testing.T) {
	t.Parallel()
	g := newGroup(t, config{Direct: true, TTL: 400 * time.Millisecond, StaleWhileRevalidate: time.Minute, EarlyRefresh: -1})
	g.fill("k")
	g.read("reads", "k", 3, 2*time.Millisecond, plan{Block: true})
	for n := 2; n <= 6; n++ {
		p, load := g.begun("reads")
		old, freshUntil := g.stored("k"), g.entry("k").FreshUntil
		if load.Nth != n || load.At.Before(freshUntil) {
			t.Errorf("load %d, want %d; it began %v after the value had expired", load.Nth, n, load.At.Sub(freshUntil))
		}
		g.wantServed("reads", 20)
		g.wantLoads("k", n)
		if g.stored("k") != old {
			t.Error("another entry is stored while the load blocks")
		}
		p.pass("reads")
		g.awaitOtherEntry("k", old)
	}
	g.wantServed("reads", 1)
	g.stop("reads", gotValue, gotStale)
	g.wantNoOverlap("k")
	for _, p := range g.members {
		if s := p.stats(); s.Misses+s.Fenced+s.LocksLost+s.RedisErrors > 1 || s.Refreshes < s.Loads-1 { // the first load
			t.Errorf("Stats of %s are %+v", p.name, s)
		}
	}
}

// An early refresh is one load in the fleet, for which no reader waits. The other processes leave
// it to the process that loads, and ask for the lock once a second.
func TestRefresh_Early(t *testing.T) {
	t.Parallel()
	g := newGroup(t, config{})
	v1 := g.fill("k")
	// A load that took an hour is repeated about an hour before the value expires. The next one is
	// quick.
	g.rewrite("k", func(e *entry.Entry) { e.LoadTime, e.FreshUntil = time.Hour, time.Now().Add(time.Minute) })
	old := g.stored("k")
	g.read("reads", "k", 3, 2*time.Millisecond, plan{Block: true})
	p, load := g.begun("reads")

	g.wantServed("reads", 1)
	others := g.without(p).members
	polls := func() (all []int) {
		for _, other := range others {
			all = append(all, other.polled("k"))
		}
		return all
	}
	begun, before := g.now(), polls()
	for g.now().Sub(begun) < 2*time.Second {
		g.wantServed("reads", 50)
	}
	after, took := polls(), g.now().Sub(begun)
	for i := range others {
		if n, most := after[i]-before[i], 1+int(took/time.Second); n > most {
			t.Errorf("%s has asked for the lock %d times in %v, want at most %d", others[i].name, n, took, most)
		}
	}
	g.wantLoads("k", 2)
	for _, p := range g.members {
		for _, o := range p.tally("reads").Outcomes {
			if o.outcome != (outcome{gotValue, v1}) {
				t.Errorf("%s: while the load blocks %d calls got %v", p.name, o.N, o.outcome)
			}
		}
	}

	p.pass("reads")
	g.awaitOtherEntry("k", old)
	g.wantAll("k", 5, gotValue, load.Value)
	g.wantServed("reads", 5)
	g.stop("reads", gotValue)
	g.wantLoads("k", 2)
}

// A refresh that finds the lock held by another process does not wait for it.
func TestRefresh_LeftToAnotherProcess(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	g := &group{fleet: f, members: f.startAll(2, config{StaleWhileRevalidate: time.Hour})}
	g.fill("k")
	holder, other := g.members[0], g.members[1]
	holder.expire("k")
	holder.get("blocked", "k", 1, plan{Block: true})
	holder.begun("blocked")
	other.order(order{Op: "read", Tag: "reads", Key: "k", N: 1, Every: 5 * time.Millisecond})
	redistest.Await(t, "a second attempt to refresh follows the first", func() bool { return other.polled("k") >= 2 })
	if s := other.stats(); s.Waits != 0 {
		t.Errorf("Stats.Waits is %d, while all reads were served at once", s.Waits)
	}
}

// A refresh that gets the lock after another process has refreshed the value loads nothing.
func TestRefresh_AfterAnotherOne(t *testing.T) {
	t.Parallel()
	g := newGroup(t, config{StaleWhileRevalidate: time.Hour})
	a, b := g.members[0], g.members[1]
	v := g.fill("k")
	a.expire("k")
	a.get("first", "k", 1, plan{Block: true})
	load := a.begun("first")
	poll := b.proxy.On(scripts, redistest.HoldRequest).Times(1)
	b.get("second", "k", 1, plan{})
	b.wantDone("second", 1, gotStale, v)
	redistest.Await(t, "the second refresh asks for the lock", func() bool { return poll.Fired() > 0 })
	old := g.stored("k")
	a.release("first")
	g.awaitOtherEntry("k", old)
	poll.Release()
	b.do(order{Op: "close"}) // it waits for the refresh
	g.wantLoads("k", 2)
	g.without(b).wantAll("k", 1, gotValue, load.Value)
}

// A refresher that is killed or frozen is replaced, and no reader waits.
//
//fault:killed-refresher
func TestRefresh_KilledRefresher(t *testing.T) {
	for _, how := range []string{"killed", "frozen"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			mortal := shortLock
			mortal.Direct, mortal.StaleWhileRevalidate = true, time.Hour
			g := &group{fleet: f, members: f.startAll(3, config{Direct: true, StaleWhileRevalidate: time.Hour})}
			refresher := f.start(mortal)
			v1 := g.fill("k")
			g.members[0].expire("k")
			old := g.stored("k")
			refresher.get("refresh", "k", 1, plan{Block: true})
			refresher.wantDone("refresh", 1, gotStale, v1)
			refresher.begun("refresh")

			g.read("reads", "k", 3, 5*time.Millisecond, plan{Block: true})
			g.wantServed("reads", 5)
			g.wantLoads("k", 2)
			lock := f.locked("k")
			if how == "killed" {
				refresher.Kill()
			} else {
				refresher.Freeze()
			}
			if f.locked("k") == lock {
				g.wantServed("reads", 5) // while the refresher holds the lock
			}
			p, load := g.begun("reads")
			g.wantServed("reads", 5)
			if g.stored("k") != old {
				t.Error("another entry is stored while the loads block")
			}
			p.pass("reads")
			g.awaitOtherEntry("k", old)
			g.wantAll("k", 3, gotValue, load.Value)
			g.wantServed("reads", 1)
			for o := range g.stop("reads", gotValue, gotStale) {
				if o != (outcome{gotStale, v1}) && o != (outcome{gotValue, load.Value}) {
					t.Errorf("readers got %v", o)
				}
			}
			if how == "frozen" {
				refresher.Thaw()
				g.wantRefused(refresher, "refresh", "k")
				g.members = append(g.members, refresher)
				g.wantAll("k", 3, gotValue, load.Value)
			}
			g.wantLoads("k", 3)
		})
	}
}

// A Delete, Set or Expire in another process refuses the store of a refresh, and no caller waits
// for the refresh, not even in its own process.
func TestRefresh_Invalidated(t *testing.T) {
	tests := map[string]struct {
		do    func(p *process)
		kind  string // what later calls get
		text  string // if it is not what a load returns
		loads bool   // later calls cause a load
	}{
		"Delete": {do: func(p *process) { p.delete("k") }, kind: gotValue, loads: true},
		"Set":    {do: func(p *process) { p.set("k", "set") }, kind: gotValue, text: "set"},
		"Expire": {do: func(p *process) { p.expire("k") }, kind: gotStale, text: "process1/1", loads: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newGroup(t, config{Direct: true, StaleWhileRevalidate: time.Hour})
			a, b := g.members[0], g.members[1]
			v1 := g.fill("k")
			b.expire("k")
			a.get("old", "k", 1, plan{Block: true})
			a.wantDone("old", 1, gotStale, v1)
			a.begun("old")

			test.do(b)
			for _, p := range g.members {
				p.get("new", "k", 5, plan{Block: true})
			}
			wantNew := func(loaded string) {
				for _, p := range g.members {
					p.wantDone("new", 5, test.kind, cmp.Or(test.text, loaded))
				}
			}
			final, loads := "set", 2
			if test.kind == gotStale { // no caller waits for the load
				wantNew("")
			}
			if test.loads {
				stored := g.stored("k")
				p, load := g.begun("new")
				p.release("new")
				g.awaitOtherEntry("k", stored)
				final, loads = load.Value, 3
			}
			if test.kind != gotStale {
				wantNew(final)
			}
			g.wantAll("k", 5, gotValue, final)
			g.wantRefused(a, "old", "k")
			g.wantAll("k", 5, gotValue, final)
			g.wantLoads("k", loads)
		})
	}
}

// A caller that finds no value during a refresh waits for the refresh: the value may have been
// evicted, or have reached the end of its TTL.
func TestRefresh_ValueGone(t *testing.T) {
	t.Parallel()
	g := newGroup(t, config{StaleWhileRevalidate: time.Hour})
	a := g.members[0]
	v := g.fill("k")
	a.expire("k")
	a.get("old", "k", 1, plan{Block: true})
	a.wantDone("old", 1, gotStale, v)
	load := a.begun("old")
	redistest.Must(t, g.rdb.Del(t.Context(), valueKey(g.namespace, "k")).Err())
	var others []waiters
	for _, p := range g.members {
		p.get("waits", "k", 10, plan{})
		if p != a {
			others = append(others, waiters{p, "waits", "k"})
		}
	}
	a.joined("waits")
	awaitWaiting(others...)
	a.release("old")
	for _, p := range g.members {
		p.wantDone("waits", 10, gotValue, load.Value)
	}
	g.wantLoads("k", 2)
	if s := a.stats(); s.Waits != 0 {
		t.Errorf("Stats.Waits is %d in the process that loads", s.Waits)
	}
}

// A key without readers is not refreshed.
func TestRefresh_NoReaders(t *testing.T) {
	t.Parallel()
	g := newGroup(t, config{Direct: true, TTL: 200 * time.Millisecond, StaleWhileRevalidate: time.Minute})
	for _, key := range []string{"left", "read"} {
		g.read(key, key, 2, 5*time.Millisecond, plan{Sleep: 20 * time.Millisecond})
	}
	loads := func(key string) int { return g.count(loadsKey(g.namespace, key)) }
	awaitRefreshes := func(n int) {
		t.Helper()
		before := loads("read")
		redistest.Await(t, "the other key has been refreshed often", func() bool { return loads("read") >= before+n })
	}
	awaitRefreshes(5)
	g.stop("left", gotValue, gotStale)
	awaitRefreshes(2) // loads that had begun have ended
	n := loads("left")
	if n < 2 {
		t.Errorf("%d loads while the key had readers", n)
	}
	awaitRefreshes(6)
	g.wantLoads("left", n)
	g.stop("read", gotValue, gotStale)
}

// A Redis that dies during refreshes breaks no reader.
//
//fault:crash-in-call
func TestRefresh_DeadRedis(t *testing.T) {
	t.Parallel()
	counters := redistest.Start(t)
	// A load takes longer than RedisTimeout. A caller that found Redis dead could load beside it.
	g := newGroup(t, config{
		Direct: true, Outage: true, Counters: counters.Addr,
		TTL: 300 * time.Millisecond, StaleWhileRevalidate: time.Minute,
		RedisTimeout: 200 * time.Millisecond, LockTTL: 2 * time.Second,
	})
	g.read("reads", "k", 3, 5*time.Millisecond, plan{Sleep: 500 * time.Millisecond})
	for range 2 {
		g.wantServed("reads", 2)
		for _, p := range g.members {
			p.stats() // its report comes after all earlier ones
			p.unread = nil
		}
		g.begun("reads")
		g.server.Kill()
		g.wantServed("reads", 2)
		g.server.Restart()
		for _, p := range g.members {
			before := p.stats()
			redistest.Await(t, p.name+" has hits again", func() bool {
				s := p.stats()
				return !s.BreakerOpen && s.Hits > before.Hits+100
			})
		}
		g.awaitOtherEntry("k", g.stored("k"))
	}
	g.stop("reads", gotValue, gotStale)
	for _, p := range g.members {
		r, s := p.tally("reads"), p.stats()
		// A caller does not wait for a load that has lost its lock.
		if r.Overlaps > s.LocksLost {
			t.Errorf("%s: %d loads began while another ran, with %d locks lost", p.name, r.Overlaps, s.LocksLost)
		}
	}
}

// An Expire in one process is seen by all processes at once.
func TestExpire_SeenByAll(t *testing.T) {
	t.Parallel()
	g := newGroup(t, config{Direct: true, StaleWhileRevalidate: time.Hour})
	for i, p := range g.members {
		key := fmt.Sprint("key", i)
		v := g.fill(key)
		g.wantAll(key, 5, gotValue, v)
		p.expire(key)
		for _, p := range g.members {
			p.get(key, key, 5, plan{Block: true})
		}
		for _, p := range g.members {
			p.wantDone(key, 5, gotStale, v)
		}
		by, load := g.begun(key)
		old := g.stored(key)
		by.release(key)
		g.awaitOtherEntry(key, old)
		g.wantAll(key, 5, gotValue, load.Value)
		g.wantLoads(key, 2)
	}
}
