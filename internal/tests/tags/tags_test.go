// Package tags tests DeleteTag and ExpireTag on real servers.
package tags

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// byLetters gives a value a tag for each of its letters. ErrNotFound has the tag "none".
func byLetters(key, v string) (tags []string) {
	if v == "" {
		return []string{"none"}
	}
	return strings.Split(v, "")
}

// tagged is the options of a cache whose values have the tags of byLetters.
var tagged = singlefill.Options[string]{Codec: singlefill.Raw, Tags: byLetters, MaxLoads: -1}

// newCache returns a cache whose indexes are known to be complete.
func newCache(t *testing.T, rdb redis.UniversalClient) (c *singlefill.Cache[string], ns string) {
	t.Helper()
	ns = redistest.Namespace(t)
	c = cachetest.NewCacheIn(t, rdb, ns, &tagged)
	redistest.Must(t, c.Clear(t.Context()))
	return c, ns
}

// wantKeys waits until the cache has these of the keys, and checks that it has no others.
func wantKeys(t *testing.T, rdb redis.UniversalClient, ns, what string, among, want []string) {
	t.Helper()
	var got []string
	for _, key := range among {
		if _, found := cachetest.Stored(t, rdb, ns+":{"+key+"}"); found {
			got = append(got, key)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q are stored, want %q", what, got, want)
	}
}

// DeleteTag deletes the keys whose values have the tag, however they were stored, and no others.
func TestDeleteTag(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		c, ns := newCache(t, rdb)
		ctx := t.Context()
		keys := []string{"m1", "m2", "m3", "one", "s1", "s2", "set", "zero"}
		store := func() {
			t.Helper()
			cachetest.GoGet(ctx, c, "one", cachetest.Gives("ab")).Want(t, "ab")
			cachetest.GoGet(ctx, c, "zero", func(context.Context, string) (string, error) {
				return "ab, which means nothing", singlefill.ErrNotFound
			}).WantErr(t, singlefill.ErrNotFound)
			many := func(_ context.Context, asked []string) (map[string]string, error) {
				found := map[string]string{"m1": "bc", "m2": "c"} // m3 does not exist
				maps.DeleteFunc(found, func(key, _ string) bool { return !slices.Contains(asked, key) })
				return found, nil
			}
			_, err := c.GetOrLoadMany(ctx, []string{"m1", "m2", "m3"}, many)
			redistest.Must(t, err)
			redistest.Must(t, c.Set(ctx, "set", "ac"))
			redistest.Must(t, c.SetMany(ctx, map[string]string{"s1": "aa", "s2": "d"}))
			wantKeys(t, look, ns, "all", keys, keys)
		}
		for _, test := range []struct {
			tags string
			left []string
		}{
			{"a", []string{"m1", "m2", "m3", "s2", "zero"}},
			{"b c", []string{"m3", "s1", "s2", "zero"}},
			{"none", []string{"m1", "m2", "one", "s1", "s2", "set"}},
			{"e", keys},
			{"e b", []string{"m2", "m3", "s1", "s2", "set", "zero"}},
		} {
			store()
			redistest.Must(t, c.DeleteTag(ctx, strings.Fields(test.tags)...))
			wantKeys(t, look, ns, test.tags, keys, test.left)
			for _, key := range keys {
				if !slices.Contains(test.left, key) {
					cachetest.WantGet(t, c, key, "", singlefill.ErrMiss) // so that it is stored again
				}
			}
		}
		redistest.Must(t, c.DeleteTag(ctx))
		if s := c.Stats(); s.TagCalls != 5 || s.TagKeys == 0 || s.TagClears != 0 || s.StoreErrors != 0 || s.Fenced != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// A value whose load began before a DeleteTag is not stored after it, although its key has never been
// stored and nothing knows its tags, and callers that join the load later get another one.
//
//fault:tag-in-load
func TestDeleteTag_DuringLoad(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		c, ns := newCache(t, rdb)
		other := cachetest.NewCacheIn(t, rdb, ns, &tagged) // as in another process
		for i, by := range []*singlefill.Cache[string]{c, other} {
			key := fmt.Sprint("k", i)
			src := cachetest.NewSource[string](t)
			before, older := src.Begin(t.Context(), t, c, key)
			redistest.Must(t, by.DeleteTag(t.Context(), "x"))
			after := cachetest.GoGet(t.Context(), c, key, src.Load).Waits(t)
			elsewhere := cachetest.GoGet(t.Context(), other, key, src.Load)
			older.Give("x")
			before.Want(t, "x")
			newer := src.Next(t)
			cachetest.WantStored(t, look, ns, key, "")
			newer.Give("xy")
			after.Want(t, "xy")
			elsewhere.Want(t, "xy")
			cachetest.WantStored(t, look, ns, key, "xy")
			src.Want(t, 2)
		}
		if s := c.Stats(); s.Fenced < 1 || s.StoreErrors != 0 {
			t.Errorf("%+v, want fenced loads", s)
		}
	})
}

// What a load has brought and is not stored is as void after a DeleteTag as what is stored.
//
//fault:tag-in-load
func TestDeleteTag_DuringLoadOfUnstored(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(o *singlefill.Options[string]){
		"no life":  func(o *singlefill.Options[string]) { o.TTLFunc = func(string, string) time.Duration { return 0 } },
		"no codec": func(o *singlefill.Options[string]) { o.Codec = cachetest.BadCodec{} },
		"no tags":  func(o *singlefill.Options[string]) { o.Tags = func(string, string) []string { panic("no tags") } },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rdb, ns, opts := redistest.Shared(t).Client(t), redistest.Namespace(t), tagged
			change(&opts)
			c := cachetest.NewCacheIn(t, rdb, ns, &opts)
			redistest.Must(t, c.Clear(t.Context()))
			src := cachetest.NewSource[string](t)
			before, older := src.Begin(t.Context(), t, c, "k")
			redistest.Must(t, c.DeleteTag(t.Context(), "x"))
			after := cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t)
			older.Give("x")
			before.Want(t, "x")
			src.Next(t).Give("xy")
			after.Want(t, "xy")
		})
	}
}

// ExpireTag makes values stale, and keeps them.
func TestExpireTag(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ns := redistest.Namespace(t)
		opts := tagged
		opts.StaleIfError = time.Minute
		c := cachetest.NewCacheIn(t, rdb, ns, &opts)
		redistest.Must(t, c.Clear(t.Context()))
		redistest.Must(t, c.SetMany(t.Context(), map[string]string{"k1": "a", "k2": "b"}))
		redistest.Must(t, c.ExpireTag(t.Context(), "a"))
		failure := errors.New("the source is down")
		v, info, err := c.GetOrLoadInfo(t.Context(), "k1", cachetest.Fails[string](failure))
		if v != "a" || !info.Stale || err != nil {
			t.Errorf("got %q, %+v, %v; want the stale value", v, info, err)
		}
		v, info, err = c.GetOrLoadInfo(t.Context(), "k2", cachetest.MustNotLoad[string](t))
		if v != "b" || info.Stale || err != nil {
			t.Errorf("got %q, %+v, %v; want the fresh value", v, info, err)
		}
	})
}

// A hit is one plain GET, with tags as without.
func TestTags_HitsAreGets(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	rdb := server.Client(t)
	writer, ns := newCache(t, rdb)
	many := make(map[string]string)
	for i := range 100 {
		many[fmt.Sprint("k", i)] = "abc"
	}
	redistest.Must(t, writer.SetMany(t.Context(), many))
	redistest.Must(t, writer.Close()) // it has told the memory of others
	c := cachetest.NewCacheIn(t, rdb, ns, &tagged)
	server.ResetCalls()
	for i := range 1000 {
		_, err := c.GetOrLoad(t.Context(), fmt.Sprint("k", i%100), cachetest.MustNotLoad[string](t))
		redistest.Must(t, err)
	}
	cachetest.WantCalls(t, server, "1000 hits", map[string]int64{"get": 1000})
}

// A key is found under the tags of each value that it has had and that has not ended.
func TestDeleteTag_TagsChange(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		c, ns := newCache(t, rdb)
		ctx := t.Context()
		untagged := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw) // a process whose Tags differ
		for _, test := range []struct {
			what  string
			store func() error
			tag   string
		}{
			{"the new tag", func() error { return errors.Join(c.Set(ctx, "k", "a"), c.Set(ctx, "k", "b")) }, "b"},
			{"a former tag", func() error { return errors.Join(c.Set(ctx, "k", "a"), c.Set(ctx, "k", "b")) }, "a"},
			{"a value of a process without Tags", func() error { return errors.Join(c.Set(ctx, "k", "a"), untagged.Set(ctx, "k", "a")) }, "a"},
		} {
			if test.what != "the new tag" {
				redistest.SkipLocal(t, "it finds a key under the tags of its last value alone")
			}
			redistest.Must(t, test.store())
			redistest.Must(t, c.DeleteTag(ctx, test.tag))
			wantKeys(t, look, ns, test.what, []string{"k"}, nil)
		}
	})
}

// A Delete that cancels a load while it reads the sequences has fenced it: there was no error of Redis.
//
//fault:delete-in-load
func TestTags_SupersededWhileReadingSequences(t *testing.T) {
	t.Parallel()
	proxy := redistest.NewProxy(t, redistest.Shared(t).Addr)
	done := make(chan singlefill.LoadInfo, 1)
	opts := tagged
	opts.Trace = &singlefill.Trace{LoadDone: func(_ context.Context, i singlefill.LoadInfo) { done <- i }}
	c := cachetest.NewCache(t, proxy.Client(t), &opts)
	redistest.Must(t, c.Clear(t.Context()))
	sequences := proxy.On(redistest.Command("hmget"), redistest.HoldReply).Times(1)
	ctx, cancel := context.WithCancel(t.Context())
	call := cachetest.GoGet(ctx, c, "k", cachetest.Gives("v"))
	cachetest.Receive(t, "the sequences are read", sequences.Hit())
	cancel() // no caller may have the value
	call.WantErr(t, context.Canceled)
	redistest.Must(t, c.Delete(t.Context(), "k"))
	if i := cachetest.Receive(t, "the load is over", done); !i.Fenced || i.Stored || i.StoreErr != nil {
		t.Errorf("the load ended with %+v, want that it is fenced", i)
	}
	sequences.Release()
	if s := c.Stats(); s.Fenced != 1 || s.StoreErrors != 0 {
		t.Errorf("%d fenced, %d errors of stores; want 1, 0", s.Fenced, s.StoreErrors)
	}
}

// Bad tags are refused before anything is touched; bad tags from Options.Tags fail the store, never the
// read.
func TestTags_Bad(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 257)
	rdb := redistest.Shared(t).Client(t)
	ctx := t.Context()
	c, _ := newCache(t, rdb)
	plain := cachetest.NewCache(t, rdb, &cachetest.Raw)
	for _, test := range []struct {
		c    *singlefill.Cache[string]
		tags []string
		want string
	}{
		{c, []string{"a", ""}, `singlefill: tag is "", of 0 bytes: 1 to 256 bytes are allowed`},
		{c, []string{long}, `of 257 bytes: 1 to 256 bytes are allowed`},
		{plain, []string{"a"}, "singlefill: Options.Tags is nil: DeleteTag and ExpireTag are allowed with Tags only"},
	} {
		for _, call := range []func(context.Context, ...string) error{test.c.DeleteTag, test.c.ExpireTag} {
			cachetest.WantErrText(t, "the call", call(ctx, test.tags...), test.want)
		}
	}
	for value, want := range map[string]string{
		"empty": "tag is", "long": "of 257 bytes", "many": `Options.Tags returned 33 tags for the key "k": at most 32 are allowed`,
		"panic": "Options.Tags panicked: no tags",
	} {
		opts := tagged
		var info singlefill.LoadInfo
		opts.Trace = &singlefill.Trace{LoadDone: func(_ context.Context, i singlefill.LoadInfo) { info = i }}
		opts.Tags = func(_, v string) []string {
			switch v {
			case "empty":
				return []string{""}
			case "long":
				return []string{long}
			case "many":
				return strings.Split("abcdefghijklmnopqrstuvwxyz0123456", "")
			}
			panic("no tags")
		}
		c := cachetest.NewCache(t, rdb, &opts)
		for what, err := range map[string]error{"Set": c.Set(ctx, "k", value), "SetMany": c.SetMany(ctx, map[string]string{"k": value})} {
			cachetest.WantErrText(t, what+" of "+value, err, want)
		}
		cachetest.GoGet(ctx, c, "k", cachetest.Gives(value)).Want(t, value)
		_ = c.Close() // LoadDone has been called
		if cachetest.WantErrText(t, "load of "+value, info.StoreErr, want); info.Stored {
			t.Errorf("%s is stored", value)
		}
	}
}

// Everything ends: indexes do not outlive their values, and lose members that have ended.
func TestTags_End(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	rdb := server.Client(t)
	opts := tagged
	opts.Jitter = -1
	opts.RedisTimeout, opts.LockTTL = time.Second, 3200*time.Millisecond
	opts.TTLFunc = func(key, _ string) time.Duration {
		if key == "long" {
			return time.Hour
		}
		return time.Second
	}
	c := cachetest.NewCacheIn(t, rdb, "ns", &opts)
	ctx := t.Context()
	redistest.Must(t, c.Set(ctx, "long", "a"))
	for i := range 50 {
		redistest.Must(t, c.Set(ctx, fmt.Sprint("short", i), "ab"))
	}
	index := keysOf(t, rdb, "ns", ":a:index")[0]
	redistest.Await(t, "ended members leave the index as others come", func() bool {
		redistest.Must(t, c.Set(ctx, "long", "a"))
		return rdb.ZCard(ctx, index).Val() == 1
	})
	for _, key := range keysOf(t, rdb, "ns", "") {
		life, least := rdb.PTTL(ctx, key).Val(), time.Duration(0)
		if key == index {
			least = time.Hour - time.Minute
		}
		if life < least || life > 25*time.Hour {
			t.Errorf("%s lives for %v", key, life)
		}
	}
	books := keysOf(t, rdb, "ns", ":book")
	redistest.Await(t, "the book forgets tags without values", func() bool {
		redistest.Must(t, c.Set(ctx, "long", "a"))
		for _, book := range books {
			if rdb.HExists(ctx, book, "tb").Val() {
				redistest.Must(t, c.DeleteTag(ctx, "b")) // any command for this book
				return false
			}
		}
		return true
	})
}

// If two values are stored under a key at the same time, the value with the longer life may be the last: the
// key is found for that long.
func TestTags_LongerLifeCounts(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	rdb := server.Client(t)
	opts := tagged
	opts.Jitter = -1
	opts.RedisTimeout, opts.LockTTL = time.Second, 3200*time.Millisecond
	opts.TTLFunc = func(_, v string) time.Duration {
		if strings.HasPrefix(v, "short") {
			return 100 * time.Millisecond
		}
		return time.Hour
	}
	opts.Tags = func(string, string) []string { return []string{"t"} }
	c := cachetest.NewCacheIn(t, rdb, "ns", &opts)
	ctx := t.Context()
	redistest.Must(t, c.Clear(ctx))
	redistest.Must(t, c.Set(ctx, "k", "long"))
	refuse := errors.New("refused")
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		if cmds[0].Name() == "multi" && strings.Contains(fmt.Sprintf("%s", cmds[1].Args()), "short") {
			return refuse
		}
		return nil
	}))
	if err := c.Set(ctx, "k", "short"); !errors.Is(err, refuse) { // its tags have been noted
		t.Fatal(err)
	}
	over := rdb.Time(ctx).Val().Add(200*time.Millisecond + opts.LockTTL)
	redistest.Await(t, "the shorter life is over", func() bool { return rdb.Time(ctx).Val().After(over) })
	redistest.Must(t, c.Set(ctx, "other", "long")) // what has ended leaves the index
	redistest.Must(t, c.DeleteTag(ctx, "t"))
	wantKeys(t, rdb, "ns", "after DeleteTag", []string{"k", "other"}, nil)
}

// A value that is stored long after its key was noted under its tags is found until it ends.
func TestTags_StoredLate(t *testing.T) {
	t.Parallel()
	rdb := redistest.Start(t).Client(t)
	opts := tagged
	opts.Jitter = -1
	opts.RedisTimeout, opts.LockTTL, opts.LoadTimeout = 20*time.Second, 70*time.Second, 2*time.Minute
	const ttl = 2 * time.Second
	opts.TTLFunc = func(string, string) time.Duration { return ttl }
	c := cachetest.NewCacheIn(t, rdb, "ns", &opts)
	ctx := t.Context()
	redistest.Must(t, c.Clear(ctx))
	var late atomic.Bool
	late.Store(true)
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		if cmds[0].Name() == "multi" && cmds[1].Name() == "set" && late.Swap(false) {
			over := rdb.Time(ctx).Val().Add(ttl)
			redistest.Await(t, "the life of a value that is stored at once is over", func() bool {
				return rdb.Time(ctx).Val().After(over)
			})
		}
		return nil
	}))
	redistest.Must(t, c.Set(ctx, "k", "a"))
	if late.Load() {
		t.Fatal("the value was not held back")
	}
	redistest.Must(t, c.Set(ctx, "other", "a")) // what has ended leaves the index
	redistest.Must(t, c.DeleteTag(ctx, "a"))
	wantKeys(t, rdb, "ns", "after DeleteTag", []string{"k", "other"}, nil)
}

// A value that is stored later still is found, too, as by a call that takes longer than LockTTL for the keys it
// has noted at once.
//
//fault:tags-frozen
func TestTags_StoredLater(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		ns, ctx, opts := redistest.Namespace(t), t.Context(), tagged
		opts.Jitter = -1
		opts.RedisTimeout, opts.LockTTL = time.Second, 3001*time.Millisecond
		c := cachetest.NewCacheIn(t, rdb, ns, &opts)
		redistest.Must(t, c.Clear(ctx))
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			if len(cmds) > 1 && cmds[0].Name() == "eval" {
				time.Sleep(900 * time.Millisecond)
			}
			return nil
		}))
		values := make(map[string]string)
		for i := range 1000 {
			values[fmt.Sprint("k", i)] = "a"
		}
		redistest.Must(t, c.SetMany(ctx, values))
		index, late := keysOf(t, rdb, ns, ":a:index")[0], 0
		for key := range values {
			ends := time.Now().Add(rdb.PTTL(ctx, ns+":{"+key+"}").Val())
			if score := rdb.ZScore(ctx, index, key).Val(); int64(score) < ends.UnixMilli() {
				late++
			}
		}
		if late > 0 {
			t.Errorf("%d of %d keys leave the index before their values end", late, len(values))
		}
	})
}

// What the books keep is bounded by what lives, however many tags have had values and have been deleted: a
// command drops more of what has ended than it adds.
func TestTags_BooksAreBounded(t *testing.T) {
	t.Parallel()
	const some = 100 // values of a call, or tags
	tags := func(round, n int) (tags []string) {
		for i := range n {
			tags = append(tags, fmt.Sprint("r", round, "-", i))
		}
		return tags
	}
	for name, use := range map[string]func(ctx context.Context, c *singlefill.Cache[string], round int) error{
		"loads": func(ctx context.Context, c *singlefill.Cache[string], round int) error {
			_, err := c.GetOrLoad(ctx, "k", cachetest.Gives(strings.Join(tags(round, 32), " ")))
			return err
		},
		"SetMany": func(ctx context.Context, c *singlefill.Cache[string], round int) error {
			values := make(map[string]string)
			for i, tag := range tags(round, some) {
				values[fmt.Sprint("k", i)] = tag
			}
			return c.SetMany(ctx, values)
		},
		"DeleteTag": func(ctx context.Context, c *singlefill.Cache[string], round int) error {
			return c.DeleteTag(ctx, tags(round, some)...)
		},
	} {
		for _, scripts := range []bool{true, false} {
			cachetest.RunInBubble(t, fmt.Sprintf("%s/scripts=%v", name, scripts), func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				if !scripts {
					o := *rdb.Options()
					o.Protocol = 2 // miniredis answers HRANDFIELD as go-redis expects it
					rdb = redis.NewClient(&o)
					t.Cleanup(func() { _ = rdb.Close() })
					rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
						if strings.HasPrefix(cmds[0].Name(), "eval") {
							return fmt.Errorf("NOPERM")
						}
						return nil
					}))
				}
				opts := tagged
				opts.Tags = func(_, v string) []string { return strings.Fields(v) }
				opts.TTLFunc = func(string, string) time.Duration { return time.Second }
				opts.RedisTimeout, opts.LockTTL, opts.LoadTimeout = time.Second, 4*time.Second, 5*time.Second
				c := cachetest.NewCacheIn(t, rdb, "ns", &opts)
				redistest.Must(t, c.Clear(t.Context()))
				const rounds = 30
				for round := range rounds {
					redistest.Must(t, use(t.Context(), c, round))
					time.Sleep(11 * time.Second) // values, marks and locks end
				}
				fields := 0
				for _, key := range m.Keys() {
					if strings.HasSuffix(key, ":book") {
						names, err := m.HKeys(key)
						redistest.Must(t, err)
						fields += len(names)
					}
				}
				if fields > 3*some {
					t.Errorf("%d fields are left of %d rounds", fields, rounds)
				}
			})
		}
	}
}

// A LoadTimeout of centuries is no reason to refuse a load during which other tags are invalidated.
func TestDeleteTag_LongLoadTimeout(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := tagged
		opts.LoadTimeout = math.MaxInt64 / 4 * 3
		c := cachetest.NewCacheIn(t, rdb, "ns", &opts)
		redistest.Must(t, c.Clear(t.Context()))
		cachetest.Ask(t.Context(), c, "k", func(ctx context.Context, _ string) (string, error) {
			for i := range 100 { // in all books
				redistest.Must(t, c.DeleteTag(ctx, fmt.Sprint("other ", i)))
			}
			return "v", nil
		})
		if n := c.Stats(); n.Stored != 1 {
			t.Errorf("%+v, want the load stored", n)
		}
	})
}
