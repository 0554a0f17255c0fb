package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// Time in here is fake: it stands still while anything runs, so that instants can be compared exactly.

// inBubble runs a test with a miniredis that lives by the bubble's clock.
func inBubble(t *testing.T, run func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		run(t, m, rdb)
	})
}

// wantElapsed checks how much time has passed since begun, to the nanosecond.
func wantElapsed(t testing.TB, what string, begun time.Time, want time.Duration) {
	t.Helper()
	if d := time.Since(begun); d != want {
		t.Errorf("%s after %v, want %v", what, d, want)
	}
}

func TestAValueLivesForItsTTL(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{Jitter: -1}) // ttl is an hour
		for i, write := range []func() error{
			func() error { _, err := c.GetOrLoad(t.Context(), "k", gives("v")); return err },
			func() error { return c.Set(t.Context(), "k", "v") },
		} {
			if err := write(); err != nil {
				t.Fatal(i, err)
			}
			time.Sleep(time.Hour - time.Millisecond)
			goGet(t.Context(), c, "k", mustNotLoad[string](t)).want(t, "v")
			time.Sleep(time.Millisecond)
			if _, err := c.Get(t.Context(), "k"); err != singlefill.ErrMiss {
				t.Errorf("Get after the ttl: %v, want ErrMiss", err)
			}
			goGet(t.Context(), c, "k", gives("w")).want(t, "w")
		}
	})
}

func TestAnEntryPastItsTimeIsAMissEvenIfRedisStillHasIt(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &raw)
		if err := c.Set(t.Context(), "k", "v"); err != nil {
			t.Fatal(err)
		}
		if err := rdb.PExpire(t.Context(), ns+":{k}", 24*time.Hour).Err(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		wantStored(t, rdb, ns, "k", "v")
		if _, err := c.Get(t.Context(), "k"); err != singlefill.ErrMiss {
			t.Errorf("Get: %v, want ErrMiss", err)
		}
		goGet(t.Context(), c, "k", gives("w")).want(t, "w")
		wantStored(t, rdb, ns, "k", "w")
		if n := c.Stats().BadValues; n != 0 {
			t.Errorf("%d bad values: a stale one is none", n)
		}
	})
}

func TestNotFoundIsRememberedForItsTTL(t *testing.T) {
	for _, test := range []struct {
		name      string
		ttl       time.Duration
		opts      singlefill.Options[string]
		remembers time.Duration
	}{
		{"a minute by default", time.Hour, singlefill.Options[string]{}, time.Minute},
		{"ttl if that is shorter", time.Second, singlefill.Options[string]{}, time.Second},
		{"NotFoundTTL", time.Second, singlefill.Options[string]{NotFoundTTL: time.Hour}, time.Hour},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				test.opts.Jitter = -1
				c, err := singlefill.New(rdb, "ns", test.ttl, &test.opts)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				goGet(t.Context(), c, "k", fails[string](singlefill.ErrNotFound)).wantErr(t, singlefill.ErrNotFound)
				time.Sleep(test.remembers - time.Millisecond)
				goGet(t.Context(), c, "k", mustNotLoad[string](t)).wantErr(t, singlefill.ErrNotFound)
				time.Sleep(time.Millisecond)
				goGet(t.Context(), c, "k", gives("v")).want(t, "v")
			})
		})
	}
}

func TestTTLFuncGivesEachValueItsLife(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{Jitter: -1, TTLFunc: lifeInMinutes})
		goGet(t.Context(), c, "loaded", gives("2")).want(t, "2")
		if err := c.Set(t.Context(), "set", "3"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2*time.Minute - time.Millisecond)
		goGet(t.Context(), c, "loaded", mustNotLoad[string](t)).want(t, "2")
		time.Sleep(time.Millisecond)
		goGet(t.Context(), c, "loaded", gives("1")).want(t, "1")
		time.Sleep(time.Minute - time.Millisecond)
		goGet(t.Context(), c, "set", mustNotLoad[string](t)).want(t, "3")
		time.Sleep(time.Millisecond)
		goGet(t.Context(), c, "set", gives("1")).want(t, "1")
	})
}

func TestALoadIsGivenLoadTimeout(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c, err := singlefill.New[string](rdb, "ns", time.Hour, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		begun := time.Now()
		_, err = c.GetOrLoad(t.Context(), "k", func(ctx context.Context, _ string) (string, error) {
			if deadline, _ := ctx.Deadline(); !deadline.Equal(begun.Add(30 * time.Second)) {
				t.Errorf("the deadline is %v, want 30s", deadline.Sub(begun))
			}
			<-ctx.Done()
			return "", ctx.Err()
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want context.DeadlineExceeded", err)
		}
		wantElapsed(t, "the call returns", begun, 30*time.Second)
	})
}

//fault:hung-load
func TestALoaderThatHangsIsLeftBehindAtLoadTimeout(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{
			Codec: singlefill.Raw, RedisTimeout: time.Second, LockTTL: 5 * time.Second, LoadTimeout: 12 * time.Second,
		})
		src := newSource[string](t)
		begun := time.Now()
		first := goGet(t.Context(), c, "k", src.load)
		load := src.next(t)
		time.Sleep(11 * time.Second) // the lock has been renewed
		joins := goGet(t.Context(), c, "k", src.load)
		_, err := first.result(t)
		wantElapsed(t, "the first call returns", begun, 12*time.Second)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want context.DeadlineExceeded", err)
		}
		joins.wantErr(t, err)
		wantElapsed(t, "the other call returns", begun, 12*time.Second)

		goGet(t.Context(), c, "k", gives("v2")).want(t, "v2") // at once
		wantElapsed(t, "the key is loaded again", begun, 12*time.Second)
		load.give("v1")
		synctest.Wait()
		wantStored(t, rdb, ns, "k", "v2")
		if s := c.Stats(); s.LoadErrors != 1 || s.Stored != 1 || s.LocksLost != 0 {
			t.Errorf("%+v, want one failed load and one stored", s)
		}
	})
}

//fault:cancelled
func TestACallReturnsAtItsDeadlineAndAtOnceWhenCancelled(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		there, here := newCacheIn[string](t, rdb, ns, nil), newCacheIn[string](t, rdb, ns, nil)
		src := newSource[string](t)
		goGet(t.Context(), there, "k", src.load)
		load := src.next(t)
		for name, c := range map[string]*singlefill.Cache[string]{"for a load here": there, "for another process": here} {
			begun := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 1234567*time.Nanosecond)
			_, err := c.GetOrLoad(ctx, "k", src.load)
			if err != context.DeadlineExceeded {
				t.Errorf("waiting %s: %v, want context.DeadlineExceeded itself", name, err)
			}
			cancel()
			wantElapsed(t, "the deadline: the call returns", begun, 1234567*time.Nanosecond)

			begun = time.Now()
			ctx, cancel = context.WithCancel(t.Context())
			a := goGet(ctx, c, "k", src.load).waits(t)
			cancel()
			a.wantErr(t, context.Canceled)
			wantElapsed(t, "cancelled: the call returns", begun, 0)
		}
		load.give("v")
		goGet(t.Context(), here, "k", src.load).want(t, "v")
		src.want(t, 1)
	})
}

// slowReads is a hook that answers no GET before its context ends.
type slowReads struct{}

func (slowReads) DialHook(next redis.DialHook) redis.DialHook { return next }

func (slowReads) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "get" {
			<-ctx.Done()
			cmd.SetErr(ctx.Err())
			return ctx.Err()
		}
		return next(ctx, cmd)
	}
}

func (slowReads) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func TestACallReturnsInTheMiddleOfARead(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		rdb.AddHook(slowReads{})
		c := newCache(t, rdb, &singlefill.Options[string]{RedisTimeout: time.Second})
		get := func(ctx context.Context) error { _, err := c.Get(ctx, "k"); return err }
		load := func(ctx context.Context) error { _, err := c.GetOrLoad(ctx, "k", gives("v")); return err }
		for name, call := range map[string]func(context.Context) error{"Get": get, "GetOrLoad": load} {
			begun := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			if err := call(ctx); err != context.DeadlineExceeded {
				t.Errorf("%s: %v, want context.DeadlineExceeded itself", name, err)
			}
			cancel()
			wantElapsed(t, "the deadline: "+name, begun, 100*time.Millisecond)
			time.Sleep(time.Minute) // what it began is over

			begun = time.Now()
			ctx, cancel = context.WithCancel(t.Context())
			time.AfterFunc(100*time.Millisecond, cancel)
			_ = call(ctx) // it may have its answer by the time
			if d := time.Since(begun); d > time.Second {
				t.Errorf("cancelled: %s returns after %v, want RedisTimeout at most", name, d)
			}
			time.Sleep(time.Minute)
		}
	})
}

func TestWhoComesAfterADeleteDoesNotWaitForTheOlderLoad(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		here, elsewhere := newCacheIn(t, rdb, ns, &raw), newCacheIn(t, rdb, ns, &raw)
		for _, test := range []struct {
			name    string
			deletes func(ctx context.Context, keys ...string) error
			most    time.Duration
		}{
			{"here", here.Delete, 0},
			{"elsewhere", elsewhere.Delete, 10 * time.Millisecond}, // the time between two looks at a lock
		} {
			src := newSource[string](t)
			older := goGet(t.Context(), here, test.name, src.load)
			load := src.next(t)
			time.Sleep(time.Second)
			if err := test.deletes(t.Context(), test.name); err != nil {
				t.Fatal(err)
			}
			begun := time.Now()
			goGet(t.Context(), here, test.name, gives("v2")).want(t, "v2")
			if d := time.Since(begun); d > test.most {
				t.Errorf("deleted %s: loaded anew after %v, want %v at most", test.name, d, test.most)
			}
			load.give("v1")
			older.want(t, "v1")
		}
		synctest.Wait()
		if s := here.Stats(); s.LocksLost != 1 || s.Fenced != 2 {
			t.Errorf("%+v, want two loads fenced, and the lock missed only where the Delete was elsewhere", s)
		}
	})
}

//fault:slow-load
func TestALockIsRenewedWhileItsLoadRuns(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		opts := &singlefill.Options[string]{RedisTimeout: 300 * time.Millisecond, LockTTL: time.Second, LoadTimeout: time.Minute}
		there, here := newCacheIn(t, rdb, ns, opts), newCacheIn(t, rdb, ns, opts)
		src := newSource[string](t)
		loads := goGet(t.Context(), there, "k", src.load)
		load := src.next(t)
		waits := goGet(t.Context(), here, "k", src.load)
		time.Sleep(55 * time.Second)
		load.give("v")
		loads.want(t, "v")
		waits.want(t, "v")
		src.want(t, 1)
		if s := there.Stats(); s.LocksLost != 0 || s.Stored != 1 {
			t.Errorf("%+v, want the load stored", s)
		}
	})
}

func TestAWaiterPollsAtMostEvery250Milliseconds(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		var waited singlefill.WaitInfo
		there := newCacheIn[string](t, rdb, ns, nil)
		here := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Trace: &singlefill.Trace{
			WaitDone: func(_ context.Context, i singlefill.WaitInfo) { waited = i },
		}})
		src := newSource[string](t)
		goGet(t.Context(), there, "k", src.load)
		load := src.next(t)
		waits := goGet(t.Context(), here, "k", src.load)
		time.Sleep(30 * time.Second)
		load.give("v")
		begun := time.Now()
		waits.want(t, "v")
		if late := time.Since(begun); late > 320*time.Millisecond {
			t.Errorf("the value is seen after %v, want at most a poll of 250ms and its jitter", late)
		}
		synctest.Wait()
		// 30s / 250ms, and some at the beginning.
		if waited.Polls < 96 || waited.Polls > 180 {
			t.Errorf("%d polls in 30s, want about 130", waited.Polls)
		}
		if d := waited.Duration; d < 30*time.Second || d > 30*time.Second+320*time.Millisecond {
			t.Errorf("traced %v of waiting, want 30s and a poll", d)
		}
	})
}

func TestNobodyPollsForCallersWhoHaveLeft(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		there, here := newCacheIn[string](t, rdb, ns, nil), newCacheIn[string](t, rdb, ns, nil)
		src := newSource[string](t)
		loads := goGet(t.Context(), there, "k", src.load)
		load := src.next(t)
		ctx, cancel := context.WithCancel(t.Context())
		waits := goGet(ctx, here, "k", src.load)
		time.Sleep(time.Second)
		cancel()
		waits.wantErr(t, context.Canceled)
		synctest.Wait()
		commands := m.CommandCount()
		time.Sleep(5 * time.Second) // before the lock's renewal
		if n := m.CommandCount() - commands; n != 0 {
			t.Errorf("%d commands for nobody", n)
		}
		load.give("v")
		loads.want(t, "v")
		src.want(t, 1)
	})
}

func TestDefaultsAreAsDocumented(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		for _, test := range []struct{ maxLoads, want int }{{0, 64}, {-1, 100}, {3, 3}} {
			ns := redistest.Namespace(t)
			c, err := singlefill.New(rdb, ns, time.Hour, &singlefill.Options[string]{MaxLoads: test.maxLoads})
			if err != nil {
				t.Fatal(err)
			}
			src := newSource[string](t)
			var herd []*call[string]
			for i := range 100 {
				herd = append(herd, goGet(t.Context(), c, fmt.Sprint(i), src.load))
			}
			synctest.Wait()
			if n := c.Stats().Loading; n != int64(test.want) {
				t.Errorf("MaxLoads %d: %d loads at a time, want %d", test.maxLoads, n, test.want)
			}
			var first string
			for range 100 {
				load := src.next(t)
				if first == "" {
					first = load.key
					if life := m.TTL(ns + ":{" + first + "}:lock"); life != 5*time.Second {
						t.Errorf("LockTTL: a lock lives %v, want 5s", life)
					}
				}
				load.give("v")
			}
			for _, a := range herd {
				a.want(t, "v")
			}
			_ = c.Close()
		}
	})
}

func TestLoadsBeyondMaxLoadsBeginInTheOrderOfTheirComing(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		src := newSource[string](t)
		var herd []*call[string]
		var want, got []string
		for i := range 10 {
			key := fmt.Sprint("k", i)
			want = append(want, key)
			herd = append(herd, goGet(t.Context(), c, key, src.load))
			synctest.Wait() // it loads or queues
		}
		for range want {
			load := src.next(t)
			got = append(got, load.key)
			load.give("v")
		}
		for _, a := range herd {
			a.want(t, "v")
		}
		if !slices.Equal(got, want) {
			t.Errorf("loads began in the order %v, want %v", got, want)
		}
	})
}

func TestAPlaceIsNotHeldWhileWaitingForAnotherProcess(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		opts := &singlefill.Options[string]{MaxLoads: 1}
		there, here := newCacheIn(t, rdb, ns, opts), newCacheIn(t, rdb, ns, opts)
		src := newSource[string](t)
		loads := goGet(t.Context(), there, "x", src.load)
		load := src.next(t)
		waits := goGet(t.Context(), here, "x", src.load)
		synctest.Wait()
		goGet(t.Context(), here, "y", gives("y")).want(t, "y")
		load.give("x")
		loads.want(t, "x")
		waits.want(t, "x")
		src.want(t, 1)
	})
}

func TestTheLockIsNotHeldWhileQueueingForAPlace(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		here := newCacheIn(t, rdb, ns, &singlefill.Options[string]{MaxLoads: 1})
		there := newCacheIn[string](t, rdb, ns, nil)
		src := newSource[string](t)
		busy := goGet(t.Context(), here, "x", src.load)
		load := src.next(t)
		queues := goGet(t.Context(), here, "y", mustNotLoad[string](t))
		synctest.Wait()
		goGet(t.Context(), there, "y", gives("y")).want(t, "y") // another process does not wait for it
		queues.want(t, "y")                                     // who needs no place of its own any more
		load.give("x")
		busy.want(t, "x")
	})
}

// An outsider's flight queues for the only place, which the load holds that now asks for its key.
func TestALoadMayAskForAKeyThatQueuesForItsPlace(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		holds, asks := make(chan struct{}), make(chan struct{})
		outer := goGet(t.Context(), c, "a", func(ctx context.Context, _ string) (string, error) {
			close(holds)
			<-asks
			return c.GetOrLoad(ctx, "b", mustNotLoad[string](t))
		})
		<-holds
		begun := time.Now()
		outsider := goGet(t.Context(), c, "b", gives("b"))
		synctest.Wait() // it queues
		close(asks)
		outer.want(t, "b")
		outsider.want(t, "b")
		if d := time.Since(begun); d > 10*time.Millisecond {
			t.Errorf("both return after %v, want 10ms at most", d)
		}
	})
}

// The only place of one cache is held by a load that asks another cache for a key which an outsider has begun
// to load, and that load asks the first cache.
func TestALoadMayWaitForAnotherCachesLoadThatNeedsItsPlace(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		one := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		two := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		begun := time.Now()
		goOn := make(chan struct{})
		outsider := goGet(t.Context(), two, "b", func(ctx context.Context, _ string) (string, error) {
			<-goOn
			return one.GetOrLoad(ctx, "c", gives("c"))
		})
		synctest.Wait()
		outer := goGet(t.Context(), one, "a", func(ctx context.Context, _ string) (string, error) {
			return two.GetOrLoad(ctx, "b", mustNotLoad[string](t))
		})
		synctest.Wait() // it waits for b
		close(goOn)
		outer.want(t, "c")
		outsider.want(t, "c")
		wantElapsed(t, "both return", begun, 0)
	})
}

// Each cache's only place is held by a load that asks the other cache for a key that nobody loads yet.
//
//fault:recursion
func TestLoadsOfTwoCachesMayAskEachOtherWhenPlacesAreShort(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		one := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		two := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		begun := time.Now()
		goOn := make(chan struct{})
		asks := func(c *singlefill.Cache[string], key string) singlefill.Loader[string] {
			return func(ctx context.Context, _ string) (string, error) {
				<-goOn
				return c.GetOrLoad(ctx, key, gives(key))
			}
		}
		first := goGet(t.Context(), one, "a", asks(two, "c"))
		second := goGet(t.Context(), two, "b", asks(one, "d"))
		synctest.Wait()
		close(goOn)
		first.want(t, "c")
		second.want(t, "d")
		wantElapsed(t, "both return", begun, 0)
	})
}

func TestWhoQueuesForAPlaceAndLeavesLoadsNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		src := newSource[string](t)
		busy := goGet(t.Context(), c, "x", src.load)
		load := src.next(t)
		ctx, cancel := context.WithCancel(t.Context())
		leaves := goGet(ctx, c, "y", mustNotLoad[string](t))
		synctest.Wait()
		cancel()
		leaves.wantErr(t, context.Canceled)
		synctest.Wait()
		load.give("x")
		busy.want(t, "x")
		synctest.Wait()
		goGet(t.Context(), c, "z", gives("z")).want(t, "z") // no place was lost
		goGet(t.Context(), c, "y", gives("y")).want(t, "y")
	})
}

func TestRedisErrorsAndTheBreakerAreTraced(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var e events
		c := newCache(t, rdb, &singlefill.Options[string]{Trace: e.trace()})
		_ = rdb.Close()
		set := func() {
			if err := c.Set(t.Context(), "k", "v"); !errors.Is(err, redis.ErrClosed) {
				t.Errorf("Set: %v, want the client's error", err)
			}
		}
		for range 5 {
			set()
		}
		e.want(t, "failures", "redis set", "redis set", "redis set", "redis set", "redis set")
		time.Sleep(5 * time.Second) // RedisTimeout
		set()
		e.want(t, "failures for as long as a command may take", "redis set", "breaker true")
		v, err := c.GetOrLoad(t.Context(), "k", gives("v"))
		wantValue(t, v, err, "v")
		_ = c.Close()
		e.want(t, "a load without Redis", "start k",
			"done k <nil>, store error false, stored false, fenced false, unlocked true", "miss k")
		s := c.Stats()
		if s.RedisErrors != 6 || s.BreakerOpens != 1 || !s.BreakerOpen || s.LoadsUnlocked != 1 || s.StoreErrors != 0 {
			t.Errorf("%+v, want six errors, an open breaker and a load without a lock", s)
		}
	})
}

//fault:close
func TestCloseTakesLoadTimeoutAtMost(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1}) // LoadTimeout is a minute
		src := newSource[string](t)
		begun := time.Now()
		hangs := goGet(t.Context(), c, "hangs", src.load)
		src.next(t)
		queues := goGet(t.Context(), c, "queues", src.load)
		synctest.Wait()
		time.Sleep(20 * time.Second)
		_ = c.Close()
		wantElapsed(t, "Close returns", begun, time.Minute)
		queues.wantErr(t, singlefill.ErrClosed)
		if _, err := hangs.result(t); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want context.DeadlineExceeded", err)
		}
		src.want(t, 1)
	})
}

//fault:killed-holder
func TestADeadHolderCostsItsLockAndAPoll(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &raw) // LockTTL is 20 s
		// Another process dies: its lock stays as it is while it loads, and nobody renews it.
		src := newSource[string](t)
		lives := goGet(t.Context(), newCacheIn(t, rdb, ns, &raw), "l", src.load)
		load := src.next(t)
		lock, _ := stored(t, rdb, ns+":{l}:lock")
		if err := rdb.Set(t.Context(), ns+":{k}:lock", lock, 20*time.Second).Err(); err != nil {
			t.Fatal(err)
		}
		load.give("v")
		lives.want(t, "v")
		begun := time.Now()
		v, err := c.GetOrLoad(t.Context(), "k", gives("v"))
		wantValue(t, v, err, "v")
		if d := time.Since(begun); d < 20*time.Second || d > 20*time.Second+320*time.Millisecond {
			t.Errorf("loaded after %v, want 20s and a poll", d)
		}
		wantStored(t, rdb, ns, "k", "v")
	})
}

// muteStores is a server that answers none of a cache's stores.
type muteStores struct{}

func (muteStores) DialHook(next redis.DialHook) redis.DialHook { return next }

func (muteStores) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	store := storeHash()
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() != "evalsha" || cmd.Args()[1] != store {
			return next(ctx, cmd)
		}
		<-ctx.Done()
		cmd.SetErr(ctx.Err())
		return ctx.Err()
	}
}

func (muteStores) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func storeHash() string {
	text, err := fillScripts.ReadFile("internal/fill/lua/store.lua")
	if err != nil {
		panic(err)
	}
	return redis.NewScript(string(text)).Hash()
}

// A store that is not answered proves nothing: this process may have been frozen while others went on. Those who
// come after it was sent ask Redis, which may be there.
func TestWhoComesDuringAStoreThatIsNeverAnsweredDoesNotGetWhatWasDeleted(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		silent := redistest.NewMiniClient(t, m)
		silent.AddHook(muteStores{})
		here, there := newCacheIn[string](t, silent, "n", nil), newCacheIn[string](t, rdb, "n", nil)
		get := func(value string) chan string {
			got := make(chan string, 1)
			go func() {
				v, err := here.GetOrLoad(t.Context(), "k", func(context.Context, string) (string, error) {
					time.Sleep(time.Second)
					return value, nil
				})
				if err != nil {
					t.Error(err)
				}
				got <- v
			}()
			synctest.Wait()
			return got
		}
		first := get("old")
		time.Sleep(time.Second / 2)
		during := get("new")
		time.Sleep(time.Second/2 + 100*time.Millisecond) // the store is under way
		if err := there.Delete(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		late := get("new")
		if v := <-first; v != "old" {
			t.Errorf("who asked before it got %q", v)
		}
		if v := <-during; v != "new" { // Redis can be asked, by any command but a store
			t.Errorf("who asked during the load got %q", v)
		}
		if v := <-late; v != "new" {
			t.Errorf("who asked after the Delete got %q", v)
		}
	})
}
