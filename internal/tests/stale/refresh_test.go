package stale_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
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
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

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
	src       *cachetest.HeldSource[string]
	load      *cachetest.HeldLoad[string] // of the refresh
	ns        string
}

func beginRefresh(t testing.TB, rdb, look redis.UniversalClient, old entry.Entry) *refreshing {
	t.Helper()
	r := &refreshing{ns: redistest.Namespace(t)}
	r.Cache, r.elsewhere = cachetest.NewCacheIn(t, rdb, r.ns, refreshOptions()), cachetest.NewCacheIn(t, rdb, r.ns, refreshOptions())
	r.src = cachetest.NewSource[string](t)
	cachetest.PutEntry(t, look, r.ns, "k", old, time.Hour)
	cachetest.GoGet(t.Context(), r.Cache, "k", r.src.Load).Want(t, "v0")
	r.load = r.src.Next(t)
	return r
}

func (r *refreshing) by(where string) *singlefill.Cache[string] {
	if where == "here" {
		return r.Cache
	}
	return r.elsewhere
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
	redistest.Must(t, err)
}

var supersededLeaves = map[string]string{"Delete": "", "Set": "set", "Expire": "v0"}

// A stale value is served at once, in all processes, until one of them has refreshed it.
func TestStaleWhileRevalidate_OneRefresh(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var e cachetest.Events
		opts := cachetest.StaleOptions(time.Minute, 0)
		opts.Trace = staleTrace(&e)
		fleet := cachetest.NewCaches(t, m, "ns", 3, opts)
		src := cachetest.NewSource[string](t)
		cachetest.SetStale(t, fleet[0], "k", "old", time.Second)
		cachetest.Ask(t.Context(), fleet[0], "k", src.Load).WantOld(t, "the first reader", time.Second, nil)
		load := src.Next(t)
		e.Want(t, "the first reader", "hit k", "stale k true, 1h0m1s old, <nil>", "start k")
		readAll := func(times int) {
			for range times {
				for _, c := range fleet {
					cachetest.Ask(t.Context(), c, "k", src.Load).WantOld(t, "at once", time.Second, nil)
				}
			}
		}
		readAll(1)
		synctest.Wait() // the others know that the lock is held
		cachetest.WantCommands(t, m, "a GET for each read", 57, 57, func() { readAll(19) })
		time.Sleep(50 * time.Second)
		for _, c := range fleet {
			cachetest.Ask(t.Context(), c, "k", src.Load).WantOld(t, "while the refresh runs", 51*time.Second, nil)
			v, err := c.Get(t.Context(), "k")
			cachetest.WantValue(t, v, err, "old")
		}
		synctest.Wait()
		src.Want(t, 1)
		e.Seen = nil
		load.Give("new")
		synctest.Wait()
		e.Want(t, "the refresh", "done k <nil>, stored true, refresh true")
		for i, c := range fleet {
			cachetest.Ask(t.Context(), c, "k", src.Load).WantFresh(t, "refreshed", "new")
			want := singlefill.Stats{Hits: 23, Stale: 22, StaleHits: 22}
			if i == 0 {
				want = singlefill.Stats{Hits: 24, Stale: 23, StaleHits: 23, Loads: 1, Refreshes: 1, Stored: 1}
			}
			if s := c.Stats(); s != want {
				t.Errorf("process %d: %+v, want %+v", i, s, want)
			}
		}
		time.Sleep(2 * cachetest.StaleLife) // a key without readers is not refreshed
		synctest.Wait()
		src.Want(t, 1)
	})
}

// Readers of a value that can be served do not wait for its refresh because of a short outage.
func TestStaleWhileRevalidate_ShortOutage(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var fail atomic.Bool
		rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			if cmd.Name() == "get" && fail.Swap(false) {
				return errors.New("connection reset")
			}
			return nil
		}))
		c := cachetest.OldCache(t, rdb, singlefill.Options[string]{StaleWhileRevalidate: time.Minute}, "old", time.Second)
		refreshing := cachetest.NewSource[string](t)
		<-cachetest.GoAsk(t.Context(), c, "k", refreshing.Load)
		refresh := refreshing.Next(t)
		fail.Store(true)
		if a := <-cachetest.GoAsk(t.Context(), c, "k", cachetest.MustNotLoad[string](t)); a.Value != "old" || a.Err != nil || fail.Load() {
			t.Errorf("the reader whose GET failed is answered %+v", a)
		}

		m.SetError("LOADING dataset")
		away := cachetest.GoAsk(t.Context(), c, "k", cachetest.MustNotLoad[string](t)) // there is nothing to serve
		time.Sleep(3 * time.Second)
		m.SetError("")
		time.Sleep(3 * time.Second)
		if a := <-cachetest.GoAsk(t.Context(), c, "k", cachetest.MustNotLoad[string](t)); a.Value != "old" || a.Err != nil {
			t.Errorf("a reader after the outage is answered %+v", a)
		}
		refresh.Give("new")
		if a := <-away; a.Value != "new" || a.Err != nil {
			t.Errorf("the reader that waited for the refresh got %+v", a)
		}
	})
}

// A refresh is left to the process that holds the lock, which is no wait, and is tried again a second later.
func TestRefresh_LeftToItsHolder(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		fleet := cachetest.NewCaches(t, m, "ns", 2, cachetest.StaleOptions(time.Hour, 0))
		here, there := fleet[0], fleet[1]
		src := cachetest.NewSource[string](t)
		cachetest.SetStale(t, there, "k", "old", 0)
		read := func() { cachetest.Ask(t.Context(), here, "k", src.Load) }
		cachetest.Ask(t.Context(), there, "k", src.Load)
		load := src.Next(t)
		read()
		synctest.Wait()
		cachetest.WantCommands(t, m, "within a second", 9, 9, func() {
			for range 9 {
				time.Sleep(100 * time.Millisecond)
				read()
			}
		})
		cachetest.WantCommands(t, m, "after a second", 2, 100, func() { time.Sleep(100 * time.Millisecond); read() })
		cachetest.WantCommands(t, m, "no reads", 0, 0,
			func() { time.Sleep(5 * time.Second) }) // the lock is renewed after 6.67s
		load.Give("new")
		synctest.Wait()

		// The holder dies: its lock stays, for less than a second.
		cachetest.SetStale(t, there, "k", "old", 0)
		redistest.Must(t, rdb.Set(t.Context(), "ns:{k}:lock", "HOTHEROTHEROTHEROTHEROTHERO0123456789012345", 400*time.Millisecond).Err())
		for range 4 {
			read()
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
			src.Want(t, 1)
		}
		read()
		src.Next(t).Give("new")
		synctest.Wait()
		cachetest.WantStored(t, rdb, "ns", "k", "new")
		if n := here.Stats().Waits; n != 0 {
			t.Errorf("%d waits, but no call has waited", n)
		}
	})
}

// An entry that has just been refreshed is not refreshed again.
//
// A replica, or the client's own cache, shows the old entry for a moment after the refresh.
func TestRefresh_NotAgainAtOnce(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCacheIn(t, rdb, "ns", cachetest.StaleOptions(time.Hour, 0))
		cachetest.SetStale(t, c, "k", "old", 0)
		data, _ := cachetest.Stored(t, rdb, "ns:{k}")
		src := &cachetest.TimedSource{Value: "new"}
		cachetest.Ask(t.Context(), c, "k", src.Load).WantOld(t, "the reader that begins it", 0, nil)
		src.WantLoads(t, "a refresh", 1)
		_ = m.Set("ns:{k}", data)
		m.SetTTL("ns:{k}", time.Hour)
		for range 9 {
			time.Sleep(11 * time.Millisecond)
			cachetest.Ask(t.Context(), c, "k", src.Load)
		}
		src.WantLoads(t, "within 100ms", 1)
		time.Sleep(time.Millisecond)
		cachetest.Ask(t.Context(), c, "k", src.Load)
		src.WantLoads(t, "after 100ms", 2)
		// A changed entry is refreshed at once.
		redistest.Must(t, c.Expire(t.Context(), "k"))
		cachetest.Ask(t.Context(), c, "k", src.Load)
		src.WantLoads(t, "expired", 3)
	})
}

// A refresh has the context values of the call that began it, and ends at LoadTimeout.
func TestRefresh_Context(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := cachetest.StaleOptions(time.Hour, 0)
		opts.RetryAfter = time.Second
		c := cachetest.NewCacheIn(t, rdb, "ns", opts)
		src := cachetest.NewSource[string](t)
		cachetest.SetStale(t, c, "k", "old", 0)
		begun := time.Now()
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), cachetest.TraceKey{}, "kept"), time.Second)
		cachetest.Ask(ctx, c, "k", src.Load).WantOld(t, "the reader that begins it", 0, nil)
		cancel()
		load := src.Next(t)
		time.Sleep(time.Minute - 1)
		if deadline, _ := load.Ctx.Deadline(); load.Ctx.Value(cachetest.TraceKey{}) != "kept" || load.Ctx.Err() != nil || !deadline.Equal(begun.Add(time.Minute)) {
			t.Errorf("the Loader's context: %v, %v; ends after %v", load.Ctx.Value(cachetest.TraceKey{}), load.Ctx.Err(), deadline.Sub(begun))
		}
		cachetest.Ask(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).WantOld(t, "just before LoadTimeout", time.Minute-1, nil)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if load.Ctx.Err() != context.DeadlineExceeded {
			t.Errorf("at LoadTimeout the Loader's context says %v", load.Ctx.Err())
		}
		cachetest.WantUnlocked(t, rdb, "ns", "k")
		time.Sleep(time.Second)
		cachetest.Ask(t.Context(), c, "k", cachetest.Gives("new")).WantOld(t, "after RetryAfter", time.Minute+time.Second, nil)
		synctest.Wait()
		load.Give("left behind")
		synctest.Wait()
		cachetest.WantStored(t, rdb, "ns", "k", "new")
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
		want cachetest.Answer
	}{
		{"while it can be served", time.Second, cachetest.Answer{Value: "old", Info: singlefill.ValueInfo{Stale: true, Age: cachetest.StaleLife + 51*time.Second}}},
		{"when it can not be served any more", 10 * time.Second, cachetest.Answer{Err: singlefill.ErrRecursive}},
	} {
		cachetest.RunInBubble(t, test.name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			opts := cachetest.StaleOptions(time.Minute, 0)
			opts.MaxLoads = 1
			c := cachetest.NewCache(t, rdb, opts)
			cachetest.SetStale(t, c, "k", "old", 50*time.Second)
			replies := make(chan cachetest.Answer, 1)
			cachetest.Ask(t.Context(), c, "k", func(ctx context.Context, _ string) (string, error) {
				time.Sleep(test.then)
				replies <- cachetest.Ask(ctx, c, "k", cachetest.MustNotLoad[string](t))
				return c.GetOrLoad(ctx, "other", cachetest.Gives("other"))
			}).WantOld(t, "the reader that begins it", 50*time.Second, nil)
			cachetest.Receive(t, "a reply", replies).Want(t, "its own key", test.want)
			synctest.Wait()
			cachetest.Ask(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).WantFresh(t, "refreshed", "other")
			if s := c.Stats(); s.Loads != 2 || s.Refreshes != 1 {
				t.Errorf("%+v, want a refresh, and the load of the other key in it", s)
			}
		})
	}
}

// A refresh whose value cannot be encoded has failed: RetryAfter holds.
func TestRefresh_ValueThatCannotBeEncoded(t *testing.T) {
	for _, kind := range windowKinds {
		cachetest.RunInBubble(t, kind.name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			opts := kind.opts()
			opts.RetryAfter = 10 * time.Second
			opts.Codec = cachetest.BadCodec{Codec: singlefill.Raw, OnMarshal: func(v any) error {
				if v == "cannot be encoded" {
					return errors.New("no")
				}
				return nil
			}}
			fleet := cachetest.NewCaches(t, m, "ns", 2, opts)
			cachetest.SetStale(t, fleet[0], "k", "old", 0)
			src := &cachetest.TimedSource{Value: "cannot be encoded"}
			r := cachetest.Ask(t.Context(), fleet[0], "k", src.Load)
			if kind.ifError {
				r.WantFresh(t, "the caller that waited for it", "cannot be encoded")
			} else {
				r.WantOld(t, "the reader that began it", 0, nil)
			}
			synctest.Wait()
			time.Sleep(opts.RetryAfter - time.Millisecond)
			for _, c := range fleet {
				r := cachetest.Ask(t.Context(), c, "k", src.Load)
				if kind.ifError {
					r.WantRemote(t, "within RetryAfter", opts.RetryAfter-time.Millisecond, "singlefill: the value of another load could not be stored")
				} else {
					r.WantOld(t, "within RetryAfter", opts.RetryAfter-time.Millisecond, nil)
				}
			}
			src.WantLoads(t, "within RetryAfter", 1)
			time.Sleep(time.Millisecond)
			synctest.Wait()
			cachetest.Ask(t.Context(), fleet[0], "k", src.Load)
			src.WantLoads(t, "after RetryAfter", 2)
			cachetest.WantStored(t, rdb, "ns", "k", "old")
			if s := fleet[0].Stats(); s.StoreErrors != 2 || s.LoadErrors != 0 {
				t.Errorf("%+v, want two store errors", s)
			}
		})
	}
}

// A refusal is an error reply.
type refusal string

func (e refusal) Error() string { return string(e) }
func (refusal) RedisError()     {}

// A refresh whose value Redis refuses has failed: RetryAfter holds. One to which it refuses the lock is tried
// again a second later. Readers get the old value, and the breaker stays closed.
func TestRefresh_Refused(t *testing.T) {
	for script, want := range map[string]singlefill.Stats{
		"get_or_lock": {RedisErrors: 20}, "store": {RedisErrors: 2, Loads: 2, StoreErrors: 2},
	} {
		cachetest.RunInBubble(t, script, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			var refuse atomic.Bool
			refused := cachetest.Script(t, script)
			rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
				if refuse.Load() && refused(cachetest.Args(cmd)) {
					return refusal("READONLY You can't write against a read only replica.")
				}
				return nil
			}))
			opts := singlefill.Options[string]{StaleWhileRevalidate: time.Hour, RetryAfter: 10 * time.Second}
			c := cachetest.OldCache(t, rdb, opts, "old", time.Second)
			refuse.Store(true)
			for range 200 {
				a := <-cachetest.GoAsk(t.Context(), c, "k", cachetest.Gives("new"))
				if a.Value != "old" || a.Err != nil {
					t.Fatalf("answered %+v", a)
				}
				time.Sleep(100 * time.Millisecond)
			}
			s := c.Stats()
			if s.Loads != want.Loads || s.StoreErrors != want.StoreErrors || s.RedisErrors != want.RedisErrors ||
				s.BreakerOpens != 0 {
				t.Errorf("%+v in 20 s, want %+v", s, want)
			}
		})
	}
}

// A refresh that finds nothing to keep removes the old value.
func TestRefresh_NothingToKeep(t *testing.T) {
	for _, test := range []struct {
		name string
		set  func(o *singlefill.Options[string])
		load singlefill.Loader[string]
		want cachetest.Answer // of the caller that waits for the load
		kept bool             // remembered instead
	}{
		{
			"not found", func(o *singlefill.Options[string]) { o.NotFoundTTL = -1 },
			cachetest.Fails[string](fmt.Errorf("wrapped: %w", singlefill.ErrNotFound)), cachetest.Answer{}, false,
		},
		{"not found, remembered", func(*singlefill.Options[string]) {}, cachetest.Fails[string](singlefill.ErrNotFound), cachetest.Answer{Err: singlefill.ErrNotFound}, true},
		{
			"a value without a life", func(o *singlefill.Options[string]) {
				o.TTLFunc = func(_, v string) time.Duration {
					if v == "dead" {
						return 0
					}
					return cachetest.StaleLife
				}
			}, cachetest.Gives("dead"), cachetest.Answer{Value: "dead"}, false,
		},
	} {
		for _, kind := range windowKinds {
			name := test.name + ", " + kind.name
			cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				opts := kind.opts()
				test.set(opts)
				fleet := cachetest.NewCaches(t, m, "ns", 2, opts)
				cachetest.SetStale(t, fleet[0], "k", "old", time.Second)
				r := cachetest.Ask(t.Context(), fleet[0], "k", test.load)
				switch {
				case !kind.ifError:
					r.WantOld(t, "the reader that begins it", time.Second, nil)
				case test.want == cachetest.Answer{}:
					if !errors.Is(r.Err, singlefill.ErrNotFound) || r.Err == singlefill.ErrNotFound || r.Info.Stale {
						t.Errorf("got %+v, want the Loader's error", r)
					}
				default:
					r.Want(t, "the caller that waits for it", test.want)
				}
				synctest.Wait()
				if s := fleet[0].Stats(); s.LoadErrors != 0 || s.StaleOnError != 0 {
					t.Errorf("%+v, want no failure", s)
				}
				if test.kept {
					cachetest.Ask(t.Context(), fleet[1], "k", cachetest.MustNotLoad[string](t)).Want(t, "remembered",
						cachetest.Answer{Err: singlefill.ErrNotFound})
					return
				}
				cachetest.WantStored(t, rdb, "ns", "k", "")
				if record, found := cachetest.Stored(t, rdb, "ns:{k}:lock"); found && test.want.Value != "" {
					t.Errorf("the lock key holds %q, though nothing has failed", record)
				}
				cachetest.Ask(t.Context(), fleet[1], "k", cachetest.Gives("new")).WantFresh(t, "the next caller", "new")
			})
		}
	}
}

// Readers of a value that vanishes share its refresh, in all processes.
func TestRefresh_SharedWhenTheValueVanishes(t *testing.T) {
	const wait = 5 * time.Second
	tooOld := "stale, and too old when the refresh ends"
	kinds := maps.Clone(cachetest.RefreshKinds)
	kinds[tooOld] = func(payload string) entry.Entry {
		return entry.Entry{FreshUntil: time.Now().Add(wait/2 - time.Hour), Payload: []byte(payload)}
	}
	for kind, old := range kinds {
		for _, end := range []cachetest.Ending[string]{{Value: "v1"}, {Err: singlefill.ErrNotFound}, {Err: cachetest.ErrSource}} {
			name := fmt.Sprint(kind, " ", end.Err)
			cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				r := beginRefresh(t, rdb, rdb, old("v0"))
				if n, err := rdb.Del(t.Context(), r.ns+":{k}").Result(); n != 1 || err != nil { // evicted, say
					t.Fatal(n, err)
				}
				var herd []*cachetest.Call[string]
				for range 20 {
					herd = append(herd, cachetest.GoGet(t.Context(), r.Cache, "k", r.src.Load))
					synctest.Wait() // it has found nothing, and waits
				}
				there := cachetest.GoGet(t.Context(), r.elsewhere, "k", r.src.Load)
				time.Sleep(wait)
				begun := time.Now()
				r.load.Ends <- end
				served := end.Err == cachetest.ErrSource && kind != tooOld // the old value: it has not been deleted
				for _, a := range herd {
					switch {
					case served:
						a.Want(t, "v0")
					case end.Err != nil:
						a.WantErr(t, end.Err)
					default:
						a.Want(t, end.Value)
					}
				}
				cachetest.WantElapsed(t, "all have their answer", begun, 0)
				var remote *singlefill.RemoteError
				if v, err := there.Result(t); v != end.Value || err != end.Err && !errors.As(err, &remote) {
					t.Errorf("the caller in another process got %q, %v", v, err)
				}
				_ = r.Close()
				cachetest.WantUnlocked(t, rdb, r.ns, "k")
				r.src.Want(t, 1)
				if s := r.Stats(); s.Refreshes != 1 || s.Misses != 20 || served && s.StaleOnError != 20 && kind == "stale" {
					t.Errorf("%+v, want one refresh and 20 misses", s)
				}
			})
		}
	}
}

// A refresh without the lock is joined by a caller that could take the lock.
//
// It loads for a caller that found nothing to serve. Then another caller's GET fails, and its lock
// command does not.
func TestRefresh_WithoutTheLockIsJoined(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var failScripts, failGet atomic.Bool
		rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			if strings.HasPrefix(cmd.Name(), "eval") && failScripts.Load() || cmd.Name() == "get" && failGet.Swap(false) {
				return errors.New("connection reset")
			}
			return nil
		}))
		c := cachetest.OldCache(t, rdb, singlefill.Options[string]{StaleWhileRevalidate: time.Second}, "old", 900*time.Millisecond)
		src := cachetest.NewSource[string](t)
		failScripts.Store(true)
		<-cachetest.GoAsk(t.Context(), c, "k", src.Load) // begins the refresh
		time.Sleep(150 * time.Millisecond)
		first := cachetest.GoAsk(t.Context(), c, "k", src.Load)
		load := src.Next(t)
		failScripts.Store(false)
		failGet.Store(true)
		second := cachetest.GoAsk(t.Context(), c, "k", src.Load)
		time.Sleep(time.Second)
		src.Want(t, 1)
		load.Give("new")
		if a := <-first; a.Value != "new" || a.Err != nil {
			t.Errorf("the first caller is answered %+v", a)
		}
		select { // Redis has answered since the load began: the second one may have to ask again
		case a := <-second:
			if a.Value != "new" || a.Err != nil {
				t.Errorf("the second caller is answered %+v", a)
			}
		case load := <-src.Begun:
			load.Give("newer")
			if a := <-second; a.Value != "newer" || a.Err != nil {
				t.Errorf("the second caller is answered %+v", a)
			}
		}
	})
}

// A load that callers wait for gets ErrRecursive from its own key, although the key holds a stale
// value.
func TestErrRecursive_StaleKey(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, cachetest.StaleOptions(0, time.Minute))
		cachetest.SetStale(t, c, "k", "old", 0)
		cachetest.Ask(t.Context(), c, "k", func(ctx context.Context, key string) (string, error) {
			return c.GetOrLoad(ctx, key, cachetest.MustNotLoad[string](t))
		}).WantOld(t, "a failure like any other", 0, singlefill.ErrRecursive)
	})
}
