package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// Old values that stand in for a load that fails, or hangs, and refreshes that somebody comes to wait for.

var errSourceDown = errors.New("the source is down")

// An answer is what one call of GetOrLoadInfo has returned, and after how long.
type answer[T any] struct {
	value T
	info  singlefill.ValueInfo
	err   error
	took  time.Duration
}

func goAsk[T any](ctx context.Context, c *singlefill.Cache[T], key string, load singlefill.Loader[T]) <-chan answer[T] {
	answers := make(chan answer[T], 1)
	go func() {
		begun := time.Now()
		v, info, err := c.GetOrLoadInfo(ctx, key, load)
		answers <- answer[T]{v, info, err, time.Since(begun)}
	}()
	return answers
}

// takes is a Loader that takes its time.
func takes[T any](d time.Duration, value T, err error) singlefill.Loader[T] {
	return func(context.Context, string) (T, error) { time.Sleep(d); return value, err }
}

// oldCache returns a cache whose values live for a second, and of which k is set and a second older than at.
func oldCache[T any](t *testing.T, rdb *redis.Client, opts singlefill.Options[T], value T, late time.Duration) *singlefill.Cache[T] {
	t.Helper()
	opts.Jitter = -1
	c, err := singlefill.New(rdb, "ns", time.Second, &opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.Set(t.Context(), "k", value); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second + late)
	return c
}

// A hook is what a test does before, or instead of, each command.
type cmdHook func(cmd redis.Cmder) error

func (h cmdHook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h cmdHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if err := h(cmd); err != nil {
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}
func (h cmdHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func TestAValueThatWasFreshWhenItsRefreshBeganIsToldAsStaleWhenItStandsIn(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := oldCache(t, rdb, singlefill.Options[string]{EarlyRefresh: 1e9, StaleIfError: time.Minute}, "", 0)
		<-goAsk(t.Context(), c, "k", takes(10*time.Millisecond, "old", nil))
		time.Sleep(900 * time.Millisecond)
		<-goAsk(t.Context(), c, "k", takes(2*time.Second, "", errSourceDown)) // a hit, and an early refresh
		time.Sleep(200 * time.Millisecond)
		a := <-goAsk(t.Context(), c, "k", mustNotLoad[string](t))
		if a.value != "old" || a.err != nil || !a.info.Stale || a.info.Err != errSourceDown {
			t.Errorf("answered %+v", a)
		}
		if s := c.Stats(); s.StaleOnError != 1 || s.Stale != 1 {
			t.Errorf("%d stale, %d of them on an error, want 1 and 1", s.Stale, s.StaleOnError)
		}
	})
}

func TestAStandInIsACopyOfItsOwn(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		value := map[string]int{"a": 1}
		c := oldCache(t, rdb, singlefill.Options[map[string]int]{StaleWhileRevalidate: time.Second, StaleIfError: time.Minute}, value, 900*time.Millisecond)
		reader := <-goAsk(t.Context(), c, "k", takes(time.Second, value, errSourceDown)) // begins the refresh
		time.Sleep(200 * time.Millisecond)
		waiter := <-goAsk(t.Context(), c, "k", mustNotLoad[map[string]int](t)) // waits for it
		if reader.err != nil || waiter.err != nil || waiter.info.Err != errSourceDown {
			t.Fatalf("answered %+v and %+v", reader, waiter)
		}
		reader.value["a"] = 2
		if !maps.Equal(waiter.value, value) {
			t.Error("two callers have one map")
		}
	})
}

// The first caller of a load knows the old value from its own read, the others only from what shows later that
// nobody has deleted it.
func TestWhoeverWaitsForAHangingLoadGetsTheOldValueAtItsDeadline(t *testing.T) {
	hangs := takes(20*time.Second, "new", nil)
	for name, test := range map[string]struct {
		opts singlefill.Options[string]
		late time.Duration
	}{
		"a load":    {singlefill.Options[string]{StaleIfError: time.Minute}, time.Second},
		"a refresh": {singlefill.Options[string]{StaleWhileRevalidate: time.Second, StaleIfError: time.Minute}, 900 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				c := oldCache(t, rdb, test.opts, "old", test.late)
				ask := func() <-chan answer[string] {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					t.Cleanup(cancel)
					return goAsk(ctx, c, "k", hangs)
				}
				first := ask()
				time.Sleep(200 * time.Millisecond)
				second, third := ask(), ask()
				for i, answers := range []<-chan answer[string]{first, second, third} {
					a := <-answers
					if a.value != "old" || a.err != nil || !a.info.Stale {
						t.Errorf("caller %d is answered %+v", i, a)
					}
				}
				if n := c.Stats().Loads; n != 1 {
					t.Errorf("%d loads, want 1", n)
				}
			})
		})
	}
}

func TestAShortOutageDoesNotMakeReadersOfAServableValueWaitForItsRefresh(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var fail atomic.Bool
		rdb.AddHook(cmdHook(func(cmd redis.Cmder) error {
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
			t.Errorf("the reader who waited for the refresh is answered %+v", a)
		}
	})
}

func TestAStandInIsNotServedPastItsWindowEvenIfTheReleaseIsSlow(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var slow atomic.Bool
		rdb.AddHook(cmdHook(func(redis.Cmder) error {
			if slow.Load() {
				time.Sleep(400 * time.Millisecond)
			}
			return nil
		}))
		c := oldCache(t, rdb, singlefill.Options[string]{StaleIfError: 2 * time.Second}, "old", 1900*time.Millisecond)
		a := <-goAsk(t.Context(), c, "k", func(context.Context, string) (string, error) {
			slow.Store(true)
			return "", errSourceDown
		})
		if a.err != errSourceDown || a.info != (singlefill.ValueInfo{}) {
			t.Errorf("answered %+v", a)
		}
		time.Sleep(time.Minute) // what the cache and the client do for themselves
	})
}

// The flight, or the refresh, of a deleted value waits for a place to load when the value is deleted, and then
// Redis stops answering: nothing can be proved any more, and nothing may be served of what Delete has removed.
func TestADeletedValueStandsInForNobodyWhoComesAfterDelete(t *testing.T) {
	for name, opts := range map[string]singlefill.Options[string]{
		"of a load":    {StaleIfError: time.Minute},
		"of a refresh": {StaleWhileRevalidate: time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				opts.MaxLoads = 1
				c := oldCache(t, rdb, opts, "old", time.Second)
				slow := newSource[string](t)
				other := goGet(t.Context(), c, "other", slow.load)
				busy := slow.next(t)
				before := goAsk(t.Context(), c, "k", fails[string](errSourceDown))
				synctest.Wait()
				if err := c.Delete(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
				m.SetError("LOADING dataset")
				after := goAsk(t.Context(), c, "k", fails[string](errSourceDown))
				time.Sleep(5 * time.Second)
				busy.give("")
				if a := <-after; a.err == nil {
					t.Errorf("who came after Delete is answered %+v", a)
				}
				<-before
				other.want(t, "")
			})
		})
	}
}

func TestARefreshGivesWayToLoadsThatSomebodyWaitsFor(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var scripts atomic.Int64
		rdb.AddHook(cmdHook(func(cmd redis.Cmder) error {
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
		if n := scripts.Load(); n > 10 { // the first flight's renewals
			t.Errorf("%d scripts for refreshes that have no place to load", n)
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

func TestARefreshThatGivesUpAtOnceHasNotWaited(t *testing.T) {
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
			t.Errorf("%d waits, but nobody has waited", n)
		}
		refresh.give("new")
	})
}

func TestAShortOutageStopsRefreshesForASecondNotForRetryAfter(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var fail atomic.Bool
		rdb.AddHook(cmdHook(func(cmd redis.Cmder) error {
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

func TestAnEarlierFailureHereIsNotSaidToBeAnotherProcesses(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := oldCache(t, rdb, singlefill.Options[string]{StaleIfError: time.Minute}, "old", time.Second)
		<-goAsk(t.Context(), c, "k", fails[string](errSourceDown))
		a := <-goAsk(t.Context(), c, "k", mustNotLoad[string](t)) // within RetryAfter
		var remote *singlefill.RemoteError
		if !errors.As(a.info.Err, &remote) || remote.Message != errSourceDown.Error() || strings.Contains(a.info.Err.Error(), "process") {
			t.Errorf("the old value is served because of %v", a.info.Err)
		}
	})
}

// A codecThatExits calls runtime.Goexit when it decodes for the nth time.
type codecThatExits struct {
	singlefill.Codec
	decodes *atomic.Int64
	nth     int64
}

func (c codecThatExits) Unmarshal(data []byte, v any) error {
	if c.decodes.Add(1) == c.nth {
		runtime.Goexit()
	}
	return c.Codec.Unmarshal(data, v)
}

func TestACodecThatExitsInARefreshHarmsNobodyElse(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		codec := codecThatExits{singlefill.Raw, new(atomic.Int64), 2} // the reader's decoding, then the refresh's
		c := oldCache(t, rdb, singlefill.Options[string]{StaleWhileRevalidate: time.Second, Codec: codec}, "old", 500*time.Millisecond)
		if a := <-goAsk(t.Context(), c, "k", mustNotLoad[string](t)); a.value != "old" || a.err != nil {
			t.Errorf("the reader is answered %+v", a)
		}
		time.Sleep(5 * time.Second)
		if a := <-goAsk(t.Context(), c, "k", gives("new")); a.value != "new" || a.err != nil || codec.decodes.Load() != 2 {
			t.Errorf("a later caller is answered %+v", a)
		}
	})
}

// The refresh loads without the lock, for a caller who has found nothing to serve, when another caller's GET fails
// and its lock command does not.
func TestARefreshWithoutTheLockIsJoinedByWhoGetsTheLock(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var failScripts, failGet atomic.Bool
		rdb.AddHook(cmdHook(func(cmd redis.Cmder) error {
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

type refusedReply string

func (e refusedReply) Error() string { return string(e) }
func (refusedReply) RedisError()     {}

func TestAValueThatRedisRefusesIsAFailedRefresh(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var refuse atomic.Bool
		isStore := isScript(t, "store")
		rdb.AddHook(cmdHook(func(cmd redis.Cmder) error {
			if refuse.Load() && isStore(argsOf(cmd)) {
				return refusedReply("ERR invalid bulk length")
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

func argsOf(cmd redis.Cmder) (args []string) {
	for _, a := range cmd.Args() {
		args = append(args, fmt.Sprint(a))
	}
	return args
}

// Without scripts each pair is watched by itself, which takes its time; and no more rights are needed than before.
func TestExpireOfManyKeysWithoutScriptsAndFarFromRedis(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	faultDo(t, server.Admin())("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-@scripting", "-time")
	p := redistest.NewProxy(t, server.Addr)
	c := newCache(t, p.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" }),
		&singlefill.Options[string]{StaleWhileRevalidate: time.Hour})
	keys := make([]string, 300)
	for i := range keys {
		keys[i] = fmt.Sprint(i)
		if err := c.Set(t.Context(), keys[i], "old"); err != nil {
			t.Fatal(err)
		}
	}
	goGet(t.Context(), c, "loaded", gives("v")).want(t, "v")
	wantGet(t, c, "loaded", "v", nil)
	p.Delay(time.Millisecond)
	if err := c.Expire(t.Context(), keys...); err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if _, info, err := c.GetOrLoadInfo(t.Context(), key, gives("new")); !info.Stale || err != nil {
			t.Fatalf("%s after Expire: %+v, %v", key, info, err)
		}
	}
}
