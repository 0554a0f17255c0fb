package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

// New and Stats send no command.
func TestNew_SendsNothing(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr)
	c := cachetest.NewCache[string](t, proxy.Client(t), nil)
	c.Stats()
	if n := proxy.Commands(); n != 0 {
		t.Errorf("New sent %d commands", n)
	}
}

// A call without a key or a Loader, or whose context has ended, returns an error and sends no
// command.
//
//fault:ended-context
func TestCalls_RefusedWithoutACommand(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := cachetest.NewCache[string](t, server.Client(t), nil)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	live := t.Context()

	var err error
	for _, test := range []struct {
		name string
		want error
		call func()
	}{
		{"GetOrLoad of no key", singlefill.ErrEmptyKey, func() { _, err = c.GetOrLoad(live, "", cachetest.MustNotLoad[string](t)) }},
		{"Get of no key", singlefill.ErrEmptyKey, func() { _, err = c.Get(live, "") }},
		{"Set of no key", singlefill.ErrEmptyKey, func() { err = c.Set(live, "", "v") }},
		{"Delete of no key", singlefill.ErrEmptyKey, func() { err = c.Delete(live, "k", "") }},
		{"GetOrLoad cancelled", context.Canceled, func() { _, err = c.GetOrLoad(cancelled, "k", cachetest.MustNotLoad[string](t)) }},
		{"GetOrLoad too late", context.DeadlineExceeded, func() { _, err = c.GetOrLoad(expired, "k", cachetest.MustNotLoad[string](t)) }},
		{"Get cancelled", context.Canceled, func() { _, err = c.Get(cancelled, "k") }},
		{"Set cancelled", context.Canceled, func() { err = c.Set(cancelled, "k", "v") }},
		{"Delete cancelled", context.Canceled, func() { err = c.Delete(cancelled, "k") }},
	} {
		server.ResetCalls()
		test.call()
		if !errors.Is(err, test.want) {
			t.Errorf("%s: got error %v, want %q", test.name, err, test.want)
		}
		cachetest.WantCalls(t, server, test.name, nil)
	}
	if _, err := c.GetOrLoad(live, "k", nil); err == nil || err.Error() != "singlefill: load is nil" {
		t.Errorf("GetOrLoad without a Loader: got error %v", err)
	}
	cachetest.WantCalls(t, server, "GetOrLoad without a Loader", nil)
}

// A hit of GetOrLoad, and each Get, is one GET.
func TestHit_OneGET(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := cachetest.NewCache[string](t, server.Client(t), nil)
	_, _ = c.GetOrLoad(t.Context(), "some", cachetest.Gives("v"))
	_, _ = c.GetOrLoad(t.Context(), "none", cachetest.Fails[string](singlefill.ErrNotFound))
	for _, test := range []struct {
		name string
		call func()
	}{
		{"a value", func() { _, _ = c.GetOrLoad(t.Context(), "some", cachetest.MustNotLoad[string](t)) }},
		{"a remembered not-found", func() { _, _ = c.GetOrLoad(t.Context(), "none", cachetest.MustNotLoad[string](t)) }},
		{"Get of a value", func() { _, _ = c.Get(t.Context(), "some") }},
		{"Get of nothing", func() { _, _ = c.Get(t.Context(), "unknown") }},
	} {
		server.ResetCalls()
		test.call()
		cachetest.WantCalls(t, server, test.name, map[string]int64{"get": 1})
	}
}

// A call that loads sends one GET and two scripts, however the load ends.
func TestMiss_OneGETTwoScripts(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr)
	gets := proxy.On(redistest.Command("get"), redistest.Pass)
	scripts := proxy.On(redistest.Command("evalsha"), redistest.Pass)
	c := cachetest.NewCache[string](t, proxy.Client(t), nil)

	if _, err := c.GetOrLoad(t.Context(), "first", cachetest.Gives("v")); err != nil { // the server learns the scripts
		t.Fatal(err)
	}
	if learnt := server.Calls("eval"); learnt != 2 {
		t.Errorf("%d scripts sent in full, want 2", learnt)
	}
	for i, load := range []singlefill.Loader[string]{cachetest.Gives("v"), cachetest.Fails[string](singlefill.ErrNotFound), cachetest.Fails[string](errors.New("no"))} {
		key := fmt.Sprint("miss ", i)
		commands, get, script := proxy.Commands(), gets.Fired(), scripts.Fired()
		if i == 2 {
			script++ // the script that releases without a value is sent in full, once
		}
		_, _ = c.GetOrLoad(t.Context(), key, load)
		get, script, commands = gets.Fired()-get, scripts.Fired()-script, proxy.Commands()-commands
		if i == 2 {
			script, commands = script+1, commands-1
		}
		if get != 1 || script != 2 || commands != 3 {
			t.Errorf("%s: %d GETs and %d scripts in %d commands, want 1, 2, 3", key, get, script, commands)
		}
	}
}

// Set is one transaction, and Delete one DEL and a look at the lock for each key.
func TestSetDelete_OneRoundTrip(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := cachetest.NewCache[string](t, server.Client(t), nil)
	server.ResetCalls()
	if err := c.Set(t.Context(), "k", "v"); err != nil {
		t.Error(err)
	}
	cachetest.WantCalls(t, server, "Set", map[string]int64{"multi": 1, "set": 1, "del": 1, "exec": 1})
	server.ResetCalls()
	if err := c.Delete(t.Context(), "k", "l"); err != nil {
		t.Error(err)
	}
	cachetest.WantCalls(t, server, "Delete of two keys", map[string]int64{"del": 2, "pttl": 2})
}

// Get returns a value, ErrNotFound or ErrMiss, as the cache knows.
func TestGet_ValueNotFoundMiss(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := cachetest.NewCache[string](t, rdb, nil)
		if v, err := c.Get(t.Context(), "unknown"); err != singlefill.ErrMiss || v != "" {
			t.Errorf("got %q, %v; want ErrMiss itself", v, err)
		}
		if _, err := c.GetOrLoad(t.Context(), "none", cachetest.Fails[string](singlefill.ErrNotFound)); err != singlefill.ErrNotFound {
			t.Errorf("got %v; want ErrNotFound itself", err)
		}
		cachetest.WantGet(t, c, "none", "", singlefill.ErrNotFound)
		redistest.Must(t, c.Set(t.Context(), "none", "some"))
		cachetest.WantGet(t, c, "none", "some", nil)
		redistest.Must(t, c.Set(t.Context(), "none", "more"))
		cachetest.WantGet(t, c, "none", "more", nil)
		redistest.Must(t, c.Delete(t.Context(), "none"))
		cachetest.WantGet(t, c, "none", "", singlefill.ErrMiss)
	})
}

// Get starts no refresh, however old the value is.
func TestGet_RefreshesNothing(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := cachetest.StaleOptions(time.Hour, 2*time.Hour)
		opts.EarlyRefresh = 1e9
		c := cachetest.NewCache(t, rdb, opts)
		src := &cachetest.TimedSource{Takes: time.Second, Value: "v"}
		cachetest.Ask(t.Context(), c, "k", src.Load)
		for range 300 {
			_, _ = c.Get(t.Context(), "k") // refreshes nothing
			time.Sleep(time.Minute)
		}
		src.WantLoads(t, "only looked at", 1)
	})
}

// Set of a value that TTLFunc does not keep removes the value before it.
func TestSet_ValueNotToKeep(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.Raw, TTLFunc: lifeInMinutes})
		for _, value := range []string{"7", "0", "7", "-1"} {
			redistest.Must(t, c.Set(t.Context(), "k", value))
			if value == "7" {
				cachetest.WantStored(t, rdb, ns, "k", "7")
			} else {
				cachetest.WantStored(t, rdb, ns, "k", "")
			}
		}
	})
}

// Set of a value that cannot be encoded returns an error and leaves the value before it.
func TestSet_ValueThatCannotBeEncoded(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	c := cachetest.NewCache[any](t, rdb, nil)
	redistest.Must(t, c.Set(t.Context(), "k", "old"))
	if err := c.Set(t.Context(), "k", func() {}); err == nil {
		t.Error("Set of a func succeeds")
	}
	cachetest.WantGet[any](t, c, "k", "old", nil)
}

// Delete removes all keys that it is given, and no other.
func TestDelete_ManyKeysAndNone(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.Raw})
		many := 600 // several batches, all nodes of a cluster
		if strings.HasSuffix(t.Name(), "/mini") {
			many = 10 // on a net.Pipe, server and client would both wait for the other to read
		}
		var keys []string
		for i := range many {
			keys = append(keys, fmt.Sprint(i))
		}
		for _, key := range append(keys, "kept") {
			redistest.Must(t, c.Set(t.Context(), key, "v"))
		}
		if err := c.Delete(t.Context()); err != nil {
			t.Errorf("Delete of no keys: %v", err)
		}
		cachetest.WantStored(t, rdb, ns, keys[0], "v")
		redistest.Must(t, c.Delete(t.Context(), append(keys, "was never there", keys[0])...))
		for _, key := range keys {
			cachetest.WantStored(t, rdb, ns, key, "")
		}
		cachetest.WantStored(t, rdb, ns, "kept", "v")
	})
}

// A life is the ttl, or what TTLFunc says, less a random part of up to Jitter.
func TestTTL_Jitter(t *testing.T) {
	t.Parallel()
	const ttl = time.Hour
	const slack = 30 * time.Second // between a write and the look at it
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
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

// A value is a hit until the last millisecond of its ttl, and a miss after it.
func TestTTL_ToTheMillisecond(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Jitter: -1}) // ttl is an hour
		for i, write := range []func() error{
			func() error { _, err := c.GetOrLoad(t.Context(), "k", cachetest.Gives("v")); return err },
			func() error { return c.Set(t.Context(), "k", "v") },
		} {
			if err := write(); err != nil {
				t.Fatal(i, err)
			}
			time.Sleep(time.Hour - time.Millisecond)
			cachetest.GoGet(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).Want(t, "v")
			time.Sleep(time.Millisecond)
			if _, err := c.Get(t.Context(), "k"); err != singlefill.ErrMiss {
				t.Errorf("Get after the ttl: %v, want ErrMiss", err)
			}
			cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("w")).Want(t, "w")
		}
	})
}

// An expired entry that Redis still has is a miss, and no bad value.
func TestTTL_EntryThatRedisStillHas(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		redistest.Must(t, c.Set(t.Context(), "k", "v"))
		redistest.Must(t, rdb.PExpire(t.Context(), ns+":{k}", 24*time.Hour).Err())
		time.Sleep(time.Hour)
		cachetest.WantStored(t, rdb, ns, "k", "v")
		if _, err := c.Get(t.Context(), "k"); err != singlefill.ErrMiss {
			t.Errorf("Get: %v, want ErrMiss", err)
		}
		cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("w")).Want(t, "w")
		cachetest.WantStored(t, rdb, ns, "k", "w")
		if n := c.Stats().BadValues; n != 0 {
			t.Errorf("%d bad values: a stale one is none", n)
		}
	})
}

// TTLFunc gives loaded and set values their lives.
func TestTTLFunc_LifeOfEachValue(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Jitter: -1, TTLFunc: lifeInMinutes})
		cachetest.GoGet(t.Context(), c, "loaded", cachetest.Gives("2")).Want(t, "2")
		redistest.Must(t, c.Set(t.Context(), "set", "3"))
		time.Sleep(2*time.Minute - time.Millisecond)
		cachetest.GoGet(t.Context(), c, "loaded", cachetest.MustNotLoad[string](t)).Want(t, "2")
		time.Sleep(time.Millisecond)
		cachetest.GoGet(t.Context(), c, "loaded", cachetest.Gives("1")).Want(t, "1")
		time.Sleep(time.Minute - time.Millisecond)
		cachetest.GoGet(t.Context(), c, "set", cachetest.MustNotLoad[string](t)).Want(t, "3")
		time.Sleep(time.Millisecond)
		cachetest.GoGet(t.Context(), c, "set", cachetest.Gives("1")).Want(t, "1")
	})
}

// lifeInMinutes is a TTLFunc for which a value says how long it lives.
func lifeInMinutes(_, v string) time.Duration {
	var n int
	_, _ = fmt.Sscan(v, &n)
	return time.Duration(n) * time.Minute
}

// A load whose value TTLFunc does not keep is shared by its callers and leaves nothing in Redis.
func TestTTLFunc_ValueNotToKeep(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, life := range []time.Duration{0, -time.Hour, time.Millisecond - 1} {
			t.Run(life.String(), func(t *testing.T) {
				ns := redistest.Namespace(t)
				c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{TTLFunc: func(string, string) time.Duration { return life }})
				src := cachetest.NewSource[string](t)
				first := cachetest.GoGet(t.Context(), c, "k", src.Load)
				load := src.Next(t)
				var herd []*cachetest.Call[string]
				for range 20 {
					herd = append(herd, cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t))
				}
				load.Give("v")
				first.Want(t, "v")
				for _, a := range herd {
					a.Want(t, "v")
				}
				cachetest.WantStored(t, rdb, ns, "k", "")
				cachetest.WantUnlocked(t, rdb, ns, "k")
				cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("w")).Want(t, "w")
				src.Want(t, 1)
			})
		}
	})
}

// ErrNotFound is remembered for NotFoundTTL, by default for a minute, or the ttl if that is
// shorter.
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
	} {
		t.Run(test.name, func(t *testing.T) {
			cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				test.opts.Jitter = -1
				c, err := singlefill.New(rdb, "ns", test.ttl, &test.opts)
				redistest.Must(t, err)
				defer c.Close()
				cachetest.GoGet(t.Context(), c, "k", cachetest.Fails[string](singlefill.ErrNotFound)).WantErr(t, singlefill.ErrNotFound)
				time.Sleep(test.remembers - time.Millisecond)
				cachetest.GoGet(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).WantErr(t, singlefill.ErrNotFound)
				time.Sleep(time.Millisecond)
				cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")).Want(t, "v")
			})
		})
	}
}

// With a negative NotFoundTTL the next call loads again.
func TestNotFoundTTL_Off(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.Raw, NotFoundTTL: -1})
		cachetest.GoGet(t.Context(), c, "k", cachetest.Fails[string](singlefill.ErrNotFound)).WantErr(t, singlefill.ErrNotFound)
		cachetest.WantStored(t, rdb, ns, "k", "")
		cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")).Want(t, "v")
	})
}

// After Close every call but Stats returns ErrClosed, and the client is still open.
func TestClose_EndsAllCallsButStats(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := cachetest.NewCache[string](t, rdb, nil)
		redistest.Must(t, c.Set(t.Context(), "k", "v"))
		if err := errors.Join(c.Close(), c.Close()); err != nil {
			t.Errorf("Close twice: %v", err)
		}
		ctx := t.Context()
		_, get := c.Get(ctx, "k")
		_, load := c.GetOrLoad(ctx, "k", cachetest.MustNotLoad[string](t))
		for name, err := range map[string]error{
			"Get": get, "GetOrLoad": load, "Set": c.Set(ctx, "k", "v"), "Delete": c.Delete(ctx, "k"), "Delete of nothing": c.Delete(ctx),
		} {
			if err != singlefill.ErrClosed {
				t.Errorf("%s after Close: %v, want ErrClosed itself", name, err)
			}
		}
		if s := c.Stats(); s != (singlefill.Stats{}) {
			t.Errorf("%+v, want nothing counted", s)
		}
		if err := rdb.Ping(ctx).Err(); err != nil {
			t.Errorf("Close has closed the client: %v", err)
		}
	})
}

// Close waits for the load of a call that began before it, even if the call is still reading.
func TestClose_EarlierCallsGetTheLoad(t *testing.T) {
	t.Parallel()
	proxy := redistest.NewProxy(t, redistest.Shared(t).Addr)
	c := cachetest.NewCache[string](t, proxy.Client(t), nil)
	src := cachetest.NewSource[string](t)
	read := proxy.On(redistest.Command("get"), redistest.HoldReply).Times(1)
	first := cachetest.GoGet(t.Context(), c, "k", src.Load)
	cachetest.Receive(t, "the read is answered", read.Hit())
	second := cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t)
	closed := cachetest.GoClose(t, c)
	read.Release()
	src.Next(t).Give("v")
	first.Want(t, "v")
	second.Want(t, "v")
	if err := cachetest.Receive(t, "Close returns", closed); err != nil {
		t.Errorf("Close: %v", err)
	}
	src.Want(t, 1)
}

// Close returns after a running load has ended and its value has been stored.
func TestClose_WaitsForLoadAndStore(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		src := cachetest.NewSource[string](t)
		first := cachetest.GoGet(t.Context(), c, "k", src.Load)
		load := src.Next(t)
		joins := cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t)
		closed := cachetest.GoClose(t, c)
		select {
		case <-closed:
			t.Error("Close has returned before the load")
		default:
		}
		load.Give("v")
		cachetest.Receive(t, "Close returns", closed)
		cachetest.WantStored(t, rdb, ns, "k", "v")
		first.Want(t, "v")
		joins.Want(t, "v")
	})
}

// A load that Close waits for can load other keys.
func TestClose_LoadAsksForOtherKeys(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		begun, goOn := make(chan struct{}), make(chan struct{})
		outer := cachetest.GoGet(t.Context(), c, "a", func(ctx context.Context, _ string) (string, error) {
			close(begun)
			<-goOn
			b, err := c.GetOrLoad(ctx, "b", cachetest.Gives("b"))
			return "a" + b, err
		})
		cachetest.Receive(t, "the load begins", begun)
		closed := cachetest.GoClose(t, c)
		close(goOn)
		cachetest.Receive(t, "Close returns", closed)
		outer.Want(t, "ab")
		cachetest.WantStored(t, rdb, ns, "a", "ab")
		cachetest.WantStored(t, rdb, ns, "b", "b")
	})
}

// A load that Close waits for can ask for several keys, one after the other, in one slot.
func TestClose_NestedLoads(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		begun, goOn := make(chan bool), make(chan bool)
		a := cachetest.GoGet(t.Context(), c, "a", func(ctx context.Context, _ string) (string, error) {
			close(begun)
			<-goOn
			b := cachetest.GoGet(ctx, c, "b", cachetest.Takes(time.Second, "b", nil))
			d := cachetest.GoGet(ctx, c, "d", cachetest.Takes(time.Second, "d", nil))
			v1, err1 := b.Result(t)
			v2, err2 := d.Result(t)
			return v1 + v2, errors.Join(err1, err2)
		})
		<-begun
		go func() { _ = c.Close() }()
		synctest.Wait()
		close(goOn)
		a.Want(t, "bd")
	})
}

// Close ends the wait for a load of another process with ErrClosed.
func TestClose_EndsWaiting(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		there, here := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw), cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		src := cachetest.NewSource[string](t)
		loads := cachetest.GoGet(t.Context(), there, "k", src.Load)
		load := src.Next(t)
		waits := cachetest.GoGet(t.Context(), here, "k", src.Load).Waits(t)
		go here.Close()
		waits.WantErr(t, singlefill.ErrClosed)
		load.Give("v")
		loads.Want(t, "v")
		src.Want(t, 1)
	})
}

// Close returns at the LoadTimeout of a load that hangs, and ends loads that queue.
//
//fault:close
func TestClose_TakesLoadTimeoutAtMost(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1}) // LoadTimeout is a minute
		src := cachetest.NewSource[string](t)
		begun := time.Now()
		hangs := cachetest.GoGet(t.Context(), c, "hangs", src.Load)
		src.Next(t)
		queues := cachetest.GoGet(t.Context(), c, "queues", src.Load)
		synctest.Wait()
		time.Sleep(20 * time.Second)
		_ = c.Close()
		cachetest.WantElapsed(t, "Close returns", begun, time.Minute)
		queues.WantErr(t, singlefill.ErrClosed)
		if _, err := hangs.Result(t); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want context.DeadlineExceeded", err)
		}
		src.Want(t, 1)
	})
}

// A hook of the caller's client sees every command of the cache, even if it was added after New.
func TestHooks_SeeEveryCommand(t *testing.T) {
	t.Parallel()
	for name, bounded := range map[string]bool{"default client": false, "client with ContextTimeoutEnabled": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			rdb := s.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = bounded })
			c, err := singlefill.New[string](rdb, redistest.Namespace(t), time.Hour, cachetest.PatientOptions[string](nil))
			redistest.Must(t, err)
			t.Cleanup(func() { _ = c.Close() })
			var mu sync.Mutex
			var got []string // protected by mu
			rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
				mu.Lock()
				defer mu.Unlock()
				for _, cmd := range cmds {
					if cmd.Name() != "hello" { // of connections
						got = append(got, cmd.Name())
					}
				}
				return nil
			}))
			v, err := c.GetOrLoad(t.Context(), "k", cachetest.Gives("v"))
			cachetest.WantValue(t, v, err, "v")
			redistest.Must(t, c.Set(t.Context(), "k", "w"))
			redistest.Must(t, c.Delete(t.Context(), "k"))
			mu.Lock()
			defer mu.Unlock()
			want := []string{"get", "evalsha", "eval", "evalsha", "eval", "multi", "set", "del", "exec", "pttl", "del"}
			if !slices.Equal(got, want) {
				t.Errorf("the hook saw %v, want %v", got, want)
			}
		})
	}
}
