package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
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

// Time in here is fake, as in time_test.go; several caches in one namespace stand for several processes.

const staleLife = time.Hour // of every entry, unless a test says otherwise: newCacheIn's

var errSource = errors.New("the source is down")

// staleOptions are two windows, and nothing that is left to chance.
func staleOptions(whileRevalidate, ifError time.Duration) *singlefill.Options[string] {
	return &singlefill.Options[string]{
		Codec: singlefill.Raw, Jitter: -1, EarlyRefresh: -1, StaleWhileRevalidate: whileRevalidate, StaleIfError: ifError,
	}
}

// staleKinds are a minute of each window alone.
var staleKinds = []struct {
	name string
	opts func() *singlefill.Options[string]
	sie  bool
}{
	{"while revalidate", func() *singlefill.Options[string] { return staleOptions(time.Minute, 0) }, false},
	{"if error", func() *singlefill.Options[string] { return staleOptions(0, time.Minute) }, true},
}

// staleFleet makes n processes of one namespace, each with a client of its own.
func staleFleet[T any](t testing.TB, m *miniredis.Miniredis, namespace string, n int, opts *singlefill.Options[T]) (fleet []*singlefill.Cache[T]) {
	for range n {
		fleet = append(fleet, newCacheIn(t, redistest.NewMiniClient(t, m), namespace, opts))
	}
	return fleet
}

// staleSet stores a value and lets its life pass, and then some.
func staleSet(t testing.TB, c *singlefill.Cache[string], key, value string, late time.Duration) {
	t.Helper()
	if err := c.Set(t.Context(), key, value); err != nil {
		t.Fatal(err)
	}
	time.Sleep(staleLife + late)
}

// A staleReply is what a call has returned.
type staleReply struct {
	value string
	info  singlefill.ValueInfo
	err   error
	took  time.Duration
}

func staleAsk(ctx context.Context, c *singlefill.Cache[string], key string, load singlefill.Loader[string]) staleReply {
	begun := time.Now()
	v, info, err := c.GetOrLoadInfo(ctx, key, load)
	return staleReply{v, info, err, time.Since(begun)}
}

// goStaleAsk asks in the background.
func goStaleAsk(ctx context.Context, c *singlefill.Cache[string], key string, load singlefill.Loader[string]) <-chan staleReply {
	replies := make(chan staleReply, 1)
	go func() { replies <- staleAsk(ctx, c, key, load) }()
	return replies
}

// want compares with what is wanted; errors have to be the same ones, not alike.
func (r staleReply) want(t testing.TB, what string, want staleReply) {
	t.Helper()
	if r != want {
		t.Errorf("%s: got %+v, want %+v", what, r, want)
	}
}

// wantOld wants the value that staleSet has stored, as old as late says, at once, and no error but err.
func (r staleReply) wantOld(t testing.TB, what string, late time.Duration, err error) {
	t.Helper()
	r.want(t, what, staleReply{value: "old", info: singlefill.ValueInfo{Stale: true, Age: staleLife + late, Err: err}})
}

// wantRemote is wantOld with the failure of another process.
func (r staleReply) wantRemote(t testing.TB, what string, late time.Duration, text string) {
	t.Helper()
	var remote *singlefill.RemoteError
	if !errors.As(r.info.Err, &remote) || remote.Message != text {
		t.Errorf("%s: the reason is %v, want a RemoteError %q", what, r.info.Err, text)
	}
	r.wantOld(t, what, late, r.info.Err)
}

// wantFresh wants a value that has been stored just now, at once.
func (r staleReply) wantFresh(t testing.TB, what, value string) {
	t.Helper()
	r.want(t, what, staleReply{value: value})
}

// staleSource is a Loader that gives value or err, and counts.
type staleSource struct {
	loads, loading, most atomic.Int64
	takes                time.Duration
	value                string
	err                  error
}

func (s *staleSource) load(context.Context, string) (string, error) {
	s.loads.Add(1)
	if n := s.loading.Add(1); n > s.most.Load() {
		s.most.Store(n)
	}
	defer s.loading.Add(-1)
	time.Sleep(s.takes)
	return s.value, s.err
}

// wantLoads waits until nothing runs any more that can go on.
func (s *staleSource) wantLoads(t testing.TB, what string, want int64) {
	t.Helper()
	synctest.Wait()
	if n := s.loads.Load(); n != want {
		t.Errorf("%s: %d loads, want %d", what, n, want)
	}
}

// staleTrace is events.trace with what concerns stale values.
func staleTrace(e *events) *singlefill.Trace {
	trace := e.trace()
	trace.Stale = func(_ context.Context, key string, i singlefill.ValueInfo) {
		e.add("stale %s %t, %v old, %v", key, i.Stale, i.Age, i.Err)
	}
	trace.LoadDone = func(_ context.Context, i singlefill.LoadInfo) {
		e.add("done %s %v, stored %t, refresh %t", i.Key, i.Err, i.Stored, i.Refresh)
	}
	return trace
}

// The workers read evenly, 62.5 times within the time that a load takes. So the lot falls on average 2.4 s before
// the end of a life (62.5 times e^(-t/0.5s), added up, is 1 there, and somewhat less later); and never so
// late that the load, which takes 0.5 s, would end after that life: the odds are e^(-62.5/e), or 1 in 10^10. A
// cycle is then 18.1 s on average: 300 s are 16.5 of them, or at least 14, which would be cycles of a whole
// life and a load each. More than 18 would take an average of 4.7 s, every time as rare as 1 in 200.
func TestWorkersNeverWaitForAKeyThatTheyHammerAndEachLifeCostsOneLoad(t *testing.T) {
	const life, loadTime, during = 20 * time.Second, 500 * time.Millisecond, 300 * time.Second
	const workers, pause = 50, 400 * time.Millisecond
	for _, processes := range []int{1, 5} {
		t.Run(fmt.Sprint(processes, " processes"), func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				fleet := staleFleet(t, m, redistest.Namespace(t), processes, &singlefill.Options[int64]{
					Jitter: -1, TTLFunc: func(string, int64) time.Duration { return life },
				})
				var loads, loading, seen atomic.Int64
				load := func(context.Context, string) (int64, error) {
					if loading.Add(1) > 1 {
						t.Error("two loads at a time")
					}
					defer loading.Add(-1)
					defer time.Sleep(loadTime)
					return loads.Add(1), nil
				}
				if _, err := fleet[0].GetOrLoad(t.Context(), "k", load); err != nil {
					t.Fatal(err)
				}
				end := time.Now().Add(during)
				var wg sync.WaitGroup
				for i := range workers {
					wg.Go(func() {
						time.Sleep(time.Duration(i) * pause / workers)
						for last := int64(1); time.Now().Before(end); time.Sleep(pause) {
							begun := time.Now()
							v, info, err := fleet[i%processes].GetOrLoadInfo(t.Context(), "k", load)
							if took := time.Since(begun); err != nil || info.Stale || took > 0 || v < last || v > last+1 {
								t.Errorf("got %d, %+v, %v after %v; want %d or the next, fresh and at once", v, info, err, took, last)
							}
							last = v
							for n := seen.Load(); v > n && !seen.CompareAndSwap(n, v); n = seen.Load() {
							}
						}
					})
				}
				wg.Wait()
				again, changes := loads.Load()-1, seen.Load()-1
				if again < 14 || again > 18 {
					t.Errorf("%d loads after the first, want about 16", again)
				}
				if again != changes && again != changes+1 { // the last one may not be over
					t.Errorf("%d loads after the first, but the value has changed %d times", again, changes)
				}
			})
		})
	}
}

func TestAnEarlyRefreshIsOneLoadForWhichNobodyWaits(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		opts := staleOptions(0, 0)
		opts.EarlyRefresh = 1e9 // every hit, if the load took any time
		opts.TTLFunc = func(string, string) time.Duration { return 10 * time.Second }
		fleet := staleFleet(t, m, redistest.Namespace(t), 2, opts)
		src := &staleSource{takes: 5 * time.Second, value: "v1"}
		staleAsk(t.Context(), fleet[0], "k", src.load).want(t, "a load", staleReply{value: "v1", took: src.takes})
		src.value = "v2"
		begun := time.Now()
		for time.Since(begun) < 4*time.Second {
			for _, c := range fleet {
				staleAsk(t.Context(), c, "k", src.load).want(t, "hammered", staleReply{
					value: "v1", info: singlefill.ValueInfo{Age: time.Since(begun)},
				})
			}
			time.Sleep(10 * time.Millisecond)
		}
		src.wantLoads(t, "hammered", 2)
		time.Sleep(2 * time.Second)
		for _, c := range fleet {
			v, err := c.Get(t.Context(), "k")
			wantValue(t, v, err, "v2")
		}
		time.Sleep(time.Hour)
		src.wantLoads(t, "read by nobody", 2)
		for i, c := range fleet {
			if s := c.Stats(); s.Stale != 0 || s.LoadErrors != 0 || s.Refreshes != s.Loads+int64(i)-1 {
				t.Errorf("process %d: %+v, want nothing stale, and loads but the first to be refreshes", i, s)
			}
		}
	})
}

func TestWhoMissesDuringARefreshSharesIt(t *testing.T) {
	for _, test := range []struct {
		name string
		fail error
	}{{"which succeeds", nil}, {"which fails", errSource}} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				fleet := staleFleet(t, m, redistest.Namespace(t), 2, staleOptions(time.Minute, 0))
				here, there := fleet[0], fleet[1]
				src := newSource[string](t)
				staleSet(t, here, "k", "old", 50*time.Second)
				staleAsk(t.Context(), here, "k", src.load).wantOld(t, "the one who begins it", 50*time.Second, nil)
				load := src.next(t)
				time.Sleep(10 * time.Second) // the value has been too old since now
				var herd []<-chan staleReply
				for range 20 {
					herd = append(herd, goStaleAsk(t.Context(), here, "k", src.load))
				}
				elsewhere := goStaleAsk(t.Context(), there, "k", src.load)
				time.Sleep(5 * time.Second)
				herd = append(herd, goStaleAsk(t.Context(), here, "k", src.load))
				synctest.Wait()
				src.want(t, 1)
				if test.fail == nil {
					load.give("new")
				} else {
					load.fail(test.fail)
				}
				for i, replies := range herd {
					want := staleReply{err: test.fail, took: 5 * time.Second}
					if test.fail == nil {
						want.value = "new"
					}
					if i == 20 {
						want.took = 0
					}
					receive(t, "a reply", replies).want(t, "who waited here", want)
				}
				r := receive(t, "a reply", elsewhere)
				var remote *singlefill.RemoteError
				if test.fail == nil && (r.value != "new" || r.err != nil) || test.fail != nil && !errors.As(r.err, &remote) {
					t.Errorf("who waited elsewhere got %+v", r)
				}
				src.want(t, 1)
				if s := here.Stats(); s.Refreshes != 1 || s.Loads != 1 || s.Misses != 21 || s.Hits != 1 || s.Stale != 1 {
					t.Errorf("%+v, want one refresh for them all", s)
				}
			})
		})
	}
}

func TestNothingIsLoadedForNobody(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := staleOptions(time.Hour, 2*time.Hour)
		opts.EarlyRefresh = 1e9
		c := newCache(t, rdb, opts)
		src := &staleSource{takes: time.Second, value: "v"}
		staleAsk(t.Context(), c, "k", src.load)
		for range 300 {
			_, _ = c.Get(t.Context(), "k") // refreshes nothing
			time.Sleep(time.Minute)
		}
		src.wantLoads(t, "only looked at", 1)
	})
}

func TestAStaleValueIsServedAtOnceUntilOneProcessHasRefreshedIt(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		var e events
		opts := staleOptions(time.Minute, 0)
		opts.Trace = staleTrace(&e)
		fleet := staleFleet(t, m, ns, 3, opts)
		src := newSource[string](t)
		staleSet(t, fleet[0], "k", "old", time.Second)
		staleAsk(t.Context(), fleet[0], "k", src.load).wantOld(t, "the first reader", time.Second, nil)
		load := src.next(t)
		e.want(t, "the first reader", "hit k", "stale k true, 1h0m1s old, <nil>", "start k")
		for range 20 {
			for _, c := range fleet {
				staleAsk(t.Context(), c, "k", src.load).wantOld(t, "at once", time.Second, nil)
			}
		}
		time.Sleep(50 * time.Second)
		for _, c := range fleet {
			staleAsk(t.Context(), c, "k", src.load).wantOld(t, "while the refresh runs", 51*time.Second, nil)
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
			staleAsk(t.Context(), c, "k", src.load).wantFresh(t, "refreshed", "new")
			want := singlefill.Stats{Hits: 23, Stale: 22}
			if i == 0 {
				want = singlefill.Stats{Hits: 24, Stale: 23, Loads: 1, Refreshes: 1, Stored: 1}
			}
			s := c.Stats()
			s.Waits = 0 // another test's matter
			if s != want {
				t.Errorf("process %d: %+v, want %+v", i, s, want)
			}
		}
		synctest.Wait()
		src.want(t, 1)
	})
}

// No window ends with Redis' TTL alone: a replica may go on showing what is over.
func TestStaleWindowsEndToTheMillisecond(t *testing.T) {
	const minute, tick = time.Minute, time.Millisecond
	for _, w := range []struct {
		name     string
		swr, sie time.Duration
	}{
		{"neither", 0, 0},
		{"while revalidate", minute, 0},
		{"if error", 0, minute},
		{"if error the longer", minute, 2 * minute},
		{"if error the shorter", 2 * minute, minute},
		{"a millisecond each", tick, 2 * tick},
	} {
		for _, prolonged := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, prolonged %t", w.name, prolonged), func(t *testing.T) {
				inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
					ns := redistest.Namespace(t)
					c := newCacheIn(t, rdb, ns, staleOptions(w.swr, w.sie))
					probes := []time.Duration{-tick, 0, w.swr - tick, w.swr, w.sie - tick, w.sie, 3 * minute}
					slices.Sort(probes)
					probes = slices.Compact(probes)
					begun := time.Now()
					for _, late := range probes {
						key := late.String()
						if err := c.Set(t.Context(), key, "old"); err != nil {
							t.Fatal(err)
						}
						if kept := m.TTL(ns + ":{" + key + "}"); kept != staleLife+max(w.swr, w.sie) {
							t.Errorf("Redis keeps it for %v", kept)
						}
						if prolonged {
							m.SetTTL(ns+":{"+key+"}", 24*time.Hour)
						}
					}
					for _, late := range probes {
						time.Sleep(time.Until(begun.Add(staleLife + late)))
						src := &staleSource{err: errSource}
						v, err := c.Get(t.Context(), late.String())
						r := staleAsk(t.Context(), c, late.String(), src.load)
						switch {
						case late < 0:
							r.want(t, "fresh", staleReply{value: "old", info: singlefill.ValueInfo{Age: staleLife + late}})
							src.wantLoads(t, "fresh", 0)
						case late < w.swr:
							r.wantOld(t, "within StaleWhileRevalidate: "+late.String(), late, nil)
							src.wantLoads(t, "a refresh", 1)
						case late < w.sie:
							r.wantOld(t, "within StaleIfError: "+late.String(), late, errSource)
							src.wantLoads(t, "within StaleIfError", 1)
						default:
							r.want(t, "too old: "+late.String(), staleReply{err: errSource})
							src.wantLoads(t, "too old", 1)
						}
						if late < 0 || late < w.swr {
							wantValue(t, v, err, "old")
						} else if err != singlefill.ErrMiss {
							t.Errorf("Get %v late: %q, %v; want ErrMiss", late, v, err)
						}
					}
				})
			})
		}
	}
}

func TestRedisKeepsAnEntryForItsLifeAndTheLongerWindow(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		for _, w := range []struct{ swr, sie time.Duration }{{time.Minute, 0}, {0, time.Minute}, {time.Second, time.Minute}, {time.Minute, time.Second}} {
			ns := redistest.Namespace(t)
			opts := staleOptions(w.swr, w.sie)
			opts.TTLFunc = func(key string, _ string) time.Duration {
				switch key {
				case "short":
					return time.Millisecond
				case "for ever":
					return math.MaxInt64
				}
				return staleLife
			}
			c := newCacheIn(t, rdb, ns, opts)
			for key, life := range map[string]time.Duration{
				"set": staleLife, "loaded": staleLife, "none": time.Minute, "short": time.Millisecond, "for ever": math.MaxInt64 - time.Minute,
			} {
				switch key {
				case "set":
					_ = c.Set(t.Context(), key, "v")
				case "none":
					_, _ = c.GetOrLoad(t.Context(), key, fails[string](singlefill.ErrNotFound))
				default:
					_, _ = c.GetOrLoad(t.Context(), key, gives("v"))
				}
				if kept := m.TTL(ns + ":{" + key + "}"); kept != (life + time.Minute).Truncate(time.Millisecond) {
					t.Errorf("%s: kept for %v, want %v and a minute", key, kept, life)
				}
			}
		}
	})
}

func TestAStaleValueIsReturnedInsteadOfAFailure(t *testing.T) {
	const late = 10 * time.Second
	elsewhere := func(t *testing.T, there *singlefill.Cache[string], end error) {
		src := newSource[string](t)
		goGet(t.Context(), there, "k", src.load)
		load := src.next(t)
		if end != nil {
			time.AfterFunc(time.Second, func() { load.fail(end) })
		}
	}
	for _, test := range []struct {
		name      string
		load      singlefill.Loader[string] // nil: another process is loading
		elsewhere error                     // how that ends
		deadline  time.Duration
		took      time.Duration // negative: that, and up to a poll
		is        func(err error) bool
	}{
		{name: "an error", load: fails[string](errSource), is: func(err error) bool { return err == errSource }},
		{name: "an error that looks like the caller's", load: fails[string](context.Canceled), is: func(err error) bool { return err == context.Canceled }},
		{
			name: "a panic", load: func(context.Context, string) (string, error) { panic("boom") },
			is: func(err error) bool {
				var p *singlefill.PanicError
				return errors.As(err, &p) && p.Value == "boom"
			},
		},
		{
			name: "Goexit", load: func(context.Context, string) (string, error) { runtime.Goexit(); return "", nil },
			is: func(err error) bool { return errors.As(err, new(*singlefill.PanicError)) },
		},
		{
			name: "LoadTimeout", load: func(context.Context, string) (string, error) { time.Sleep(30 * time.Minute); return "too late", nil }, took: time.Minute,
			is: func(err error) bool {
				return errors.Is(err, context.DeadlineExceeded) && err != context.DeadlineExceeded
			},
		},
		{
			name: "the caller's deadline", load: (&staleSource{takes: 10 * time.Second, value: "new"}).load, deadline: time.Second, took: time.Second,
			is: func(err error) bool { return err == context.DeadlineExceeded },
		},
		{
			name: "a failure in another process", elsewhere: errSource, took: -time.Second,
			is: func(err error) bool {
				var remote *singlefill.RemoteError
				return errors.As(err, &remote) && *remote == singlefill.RemoteError{Key: "k", Message: errSource.Error()}
			},
		},
		{
			name: "the caller's deadline while another process loads", deadline: time.Second, took: time.Second,
			is: func(err error) bool { return err == context.DeadlineExceeded },
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				var e events
				ns := redistest.Namespace(t)
				opts := staleOptions(0, 5*time.Minute)
				there := staleFleet(t, m, ns, 1, opts)[0]
				opts.Trace = &singlefill.Trace{Stale: staleTrace(&e).Stale, Miss: e.trace().Miss, Hit: e.trace().Hit}
				here := staleFleet(t, m, ns, 1, opts)[0]
				staleSet(t, there, "k", "old", late)
				ctx := t.Context()
				if test.load == nil {
					elsewhere(t, there, test.elsewhere)
					test.load = mustNotLoad[string](t)
				}
				if test.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.deadline)
					defer cancel()
				}
				r := staleAsk(ctx, here, "k", test.load)
				if !test.is(r.info.Err) {
					t.Errorf("the reason is %v", r.info.Err)
				}
				if over := r.took + test.took; test.took < 0 && over > 0 && over < 320*time.Millisecond {
					test.took = r.took
				}
				r.want(t, "the call", staleReply{
					value: "old", info: singlefill.ValueInfo{Stale: true, Age: staleLife + late + test.took, Err: r.info.Err}, took: test.took,
				})
				e.want(t, "the call", "miss k", fmt.Sprintf("stale k true, %v old, %v", r.info.Age, r.info.Err))
				if s := here.Stats(); s.Stale != 1 || s.StaleOnError != 1 || s.Misses != 1 || s.Hits != 0 || s.Refreshes != 0 {
					t.Errorf("%+v, want one stale value because of an error", s)
				}
				time.Sleep(time.Hour) // what was left behind is over
			})
		})
	}
}

// Whoever finds the lock of a refresh held does not wait for it.
func TestARefreshThatIsLeftToAnotherProcessIsNoWait(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		var e events
		opts := staleOptions(time.Minute, 0)
		opts.Trace = e.trace()
		fleet := staleFleet(t, m, redistest.Namespace(t), 2, opts)
		src := newSource[string](t)
		staleSet(t, fleet[0], "k", "old", 0)
		staleAsk(t.Context(), fleet[0], "k", src.load).wantOld(t, "here", 0, nil)
		src.next(t)
		staleAsk(t.Context(), fleet[1], "k", src.load).wantOld(t, "there", 0, nil)
		synctest.Wait()
		e.want(t, "two reads", "hit k", "start k", "hit k")
		if n := fleet[1].Stats().Waits; n != 0 {
			t.Errorf("%d waits", n)
		}
	})
}

func TestWhoLeavesGetsNoStaleValue(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, staleOptions(0, time.Minute))
		staleSet(t, c, "k", "old", 0)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		r := staleAsk(ctx, c, "k", (&staleSource{takes: 10 * time.Second, value: "new"}).load)
		r.want(t, "cancelled", staleReply{err: context.Canceled, took: time.Second})
		if s := c.Stats(); s.Stale != 0 || s.StaleOnError != 0 {
			t.Errorf("%+v, want nothing stale", s)
		}
		time.Sleep(9 * time.Second)
		synctest.Wait()
		staleAsk(t.Context(), c, "k", mustNotLoad[string](t)).wantFresh(t, "the load has gone on", "new")
	})
}

// staleHerd asks n times, with a second of patience each, and wants the old value, whose life has ended at lived.
func staleHerd(t *testing.T, what string, c *singlefill.Cache[string], load singlefill.Loader[string], n int, lived time.Time) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var herd []<-chan staleReply
	for range n {
		herd = append(herd, goStaleAsk(ctx, c, "k", load))
	}
	for _, replies := range herd {
		receive(t, "a reply", replies).want(t, what, staleReply{
			value: "old", took: time.Second,
			info: singlefill.ValueInfo{Stale: true, Age: staleLife + time.Since(lived), Err: context.DeadlineExceeded},
		})
	}
}

func TestAtTheirDeadlineCallersGetTheStaleValueAndTheLoadGoesOn(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		fleet := staleFleet(t, m, redistest.Namespace(t), 2, staleOptions(0, time.Minute))
		src := newSource[string](t)
		staleSet(t, fleet[0], "k", "old", 0)
		lived := time.Now()
		staleHerd(t, "who began it", fleet[0], src.load, 1, lived)
		load := src.next(t)
		for range 5 {
			staleHerd(t, "who waits for another process", fleet[1], src.load, 20, lived)
		}
		time.Sleep(time.Until(lived.Add(10 * time.Second)))
		load.give("new")
		synctest.Wait()
		for _, c := range fleet {
			staleAsk(t.Context(), c, "k", src.load).wantFresh(t, "the load is over", "new")
			if s := c.Stats(); s.Stale != s.StaleOnError || s.Stale < 1 {
				t.Errorf("%+v, want each stale value counted", s)
			}
		}
		src.want(t, 1)
	})
}

// Nor does it matter that the load runs already, in this process, when a caller comes.
func TestWhoComesWhileALoadRunsGetsTheStaleValueAtItsDeadline(t *testing.T) {
	for _, test := range []struct {
		name     string
		swr, sie time.Duration
		late     time.Duration // the load begins
	}{
		{"for a load", 0, time.Minute, 0},
		{"for a refresh begun behind a stale value", time.Minute, time.Hour, time.Minute - time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				c := newCache(t, rdb, staleOptions(test.swr, test.sie))
				src := newSource[string](t)
				staleSet(t, c, "k", "old", 0)
				lived := time.Now()
				time.Sleep(test.late)
				goGet(t.Context(), c, "k", src.load)
				src.next(t)
				time.Sleep(time.Second)
				staleHerd(t, "while it runs", c, src.load, 20, lived)
				src.want(t, 1)
			})
		})
	}
}

func TestWithoutAnOldValueTheDeadlineIsTheCallersAndTheLoadGoesOn(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, staleOptions(time.Minute, time.Hour))
		src := &staleSource{takes: time.Second, value: "v"}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		staleAsk(ctx, c, "k", src.load).want(t, "impatient", staleReply{err: context.DeadlineExceeded, took: 100 * time.Millisecond})
		staleAsk(t.Context(), c, "k", src.load).want(t, "patient", staleReply{value: "v", took: 900 * time.Millisecond})
		src.wantLoads(t, "the deadline of one", 1)
		synctest.Wait()
		staleAsk(t.Context(), c, "k", mustNotLoad[string](t)).wantFresh(t, "the background result", "v")
	})
}

func TestATokenThatExpiresWhileItIsLoadedIsReturnedAndNotKept(t *testing.T) {
	for _, kind := range staleKinds {
		t.Run(kind.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns := redistest.Namespace(t)
				opts := kind.opts()
				opts.TTLFunc = func(_, token string) time.Duration {
					until, _ := time.Parse(time.RFC3339, token)
					return time.Until(until)
				}
				c := newCacheIn(t, rdb, ns, opts)
				src := &staleSource{takes: 2 * time.Second, value: time.Now().Add(2 * time.Second).Format(time.RFC3339)}
				staleAsk(t.Context(), c, "k", src.load).want(t, "the token", staleReply{value: src.value, took: src.takes})
				wantStored(t, rdb, ns, "k", "")
			})
		})
	}
}

func TestNoWindowEndsLaterBecauseALoadRuns(t *testing.T) {
	const left, tick = time.Second, time.Millisecond // when the load begins
	for _, test := range []struct {
		name string
		ends time.Duration // the load, or the caller's patience, before the window's end
	}{{"just before the end", tick}, {"at the end", 0}, {"after the end", -time.Second}} {
		for _, deadline := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, deadline %t", test.name, deadline), func(t *testing.T) {
				inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
					ns := redistest.Namespace(t)
					c := newCacheIn(t, rdb, ns, staleOptions(0, time.Minute))
					staleSet(t, c, "k", "old", time.Minute-left)
					m.SetTTL(ns+":{k}", 24*time.Hour)
					src := &staleSource{takes: left - test.ends, err: errSource}
					failure, ctx := errSource, t.Context()
					if deadline {
						var cancel context.CancelFunc
						ctx, cancel = context.WithTimeout(ctx, src.takes)
						defer cancel()
						src.takes += time.Second
						failure = context.DeadlineExceeded
					}
					want := staleReply{err: failure, took: left - test.ends}
					if test.ends > 0 {
						want = staleReply{
							value: "old", took: want.took,
							info: singlefill.ValueInfo{Stale: true, Age: staleLife + time.Minute - test.ends, Err: failure},
						}
					}
					staleAsk(ctx, c, "k", src.load).want(t, test.name, want)
				})
			})
		}
	}
}

func TestCallersOwnTheStaleValuesTheyGet(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[[]string]{Jitter: -1, StaleIfError: time.Minute})
		if err := c.Set(t.Context(), "k", []string{"old"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(staleLife)
		src := newSource[[]string](t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		herd := []*call[[]string]{goGet(ctx, c, "k", src.load)}
		load := src.next(t)
		for range 3 {
			herd = append(herd, goGet(t.Context(), c, "k", src.load))
		}
		time.Sleep(2 * time.Second)
		load.fail(errSource)
		for _, a := range herd {
			v, err := a.result(t)
			if wantValue(t, v, err, []string{"old"}); len(v) > 0 {
				v[0] = "mine"
			}
		}
	})
}

// staleOutage is a source that is down for a minute, and 4 processes that read every 50 or 100 ms.
func staleOutage(t *testing.T, opts *singlefill.Options[string], retryAfter time.Duration) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		const outage = time.Minute
		pause := min(retryAfter/5, 100*time.Millisecond)
		opts.RetryAfter = retryAfter
		fleet := staleFleet(t, m, redistest.Namespace(t), 4, opts)
		staleSet(t, fleet[0], "k", "old", 0)
		up := time.Now().Add(outage)
		var tried, trying atomic.Int64
		load := func(context.Context, string) (string, error) {
			if trying.Add(1) > 1 {
				t.Error("two loads at a time")
			}
			defer trying.Add(-1)
			if !time.Now().Before(up) {
				return "new", nil
			}
			tried.Add(1)
			return "", errSource
		}
		var wg sync.WaitGroup
		for i, c := range fleet {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 13 * time.Millisecond)
				for value := "old"; value == "old"; time.Sleep(pause) {
					r := staleAsk(t.Context(), c, "k", load)
					if value = r.value; r.err != nil || r.took > 0 || value == "new" && time.Now().Before(up) {
						t.Errorf("got %+v", r)
						return
					}
				}
			})
		}
		wg.Wait()
		// A process that has been told to wait looks again 100 ms and a read after the time at most.
		most := retryAfter + 100*time.Millisecond + pause
		if late := time.Since(up); late > most+2*pause {
			t.Errorf("all have the new value %v after the source has come back, want %v", late, most)
		}
		if n := tried.Load(); n > int64(outage/retryAfter)+1 || n < int64(outage/most) {
			t.Errorf("%d loads in %v, want one every %v", n, outage, retryAfter)
		}
	})
}

//fault:source-down
func TestASourceThatIsDownIsTriedOncePerRetryAfterByTheWholeFleet(t *testing.T) {
	for _, kind := range staleKinds {
		for _, retryAfter := range []time.Duration{250 * time.Millisecond, time.Second, 5 * time.Second} {
			t.Run(fmt.Sprint(kind.name, ", ", retryAfter), func(t *testing.T) {
				opts := kind.opts()
				opts.StaleWhileRevalidate *= 10
				opts.StaleIfError *= 10
				staleOutage(t, opts, retryAfter)
			})
		}
	}
}

func TestWithRetryAfterOffTheSourceIsTriedByEachRead(t *testing.T) {
	for _, kind := range staleKinds {
		t.Run(kind.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				opts := kind.opts()
				opts.RetryAfter = -1
				fleet := staleFleet(t, m, redistest.Namespace(t), 2, opts)
				staleSet(t, fleet[0], "k", "old", 0)
				src := &staleSource{err: errSource}
				for n := range int64(10) {
					if r := staleAsk(t.Context(), fleet[n/2%2], "k", src.load); r.value != "old" || r.err != nil {
						t.Errorf("got %+v", r)
					}
					src.wantLoads(t, "one read more", n+1)
				}
			})
		})
	}
}

func TestAFailedRefreshHoldsBackOnlyThoseWhoHaveSomethingToServe(t *testing.T) {
	for _, test := range []struct {
		name string
		act  func(ctx context.Context, c *singlefill.Cache[string], rdb *redis.Client, ns string) error
		want string // at once; "": it has to be loaded
	}{
		{"Delete", func(ctx context.Context, c *singlefill.Cache[string], _ *redis.Client, _ string) error {
			return c.Delete(ctx, "k")
		}, ""},
		{"Expire", func(ctx context.Context, c *singlefill.Cache[string], _ *redis.Client, _ string) error {
			return c.Expire(ctx, "k")
		}, "old"},
		{"Set", func(ctx context.Context, c *singlefill.Cache[string], _ *redis.Client, _ string) error {
			return c.Set(ctx, "k", "set")
		}, "set"},
		{"age", func(ctx context.Context, _ *singlefill.Cache[string], rdb *redis.Client, ns string) error {
			defer time.Sleep(31 * time.Second)
			return rdb.PExpire(ctx, ns+":{k}", time.Hour).Err()
		}, ""},
		{"eviction", func(ctx context.Context, _ *singlefill.Cache[string], rdb *redis.Client, ns string) error {
			return rdb.Del(ctx, ns+":{k}").Err()
		}, ""},
	} {
		for _, kind := range staleKinds {
			for asker := range 2 {
				t.Run(fmt.Sprintf("%s, %s, by %d", test.name, kind.name, asker), func(t *testing.T) {
					inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
						ns := redistest.Namespace(t)
						opts := kind.opts()
						opts.RetryAfter = 2 * time.Minute // longer than LockTTL, and than the window
						fleet := staleFleet(t, m, ns, 2, opts)
						staleSet(t, fleet[0], "k", "old", 0)
						src := &staleSource{err: errSource}
						staleAsk(t.Context(), fleet[0], "k", src.load)
						synctest.Wait()
						time.Sleep(29 * time.Second)
						for _, c := range fleet {
							r := staleAsk(t.Context(), c, "k", src.load)
							if kind.sie {
								r.wantRemote(t, "within RetryAfter", 29*time.Second, errSource.Error())
							} else {
								r.wantOld(t, "within RetryAfter", 29*time.Second, nil)
							}
						}
						src.wantLoads(t, "within RetryAfter", 1)

						if err := test.act(t.Context(), fleet[0], rdb, ns); err != nil {
							t.Fatal(err)
						}
						src.value, src.err = "new", nil
						r := staleAsk(t.Context(), fleet[asker], "k", src.load)
						switch {
						case test.want == "set":
							r.wantFresh(t, "set", "set")
							if record, found := stored(t, rdb, ns+":{k}:lock"); found {
								t.Errorf("the lock key holds %q", record)
							}
							return
						case test.want == "old" && !kind.sie:
							r.wantOld(t, "expired", 29*time.Second, nil)
						default:
							r.wantFresh(t, "gone or to be loaded first", "new")
						}
						src.wantLoads(t, "at once", 2)
						wantStored(t, rdb, ns, "k", "new")
					})
				})
			}
		}
	}
}

// staleCodec cannot encode one value.
type staleCodec struct{ singlefill.Codec }

func (c staleCodec) Marshal(v any) ([]byte, error) {
	if v == "unspeakable" {
		return nil, errors.New("no")
	}
	return c.Codec.Marshal(v)
}

func TestAValueThatCannotBeEncodedIsAFailedRefresh(t *testing.T) {
	for _, kind := range staleKinds {
		t.Run(kind.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns := redistest.Namespace(t)
				opts := kind.opts()
				opts.Codec, opts.RetryAfter = staleCodec{singlefill.Raw}, 10*time.Second
				fleet := staleFleet(t, m, ns, 2, opts)
				staleSet(t, fleet[0], "k", "old", 0)
				src := &staleSource{value: "unspeakable"}
				r := staleAsk(t.Context(), fleet[0], "k", src.load)
				if kind.sie {
					r.wantFresh(t, "who waited for it", "unspeakable")
				} else {
					r.wantOld(t, "who began it", 0, nil)
				}
				synctest.Wait()
				time.Sleep(opts.RetryAfter - time.Millisecond)
				for _, c := range fleet {
					r := staleAsk(t.Context(), c, "k", src.load)
					if kind.sie {
						r.wantRemote(t, "within RetryAfter", opts.RetryAfter-time.Millisecond, "its value could not be stored")
					} else {
						r.wantOld(t, "within RetryAfter", opts.RetryAfter-time.Millisecond, nil)
					}
				}
				src.wantLoads(t, "within RetryAfter", 1)
				time.Sleep(time.Millisecond)
				synctest.Wait()
				staleAsk(t.Context(), fleet[0], "k", src.load)
				src.wantLoads(t, "after RetryAfter", 2)
				wantStored(t, rdb, ns, "k", "old")
				if s := fleet[0].Stats(); s.StoreErrors != 2 || s.LoadErrors != 0 {
					t.Errorf("%+v, want two store errors", s)
				}
			})
		})
	}
}

func TestWhoComesAfterADeleteGetsNothingFromBefore(t *testing.T) {
	for _, kind := range staleKinds {
		for _, fail := range []error{nil, errSource} {
			t.Run(fmt.Sprintf("%s, the load fails: %v", kind.name, fail), func(t *testing.T) {
				inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
					fleet := staleFleet(t, m, redistest.Namespace(t), 2, kind.opts())
					here, there := fleet[0], fleet[1]
					src := newSource[string](t)
					staleSet(t, here, "k", "old", 0)
					first := goStaleAsk(t.Context(), here, "k", src.load)
					load := src.next(t)
					if err := there.Delete(t.Context(), "k"); err != nil {
						t.Fatal(err)
					}
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
					defer cancel()
					// Before 10ms have passed nobody here knows of the Delete.
					staleAsk(ctx, here, "k", gives("new")).want(t, "who comes after it, and leaves", staleReply{
						err: context.DeadlineExceeded, took: 5 * time.Millisecond,
					})
					later := goStaleAsk(t.Context(), here, "k", gives("new"))
					synctest.Wait()
					load.ends <- ending[string]{value: "older", err: fail}
					receive(t, "a reply", later).wantFresh(t, "who comes after it, and stays", "new")
					if r := receive(t, "a reply", first); r.err != nil || r.value == "new" {
						t.Errorf("who came before: %+v", r)
					}
				})
			})
		}
	}
}

func TestWhoWaitsForAnotherProcessGoesByWhatTheKeyHoldsMeanwhile(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		fleet := staleFleet(t, m, ns, 2, staleOptions(0, time.Minute))
		here, there := fleet[0], fleet[1]
		src := newSource[string](t)
		begin := func() (*loading[string], <-chan staleReply) {
			goGet(t.Context(), there, "k", src.load)
			load := src.next(t)
			waits := goStaleAsk(t.Context(), here, "k", src.load)
			time.Sleep(time.Second)
			return load, waits
		}
		load, waits := begin() // of nothing
		data, err := entry.Entry{FreshUntil: time.Now(), WrittenAt: time.Now(), Payload: []byte("spare")}.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if err := rdb.Set(t.Context(), ns+":{k}", data, time.Hour).Err(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		load.fail(errSource)
		r := receive(t, "a reply", waits)
		if !r.info.Stale || r.info.Err == nil || r.value != "spare" || r.err != nil {
			t.Errorf("a stale value has come: got %+v, want it, and no sooner than at the failure", r)
		}

		staleSet(t, there, "k", "old", 0)
		load, waits = begin()
		if err := rdb.Del(t.Context(), ns+":{k}").Err(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		load.fail(errSource)
		if r := receive(t, "a reply", waits); r.err == nil || r.info != (singlefill.ValueInfo{}) {
			t.Errorf("the stale value has gone: got %+v, want the failure", r)
		}
	})
}

// A refresh begun within StaleWhileRevalidate runs on into the time when callers wait for it.
func TestWhoWaitsForARefreshGetsTheStaleValueIfItFails(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, staleOptions(time.Minute, time.Hour))
		src := newSource[string](t)
		staleSet(t, c, "k", "old", 59*time.Second)
		staleAsk(t.Context(), c, "k", src.load).wantOld(t, "who begins it", 59*time.Second, nil)
		load := src.next(t)
		time.Sleep(time.Second)
		waits := goStaleAsk(t.Context(), c, "k", src.load)
		time.Sleep(10 * time.Second)
		load.fail(errSource)
		receive(t, "a reply", waits).want(t, "who waits", staleReply{
			value: "old", took: 10 * time.Second,
			info: singlefill.ValueInfo{Stale: true, Age: staleLife + 70*time.Second, Err: errSource},
		})
		src.want(t, 1)
	})
}

// Of each kind of value: the life begins with its own, and the windows with its end.
func TestWindowsBeginWithTheEndOfEachLife(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		opts := staleOptions(time.Minute, 2*time.Minute)
		opts.TTLFunc = func(key, _ string) time.Duration {
			if key == "own life" {
				return 10 * time.Minute
			}
			return staleLife
		}
		opts.Jitter = 0.5
		c := newCacheIn(t, rdb, ns, opts)
		const keys = 200
		lives := make(map[time.Duration]bool)
		for i := range keys {
			key := fmt.Sprint(i)
			staleAsk(t.Context(), c, key, gives("old"))
			life := m.TTL(ns+":{"+key+"}") - 2*time.Minute
			if lives[life] = true; life <= staleLife/2 || life > staleLife {
				t.Errorf("a life of %v, want from half an hour to an hour", life)
			}
		}
		if len(lives) < keys/2 {
			t.Errorf("%d keys have only %d different lives", keys, len(lives))
		}
		for _, key := range []string{"own life", "k"} {
			staleAsk(t.Context(), c, key, gives("old"))
			life := m.TTL(ns+":{"+key+"}") - 2*time.Minute
			if key == "own life" && (life <= 5*time.Minute || life > 10*time.Minute) {
				t.Errorf("a life of %v, want from 5 to 10 minutes", life)
			}
			begun := time.Now()
			for _, late := range []time.Duration{-time.Millisecond, 0, 2*time.Minute - time.Millisecond, 2 * time.Minute} {
				time.Sleep(time.Until(begun.Add(life + late)))
				want := staleReply{value: "old", info: singlefill.ValueInfo{Age: life + late, Stale: late >= 0}}
				switch late {
				case 2*time.Minute - time.Millisecond:
					want.info.Err = errSource
				case 2 * time.Minute:
					want = staleReply{err: errSource}
				}
				if late == 0 { // no refresh: that would be another life
					v, err := c.Get(t.Context(), key)
					wantValue(t, v, err, "old")
					continue
				}
				staleAsk(t.Context(), c, key, fails[string](errSource)).want(t, fmt.Sprint(key, " ", late, " late"), want)
			}
		}
	})
}

func TestAStaleNotFoundIsServedAndRefreshedLikeAValue(t *testing.T) {
	for _, kind := range staleKinds {
		t.Run(kind.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				opts := kind.opts()
				opts.RetryAfter = -1
				c := newCache(t, rdb, opts)
				staleAsk(t.Context(), c, "k", fails[string](singlefill.ErrNotFound)).want(t, "loaded", staleReply{err: singlefill.ErrNotFound})
				time.Sleep(time.Minute)
				want := staleReply{err: singlefill.ErrNotFound, info: singlefill.ValueInfo{Stale: true, Age: time.Minute}}
				if kind.sie {
					want.info.Err = errSource
				} else if _, err := c.Get(t.Context(), "k"); err != singlefill.ErrNotFound {
					t.Errorf("Get: %v", err)
				}
				staleAsk(t.Context(), c, "k", fails[string](errSource)).want(t, "the load fails", want)
				synctest.Wait()
				r := staleAsk(t.Context(), c, "k", gives("appeared"))
				if kind.sie {
					r.wantFresh(t, "the load succeeds", "appeared")
				} else {
					r.want(t, "a refresh", want)
				}
				synctest.Wait()
				staleAsk(t.Context(), c, "k", mustNotLoad[string](t)).wantFresh(t, "refreshed", "appeared")
			})
		})
	}
}

func TestARefreshThatBringsNothingToKeepRemovesTheOldValue(t *testing.T) {
	for _, test := range []struct {
		name string
		set  func(o *singlefill.Options[string])
		load singlefill.Loader[string]
		want staleReply // of who waits for the load
		kept bool       // remembered instead
	}{
		{
			"not found", func(o *singlefill.Options[string]) { o.NotFoundTTL = -1 },
			fails[string](fmt.Errorf("wrapped: %w", singlefill.ErrNotFound)), staleReply{}, false,
		},
		{"not found, remembered", func(*singlefill.Options[string]) {}, fails[string](singlefill.ErrNotFound), staleReply{err: singlefill.ErrNotFound}, true},
		{
			"a value without a life", func(o *singlefill.Options[string]) {
				o.TTLFunc = func(_, v string) time.Duration {
					if v == "dead" {
						return 0
					}
					return staleLife
				}
			}, gives("dead"), staleReply{value: "dead"}, false,
		},
	} {
		for _, kind := range staleKinds {
			t.Run(test.name+", "+kind.name, func(t *testing.T) {
				inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
					ns := redistest.Namespace(t)
					opts := kind.opts()
					test.set(opts)
					fleet := staleFleet(t, m, ns, 2, opts)
					staleSet(t, fleet[0], "k", "old", time.Second)
					r := staleAsk(t.Context(), fleet[0], "k", test.load)
					switch {
					case !kind.sie:
						r.wantOld(t, "who begins it", time.Second, nil)
					case test.want == staleReply{}:
						if !errors.Is(r.err, singlefill.ErrNotFound) || r.err == singlefill.ErrNotFound || r.info.Stale {
							t.Errorf("got %+v, want the Loader's error", r)
						}
					default:
						r.want(t, "who waits for it", test.want)
					}
					synctest.Wait()
					if s := fleet[0].Stats(); s.LoadErrors != 0 || s.StaleOnError != 0 {
						t.Errorf("%+v, want no failure", s)
					}
					if test.kept {
						staleAsk(t.Context(), fleet[1], "k", mustNotLoad[string](t)).want(t, "remembered", staleReply{err: singlefill.ErrNotFound})
						return
					}
					wantStored(t, rdb, ns, "k", "")
					if record, found := stored(t, rdb, ns+":{k}:lock"); found && test.want.value != "" {
						t.Errorf("the lock key holds %q, though nothing has failed", record)
					}
					staleAsk(t.Context(), fleet[1], "k", gives("new")).wantFresh(t, "the next caller", "new")
				})
			})
		}
	}
}

func TestAStaleValueThatCannotBeDecodedIsAMiss(t *testing.T) {
	for _, kind := range staleKinds {
		t.Run(kind.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns := redistest.Namespace(t)
				opts := kind.opts()
				opts.Codec = nil // MsgPack
				c := newCacheIn(t, rdb, ns, opts)
				data, err := entry.Entry{FreshUntil: time.Now(), WrittenAt: time.Now(), Payload: []byte{0xc1}}.Encode()
				if err != nil {
					t.Fatal(err)
				}
				if err := rdb.Set(t.Context(), ns+":{k}", data, time.Minute).Err(); err != nil {
					t.Fatal(err)
				}
				src := &staleSource{err: errSource, takes: time.Second}
				for n := range int64(2) { // no RetryAfter: there is nothing to serve meanwhile
					staleAsk(t.Context(), c, "k", src.load).want(t, "the load fails", staleReply{err: errSource, took: src.takes})
					src.wantLoads(t, "nothing to serve", n+1)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				defer cancel()
				staleAsk(ctx, c, "k", src.load).want(t, "a deadline", staleReply{err: context.DeadlineExceeded, took: time.Millisecond})
				time.Sleep(src.takes)
				synctest.Wait()
				staleAsk(t.Context(), c, "k", gives("new")).wantFresh(t, "the load succeeds", "new")
				if s := c.Stats(); s.BadValues != 4 || s.Stale != 0 || s.Refreshes != 0 || s.Misses != 3 {
					t.Errorf("%+v, want four bad values, and three calls answered by a load", s)
				}
			})
		})
	}
}

func TestEmptyValuesAreServedStale(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		testEmptyServedStale(t, newCache(t, rdb, staleOptions(staleLife, 0)), "")
		testEmptyServedStale(t, newCache(t, rdb, &singlefill.Options[string]{StaleWhileRevalidate: staleLife}), "")
		testEmptyServedStale[*int](t, newCache(t, rdb, &singlefill.Options[*int]{StaleWhileRevalidate: staleLife}), nil)
		testEmptyServedStale[[]byte](t, newCache(t, rdb, &singlefill.Options[[]byte]{StaleWhileRevalidate: staleLife}), nil)
		testEmptyServedStale[any](t, newCache(t, rdb, &singlefill.Options[any]{StaleWhileRevalidate: staleLife}), nil)
	})
}

func testEmptyServedStale[T any](t *testing.T, c *singlefill.Cache[T], empty T) {
	loads := 0
	load := func(context.Context, string) (T, error) { loads++; return empty, nil }
	for n := 1; n <= 2; n++ {
		v, info, err := c.GetOrLoadInfo(t.Context(), "k", load)
		wantValue(t, v, err, empty)
		synctest.Wait()
		if info.Stale != (n == 2) || loads != n {
			t.Errorf("%T: %+v and %d loads", empty, info, loads)
		}
		time.Sleep(staleLife)
	}
}

func TestARefreshMayAskForOtherKeysAndForItsOwn(t *testing.T) {
	for _, test := range []struct {
		name string
		then time.Duration // the Loader asks
		want staleReply
	}{
		{"while it can be served", time.Second, staleReply{value: "old", info: singlefill.ValueInfo{Stale: true, Age: staleLife + 51*time.Second}}},
		{"when it can not be served any more", 10 * time.Second, staleReply{err: singlefill.ErrRecursive}},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				opts := staleOptions(time.Minute, 0)
				opts.MaxLoads = 1
				c := newCache(t, rdb, opts)
				staleSet(t, c, "k", "old", 50*time.Second)
				replies := make(chan staleReply, 1)
				staleAsk(t.Context(), c, "k", func(ctx context.Context, _ string) (string, error) {
					time.Sleep(test.then)
					replies <- staleAsk(ctx, c, "k", mustNotLoad[string](t))
					return c.GetOrLoad(ctx, "other", gives("other"))
				}).wantOld(t, "who begins it", 50*time.Second, nil)
				receive(t, "a reply", replies).want(t, "its own key", test.want)
				synctest.Wait()
				staleAsk(t.Context(), c, "k", mustNotLoad[string](t)).wantFresh(t, "refreshed", "other")
				if s := c.Stats(); s.Loads != 2 || s.Refreshes != 1 {
					t.Errorf("%+v, want a refresh, and the load of the other key in it", s)
				}
			})
		})
	}
}

func TestALoadThatIsWaitedForMayNotAskForItsStaleKey(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, staleOptions(0, time.Minute))
		staleSet(t, c, "k", "old", 0)
		staleAsk(t.Context(), c, "k", func(ctx context.Context, key string) (string, error) {
			return c.GetOrLoad(ctx, key, mustNotLoad[string](t))
		}).wantOld(t, "a failure like any other", 0, singlefill.ErrRecursive)
	})
}

// It may be another cache that is being closed, in this process only.
func TestALoadThatMeetsAClosedCacheHoldsNobodyBack(t *testing.T) {
	for _, kind := range staleKinds {
		t.Run(kind.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				fleet := staleFleet(t, m, redistest.Namespace(t), 2, kind.opts())
				staleSet(t, fleet[0], "k", "old", 0)
				var reason error
				if kind.sie {
					reason = singlefill.ErrClosed
				}
				src := &staleSource{err: singlefill.ErrClosed}
				staleAsk(t.Context(), fleet[0], "k", src.load).wantOld(t, "here", 0, reason)
				src.wantLoads(t, "here", 1)
				src.value, src.err = "new", nil
				staleAsk(t.Context(), fleet[1], "k", src.load)
				src.wantLoads(t, "there", 2)
				staleAsk(t.Context(), fleet[1], "k", src.load).wantFresh(t, "there", "new")
			})
		})
	}
}

func TestARefreshKeepsTheValuesOfItsCallsContextAndHasAnEndOfItsOwn(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		opts := staleOptions(time.Hour, 0)
		opts.RetryAfter = time.Second
		c := newCacheIn(t, rdb, ns, opts)
		src := newSource[string](t)
		staleSet(t, c, "k", "old", 0)
		begun := time.Now()
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), traceKey{}, "kept"), time.Second)
		staleAsk(ctx, c, "k", src.load).wantOld(t, "who begins it", 0, nil)
		cancel()
		load := src.next(t)
		time.Sleep(time.Minute - 1)
		if deadline, _ := load.ctx.Deadline(); load.ctx.Value(traceKey{}) != "kept" || load.ctx.Err() != nil || !deadline.Equal(begun.Add(time.Minute)) {
			t.Errorf("the Loader's context: %v, %v; ends after %v", load.ctx.Value(traceKey{}), load.ctx.Err(), deadline.Sub(begun))
		}
		staleAsk(t.Context(), c, "k", mustNotLoad[string](t)).wantOld(t, "just before LoadTimeout", time.Minute-1, nil)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if load.ctx.Err() != context.DeadlineExceeded {
			t.Errorf("at LoadTimeout the Loader's context says %v", load.ctx.Err())
		}
		wantUnlocked(t, rdb, ns, "k")
		time.Sleep(time.Second)
		staleAsk(t.Context(), c, "k", gives("new")).wantOld(t, "after RetryAfter", time.Minute+time.Second, nil)
		synctest.Wait()
		load.give("left behind")
		synctest.Wait()
		wantStored(t, rdb, ns, "k", "new")
		if s := c.Stats(); s.LoadErrors != 1 || s.Refreshes != 2 || s.Stored != 1 {
			t.Errorf("%+v, want one failed refresh and one stored", s)
		}
	})
}

func TestARefreshThatPanicsHarmsNobody(t *testing.T) {
	for name, load := range map[string]singlefill.Loader[string]{
		"panic":  func(context.Context, string) (string, error) { panic("boom") },
		"Goexit": func(context.Context, string) (string, error) { runtime.Goexit(); return "", nil },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns := redistest.Namespace(t)
				c := newCacheIn(t, rdb, ns, staleOptions(time.Minute, 0))
				staleSet(t, c, "k", "old", 0)
				staleAsk(t.Context(), c, "k", load).wantOld(t, "who begins it", 0, nil)
				synctest.Wait()
				wantUnlocked(t, rdb, ns, "k")
				time.Sleep(time.Second)
				staleAsk(t.Context(), c, "k", gives("new")).wantOld(t, "after RetryAfter", time.Second, nil)
				synctest.Wait()
				wantStored(t, rdb, ns, "k", "new")
				if s := c.Stats(); s.LoadPanics != 1 || s.LoadErrors != 1 || s.Refreshes != 2 {
					t.Errorf("%+v, want one panic", s)
				}
			})
		})
	}
}

func TestCloseWaitsForARefreshAndForItsStore(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		opts := staleOptions(time.Minute, 0)
		opts.MaxLoads = 1
		c := newCacheIn(t, rdb, ns, opts)
		for _, key := range []string{"queues", "k"} {
			if err := c.Set(t.Context(), key, "old"); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(staleLife)
		src := &staleSource{takes: 10 * time.Second, value: "new"}
		staleAsk(t.Context(), c, "k", src.load).wantOld(t, "who begins it", 0, nil)
		src.wantLoads(t, "a refresh", 1)
		staleAsk(t.Context(), c, "queues", src.load).wantOld(t, "who begins another", 0, nil)
		synctest.Wait()
		begun := time.Now()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		wantElapsed(t, "Close returns", begun, 10*time.Second)
		wantStored(t, rdb, ns, "k", "new")
		wantStored(t, rdb, ns, "queues", "old")
		src.wantLoads(t, "one ran and one queued", 1)
		if s := c.Stats(); s.Stored != 1 || s.Loading != 0 {
			t.Errorf("%+v, want the refresh stored", s)
		}
	})
}

// A load that Close waits for may go on asking the cache.
func TestNoRefreshBeginsOnceTheCacheCloses(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, staleOptions(time.Minute, 0))
		staleSet(t, c, "k", "old", 0)
		outer := goGet(t.Context(), c, "outer", func(ctx context.Context, _ string) (string, error) {
			time.Sleep(time.Second)
			return c.GetOrLoad(ctx, "k", mustNotLoad[string](t))
		})
		synctest.Wait()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		outer.want(t, "old")
	})
}

// wantCommands checks how many commands a server gets meanwhile.
func wantCommands(t *testing.T, m *miniredis.Miniredis, what string, least, most int, during func()) {
	t.Helper()
	n := m.CommandCount()
	during()
	synctest.Wait()
	if n = m.CommandCount() - n; n < least || n > most {
		t.Errorf("%s: %d commands, want %d to %d", what, n, least, most)
	}
}

func TestARefreshIsLeftToItsHolderAndNotTriedAgainForAWhile(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		fleet := staleFleet(t, m, ns, 2, staleOptions(time.Hour, 0))
		here, there := fleet[0], fleet[1]
		src := newSource[string](t)
		staleSet(t, there, "k", "old", 0)
		ask := func() { staleAsk(t.Context(), here, "k", src.load) }
		staleAsk(t.Context(), there, "k", src.load)
		load := src.next(t)
		ask()
		synctest.Wait()
		wantCommands(t, m, "within a second", 9, 9, func() {
			for range 9 {
				time.Sleep(100 * time.Millisecond)
				ask()
			}
		})
		wantCommands(t, m, "after a second", 2, 100, func() { time.Sleep(100 * time.Millisecond); ask() })
		wantCommands(t, m, "nobody reads", 0, 0, func() { time.Sleep(5 * time.Second) }) // the lock is renewed after 6.67s
		load.give("new")
		synctest.Wait()

		// The holder dies: its lock stays, for less than a second.
		staleSet(t, there, "k", "old", 0)
		if err := rdb.Set(t.Context(), ns+":{k}:lock", "HOTHEROTHEROTHEROTHEROTHERO0123456789012345", 400*time.Millisecond).Err(); err != nil {
			t.Fatal(err)
		}
		for range 4 {
			ask()
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
			src.want(t, 1)
		}
		ask()
		src.next(t).give("new")
		synctest.Wait()
		wantStored(t, rdb, ns, "k", "new")
	})
}

func TestAFailureElsewhereIsAskedForOnceASecondAtMost(t *testing.T) {
	for _, retryAfter := range []time.Duration{400 * time.Millisecond, 5 * time.Second} {
		t.Run(retryAfter.String(), func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				opts := staleOptions(time.Hour, 0)
				opts.RetryAfter = retryAfter
				fleet := staleFleet(t, m, redistest.Namespace(t), 2, opts)
				src := &staleSource{err: errSource}
				staleSet(t, fleet[0], "k", "old", 0)
				for _, c := range fleet {
					staleAsk(t.Context(), c, "k", src.load)
					src.wantLoads(t, "the failure", 1)
				}
				rest := min(retryAfter, time.Second)
				ask := func() {
					time.Sleep(rest / 4)
					staleAsk(t.Context(), fleet[1], "k", src.load)
				}
				wantCommands(t, m, "meanwhile", 3, 3, func() { ask(); ask(); ask() })
				src.wantLoads(t, "meanwhile", 1)
				wantCommands(t, m, "after that", 2, 100, ask)
				if rest == retryAfter {
					src.wantLoads(t, "after RetryAfter", 2)
				}
			})
		})
	}
}

// A replica, or the client's own cache, shows the old entry for a moment after the refresh.
func TestAnEntryThatHasJustBeenRefreshedIsNotRefreshedAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, staleOptions(time.Hour, 0))
		staleSet(t, c, "k", "old", 0)
		data, _ := stored(t, rdb, ns+":{k}")
		src := &staleSource{value: "new"}
		staleAsk(t.Context(), c, "k", src.load).wantOld(t, "who begins it", 0, nil)
		src.wantLoads(t, "a refresh", 1)
		_ = m.Set(ns+":{k}", data)
		m.SetTTL(ns+":{k}", time.Hour)
		for range 9 {
			time.Sleep(11 * time.Millisecond)
			staleAsk(t.Context(), c, "k", src.load)
		}
		src.wantLoads(t, "within 100ms", 1)
		time.Sleep(time.Millisecond)
		staleAsk(t.Context(), c, "k", src.load)
		src.wantLoads(t, "after 100ms", 2)
		// Another entry is another matter.
		if err := c.Expire(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		staleAsk(t.Context(), c, "k", src.load)
		src.wantLoads(t, "expired", 3)
	})
}
