package singlefill_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Readers of a busy key never wait, and each life costs one load.
//
// The workers read evenly, 62.5 times within the time that a load takes. So the refresh begins on
// average 2.4 s before the end of a life (62.5 times e^(-t/0.5s), added up, is 1 there, and
// somewhat less later); and never so late that the load, which takes 0.5 s, would end after that
// life: the odds are e^(-62.5/e), or 1 in 10^10. A cycle is then 18.1 s on average: 300 s are 16.5
// of them, or at least 14, which would be cycles of a whole life and a load each. More than 18
// would take an average of 4.7 s, every time as rare as 1 in 200.
func TestEarlyRefresh_NoReaderWaits(t *testing.T) {
	const life, loadTime, during = 20 * time.Second, 500 * time.Millisecond, 300 * time.Second
	const workers, pause = 50, 400 * time.Millisecond
	for _, processes := range []int{1, 5} {
		t.Run(fmt.Sprint(processes, " processes"), func(t *testing.T) {
			cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				fleet := cachetest.NewCaches(t, m, redistest.Namespace(t), processes, &singlefill.Options[int64]{
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

// An early refresh is one load in the fleet, and no reader waits for it.
func TestEarlyRefresh_OneLoad(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		opts := cachetest.StaleOptions(0, 0)
		opts.EarlyRefresh = 1e9 // every hit, if the load took any time
		opts.TTLFunc = func(string, string) time.Duration { return 10 * time.Second }
		fleet := cachetest.NewCaches(t, m, redistest.Namespace(t), 2, opts)
		src := &cachetest.TimedSource{Takes: 5 * time.Second, Value: "v1"}
		cachetest.Ask(t.Context(), fleet[0], "k", src.Load).Want(t, "a load", cachetest.Answer{Value: "v1", Took: src.Takes})
		src.Value = "v2"
		begun := time.Now()
		for time.Since(begun) < 4*time.Second {
			for _, c := range fleet {
				cachetest.Ask(t.Context(), c, "k", src.Load).Want(t, "hammered", cachetest.Answer{
					Value: "v1", Info: singlefill.ValueInfo{Age: time.Since(begun)},
				})
			}
			time.Sleep(10 * time.Millisecond)
		}
		src.WantLoads(t, "hammered", 2)
		time.Sleep(2 * time.Second)
		for _, c := range fleet {
			v, err := c.Get(t.Context(), "k")
			cachetest.WantValue(t, v, err, "v2")
		}
		time.Sleep(time.Hour)
		src.WantLoads(t, "not read any more", 2)
		for i, c := range fleet {
			if s := c.Stats(); s.Stale != 0 || s.LoadErrors != 0 || s.Refreshes != s.Loads+int64(i)-1 {
				t.Errorf("process %d: %+v, want nothing stale, and loads but the first to be refreshes", i, s)
			}
		}
	})
}

// The whole fleet asks a source that is down once in RetryAfter.
//
//fault:source-down
func TestRetryAfter_OneLoadInTheFleet(t *testing.T) {
	for _, kind := range windowKinds {
		for _, retryAfter := range []time.Duration{250 * time.Millisecond, time.Second, 5 * time.Second} {
			t.Run(fmt.Sprint(kind.name, ", ", retryAfter), func(t *testing.T) {
				opts := kind.opts()
				opts.StaleWhileRevalidate *= 10
				opts.StaleIfError *= 10
				sourceOutage(t, opts, retryAfter)
			})
		}
	}
}

// sourceOutage is a source that is down, and four processes that go on reading a stale value.
func sourceOutage(t *testing.T, opts *singlefill.Options[string], retryAfter time.Duration) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		outage := min(24*retryAfter, time.Minute)
		pause := max(50*time.Millisecond, min(retryAfter/10, 250*time.Millisecond))
		opts.RetryAfter = retryAfter
		fleet := cachetest.NewCaches(t, m, redistest.Namespace(t), 4, opts)
		cachetest.SetStale(t, fleet[0], "k", "old", 0)
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
			return "", cachetest.ErrSource
		}
		var wg sync.WaitGroup
		for i, c := range fleet {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 13 * time.Millisecond)
				for value := "old"; value == "old"; time.Sleep(pause) {
					r := cachetest.Ask(t.Context(), c, "k", load)
					if value = r.Value; r.Err != nil || r.Took > 0 || value == "new" && time.Now().Before(up) {
						t.Errorf("got %+v", r)
						return
					}
				}
			})
		}
		wg.Wait()
		// A process that knows of the failure asks again 100 ms and a read after RetryAfter at most.
		most := retryAfter + 100*time.Millisecond + pause
		if late := time.Since(up); late > most+2*pause {
			t.Errorf("all have the new value %v after the source has come back, want %v", late, most)
		}
		if n := tried.Load(); n > int64(outage/retryAfter)+1 || n < int64(outage/most) {
			t.Errorf("%d loads in %v, want one every %v", n, outage, retryAfter)
		}
	})
}

// Each read asks a source that is down if RetryAfter is off.
func TestRetryAfter_Off(t *testing.T) {
	for _, kind := range windowKinds {
		t.Run(kind.name, func(t *testing.T) {
			cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				opts := kind.opts()
				opts.RetryAfter = -1
				fleet := cachetest.NewCaches(t, m, redistest.Namespace(t), 2, opts)
				cachetest.SetStale(t, fleet[0], "k", "old", 0)
				src := &cachetest.TimedSource{Err: cachetest.ErrSource}
				for n := range int64(10) {
					if r := cachetest.Ask(t.Context(), fleet[n/2%2], "k", src.Load); r.Value != "old" || r.Err != nil {
						t.Errorf("got %+v", r)
					}
					src.WantLoads(t, "one read more", n+1)
				}
			})
		})
	}
}

// A process asks Redis once a second at most whether another one's RetryAfter is over.
func TestRetryAfter_AskedOnceASecond(t *testing.T) {
	for _, retryAfter := range []time.Duration{400 * time.Millisecond, 5 * time.Second} {
		t.Run(retryAfter.String(), func(t *testing.T) {
			cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				opts := cachetest.StaleOptions(time.Hour, 0)
				opts.RetryAfter = retryAfter
				fleet := cachetest.NewCaches(t, m, redistest.Namespace(t), 2, opts)
				src := &cachetest.TimedSource{Err: cachetest.ErrSource}
				cachetest.SetStale(t, fleet[0], "k", "old", 0)
				for _, c := range fleet {
					cachetest.Ask(t.Context(), c, "k", src.Load)
					src.WantLoads(t, "the failure", 1)
				}
				rest := min(retryAfter, time.Second)
				read := func() {
					time.Sleep(rest / 4)
					cachetest.Ask(t.Context(), fleet[1], "k", src.Load)
				}
				cachetest.WantCommands(t, m, "within a second", 3, 3, func() { read(); read(); read() })
				src.WantLoads(t, "within a second", 1)
				cachetest.WantCommands(t, m, "after that", 2, 100, read)
				if rest == retryAfter {
					src.WantLoads(t, "after RetryAfter", 2)
				}
			})
		})
	}
}

// RetryAfter does not delay calls that have nothing to serve.
func TestRetryAfter_NothingToServe(t *testing.T) {
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
		for _, kind := range windowKinds {
			for asker := range 2 {
				t.Run(fmt.Sprintf("%s, %s, by %d", test.name, kind.name, asker), func(t *testing.T) {
					cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
						ns := redistest.Namespace(t)
						opts := kind.opts()
						opts.RetryAfter = 2 * time.Minute // longer than LockTTL, and than the window
						fleet := cachetest.NewCaches(t, m, ns, 2, opts)
						cachetest.SetStale(t, fleet[0], "k", "old", 0)
						src := &cachetest.TimedSource{Err: cachetest.ErrSource}
						cachetest.Ask(t.Context(), fleet[0], "k", src.Load)
						synctest.Wait()
						time.Sleep(29 * time.Second)
						for _, c := range fleet {
							r := cachetest.Ask(t.Context(), c, "k", src.Load)
							if kind.ifError {
								r.WantRemote(t, "within RetryAfter", 29*time.Second, cachetest.ErrSource.Error())
							} else {
								r.WantOld(t, "within RetryAfter", 29*time.Second, nil)
							}
						}
						src.WantLoads(t, "within RetryAfter", 1)

						if err := test.act(t.Context(), fleet[0], rdb, ns); err != nil {
							t.Fatal(err)
						}
						src.Value, src.Err = "new", nil
						r := cachetest.Ask(t.Context(), fleet[asker], "k", src.Load)
						switch {
						case test.want == "set":
							r.WantFresh(t, "set", "set")
							if record, found := cachetest.Stored(t, rdb, ns+":{k}:lock"); found {
								t.Errorf("the lock key holds %q", record)
							}
							return
						case test.want == "old" && !kind.ifError:
							r.WantOld(t, "expired", 29*time.Second, nil)
						default:
							r.WantFresh(t, "gone or to be loaded first", "new")
						}
						src.WantLoads(t, "at once", 2)
						cachetest.WantStored(t, rdb, ns, "k", "new")
					})
				})
			}
		}
	}
}

// A call after a Delete or Expire loads at once, although RetryAfter is not over.
func TestRetryAfter_KeyChanges(t *testing.T) {
	t.Parallel()
	refreshEach(t, func(t *testing.T, how string, r *refreshing, rdb, look redis.UniversalClient) {
		r.load.Fail(errors.New("boom"))
		redistest.Await(t, "the refresh is over", func() bool { return r.Stats().LoadErrors == 1 })
		for _, c := range []*singlefill.Cache[string]{r.Cache, r.elsewhere} {
			cachetest.GoGet(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).Want(t, "v0") // RetryAfter is an hour
		}
		supersede(t, r.Cache, how)
		cachetest.AwaitSeen(t, rdb, look, r.ns, "k")
		again := cachetest.GoGet(t.Context(), r.Cache, "k", r.src.Load)
		if how == "Expire" {
			again.Want(t, "v0")
		}
		r.src.Next(t).Give("v2")
		if how == "Delete" {
			again.Want(t, "v2")
		}
		_ = r.Close()
		cachetest.WantStored(t, look, r.ns, "k", "v2")
		r.src.Want(t, 2)
	}, "Delete", "Expire") // after a Set no load is needed
}

// A load that fails with ErrClosed starts no RetryAfter.
//
// The closed cache may be another one, and closed in this process only.
func TestRetryAfter_ClosedCache(t *testing.T) {
	for _, kind := range windowKinds {
		t.Run(kind.name, func(t *testing.T) {
			cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				fleet := cachetest.NewCaches(t, m, redistest.Namespace(t), 2, kind.opts())
				cachetest.SetStale(t, fleet[0], "k", "old", 0)
				var reason error
				if kind.ifError {
					reason = singlefill.ErrClosed
				}
				src := &cachetest.TimedSource{Err: singlefill.ErrClosed}
				cachetest.Ask(t.Context(), fleet[0], "k", src.Load).WantOld(t, "here", 0, reason)
				src.WantLoads(t, "here", 1)
				src.Value, src.Err = "new", nil
				cachetest.Ask(t.Context(), fleet[1], "k", src.Load)
				src.WantLoads(t, "there", 2)
				cachetest.Ask(t.Context(), fleet[1], "k", src.Load).WantFresh(t, "there", "new")
			})
		})
	}
}

// A clockHook gives a cache a clock that is ahead of Redis', or behind it. A cache trusts the times
// in an entry's header, which are its writer's. The hook shifts the times in all that the cache
// writes, and shifts them back in all that it reads.
type clockHook struct {
	ahead                  time.Duration
	store, lookup, expires func(cmd []string) bool
}

const clockSkew = time.Minute

// clockCache makes a cache whose process has a clock that is ahead.
func clockCache(t testing.TB, m *miniredis.Miniredis, ns string, opts *singlefill.Options[string], ahead time.Duration) *singlefill.Cache[string] {
	t.Helper()
	rdb := redistest.NewMiniClient(t, m)
	rdb.AddHook(&clockHook{ahead, cachetest.Script(t, "store"), cachetest.Script(t, "get_or_lock"), cachetest.Script(t, "expire")})
	return cachetest.NewCacheIn(t, rdb, ns, opts)
}

// clockShift moves the times of an entry, or of its header, by d.
func clockShift(data string, d time.Duration) string {
	const fresh, end = 3, 19 // FreshUntil, WrittenAt
	if len(data) < 35 || data[0] != 0xC1 {
		return data
	}
	return data[:fresh] + clockShiftTimes(data[fresh:end], d) + data[end:]
}

func clockShiftTimes(times string, d time.Duration) string {
	b := []byte(times)
	for ; len(times) > 0; times = times[8:] {
		at := b[len(b)-len(times):]
		binary.BigEndian.PutUint64(at, binary.BigEndian.Uint64(at)+uint64(d.Milliseconds()))
	}
	return string(b)
}

func (h *clockHook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *clockHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.write(cmd)
		err := next(ctx, cmd)
		switch cmd := cmd.(type) {
		case *redis.StringCmd:
			if cmd.Name() == "get" && err == nil {
				cmd.SetVal(clockShift(cmd.Val(), -h.ahead))
			}
		case *redis.Cmd:
			if reply, ok := cmd.Val().([]any); ok && len(reply) == 4 && reply[0] == "hit" {
				reply[1] = clockShift(reply[1].(string), -h.ahead)
			}
		}
		return err
	}
}

func (h *clockHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			h.write(cmd)
		}
		return next(ctx, cmds)
	}
}

// write shifts the times in what a command writes, or shows as known.
func (h *clockHook) write(cmd redis.Cmder) {
	args := cmd.Args()
	switch cmd.Name() {
	case "set":
		args[2] = clockShift(fmt.Sprintf("%s", args[2]), h.ahead)
	case "eval", "evalsha":
		script := []string{cmd.Name(), args[1].(string)}
		argv := args[3+args[2].(int):]
		switch {
		case h.store(script), h.lookup(script):
			argv[2] = clockShift(fmt.Sprintf("%s", argv[2]), h.ahead)
		case h.expires(script):
			argv[0] = clockShiftTimes(argv[0].(string), h.ahead)
		}
	}
}

// eachClock runs a test in a bubble with a cache whose clock is right and one whose clock is not.
func eachClock(t *testing.T, opts func() *singlefill.Options[string], run func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration)) {
	for _, ahead := range []time.Duration{clockSkew, -clockSkew} {
		t.Run(fmt.Sprintf("ahead by %v", ahead), func(t *testing.T) {
			cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns := redistest.Namespace(t)
				right, wrong := cachetest.NewCacheIn(t, rdb, ns, opts()), clockCache(t, m, ns, opts(), ahead)
				if err := wrong.Set(t.Context(), "probe", "v"); err != nil {
					t.Fatal(err)
				}
				if _, e := cachetest.GetEntry(t, rdb, ns, "probe"); !e.WrittenAt.Equal(time.Now().Add(ahead)) {
					t.Fatalf("written at %v, want %v ahead of now", e.WrittenAt, ahead)
				}
				run(t, right, wrong, ahead)
			})
		})
	}
}

func clockOptions(life, swr, sie, retryAfter time.Duration) func() *singlefill.Options[string] {
	return func() *singlefill.Options[string] {
		opts := cachetest.StaleOptions(swr, sie)
		opts.RetryAfter, opts.TTLFunc = retryAfter, func(string, string) time.Duration { return life }
		return opts
	}
}

// A wrong clock shifts life and windows by its error, but Redis ends the entry at its own time.
//
//fault:process-clock
func TestClocks_Freshness(t *testing.T) {
	const life, swr, sie, step = 10 * time.Minute, 3 * time.Minute, 5 * time.Minute, 5 * time.Second
	boom := errors.New("boom")
	opts := clockOptions(life, swr, sie, time.Millisecond)
	eachClock(t, opts, func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration) {
		for key, test := range map[string]struct {
			writer, reader *singlefill.Cache[string]
			ahead          time.Duration // reader of writer
		}{
			"wrong reader": {right, wrong, ahead}, "wrong writer": {wrong, right, -ahead}, "both wrong": {wrong, wrong, 0}, "both right": {right, right, 0},
		} {
			cachetest.GoGet(t.Context(), test.writer, key, cachetest.Gives("v")).Want(t, "v")
			begun := time.Now()
			fresh, served, got := time.Duration(0), time.Duration(0), time.Duration(0) // until when
			for ; time.Since(begun) < life+sie+3*time.Minute; time.Sleep(step) {
				at := time.Since(begun)
				if _, err := test.reader.Get(t.Context(), key); err == nil {
					got = at
				}
				v, info, err := test.reader.GetOrLoadInfo(t.Context(), key, cachetest.Fails[string](boom))
				switch {
				case err == nil && v == "v":
					served = at
					if !info.Stale {
						fresh = at
					}
				case err != boom:
					t.Fatalf("%s after %v: %v", key, at, err)
				}
				if info.Age < 0 {
					t.Errorf("%s: the age is %v", key, info.Age)
				}
			}
			end := life + sie
			for what, until := range map[string][2]time.Duration{
				"fresh":           {fresh, life - test.ahead},
				"found by Get":    {got, life + swr - test.ahead},
				"served at worst": {served, min(end, end-test.ahead)},
			} {
				if until[0] != until[1]-step {
					t.Errorf("%s: %s until %v, want until %v", key, what, until[0]+step, until[1])
				}
			}
		}
	})
}

// A wrong clock serves nothing that Redis has ended, even if the load began before that and fails
// after.
func TestClocks_EntryThatRedisHasEnded(t *testing.T) {
	const life, sie = 10 * time.Minute, 5 * time.Minute
	boom := errors.New("boom")
	eachClock(t, clockOptions(life, 0, sie, time.Millisecond), func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration) {
		cachetest.GoGet(t.Context(), right, "k", cachetest.Gives("v")).Want(t, "v")
		time.Sleep(life + sie - max(0, ahead) - time.Second)
		cachetest.GoGet(t.Context(), wrong, "k", cachetest.Fails[string](boom)).Want(t, "v")
		time.Sleep(max(0, ahead) + time.Second)
		cachetest.GoGet(t.Context(), wrong, "k", cachetest.Fails[string](boom)).WantErr(t, boom)
	})
}

// Caches with different clocks share their loads.
func TestClocks_LoadsAreShared(t *testing.T) {
	const life, run = 10 * time.Minute, 4 * time.Hour
	for name, swr := range map[string]time.Duration{"loaded": 0, "refreshed": 5 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			eachClock(t, clockOptions(life, swr, 0, time.Second), func(t *testing.T, right, wrong *singlefill.Cache[string], _ time.Duration) {
				begun := time.Now()
				loads := 0
				load := func(context.Context, string) (string, error) {
					loads++
					return fmt.Sprint(int(time.Since(begun) / time.Second)), nil
				}
				for ; time.Since(begun) < run; time.Sleep(5 * time.Second) {
					for _, c := range []*singlefill.Cache[string]{right, wrong} {
						v, err := c.GetOrLoad(t.Context(), "k", load)
						at, _ := strconv.Atoi(v)
						if age := time.Since(begun) - time.Duration(at)*time.Second; err != nil || age > life+clockSkew+10*time.Second {
							t.Fatalf("%q, %v at %v", v, err, time.Since(begun))
						}
						synctest.Wait() // a refresh has ended
					}
				}
				if least, most := int(run/(life+clockSkew)), int(run/(life-clockSkew))+1; loads < least || loads > most {
					t.Errorf("%d loads in %v, want %d to %d", loads, run, least, most)
				}
			})
		})
	}
}

// Clocks that differ by more than a life cost loads, but never two at a time.
func TestClocks_FurtherApartThanALife(t *testing.T) {
	const life, loadTime, callers, run = 30 * time.Second, 300 * time.Millisecond, 3, 8 * time.Minute
	for name, opts := range map[string]func() *singlefill.Options[string]{
		"no windows": clockOptions(life, 0, 0, time.Second), "refreshed": clockOptions(life, 20*time.Second, 0, time.Second),
		"kept for errors": clockOptions(life, 0, 20*time.Second, time.Second), "both": clockOptions(life, 20*time.Second, 2*time.Minute, time.Second),
	} {
		t.Run(name, func(t *testing.T) {
			eachClock(t, opts, func(t *testing.T, right, wrong *singlefill.Cache[string], _ time.Duration) {
				begun := time.Now()
				var running, loads atomic.Int64
				load := func(context.Context, string) (string, error) {
					if n := running.Add(1); n > 1 {
						t.Errorf("%d loads at a time", n)
					}
					defer running.Add(-1)
					loads.Add(1)
					time.Sleep(loadTime)
					return "v", nil
				}
				var wg sync.WaitGroup
				calls := 0
				for _, c := range []*singlefill.Cache[string]{right, wrong} {
					for i := range callers {
						wg.Go(func() {
							for time.Since(begun) < run {
								sent := time.Now()
								v, err := c.GetOrLoad(t.Context(), "k", load)
								cachetest.WantValue(t, v, err, "v")
								if took := time.Since(sent); took > 4*loadTime { // a load elsewhere, one here, and polls
									t.Errorf("a call took %v", took)
								}
								time.Sleep(time.Duration(500+77*i) * time.Millisecond)
							}
						})
					}
					calls += callers * int(run/(500*time.Millisecond))
				}
				wg.Wait()
				if n := int(loads.Load()); n < int(run/(life+20*time.Second+clockSkew)) || n > calls/2 {
					t.Errorf("%d loads in %v, %d calls at most", n, run, calls)
				}
				for _, c := range []*singlefill.Cache[string]{right, wrong} {
					if s := c.Stats(); s.RedisErrors+s.BadValues+s.LoadErrors+s.LoadsUnlocked != 0 {
						t.Errorf("%+v, want no trouble", s)
					}
				}
			})
		})
	}
}

// Expire is seen at once, whatever the clocks.
//
//fault:process-clock
func TestClocks_Expire(t *testing.T) {
	const life = 10 * time.Minute
	for name, opts := range map[string]func() *singlefill.Options[string]{
		"no windows": clockOptions(life, 0, 0, time.Second), "refreshed": clockOptions(life, 5*time.Minute, 0, time.Second),
		"kept for errors": clockOptions(life, 0, 5*time.Minute, time.Second),
	} {
		t.Run(name, func(t *testing.T) {
			eachClock(t, opts, func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration) {
				caches := map[string]*singlefill.Cache[string]{"right": right, "wrong": wrong}
				for writerName, writer := range caches {
					for expirerName, expirer := range caches {
						for readerName, reader := range caches {
							key := fmt.Sprint(writerName, expirerName, readerName)
							if err := writer.Set(t.Context(), key, "old"); err != nil {
								t.Fatal(err)
							}
							time.Sleep(time.Second)
							if err := expirer.Expire(t.Context(), key); err != nil {
								t.Fatal(err)
							}
							v, info, err := reader.GetOrLoadInfo(t.Context(), key, cachetest.Gives("new"))
							if name == "refreshed" {
								if err != nil || v != "old" || !info.Stale {
									t.Errorf("%s: %q, %+v, %v; want the old value, stale", key, v, info, err)
								}
							} else if err != nil || v != "new" {
								t.Errorf("%s: %q, %+v, %v; want the new value", key, v, info, err)
							}
							synctest.Wait()
							cachetest.GoGet(t.Context(), reader, key, cachetest.Gives("newer")).Want(t, "new")
						}
					}
				}
			})
		})
	}
}

// RetryAfter goes by the server's clock.
//
//fault:server-clock
func TestClocks_RetryAfter(t *testing.T) {
	const life, retryAfter = 10 * time.Minute, 10 * time.Second // less than LockTTL
	for name, opts := range map[string]func() *singlefill.Options[string]{
		"refreshed": clockOptions(life, time.Hour, 0, retryAfter), "kept for errors": clockOptions(life, 0, time.Hour, retryAfter),
	} {
		t.Run(name, func(t *testing.T) {
			eachClock(t, opts, func(t *testing.T, right, wrong *singlefill.Cache[string], _ time.Duration) {
				for key, caches := range map[string][2]*singlefill.Cache[string]{"wrong fails": {wrong, right}, "right fails": {right, wrong}} {
					cachetest.GoGet(t.Context(), right, key, cachetest.Gives("old")).Want(t, "old")
					time.Sleep(life + clockSkew)
					var loads []time.Duration
					begun := time.Now()
					load := func(context.Context, string) (string, error) {
						loads = append(loads, time.Since(begun))
						return "", errors.New("boom")
					}
					for ; time.Since(begun) < 2*retryAfter; time.Sleep(time.Second) {
						for _, c := range caches {
							cachetest.GoGet(t.Context(), c, key, load).Want(t, "old")
							synctest.Wait()
						}
					}
					// Another process asks again each second, and may have done so just before.
					if len(loads) != 2 || loads[0] != 0 || loads[1] < retryAfter || loads[1] > retryAfter+2*time.Second {
						t.Errorf("%s: the source is asked at %v, want now and after %v", key, loads, retryAfter)
					}
				}
			})
		})
	}
}
