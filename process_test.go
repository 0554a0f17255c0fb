package singlefill_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// Tests of promises that hold between processes. Every process is a process, and Redis is Redis; loads are
// counted by the loads themselves.

// hasty is for a holder whose lock is to end soon without it. It is the only kind of process that a stalled
// machine could keep from asking Redis in time, so it is given as much time as a test can wait.
var hasty = config{LockTTL: 2500 * time.Millisecond, RedisTimeout: 800 * time.Millisecond}

//fault:very-many
//fault:cold-key
func TestColdKeyIsLoadedOnceInTheFleet(t *testing.T) {
	const callers = 100
	rounds := 100
	if testing.Short() {
		rounds = 10
	}
	f := newFleet(t)
	users := f.all(8, config{Direct: true})
	for round := range rounds {
		tag := fmt.Sprint("round", round)
		for _, u := range users {
			u.order(order{Op: "get", Tag: tag, Key: tag, N: callers, Start: true, Plan: plan{Sleep: 10 * time.Millisecond}})
		}
		for _, u := range users {
			u.await("ready", tag)
		}
		for _, u := range users {
			u.order(order{Op: "start", Tag: tag})
		}
		got := make(map[outcome]int)
		for _, u := range users {
			for o, n := range u.done(tag) {
				got[o] += n
			}
		}
		f.wantLoads(tag, 1)
		f.wantNoOverlap(tag)
		for o, n := range got {
			if o.Kind != gotValue || n != len(users)*callers {
				t.Errorf("round %d: %d callers got %v", round, n, o)
			}
		}
		if t.Failed() {
			break
		}
	}
	for _, u := range users {
		if s := u.stats(); s.LoadsUnlocked+s.RedisErrors+s.Fenced+s.LocksLost+s.BadValues > 0 {
			t.Errorf("%s: %+v", u.name, s)
		}
	}
}

//fault:everything-cold
func TestManyKeysAreLoadedOnceEach(t *testing.T) {
	const keys, callers = 200, 50
	f := newFleet(t)
	users := f.all(4, config{Direct: true})

	// One load blocks all the while: no other key waits for its lock.
	users[0].get("blocked", "another key", 1, plan{Block: true})
	users[0].await("begun", "blocked")

	for _, u := range users {
		u.order(order{Op: "sweep", Tag: "sweep", N: callers, Keys: keys, Plan: plan{Sleep: 2 * time.Millisecond}})
	}
	got := make(map[outcome]int)
	for _, u := range users {
		for o, n := range counted(u.await("sweep", "sweep").Outcomes) {
			got[o] += n
		}
	}
	for o, n := range got {
		if o.Kind != gotValue || n != len(users)*callers {
			t.Errorf("%d callers got %v", n, o)
		}
	}
	if len(got) != keys {
		t.Errorf("%d different outcomes for %d keys", len(got), keys)
	}
	for i := range keys {
		f.wantLoads(fmt.Sprint("key", i), 1)
	}
	users[0].release("blocked")
	users[0].wantDone("blocked", 1, gotValue, users[0].name+"/1")
}

//fault:killed-holder
func TestWaiterTakesOverFromKilledHolder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	waiters := f.all(2, config{})
	holder := f.user(hasty)

	holder.get("dies", "k", 1, plan{Block: true})
	holder.await("begun", "dies")
	for _, u := range waiters {
		u.get("waits", "k", 10, plan{})
		u.waiting("waits", "k")
	}
	lock := f.locked("k")

	holder.Kill()
	end := f.lockEnd("k")
	if got := f.locked("k"); got != lock {
		t.Fatalf("before the kill the lock held %q, after it %q", lock, got)
	}

	got := make(map[outcome]int)
	for _, u := range waiters {
		for o, n := range u.done("waits") {
			got[o] += n
		}
	}
	f.wantLoads("k", 2)
	var second report
	for _, u := range waiters {
		for _, r := range u.rest {
			if r.Event == "begun" {
				second = r
			}
		}
	}
	if got[outcome{gotValue, second.Value}] != 20 {
		t.Errorf("second load %+v; callers got %v", second, got)
	}
	// Nothing but the end of the lock lets the waiters in. PTTL is rounded, by less than 1 ms.
	if second.At.Before(end.Add(-time.Millisecond)) {
		t.Errorf("second load began %v before the end of the lock", end.Sub(second.At))
	}
	if late := second.At.Sub(end); late > time.Second {
		t.Errorf("second load began %v after the end of the lock", late)
	}
}

//fault:killed-waiters
func TestKilledWaiterHurtsNobody(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(3, config{})
	holder, dies, waits := users[0], users[1], users[2]
	holder.get("load", "k", 1, plan{Block: true})
	v := holder.await("begun", "load").Value
	for _, u := range []*user{dies, waits} {
		u.get("waits", "k", 10, plan{})
		u.waiting("waits", "k")
	}
	dies.Kill()
	holder.release("load")
	holder.wantDone("load", 1, gotValue, v)
	waits.wantDone("waits", 10, gotValue, v)
	f.wantLoads("k", 1)
}

// A holder that is killed with its store executed and not answered has stored for all; nothing else is left.
//
//fault:killed-at-store
func TestHolderKilledAfterItsStoreLeavesOnlyTheValue(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(2, config{})
	holder, other := users[0], users[1]
	other.get("first", "another key", 1, plan{}) // the server knows the scripts then
	other.done("first")

	holder.get("load", "k", 1, plan{Block: true})
	v := holder.await("begun", "load").Value
	reply := holder.proxy.On(scripts, redistest.HoldReply)
	other.get("waits", "k", 10, plan{})
	other.waiting("waits", "k")
	holder.release("load")
	redistest.Await(t, "the value is stored and the store not answered", func() bool {
		return reply.Fired() > 0 && f.stored("k") != ""
	})
	holder.Kill()

	other.wantDone("waits", 10, gotValue, v)
	f.wantLoads("k", 1)
	if got := f.locked("k"); got != "" {
		t.Errorf("lock %q", got)
	}
}

// A holder that is killed in the moment in which it was given the lock leaves a lock that ends.
//
//fault:killed-at-store
func TestHolderKilledBeforeItKnowsIsReplaced(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	holder := f.user(hasty)
	other := f.user(config{})
	other.get("first", "another key", 1, plan{}) // the server knows the scripts then
	other.done("first")

	reply := holder.proxy.On(scripts, redistest.HoldReply)
	holder.get("dies", "k", 1, plan{})
	redistest.Await(t, "the lock is taken", func() bool { return f.locked("k") != "" })
	holder.Kill()
	if reply.Fired() == 0 {
		t.Fatal("no reply was held back")
	}
	other.get("next", "k", 1, plan{})
	other.wantDone("next", 1, gotValue, other.name+"/2")
}

//fault:frozen-holder
func TestFrozenHolderIsReplacedAndItsStoreRefused(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	other := f.user(config{})
	holder := f.user(hasty)

	// The callers come while the lock is asked for, others when the load has begun.
	ask := holder.proxy.On(scripts, redistest.HoldRequest)
	holder.get("early", "k", 5, plan{Block: true})
	holder.boarded("early")
	redistest.Await(t, "a poll is held back", func() bool { return ask.Fired() > 0 })
	ask.Release()
	v1 := holder.await("begun", "early").Value
	holder.get("late", "k", 5, plan{})
	holder.boarded("late")

	other.get("waits", "k", 10, plan{})
	other.waiting("waits", "k")
	holder.Freeze()
	v2 := other.await("begun", "waits").Value
	other.wantDone("waits", 10, gotValue, v2)
	stored := f.stored("k")

	holder.Thaw()
	// Those who came during the load need not wait for it when its lock is known to be lost.
	holder.wantDone("late", 5, gotValue, v2)
	holder.unfinished("early")
	holder.release("early")
	holder.wantDone("early", 5, gotValue, v1)

	if got := f.stored("k"); got != stored {
		t.Errorf("Redis holds %q, and held %q before the thaw", got, stored)
	}
	if got := holder.peek("k"); got != (outcome{gotValue, v2}) {
		t.Errorf("Get in the first process: %v", got)
	}
	redistest.Await(t, "the refused store is counted", func() bool { return holder.stats().Fenced == 1 })
	if s := holder.stats(); s.LocksLost != 1 || s.Stored != 0 {
		t.Errorf("stats of the first process: %+v", s)
	}
	f.wantLoads("k", 2)
}

//fault:slow-load
func TestLoadLongerThanLockTTLKeepsItsLock(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	waiters := f.all(2, config{})
	holder := f.user(hasty)

	holder.get("load", "k", 1, plan{Block: true})
	begun := holder.await("begun", "load")
	for _, u := range waiters {
		u.get("waits", "k", 10, plan{})
		u.waiting("waits", "k")
	}
	lock := f.locked("k")
	redistest.Await(t, "the load has taken far longer than LockTTL", func() bool {
		if got := f.locked("k"); got != lock {
			t.Fatalf("%v into the load its lock holds %q, want %q", f.now().Sub(begun.At), got, lock)
		}
		return f.now().Sub(begun.At) > 2*hasty.LockTTL
	})
	holder.release("load")
	holder.wantDone("load", 1, gotValue, begun.Value)
	for _, u := range waiters {
		u.wantDone("waits", 10, gotValue, begun.Value)
	}
	f.wantLoads("k", 1)
	if s := holder.stats(); s.LocksLost+s.Fenced != 0 {
		t.Errorf("%+v", s)
	}
}

//fault:hung-load
func TestHungLoadIsReplacedAfterLoadTimeout(t *testing.T) {
	const loadTimeout = 2600 * time.Millisecond
	hung := hasty
	hung.LoadTimeout = loadTimeout

	t.Run("by the next caller, when the lock is released", func(t *testing.T) {
		t.Parallel()
		f := newFleet(t)
		holder, other := f.user(hung), f.user(config{})
		holder.get("hangs", "k", 1, plan{Block: true, Deaf: true})
		begun := holder.await("begun", "hangs")
		other.get("waits", "k", 10, plan{})
		other.waiting("waits", "k")
		holder.wantDone("hangs", 1, gotDeadline, "")
		for o, n := range other.done("waits") {
			if o.Kind != gotRemote || !strings.Contains(o.Text, "LoadTimeout") || n != 10 {
				t.Errorf("%d waiters got %v", n, o)
			}
		}
		if early := loadTimeout - f.now().Sub(begun.At); early > 0 {
			t.Errorf("the load was given up %v before LoadTimeout", early)
		}
		other.get("next", "k", 1, plan{})
		other.wantDone("next", 1, gotValue, other.name+"/1")
		f.wantLoads("k", 2)
	})

	t.Run("by a waiter, when the release is lost", func(t *testing.T) {
		t.Parallel()
		f := newFleet(t)
		holder, other := f.user(hung), f.user(config{})
		abandon := faultAct(t, "abandon")
		release := holder.proxy.On(func(cmd []string) bool {
			says := func(arg string) bool { return strings.Contains(arg, "took longer than LoadTimeout") }
			return slices.ContainsFunc(cmd, says) || abandon(cmd)
		}, redistest.CloseBefore)
		holder.get("hangs", "k", 1, plan{Block: true, Deaf: true})
		first := holder.await("begun", "hangs")
		other.get("waits", "k", 10, plan{})
		other.waiting("waits", "k")
		holder.wantDone("hangs", 1, gotDeadline, "")
		end := f.lockEnd("k")
		second := other.await("begun", "waits")
		other.wantDone("waits", 10, gotValue, second.Value)
		if release.Fired() == 0 {
			t.Error("no release was lost")
		}
		if second.At.Before(end.Add(-time.Millisecond)) {
			t.Errorf("the second load began %v before the end of the lock", end.Sub(second.At))
		}
		if late := end.Sub(first.At) - loadTimeout - hung.LockTTL; late > hung.RedisTimeout { // of the last renewal
			t.Errorf("the lock ends %v after LoadTimeout + LockTTL", late)
		}
		if late := second.At.Sub(end); late > time.Second {
			t.Errorf("the second load began %v after the end of the lock", late)
		}
		f.wantLoads("k", 2)
	})
}

// failures are the ways in which a load fails, and what comes back where.
var failures = []struct {
	name         string
	plan         plan
	here, remote outcome
}{
	{"error", plan{Fail: "no such table"}, outcome{gotItself, "no such table"}, outcome{gotRemote, "no such table"}},
	{"not found, not remembered", plan{NotFound: true}, outcome{gotNotFound, ""}, outcome{gotNotFound, ""}},
	{"panic", plan{Panic: "index out of range"}, outcome{gotPanic, "index out of range"},
		outcome{gotRemote, "singlefill: Loader panicked: index out of range"}},
}

//fault:failed-load
func TestFailureReachesAllWhoWaited(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(8, config{NotFoundTTL: -1})
	holder, waiters := users[0], users[1:]
	for i, failure := range failures {
		key := failure.name
		p := failure.plan
		p.Block = true
		holder.get("fails"+key, key, 1, p)
		holder.await("begun", "fails"+key)
		holder.get("joins"+key, key, 9, failure.plan)
		holder.boarded("joins" + key)
		var places []place
		for _, u := range waiters {
			u.get("waits"+key, key, 10, plan{})
			places = append(places, place{u, "waits" + key, key})
		}
		awaitWaiting(places...)
		holder.release("fails" + key)
		holder.wantDone("fails"+key, 1, failure.here.Kind, failure.here.Text)
		holder.wantDone("joins"+key, 9, failure.here.Kind, failure.here.Text)
		for _, u := range waiters {
			u.wantDone("waits"+key, 10, failure.remote.Kind, failure.remote.Text)
		}
		f.wantLoads(key, 1)
		if got := f.stored(key); got != "" {
			t.Errorf("%s: stored %q", key, got)
		}

		// Who comes later loads anew, in whatever process.
		next := users[i*3%len(users)]
		next.get("next"+key, key, 1, plan{})
		v := next.await("begun", "next"+key)
		next.wantDone("next"+key, 1, gotValue, v.Value)
		for _, u := range users {
			u.get("after"+key, key, 1, plan{})
		}
		for _, u := range users {
			u.wantDone("after"+key, 1, gotValue, v.Value)
		}
		f.wantLoads(key, 2)
		f.wantNoOverlap(key)
	}
}

// Between the failure and the waiters' next look at Redis a newcomer takes the lock: those who waited get
// the failure all the same, and neither wait for the newcomer's load nor load themselves.
func TestFailureReachesWaitersBehindANewcomer(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(3, config{NotFoundTTL: -1})
	holder, newcomer, waiter := users[0], users[1], users[2]
	for _, failure := range failures {
		key := failure.name
		p := failure.plan
		p.Block = true
		holder.get("fails"+key, key, 1, p)
		holder.await("begun", "fails"+key)
		waiter.get("waits"+key, key, 10, plan{})
		waiter.waiting("waits"+key, key)

		poll := waiter.proxy.On(scripts, redistest.HoldRequest).Times(1)
		redistest.Await(t, "a poll is held back", func() bool { return poll.Fired() > 0 })
		holder.release("fails" + key)
		holder.wantDone("fails"+key, 1, failure.here.Kind, failure.here.Text)
		newcomer.get("comes"+key, key, 1, plan{Block: true})
		v := newcomer.await("begun", "comes"+key).Value
		poll.Release()
		waiter.wantDone("waits"+key, 10, failure.remote.Kind, failure.remote.Text)

		newcomer.unfinished("comes" + key)
		waiter.get("again"+key, key, 10, plan{})
		waiter.waiting("again"+key, key)
		newcomer.release("comes" + key)
		newcomer.wantDone("comes"+key, 1, gotValue, v)
		waiter.wantDone("again"+key, 10, gotValue, v)
		f.wantLoads(key, 2)
	}
}

// A call that begins after the failure does not get it, not even in a process that waits and has not yet
// heard of the failure, where it meets those who do.
//
//fault:failed-load
func TestCallAfterTheFailureLoadsAnew(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(2, config{})
	holder, waiter := users[0], users[1]
	holder.get("fails", "k", 1, plan{Block: true, Fail: "no such table"})
	holder.await("begun", "fails")
	waiter.get("waits", "k", 10, plan{})
	waiter.waiting("waits", "k")

	poll := waiter.proxy.On(scripts, redistest.HoldRequest).Times(1)
	redistest.Await(t, "a poll is held back", func() bool { return poll.Fired() > 0 })
	holder.release("fails")
	holder.wantDone("fails", 1, gotItself, "no such table")
	waiter.get("later", "k", 10, plan{})
	waiter.boarded("later")
	poll.Release()

	waiter.wantDone("waits", 10, gotRemote, "no such table")
	v := waiter.await("begun", "later").Value
	waiter.wantDone("later", 10, gotValue, v)
	f.wantLoads("k", 2)

	holder.get("holder", "k", 1, plan{})
	holder.wantDone("holder", 1, gotValue, v)
}

//fault:delete-in-load
func TestDeleteInAnotherProcessRefusesTheLoad(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(2, config{})
	a, b := users[0], users[1]
	a.get("old", "k", 1, plan{Block: true})
	v1 := a.await("begun", "old").Value
	b.delete("k")
	a.release("old")
	a.wantDone("old", 1, gotValue, v1) // it came before the Delete
	if value, lock := f.stored("k"), f.locked("k"); value != "" || lock != "" {
		t.Errorf("after the load: value %q, lock %q", value, lock)
	}
	redistest.Await(t, "the refused store is counted", func() bool { return a.stats().Fenced == 1 })
	if got := b.peek("k"); got.Kind != gotMiss {
		t.Errorf("Get: %v", got)
	}
}

//fault:delete-in-load
func TestCallAfterDeleteDoesNotWaitForTheOldLoad(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(3, config{})
	a, b, d := users[0], users[1], users[2]
	a.get("old", "k", 1, plan{Block: true})
	v1 := a.await("begun", "old").Value
	// They came during the load and before the Delete: either value is right.
	a.get("joins", "k", 5, plan{})
	a.boarded("joins")

	b.delete("k")
	a.get("new", "k", 5, plan{})
	got := a.done("new") // while the old load is blocked
	stored := f.stored("k")
	f.wantLoads("k", 2)
	var v2 string
	for o, n := range got {
		if v2 = o.Text; o.Kind != gotValue || o.Text == v1 || n != 5 {
			t.Errorf("after Delete %d callers got %v; old %q", n, o, v1)
		}
	}
	a.unfinished("old")
	for _, u := range []*user{b, d} {
		u.get("new", "k", 5, plan{})
		u.wantDone("new", 5, gotValue, v2)
	}

	a.release("old")
	a.wantDone("old", 1, gotValue, v1)
	for o := range a.done("joins") {
		if o != (outcome{gotValue, v1}) && o != (outcome{gotValue, v2}) {
			t.Errorf("callers between load and Delete got %v", o)
		}
	}
	redistest.Await(t, "the refused store is counted", func() bool { return a.stats().Fenced == 1 })
	if got := f.stored("k"); got != stored {
		t.Errorf("Redis holds %q, and held %q before the old load ended", got, stored)
	}
	if got := a.peek("k"); got != (outcome{gotValue, v2}) {
		t.Errorf("Get: %v", got)
	}
	f.wantLoads("k", 2)
}

//fault:delete-in-load
func TestSetInAnotherProcessStays(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(3, config{})
	a, b, d := users[0], users[1], users[2]
	a.get("old", "k", 1, plan{Block: true})
	v1 := a.await("begun", "old").Value
	b.get("waits", "k", 10, plan{})
	b.waiting("waits", "k")

	d.set("k", "set")
	stored := f.stored("k")
	a.get("new", "k", 5, plan{})
	a.wantDone("new", 5, gotValue, "set") // while the old load is blocked
	b.wantDone("waits", 10, gotValue, "set")
	a.unfinished("old")

	a.release("old")
	a.wantDone("old", 1, gotValue, v1)
	redistest.Await(t, "the refused store is counted", func() bool { return a.stats().Fenced == 1 })
	if got := f.stored("k"); got != stored {
		t.Errorf("Redis holds %q, and held %q before the old load ended", got, stored)
	}
	f.wantLoads("k", 1)
}

// Whoever waits for a load whose lock is deleted takes over, before the old load ends or whether it ever does.
func TestWaiterTakesOverAfterDelete(t *testing.T) {
	for _, deleter := range []string{"waiter", "holder", "third"} {
		t.Run("of the "+deleter, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			users := f.all(3, config{})
			a, b := users[0], users[1]
			deleters := map[string]*user{"waiter": b, "holder": a, "third": users[2]}
			a.get("old", "k", 1, plan{Block: true})
			v1 := a.await("begun", "old").Value
			b.get("waits", "k", 10, plan{})
			b.waiting("waits", "k")

			deleters[deleter].delete("k")
			v2 := b.await("begun", "waits").Value
			b.wantDone("waits", 10, gotValue, v2)
			stored := f.stored("k")
			a.unfinished("old")

			a.release("old")
			a.wantDone("old", 1, gotValue, v1)
			redistest.Await(t, "the refused store is counted", func() bool { return a.stats().Fenced == 1 })
			if got := f.stored("k"); got != stored {
				t.Errorf("Redis holds %q, and held %q before the old load ended", got, stored)
			}
			f.wantLoads("k", 2)
		})
	}
}

// The old load ends while the new one runs: neither is the new one's lock given back nor the old value stored.
func TestOldLoadDoesNotTouchTheLockOfItsSuccessor(t *testing.T) {
	olds := map[string]plan{"value": {}}
	for _, failure := range failures {
		olds[failure.name] = failure.plan
	}
	for name, old := range olds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			old.Block = true
			f := newFleet(t)
			users := f.all(2, config{NotFoundTTL: -1})
			a, b := users[0], users[1]
			a.get("old", "k", 1, old)
			a.await("begun", "old")
			b.delete("k")
			b.get("new", "k", 1, plan{Block: true})
			v2 := b.await("begun", "new").Value
			lock := f.locked("k")
			a.release("old")
			a.done("old")
			if got := f.stored("k"); got != "" {
				t.Errorf("stored %q", got)
			}
			if got := f.locked("k"); got != lock {
				t.Errorf("lock %q, and before the old load ended %q", got, lock)
			}
			a.get("waits", "k", 5, plan{})
			a.waiting("waits", "k")
			b.release("new")
			b.wantDone("new", 1, gotValue, v2)
			a.wantDone("waits", 5, gotValue, v2)
			f.wantLoads("k", 2)
		})
	}
}

// No order of reads, loads and Deletes lets a call that begins after a Delete get what was loaded before it.
//
//fault:delete-in-load
func TestNobodyReadsOlderThanDeleted(t *testing.T) {
	t.Parallel()
	rounds := 150
	if testing.Short() {
		rounds = 15
	}
	f := newFleet(t)
	users := f.all(3, config{})
	for i, u := range users {
		u.order(order{Op: "churn", Tag: "churn", Key: fmt.Sprint("key", i), Keys: len(users), N: rounds, Plan: plan{Source: true, Sleep: time.Millisecond}})
	}
	for _, u := range users {
		for _, o := range u.await("churn", "churn").Outcomes {
			t.Errorf("%s: %d times %v", u.name, o.N, o.outcome)
		}
	}
}

// maxPolls is how often one process may ask Redis for one key while it waits so long for another process, of whose
// loads it knows nothing: after 2 ms, then ever more rarely, after a fifth of the load's age, at most every 250 ms, each
// pause a quarter shorter than it is on average. Two more are for the command under way at the beginning and for one on
// account of those who came just before.
func maxPolls(wait time.Duration) int {
	n := 2
	for waited := time.Duration(0); waited < wait; n++ {
		waited += min(max(2*time.Millisecond, waited/5), 250*time.Millisecond) * 3 / 4
	}
	return n
}

//fault:long-waits
func TestWaitingCostsFewCommandsForAnyNumberOfCallers(t *testing.T) {
	for _, callers := range []int{1, 100} {
		t.Run(fmt.Sprint(callers), func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			users := f.all(2, config{})
			holder, waiter := users[0], users[1]
			holder.get("load", "k", 1, plan{Block: true})
			v := holder.await("begun", "load").Value

			gets := waiter.proxy.On(redistest.Command("GET"), redistest.Pass)
			waiter.get("waits", "k", callers, plan{})
			waiter.boarded("waits")
			begun, before := f.now(), waiter.polled("k")
			others := waiter.proxy.On(func(cmd []string) bool { return !scripts(cmd) }, redistest.Pass)
			redistest.Await(t, "the wait has taken 2 s", func() bool { return f.now().Sub(begun) > 2*time.Second })
			polls, wait := waiter.polled("k")-before, f.now().Sub(begun)
			waiter.unfinished("waits")

			if most := maxPolls(wait); polls < 2 || polls > most {
				t.Errorf("%d polls in %v, want 2 to %d", polls, wait, most)
			}
			if gets.Fired() > 2 || others.Fired() != 0 { // a second one for callers that came during the first
				t.Errorf("%d times GET, want 2 at most; %d other commands", gets.Fired(), others.Fired())
			}
			holder.release("load")
			waiter.wantDone("waits", callers, gotValue, v)
			f.wantLoads("k", 1)
		})
	}
}

// For somebody new the value may be there already, so it is looked for sooner; but not for each of them.
//
//fault:long-waits
func TestNewcomersDoNotCostACommandEach(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(2, config{})
	holder, waiter := users[0], users[1]
	holder.get("load", "k", 1, plan{Block: true})
	v := holder.await("begun", "load").Value
	waiter.get("first", "k", 1, plan{})
	waiter.boarded("first")

	const crowds, crowd = 100, 20
	begun, before := f.now(), waiter.polled("k")
	for i := range crowds {
		tag := fmt.Sprint("crowd", i)
		waiter.get(tag, "k", crowd, plan{})
		waiter.boarded(tag)
	}
	polls, wait := waiter.polled("k")-before, f.now().Sub(begun)
	if most := maxPolls(wait) + int(wait/(10*time.Millisecond)); polls > most {
		t.Errorf("%d polls in %v for %d callers, want at most %d", polls, wait, crowds*crowd, most)
	}
	holder.release("load")
	waiter.wantDone("first", 1, gotValue, v)
	for i := range crowds {
		waiter.wantDone(fmt.Sprint("crowd", i), crowd, gotValue, v)
	}
	f.wantLoads("k", 1)
}

//fault:waiting-callers
func TestWaitingHoldsNoConnection(t *testing.T) {
	t.Parallel()
	const keys, callers, conns = 50, 10, 2
	f := newFleet(t)
	holder, waiter := f.user(config{}), f.user(config{PoolSize: conns})
	var places []place
	for i := range keys {
		key := fmt.Sprint("key", i)
		holder.get(key, key, 1, plan{Block: true})
		holder.await("begun", key)
		waiter.get(key, key, callers, plan{})
		places = append(places, place{waiter, key, key})
	}
	awaitWaiting(places...)
	redistest.Await(t, "all connections are idle while all keys are waited for", func() bool {
		p := waiter.pool()
		if p.TotalConns > conns {
			t.Fatalf("pool %+v", p)
		}
		return p.TotalConns > 0 && p.IdleConns == p.TotalConns
	})
	waiter.do(order{Op: "ping"})
	waiter.set("another", "v")
	if got := waiter.peek("another"); got != (outcome{gotValue, "v"}) {
		t.Errorf("Get while waiting: %v", got)
	}
	waiter.get("mine", "mine", 5, plan{})
	v := waiter.await("begun", "mine").Value
	waiter.wantDone("mine", 5, gotValue, v)
	if s := waiter.stats(); s.Loading != 0 || s.Waits != 0 || s.RedisErrors != 0 {
		t.Errorf("stats while waiting: %+v", s)
	}
	for i := range keys {
		holder.release(fmt.Sprint("key", i))
	}
	for i := range keys {
		key := fmt.Sprint("key", i)
		waiter.wantDone(key, callers, gotValue, fmt.Sprintf("%s/%d", holder.name, i+1))
	}
	if s := waiter.stats(); s.Waits != keys || s.Loads != 1 {
		t.Errorf("stats: %+v", s)
	}
}

//fault:close
func TestCloseDuringALoadStoresIt(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(2, config{})
	closes, waits := users[0], users[1]
	for _, key := range []string{"good", "bad"} {
		p := plan{Block: true}
		if key == "bad" {
			p.Fail = "no such table"
		}
		closes.get(key, key, 1, p)
		closes.await("begun", key)
		waits.get(key, key, 10, plan{})
		waits.waiting(key, key)
	}
	closes.order(order{Op: "close", Tag: "close"})
	redistest.Await(t, "new calls are refused", func() bool { return closes.peek("good").Kind == gotClosed })
	f.wantLoads("good", 1)

	closes.release("bad")
	closes.wantDone("bad", 1, gotItself, "no such table")
	waits.wantDone("bad", 10, gotRemote, "no such table")
	closes.release("good")
	closes.await("close", "close")
	if f.stored("good") == "" || f.locked("good") != "" {
		t.Errorf("Close has returned; value %q, lock %q", f.stored("good"), f.locked("good"))
	}
	closes.wantDone("good", 1, gotValue, closes.name+"/1")
	waits.wantDone("good", 10, gotValue, closes.name+"/1")
	f.wantLoads("good", 1)
}

//fault:close
func TestCloseEndsWaitingForAnotherProcess(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(2, config{})
	holder, closes := users[0], users[1]
	holder.get("load", "k", 1, plan{Block: true})
	v := holder.await("begun", "load").Value
	closes.get("waits", "k", 10, plan{})
	closes.waiting("waits", "k")
	closes.do(order{Op: "close"})
	closes.wantDone("waits", 10, gotClosed, "")
	holder.release("load")
	holder.wantDone("load", 1, gotValue, v)
	f.wantLoads("k", 1)
}

func TestHitsDoNotMindTheLock(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	users := f.all(3, config{})
	users[0].set("k", "v")
	// What the lock of a holder looks like that never renews nor releases it.
	users[0].get("another", "another", 1, plan{Block: true})
	users[0].await("begun", "another")
	foreign := f.locked("another")
	if err := f.rdb.Set(t.Context(), lockKey(f.namespace, "k"), foreign, time.Minute).Err(); err != nil {
		t.Fatal(err)
	}
	for _, u := range users {
		gets := u.proxy.On(redistest.Command("GET"), redistest.Pass)
		others := u.proxy.On(func(cmd []string) bool { return !strings.EqualFold(cmd[0], "HELLO") }, redistest.Pass)
		u.get("hits", "k", 100, plan{})
		u.wantDone("hits", 100, gotValue, "v")
		if gets.Fired() == 0 || others.Fired() != 0 {
			t.Errorf("%s: %d times GET, %d other commands", u.name, gets.Fired(), others.Fired())
		}
		if s := u.stats(); s.Hits != 100 || s.Waits+s.Misses != 0 {
			t.Errorf("%s: %+v", u.name, s)
		}
	}
	if got := f.locked("k"); got != foreign {
		t.Errorf("lock %q", got)
	}

	// The lock is a lock all the same: without the value there is something to wait for.
	if err := f.rdb.Del(t.Context(), valueKey(f.namespace, "k")).Err(); err != nil {
		t.Fatal(err)
	}
	users[0].get("waits", "k", 1, plan{})
	users[0].waiting("waits", "k")
	users[1].set("k", "v2")
	users[0].wantDone("waits", 1, gotValue, "v2")
	f.wantLoads("k", 0)
}
