package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
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

// A call without a key or a Loader, of a closed cache, or whose context has ended, returns an error and
// sends no command. Close can be called twice, and leaves the client open.
//
//fault:ended-context
func TestCalls_RefusedWithoutACommand(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	rdb := server.Client(t)
	c, closed := cachetest.NewCache[string](t, rdb, nil), cachetest.NewCache[string](t, rdb, nil)
	redistest.Must(t, errors.Join(closed.Close(), closed.Close()))
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	type cache = *singlefill.Cache[string]
	loadMany := func(_ context.Context, keys []string) (map[string]string, error) {
		t.Errorf("%q are loaded", keys)
		return nil, nil
	}
	for name, call := range map[string]func(ctx context.Context, c cache, keys ...string) error{
		"GetOrLoad": func(ctx context.Context, c cache, keys ...string) error {
			_, err := c.GetOrLoad(ctx, keys[len(keys)-1], cachetest.MustNotLoad[string](t))
			return err
		},
		"Get": func(ctx context.Context, c cache, keys ...string) error {
			_, err := c.Get(ctx, keys[len(keys)-1])
			return err
		},
		"Set":    func(ctx context.Context, c cache, keys ...string) error { return c.Set(ctx, keys[len(keys)-1], "v") },
		"Delete": func(ctx context.Context, c cache, keys ...string) error { return c.Delete(ctx, keys...) },
		"Expire": func(ctx context.Context, c cache, keys ...string) error { return c.Expire(ctx, keys...) },
		"GetOrLoadMany": func(ctx context.Context, c cache, keys ...string) error {
			_, err := c.GetOrLoadMany(ctx, keys, loadMany)
			return err
		},
		"Refresh": func(ctx context.Context, c cache, keys ...string) error {
			return c.Refresh(ctx, keys[len(keys)-1], cachetest.MustNotLoad[string](t))
		},
		"RefreshMany": func(ctx context.Context, c cache, keys ...string) error { return c.RefreshMany(ctx, keys, loadMany) },
		"GetMany":     func(ctx context.Context, c cache, keys ...string) error { _, err := c.GetMany(ctx, keys); return err },
		"SetMany": func(ctx context.Context, c cache, keys ...string) error {
			return c.SetMany(ctx, map[string]string{"a": "v", keys[len(keys)-1]: "v"})
		},
		"Clear": func(ctx context.Context, c cache, _ ...string) error { return c.Clear(ctx) },
	} {
		for _, test := range []struct {
			what string
			ctx  context.Context
			c    cache
			keys []string
			want error
		}{
			{"of no key", t.Context(), c, []string{"k", ""}, singlefill.ErrEmptyKey},
			{"cancelled", cancelled, c, []string{"k"}, context.Canceled},
			{"too late", expired, c, []string{"k"}, context.DeadlineExceeded},
			{"of a closed cache", t.Context(), closed, []string{"k"}, singlefill.ErrClosed},
		} {
			if name == "Clear" && test.want == singlefill.ErrEmptyKey {
				continue
			}
			server.ResetCalls()
			if err := call(test.ctx, test.c, test.keys...); !errors.Is(err, test.want) {
				t.Errorf("%s %s: got error %v, want %q", name, test.what, err, test.want)
			}
			cachetest.WantCalls(t, server, name+" "+test.what, nil)
		}
	}
	if err := errors.Join(c.Delete(t.Context()), c.Expire(t.Context()), c.SetMany(t.Context(), nil),
		c.RefreshMany(t.Context(), nil, loadMany)); err != nil {
		t.Errorf("calls for no keys: %v", err)
	}
	_, one := c.GetOrLoad(t.Context(), "k", nil)
	_, many := c.GetOrLoadMany(t.Context(), []string{"k"}, nil)
	for what, err := range map[string]error{
		"GetOrLoad": one, "GetOrLoadMany": many,
		"Refresh": c.Refresh(t.Context(), "k", nil), "RefreshMany": c.RefreshMany(t.Context(), []string{"k"}, nil),
	} {
		if err == nil || err.Error() != "singlefill: load is nil" {
			t.Errorf("%s without a loader: got error %v", what, err)
		}
	}
	cachetest.WantCalls(t, server, "calls for no keys, and without a loader", nil)
	if err := closed.Delete(t.Context()); err != singlefill.ErrClosed {
		t.Errorf("Delete of nothing after Close: %v, want ErrClosed itself", err)
	}
	if s := closed.Stats(); s != (singlefill.Stats{}) {
		t.Errorf("%+v, want nothing counted", s)
	}
	redistest.Must(t, rdb.Ping(t.Context()).Err())
}

// Each call sends the commands that it needs and no others. One that looks for the log of Near follows. A hook of the
// caller's client sees every one, even if it was added after New.
func TestCalls_Commands(t *testing.T) {
	t.Parallel()
	for name, bounded := range map[string]bool{"default client": false, "client with ContextTimeoutEnabled": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rdb := redistest.Start(t).Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = bounded })
			c := cachetest.NewCache[string](t, rdb, nil)
			var mu sync.Mutex
			var got []string // protected by mu
			rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
				mu.Lock()
				defer mu.Unlock()
				for _, cmd := range cmds {
					// Connections send HELLO. For the log see TestNear_LooksForTheLog.
					if cmd.Name() != "hello" && !strings.Contains(cmd.String(), c.Namespace()+":log") {
						got = append(got, cmd.Name())
					}
				}
				return nil
			}))
			ctx, boom := t.Context(), errors.New("no")
			load := func(key string, load singlefill.Loader[string]) func() error {
				return func() error { _, err := c.GetOrLoad(ctx, key, load); return err }
			}
			get := func(key string) func() error { return func() error { _, err := c.Get(ctx, key); return err } }
			none, fails := cachetest.Fails[string](singlefill.ErrNotFound), cachetest.Fails[string](boom)
			for _, test := range []struct {
				what string
				call func() error
				err  error
				sent string
			}{
				{"New and Stats", func() error { c.Stats(); return nil }, nil, "[]"},
				{"the first load", load("first", cachetest.Gives("v")), nil, "[get time evalsha eval evalsha eval]"},
				{"a load", load("some", cachetest.Gives("v")), nil, "[get evalsha evalsha]"},
				{"a load that finds nothing", load("none", none), singlefill.ErrNotFound, "[get evalsha evalsha]"},
				{"the first failure", load("bad", fails), boom, "[get evalsha evalsha eval]"},
				{"a failure", load("bad", fails), boom, "[get evalsha evalsha]"},
				{"a hit", load("some", cachetest.MustNotLoad[string](t)), nil, "[get]"},
				{"a remembered not-found", load("none", cachetest.MustNotLoad[string](t)), singlefill.ErrNotFound, "[get]"},
				{"Refresh", func() error { return c.Refresh(ctx, "some", cachetest.Gives("w")) }, nil, "[get evalsha evalsha]"},
				{"Get of a value", get("some"), nil, "[get]"},
				{"Get of nothing", get("unknown"), singlefill.ErrMiss, "[get]"},
				{"Set", func() error { return c.Set(ctx, "k", "v") }, nil, "[multi set del exec]"},
				{"Delete of two keys", func() error { return c.Delete(ctx, "k", "l") }, nil, "[pttl del pttl del]"},
			} {
				if err := test.call(); err != test.err {
					t.Errorf("%s: %v, want %v", test.what, err, test.err)
				}
				mu.Lock()
				if sent := fmt.Sprint(got); sent != test.sent {
					t.Errorf("%s: the hook saw %s, want %s", test.what, sent, test.sent)
				}
				got = nil
				mu.Unlock()
			}
		})
	}
}

// A life is the ttl, or what TTLFunc says, less a random part of up to Jitter.
func TestTTL_Jitter(t *testing.T) {
	t.Parallel()
	const ttl = time.Hour
	const slack = 30 * time.Second // between a write and the look at it
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, test := range []struct {
			name        string
			opts        singlefill.Options[string]
			least, most time.Duration
		}{
			{"a tenth of it by default", singlefill.Options[string]{}, 54 * time.Minute, ttl},
			{"jitter", singlefill.Options[string]{Jitter: 0.5}, ttl / 2, ttl},
			{"no jitter", singlefill.Options[string]{Jitter: -1}, ttl, ttl},
			{"TTLFunc", singlefill.Options[string]{Jitter: -1, TTLFunc: lifeInMinutes}, 7 * time.Minute, 7 * time.Minute},
		} {
			t.Run(test.name, func(t *testing.T) {
				ns := redistest.Namespace(t)
				c := cachetest.NewCacheIn(t, rdb, ns, &test.opts)
				shortest, longest := time.Duration(1<<62), time.Duration(0)
				for i := range 20 {
					for _, name := range []string{"set", "loaded"} {
						key := fmt.Sprint(name, i)
						var err error
						if name == "set" {
							err = c.Set(t.Context(), key, "7")
						} else {
							_, err = c.GetOrLoad(t.Context(), key, cachetest.Gives("7"))
						}
						redistest.Must(t, err)
						life := rdb.PTTL(t.Context(), ns+":{"+key+"}").Val()
						if life > test.most || life < test.least-slack {
							t.Errorf("%s lives %v, want %v to %v", key, life, test.least, test.most)
						}
						shortest, longest = min(shortest, life), max(longest, life)
					}
				}
				if test.least < test.most && longest-shortest < (test.most-test.least)/4 {
					t.Errorf("40 lives from %v to %v: hardly spread", shortest, longest)
				}
			})
		}
	})
}

// lifeInMinutes is a TTLFunc for which a value says how long it lives.
func lifeInMinutes(_, v string) time.Duration {
	var n int
	_, _ = fmt.Sscan(v, &n)
	return time.Duration(n) * time.Minute
}

// A value that TTLFunc does not keep is returned, and leaves nothing in Redis. A Set of it removes the value before it.
func TestTTLFunc_ValueNotToKeep(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, life := range []time.Duration{0, -time.Hour, time.Millisecond - 1} {
			ns := redistest.Namespace(t)
			c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{TTLFunc: func(string, string) time.Duration { return life }})
			cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")).Want(t, "v")
			cachetest.WantStored(t, rdb, ns, "k", "")
			cachetest.WantUnlocked(t, rdb, ns, "k")
			cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("w")).Want(t, "w")
			redistest.Must(t, cachetest.NewCacheIn[string](t, rdb, ns, nil).Set(t.Context(), "k", "v"))
			redistest.Must(t, c.Set(t.Context(), "k", "w"))
			cachetest.WantStored(t, rdb, ns, "k", "")
		}
	})
}

// ErrNotFound is remembered for NotFoundTTL, by default for a minute, or the ttl if that is
// shorter. With a negative one the next call loads again.
func TestNotFoundTTL(t *testing.T) {
	for _, test := range []struct {
		name      string
		ttl       time.Duration
		opts      singlefill.Options[string]
		remembers time.Duration
	}{
		{"a minute by default", time.Hour, singlefill.Options[string]{}, time.Minute},
		{"ttl if that is shorter", time.Second, singlefill.Options[string]{}, time.Second},
		{"NotFoundTTL", time.Second, singlefill.Options[string]{NotFoundTTL: time.Hour}, time.Hour},
		{"off", time.Second, singlefill.Options[string]{NotFoundTTL: -1}, 0},
	} {
		cachetest.RunInBubble(t, test.name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			test.opts.Jitter = -1
			c, err := singlefill.New(rdb, "ns", test.ttl, &test.opts)
			redistest.Must(t, err)
			defer c.Close()
			cachetest.GoGet(t.Context(), c, "k", cachetest.Fails[string](singlefill.ErrNotFound)).WantErr(t, singlefill.ErrNotFound)
			if test.remembers > 0 {
				time.Sleep(test.remembers - time.Millisecond)
				cachetest.GoGet(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).WantErr(t, singlefill.ErrNotFound)
				time.Sleep(time.Millisecond)
			}
			cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")).Want(t, "v")
		})
	}
}

// Shutdown waits for loads until its context ends. Then it ends them, whatever their Loaders do: their locks are
// free, their callers have ErrClosed or a stale value, and nothing is stored any more.
//
//fault:shutdown
func TestShutdown(t *testing.T) {
	const grace = 10 * time.Second
	type world struct {
		c, other *singlefill.Cache[string]
		rdb      *redis.Client
	}
	run := func(name string, load time.Duration, test func(t *testing.T, w world, shutdown func(wantErr error, after time.Duration))) {
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			opts := &singlefill.Options[string]{Codec: singlefill.Raw, StaleIfError: time.Hour, Jitter: -1}
			w := world{cachetest.NewCacheIn(t, rdb, "ns", opts), cachetest.NewCacheIn(t, redistest.NewMiniClient(t, m), "ns", opts), rdb}
			test(t, w, func(wantErr error, after time.Duration) {
				t.Helper()
				synctest.Wait()
				begun := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), grace)
				defer cancel()
				if err := w.c.Shutdown(ctx); err != wantErr {
					t.Errorf("Shutdown = %v, want %v", err, wantErr)
				}
				cachetest.WantElapsed(t, "Shutdown returns", begun, after)
				if _, err := w.c.Get(t.Context(), "k"); err != singlefill.ErrClosed {
					t.Errorf("Get after Shutdown: %v", err)
				}
				cachetest.WantUnlocked(t, rdb, "ns", "k")
			})
			if load > 0 {
				time.Sleep(load) // until a Loader that was abandoned has returned
			}
		})
	}
	run("the load ends in time", 0, func(t *testing.T, w world, shutdown func(error, time.Duration)) {
		a := cachetest.GoGet(t.Context(), w.c, "k", cachetest.Takes(grace/2, "v", nil))
		shutdown(nil, grace/2)
		a.Want(t, "v")
		cachetest.WantStored(t, w.rdb, "ns", "k", "v")
	})
	run("the Loader ignores its context", time.Minute, func(t *testing.T, w world, shutdown func(error, time.Duration)) {
		a := cachetest.GoGet(t.Context(), w.c, "k", cachetest.Takes(time.Minute, "late", nil))
		synctest.Wait()
		waits := cachetest.GoGet(t.Context(), w.other, "k", cachetest.Gives("v"))
		shutdown(context.DeadlineExceeded, grace)
		a.WantErr(t, singlefill.ErrClosed)
		begun := time.Now()
		waits.Want(t, "v")
		if waited := time.Since(begun); waited > time.Second {
			t.Errorf("another process loads after %v", waited)
		}
		time.Sleep(time.Minute)
		cachetest.WantStored(t, w.rdb, "ns", "k", "v")
	})
	run("a stale value", time.Minute, func(t *testing.T, w world, shutdown func(error, time.Duration)) {
		redistest.Must(t, w.c.Set(t.Context(), "k", "old"))
		redistest.Must(t, w.c.Expire(t.Context(), "k"))
		a := cachetest.GoGet(t.Context(), w.c, "k", cachetest.Takes(time.Minute, "late", nil))
		shutdown(context.DeadlineExceeded, grace)
		a.Want(t, "old")
	})
	run("many keys, and a load inside", time.Minute, func(t *testing.T, w world, shutdown func(error, time.Duration)) {
		call := cachetest.GoGetMany(t.Context(), w.c, []string{"k", "l"}, func(ctx context.Context, keys []string) (map[string]string, error) {
			_, err := w.c.GetOrLoad(ctx, "inner", cachetest.Takes(time.Minute, "late", nil))
			returned := time.Now()
			<-ctx.Done() // in the same instant, in any order
			if waited := time.Since(returned); err == nil || waited > 0 {
				t.Errorf("the load inside: %v, and the context of the ManyLoader ended %v later", err, waited)
			}
			time.Sleep(time.Second)
			return map[string]string{"k": "late", "l": "late"}, nil
		})
		shutdown(context.DeadlineExceeded, grace)
		if _, err := call.Result(t); !errors.Is(err, singlefill.ErrClosed) {
			t.Errorf("GetOrLoadMany: %v", err)
		}
		time.Sleep(time.Minute)
		for _, key := range []string{"k", "l", "inner"} {
			cachetest.WantUnlocked(t, w.rdb, "ns", key)
			cachetest.WantStored(t, w.rdb, "ns", key, "")
		}
	})
	run("an audit", time.Minute, func(t *testing.T, w world, shutdown func(error, time.Duration)) {
		w.c = cachetest.NewCacheIn(t, w.rdb, "ns", &singlefill.Options[string]{Audit: 1})
		redistest.Must(t, w.c.Set(t.Context(), "k", "v"))
		cachetest.GoGet(t.Context(), w.c, "k", cachetest.Takes(time.Minute, "late", nil)).Want(t, "v")
		ctx, cancel := context.WithTimeout(t.Context(), grace)
		defer cancel()
		begun := time.Now()
		if err := w.c.Shutdown(ctx); err != context.DeadlineExceeded {
			t.Errorf("Shutdown = %v", err)
		}
		cachetest.WantElapsed(t, "Shutdown returns", begun, grace)
	})
	run("after Close, at once", time.Minute, func(t *testing.T, w world, shutdown func(error, time.Duration)) {
		a := cachetest.GoGet(t.Context(), w.c, "k", cachetest.Takes(time.Minute, "late", nil))
		synctest.Wait()
		closed := cachetest.GoClose(t, w.c)
		shutdown(context.DeadlineExceeded, grace)
		redistest.Must(t, <-closed)
		a.WantErr(t, singlefill.ErrClosed)
	})
}

// Close returns at the LoadTimeout of a load that hangs. It ends loads that queue, and at once the wait for a load of
// another process.
//
//fault:close
func TestClose_TakesLoadTimeoutAtMost(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[string]{MaxLoads: 1}) // LoadTimeout is a minute
		there := cachetest.NewCacheIn[string](t, rdb, "ns", nil)
		src := cachetest.NewSource[string](t)
		begun := time.Now()
		elsewhere, load := src.Begin(t.Context(), t, there, "elsewhere")
		waits := cachetest.GoGet(t.Context(), c, "elsewhere", src.Load)
		synctest.Wait()
		hangs := cachetest.GoGet(t.Context(), c, "hangs", src.Load)
		src.Next(t)
		queues := cachetest.GoGet(t.Context(), c, "queues", src.Load)
		synctest.Wait()
		time.Sleep(20 * time.Second)
		closed := make(chan error)
		go func() { closed <- c.Close() }()
		waits.WantErr(t, singlefill.ErrClosed)
		queues.WantErr(t, singlefill.ErrClosed)
		cachetest.WantElapsed(t, "the waits end", begun, 20*time.Second)
		load.Give("v")
		elsewhere.Want(t, "v")
		redistest.Must(t, <-closed)
		cachetest.WantElapsed(t, "Close returns", begun, time.Minute)
		if _, err := hangs.Result(t); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want context.DeadlineExceeded", err)
		}
		src.Want(t, 2)
	})
}
