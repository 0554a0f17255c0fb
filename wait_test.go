package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// Time is fake here: commands take none of it, unless a test says so.

// A watch is a process that loads and another one, here, that is watched while it waits.
type watch struct {
	t           *testing.T
	m           *miniredis.Miniredis
	rdb         *redis.Client // of the one that waits
	ns          string
	there, here *singlefill.Cache[string]
	wait        singlefill.WaitInfo // the last one
}

func inWatch(t *testing.T, opts singlefill.Options[string], run func(t *testing.T, w *watch)) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		w := &watch{t: t, m: m, rdb: rdb, ns: redistest.Namespace(t)}
		w.there = newCacheIn(t, redistest.NewMiniClient(t, m), w.ns, &opts)
		w.here = w.another(opts)
		run(t, w)
	})
}

// another makes a process to be watched that has seen nothing.
func (w *watch) another(opts singlefill.Options[string]) *singlefill.Cache[string] {
	opts.Trace = &singlefill.Trace{WaitDone: func(_ context.Context, i singlefill.WaitInfo) { w.wait = i }}
	return newCacheIn(w.t, w.rdb, w.ns, &opts)
}

// waits has the one wait for a load in the other, from its beginning, and returns how long it does so after its end.
func (w *watch) waits(key string, length time.Duration, result ...error) (late time.Duration, polls int) {
	w.t.Helper()
	err := errors.Join(result...)
	loads := goGet(w.t.Context(), w.there, key, loadsFor(length, err))
	synctest.Wait()
	begun := time.Now()
	waits := goGet(w.t.Context(), w.here, key, mustNotLoad[string](w.t))
	waits.result(w.t)
	late = time.Since(begun) - length
	loads.result(w.t)
	w.m.Del(w.ns + ":{" + key + "}")
	return late, w.wait.Polls
}

func loadsFor(length time.Duration, err error) singlefill.Loader[string] {
	return func(context.Context, string) (string, error) {
		time.Sleep(length)
		return "v", err
	}
}

const (
	shortest = 2 * time.Millisecond * 5 / 4   // of all pauses that are not cut short, with its jitter
	longest  = 250 * time.Millisecond * 5 / 4 // of all pauses
)

// part is the longest pause that is a part of d, with its jitter.
func part(d time.Duration, of int) time.Duration {
	return min(max(d*5/4/time.Duration(of), shortest), longest)
}

func TestWhoKnowsHowLongALoadTakesAsksRarelyAndWaitsNoLonger(t *testing.T) {
	for _, c := range []struct {
		length time.Duration
		polls  int
	}{{10 * time.Millisecond, 8}, {137 * time.Millisecond, 12}, {1370 * time.Millisecond, 22}, {10 * time.Second, 75}} {
		for way, learn := range map[string]func(w *watch){
			"waited for one": func(w *watch) { w.waits("k", c.length) },
			"waited for one of another key": func(w *watch) {
				for range 3 {
					w.waits("another", c.length)
				}
			},
			"loaded": func(w *watch) {
				goGet(w.t.Context(), w.here, "k", loadsFor(c.length, nil)).want(w.t, "v")
				w.m.Del(w.ns + ":{k}")
			},
			"waited for many": func(w *watch) {
				for range 5 {
					w.waits("k", c.length)
				}
			},
		} {
			t.Run(fmt.Sprint(c.length, ", ", way), func(t *testing.T) {
				inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
					learn(w)
					for range 4 {
						late, polls := w.waits("k", c.length)
						if late > shortest || polls > c.polls {
							t.Errorf("waits %v longer, and asks %d times; want at most %v and %d", late, polls, shortest, c.polls)
						}
					}
				})
			})
		}
	}
}

// Such as the first one of a process, or one that met a busy machine.
func TestOneLoadLikeNoOtherIsNoReasonToWaitLonger(t *testing.T) {
	const length, loads = 1370 * time.Millisecond, 10
	keys := map[string]func(i int) string{
		"one key":  func(int) string { return "k" },
		"new keys": func(i int) string { return fmt.Sprint("k", i) },
	}
	for name, key := range keys {
		for _, odd := range []time.Duration{6 * time.Microsecond, length / 10, length * 3 / 2, 7 * length} {
			for at := range loads {
				t.Run(fmt.Sprint(name, ", load ", at, " takes ", odd), func(t *testing.T) {
					inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
						for i := range max(5, at+1) {
							took := length
							if i == at {
								took = odd
							}
							goGet(t.Context(), w.here, key(i), loadsFor(took, nil)).want(t, "v")
							w.m.Del(w.ns + ":{" + key(i) + "}")
						}
						for i := range 10 {
							late, polls := w.waits(key(loads+i), length)
							if late > shortest || polls > 22 {
								t.Errorf("waits %v longer, and asks %d times; want at most %v and 22", late, polls, shortest)
							}
						}
					})
				})
			}
		}
	}
}

// A process that has just started finds the entry before, which tells how long its load took.
func TestAnOldEntryTellsHowLongALoadTakes(t *testing.T) {
	opts := singlefill.Options[string]{StaleIfError: time.Hour, Jitter: -1, EarlyRefresh: -1}
	const length = 1370 * time.Millisecond
	inWatch(t, opts, func(t *testing.T, w *watch) {
		goGet(t.Context(), w.there, "k", loadsFor(length, nil)).want(t, "v")
		time.Sleep(time.Hour + time.Minute)
		goGet(t.Context(), w.there, "k", loadsFor(length, nil))
		synctest.Wait()
		begun := time.Now()
		goGet(t.Context(), w.here, "k", mustNotLoad[string](t)).want(t, "v")
		if late := time.Since(begun) - length; late > shortest || w.wait.Polls > 22 {
			t.Errorf("waits %v longer, and asks %d times; want at most %v and 22", late, w.wait.Polls, shortest)
		}
	})
}

func TestWhoKnowsNothingWaitsAQuarterOfALoadLonger(t *testing.T) {
	for _, length := range []time.Duration{5 * time.Millisecond, 50 * time.Millisecond, 500 * time.Millisecond, 5 * time.Second} {
		t.Run(fmt.Sprint(length), func(t *testing.T) {
			inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
				for range 5 {
					w.here = w.another(singlefill.Options[string]{})
					if late, _ := w.waits("k", length); late > part(length, 5) {
						t.Errorf("waits %v longer, want %v at most", late, part(length, 5))
					}
				}
			})
		})
	}
}

// Who comes when a load has long begun does not begin to ask as if it had just begun.
func TestWhoComesLateAsksByTheAgeOfTheLoad(t *testing.T) {
	inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
		loads := goGet(t.Context(), w.there, "k", loadsFor(15*time.Second, nil))
		time.Sleep(10 * time.Second)
		goGet(t.Context(), w.here, "k", mustNotLoad[string](t)).want(t, "v")
		loads.want(t, "v")
		if most := 1 + int(5*time.Second/(250*time.Millisecond*3/4)); w.wait.Polls > most {
			t.Errorf("asks %d times in the last 5s, want %d at most", w.wait.Polls, most)
		}
	})
}

func TestLoadsThatVaryAreFoundWithinAPartOfThem(t *testing.T) {
	lengths := []time.Duration{700 * time.Millisecond, time.Second, 1300 * time.Millisecond, 900 * time.Millisecond, 1100 * time.Millisecond}
	inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
		for i := range 50 {
			length := lengths[i%len(lengths)]
			if late, _ := w.waits("k", length); i >= 2*len(lengths) && late > length*15/100 {
				t.Errorf("load of %v: waits %v longer, want 15%% of it at most", length, late)
			}
		}
	})
}

func TestLoadsOfAllLengthsAreNoneOfAKnownOne(t *testing.T) {
	lengths := []time.Duration{100 * time.Millisecond, time.Second, 300 * time.Millisecond, 3 * time.Second}
	inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
		for i := range 20 {
			length := lengths[i%len(lengths)]
			if late, _ := w.waits("k", length); i >= len(lengths) && late > part(length, 5) {
				t.Errorf("load of %v: waits %v longer, want %v at most", length, late, part(length, 5))
			}
		}
	})
}

// Also of a load that fails sooner than others end.
func TestAWrongGuessCostsNoMoreThanTheLongestPause(t *testing.T) {
	for _, c := range []struct {
		guess, length, late time.Duration
		polls               int
	}{
		{10 * time.Second, 50 * time.Millisecond, longest, 3},
		{time.Second, 600 * time.Millisecond, 200 * time.Millisecond * 5 / 4, 6},
		{137 * time.Millisecond, time.Millisecond, 137 * time.Millisecond * 5 / 8, 1},
		{137 * time.Millisecond, 200 * time.Millisecond, part(63*time.Millisecond, 5), 30},
		{10 * time.Millisecond, 10 * time.Second, longest, 100},
	} {
		for _, result := range []error{nil, errors.New("no value")} {
			t.Run(fmt.Sprint(c.guess, " for ", c.length, ", ", result), func(t *testing.T) {
				inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
					for i := range 4 {
						key := fmt.Sprint("k", i)
						w.here = w.another(singlefill.Options[string]{})
						w.waits(key, c.guess)
						if late, polls := w.waits(key, c.length, result); late > c.late || polls > c.polls {
							t.Errorf("waits %v longer, and asks %d times; want at most %v and %d", late, polls, c.late, c.polls)
						}
					}
				})
			})
		}
	}
}

// Whoever waits for one key in thousands of processes has only one sign of the others.
func TestASlowServerIsAskedLess(t *testing.T) {
	const slow, length = 40 * time.Millisecond, time.Second
	inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
		w.rdb.Ping(t.Context()) // a first connection has a command of its own
		var answered time.Time
		var pauses []time.Duration
		w.rdb.AddHook(cmdHook(func(redis.Cmder) error {
			pauses = append(pauses, time.Since(answered))
			time.Sleep(slow)
			answered = time.Now()
			return nil
		}))
		for range 5 { // of which the first knows nothing
			pauses = nil
			w.waits("k", length)
			for _, pause := range pauses[2:] { // after the first look and the first question
				if least := 2 * slow * 3 / 4; pause < least {
					t.Errorf("asks again after %v, want twice what a command takes, with its jitter %v", pause, least)
				}
			}
		}
	})
}

func TestOneSlowCommandIsNoReasonToAskLess(t *testing.T) {
	const length, slow = 1370 * time.Millisecond, 500 * time.Millisecond
	inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
		w.waits("k", length)
		var commands atomic.Int64
		w.rdb.AddHook(cmdHook(func(redis.Cmder) error {
			if commands.Add(1) == 3 { // after the first look and the first question
				time.Sleep(slow)
			}
			return nil
		}))
		for range 10 {
			commands.Store(0)
			if late, polls := w.waits("k", length); late > shortest || polls < 4 {
				t.Errorf("waits %v longer, and asks %d times", late, polls)
			}
		}
	})
}

// A lock's age is the difference of two times of a clock that may have been set, or be that of another server.
func TestALockOfNoSensibleAgeIsAskedForRarely(t *testing.T) {
	for name, at := range map[string]string{
		"in the future": fmt.Sprintf("%016d", time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()),
		"no time":       "no time at all!!",
	} {
		t.Run(name, func(t *testing.T) {
			inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
				held := "H" + "ANOTHERANOTHERANOTHERANOTH" + at
				if err := w.rdb.Set(t.Context(), w.ns+":{k}:lock", held, 10*time.Second).Err(); err != nil {
					t.Fatal(err)
				}
				begun := time.Now()
				goGet(t.Context(), w.here, "k", gives("v")).want(t, "v")
				if took := time.Since(begun); took < 10*time.Second || took > 10*time.Second+5*time.Millisecond {
					t.Errorf("the lock is taken after %v, want 10s", took)
				}
				if most := 2 + int(10*time.Second/(250*time.Millisecond*3/4)); w.wait.Polls > most {
					t.Errorf("asks %d times in 10s, want %d at most", w.wait.Polls, most)
				}
			})
		})
	}
}
