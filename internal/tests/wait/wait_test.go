package wait_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// A watch has a process that loads, there, and one whose waiting is watched, here.
type watch struct {
	t           *testing.T
	m           *miniredis.Miniredis
	rdb         *redis.Client // of the process that waits
	ns          string
	there, here *singlefill.Cache[string]
	wait        singlefill.WaitInfo // the last one
}

func inWatch(t *testing.T, opts singlefill.Options[string], run func(t *testing.T, w *watch)) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		redistest.Mute(m)
		w := &watch{t: t, m: m, rdb: rdb, ns: redistest.Namespace(t)}
		w.there = cachetest.NewCacheIn(t, redistest.NewMiniClient(t, m), w.ns, &opts)
		w.here = w.another(opts)
		run(t, w)
	})
}

// another returns a new process to watch, which has seen no load.
func (w *watch) another(opts singlefill.Options[string]) *singlefill.Cache[string] {
	opts.Trace = &singlefill.Trace{WaitDone: func(_ context.Context, i singlefill.WaitInfo) { w.wait = i }}
	return cachetest.NewCacheIn(w.t, w.rdb, w.ns, &opts)
}

// waits loads a key there and waits for it here, from the beginning. It returns by how much the
// wait was longer than the load, and how many polls it took.
func (w *watch) waits(key string, length time.Duration, result ...error) (late time.Duration, polls int) {
	w.t.Helper()
	err := errors.Join(result...)
	loads := cachetest.GoGet(w.t.Context(), w.there, key, cachetest.Takes(length, "v", err))
	synctest.Wait()
	begun := time.Now()
	waits := cachetest.GoGet(w.t.Context(), w.here, key, cachetest.MustNotLoad[string](w.t))
	if got, _ := waits.Result(w.t); err == nil && got != "v" {
		w.t.Errorf("the waiter got %q, want what was loaded", got)
	}
	late = time.Since(begun) - length
	loads.Result(w.t)
	w.m.Del(w.ns + ":{" + key + "}")
	return late, w.wait.Polls
}

const (
	shortest = 2 * time.Millisecond * 5 / 4   // of all pauses that are not cut short, with its jitter
	longest  = 250 * time.Millisecond * 5 / 4 // of all pauses
)

// part is the longest pause that is a part of d, with its jitter.
func part(d time.Duration, of int) time.Duration {
	return min(max(d*5/4/time.Duration(of), shortest), longest)
}

// A process that has seen no load learns from the old entry how long a load takes.
func TestWait_LoadTimeFromTheOldEntry(t *testing.T) {
	opts := singlefill.Options[string]{StaleIfError: time.Hour, Jitter: -1, EarlyRefresh: -1}
	const length = 1370 * time.Millisecond
	inWatch(t, opts, func(t *testing.T, w *watch) {
		cachetest.GoGet(t.Context(), w.there, "k", cachetest.Takes(length, "v", nil)).Want(t, "v")
		time.Sleep(time.Hour + time.Minute)
		cachetest.GoGet(t.Context(), w.there, "k", cachetest.Takes(length, "v", nil))
		synctest.Wait()
		begun := time.Now()
		cachetest.GoGet(t.Context(), w.here, "k", cachetest.MustNotLoad[string](t)).Want(t, "v")
		if late := time.Since(begun) - length; late > shortest || w.wait.Polls > 22 {
			t.Errorf("waits %v longer, and asks %d times; want at most %v and 22", late, w.wait.Polls, shortest)
		}
	})
}

// A waiter that arrives late polls by the age of the load, not by the time since its arrival.
func TestWait_LateWaiter(t *testing.T) {
	inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
		loads := cachetest.GoGet(t.Context(), w.there, "k", cachetest.Takes(15*time.Second, "v", nil))
		time.Sleep(10 * time.Second)
		cachetest.GoGet(t.Context(), w.here, "k", cachetest.MustNotLoad[string](t)).Want(t, "v")
		loads.Want(t, "v")
		if most := 1 + int(5*time.Second/(250*time.Millisecond*3/4)); w.wait.Polls > most {
			t.Errorf("asks %d times in the last 5s, want %d at most", w.wait.Polls, most)
		}
	})
}

// A wrong estimate costs one pause at most, also of a load that fails sooner than others end.
func TestWait_WrongEstimate(t *testing.T) {
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

// A waiter pauses for twice as long as its commands take.
//
// Many waiters of one key, in thousands of processes, see nothing else of each other.
func TestWait_SlowServer(t *testing.T) {
	const slow, length = 40 * time.Millisecond, time.Second
	inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
		w.waits("k", length) // until then connections are opened
		var answered time.Time
		var pauses []time.Duration
		w.rdb.AddHook(cachetest.Before(func(redis.Cmder) error {
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

// A waiter polls a lock of an impossible age rarely, and takes it when it ends.
//
// A lock's age is the difference of two times of a clock that may have been set, or may be another
// server's clock.
func TestWait_LockOfImpossibleAge(t *testing.T) {
	for name, at := range map[string]string{
		"in the future": fmt.Sprintf("%016d", time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()),
		"no time":       "no time at all!!",
	} {
		t.Run(name, func(t *testing.T) {
			inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
				held := "H" + "ANOTHERANOTHERANOTHERANOTH" + at
				redistest.Must(t, w.rdb.Set(t.Context(), w.ns+":{k}:lock", held, 10*time.Second).Err())
				begun := time.Now()
				cachetest.GoGet(t.Context(), w.here, "k", cachetest.Gives("v")).Want(t, "v")
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

// A waiter polls every 250 ms at least.
//
//fault:long-waits
func TestWait_LongestPause(t *testing.T) {
	const length = 30 * time.Second
	inWatch(t, singlefill.Options[string]{}, func(t *testing.T, w *watch) {
		loads := cachetest.GoGet(t.Context(), w.there, "k", cachetest.Takes(length, "v", nil))
		synctest.Wait()
		waits := cachetest.GoGet(t.Context(), w.here, "k", cachetest.MustNotLoad[string](t))
		time.Sleep(length)
		loads.Want(t, "v")
		waits.Want(t, "v")
		if d := w.wait.Duration; d < length || d > length+longest {
			t.Errorf("it waits for %v, want %v and a poll", d, length)
		}
		// length / 250 ms, and some at the beginning.
		if n := w.wait.Polls; n < 96 || n > 180 {
			t.Errorf("%d polls in %v, want about 130", n, length)
		}
	})
}

// A process stops polling when its last caller has left.
func TestWait_NoPollsWithoutCallers(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		there, here := cachetest.NewCacheIn[string](t, rdb, ns, nil), cachetest.NewCacheIn[string](t, rdb, ns, nil)
		src := cachetest.NewSource[string](t)
		loads, load := src.Begin(t.Context(), t, there, "k")
		ctx, cancel := context.WithCancel(t.Context())
		waits := cachetest.GoGet(ctx, here, "k", src.Load)
		time.Sleep(time.Second)
		cancel()
		waits.WantErr(t, context.Canceled)
		time.Sleep(3 * time.Second) // until the channel is unsubscribed
		synctest.Wait()
		commands := m.CommandCount()
		time.Sleep(2 * time.Second) // before the lock's renewal
		if n := m.CommandCount() - commands; n != 0 {
			t.Errorf("%d commands without a caller", n)
		}
		load.Give("v")
		loads.Want(t, "v")
		src.Want(t, 1)
	})
}
