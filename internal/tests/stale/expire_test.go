package stale_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// expireKeys expires keys and waits until the client sees it: its own cache may be late.
func expireKeys(t testing.TB, c *singlefill.Cache[string], rdb, look redis.UniversalClient, ns string, keys ...string) {
	t.Helper()
	redistest.Must(t, c.Expire(t.Context(), keys...))
	for _, key := range keys {
		cachetest.AwaitSeen(t, rdb, look, ns, key)
	}
}

// Expire changes of an entry only what makes it stale.
func TestExpire_ChangesOnlyFreshness(t *testing.T) {
	t.Parallel()
	hour := func(n int) time.Time { return time.Now().Add(time.Duration(n) * time.Hour).Truncate(time.Millisecond) }
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		for key, e := range map[string]entry.Entry{
			"value":     {FreshUntil: hour(1), WrittenAt: hour(-1), LoadTime: 12345 * time.Millisecond, Payload: []byte("a\x00\xff\r\n")},
			"empty":     {FreshUntil: hour(1), WrittenAt: hour(-1), Payload: []byte{}},
			"large":     {FreshUntil: hour(1), WrittenAt: hour(-1), Payload: []byte(strings.Repeat("\xc1\x01", 1<<19))},
			"not found": {FreshUntil: hour(1), WrittenAt: hour(-1), NotFound: true},
			"stale":     {FreshUntil: hour(-2), WrittenAt: hour(-3), Payload: []byte("v")},
			"expired":   {FreshUntil: hour(-2), WrittenAt: hour(-3), Payload: []byte("v"), Expired: true},
		} {
			const ttl = 37 * time.Hour
			before := cachetest.PutEntry(t, look, ns, key, e, ttl)
			begun := time.Now().Truncate(time.Millisecond)
			expireKeys(t, c, rdb, look, ns, key)
			after, got := cachetest.GetEntry(t, look, ns, key)
			if before[:cachetest.HeaderFlagsAt] != after[:cachetest.HeaderFlagsAt] || before[cachetest.HeaderRestAt:cachetest.HeaderRandomAt] != after[cachetest.HeaderRestAt:cachetest.HeaderRandomAt] ||
				before[cachetest.HeaderEndAt:] != after[cachetest.HeaderEndAt:] {
				t.Errorf("%s: %.50q has become %.50q", key, before, after)
			}
			if before[cachetest.HeaderRandomAt:cachetest.HeaderEndAt] == after[cachetest.HeaderRandomAt:cachetest.HeaderEndAt] {
				t.Errorf("%s: the random bytes are still the same", key)
			}
			if !got.Expired || got.NotFound != e.NotFound {
				t.Errorf("%s: the flags are %+v", key, got)
			}
			if e.FreshUntil.Before(begun) {
				if !got.FreshUntil.Equal(e.FreshUntil) {
					t.Errorf("%s: stale since %v, want since %v as before", key, got.FreshUntil, e.FreshUntil)
				}
			} else if got.FreshUntil.Before(begun) || got.FreshUntil.After(time.Now()) {
				t.Errorf("%s: stale since %v, want since now", key, got.FreshUntil)
			}
			if left := look.PTTL(t.Context(), ns+":{"+key+"}").Val(); left > ttl || left < ttl-time.Hour {
				t.Errorf("%s: lives for %v, want %v as before", key, left, ttl)
			}
		}
	})
}

// An expired value is served as the windows say.
func TestExpire_Windows(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		begin := func(t *testing.T, opts *singlefill.Options[string]) (*singlefill.Cache[string], *cachetest.HeldSource[string], string) {
			ns := redistest.Namespace(t)
			c := cachetest.NewCacheIn(t, rdb, ns, opts)
			src := cachetest.NewSource[string](t)
			redistest.Must(t, c.Set(t.Context(), "k", "old"))
			cachetest.WantGet(t, c, "k", "old", nil)
			expireKeys(t, c, rdb, look, ns, "k")
			return c, src, ns
		}
		t.Run("refreshed behind", func(t *testing.T) {
			c, src, _ := begin(t, cachetest.StaleOptions(time.Hour, 0))
			cachetest.WantGet(t, c, "k", "old", nil)
			src.Want(t, 0)
			for range 10 {
				v, info, err := c.GetOrLoadInfo(t.Context(), "k", src.Load) // although the load does not end
				cachetest.WantValue(t, v, err, "old")
				if !info.Stale || info.Err != nil {
					t.Errorf("%+v, want a stale value and no error", info)
				}
			}
			src.Next(t).Give("new")
			cachetest.WantGet(t, c, "k", "new", nil)
			cachetest.GoGet(t.Context(), c, "k", src.Load).Want(t, "new")
			_ = c.Close()
			src.Want(t, 1)
			if s := c.Stats(); s.Refreshes != 1 || s.Stored != 1 || s.Fenced != 0 {
				t.Errorf("%+v, want one refresh, stored", s)
			}
		})
		for name, opts := range map[string]*singlefill.Options[string]{"kept for errors": cachetest.StaleOptions(0, time.Hour), "not kept": cachetest.StaleOptions(0, 0)} {
			t.Run(name, func(t *testing.T) {
				c, src, _ := begin(t, opts)
				cachetest.WantGet(t, c, "k", "", singlefill.ErrMiss)
				waits := cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t)
				src.Next(t).Give("new")
				waits.Want(t, "new")
				cachetest.WantGet(t, c, "k", "new", nil)
				src.Want(t, 1)
			})
			t.Run(name+", source fails", func(t *testing.T) {
				c, _, _ := begin(t, opts)
				v, info, err := c.GetOrLoadInfo(t.Context(), "k", cachetest.Fails[string](boom))
				if opts.StaleIfError > 0 {
					cachetest.WantValue(t, v, err, "old")
					if !info.Stale || info.Err != boom {
						t.Errorf("%+v, want a stale value and why", info)
					}
				} else if err != boom || info != (singlefill.ValueInfo{}) {
					t.Errorf("got %q, %+v, %v; want the error itself", v, info, err)
				}
			})
		}
		t.Run("a remembered not-found", func(t *testing.T) {
			ns := redistest.Namespace(t)
			c := cachetest.NewCacheIn(t, rdb, ns, cachetest.StaleOptions(0, 0))
			cachetest.GoGet(t.Context(), c, "k", cachetest.Fails[string](singlefill.ErrNotFound)).WantErr(t, singlefill.ErrNotFound)
			expireKeys(t, c, rdb, look, ns, "k")
			cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("found")).Want(t, "found")
		})
	})
}

// A failing source leaves the old value after Expire, and nothing after Delete.
func TestExpire_SourceFails(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		for name, opts := range map[string]*singlefill.Options[string]{"refreshed": cachetest.StaleOptions(time.Hour, 0), "loaded": cachetest.StaleOptions(0, time.Hour)} {
			ns := redistest.Namespace(t)
			c := cachetest.NewCacheIn(t, rdb, ns, opts)
			for _, key := range []string{"expired", "deleted", "both"} {
				redistest.Must(t, c.Set(t.Context(), key, "old"))
			}
			expireKeys(t, c, rdb, look, ns, "expired", "both")
			redistest.Must(t, c.Delete(t.Context(), "deleted", "both"))
			for _, key := range []string{"expired", "deleted", "both"} {
				cachetest.AwaitSeen(t, rdb, look, ns, key)
				if a := cachetest.GoGet(t.Context(), c, key, cachetest.Fails[string](boom)); key == "expired" {
					a.Want(t, "old")
				} else if v, err := a.Result(t); err != boom {
					t.Errorf("%s, %s: got %q, %v; want the error of the source", name, key, v, err)
				}
			}
		}
	})
}

// Another Expire prolongs no window.
func TestExpire_AgainProlongsNothing(t *testing.T) {
	for name, opts := range map[string]*singlefill.Options[string]{"refreshed": cachetest.StaleOptions(10*time.Minute, 0), "kept for errors": cachetest.StaleOptions(0, 10*time.Minute)} {
		t.Run(name, func(t *testing.T) {
			cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				opts.RetryAfter = time.Millisecond
				c := cachetest.NewCache(t, rdb, opts)
				boom := errors.New("boom")
				for _, first := range []time.Duration{0, 30 * time.Minute, time.Hour + 4*time.Minute} { // the life is an hour
					redistest.Must(t, c.Set(t.Context(), "k", "old"))
					ends := min(first, time.Hour) + 10*time.Minute
					begun := time.Now()
					time.Sleep(first)
					for time.Since(begun) < ends {
						redistest.Must(t, c.Expire(t.Context(), "k"))
						cachetest.GoGet(t.Context(), c, "k", cachetest.Fails[string](boom)).Want(t, "old")
						time.Sleep(time.Minute)
					}
					cachetest.GoGet(t.Context(), c, "k", cachetest.Fails[string](boom)).WantErr(t, boom)
					if _, err := c.Get(t.Context(), "k"); err != singlefill.ErrMiss {
						t.Errorf("Get: %v, want ErrMiss", err)
					}
				}
			})
		})
	}
}

// A value whose load began before an Expire is not stored after it, and later callers load again at
// once.
//
//fault:delete-in-load
func TestExpire_DuringLoad(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		for _, where := range []string{"here", "elsewhere"} {
			for _, old := range []string{"", "old"} { // beyond StaleWhileRevalidate: callers wait for the load
				t.Run(where+" "+old, func(t *testing.T) {
					ns := redistest.Namespace(t)
					c := cachetest.NewCacheIn(t, rdb, ns, cachetest.StaleOptions(0, time.Hour))
					by := c
					if where == "elsewhere" {
						by = cachetest.NewCacheIn(t, rdb, ns, cachetest.StaleOptions(0, time.Hour))
					}
					if old != "" {
						cachetest.PutEntry(t, look, ns, "k", entry.Entry{FreshUntil: time.Now().Add(-time.Second),
							Payload: []byte(old)}, time.Hour)
					}
					src := cachetest.NewSource[string](t)
					before := cachetest.GoGet(t.Context(), c, "k", src.Load)
					older := src.Next(t)
					redistest.Must(t, by.Expire(t.Context(), "k"))
					after := cachetest.GoGet(t.Context(), c, "k", src.Load)
					newer := src.Next(t) // without waiting for the older load
					older.Give("v1")
					before.Want(t, "v1")
					newer.Give("v2")
					after.Want(t, "v2")
					_ = c.Close()
					cachetest.WantStored(t, look, ns, "k", "v2")
					cachetest.WantUnlocked(t, look, ns, "k")
					src.Want(t, 2)
					if s := c.Stats(); s.Stored != 1 || s.Fenced != 1 {
						t.Errorf("%+v, want one load stored and one fenced", s)
					}
				})
				t.Run(where+" "+old+", the only load", func(t *testing.T) {
					ns := redistest.Namespace(t)
					c, other := cachetest.NewCacheIn(t, rdb, ns, cachetest.StaleOptions(0, time.Hour)),
						cachetest.NewCacheIn(t, rdb, ns, cachetest.StaleOptions(0, time.Hour))
					by := map[string]*singlefill.Cache[string]{"here": c, "elsewhere": other}[where]
					if old != "" {
						cachetest.PutEntry(t, look, ns, "k", entry.Entry{FreshUntil: time.Now().Add(-time.Second),
							Payload: []byte(old)}, time.Hour)
					}
					src := cachetest.NewSource[string](t)
					before := cachetest.GoGet(t.Context(), c, "k", src.Load)
					load := src.Next(t)
					redistest.Must(t, by.Expire(t.Context(), "missing too", "k"))
					load.Give("v1")
					before.Want(t, "v1")
					_ = c.Close()
					cachetest.WantStored(t, look, ns, "k", old)
				})
			}
		}
	})
}

// Expire makes all keys stale that it is given, and no other.
func TestExpire_ManyKeysAndNone(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		counts := []int{0, 1, 257, 1000}
		if strings.HasSuffix(t.Name(), "/mini") {
			counts = []int{0, 1} // on a net.Pipe, server and client would both wait for the other to read
		}
		e := entry.Entry{FreshUntil: time.Now().Add(time.Hour), WrittenAt: time.Now(), Payload: []byte("v")}
		for _, many := range counts {
			var keys []string
			for i := range many {
				keys = append(keys, fmt.Sprint(many, "-", i))
				cachetest.PutEntry(t, look, ns, keys[i], e, time.Hour)
			}
			cachetest.PutEntry(t, look, ns, "kept", e, time.Hour)
			redistest.Must(t, c.Expire(t.Context(), append(keys, append([]string{"never there"}, keys[:min(many, 1)]...)...)...))
			for _, key := range keys {
				if _, got := cachetest.GetEntry(t, look, ns, key); !got.Expired || string(got.Payload) != "v" {
					t.Errorf("%s of %d: %+v, want an expired entry", key, many, got)
				}
			}
			if _, got := cachetest.GetEntry(t, look, ns, "kept"); got.Expired {
				t.Error("a key that was not named is expired")
			}
			cachetest.WantStored(t, look, ns, "never there", "")
		}
	})
}

// Expire removes what is no entry, and creates nothing.
func TestExpire_RemovesWhatIsNoEntry(t *testing.T) {
	t.Parallel()
	good, err := entry.Entry{FreshUntil: time.Now().Add(time.Hour), Payload: []byte("some value")}.Encode()
	redistest.Must(t, err)
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		ctx := t.Context()
		value := func(key string) string { return ns + ":{" + key + "}" }
		for key, data := range map[string]string{
			"text":            "a text of another program, which is longer than a header",
			"empty":           "",
			"one byte":        "\xc1",
			"a header less 1": string(good[:cachetest.HeaderEndAt-1]),
			"another magic":   "\xc2" + string(good[1:]),
			"version 0":       "\xc1\x00" + string(good[2:]),
			"version 2":       "\xc1\x02" + string(good[2:]),
		} {
			redistest.Must(t, look.Set(ctx, value(key), data, time.Hour).Err())
			expireKeys(t, c, rdb, look, ns, key)
			if data, found := cachetest.Stored(t, look, value(key)); found {
				t.Errorf("%s: %q is still there", key, data)
			}
		}
		if err := errors.Join(
			look.RPush(ctx, value("list"), "a").Err(), look.HSet(ctx, value("hash"), "a", "b").Err(), look.SAdd(ctx, value("set"), "a").Err(),
			look.RPush(ctx, value("locked by a list")+":lock", "a").Err(),
		); err != nil {
			t.Fatal(err)
		}
		for _, key := range []string{"list", "hash", "set", "locked by a list", "missing"} { // one command each: mini is on a net.Pipe
			if err := c.Expire(ctx, key); err != nil {
				t.Errorf("%s: %v", key, err)
			}
			for _, k := range []string{value(key), value(key) + ":lock"} {
				if n := look.Exists(ctx, k).Val(); n != 0 {
					t.Errorf("%s is there", k)
				}
			}
		}
	})
}

// An Expire without a key, of a closed cache, or whose context has ended, returns an error and
// sends no command.
func TestExpire_RefusedWithoutACommand(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c, closed := cachetest.NewCache[string](t, server.Client(t), nil), cachetest.NewCache[string](t, server.Client(t), nil)
	_ = closed.Close()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	for _, test := range []struct {
		name string
		c    *singlefill.Cache[string]
		ctx  context.Context
		keys []string
		want string
	}{
		{"no key", c, t.Context(), []string{"k", ""}, "singlefill: key is empty"},
		{"cancelled", c, cancelled, []string{"k"}, "context canceled"},
		{"too late", c, expired, []string{"k"}, "context deadline exceeded"},
		{"closed", closed, t.Context(), []string{"k"}, singlefill.ErrClosed.Error()},
		{"closed, of nothing", closed, t.Context(), nil, singlefill.ErrClosed.Error()},
		{"of nothing", c, t.Context(), nil, "<nil>"},
	} {
		server.ResetCalls()
		if err := test.c.Expire(test.ctx, test.keys...); fmt.Sprint(err) != test.want {
			t.Errorf("%s: got error %v, want %q", test.name, err, test.want)
		}
		cachetest.WantCalls(t, server, test.name, nil)
	}
}

// Expire takes one round trip for up to 256 keys.
func TestExpire_RoundTrips(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	rdb := server.Client(t)
	ns := redistest.Namespace(t)
	c := cachetest.NewCacheIn[string](t, rdb, ns, nil)
	var keys []string
	for i := range 257 {
		keys = append(keys, fmt.Sprint(i))
		cachetest.PutEntry(t, rdb, ns, keys[i], entry.Entry{FreshUntil: time.Now().Add(time.Hour)}, time.Hour)
	}
	isScript := func(cmd redis.Cmder) bool { return strings.HasPrefix(cmd.Name(), "eval") }
	var trips atomic.Int64
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		if slices.ContainsFunc(cmds, isScript) {
			trips.Add(1)
		}
		return nil
	}))
	for _, test := range []struct {
		keys  []string
		trips int64
	}{{keys[:1], 1}, {keys[:256], 1}, {keys, 2}} {
		for _, flushed := range []bool{false, true} {
			if flushed {
				redistest.Must(t, server.Admin().ScriptFlush(t.Context()).Err())
			}
			server.ResetCalls()
			trips.Store(0)
			if err := c.Expire(t.Context(), test.keys...); err != nil {
				t.Error(err)
			}
			n := int64(len(test.keys))
			if got := trips.Load(); got != test.trips {
				t.Errorf("%d keys took %d round trips, want %d", n, got, test.trips)
			}
			// What the scripts call counts too.
			cachetest.WantCalls(t, server, fmt.Sprint(n, " keys"),
				map[string]int64{"eval": n, "getrange": n, "setrange": 2 * n, "del": n})
		}
	}
}

// Expire without scripts starts again if another client changes the key between its steps.
func TestExpire_WithoutScripts(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	asUser := cachetest.NoScripts(t, s)
	now := time.Now()
	fresh := entry.Entry{FreshUntil: now.Add(time.Hour), WrittenAt: now, Payload: []byte("v1")}
	newer := entry.Entry{FreshUntil: now.Add(2 * time.Hour), WrittenAt: now, LoadTime: time.Minute, Payload: []byte("v2, longer")}
	expired := fresh
	expired.Expired, expired.FreshUntil = true, now.Add(-time.Hour).Truncate(time.Millisecond)
	for _, test := range []struct {
		name   string
		meddle func(t *testing.T, ns string) error
		want   string // payload
		since  time.Time
	}{
		{"set", func(t *testing.T, ns string) error {
			cachetest.PutEntry(t, s.Admin(), ns, "k", newer, time.Hour)
			return nil
		}, "v2, longer", now},
		{"expired", func(t *testing.T, ns string) error {
			cachetest.PutEntry(t, s.Admin(), ns, "k", expired, time.Hour)
			return nil
		}, "v1", expired.FreshUntil},
		{"deleted", func(t *testing.T, ns string) error { return s.Admin().Del(t.Context(), ns+":{k}").Err() }, "", now},
		{"foreign", func(t *testing.T, ns string) error {
			return s.Admin().Set(t.Context(), ns+":{k}", strings.Repeat("x", 100), time.Hour).Err()
		}, "", now},
		{"a list", func(t *testing.T, ns string) error {
			return errors.Join(s.Admin().Del(t.Context(), ns+":{k}").Err(), s.Admin().RPush(t.Context(), ns+":{k}", "x").Err())
		}, "", now},
		{"locked", func(t *testing.T, ns string) error {
			return s.Admin().Set(t.Context(), ns+":{k}:lock", "H"+strings.Repeat("T", 26)+strings.Repeat("1", 16), time.Hour).Err()
		}, "v1", now},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			p := redistest.NewProxy(t, s.Addr)
			ns := redistest.Namespace(t)
			c := cachetest.NewCacheIn(t, p.Client(t, asUser), ns, &cachetest.Raw)
			cachetest.PutEntry(t, s.Admin(), ns, "k", fresh, time.Hour)
			writes := p.On(redistest.Command("multi"), redistest.HoldRequest).Times(1)
			done := make(chan error, 1)
			go func() { done <- c.Expire(context.Background(), "k") }()
			cachetest.Receive(t, "Expire is about to write", writes.Hit())
			redistest.Must(t, test.meddle(t, ns))
			writes.Release()
			if err := cachetest.Receive(t, "Expire returns", done); err != nil {
				t.Error(err)
			}
			if n := s.Admin().Exists(t.Context(), ns+":{k}:lock").Val(); n != 0 {
				t.Error("a lock is there")
			}
			if test.want == "" {
				if n := s.Admin().Exists(t.Context(), ns+":{k}").Val(); n != 0 {
					t.Error("something is there")
				}
				return
			}
			_, got := cachetest.GetEntry(t, s.Admin(), ns, "k")
			if !got.Expired || string(got.Payload) != test.want || got.FreshUntil.Sub(test.since).Abs() > 30*time.Minute {
				t.Errorf("%+v, want %q, stale since %v", got, test.want, test.since)
			}
		})
	}
}

// Expire without scripts handles many keys, with no more rights than before.
func TestExpire_ManyKeysWithoutScripts(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := cachetest.NewCache(t, server.Client(t, cachetest.NoScripts(t, server, "-time")),
		&singlefill.Options[string]{StaleWhileRevalidate: time.Hour})
	testExpireMany(t, c, 300)
}

// testExpireMany returns how long Expire took.
func testExpireMany(t *testing.T, c *singlefill.Cache[string], many int) (took time.Duration) {
	keys := make([]string, many)
	for i := range keys {
		keys[i] = fmt.Sprint(i)
		redistest.Must(t, c.Set(t.Context(), keys[i], "old"))
	}
	cachetest.GoGet(t.Context(), c, "loaded", cachetest.Gives("v")).Want(t, "v")
	cachetest.WantGet(t, c, "loaded", "v", nil)
	begun := time.Now()
	redistest.Must(t, c.Expire(t.Context(), keys...))
	took = time.Since(begun)
	for _, key := range keys {
		if _, info, err := c.GetOrLoadInfo(t.Context(), key, cachetest.Gives("new")); !info.Stale || err != nil {
			t.Fatalf("%s after Expire: %+v, %v", key, info, err)
		}
	}
	return took
}

// Expire without scripts gives each key its own RedisTimeout: each key is watched by itself.
func TestExpire_ManyKeysFarFromRedis(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) (err error) {
			time.Sleep(20 * time.Millisecond)
			for _, cmd := range cmds {
				if strings.HasPrefix(cmd.Name(), "eval") {
					err = refusal("NOPERM this user has no permissions to run the 'eval' command")
					cmd.SetErr(err)
				}
			}
			return err
		}))
		opts := &singlefill.Options[string]{StaleWhileRevalidate: time.Hour, RedisTimeout: time.Second}
		if took := testExpireMany(t, cachetest.NewCache(t, rdb, opts), 60); took < 2*opts.RedisTimeout {
			t.Errorf("Expire took %v, which shows nothing: it should take longer than RedisTimeout", took)
		}
	})
}

// Concurrent Expires of a key leave one stale entry, whole.
func TestExpire_Concurrent(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		cachetest.PutEntry(t, look, ns, "k", entry.Entry{FreshUntil: time.Now().Add(time.Hour), Payload: []byte("v")}, time.Hour)
		errs := make(chan error, 20)
		for range cap(errs) {
			go func() { errs <- c.Expire(context.Background(), "k") }()
		}
		all := slices.Collect(func(yield func(error) bool) {
			for range cap(errs) {
				yield(cachetest.Receive(t, "Expire returns", errs))
			}
		})
		if err := errors.Join(all...); err != nil {
			t.Error(err)
		}
		if _, e := cachetest.GetEntry(t, look, ns, "k"); !e.Expired || string(e.Payload) != "v" {
			t.Errorf("%+v, want an expired entry of v", e)
		}
	})
}
