package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A thousand callers of a cold key share one load.
//
//fault:very-many
//fault:cold-key
func TestGetOrLoad_ThousandCallers(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := newCache[string](t, rdb, nil)
		src := newSource[string](t)
		herd := make([]*call[string], 1000)
		for i := range herd {
			herd[i] = goGet(t.Context(), c, "k", src.load)
		}
		for _, a := range herd {
			a.waits(t)
		}
		src.next(t).give("v")
		for _, a := range herd {
			a.want(t, "v")
		}
		src.want(t, 1)
	})
}

// A thousand callers of a cold key send two GETs at most.
//
//fault:cold-key
func TestGetOrLoad_HerdSendsTwoReads(t *testing.T) {
	t.Parallel()
	proxy := redistest.NewProxy(t, redistest.Shared(t).Addr)
	reads := proxy.On(redistest.Command("get"), redistest.Pass)
	c := newCache[string](t, proxy.Client(t), nil)
	src := newSource[string](t)
	herd := make([]*call[string], 1000)
	for i := range herd {
		herd[i] = goGet(t.Context(), c, "k", src.load)
	}
	for _, a := range herd {
		a.waits(t)
	}
	src.next(t).give("v")
	for _, a := range herd {
		a.want(t, "v")
	}
	src.want(t, 1)
	if n := reads.Fired(); n > 2 {
		t.Errorf("%d GETs for one load, want at most 2", n)
	}
}

// Callers that arrive while a read is in transit share the next read.
func TestGetOrLoad_CallersShareTheNextRead(t *testing.T) {
	t.Parallel()
	proxy := redistest.NewProxy(t, redistest.Shared(t).Addr)
	reads := proxy.On(redistest.Command("get"), redistest.HoldReply)
	c := newCache[string](t, proxy.Client(t), nil)
	if err := c.Set(t.Context(), "k", "v"); err != nil {
		t.Fatal(err)
	}
	herd := []*call[string]{goGet(t.Context(), c, "k", mustNotLoad[string](t))}
	receive(t, "the first read is answered", reads.Hit())
	next := proxy.On(redistest.Command("get"), redistest.Pass)
	for range 100 {
		herd = append(herd, goGet(t.Context(), c, "k", mustNotLoad[string](t)).waits(t))
	}
	reads.Times(0).Release()
	for _, a := range herd {
		a.want(t, "v")
	}
	if n := next.Fired(); n != 1 {
		t.Errorf("%d more GETs for 100 callers, want 1", n)
	}
	if s := c.Stats(); s.Hits != 101 || s.Shared != 99 {
		t.Errorf("%d hits, %d shared; want 101, 99", s.Hits, s.Shared)
	}
}

// A caller that leaves before it has started the next read hands the read to the others.
func TestGetOrLoad_NextReaderLeaves(t *testing.T) {
	t.Parallel()
	proxy := redistest.NewProxy(t, redistest.Shared(t).Addr)
	reads := proxy.On(redistest.Command("get"), redistest.HoldReply)
	c := newCache[string](t, proxy.Client(t), nil)
	if err := c.Set(t.Context(), "k", "v"); err != nil {
		t.Fatal(err)
	}
	first := goGet(t.Context(), c, "k", mustNotLoad[string](t))
	receive(t, "the first read is answered", reads.Hit())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	leaves := goGet(ctx, c, "k", mustNotLoad[string](t)).waits(t)
	stays := goGet(t.Context(), c, "k", mustNotLoad[string](t)).waits(t)
	cancel()
	leaves.wantErr(t, context.Canceled)
	reads.Times(0).Release()
	first.want(t, "v")
	stays.want(t, "v")
}

// A reader does not wait for each caller of its batch that leaves.
func TestGetOrLoad_LeaversDelayNoReader(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache[string](t, rdb, nil)
		if err := c.Set(t.Context(), "k", "v"); err != nil {
			t.Fatal(err)
		}
		rdb.AddHook(slow(30 * time.Millisecond))
		goGet(t.Context(), c, "k", mustNotLoad[string](t)) // a read in flight
		synctest.Wait()
		for i := range 40 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(30*time.Millisecond+time.Duration(i+1)*29*time.Millisecond, cancel)
			goGet(ctx, c, "k", mustNotLoad[string](t))
			synctest.Wait()
		}
		begun := time.Now()
		goGet(t.Context(), c, "k", mustNotLoad[string](t)).want(t, "v")
		if took := time.Since(begun); took > 100*time.Millisecond {
			t.Errorf("a hit took %v", took)
		}
		time.Sleep(time.Minute)
	})
}

// A process never runs two loads of a key at a time, even if callers arrive just as a load ends.
//
//fault:cold-key
func TestGetOrLoad_NeverTwoLoadsAtATime(t *testing.T) {
	t.Parallel()
	const keys, callers = 2, 10
	rounds := int64(500) // of 10 calls
	if testing.Short() {
		rounds = 200
	}
	for _, kind := range []string{"mini", "single"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var rdb *redis.Client
			if kind == "mini" {
				_, rdb = redistest.StartMini(t)
			} else {
				rdb = redistest.Shared(t).Client(t)
			}
			c := newCache(t, rdb, &singlefill.Options[int64]{TTLFunc: func(string, int64) time.Duration { return 0 }})
			var wg sync.WaitGroup
			for k := range keys {
				key := fmt.Sprint("k", k)
				var running, begun, ended atomic.Int64
				load := func(_ context.Context, got string) (int64, error) {
					if n := running.Add(1); n != 1 || got != key {
						t.Errorf("%d loads of %s at a time, for %s", n, got, key)
					}
					n := begun.Add(1)
					runtime.Gosched()
					ended.Store(n)
					running.Add(-1)
					return n, nil
				}
				for range callers / keys {
					wg.Go(func() {
						for range rounds {
							before := ended.Load()
							v, err := c.GetOrLoad(t.Context(), key, load)
							if err != nil || v < before || v > begun.Load() {
								t.Errorf("load %d, %v; want one of %d to %d", v, err, before, begun.Load())
								return
							}
						}
					})
				}
			}
			wg.Wait()
			_ = c.Close()
			if s := c.Stats(); s.Misses != callers*rounds || s.Loads+s.Shared != s.Misses || s.LoadsUnlocked != 0 {
				t.Errorf("%+v: each of %d calls has either loaded or shared", s, callers*rounds)
			}
		})
	}
}

// An error of the Loader is returned as it is to all callers that waited, and is not remembered.
//
//fault:failed-load
func TestGetOrLoad_ErrorIsShared(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &raw)
		src := newSource[string](t)
		boom := fmt.Errorf("wrapped: %w", io.ErrUnexpectedEOF)
		herd := []*call[string]{goGet(t.Context(), c, "k", src.load)}
		load := src.next(t)
		for range 10 {
			herd = append(herd, goGet(t.Context(), c, "k", src.load).waits(t))
		}
		load.fail(boom)
		for _, a := range herd {
			a.wantErr(t, boom)
		}
		wantStored(t, rdb, ns, "k", "")
		wantUnlocked(t, rdb, ns, "k")
		again := goGet(t.Context(), c, "k", src.load)
		src.next(t).give("v")
		again.want(t, "v")
		src.want(t, 2)
	})
}

// ErrNotFound, bare or wrapped, is remembered, and later callers get it bare.
//
//fault:failed-load
func TestErrNotFound_Remembered(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := newCache[string](t, rdb, nil)
		for name, err := range map[string]error{
			"bare":    singlefill.ErrNotFound,
			"wrapped": fmt.Errorf("no such row: %w", singlefill.ErrNotFound),
		} {
			src := newSource[string](t)
			first := goGet(t.Context(), c, name, src.load)
			load := src.next(t)
			joins := goGet(t.Context(), c, name, src.load).waits(t)
			load.fail(err)
			first.wantErr(t, err)
			joins.wantErr(t, err)
			goGet(t.Context(), c, name, mustNotLoad[string](t)).wantErr(t, singlefill.ErrNotFound)
			wantGet(t, c, name, "", singlefill.ErrNotFound)
		}
	})
}

type typedNil struct{ text string }

func (e *typedNil) Error() string { return e.text }

// A panic or runtime.Goexit of the Loader or of TTLFunc is a PanicError to all callers that waited.
//
//fault:failed-load
func TestPanicError(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, test := range []struct {
			name  string
			opts  singlefill.Options[string]
			load  singlefill.Loader[string]
			value any    // of the PanicError; nil: any
			text  string // which the error must contain
		}{
			{"panic", raw, func(context.Context, string) (string, error) { panic("a text") }, "a text", "singlefill: Loader panicked: a text"},
			{"panic with an error", raw, func(context.Context, string) (string, error) { panic(cause) }, cause, "cause"},
			{"panic of nil", raw, func(context.Context, string) (string, error) { panic(nil) }, nil, "nil"},
			{"Goexit", raw, func(context.Context, string) (string, error) { runtime.Goexit(); return "", nil }, nil, "Goexit"},
			{"TTLFunc", singlefill.Options[string]{TTLFunc: func(string, string) time.Duration { panic("a ttl") }}, gives("v"), "a ttl", "a ttl"},
		} {
			t.Run(test.name, func(t *testing.T) {
				ns := redistest.Namespace(t)
				c := newCacheIn(t, rdb, ns, &test.opts)
				begun, goOn := make(chan struct{}), make(chan struct{})
				first := goGet(t.Context(), c, "k", func(ctx context.Context, key string) (string, error) {
					close(begun)
					<-goOn
					return test.load(ctx, key)
				})
				receive(t, "the load begins", begun)
				joins := goGet(t.Context(), c, "k", mustNotLoad[string](t)).waits(t)
				close(goOn)

				_, err := first.result(t)
				var p *singlefill.PanicError
				if !errors.As(err, &p) {
					t.Fatalf("got %v, want a PanicError", err)
				}
				joins.wantErr(t, err)
				if test.value != nil && p.Value != test.value {
					t.Errorf("Value is %v, want %v", p.Value, test.value)
				}
				if !strings.Contains(err.Error(), test.text) {
					t.Errorf("the error says %q, want %q", err, test.text)
				}
				if !strings.Contains(string(p.Stack), "callLoader") {
					t.Errorf("not the stack of the Loader:\n%s", p.Stack)
				}
				if is := errors.Is(err, cause); is != (test.value == cause) {
					t.Errorf("errors.Is says %t of the panic's error", is)
				}
				wantUnlocked(t, rdb, ns, "k")
				if test.opts.TTLFunc == nil {
					goGet(t.Context(), c, "k", gives("v")).want(t, "v")
				}
				if n := c.Stats().LoadPanics; n != 1 {
					t.Errorf("%d panics counted, want 1", n)
				}
			})
		}
	})
}

// A load goes on for the other callers when the first one is cancelled.
//
//fault:cancelled
func TestGetOrLoad_CancelledFirstCaller(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := newCache[string](t, rdb, nil)
		src := newSource[string](t)
		ctx, cancel := context.WithCancel(t.Context())
		leader := goGet(ctx, c, "k", src.load)
		load := src.next(t)
		waits := goGet(t.Context(), c, "k", src.load).waits(t)
		cancel()
		leader.wantErr(t, context.Canceled) // the load has not ended
		if err := load.ctx.Err(); err != nil {
			t.Errorf("the load's context: %v", err)
		}
		load.give("v")
		waits.want(t, "v")
		src.want(t, 1)
	})
}

// A caller whose context ends returns at once, and the others go on waiting.
func TestGetOrLoad_CallerLeavesAtOnce(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := newCache[string](t, rdb, nil)
		src := newSource[string](t)
		ctx, cancel := context.WithCancel(t.Context())
		expires, stop := context.WithTimeout(t.Context(), time.Hour)
		defer stop()
		stays := goGet(expires, c, "k", src.load)
		load := src.next(t)
		var leavers []*call[string]
		for range 9 {
			leavers = append(leavers, goGet(ctx, c, "k", src.load).waits(t))
		}
		soon, stop := context.WithTimeout(t.Context(), time.Millisecond)
		defer stop()
		_, err := c.GetOrLoad(soon, "k", src.load)
		if err != context.DeadlineExceeded {
			t.Errorf("%v at the deadline, want context.DeadlineExceeded itself", err)
		}
		cancel()
		for _, a := range leavers {
			a.wantErr(t, context.Canceled)
		}
		load.give("v")
		stays.want(t, "v")
		src.want(t, 1)
	})
}

// A load goes on and is stored when all callers have left.
//
//fault:cancelled
func TestGetOrLoad_AllCallersLeave(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &raw)
		src := newSource[string](t)
		ctx, cancel := context.WithCancel(t.Context())
		var herd []*call[string]
		for range 10 {
			herd = append(herd, goGet(ctx, c, "k", src.load).waits(t))
		}
		load := src.next(t)
		cancel()
		for _, a := range herd {
			a.wantErr(t, context.Canceled)
		}
		if err := load.ctx.Err(); err != nil {
			t.Errorf("the load's context: %v", err)
		}
		joins := goGet(t.Context(), c, "k", src.load).waits(t)
		load.give("v")
		joins.want(t, "v")
		wantStored(t, rdb, ns, "k", "v")
		goGet(t.Context(), c, "k", src.load).want(t, "v")
		src.want(t, 1)
	})
}

// A waiting call returns exactly at its deadline, and at once when it is cancelled.
//
//fault:cancelled
func TestGetOrLoad_DeadlineAndCancellation(t *testing.T) {
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

// A call in the middle of a read returns at its deadline, and within RedisTimeout when it is
// cancelled.
func TestGetOrLoad_EndOfContextInARead(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		mute := &outage{keeps: redistest.Command("get")}
		mute.on.Store(true)
		rdb.AddHook(mute.hook())
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
			time.Sleep(time.Minute) // its command is over

			begun = time.Now()
			ctx, cancel = context.WithCancel(t.Context())
			time.AfterFunc(100*time.Millisecond, cancel)
			_ = call(ctx) // it may have its reply by then
			if d := time.Since(begun); d > time.Second {
				t.Errorf("cancelled: %s returns after %v, want RedisTimeout at most", name, d)
			}
			time.Sleep(time.Minute)
		}
	})
}

// A Loader's context has the first caller's values, but neither its deadline nor its cancellation.
func TestLoader_ContextValues(t *testing.T) {
	t.Parallel()
	type key struct{}
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := newCache(t, rdb, &singlefill.Options[string]{LoadTimeout: 10 * time.Minute})
		src := newSource[string](t)
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "first"), time.Minute)
		first := goGet(ctx, c, "k", src.load)
		load := src.next(t)
		joins := goGet(context.WithValue(t.Context(), key{}, "second"), c, "k", src.load).waits(t)
		if v := load.ctx.Value(key{}); v != "first" {
			t.Errorf("the load's context has the value %v", v)
		}
		deadline, ok := load.ctx.Deadline()
		if left := time.Until(deadline); !ok || left < 2*time.Minute {
			t.Errorf("the load ends in %v, %t: want LoadTimeout", left, ok)
		}
		cancel()
		first.wantErr(t, context.Canceled)
		if err := load.ctx.Err(); err != nil {
			t.Errorf("the load's context: %v", err)
		}
		load.give("v")
		joins.want(t, "v")
	})
}

// A load has 30 s by default.
func TestLoadTimeout_Default(t *testing.T) {
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

// A Loader that ignores its context is left behind at LoadTimeout, and its late value is dropped.
//
//fault:hung-load
func TestLoadTimeout_LoaderIgnoresItsContext(t *testing.T) {
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

// A Loader can ask for other keys, of other caches too, whatever MaxLoads is.
func TestLoader_OtherKeys(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, maxLoads := range []int{0, 1, -1} {
			c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: maxLoads})
			other := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: maxLoads})
			goGet(t.Context(), c, "a", func(ctx context.Context, _ string) (string, error) {
				b, err := c.GetOrLoad(ctx, "b", func(ctx context.Context, _ string) (string, error) {
					return other.GetOrLoad(ctx, "c", func(ctx context.Context, _ string) (string, error) {
						return c.GetOrLoad(ctx, "d", gives("d"))
					})
				})
				return "a" + b, err
			}).want(t, "ad")
			goGet(t.Context(), c, "b", mustNotLoad[string](t)).want(t, "d")
			goGet(t.Context(), c, "e", gives("e")).want(t, "e") // the slot is free again
		}
	})
}

// A Loader that asks for its own key, directly or by way of another, gets ErrRecursive.
//
//fault:recursion
func TestErrRecursive_OwnKey(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := newCache[string](t, rdb, nil)
		goGet(t.Context(), c, "k", func(ctx context.Context, key string) (string, error) {
			_, err := c.GetOrLoad(ctx, key, mustNotLoad[string](t))
			if err != singlefill.ErrRecursive {
				t.Errorf("got %v, want ErrRecursive itself", err)
			}
			return "v", nil
		}).want(t, "v")
		// Also by way of another key.
		goGet(t.Context(), c, "a", func(ctx context.Context, _ string) (string, error) {
			return c.GetOrLoad(ctx, "b", func(ctx context.Context, _ string) (string, error) {
				return c.GetOrLoad(ctx, "a", mustNotLoad[string](t))
			})
		}).wantErr(t, singlefill.ErrRecursive)
	})
}

// Of two loads that ask for each other's key one gets ErrRecursive.
//
//fault:recursion
func TestErrRecursive_LoadsOfEachOther(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		one, two := newCache[string](t, rdb, nil), newCache[string](t, rdb, nil)
		for name, other := range map[string]*singlefill.Cache[string]{"of one cache": one, "of two caches": two} {
			a, b := name+" a", name+" b"
			both := make(chan struct{}, 2)
			meet := make(chan struct{})
			var recursive atomic.Int64
			asks := func(c *singlefill.Cache[string], key string) singlefill.Loader[string] {
				return func(ctx context.Context, _ string) (string, error) {
					both <- struct{}{}
					<-meet
					v, err := c.GetOrLoad(ctx, key, mustNotLoad[string](t))
					if err == singlefill.ErrRecursive {
						recursive.Add(1)
						return "end", nil
					}
					return v, err
				}
			}
			first := goGet(t.Context(), one, a, asks(other, b))
			second := goGet(t.Context(), other, b, asks(one, a))
			receive(t, "a load", both)
			receive(t, "both loads", both)
			close(meet)
			first.want(t, "end")
			second.want(t, "end")
			if n := recursive.Load(); n != 1 {
				t.Errorf("%s: %d calls got ErrRecursive, want 1", name, n)
			}
		}
	})
}

// A Loader can start a load that it does not wait for, and which needs the Loader's own key.
func TestErrRecursive_Prefetch(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		prefetched := make(chan *call[string], 1)
		a := goGet(t.Context(), c, "a", func(ctx context.Context, _ string) (string, error) {
			prefetched <- goGet(context.WithoutCancel(ctx), c, "b", func(ctx context.Context, _ string) (string, error) {
				return c.GetOrLoad(ctx, "a", mustNotLoad[string](t))
			})
			time.Sleep(time.Second)
			return "v", nil
		})
		prefetch := <-prefetched
		synctest.Wait()
		outsider := goGet(t.Context(), c, "b", mustNotLoad[string](t))
		a.want(t, "v")
		prefetch.want(t, "v")
		outsider.want(t, "v")
	})
}

// A load that callers wait for gets ErrRecursive from its own key, although the key holds a stale
// value.
func TestErrRecursive_StaleKey(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, staleOptions(0, time.Minute))
		setStale(t, c, "k", "old", 0)
		ask(t.Context(), c, "k", func(ctx context.Context, key string) (string, error) {
			return c.GetOrLoad(ctx, key, mustNotLoad[string](t))
		}).wantOld(t, "a failure like any other", 0, singlefill.ErrRecursive)
	})
}

// A refresh that asks for its own key gets the old value, and ErrRecursive once the value is gone.
func TestErrRecursive_Refresh(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"the loader", "another caller"} {
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			p, ns, c, _, rdb := proxied(t, refreshOptions())
			putEntry(t, rdb, ns, "k", refreshKinds["stale"](), time.Hour)
			begun, asks, asked := make(chan struct{}), make(chan struct{}), make(chan struct{})
			goGet(t.Context(), c, "k", func(ctx context.Context, key string) (string, error) {
				v, err := c.GetOrLoad(ctx, key, mustNotLoad[string](t))
				wantValue(t, v, err, "v0") // as long as it is there
				close(begun)
				<-asks
				_, err = c.GetOrLoad(&waitingContext{Context: ctx, asked: asked}, key, mustNotLoad[string](t))
				if err != singlefill.ErrRecursive {
					t.Errorf("the loader got %v, want ErrRecursive itself", err)
				}
				return "v1", nil
			}).want(t, "v0")
			receive(t, "the refresh loads", begun)
			if err := rdb.Del(t.Context(), ns+":{k}").Err(); err != nil {
				t.Fatal(err)
			}
			read := p.On(redistest.Command("get"), redistest.HoldReply).Times(1)
			if first == "the loader" {
				close(asks)
				receive(t, "the loader's read finds nothing", read.Hit())
			}
			innocent := goGet(t.Context(), c, "k", mustNotLoad[string](t)).waits(t)
			if first != "the loader" {
				receive(t, "a read finds nothing", read.Hit())
				close(asks)
				receive(t, "the loader waits too", asked)
			}
			read.Release()
			innocent.want(t, "v1")
			_ = c.Close()
			wantStored(t, rdb, ns, "k", "v1")
		})
	}
}

// Callers that share a load, and those of later hits, own their values.
func TestGetOrLoad_CallersOwnTheirValues(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		t.Run("maps", func(t *testing.T) {
			testOwnership(t, rdb, nil, map[string]int{"a": 1}, map[string]int{"a": 1}, func(v map[string]int) { v["a"]++; v["b"] = 2 })
		})
		t.Run("pointers", func(t *testing.T) {
			p, same := newPerson(), newPerson()
			testOwnership(t, rdb, nil, &p, &same, func(v *person) { v.Tags[0] = "changed"; v.Boss.Age++ })
		})
		t.Run("raw bytes", func(t *testing.T) {
			testOwnership(t, rdb, &singlefill.Options[[]byte]{Codec: singlefill.Raw}, []byte("bytes"), []byte("bytes"), func(v []byte) { v[0]++ })
		})
	})
}

func testOwnership[T any](t *testing.T, rdb redis.UniversalClient, opts *singlefill.Options[T], value, same T, change func(T)) {
	c := newCache(t, rdb, opts)
	src := newSource[T](t)
	var herd []*call[T]
	for range 10 {
		herd = append(herd, goGet(t.Context(), c, "k", src.load).waits(t))
	}
	src.next(t).give(value)
	for range 3 { // callers of later hits are owners too
		for _, a := range herd {
			v, err := a.result(t)
			wantValue(t, v, err, same)
			if err == nil {
				change(v)
			}
		}
		herd = []*call[T]{goGet(t.Context(), c, "k", src.load)}
	}
	src.want(t, 1)
}

// Callers that share a read own their values: each changes its value at once, while others still
// get theirs.
func TestGetOrLoad_ReadersOwnTheirValues(t *testing.T) {
	t.Parallel()
	t.Run("plain", func(t *testing.T) {
		p := newPerson()
		readersOwn(t, &p, func(v *person) { v.Tags[0] = "changed"; v.Boss.Age++ })
	})
	t.Run("not plain", func(t *testing.T) {
		readersOwn(t, map[string]any{"a": []any{"x"}}, func(v map[string]any) { v["a"].([]any)[0] = "changed" })
	})
}

func readersOwn[T any](t *testing.T, value T, change func(T)) {
	proxy := redistest.NewProxy(t, redistest.Shared(t).Addr)
	c := newCache[T](t, proxy.Client(t), nil)
	if err := c.Set(t.Context(), "k", value); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		read := proxy.On(redistest.Command("get"), redistest.HoldReply).Times(1)
		herd := []*call[T]{goGet(t.Context(), c, "k", mustNotLoad[T](t))}
		receive(t, "the first read is answered", read.Hit())
		for range 20 {
			herd = append(herd, goGet(t.Context(), c, "k", mustNotLoad[T](t)).waits(t))
		}
		read.Release()
		var wg sync.WaitGroup
		for _, a := range herd {
			wg.Go(func() {
				v, err := a.result(t)
				wantValue(t, v, err, value)
				if err == nil {
					change(v)
				}
			})
		}
		wg.Wait()
	}
	if n := c.Stats().Shared; n != 3*19 {
		t.Errorf("%d calls have shared a read, want 19 of each 20", n)
	}
}
