package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

// refreshKinds are entries of v0 that every read refreshes. One is stale. The other one soon will
// be, and its load took so long that an early refresh is certain.
var refreshKinds = map[string]func() entry.Entry{
	"stale": func() entry.Entry {
		return entry.Entry{FreshUntil: time.Now().Add(-time.Second), WrittenAt: time.Now().Add(-time.Minute), Payload: []byte("v0")}
	},
	"early": func() entry.Entry {
		return entry.Entry{FreshUntil: time.Now().Add(time.Second), WrittenAt: time.Now(), LoadTime: 1000 * time.Hour, Payload: []byte("v0")}
	},
}

const notToBeKept = "a value that is not to be kept"

func refreshOptions() *singlefill.Options[string] {
	return &singlefill.Options[string]{
		Codec: singlefill.Raw, Jitter: -1, StaleWhileRevalidate: time.Hour, RetryAfter: time.Hour, NotFoundTTL: -1,
		TTLFunc: func(_, v string) time.Duration {
			if v == notToBeKept {
				return 0
			}
			return time.Hour
		},
	}
}

// A refreshing is a cache in the middle of a refresh of the key k.
type refreshing struct {
	*singlefill.Cache[string]
	elsewhere *singlefill.Cache[string] // in another process
	src       *source[string]
	load      *loading[string] // of the refresh
	ns        string
}

func beginRefresh(t testing.TB, rdb, look redis.UniversalClient, kind string) *refreshing {
	t.Helper()
	r := &refreshing{ns: redistest.Namespace(t)}
	r.Cache, r.elsewhere = newCacheIn(t, rdb, r.ns, refreshOptions()), newCacheIn(t, rdb, r.ns, refreshOptions())
	r.src = newSource[string](t)
	putEntry(t, look, r.ns, "k", refreshKinds[kind](), time.Hour)
	goGet(t.Context(), r.Cache, "k", r.src.load).want(t, "v0")
	r.load = r.src.next(t)
	return r
}

func (r *refreshing) by(where string) *singlefill.Cache[string] {
	if where == "here" {
		return r.Cache
	}
	return r.elsewhere
}

// refreshEach runs a test in the middle of a refresh of every kind, on every client, for each
// variant.
func refreshEach(t *testing.T, run func(t *testing.T, variant string, r *refreshing, rdb, look redis.UniversalClient), variants ...string) {
	if len(variants) == 0 {
		variants = []string{""}
	}
	userEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		for kind := range refreshKinds {
			for _, variant := range variants {
				t.Run(strings.TrimSuffix(kind+", "+variant, ", "), func(t *testing.T) { run(t, variant, beginRefresh(t, rdb, look, kind), rdb, look) })
			}
		}
	})
}

// supersede invalidates the key k.
func supersede(t testing.TB, c *singlefill.Cache[string], how string) {
	t.Helper()
	var err error
	switch how {
	case "Delete":
		err = c.Delete(context.Background(), "k")
	case "Set":
		err = c.Set(context.Background(), "k", "set")
	case "Expire":
		err = c.Expire(context.Background(), "k")
	}
	if err != nil {
		t.Fatal(err)
	}
}

var supersededLeaves = map[string]string{"Delete": "", "Set": "set", "Expire": "v0"}

// wantCommands checks how many commands a server gets while during runs.
func wantCommands(t *testing.T, m *miniredis.Miniredis, what string, least, most int, during func()) {
	t.Helper()
	n := m.CommandCount()
	during()
	synctest.Wait()
	if n = m.CommandCount() - n; n < least || n > most {
		t.Errorf("%s: %d commands, want %d to %d", what, n, least, most)
	}
}

// A stale value is served at once, in all processes, until one of them has refreshed it.
func TestStaleWhileRevalidate_OneRefresh(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		var e events
		opts := staleOptions(time.Minute, 0)
		opts.Trace = staleTrace(&e)
		fleet := newCaches(t, m, ns, 3, opts)
		src := newSource[string](t)
		setStale(t, fleet[0], "k", "old", time.Second)
		ask(t.Context(), fleet[0], "k", src.load).wantOld(t, "the first reader", time.Second, nil)
		load := src.next(t)
		e.want(t, "the first reader", "hit k", "stale k true, 1h0m1s old, <nil>", "start k")
		for range 20 {
			for _, c := range fleet {
				ask(t.Context(), c, "k", src.load).wantOld(t, "at once", time.Second, nil)
			}
		}
		time.Sleep(50 * time.Second)
		for _, c := range fleet {
			ask(t.Context(), c, "k", src.load).wantOld(t, "while the refresh runs", 51*time.Second, nil)
			v, err := c.Get(t.Context(), "k")
			wantValue(t, v, err, "old")
		}
		synctest.Wait()
		src.want(t, 1)
		e.seen = nil
		load.give("new")
		synctest.Wait()
		e.want(t, "the refresh", "done k <nil>, stored true, refresh true")
		for i, c := range fleet {
			ask(t.Context(), c, "k", src.load).wantFresh(t, "refreshed", "new")
			want := singlefill.Stats{Hits: 23, Stale: 22, StaleHits: 22}
			if i == 0 {
				want = singlefill.Stats{Hits: 24, Stale: 23, StaleHits: 23, Loads: 1, Refreshes: 1, Stored: 1}
			}
			s := c.Stats()
			s.Waits = 0 // which TestRefresh_LeftIsNoWait counts
			if s != want {
				t.Errorf("process %d: %+v, want %+v", i, s, want)
			}
		}
		synctest.Wait()
		src.want(t, 1)
	})
}

// Readers of a value that can be served do not wait for its refresh because of a short outage.
func TestStaleWhileRevalidate_ShortOutage(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var fail atomic.Bool
		rdb.AddHook(before(func(cmd redis.Cmder) error {
			if cmd.Name() == "get" && fail.Swap(false) {
				return errors.New("connection reset")
			}
			return nil
		}))
		c := oldCache(t, rdb, singlefill.Options[string]{StaleWhileRevalidate: time.Minute}, "old", time.Second)
		refreshing := newSource[string](t)
		<-goAsk(t.Context(), c, "k", refreshing.load)
		refresh := refreshing.next(t)
		fail.Store(true)
		if a := <-goAsk(t.Context(), c, "k", mustNotLoad[string](t)); a.value != "old" || a.err != nil || fail.Load() {
			t.Errorf("the reader whose GET failed is answered %+v", a)
		}

		m.SetError("LOADING dataset")
		away := goAsk(t.Context(), c, "k", mustNotLoad[string](t)) // there is nothing to serve
		time.Sleep(3 * time.Second)
		m.SetError("")
		time.Sleep(3 * time.Second)
		if a := <-goAsk(t.Context(), c, "k", mustNotLoad[string](t)); a.value != "old" || a.err != nil {
			t.Errorf("a reader after the outage is answered %+v", a)
		}
		refresh.give("new")
		if a := <-away; a.value != "new" || a.err != nil {
			t.Errorf("the reader that waited for the refresh got %+v", a)
		}
	})
}

// Readers of a stale value wait neither for a lock nor for a slot.
func TestRefresh_ReadersNeverWait(t *testing.T) {
	for kind := range refreshKinds {
		t.Run(kind, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns := redistest.Namespace(t)
				opts := refreshOptions()
				opts.MaxLoads = 1
				c := newCacheIn(t, rdb, ns, opts)
				src := newSource[string](t)
				putEntry(t, rdb, ns, "k", refreshKinds[kind](), time.Hour)
				lock := "H" + strings.Repeat("T", 26) + fmt.Sprintf("%016d", time.Now().UnixMicro())
				if err := rdb.Set(t.Context(), ns+":{k}:lock", lock, 20*time.Second).Err(); err != nil { // of a process that is dead
					t.Fatal(err)
				}
				busy := goGet(t.Context(), c, "busy", src.load) // takes the only slot
				other := src.next(t)
				read := func() {
					t.Helper()
					begun := time.Now()
					v, err := c.GetOrLoad(t.Context(), "k", src.load)
					wantValue(t, v, err, "v0")
					wantElapsed(t, "a read", begun, 0)
				}
				for range 40 { // the lock ends after half of it
					read()
					time.Sleep(time.Second)
				}
				src.want(t, 1)
				other.give("v")
				busy.want(t, "v")
				time.Sleep(time.Second) // the refresh is not tried again before
				read()
				load := src.next(t)
				read()
				load.give("v1")
				synctest.Wait()
				goGet(t.Context(), c, "k", src.load).want(t, "v1")
				src.want(t, 2)
			})
		})
	}
}

// Each read is one GET while a refresh runs, here or elsewhere.
func TestRefresh_EachReadIsOneGET(t *testing.T) {
	t.Parallel()
	const reads = 1000
	for kind := range refreshKinds {
		for _, where := range []string{"here", "elsewhere"} {
			t.Run(kind+", "+where, func(t *testing.T) {
				t.Parallel()
				p, ns, here, elsewhere, rdb := proxied(t, refreshOptions())
				putEntry(t, rdb, ns, "k", refreshKinds[kind](), time.Hour)
				src := newSource[string](t)
				begun := time.Now()
				goGet(t.Context(), map[string]*singlefill.Cache[string]{"here": here, "elsewhere": elsewhere}[where], "k", src.load).want(t, "v0")
				load := src.next(t)
				gets := p.On(redistest.Command("get"), redistest.Pass)
				scripts := p.On(redistest.Command("evalsha", "eval"), redistest.Pass)
				others := p.On(func(cmd []string) bool { return !redistest.Command("hello")(cmd) }, redistest.Pass)
				hits := here.Stats().Hits
				for range reads {
					v, err := here.GetOrLoad(t.Context(), "k", mustNotLoad[string](t))
					wantValue(t, v, err, "v0")
				}
				// A lock held elsewhere is looked at once a second, and one held here renewed more rarely.
				most := int(time.Since(begun) / time.Second)
				if where == "elsewhere" {
					most++
				}
				if n := gets.Fired(); n != reads {
					t.Errorf("%d GETs for %d reads", n, reads)
				}
				if n := scripts.Fired(); n > most {
					t.Errorf("%d scripts for %d reads, want at most %d", n, reads, most)
				}
				if n := others.Fired(); n > 0 {
					t.Errorf("%d other commands for %d reads", n, reads)
				}
				if n := here.Stats().Hits - hits; n != reads {
					t.Errorf("%d hits of %d reads", n, reads)
				}
				load.give("v1")
				wantGet(t, here, "k", "v1", nil)
				src.want(t, 1)
			})
		}
	}
}

// A refresh is left to the process that holds the lock, and is tried again a second later.
func TestRefresh_LeftToItsHolder(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		fleet := newCaches(t, m, ns, 2, staleOptions(time.Hour, 0))
		here, there := fleet[0], fleet[1]
		src := newSource[string](t)
		setStale(t, there, "k", "old", 0)
		read := func() { ask(t.Context(), here, "k", src.load) }
		ask(t.Context(), there, "k", src.load)
		load := src.next(t)
		read()
		synctest.Wait()
		wantCommands(t, m, "within a second", 9, 9, func() {
			for range 9 {
				time.Sleep(100 * time.Millisecond)
				read()
			}
		})
		wantCommands(t, m, "after a second", 2, 100, func() { time.Sleep(100 * time.Millisecond); read() })
		wantCommands(t, m, "no reads", 0, 0, func() { time.Sleep(5 * time.Second) }) // the lock is renewed after 6.67s
		load.give("new")
		synctest.Wait()

		// The holder dies: its lock stays, for less than a second.
		setStale(t, there, "k", "old", 0)
		if err := rdb.Set(t.Context(), ns+":{k}:lock", "HOTHEROTHEROTHEROTHEROTHERO0123456789012345", 400*time.Millisecond).Err(); err != nil {
			t.Fatal(err)
		}
		for range 4 {
			read()
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
			src.want(t, 1)
		}
		read()
		src.next(t).give("new")
		synctest.Wait()
		wantStored(t, rdb, ns, "k", "new")
	})
}

// A refresh that is left to another process is no wait.
func TestRefresh_LeftIsNoWait(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		var e events
		opts := staleOptions(time.Minute, 0)
		opts.Trace = e.trace()
		fleet := newCaches(t, m, redistest.Namespace(t), 2, opts)
		src := newSource[string](t)
		setStale(t, fleet[0], "k", "old", 0)
		ask(t.Context(), fleet[0], "k", src.load).wantOld(t, "here", 0, nil)
		src.next(t)
		ask(t.Context(), fleet[1], "k", src.load).wantOld(t, "there", 0, nil)
		synctest.Wait()
		e.want(t, "two reads", "hit k", "start k", "hit k")
		if n := fleet[1].Stats().Waits; n != 0 {
			t.Errorf("%d waits", n)
		}
	})
}

// A refresh that gives up at once, again and again, is no wait.
func TestRefresh_GivenUpIsNoWait(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := singlefill.Options[string]{StaleWhileRevalidate: time.Hour}
		a, b := oldCache(t, rdb, opts, "old", 0), oldCache(t, rdb, opts, "old", time.Second)
		source := newSource[string](t)
		<-goAsk(t.Context(), a, "k", source.load)
		refresh := source.next(t)
		for range 50 {
			<-goAsk(t.Context(), b, "k", mustNotLoad[string](t))
			time.Sleep(100 * time.Millisecond)
		}
		if n := b.Stats().Waits; n != 0 {
			t.Errorf("%d waits, but no call has waited", n)
		}
		refresh.give("new")
	})
}

// A refresh gives way to loads that callers wait for.
func TestRefresh_GivesWayToLoads(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var scripts atomic.Int64
		rdb.AddHook(before(func(cmd redis.Cmder) error {
			if strings.HasPrefix(cmd.Name(), "eval") {
				scripts.Add(1)
			}
			return nil
		}))
		c := oldCache(t, rdb, singlefill.Options[string]{StaleWhileRevalidate: time.Hour, MaxLoads: 1}, "old", time.Second)
		slow := newSource[string](t)
		first := goGet(t.Context(), c, "first", slow.load)
		busy := slow.next(t)
		scripts.Store(0)
		for range 100 {
			if a := <-goAsk(t.Context(), c, "k", mustNotLoad[string](t)); a.value != "old" || a.took != 0 {
				t.Fatalf("answered %+v", a)
			}
			time.Sleep(10 * time.Millisecond)
		}
		if n := scripts.Load(); n > 10 { // the renewals of the first load
			t.Errorf("%d scripts for refreshes that have no slot", n)
		}
		second := goGet(t.Context(), c, "second", gives("v"))
		synctest.Wait()
		busy.give("v")
		first.want(t, "v")
		second.want(t, "v")
		time.Sleep(2 * time.Second)
		<-goAsk(t.Context(), c, "k", gives("new"))
		synctest.Wait()
		wantGet(t, c, "k", "new", nil)
	})
}

// An entry that has just been refreshed is not refreshed again.
//
// A replica, or the client's own cache, shows the old entry for a moment after the refresh.
func TestRefresh_NotAgainAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, staleOptions(time.Hour, 0))
		setStale(t, c, "k", "old", 0)
		data, _ := stored(t, rdb, ns+":{k}")
		src := &countedSource{value: "new"}
		ask(t.Context(), c, "k", src.load).wantOld(t, "the reader that begins it", 0, nil)
		src.wantLoads(t, "a refresh", 1)
		_ = m.Set(ns+":{k}", data)
		m.SetTTL(ns+":{k}", time.Hour)
		for range 9 {
			time.Sleep(11 * time.Millisecond)
			ask(t.Context(), c, "k", src.load)
		}
		src.wantLoads(t, "within 100ms", 1)
		time.Sleep(time.Millisecond)
		ask(t.Context(), c, "k", src.load)
		src.wantLoads(t, "after 100ms", 2)
		// A changed entry is refreshed at once.
		if err := c.Expire(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		ask(t.Context(), c, "k", src.load)
		src.wantLoads(t, "expired", 3)
	})
}

// A short outage stops refreshes for a second, not for RetryAfter.
func TestRefresh_AfterAShortOutage(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var fail atomic.Bool
		rdb.AddHook(before(func(cmd redis.Cmder) error {
			if strings.HasPrefix(cmd.Name(), "eval") && fail.Load() {
				return errors.New("connection reset")
			}
			return nil
		}))
		c := oldCache(t, rdb, singlefill.Options[string]{StaleWhileRevalidate: 2 * time.Hour, RetryAfter: time.Hour}, "old", time.Second)
		fail.Store(true)
		<-goAsk(t.Context(), c, "k", mustNotLoad[string](t))
		time.Sleep(500 * time.Millisecond) // it has tried for as long as one command may take
		fail.Store(false)
		time.Sleep(time.Second)
		<-goAsk(t.Context(), c, "k", gives("new"))
		synctest.Wait()
		wantGet(t, c, "k", "new", nil)
	})
}

// A refresh has the context values of the call that began it, and ends at LoadTimeout.
func TestRefresh_Context(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		opts := staleOptions(time.Hour, 0)
		opts.RetryAfter = time.Second
		c := newCacheIn(t, rdb, ns, opts)
		src := newSource[string](t)
		setStale(t, c, "k", "old", 0)
		begun := time.Now()
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), traceKey{}, "kept"), time.Second)
		ask(ctx, c, "k", src.load).wantOld(t, "the reader that begins it", 0, nil)
		cancel()
		load := src.next(t)
		time.Sleep(time.Minute - 1)
		if deadline, _ := load.ctx.Deadline(); load.ctx.Value(traceKey{}) != "kept" || load.ctx.Err() != nil || !deadline.Equal(begun.Add(time.Minute)) {
			t.Errorf("the Loader's context: %v, %v; ends after %v", load.ctx.Value(traceKey{}), load.ctx.Err(), deadline.Sub(begun))
		}
		ask(t.Context(), c, "k", mustNotLoad[string](t)).wantOld(t, "just before LoadTimeout", time.Minute-1, nil)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if load.ctx.Err() != context.DeadlineExceeded {
			t.Errorf("at LoadTimeout the Loader's context says %v", load.ctx.Err())
		}
		wantUnlocked(t, rdb, ns, "k")
		time.Sleep(time.Second)
		ask(t.Context(), c, "k", gives("new")).wantOld(t, "after RetryAfter", time.Minute+time.Second, nil)
		synctest.Wait()
		load.give("left behind")
		synctest.Wait()
		wantStored(t, rdb, ns, "k", "new")
		if s := c.Stats(); s.LoadErrors != 1 || s.Refreshes != 2 || s.Stored != 1 {
			t.Errorf("%+v, want one failed refresh and one stored", s)
		}
	})
}

// A refresh can ask for other keys, and for its own as long as that can be served.
func TestRefresh_AsksForKeys(t *testing.T) {
	for _, test := range []struct {
		name string
		then time.Duration // the Loader asks
		want answer
	}{
		{"while it can be served", time.Second, answer{value: "old", info: singlefill.ValueInfo{Stale: true, Age: staleLife + 51*time.Second}}},
		{"when it can not be served any more", 10 * time.Second, answer{err: singlefill.ErrRecursive}},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				opts := staleOptions(time.Minute, 0)
				opts.MaxLoads = 1
				c := newCache(t, rdb, opts)
				setStale(t, c, "k", "old", 50*time.Second)
				replies := make(chan answer, 1)
				ask(t.Context(), c, "k", func(ctx context.Context, _ string) (string, error) {
					time.Sleep(test.then)
					replies <- ask(ctx, c, "k", mustNotLoad[string](t))
					return c.GetOrLoad(ctx, "other", gives("other"))
				}).wantOld(t, "the reader that begins it", 50*time.Second, nil)
				receive(t, "a reply", replies).want(t, "its own key", test.want)
				synctest.Wait()
				ask(t.Context(), c, "k", mustNotLoad[string](t)).wantFresh(t, "refreshed", "other")
				if s := c.Stats(); s.Loads != 2 || s.Refreshes != 1 {
					t.Errorf("%+v, want a refresh, and the load of the other key in it", s)
				}
			})
		})
	}
}

// A refresh that panics or exits frees its lock, and a later one succeeds.
func TestRefresh_Panic(t *testing.T) {
	for name, load := range map[string]singlefill.Loader[string]{
		"panic":  func(context.Context, string) (string, error) { panic("boom") },
		"Goexit": func(context.Context, string) (string, error) { runtime.Goexit(); return "", nil },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns := redistest.Namespace(t)
				c := newCacheIn(t, rdb, ns, staleOptions(time.Minute, 0))
				setStale(t, c, "k", "old", 0)
				ask(t.Context(), c, "k", load).wantOld(t, "the reader that begins it", 0, nil)
				synctest.Wait()
				wantUnlocked(t, rdb, ns, "k")
				time.Sleep(time.Second)
				ask(t.Context(), c, "k", gives("new")).wantOld(t, "after RetryAfter", time.Second, nil)
				synctest.Wait()
				wantStored(t, rdb, ns, "k", "new")
				if s := c.Stats(); s.LoadPanics != 1 || s.LoadErrors != 1 || s.Refreshes != 2 {
					t.Errorf("%+v, want one panic", s)
				}
			})
		})
	}
}

// A codec that exits in a refresh harms no other call.
func TestRefresh_CodecExits(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var decodes atomic.Int64
		codec := badCodec{Codec: singlefill.Raw, unmarshal: func(any) error {
			if decodes.Add(1) == 2 { // of the refresh, after the reader's
				runtime.Goexit()
			}
			return nil
		}}
		c := oldCache(t, rdb, singlefill.Options[string]{StaleWhileRevalidate: time.Second, Codec: codec}, "old", 500*time.Millisecond)
		if a := <-goAsk(t.Context(), c, "k", mustNotLoad[string](t)); a.value != "old" || a.err != nil {
			t.Errorf("the reader is answered %+v", a)
		}
		time.Sleep(5 * time.Second)
		if a := <-goAsk(t.Context(), c, "k", gives("new")); a.value != "new" || a.err != nil || decodes.Load() != 2 {
			t.Errorf("a later caller is answered %+v", a)
		}
	})
}

// A refresh whose value cannot be encoded has failed: RetryAfter holds.
func TestRefresh_ValueThatCannotBeEncoded(t *testing.T) {
	for _, kind := range windowKinds {
		t.Run(kind.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns := redistest.Namespace(t)
				opts := kind.opts()
				opts.RetryAfter = 10 * time.Second
				opts.Codec = badCodec{Codec: singlefill.Raw, marshal: func(v any) error {
					if v == "cannot be encoded" {
						return errors.New("no")
					}
					return nil
				}}
				fleet := newCaches(t, m, ns, 2, opts)
				setStale(t, fleet[0], "k", "old", 0)
				src := &countedSource{value: "cannot be encoded"}
				r := ask(t.Context(), fleet[0], "k", src.load)
				if kind.ifError {
					r.wantFresh(t, "the caller that waited for it", "cannot be encoded")
				} else {
					r.wantOld(t, "the reader that began it", 0, nil)
				}
				synctest.Wait()
				time.Sleep(opts.RetryAfter - time.Millisecond)
				for _, c := range fleet {
					r := ask(t.Context(), c, "k", src.load)
					if kind.ifError {
						r.wantRemote(t, "within RetryAfter", opts.RetryAfter-time.Millisecond, "its value could not be stored")
					} else {
						r.wantOld(t, "within RetryAfter", opts.RetryAfter-time.Millisecond, nil)
					}
				}
				src.wantLoads(t, "within RetryAfter", 1)
				time.Sleep(time.Millisecond)
				synctest.Wait()
				ask(t.Context(), fleet[0], "k", src.load)
				src.wantLoads(t, "after RetryAfter", 2)
				wantStored(t, rdb, ns, "k", "old")
				if s := fleet[0].Stats(); s.StoreErrors != 2 || s.LoadErrors != 0 {
					t.Errorf("%+v, want two store errors", s)
				}
			})
		})
	}
}

// A refusal is an error reply.
type refusal string

func (e refusal) Error() string { return string(e) }
func (refusal) RedisError()     {}

// A refresh whose value Redis refuses has failed: RetryAfter holds.
func TestRefresh_RefusedStore(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var refuse atomic.Bool
		isStore := isScript(t, "store")
		rdb.AddHook(before(func(cmd redis.Cmder) error {
			if refuse.Load() && isStore(argsOf(cmd)) {
				return refusal("ERR invalid bulk length")
			}
			return nil
		}))
		c := oldCache(t, rdb, singlefill.Options[string]{StaleWhileRevalidate: time.Hour, RetryAfter: 10 * time.Second}, "old", time.Second)
		refuse.Store(true)
		for range 200 {
			if a := <-goAsk(t.Context(), c, "k", gives("too large")); a.value != "old" || a.err != nil {
				t.Fatalf("answered %+v", a)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if s := c.Stats(); s.Loads != 2 || s.StoreErrors != 2 {
			t.Errorf("%d loads and %d store errors in 20 s, want one for each RetryAfter, 2", s.Loads, s.StoreErrors)
		}
	})
}

// A refresh that finds nothing to keep removes the old value.
func TestRefresh_NothingToKeep(t *testing.T) {
	for _, test := range []struct {
		name string
		set  func(o *singlefill.Options[string])
		load singlefill.Loader[string]
		want answer // of the caller that waits for the load
		kept bool   // remembered instead
	}{
		{
			"not found", func(o *singlefill.Options[string]) { o.NotFoundTTL = -1 },
			fails[string](fmt.Errorf("wrapped: %w", singlefill.ErrNotFound)), answer{}, false,
		},
		{"not found, remembered", func(*singlefill.Options[string]) {}, fails[string](singlefill.ErrNotFound), answer{err: singlefill.ErrNotFound}, true},
		{
			"a value without a life", func(o *singlefill.Options[string]) {
				o.TTLFunc = func(_, v string) time.Duration {
					if v == "dead" {
						return 0
					}
					return staleLife
				}
			}, gives("dead"), answer{value: "dead"}, false,
		},
	} {
		for _, kind := range windowKinds {
			t.Run(test.name+", "+kind.name, func(t *testing.T) {
				inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
					ns := redistest.Namespace(t)
					opts := kind.opts()
					test.set(opts)
					fleet := newCaches(t, m, ns, 2, opts)
					setStale(t, fleet[0], "k", "old", time.Second)
					r := ask(t.Context(), fleet[0], "k", test.load)
					switch {
					case !kind.ifError:
						r.wantOld(t, "the reader that begins it", time.Second, nil)
					case test.want == answer{}:
						if !errors.Is(r.err, singlefill.ErrNotFound) || r.err == singlefill.ErrNotFound || r.info.Stale {
							t.Errorf("got %+v, want the Loader's error", r)
						}
					default:
						r.want(t, "the caller that waits for it", test.want)
					}
					synctest.Wait()
					if s := fleet[0].Stats(); s.LoadErrors != 0 || s.StaleOnError != 0 {
						t.Errorf("%+v, want no failure", s)
					}
					if test.kept {
						ask(t.Context(), fleet[1], "k", mustNotLoad[string](t)).want(t, "remembered", answer{err: singlefill.ErrNotFound})
						return
					}
					wantStored(t, rdb, ns, "k", "")
					if record, found := stored(t, rdb, ns+":{k}:lock"); found && test.want.value != "" {
						t.Errorf("the lock key holds %q, though nothing has failed", record)
					}
					ask(t.Context(), fleet[1], "k", gives("new")).wantFresh(t, "the next caller", "new")
				})
			})
		}
	}
}

// A refresh that finds nothing to keep empties the key, on every client, and the next call loads at
// once.
func TestRefresh_EmptiesTheKey(t *testing.T) {
	t.Parallel()
	ends := map[string]ending[string]{"a value not to keep": {notToBeKept, nil}, "not found": {"", singlefill.ErrNotFound}}
	refreshEach(t, func(t *testing.T, variant string, r *refreshing, rdb, look redis.UniversalClient) {
		wantStored(t, look, r.ns, "k", "v0")
		r.load.ends <- ends[variant]
		_ = r.Close()
		wantStored(t, look, r.ns, "k", "")
		wantUnlocked(t, look, r.ns, "k")
		awaitSeen(t, rdb, look, r.ns, "k")
		goGet(t.Context(), r.elsewhere, "k", gives("v2")).want(t, "v2") // at once, whatever RetryAfter says
	}, "a value not to keep", "not found")
}

// Callers that miss during a refresh share it.
func TestRefresh_SharedByMisses(t *testing.T) {
	for _, test := range []struct {
		name string
		fail error
	}{{"which succeeds", nil}, {"which fails", errSource}} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				fleet := newCaches(t, m, redistest.Namespace(t), 2, staleOptions(time.Minute, 0))
				here, there := fleet[0], fleet[1]
				src := newSource[string](t)
				setStale(t, here, "k", "old", 50*time.Second)
				ask(t.Context(), here, "k", src.load).wantOld(t, "the reader that begins it", 50*time.Second, nil)
				load := src.next(t)
				time.Sleep(10 * time.Second) // now the value cannot be served any more
				var herd []<-chan answer
				for range 20 {
					herd = append(herd, goAsk(t.Context(), here, "k", src.load))
				}
				elsewhere := goAsk(t.Context(), there, "k", src.load)
				time.Sleep(5 * time.Second)
				herd = append(herd, goAsk(t.Context(), here, "k", src.load))
				synctest.Wait()
				src.want(t, 1)
				if test.fail == nil {
					load.give("new")
				} else {
					load.fail(test.fail)
				}
				for i, replies := range herd {
					want := answer{err: test.fail, took: 5 * time.Second}
					if test.fail == nil {
						want.value = "new"
					}
					if i == 20 {
						want.took = 0
					}
					receive(t, "a reply", replies).want(t, "a caller that waited here", want)
				}
				r := receive(t, "a reply", elsewhere)
				var remote *singlefill.RemoteError
				if test.fail == nil && (r.value != "new" || r.err != nil) || test.fail != nil && !errors.As(r.err, &remote) {
					t.Errorf("the caller that waited elsewhere got %+v", r)
				}
				src.want(t, 1)
				if s := here.Stats(); s.Refreshes != 1 || s.Loads != 1 || s.Misses != 21 || s.Hits != 1 || s.Stale != 1 {
					t.Errorf("%+v, want one refresh for them all", s)
				}
			})
		})
	}
}

// Readers of a value that vanishes share its refresh.
func TestRefresh_SharedWhenTheValueVanishes(t *testing.T) {
	boom := errors.New("boom")
	for kind := range refreshKinds {
		for _, end := range []ending[string]{{"v1", nil}, {"", singlefill.ErrNotFound}, {"", boom}} {
			t.Run(fmt.Sprint(kind, " ", end.err), func(t *testing.T) {
				inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
					r := beginRefresh(t, rdb, rdb, kind)
					if n, err := rdb.Del(t.Context(), r.ns+":{k}").Result(); n != 1 || err != nil { // evicted, say
						t.Fatal(n, err)
					}
					var herd []*call[string]
					for range 20 {
						herd = append(herd, goGet(t.Context(), r.Cache, "k", r.src.load))
						synctest.Wait() // it has found nothing, and waits
					}
					begun := time.Now()
					r.load.ends <- end
					for _, a := range herd {
						switch {
						case end.err == boom: // the old value is served in its place: it has not been deleted
							a.want(t, "v0")
						case end.err != nil:
							a.wantErr(t, end.err)
						default:
							a.want(t, end.value)
						}
					}
					wantElapsed(t, "all have their answer", begun, 0)
					_ = r.Close()
					wantUnlocked(t, rdb, r.ns, "k")
					r.src.want(t, 1)
					if s := r.Stats(); s.Refreshes != 1 || s.Misses != 20 || end.err == boom && s.StaleOnError != 20 && kind == "stale" {
						t.Errorf("%+v, want one refresh and 20 misses", s)
					}
				})
			})
		}
	}
}

// A value that vanishes during its refresh is not loaded twice.
func TestRefresh_VanishedValueIsLoadedOnce(t *testing.T) {
	t.Parallel()
	refreshEach(t, func(t *testing.T, _ string, r *refreshing, rdb, look redis.UniversalClient) {
		if n, err := look.Del(t.Context(), r.ns+":{k}").Result(); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		var herd []*call[string]
		for i := range 20 {
			herd = append(herd, goGet(t.Context(), r.by([]string{"here", "elsewhere"}[i%2]), "k", r.src.load).waits(t))
		}
		r.load.give("v1")
		for _, a := range herd {
			if v, err := a.result(t); err != nil || v != "v1" && !(hitsMayBeLate(t) && v == "v0") {
				t.Errorf("got %q, %v; want v1", v, err)
			}
		}
		_ = r.Close()
		wantStored(t, look, r.ns, "k", "v1")
		wantUnlocked(t, look, r.ns, "k")
		r.src.want(t, 1)
	})
}

// A refresh without the lock is joined by a caller that could take the lock.
//
// It loads for a caller that found nothing to serve. Then another caller's GET fails, and its lock
// command does not.
func TestRefresh_WithoutTheLockIsJoined(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var failScripts, failGet atomic.Bool
		rdb.AddHook(before(func(cmd redis.Cmder) error {
			if strings.HasPrefix(cmd.Name(), "eval") && failScripts.Load() || cmd.Name() == "get" && failGet.Swap(false) {
				return errors.New("connection reset")
			}
			return nil
		}))
		c := oldCache(t, rdb, singlefill.Options[string]{StaleWhileRevalidate: time.Second}, "old", 900*time.Millisecond)
		src := newSource[string](t)
		failScripts.Store(true)
		<-goAsk(t.Context(), c, "k", src.load) // begins the refresh
		time.Sleep(150 * time.Millisecond)
		first := goAsk(t.Context(), c, "k", src.load)
		load := src.next(t)
		failScripts.Store(false)
		failGet.Store(true)
		second := goAsk(t.Context(), c, "k", src.load)
		time.Sleep(time.Second)
		src.want(t, 1)
		load.give("new")
		if a := <-first; a.value != "new" || a.err != nil {
			t.Errorf("the first caller is answered %+v", a)
		}
		select { // Redis has answered since the load began: the second one may have to ask again
		case a := <-second:
			if a.value != "new" || a.err != nil {
				t.Errorf("the second caller is answered %+v", a)
			}
		case load := <-src.begun:
			load.give("newer")
			if a := <-second; a.value != "newer" || a.err != nil {
				t.Errorf("the second caller is answered %+v", a)
			}
		}
	})
}
