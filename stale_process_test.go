package singlefill_test

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

// Tests of stale values and refreshes between processes. That nobody waits for a load is shown by the order of
// events: the test holds the load back, and every reader goes on.

// A crew is four processes of a fleet, or those that are left.
type crew struct {
	*fleet
	members []*user
	tags    int
}

func newCrew(t *testing.T, c config) *crew {
	t.Helper()
	f := newFleet(t)
	return &crew{fleet: f, members: f.all(4, c)}
}

// without is the crew without one.
func (c *crew) without(u *user) *crew {
	rest := slices.DeleteFunc(slices.Clone(c.members), func(m *user) bool { return m == u })
	return &crew{fleet: c.fleet, members: rest}
}

func (c *crew) tag() string {
	c.tags++
	return fmt.Sprintf("%d of %d", c.tags, len(c.members))
}

func (u *user) expire(key string) { u.t.Helper(); u.do(order{Op: "expire", Key: key}) }
func (u *user) pass(tag string)   { u.t.Helper(); u.order(order{Op: "pass", Tag: tag}) }
func (u *user) begins(tag string) { u.t.Helper(); u.await("begun", tag) }
func (u *user) tally(tag string) report {
	u.t.Helper()
	u.order(order{Op: "tally", Tag: tag})
	return u.await("tally", tag)
}

// fill has the first process load key, and returns the value.
func (c *crew) fill(key string) (value string) {
	c.t.Helper()
	u, tag := c.members[0], c.tag()
	u.get(tag, key, 1, plan{Source: c.count(sourceKey(c.namespace, key)) > 0})
	value = u.await("begun", tag).Value
	u.wantDone(tag, 1, gotValue, value)
	return value
}

// read begins n readers in each process.
func (c *crew) read(tag, key string, n int, every time.Duration, p plan) {
	c.t.Helper()
	for _, u := range c.members {
		u.order(order{Op: "read", Tag: tag, Key: key, N: n, Every: every, Plan: p})
	}
}

func (c *crew) counts(tag string) (all []int64) {
	c.t.Helper()
	for _, u := range c.members {
		all = append(all, u.tally(tag).Counts...)
	}
	return all
}

// wantServed waits until every single reader has made more calls.
func (c *crew) wantServed(tag string, more int64) {
	c.t.Helper()
	before := c.counts(tag)
	redistest.Await(c.t, fmt.Sprintf("every reader %q has made %d calls more", tag, more), func() bool {
		for i, n := range c.counts(tag) {
			if n < before[i]+more {
				return false
			}
		}
		return true
	})
}

// stop ends the readers and returns what they have got, of which nothing may be of other kinds.
func (c *crew) stop(tag string, kinds ...string) map[outcome]int {
	c.t.Helper()
	all := make(map[outcome]int)
	for _, u := range c.members {
		u.order(order{Op: "stop", Tag: tag})
	}
	for _, u := range c.members {
		for o, n := range u.done(tag) {
			all[o] += n
		}
	}
	for o, n := range all {
		if !slices.Contains(kinds, o.Kind) {
			c.t.Errorf("%d calls %q got %v", n, tag, o)
		}
	}
	return all
}

// begun waits for the beginning of a load for the calls of tag, in any process.
func (c *crew) begun(tag string) (by *user, r report) {
	c.t.Helper()
	redistest.Await(c.t, fmt.Sprintf("a load for %q begins", tag), func() bool {
		for _, u := range c.members {
			u.stats() // an answer that comes after all it has said
			if slices.ContainsFunc(u.rest, func(r report) bool { return r.Event == "begun" && r.Tag == tag }) {
				by, r = u, u.await("begun", tag)
				return true
			}
		}
		return false
	})
	return by, r
}

// wantAll asserts what each of n calls in each process gets.
func (c *crew) wantAll(key string, n int, kind, text string) {
	c.t.Helper()
	tag := c.tag()
	for _, u := range c.members {
		u.get(tag, key, n, plan{})
	}
	for _, u := range c.members {
		u.wantDone(tag, n, kind, text)
	}
}

// entry returns the entry that is stored for key.
func (f *fleet) entry(key string) entry.Entry {
	f.t.Helper()
	e, err := entry.Parse([]byte(f.stored(key)))
	if err != nil {
		f.t.Fatalf("entry of %q: %v", key, err)
	}
	return e
}

// rewrite changes the entry that is stored for key.
func (f *fleet) rewrite(key string, change func(e *entry.Entry)) {
	f.t.Helper()
	e := f.entry(key)
	change(&e)
	data, err := e.Encode()
	if err == nil {
		err = f.rdb.Set(f.t.Context(), valueKey(f.namespace, key), data, redis.KeepTTL).Err()
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

// say makes the source of key say something.
func (f *fleet) say(key, what string) {
	f.t.Helper()
	if err := f.rdb.Set(f.t.Context(), sourceKey(f.namespace, key), what, 0).Err(); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fleet) awaitStored(key, after string) {
	f.t.Helper()
	redistest.Await(f.t, fmt.Sprintf("another entry of %q is stored", key), func() bool { return f.stored(key) != after })
}

// refuses lets go a load that was held back, whose store has to be refused.
func (c *crew) refuses(u *user, tag, key string) {
	c.t.Helper()
	stored := c.stored(key)
	u.release(tag)
	redistest.Await(c.t, "the refused store is counted", func() bool { return u.stats().Fenced == 1 })
	if got := c.stored(key); got != stored || got == "" {
		c.t.Errorf("after the refused store Redis holds %q, and before it %q", got, stored)
	}
}

func TestEachExpiryIsOneLoadInTheFleetForWhichNoReaderWaits(t *testing.T) {
	t.Parallel()
	c := newCrew(t, config{Direct: true, TTL: 400 * time.Millisecond, StaleWhileRevalidate: time.Minute, EarlyRefresh: -1})
	c.fill("k")
	c.read("reads", "k", 3, 2*time.Millisecond, plan{Block: true})
	for n := 2; n <= 6; n++ {
		u, load := c.begun("reads")
		old, freshUntil := c.stored("k"), c.entry("k").FreshUntil
		if load.Nth != n || load.At.Before(freshUntil) {
			t.Errorf("load %d, want %d; %v after the end of the value's life", load.Nth, n, load.At.Sub(freshUntil))
		}
		c.wantServed("reads", 20)
		c.wantLoads("k", n)
		if c.stored("k") != old {
			t.Error("another entry is stored while the load is held back")
		}
		u.pass("reads")
		c.awaitStored("k", old)
	}
	c.wantServed("reads", 1)
	c.stop("reads", gotValue, gotStale)
	c.wantNoOverlap("k")
	for _, u := range c.members {
		if s := u.stats(); s.Misses+s.Fenced+s.LocksLost+s.RedisErrors > 1 || s.Refreshes < s.Loads-1 { // the first load
			t.Errorf("%s: %+v", u.name, s)
		}
	}
}

// One process of four refreshes early; the others leave it to that one and ask about it but once in a second.
func TestEarlyRefreshIsOneLoadInTheFleetForWhichNoReaderWaits(t *testing.T) {
	t.Parallel()
	c := newCrew(t, config{})
	v1 := c.fill("k")
	// A load that takes an hour is begun an hour before the end, about. The one that follows is quick.
	c.rewrite("k", func(e *entry.Entry) { e.LoadTime, e.FreshUntil = time.Hour, time.Now().Add(time.Minute) })
	old := c.stored("k")
	c.read("reads", "k", 3, 2*time.Millisecond, plan{Block: true})
	u, load := c.begun("reads")

	c.wantServed("reads", 1)
	others := c.without(u).members
	polls := func() (all []int) {
		for _, other := range others {
			all = append(all, other.polled("k"))
		}
		return all
	}
	begun, before := c.now(), polls()
	for c.now().Sub(begun) < 2*time.Second {
		c.wantServed("reads", 50)
	}
	after, took := polls(), c.now().Sub(begun)
	for i := range others {
		if n, most := after[i]-before[i], 1+int(took/time.Second); n > most {
			t.Errorf("%s has asked for the lock %d times in %v, want at most %d", others[i].name, n, took, most)
		}
	}
	c.wantLoads("k", 2)
	for _, u := range c.members {
		for _, o := range u.tally("reads").Outcomes {
			if o.outcome != (outcome{gotValue, v1}) {
				t.Errorf("%s: while the load is held back %d calls got %v", u.name, o.N, o.outcome)
			}
		}
	}

	u.pass("reads")
	c.awaitStored("k", old)
	c.wantAll("k", 5, gotValue, load.Value)
	c.wantServed("reads", 5)
	c.stop("reads", gotValue)
	c.wantLoads("k", 2)
}

// Nobody waits behind a refresh that finds another process at it.
func TestARefreshLeftToAnotherProcessIsNoWait(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	c := &crew{fleet: f, members: f.all(2, config{StaleWhileRevalidate: time.Hour})}
	c.fill("k")
	c.members[0].expire("k")
	c.members[0].get("held", "k", 1, plan{Block: true})
	c.members[0].begins("held")
	other := c.members[1]
	other.order(order{Op: "read", Tag: "reads", Key: "k", N: 1, Every: 5 * time.Millisecond})
	redistest.Await(t, "a second attempt to refresh follows the first", func() bool { return other.polled("k") >= 2 })
	if s := other.stats(); s.Waits != 0 {
		t.Errorf("%d waits while all reads were served at once", s.Waits)
	}
}

//fault:source-down
func TestAFailedLoadIsOnePerRetryAfterAndAllGetTheOldValue(t *testing.T) {
	const callers = 10
	hung := hasty
	hung.LoadTimeout = 2600 * time.Millisecond
	tests := []struct {
		name   string
		plan   plan
		holder config
		here   outcome
		remote string
	}{
		{"error", plan{Block: true, Fail: "no such table"}, config{}, outcome{gotItself, "no such table"}, "no such table"},
		{"panic", plan{Block: true, Panic: "index out of range"}, config{}, outcome{gotPanic, "index out of range"}, "index out of range"},
		{"hangs to LoadTimeout", plan{Block: true, Deaf: true}, hung, outcome{gotDeadline, ""}, "LoadTimeout"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			hangs := tt.holder.LoadTimeout > 0
			f := newFleet(t)
			member := func(m config) *user {
				m.StaleIfError, m.RetryAfter = time.Hour, 5*time.Minute
				return f.user(m)
			}
			c := &crew{fleet: f, members: []*user{member(tt.holder), member(config{}), member(config{}), member(config{})}}
			holder, others := c.members[0], c.members[1:]
			v := c.fill("k")
			c.members[1].expire("k")
			old := c.stored("k")
			loads := 1
			for step := range 3 {
				tag := fmt.Sprint("step", step)
				loads++
				holder.get(tag, "k", callers, tt.plan)
				holder.begins(tag)
				holder.boarded(tag)
				var places []place
				for _, u := range others {
					u.get(tag, "k", callers, plan{})
					places = append(places, place{u, tag, "k"})
				}
				if !hangs { // who comes too late to wait for a load that ends by itself finds what it left, the same
					awaitWaiting(places...)
					holder.release(tag)
				}
				holder.wantDone(tag, callers, gotStaleFor(tt.here.Kind), v+": "+tt.here.Text)
				wantRemote := func(u *user, tag string) {
					t.Helper()
					for o, n := range u.done(tag) {
						if o.Kind != gotStaleFor(gotRemote) || !strings.HasPrefix(o.Text, v+": ") || !strings.Contains(o.Text, tt.remote) || n != callers {
							t.Errorf("%d callers of %s got %v", n, u.name, o)
						}
					}
				}
				for _, u := range others {
					wantRemote(u, tag)
				}
				if hangs {
					holder.release(tag)
					holder.await("ended", tag)
				}
				c.wantLoads("k", loads)

				// Till RetryAfter has passed the source is left alone, by all, and nobody waits for anything.
				again := tag + " again"
				for _, u := range c.members {
					u.get(again, "k", callers, plan{Fail: "loaded too soon"})
				}
				for _, u := range c.members {
					wantRemote(u, again)
				}
				c.wantLoads("k", loads)

				if err := f.rdb.Del(t.Context(), lockKey(f.namespace, "k")).Err(); err != nil { // it has passed
					t.Fatal(err)
				}
				if !hangs { // only the first one has so short a LoadTimeout
					c.members = append(c.members[1:], c.members[0])
					holder, others = c.members[0], c.members[1:]
				}
			}
			if got := c.stored("k"); got != old {
				t.Errorf("Redis holds %q, and held %q", got, old)
			}
			holder.get("good", "k", callers, plan{})
			good := holder.await("begun", "good").Value
			holder.wantDone("good", callers, gotValue, good)
			c.wantAll("k", callers, gotValue, good)
			c.wantNoOverlap("k")
		})
	}
}

//fault:source-down
func TestAnOutageOfTheSourceIsOneLoadPerRetryAfterAndNoError(t *testing.T) {
	t.Parallel()
	const retryAfter = time.Second
	outage := time.Minute
	if testing.Short() {
		outage = 5 * time.Second
	}
	c := newCrew(t, config{Direct: true, StaleWhileRevalidate: 30 * time.Minute, StaleIfError: 2 * time.Hour, RetryAfter: retryAfter})
	keys := []struct {
		name  string
		late  time.Duration
		stale []outcome
	}{
		{"served at once", time.Minute, []outcome{{gotStale, "1"}}},
		{"served on error", time.Hour, []outcome{{gotStaleFor(gotItself), "1: no answer"}, {gotStaleFor(gotRemote), "1: no answer"}}},
	}
	for _, k := range keys {
		c.say(k.name, "1")
		c.fill(k.name)
		c.rewrite(k.name, func(e *entry.Entry) { e.FreshUntil = time.Now().Add(-k.late) })
		c.say(k.name, sourceDown)
	}
	begun := c.now()
	for _, k := range keys {
		c.read(k.name, k.name, 2, 20*time.Millisecond, plan{Source: true, Fail: "no answer"})
	}
	for c.now().Sub(begun) < outage {
		for _, k := range keys {
			c.wantServed(k.name, 10)
		}
	}
	for _, k := range keys {
		c.say(k.name, "2")
	}
	took := c.now().Sub(begun)

	for _, k := range keys {
		after := outcome{gotValue, "2"}
		for _, u := range c.members {
			redistest.Await(t, fmt.Sprintf("%q of %s is new", k.name, u.name), func() bool {
				return counted(u.tally(k.name).Outcomes)[after] > 0
			})
		}
		for o, n := range c.stop(k.name, gotValue, gotStale, gotStaleFor(gotItself), gotStaleFor(gotRemote)) {
			if o != after && !slices.Contains(k.stale, o) {
				t.Errorf("%d readers of %q got %v", n, k.name, o)
			}
		}
		c.wantNoOverlap(k.name)

		var at []time.Time
		for _, u := range c.members {
			for _, r := range u.rest {
				if r.Event == "begun" && r.Tag == k.name && r.Value == sourceDown {
					at = append(at, r.At)
				}
			}
		}
		slices.SortFunc(at, time.Time.Compare)
		for i := range at[1:] {
			if gap := at[i+1].Sub(at[i]); gap < retryAfter {
				t.Errorf("%q: load %d of the outage began %v after the one before", k.name, i+1, gap)
			}
		}
		most := int(took/retryAfter) + 1
		if n := len(at); n > most || n < most/3 {
			t.Errorf("%q: %d loads in an outage of %v, want %d to %d", k.name, n, took, most/3, most)
		}
	}
}

//fault:killed-refresher
func TestARefresherThatIsGoneIsReplacedAndNoReaderWaits(t *testing.T) {
	for _, how := range []string{"killed", "frozen"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			patient := config{Direct: true, StaleWhileRevalidate: time.Hour}
			mortal := hasty
			mortal.Direct, mortal.StaleWhileRevalidate = true, time.Hour
			c := &crew{fleet: f, members: f.all(3, patient)}
			gone := f.user(mortal)
			v1 := c.fill("k")
			c.members[0].expire("k")
			old := c.stored("k")
			gone.get("gone", "k", 1, plan{Block: true})
			gone.wantDone("gone", 1, gotStale, v1)
			gone.begins("gone")

			c.read("reads", "k", 3, 5*time.Millisecond, plan{Block: true})
			c.wantServed("reads", 5)
			c.wantLoads("k", 2)
			lock := f.locked("k")
			if how == "killed" {
				gone.Kill()
			} else {
				gone.Freeze()
			}
			if f.locked("k") == lock {
				c.wantServed("reads", 5) // while the lock of the one that is gone stands
			}
			u, load := c.begun("reads")
			c.wantServed("reads", 5)
			if c.stored("k") != old {
				t.Error("another entry is stored while the loads are held back")
			}
			u.pass("reads")
			c.awaitStored("k", old)
			c.wantAll("k", 3, gotValue, load.Value)
			c.wantServed("reads", 1)
			for o := range c.stop("reads", gotValue, gotStale) {
				if o != (outcome{gotStale, v1}) && o != (outcome{gotValue, load.Value}) {
					t.Errorf("readers got %v", o)
				}
			}
			if how == "frozen" {
				gone.Thaw()
				c.refuses(gone, "gone", "k")
				c.members = append(c.members, gone)
				c.wantAll("k", 3, gotValue, load.Value)
			}
			c.wantLoads("k", 3)
		})
	}
}

func TestExpireInOneProcessIsSeenByAllAtOnce(t *testing.T) {
	t.Parallel()
	c := newCrew(t, config{Direct: true, StaleWhileRevalidate: time.Hour})
	for i, u := range c.members {
		key := fmt.Sprint("key", i)
		v := c.fill(key)
		c.wantAll(key, 5, gotValue, v)
		u.expire(key)
		for _, u := range c.members {
			u.get(key, key, 5, plan{Block: true})
		}
		for _, u := range c.members {
			u.wantDone(key, 5, gotStale, v)
		}
		by, load := c.begun(key)
		old := c.stored(key)
		by.release(key)
		c.awaitStored(key, old)
		c.wantAll(key, 5, gotValue, load.Value)
		c.wantLoads(key, 2)
	}
}

// A refresh that began before is refused at its store, and before that nobody waits for it: not even in its own
// process, where a value that is gone has to be loaded anew.
func TestWhatAnotherProcessDoesToTheKeyRefusesARefresh(t *testing.T) {
	tests := map[string]struct {
		do       func(u *user)
		kind     string // what calls get after it; gotValue without a text: what a load brings
		text     string
		reloaded bool
	}{
		"Delete": {do: func(u *user) { u.delete("k") }, kind: gotValue, reloaded: true},
		"Set":    {do: func(u *user) { u.set("k", "set") }, kind: gotValue, text: "set"},
		"Expire": {do: func(u *user) { u.expire("k") }, kind: gotStale, text: "process1/1", reloaded: true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCrew(t, config{Direct: true, StaleWhileRevalidate: time.Hour})
			a, b := c.members[0], c.members[1]
			v1 := c.fill("k")
			b.expire("k")
			a.get("old", "k", 1, plan{Block: true})
			a.wantDone("old", 1, gotStale, v1)
			a.begins("old")

			tt.do(b)
			for _, u := range c.members {
				u.get("new", "k", 5, plan{Block: true})
			}
			got := func(final string) {
				for _, u := range c.members {
					u.wantDone("new", 5, tt.kind, cmp.Or(tt.text, final))
				}
			}
			final, loads := "set", 2
			if tt.kind == gotStale { // nobody waits for the load
				got("")
			}
			if tt.reloaded {
				stored := c.stored("k")
				by, load := c.begun("new")
				by.release("new")
				c.awaitStored("k", stored)
				final, loads = load.Value, 3
			}
			if tt.kind != gotStale {
				got(final)
			}
			c.wantAll("k", 5, gotValue, final)
			c.refuses(a, "old", "k")
			c.wantAll("k", 5, gotValue, final)
			c.wantLoads("k", loads)
		})
	}
}

// The value may be gone before its refresh has ended: evicted, or at the end of its TTL.
func TestWhoFindsTheValueGoneWaitsForTheRefreshUnderWay(t *testing.T) {
	t.Parallel()
	c := newCrew(t, config{StaleWhileRevalidate: time.Hour})
	a := c.members[0]
	v := c.fill("k")
	a.expire("k")
	a.get("old", "k", 1, plan{Block: true})
	a.wantDone("old", 1, gotStale, v)
	load := a.await("begun", "old")
	if err := c.rdb.Del(t.Context(), valueKey(c.namespace, "k")).Err(); err != nil {
		t.Fatal(err)
	}
	var others []place
	for _, u := range c.members {
		u.get("waits", "k", 10, plan{})
		if u != a {
			others = append(others, place{u, "waits", "k"})
		}
	}
	a.boarded("waits")
	awaitWaiting(others...)
	a.release("old")
	for _, u := range c.members {
		u.wantDone("waits", 10, gotValue, load.Value)
	}
	c.wantLoads("k", 2)
	if s := a.stats(); s.Waits != 0 {
		t.Errorf("%d waits for another process in the one that loads", s.Waits)
	}
}

func TestARefreshThatComesAfterAnotherOneLoadsNothing(t *testing.T) {
	t.Parallel()
	c := newCrew(t, config{StaleWhileRevalidate: time.Hour})
	a, b := c.members[0], c.members[1]
	v := c.fill("k")
	a.expire("k")
	a.get("first", "k", 1, plan{Block: true})
	load := a.await("begun", "first")
	ask := b.proxy.On(scripts, redistest.HoldRequest).Times(1)
	b.get("second", "k", 1, plan{})
	b.wantDone("second", 1, gotStale, v)
	redistest.Await(t, "the second refresh asks for the lock", func() bool { return ask.Fired() > 0 })
	old := c.stored("k")
	a.release("first")
	c.awaitStored("k", old)
	ask.Release()
	b.do(order{Op: "close"}) // waits for what is under way
	c.wantLoads("k", 2)
	c.without(b).wantAll("k", 1, gotValue, load.Value)
}

//fault:crash-in-call
func TestARedisThatDiesAmidRefreshesBreaksNoReader(t *testing.T) {
	t.Parallel()
	tally := redistest.Start(t)
	// A load takes longer than Redis is waited for: who finds Redis dead during a refresh could load beside it.
	c := newCrew(t, config{
		Direct: true, Outage: true, Tally: tally.Addr,
		TTL: 300 * time.Millisecond, StaleWhileRevalidate: time.Minute,
		RedisTimeout: 200 * time.Millisecond, LockTTL: 2 * time.Second,
	})
	c.read("reads", "k", 3, 5*time.Millisecond, plan{Sleep: 500 * time.Millisecond})
	for range 2 {
		c.wantServed("reads", 2)
		for _, u := range c.members {
			u.stats() // an answer that comes after all it has said
			u.rest = nil
		}
		c.begun("reads")
		c.server.Kill()
		c.wantServed("reads", 2)
		c.server.Restart()
		for _, u := range c.members {
			before := u.stats()
			redistest.Await(t, u.name+" has hits again", func() bool {
				s := u.stats()
				return !s.BreakerOpen && s.Hits > before.Hits+100
			})
		}
		c.awaitStored("k", c.stored("k"))
	}
	c.stop("reads", gotValue, gotStale)
	for _, u := range c.members {
		r, s := u.tally("reads"), u.stats()
		// Who comes while a load runs that has lost its lock does not wait for it.
		if r.Overlaps > s.LocksLost {
			t.Errorf("%s: %d loads began while another ran, with %d locks lost", u.name, r.Overlaps, s.LocksLost)
		}
	}
}

func TestAKeyThatNobodyReadsAnyMoreIsNotRefreshed(t *testing.T) {
	t.Parallel()
	const life = 200 * time.Millisecond
	c := newCrew(t, config{Direct: true, TTL: life, StaleWhileRevalidate: time.Minute})
	for _, key := range []string{"left", "read"} {
		c.read(key, key, 2, 5*time.Millisecond, plan{Sleep: 20 * time.Millisecond})
	}
	loads := func(key string) int { return c.count(loadsKey(c.namespace, key)) }
	lives := func(n int) {
		t.Helper()
		before := loads("read")
		redistest.Await(t, "the other key has been loaded often", func() bool { return loads("read") >= before+n })
	}
	lives(5)
	c.stop("left", gotValue, gotStale)
	lives(5) // what was begun has ended
	n := loads("left")
	if n < 2 {
		t.Errorf("%d loads while it was read", n)
	}
	lives(15)
	c.wantLoads("left", n)
	c.stop("read", gotValue, gotStale)
}
