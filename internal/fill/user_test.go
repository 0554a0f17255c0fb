package fill_test

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// userFunctions put f into each function that a user gives to a cache, but for the Loader.
var userFunctions = map[string]func(o *singlefill.Options[string], f func()){
	"Marshal": func(o *singlefill.Options[string], f func()) {
		o.Codec = cachetest.BadCodec{Codec: singlefill.Raw, OnMarshal: func(any) error { f(); return nil }}
	},
	"Unmarshal": func(o *singlefill.Options[string], f func()) {
		o.Codec = cachetest.BadCodec{Codec: singlefill.Raw, OnUnmarshal: func(any) error { f(); return nil }}
	},
	"Tags": func(o *singlefill.Options[string], f func()) {
		o.Tags = func(string, string) []string { f(); return nil }
	},
	"TTLFunc": func(o *singlefill.Options[string], f func()) {
		o.TTLFunc = func(string, string) time.Duration { f(); return time.Hour }
	},
	"Hit":  func(o *singlefill.Options[string], f func()) { o.Trace.Hit = func(context.Context, string) { f() } },
	"Miss": func(o *singlefill.Options[string], f func()) { o.Trace.Miss = func(context.Context, string) { f() } },
	"Stale": func(o *singlefill.Options[string], f func()) {
		o.Trace.Stale = func(context.Context, string, singlefill.ValueInfo) { f() }
	},
	"LoadStart": func(o *singlefill.Options[string], f func()) {
		o.Trace.LoadStart = func(ctx context.Context, _ string) context.Context { f(); return ctx }
	},
	"LoadDone": func(o *singlefill.Options[string], f func()) {
		o.Trace.LoadDone = func(context.Context, singlefill.LoadInfo) { f() }
	},
	"WaitDone": func(o *singlefill.Options[string], f func()) {
		o.Trace.WaitDone = func(context.Context, singlefill.WaitInfo) { f() }
	},
	"ShareDone": func(o *singlefill.Options[string], f func()) {
		o.Trace.ShareDone = func(context.Context, singlefill.ShareInfo) { f() }
	},
	"BadValue": func(o *singlefill.Options[string], f func()) {
		o.Trace.BadValue = func(context.Context, string, error) { f() }
	},
	"RedisError": func(o *singlefill.Options[string], f func()) {
		o.Trace.RedisError = func(context.Context, string, error) { f() }
	},
}

// harmless is what fails no call: an error of the function itself, or the call has returned before.
var harmless = map[string]bool{
	"panic of Marshal": true, "panic of Unmarshal": true, "panic of Tags": true, "panic of LoadDone": true, "Goexit of LoadDone": true,
	"Goexit of RedisError": true, // in the goroutine of the command
}

// A function of the user that calls runtime.Goexit, or panics where that is not its own error, fails the calls for
// which it works with a PanicError, or ends their goroutines. It keeps no call, no lock, no slot and not Close. It may
// call the cache.
//
//fault:user-leaves
func TestSet_UserDoesNotReturn(t *testing.T) {
	for name, put := range userFunctions {
		for _, way := range []string{"panic", "Goexit", "call"} {
			for _, inCaller := range []bool{false, true} { // commands run in the goroutine of their caller
				what := way + " of " + name
				fails := way != "call" && (!harmless[what] || inCaller && name == "RedisError")
				cachetest.RunInBubble(t, fmt.Sprintf("%s, in its caller: %t", what, inCaller), func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
					testUserDoesNotReturn(t, m, inCaller, way, put, fails, harmless[what])
				})
			}
		}
	}
}

func testUserDoesNotReturn(t *testing.T, m *miniredis.Miniredis, inCaller bool, way string,
	put func(o *singlefill.Options[string], f func()), fails, ownErr bool) {
	rdb := redistest.NewMiniClient(t, m, func(o *redis.Options) { o.ContextTimeoutEnabled = inCaller })
	there := cachetest.NewCaches(t, m, "ns", 1, &cachetest.Raw)[0]
	var c *singlefill.Cache[string]
	var armed, called atomic.Bool
	opts := cachetest.Raw
	opts.RedisTimeout, opts.LockTTL, opts.MaxLoads, opts.StaleWhileRevalidate = time.Second, 30*time.Second, 1, time.Hour
	opts.Trace = new(singlefill.Trace)
	if way == "call" {
		opts.MaxLoads = 2 // the call of the function may need one, too
	}
	put(&opts, func() {
		if !armed.Load() {
			return
		}
		called.Store(true)
		switch way {
		case "panic":
			panic("a panic")
		case "Goexit":
			runtime.Goexit()
		}
		armed.Store(false)
		if _, err := c.GetOrLoad(context.Background(), "another", cachetest.Gives("v")); err != nil {
			t.Error(err)
		}
	})
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			if armed.Load() && cmd.Name() == "get" && strings.Contains(cmd.Args()[1].(string), "{unread}") {
				return io.ErrUnexpectedEOF
			}
		}
		return nil
	}))
	c = cachetest.NewCacheIn(t, rdb, "ns", &opts)
	keys := []string{"held", "cold", "hit", "stale", "bad", "unread", "other"}
	redistest.Must(t, there.SetMany(t.Context(), map[string]string{"hit": "v", "stale": "v"}))
	redistest.Must(t, there.Expire(t.Context(), "stale"))
	redistest.Must(t, rdb.Set(t.Context(), "ns:{bad}", "garbage", time.Hour).Err())
	goOn := make(chan struct{})
	holder := cachetest.GoGet(t.Context(), there, "held", func(context.Context, string) (string, error) { <-goOn; return "v", nil })
	synctest.Wait()

	armed.Store(true)
	type ending struct {
		call   string
		err    error
		exited bool
	}
	endings, calls, begun := make(chan ending), 0, time.Now()
	call := func(name string, do func() error) {
		calls++
		go func() {
			e := ending{name, nil, true}
			defer func() { endings <- e }()
			e.err, e.exited = do(), false
		}()
		synctest.Wait()
	}
	getOrLoad := func(key string) {
		call("GetOrLoad of "+key, func() error { _, err := c.GetOrLoad(t.Context(), key, cachetest.Gives("v")); return err })
	}
	call("GetOrLoadMany", func() error { _, err := c.GetOrLoadMany(t.Context(), []string{"cold", "held"}, loadAll); return err })
	for _, key := range []string{"held", "hit", "stale", "bad", "unread"} {
		getOrLoad(key)
	}
	call("Get", func() error { _, err := c.Get(t.Context(), "hit"); return err })
	call("GetMany", func() error { _, err := c.GetMany(t.Context(), []string{"hit", "stale", "bad"}); return err })
	call("Refresh", func() error { return c.Refresh(t.Context(), "hit", cachetest.Gives("v")) })
	call("RefreshMany", func() error { return c.RefreshMany(t.Context(), []string{"cold", "stale"}, loadAll) })
	time.Sleep(time.Second)
	close(goOn)
	holder.Want(t, "v")
	failed := false
	for range calls {
		e := <-endings
		_, isPanic := errors.AsType[*singlefill.PanicError](e.err)
		failed = failed || isPanic || e.exited
		if e.err != nil && !isPanic && !ownErr {
			t.Errorf("%s: %v", e.call, e.err)
		}
	}
	armed.Store(false)
	if took := time.Since(begun); !called.Load() || failed != fails || took > 10*time.Second {
		t.Errorf("called: %t, failed: %t, after %v", called.Load(), failed, took)
	}
	synctest.Wait()
	if got, err := c.GetOrLoadMany(t.Context(), keys, loadAll); len(got) != len(keys) || err != nil {
		t.Errorf("later: %v, %v", got, err)
	}
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("a lock or a slot is left: %v", took)
	}
	redistest.Must(t, c.Close())
}
