package cache_test

import (
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// The order of events shows that no reader waits for a load: the test blocks the load, and every
// reader goes on.

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
