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
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A thousand callers of a cold key share one load, and send two GETs at most.
//
//fault:very-many
//fault:cold-key
func TestGetOrLoad_ThousandCallers(t *testing.T) {
	t.Parallel()
	proxy := redistest.NewProxy(t, redistest.Shared(t).Addr)
	reads := proxy.On(redistest.Command("get"), redistest.Pass)
	c := cachetest.NewCache[string](t, proxy.Client(t), nil)
	src := cachetest.NewSource[string](t)
	herd := make([]*cachetest.Call[string], 1000)
	for i := range herd {
		herd[i] = cachetest.GoGet(t.Context(), c, "k", src.Load)
	}
	for _, a := range herd {
		a.Waits(t)
	}
	src.Next(t).Give("v")
	for _, a := range herd {
		a.Want(t, "v")
	}
	src.Want(t, 1)
	if n := reads.Fired(); n > 2 {
		t.Errorf("%d GETs for one load, want at most 2", n)
	}
}

// An error of the Loader is returned as it is to all callers that waited. It is not remembered, unless it
// is ErrNotFound, bare or wrapped, which later callers get bare.
//
//fault:failed-load
func TestGetOrLoad_Error(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		for name, err := range map[string]error{
			"failure":           fmt.Errorf("wrapped: %w", io.ErrUnexpectedEOF),
			"not found":         singlefill.ErrNotFound,
			"wrapped not found": fmt.Errorf("no such row: %w", singlefill.ErrNotFound),
		} {
			src := cachetest.NewSource[string](t)
			herd := []*cachetest.Call[string]{cachetest.GoGet(t.Context(), c, name, src.Load)}
			load := src.Next(t)
			for range 10 {
				herd = append(herd, cachetest.GoGet(t.Context(), c, name, src.Load).Waits(t))
			}
			load.Fail(err)
			for _, a := range herd {
				a.WantErr(t, err)
			}
			cachetest.WantUnlocked(t, rdb, ns, name)
			src.Want(t, 1)
			if errors.Is(err, singlefill.ErrNotFound) {
				cachetest.GoGet(t.Context(), c, name, cachetest.MustNotLoad[string](t)).WantErr(t, singlefill.ErrNotFound)
				cachetest.WantGet(t, c, name, "", singlefill.ErrNotFound)
			} else {
				cachetest.WantStored(t, rdb, ns, name, "")
				cachetest.GoGet(t.Context(), c, name, cachetest.Gives("v")).Want(t, "v")
			}
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
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, test := range []struct {
			name  string
			opts  singlefill.Options[string]
			load  singlefill.Loader[string]
			value any    // of the PanicError; nil: any
			text  string // which the error must contain
		}{
			{"panic", cachetest.Raw, func(context.Context, string) (string, error) { panic("a text") }, "a text", "singlefill: Loader panicked: a text"},
			{"panic with an error", cachetest.Raw, func(context.Context, string) (string, error) { panic(cause) }, cause, "cause"},
			{"panic of nil", cachetest.Raw, func(context.Context, string) (string, error) { panic(nil) }, nil, "nil"},
			{"Goexit", cachetest.Raw, func(context.Context, string) (string, error) { runtime.Goexit(); return "", nil }, nil, "Goexit"},
			{"TTLFunc", singlefill.Options[string]{TTLFunc: func(string, string) time.Duration { panic("a ttl") }}, cachetest.Gives("v"), "a ttl", "a ttl"},
		} {
			t.Run(test.name, func(t *testing.T) {
				ns := redistest.Namespace(t)
				c := cachetest.NewCacheIn(t, rdb, ns, &test.opts)
				begun, goOn := make(chan struct{}), make(chan struct{})
				first := cachetest.GoGet(t.Context(), c, "k", func(ctx context.Context, key string) (string, error) {
					close(begun)
					<-goOn
					return test.load(ctx, key)
				})
				cachetest.Receive(t, "the load begins", begun)
				joins := cachetest.GoGet(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).Waits(t)
				close(goOn)

				_, err := first.Result(t)
				var p *singlefill.PanicError
				if !errors.As(err, &p) {
					t.Fatalf("got %v, want a PanicError", err)
				}
				joins.WantErr(t, err)
				if test.value != nil && p.Value != test.value {
					t.Errorf("Value is %v, want %v", p.Value, test.value)
				}
				cachetest.WantErrText(t, "the call", err, test.text)
				if !strings.Contains(string(p.Stack), "callUser") {
					t.Errorf("not the stack of the Loader:\n%s", p.Stack)
				}
				if is := errors.Is(err, cause); is != (test.value == cause) {
					t.Errorf("errors.Is says %t of the panic's error", is)
				}
				cachetest.WantUnlocked(t, rdb, ns, "k")
				if test.opts.TTLFunc == nil {
					cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")).Want(t, "v")
				}
				if n := c.Stats().LoadPanics; n != 1 {
					t.Errorf("%d panics counted, want 1", n)
				}
			})
		}
	})
}

// A waiting call returns exactly at its deadline, and at once when it is cancelled.
//
//fault:cancelled
func TestGetOrLoad_DeadlineAndCancellation(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		there, here := cachetest.NewCacheIn[string](t, rdb, "ns", nil), cachetest.NewCacheIn[string](t, rdb, "ns", nil)
		src := cachetest.NewSource[string](t)
		_, load := src.Begin(t.Context(), t, there, "k")
		for name, c := range map[string]*singlefill.Cache[string]{"for a load here": there, "for another process": here} {
			begun := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 1234567*time.Nanosecond)
			_, err := c.GetOrLoad(ctx, "k", src.Load)
			if err != context.DeadlineExceeded {
				t.Errorf("waiting %s: %v, want context.DeadlineExceeded itself", name, err)
			}
			cancel()
			cachetest.WantElapsed(t, "the deadline: the call returns", begun, 1234567*time.Nanosecond)

			begun = time.Now()
			ctx, cancel = context.WithCancel(t.Context())
			a := cachetest.GoGet(ctx, c, "k", src.Load).Waits(t)
			cancel()
			a.WantErr(t, context.Canceled)
			cachetest.WantElapsed(t, "cancelled: the call returns", begun, 0)
		}
		load.Give("v")
		cachetest.GoGet(t.Context(), here, "k", src.Load).Want(t, "v")
		src.Want(t, 1)
	})
}

// A call in the middle of a read returns at its deadline, and within RedisTimeout when it is
// cancelled.
func TestGetOrLoad_EndOfContextInARead(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		mute := &cachetest.Outage{Keeps: redistest.Command("get")}
		mute.On.Store(true)
		rdb.AddHook(mute.Hook())
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{RedisTimeout: time.Second})
		get := func(ctx context.Context) error { _, err := c.Get(ctx, "k"); return err }
		load := func(ctx context.Context) error { _, err := c.GetOrLoad(ctx, "k", cachetest.Gives("v")); return err }
		for name, call := range map[string]func(context.Context) error{"Get": get, "GetOrLoad": load} {
			begun := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			if err := call(ctx); err != context.DeadlineExceeded {
				t.Errorf("%s: %v, want context.DeadlineExceeded itself", name, err)
			}
			cancel()
			cachetest.WantElapsed(t, "the deadline: "+name, begun, 100*time.Millisecond)
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

// A call that has got the turn to read for others, and leaves before the reply, takes nothing from them: another
// goroutine reads with that turn, also while other calls use again what the call has used.
//
//fault:cancelled
func TestGetOrLoad_LeavesADelegatedRead(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		c, other := cachetest.NewCacheIn[string](t, rdb, "ns", nil), cachetest.NewCacheIn[string](t, rdb, "other", nil)
		redistest.Must(t, errors.Join(c.Set(t.Context(), "k", "v"), other.Set(t.Context(), "l", "w")))
		var reads atomic.Int64
		rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			if cmd.Name() == "get" {
				reads.Add(1)
				time.Sleep(100 * time.Millisecond)
			}
			return nil
		}))
		leaving, cancel := context.WithCancel(t.Context())
		none := cachetest.MustNotLoad[string](t)
		get := func(ctx context.Context, c *singlefill.Cache[string], key string) *cachetest.Call[string] {
			defer time.Sleep(10 * time.Millisecond)
			return cachetest.GoGet(ctx, c, key, none)
		}
		first, leaves, shares := get(t.Context(), c, "k"), get(leaving, c, "k"), get(t.Context(), c, "k")
		time.Sleep(100 * time.Millisecond)
		cancel()
		leaves.WantErr(t, context.Canceled)
		reuses := []*cachetest.Call[string]{get(t.Context(), other, "l"), get(t.Context(), other, "l")}
		first.Want(t, "v")
		shares.Want(t, "v")
		get(t.Context(), c, "k").Want(t, "v") // its turn comes
		for _, r := range reuses {
			r.Want(t, "w")
		}
		if reads := reads.Load(); reads != 5 {
			t.Errorf("%d reads, want 5: three of one cache, two of the other", reads)
		}
	})
}

// A Loader's context has the first caller's values, but neither its deadline nor its cancellation: the
// load goes on, and is stored, also when all callers have left.
//
//fault:cancelled
func TestLoader_Context(t *testing.T) {
	t.Parallel()
	type key struct{}
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{LoadTimeout: 10 * time.Minute})
		src := cachetest.NewSource[string](t)
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "first"), time.Minute)
		first, load := src.Begin(ctx, t, c, "k")
		joins := cachetest.GoGet(context.WithValue(ctx, key{}, "second"), c, "k", src.Load).Waits(t)
		if v := load.Ctx.Value(key{}); v != "first" {
			t.Errorf("the load's context has the value %v", v)
		}
		deadline, ok := load.Ctx.Deadline()
		if left := time.Until(deadline); !ok || left < 2*time.Minute {
			t.Errorf("the load ends in %v, %t: want LoadTimeout", left, ok)
		}
		cancel()
		first.WantErr(t, context.Canceled)
		joins.WantErr(t, context.Canceled)
		if err := load.Ctx.Err(); err != nil {
			t.Errorf("the load's context: %v", err)
		}
		later := cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t)
		load.Give("v")
		later.Want(t, "v")
		cachetest.GoGet(t.Context(), c, "k", src.Load).Want(t, "v")
		src.Want(t, 1)
	})
}

// A Loader that ignores its context is left behind at LoadTimeout, and its late value is dropped.
//
//fault:hung-load
func TestLoadTimeout_LoaderIgnoresItsContext(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[string]{
			Codec: singlefill.Raw, RedisTimeout: time.Second, LockTTL: 5 * time.Second, LoadTimeout: 12 * time.Second,
		})
		src := cachetest.NewSource[string](t)
		begun := time.Now()
		first, load := src.Begin(t.Context(), t, c, "k")
		time.Sleep(11 * time.Second) // the lock has been renewed
		joins := cachetest.GoGet(t.Context(), c, "k", src.Load)
		_, err := first.Result(t)
		cachetest.WantElapsed(t, "the first call returns", begun, 12*time.Second)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want context.DeadlineExceeded", err)
		}
		joins.WantErr(t, err)
		cachetest.WantElapsed(t, "the other call returns", begun, 12*time.Second)

		cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v2")).Want(t, "v2") // at once
		cachetest.WantElapsed(t, "the key is loaded again", begun, 12*time.Second)
		load.Give("v1")
		synctest.Wait()
		cachetest.WantStored(t, rdb, "ns", "k", "v2")
		if s := c.Stats(); s.LoadErrors != 1 || s.Stored != 1 || s.LocksLost != 0 {
			t.Errorf("%+v, want one failed load and one stored", s)
		}
	})
}

// If the release of a load that has hung is lost, another process loads when the lock has expired.
//
//fault:hung-load
func TestLoadTimeout_LostRelease(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		isRelease, isAbandon := cachetest.Script(t, "release"), cachetest.Script(t, "abandon")
		var lost atomic.Int64
		rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			if args := cachetest.Args(cmd); isRelease(args) || isAbandon(args) {
				lost.Add(1)
				return errors.New("connection reset")
			}
			return nil
		}))
		const lockTTL, loadTimeout = 5 * time.Second, 12 * time.Second
		opts := &singlefill.Options[string]{RedisTimeout: time.Second, LockTTL: lockTTL, LoadTimeout: loadTimeout}
		here, there := cachetest.NewCacheIn(t, rdb, "ns", opts), cachetest.NewCaches(t, m, "ns", 1, opts)[0]
		src := cachetest.NewSource[string](t)
		begun := time.Now()
		hangs, load := src.Begin(t.Context(), t, here, "k")
		waits := cachetest.GoGet(t.Context(), there, "k", cachetest.Gives("v"))
		if _, err := hangs.Result(t); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want context.DeadlineExceeded", err)
		}
		waits.Want(t, "v")
		if d := time.Since(begun); lost.Load() == 0 || d < loadTimeout+lockTTL/2 || d > loadTimeout+lockTTL+320*time.Millisecond {
			t.Errorf("%d releases were lost, and another process loaded after %v", lost.Load(), d)
		}
		load.Give("late")
	})
}

// A Loader that asks for its own key, directly or by way of another, gets ErrRecursive.
//
//fault:recursion
func TestErrRecursive_OwnKey(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := cachetest.NewCache[string](t, rdb, nil)
		cachetest.GoGet(t.Context(), c, "k", func(ctx context.Context, key string) (string, error) {
			_, err := c.GetOrLoad(ctx, key, cachetest.MustNotLoad[string](t))
			if err != singlefill.ErrRecursive {
				t.Errorf("got %v, want ErrRecursive itself", err)
			}
			_, err = c.GetOrLoadMany(ctx, []string{"other", key}, cachetest.GivesMany(map[string]string{"other": "v"}))
			if many, ok := errors.AsType[*singlefill.ManyError](err); !ok || len(many.Errs) != 1 || many.Errs[key] != singlefill.ErrRecursive {
				t.Errorf("GetOrLoadMany: %v, want ErrRecursive for one key", err)
			}
			return "v", nil
		}).Want(t, "v")
		// Also by way of another key.
		cachetest.GoGet(t.Context(), c, "a", func(ctx context.Context, _ string) (string, error) {
			return c.GetOrLoad(ctx, "b", func(ctx context.Context, _ string) (string, error) {
				return c.GetOrLoad(ctx, "a", cachetest.MustNotLoad[string](t))
			})
		}).WantErr(t, singlefill.ErrRecursive)
	})
}

// A Loader can start a load that it does not wait for, and which needs the Loader's own key.
func TestErrRecursive_Prefetch(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		prefetched := make(chan *cachetest.Call[string], 1)
		a := cachetest.GoGet(t.Context(), c, "a", func(ctx context.Context, _ string) (string, error) {
			prefetched <- cachetest.GoGet(context.WithoutCancel(ctx), c, "b",
				func(ctx context.Context, _ string) (string, error) {
					return c.GetOrLoad(ctx, "a", cachetest.MustNotLoad[string](t))
				})
			time.Sleep(time.Second)
			return "v", nil
		})
		prefetch := <-prefetched
		synctest.Wait()
		outsider := cachetest.GoGet(t.Context(), c, "b", cachetest.MustNotLoad[string](t))
		a.Want(t, "v")
		prefetch.Want(t, "v")
		outsider.Want(t, "v")
	})
}

// A lossy value has parts that MsgPack drops or changes.
type lossy struct {
	Name   string
	Secret string `msgpack:"-"`
	hidden int
	At     time.Time
	Tags   []string `msgpack:",omitempty"`
}

// The call that has begun a load gets what the Loader has returned. Every other call gets what the codec has kept, also
// if it returns first.
func TestGetOrLoad_LoadersOwnValue(t *testing.T) {
	at := time.Date(2026, 11, 28, 9, 0, 0, 0, time.FixedZone("far", 3600))
	made := func(key string) lossy { return lossy{key, "secret", 1, at, []string{}} }
	kept := func(key string) lossy { return lossy{Name: key, At: at.Local()} }
	load := func(_ context.Context, key string) (lossy, error) { time.Sleep(time.Second); return made(key), nil }
	loadMany := func(_ context.Context, keys []string) (map[string]lossy, error) {
		time.Sleep(time.Second)
		found := make(map[string]lossy)
		for _, key := range keys {
			found[key] = made(key)
		}
		return found, nil
	}
	one := func(ctx context.Context, c *singlefill.Cache[lossy]) (map[string]lossy, error) {
		v, err := c.GetOrLoad(ctx, "a", load)
		return map[string]lossy{"a": v}, err
	}
	many := func(ctx context.Context, c *singlefill.Cache[lossy]) (map[string]lossy, error) {
		return c.GetOrLoadMany(ctx, []string{"a", "b"}, loadMany)
	}
	for what, open := range map[string]func(t *testing.T) *singlefill.Cache[lossy]{
		"Redis": func(t *testing.T) *singlefill.Cache[lossy] {
			_, rdb := redistest.StartMini(t)
			return cachetest.NewCache[lossy](t, rdb, nil)
		},
		"Near": func(t *testing.T) *singlefill.Cache[lossy] {
			_, rdb := redistest.StartMini(t)
			return cachetest.NewCache(t, rdb, &singlefill.Options[lossy]{Near: &singlefill.Near{}})
		},
		"NewLocal": func(t *testing.T) *singlefill.Cache[lossy] {
			c, err := singlefill.NewLocal[lossy]("ns", time.Hour, nil)
			redistest.Must(t, err)
			t.Cleanup(func() { c.Close() })
			return c
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := open(t)
				for range 10 { // the order in which callers go on differs
					for first, begin := range map[string]func(context.Context, *singlefill.Cache[lossy]) (map[string]lossy, error){"one": one, "many": many} {
						for _, leaves := range []bool{false, true} {
							ctx, cancel := context.WithCancel(t.Context())
							var all sync.WaitGroup
							all.Go(func() {
								v, err := begin(ctx, c)
								if leaves {
									return
								}
								for key := range v {
									cachetest.WantValue(t, v[key], err, made(key))
								}
							})
							synctest.Wait()
							for range 3 {
								for _, join := range []func(context.Context, *singlefill.Cache[lossy]) (map[string]lossy, error){one, many} {
									all.Go(func() {
										v, err := join(t.Context(), c)
										cachetest.WantValue(t, v["a"], err, kept("a"))
									})
								}
							}
							synctest.Wait()
							if leaves {
								cancel()
							}
							all.Wait()
							cancel()
							if s := c.Stats(); s.Stale != 0 || s.BadValues != 0 {
								t.Fatalf("first %s: %+v", first, s)
							}
							v, err := c.Get(t.Context(), "a")
							cachetest.WantValue(t, v, err, kept("a"))
							redistest.Must(t, c.Delete(t.Context(), "a", "b"))
						}
					}
				}
			})
		})
	}
}

// Callers that share a load or a read own their values: each changes its value at once, while others still get theirs.
func TestGetOrLoad_CallersOwnTheirValues(t *testing.T) {
	t.Parallel()
	t.Run("pointers", func(t *testing.T) {
		callersOwn(t, nil, func() *person { p := newPerson(); return &p }, func(v *person) { v.Tags[0] = "changed"; v.Boss.Age++ })
	})
	t.Run("maps of any", func(t *testing.T) {
		callersOwn(t, nil, func() map[string]any { return map[string]any{"a": []any{"x"}} }, func(v map[string]any) { v["a"].([]any)[0] = "changed" })
	})
	t.Run("raw bytes", func(t *testing.T) {
		callersOwn(t, &singlefill.Options[[]byte]{Codec: singlefill.Raw}, func() []byte { return []byte("bytes") }, func(v []byte) { v[0]++ })
	})
}

func callersOwn[T any](t *testing.T, opts *singlefill.Options[T], value func() T, change func(T)) {
	proxy := redistest.NewProxy(t, redistest.Shared(t).Addr)
	c := cachetest.NewCache(t, proxy.Client(t), opts)
	src := cachetest.NewSource[T](t)
	for round := range 3 { // a load, and then two reads
		read := proxy.On(redistest.Command("get"), redistest.HoldReply).Times(1)
		herd := []*cachetest.Call[T]{cachetest.GoGet(t.Context(), c, "k", src.Load)}
		cachetest.Receive(t, "the first read is answered", read.Hit())
		for range 20 {
			herd = append(herd, cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t))
		}
		read.Release()
		if round == 0 {
			src.Next(t).Give(value())
		}
		var all sync.WaitGroup
		for _, a := range herd {
			all.Go(func() {
				v, err := a.Result(t)
				if cachetest.WantValue(t, v, err, value()); err == nil {
					change(v)
				}
			})
		}
		all.Wait()
	}
	src.Want(t, 1)
}
