package singlefill_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

var raw = singlefill.Options[string]{Codec: singlefill.Raw}

//fault:very-many
//fault:cold-key
func TestAThousandCallersShareOneLoad(t *testing.T) {
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

//fault:cold-key
func TestAColdHerdSendsTwoReadsAtMost(t *testing.T) {
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

func TestCallersWhoComeDuringAReadShareTheNextOne(t *testing.T) {
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

func TestWhoIsToBeginTheNextReadMayLeave(t *testing.T) {
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

// TestNeverTwoLoadsOfAKeyAtATime lets callers come again and again just as the flight of their key ends: its
// value is not kept.
//
//fault:cold-key
func TestNeverTwoLoadsOfAKeyAtATime(t *testing.T) {
	t.Parallel()
	const keys, callers, rounds = 2, 10, 500 // of 10 calls
	for _, kind := range []string{"mini", "single"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			rdb := redistest.Shared(t).Client(t)
			if kind == "mini" {
				_, rdb = redistest.StartMini(t)
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

//fault:failed-load
func TestAnErrorComesBackAsItIsToAllWhoWaited(t *testing.T) {
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

//fault:failed-load
func TestNotFoundIsRemembered(t *testing.T) {
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

func TestNotFoundIsNotRememberedIfThatIsOff(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.Raw, NotFoundTTL: -1})
		goGet(t.Context(), c, "k", fails[string](singlefill.ErrNotFound)).wantErr(t, singlefill.ErrNotFound)
		wantStored(t, rdb, ns, "k", "")
		goGet(t.Context(), c, "k", gives("v")).want(t, "v")
	})
}

type typedNil struct{ text string }

func (e *typedNil) Error() string { return e.text }

// TestWhatStopsALoaderIsAPanicError goes through every way in which what the user wrote can fail to return.
//
//fault:failed-load
func TestWhatStopsALoaderIsAPanicError(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
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
		{"an error that cannot say what it is", raw, fails[string]((*typedNil)(nil)), nil, "nil pointer"},
		{"TTLFunc", singlefill.Options[string]{TTLFunc: func(string, string) time.Duration { panic("a ttl") }}, gives("v"), "a ttl", "a ttl"},
	} {
		t.Run(test.name, func(t *testing.T) {
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
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
				if !strings.Contains(string(p.Stack), "protect") {
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
		})
	}
}

// A badCodec fails as told, and is JSON otherwise.
type badCodec struct{ marshal, unmarshal func() error }

func (c badCodec) Marshal(v any) ([]byte, error) {
	if c.marshal != nil {
		if err := c.marshal(); err != nil {
			return nil, err
		}
	}
	return singlefill.JSON.Marshal(v)
}

func (c badCodec) Unmarshal(data []byte, v any) error {
	if c.unmarshal != nil {
		if err := c.unmarshal(); err != nil {
			return err
		}
	}
	return singlefill.JSON.Unmarshal(data, v)
}

func panics() error { panic("a codec") }

//fault:bad-value
func TestAValueThatCannotBeEncodedIsReturnedAndNotStored(t *testing.T) {
	t.Parallel()
	for name, marshal := range map[string]func() error{
		"error": func() error { return errors.New("no") },
		"panic": panics,
	} {
		t.Run(name, func(t *testing.T) {
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
				ns := redistest.Namespace(t)
				var e events
				c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: badCodec{marshal: marshal}, Trace: e.trace()})
				src := newSource[string](t)
				first := goGet(t.Context(), c, "k", src.load)
				load := src.next(t)
				joins := goGet(t.Context(), c, "k", src.load).waits(t)
				load.give("v")
				first.want(t, "v")
				joins.want(t, "v")
				wantStored(t, rdb, ns, "k", "")
				if record, found := stored(t, rdb, ns+":{k}:lock"); found {
					t.Errorf("the lock key holds %q", record)
				}
				_ = c.Close()
				if s := c.Stats(); s.StoreErrors != 1 || s.Stored != 0 || s.Loads != 1 || s.LoadErrors != 0 {
					t.Errorf("%+v, want one store error", s)
				}
				e.want(t, "load", "start k", "done k <nil>, store error true, stored false, fenced false, unlocked false", "miss k", "miss k")
			})
		})
	}
}

//fault:bad-value
func TestAValueThatCannotBeDecodedIsLoadedAnew(t *testing.T) {
	t.Parallel()
	for name, unmarshal := range map[string]func() error{
		"error": func() error { return errors.New("no") },
		"panic": panics,
	} {
		t.Run(name, func(t *testing.T) {
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
				ns := redistest.Namespace(t)
				good := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.JSON})
				if err := good.Set(t.Context(), "k", "v"); err != nil {
					t.Fatal(err)
				}
				c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: badCodec{unmarshal: unmarshal}})
				if _, err := c.Get(t.Context(), "k"); err != singlefill.ErrMiss {
					t.Errorf("Get: %v, want ErrMiss", err)
				}
				goGet(t.Context(), c, "k", gives("w")).want(t, "w")
				wantGet(t, good, "k", "w", nil)
				if n := c.Stats().BadValues; n != 2 {
					t.Errorf("%d bad values, want 2", n)
				}
			})
		})
	}
}

func TestAValueNotToBeKeptIsSharedAndForgotten(t *testing.T) {
	t.Parallel()
	for _, life := range []time.Duration{0, -time.Hour, time.Millisecond - 1} {
		t.Run(life.String(), func(t *testing.T) {
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
				ns := redistest.Namespace(t)
				c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{TTLFunc: func(string, string) time.Duration { return life }})
				src := newSource[string](t)
				first := goGet(t.Context(), c, "k", src.load)
				load := src.next(t)
				var herd []*call[string]
				for range 20 {
					herd = append(herd, goGet(t.Context(), c, "k", src.load).waits(t))
				}
				load.give("v")
				first.want(t, "v")
				for _, a := range herd {
					a.want(t, "v")
				}
				wantStored(t, rdb, ns, "k", "")
				wantUnlocked(t, rdb, ns, "k")
				goGet(t.Context(), c, "k", gives("w")).want(t, "w")
				src.want(t, 1)
			})
		})
	}
}

func TestEmptyValuesAreHits(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		t.Run("nil pointer", func(t *testing.T) { testEmpty[*person](t, rdb, nil) })
		t.Run("zero struct", func(t *testing.T) { testEmpty(t, rdb, person{}) })
		t.Run("nil slice", func(t *testing.T) { testEmpty[[]int](t, rdb, nil) })
		t.Run("empty slice", func(t *testing.T) { testEmpty(t, rdb, []int{}) })
		t.Run("empty map", func(t *testing.T) { testEmpty(t, rdb, map[string]int{}) })
		t.Run("empty string", func(t *testing.T) { testEmpty(t, rdb, "") })
		t.Run("zero", func(t *testing.T) { testEmpty(t, rdb, 0) })
		t.Run("nil interface", func(t *testing.T) { testEmpty[any](t, rdb, nil) })
	})
}

func testEmpty[T any](t *testing.T, rdb redis.UniversalClient, value T) {
	for _, codec := range []singlefill.Codec{singlefill.MsgPack, singlefill.JSON} {
		c := newCache(t, rdb, &singlefill.Options[T]{Codec: codec})
		v, err := c.GetOrLoad(t.Context(), "k", gives(value))
		wantValue(t, v, err, value)
		v, err = c.GetOrLoad(t.Context(), "k", mustNotLoad[T](t))
		wantValue(t, v, err, value)
		wantGet(t, c, "k", value, nil)
	}
	if s, ok := any(value).(string); ok {
		c := newCache(t, rdb, &raw)
		v, err := c.GetOrLoad(t.Context(), "k", gives(s))
		wantValue(t, v, err, s)
		v, err = c.GetOrLoad(t.Context(), "k", mustNotLoad[string](t))
		wantValue(t, v, err, s)
	}
}

//fault:cancelled
func TestACancelledLeaderHurtsNobody(t *testing.T) {
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

func TestACallerLeavesAtOnceWhileOthersStay(t *testing.T) {
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

//fault:cancelled
func TestALoadGoesOnWhenAllCallersHaveLeft(t *testing.T) {
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

func TestALoadersContextHasTheFirstCallersValuesOnly(t *testing.T) {
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

// The fences: what is loaded before a Delete or Set is not stored after it, and nobody who comes after a
// Delete gets it.

func TestDeleteDuringALoadKeepsItsValueOut(t *testing.T) {
	t.Parallel()
	for _, order := range []string{"the older load ends first", "the newer load ends first"} {
		t.Run(order, func(t *testing.T) {
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
				ns := redistest.Namespace(t)
				c := newCacheIn(t, rdb, ns, &raw)
				src := newSource[string](t)
				before := goGet(t.Context(), c, "k", src.load)
				older := src.next(t)
				joins := goGet(t.Context(), c, "k", src.load).waits(t)
				if err := c.Delete(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
				after := goGet(t.Context(), c, "k", src.load)
				newer := src.next(t) // without waiting for the older load
				if order == "the older load ends first" {
					older.give("v1")
					before.want(t, "v1")
					wantStored(t, rdb, ns, "k", "")
					newer.give("v2")
					after.want(t, "v2")
				} else {
					newer.give("v2")
					after.want(t, "v2")
					older.give("v1")
					before.want(t, "v1")
				}
				// Who has waited since before the Delete may get either, but causes no load.
				if v, err := joins.result(t); err != nil || v != "v1" && v != "v2" {
					t.Errorf("got %q, %v; want v1 or v2", v, err)
				}
				_ = c.Close() // the older one's outcome is settled then
				wantStored(t, rdb, ns, "k", "v2")
				wantUnlocked(t, rdb, ns, "k")
				src.want(t, 2)
				if s := c.Stats(); s.Stored != 1 || s.Fenced != 1 || s.LoadsUnlocked != 0 {
					t.Errorf("%+v, want one load stored and one fenced", s)
				}
			})
		})
	}
}

func TestDeleteDuringALoadThatNobodyRepeatsLeavesNothing(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for name, err := range map[string]error{"value": nil, "not found": singlefill.ErrNotFound} {
			ns := redistest.Namespace(t)
			c := newCacheIn(t, rdb, ns, &raw)
			src := newSource[string](t)
			a := goGet(t.Context(), c, "k", src.load)
			load := src.next(t)
			if err := c.Delete(t.Context(), "other", "k"); err != nil {
				t.Fatal(err)
			}
			load.ends <- ending[string]{"v1", err}
			if _, got := a.result(t); got != err {
				t.Errorf("%s: %v, want %v", name, got, err)
			}
			_ = c.Close()
			wantStored(t, rdb, ns, "k", "")
			if s := c.Stats(); s.Fenced != 1 {
				t.Errorf("%s: %+v, want one load fenced", name, s)
			}
		}
	})
}

func TestSetDuringALoadWins(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, name := range []string{"here", "in another process"} {
			ns := redistest.Namespace(t)
			c := newCacheIn(t, rdb, ns, &raw)
			setter := c
			if name != "here" {
				setter = newCacheIn(t, rdb, ns, &raw)
			}
			src := newSource[string](t)
			before := goGet(t.Context(), c, "k", src.load)
			load := src.next(t)
			if err := setter.Set(t.Context(), "k", "set"); err != nil {
				t.Fatal(err)
			}
			goGet(t.Context(), c, "k", src.load).want(t, "set") // without waiting for the load
			load.give("loaded")
			before.want(t, "loaded")
			_ = c.Close()
			wantStored(t, rdb, ns, "k", "set")
			src.want(t, 1)
			if s := c.Stats(); s.Fenced != 1 || name == "here" && s.LocksLost != 0 {
				t.Errorf("%s: %+v, want one load fenced", name, s)
			}
		}
	})
}

func TestDeleteElsewhereDuringALoadKeepsItsValueFromLaterCallers(t *testing.T) {
	t.Parallel()
	for _, order := range []string{"the older load ends first", "the newer load ends first"} {
		t.Run(order, func(t *testing.T) {
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
				ns := redistest.Namespace(t)
				here, elsewhere := newCacheIn(t, rdb, ns, &raw), newCacheIn(t, rdb, ns, &raw)
				src := newSource[string](t)
				before := goGet(t.Context(), here, "k", src.load)
				older := src.next(t)
				joins := goGet(t.Context(), here, "k", src.load).waits(t)
				if err := elsewhere.Delete(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
				after := goGet(t.Context(), here, "k", src.load)
				newer := src.next(t) // without waiting for the older load
				if order == "the older load ends first" {
					older.give("v1")
					before.want(t, "v1")
					newer.give("v2")
					after.want(t, "v2")
				} else {
					newer.give("v2")
					after.want(t, "v2")
					older.give("v1")
					before.want(t, "v1")
				}
				if v, err := joins.result(t); err != nil || v != "v1" && v != "v2" {
					t.Errorf("got %q, %v; want v1 or v2", v, err)
				}
				goGet(t.Context(), elsewhere, "k", src.load).want(t, "v2")
				_ = here.Close()
				wantStored(t, rdb, ns, "k", "v2")
				src.want(t, 2)
				if s := here.Stats(); s.LocksLost != 1 || s.Fenced != 1 || s.Stored != 1 {
					t.Errorf("%+v, want one lock lost, one load fenced and one stored", s)
				}
			})
		})
	}
}

func TestADeleterLoadsAnewWithoutWaitingForAnotherProcess(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		elsewhere, here := newCacheIn(t, rdb, ns, &raw), newCacheIn(t, rdb, ns, &raw)
		src := newSource[string](t)
		before := goGet(t.Context(), elsewhere, "k", src.load)
		older := src.next(t)
		waits := goGet(t.Context(), here, "k", src.load).waits(t) // for the other process
		if err := here.Delete(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		after := goGet(t.Context(), here, "k", src.load)
		src.next(t).give("v2")
		after.want(t, "v2")
		waits.want(t, "v2")
		older.give("v1")
		before.want(t, "v1")
		_ = elsewhere.Close()
		wantStored(t, rdb, ns, "k", "v2")
		src.want(t, 2)
	})
}

// proxied makes a cache behind a proxy, and one in the same namespace beside it.
func proxied(t *testing.T) (p *redistest.Proxy, ns string, slow, direct *singlefill.Cache[string], rdb *redis.Client) {
	t.Helper()
	server := redistest.Shared(t)
	rdb = server.Client(t)
	p = redistest.NewProxy(t, server.Addr)
	ns = redistest.Namespace(t)
	slow, direct = newCacheIn(t, p.Client(t), ns, &raw), newCacheIn(t, rdb, ns, &raw)
	return p, ns, slow, direct, rdb
}

func TestAReplyUnderWayAtADeleteIsNotGivenToThoseWhoComeAfter(t *testing.T) {
	t.Parallel()
	p, _, slow, direct, _ := proxied(t)
	src := newSource[string](t)
	if err := direct.Set(t.Context(), "k", "v1"); err != nil {
		t.Fatal(err)
	}
	read := p.On(redistest.Command("get"), redistest.HoldReply).Times(1)
	before := goGet(t.Context(), slow, "k", src.load)
	receive(t, "the read is answered", read.Hit())
	if err := direct.Delete(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	after := goGet(t.Context(), slow, "k", src.load).waits(t)
	read.Release()
	before.want(t, "v1")
	src.next(t).give("v2")
	after.want(t, "v2")
	src.want(t, 1)
}

func TestAValueFoundWhileLockingIsNotGivenToThoseWhoComeAfterADelete(t *testing.T) {
	t.Parallel()
	p, _, slow, direct, _ := proxied(t)
	src := newSource[string](t)
	read := p.On(redistest.Command("get"), redistest.HoldReply).Times(1)
	before := goGet(t.Context(), slow, "k", src.load)
	receive(t, "the read has found nothing", read.Hit())
	if err := direct.Set(t.Context(), "k", "v1"); err != nil {
		t.Fatal(err)
	}
	if _, err := direct.GetOrLoad(t.Context(), "another", gives("v")); err != nil { // the server knows the script now
		t.Fatal(err)
	}
	answer := p.On(isScript(t, "get_or_lock"), redistest.HoldReply).Times(1)
	read.Release()
	receive(t, "the script has found v1", answer.Hit())
	if err := direct.Delete(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	after := goGet(t.Context(), slow, "k", src.load).waits(t)
	answer.Release()
	before.want(t, "v1")
	src.next(t).give("v2")
	after.want(t, "v2")
	src.want(t, 1)
}

func TestALoadThatEndsBeforeItsLockIsFoundLostIsNotGivenToThoseWhoComeAfterADelete(t *testing.T) {
	t.Parallel()
	p, _, slow, direct, _ := proxied(t)
	src := newSource[string](t)
	before := goGet(t.Context(), slow, "k", src.load)
	load := src.next(t)
	if err := direct.Delete(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	renewal := p.On(isScript(t, "renew"), redistest.HoldRequest)
	after := goGet(t.Context(), slow, "k", src.load).waits(t)
	receive(t, "the lock is looked at", renewal.Hit())
	load.give("v1")
	before.want(t, "v1")
	renewal.Release()
	src.next(t).give("v2")
	after.want(t, "v2")
	src.want(t, 2)
}

func TestDeleteBetweenALoadAndItsStoreKeepsTheValueOut(t *testing.T) {
	t.Parallel()
	for _, who := range []string{"here", "in another process"} {
		t.Run(who, func(t *testing.T) {
			t.Parallel()
			p, ns, slow, direct, rdb := proxied(t)
			deleter := direct
			if who == "here" {
				deleter = slow
			}
			src := newSource[string](t)
			store := p.On(isScript(t, "store"), redistest.HoldRequest).Times(1)
			before := goGet(t.Context(), slow, "k", src.load)
			src.next(t).give("v1")
			receive(t, "the value is about to be stored", store.Hit())
			if err := deleter.Delete(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			after := goGet(t.Context(), slow, "k", src.load).waits(t)
			store.Release()
			before.want(t, "v1")
			newer := src.next(t)
			wantStored(t, rdb, ns, "k", "")
			newer.give("v2")
			after.want(t, "v2")
			wantStored(t, rdb, ns, "k", "v2")
			src.want(t, 2)
			_ = slow.Close()
			if s := slow.Stats(); s.Fenced != 1 || s.Stored != 1 {
				t.Errorf("%+v, want one load fenced and one stored", s)
			}
		})
	}
}

func TestDeleteWhileALockIsBeingTakenKeepsNobodyFromAFreshLoad(t *testing.T) {
	t.Parallel()
	for _, held := range []redistest.Action{redistest.HoldRequest, redistest.HoldReply} {
		t.Run(map[redistest.Action]string{redistest.HoldRequest: "before", redistest.HoldReply: "after"}[held], func(t *testing.T) {
			t.Parallel()
			p, ns, slow, direct, rdb := proxied(t)
			src := newSource[string](t)
			if _, err := direct.GetOrLoad(t.Context(), "another", gives("v")); err != nil { // the server knows the script
				t.Fatal(err)
			}
			lock := p.On(isScript(t, "get_or_lock"), held).Times(1)
			before := goGet(t.Context(), slow, "k", src.load)
			receive(t, "the lock is asked for", lock.Hit())
			if err := direct.Delete(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			after := goGet(t.Context(), slow, "k", src.load).waits(t)
			lock.Release()
			// The load begins after both calls and the Delete, so that both may get its value.
			src.next(t).give("v2")
			before.want(t, "v2")
			after.want(t, "v2")
			if held == redistest.HoldRequest {
				wantStored(t, rdb, ns, "k", "v2")
			} else {
				wantStored(t, rdb, ns, "k", "") // its lock was deleted
			}
			src.want(t, 1)
		})
	}
}

// TestNobodyGetsWhatADeleteHasMadeOld races readers of two caches against writers who change the source and
// delete the key. A version read after a Delete has returned is never older than the source was before it.
func TestNobodyGetsWhatADeleteHasMadeOld(t *testing.T) {
	t.Parallel()
	const keys, readers, rounds = 3, 4, 700
	for _, kind := range []string{"mini", "single", "cluster"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var clients [2]redis.UniversalClient
			switch kind {
			case "mini":
				m, rdb := redistest.StartMini(t)
				clients = [2]redis.UniversalClient{rdb, redistest.NewMiniClient(t, m)}
			case "single":
				clients = [2]redis.UniversalClient{redistest.Shared(t).Client(t), redistest.Shared(t).Client(t)}
			case "cluster":
				clients = [2]redis.UniversalClient{redistest.SharedCluster(t).Client(t), redistest.SharedCluster(t).Client(t)}
			}
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			var version, floor [keys]atomic.Int64
			load := func(_ context.Context, key string) (string, error) {
				k, _ := strconv.Atoi(key)
				v := version[k].Load()
				for range v % 7 {
					runtime.Gosched()
				}
				return strconv.FormatInt(v, 10), nil
			}
			ns := redistest.Namespace(t)
			var wg sync.WaitGroup
			for i, rdb := range clients {
				c := newCacheIn(t, rdb, ns, &raw)
				for r := range readers {
					rnd := rand.New(rand.NewPCG(seed, uint64(i*readers+r)))
					wg.Go(func() {
						for range rounds {
							k := rnd.IntN(keys)
							key := strconv.Itoa(k)
							if rnd.IntN(8) == 0 { // write
								v := version[k].Add(1)
								if err := c.Delete(t.Context(), key); err != nil {
									t.Errorf("Delete: %v", err)
								}
								for old := floor[k].Load(); old < v && !floor[k].CompareAndSwap(old, v); old = floor[k].Load() {
								}
								continue
							}
							ctx, cancel := t.Context(), func() {}
							if rnd.IntN(8) == 0 {
								ctx, cancel = context.WithTimeout(ctx, time.Duration(rnd.IntN(int(time.Millisecond))))
							}
							least := floor[k].Load()
							v, err := c.GetOrLoad(ctx, key, load)
							cancel()
							if got, _ := strconv.ParseInt(v, 10, 64); err == nil && got < least {
								t.Errorf("key %s is version %d, which was deleted before the call: want at least %d", key, got, least)
							}
							if err != nil && err != context.DeadlineExceeded {
								t.Errorf("GetOrLoad: %v", err)
							}
						}
					})
				}
			}
			wg.Wait()
		})
	}
}

// Loads within loads.

//fault:recursion
func TestALoadOfItsOwnKeyIsRecursive(t *testing.T) {
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

//fault:recursion
func TestLoadsThatAskForEachOtherEnd(t *testing.T) {
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
				t.Errorf("%s: %d calls were told ErrRecursive, want 1", name, n)
			}
		}
	})
}

func TestALoadMayAskForOtherKeys(t *testing.T) {
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
			goGet(t.Context(), c, "e", gives("e")).want(t, "e") // the place is free again
		}
	})
}

func TestSharersOwnTheirValues(t *testing.T) {
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

// TestReadersWhoShareAReadOwnTheirValues: each of them changes its value at once, while others still get theirs.
func TestReadersWhoShareAReadOwnTheirValues(t *testing.T) {
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

// interning is a codec that gives one value, for all of them to share.
type interning struct {
	singlefill.Codec
	value *person
}

func (c interning) Unmarshal(_ []byte, v any) error {
	*v.(**person) = c.value
	return nil
}

// TestWhatTheUsersCodecGivesIsNotCopied: it may be shared on purpose, or refer to itself, so that a copy would have
// no end.
func TestWhatTheUsersCodecGivesIsNotCopied(t *testing.T) {
	t.Parallel()
	p := newPerson()
	proxy := redistest.NewProxy(t, redistest.Shared(t).Addr)
	c := newCache(t, proxy.Client(t), &singlefill.Options[*person]{Codec: interning{singlefill.JSON, &p}})
	if err := c.Set(t.Context(), "k", &p); err != nil {
		t.Fatal(err)
	}
	read := proxy.On(redistest.Command("get"), redistest.HoldReply).Times(1)
	herd := []*call[*person]{goGet(t.Context(), c, "k", mustNotLoad[*person](t))}
	receive(t, "the first read is answered", read.Hit())
	for range 3 {
		herd = append(herd, goGet(t.Context(), c, "k", mustNotLoad[*person](t)).waits(t))
	}
	read.Release()
	for _, a := range herd {
		if v, err := a.result(t); v != &p || err != nil {
			t.Errorf("got %p, %v; want %p, which the codec gives", v, err, &p)
		}
	}
}

// aliasing is a codec whose bytes are the value's own, as the contract of Marshal allows.
type aliasing struct{ changed chan struct{} }

func (aliasing) Marshal(v any) ([]byte, error) { return v.([]byte), nil }

func (c aliasing) Unmarshal(data []byte, v any) error {
	<-c.changed
	*v.(*[]byte) = bytes.Clone(data)
	return nil
}

func TestTheFirstToGetAValueMayChangeItBeforeTheOthersHaveTheirs(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		codec := aliasing{make(chan struct{})}
		c := newCache(t, rdb, &singlefill.Options[[]byte]{Codec: codec})
		src := newSource[[]byte](t)
		one := goGet(t.Context(), c, "k", src.load).waits(t)
		load := src.next(t)
		two := goGet(t.Context(), c, "k", src.load).waits(t)
		load.give([]byte("value"))
		var first ending[[]byte]
		select {
		case first = <-one.answer:
			one = two
		case first = <-two.answer:
		}
		wantValue(t, first.value, first.err, []byte("value"))
		copy(first.value, "CHANGED")
		close(codec.changed)
		one.want(t, []byte("value"))
	})
}

func TestMaxLoadsBoundsTheLoadsAtATime(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 3})
		src := newSource[string](t)
		var herd []*call[string]
		for i := range 20 {
			herd = append(herd, goGet(t.Context(), c, fmt.Sprint(i), src.load).waits(t))
		}
		var running []*loading[string]
		for range 3 {
			running = append(running, src.next(t))
		}
		for range 17 {
			if n := c.Stats().Loading; n > 3 {
				t.Errorf("%d loads at a time, want at most 3", n)
			}
			running[0].give("v")
			running = append(running[1:], src.next(t))
		}
		for _, l := range running {
			l.give("v")
		}
		for _, a := range herd {
			a.want(t, "v")
		}
		src.want(t, 20)
	})
}

func TestCloseWaitsForTheLoadAndItsStore(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &raw)
		src := newSource[string](t)
		first := goGet(t.Context(), c, "k", src.load)
		load := src.next(t)
		joins := goGet(t.Context(), c, "k", src.load).waits(t)
		closed := make(chan struct{})
		go func() {
			_ = c.Close()
			close(closed)
		}()
		redistest.Await(t, "the cache refuses calls", func() bool {
			_, err := c.Get(t.Context(), "other")
			return err == singlefill.ErrClosed
		})
		select {
		case <-closed:
			t.Error("Close has returned before the load")
		default:
		}
		load.give("v")
		receive(t, "Close returns", closed)
		wantStored(t, rdb, ns, "k", "v")
		first.want(t, "v")
		joins.want(t, "v")
	})
}

func TestALoadThatCloseWaitsForMayAskForOtherKeys(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &raw)
		begun, goOn := make(chan struct{}), make(chan struct{})
		outer := goGet(t.Context(), c, "a", func(ctx context.Context, _ string) (string, error) {
			close(begun)
			<-goOn
			b, err := c.GetOrLoad(ctx, "b", gives("b"))
			return "a" + b, err
		})
		receive(t, "the load begins", begun)
		closed := make(chan struct{})
		go func() {
			_ = c.Close()
			close(closed)
		}()
		redistest.Await(t, "the cache refuses calls", func() bool {
			_, err := c.Get(t.Context(), "other")
			return err == singlefill.ErrClosed
		})
		close(goOn)
		receive(t, "Close returns", closed)
		outer.want(t, "ab")
		wantStored(t, rdb, ns, "a", "ab")
		wantStored(t, rdb, ns, "b", "b")
	})
}

func TestCloseEndsTheWaitForAnotherProcess(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		there, here := newCacheIn(t, rdb, ns, &raw), newCacheIn(t, rdb, ns, &raw)
		src := newSource[string](t)
		loads := goGet(t.Context(), there, "k", src.load)
		load := src.next(t)
		waits := goGet(t.Context(), here, "k", src.load).waits(t)
		go here.Close()
		waits.wantErr(t, singlefill.ErrClosed)
		load.give("v")
		loads.want(t, "v")
		src.want(t, 1)
	})
}

// TestAnErrorInAnotherProcessIsARemoteError also sees that the waiters do not try one after the other.
func TestAnErrorInAnotherProcessIsARemoteError(t *testing.T) {
	t.Parallel()
	p, ns, waiter, loader, rdb := proxied(t)
	src := newSource[string](t)
	for i, test := range []struct{ text, want string }{
		{"no connection to the database", "no connection to the database"},
		{strings.Repeat("ü", 600), strings.Repeat("ü", 512)}, // 1 KiB, cut at a character
		{"", ""},
	} {
		key := fmt.Sprint("k", i)
		loads := goGet(t.Context(), loader, key, src.load)
		load := src.next(t)
		read := p.On(redistest.Command("get"), redistest.HoldReply).Times(1)
		asked := p.On(isScript(t, "get_or_lock"), redistest.HoldReply).Times(1)
		waits := []*call[string]{goGet(t.Context(), waiter, key, src.load)}
		receive(t, "the read has found nothing", read.Hit())
		for range 5 {
			waits = append(waits, goGet(t.Context(), waiter, key, src.load).waits(t))
		}
		read.Release()
		receive(t, "the lock is found held", asked.Hit())
		asked.Release()
		boom := errors.New(test.text)
		load.fail(boom)
		loads.wantErr(t, boom)
		for _, a := range waits {
			_, err := a.result(t)
			var remote *singlefill.RemoteError
			if !errors.As(err, &remote) || remote.Key != key || remote.Message != test.want {
				t.Errorf("got %v, want a RemoteError with %q", err, test.want)
			}
		}
		src.want(t, int64(i+1))
		wantStored(t, rdb, ns, key, "")
	}
}

func TestWhoComesAfterAFailureInAnotherProcessTriesAnew(t *testing.T) {
	t.Parallel()
	p, _, waiter, loader, _ := proxied(t)
	src := newSource[string](t)
	loads := goGet(t.Context(), loader, "k", src.load)
	load := src.next(t)
	asked := p.On(isScript(t, "get_or_lock"), redistest.HoldReply).Times(1)
	before := goGet(t.Context(), waiter, "k", src.load)
	receive(t, "the lock is found held", asked.Hit())
	boom := errors.New("boom")
	load.fail(boom)
	loads.wantErr(t, boom)
	after := goGet(t.Context(), waiter, "k", src.load).waits(t)
	asked.Release()
	var remote *singlefill.RemoteError
	if _, err := before.result(t); !errors.As(err, &remote) {
		t.Errorf("got %v, want a RemoteError", err)
	}
	src.next(t).give("v")
	after.want(t, "v")
	src.want(t, 2)
}
