package stale_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// unchanged is a Loader of a source that says that the previous value is still right; without one it
// gives value.
func unchanged(value string) singlefill.Loader[string] {
	return func(ctx context.Context, key string) (string, error) {
		if old, _, ok := singlefill.Previous[string](ctx, key); ok {
			return "again " + old, nil
		}
		return value, nil
	}
}

// A load gets the value that it replaces, through all kinds of clients, and in a process that has not
// loaded it.
func TestPrevious(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ns := redistest.Namespace(t)
		opts := &singlefill.Options[string]{Codec: singlefill.Raw, EarlyRefresh: -1}
		c, other := cachetest.NewCacheIn(t, rdb, ns, opts), cachetest.NewCacheIn(t, rdb, ns, opts)
		for _, want := range []string{"v", "again v", "again again v"} {
			cachetest.GoGet(t.Context(), c, "a", unchanged("v")).Want(t, want)
			cachetest.AwaitSeen(t, rdb, look, ns, "a")
			redistest.Must(t, c.Expire(t.Context(), "a"))
			cachetest.AwaitSeen(t, rdb, look, ns, "a")
			c, other = other, c
		}
		got, err := c.GetOrLoadMany(t.Context(), []string{"a", "b"}, cachetest.OneByOne(unchanged("new")))
		if want := map[string]string{"a": "again again again v", "b": "new"}; err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("the ManyLoader gave %v, %v, want %v", got, err, want)
		}
	})
}

// A load has no previous value of other keys or types, nor when it is over; each call makes a copy.
func TestPrevious_OnlyOfTheLoad(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		type T = []string
		c := cachetest.OldCache(t, rdb, singlefill.Options[T]{StaleIfError: time.Hour}, T{"old"}, time.Minute)
		outer := cachetest.NewCacheIn(t, rdb, "outer", &singlefill.Options[T]{})
		var late context.Context
		_, err := c.GetOrLoad(t.Context(), "k", func(ctx context.Context, key string) (T, error) {
			late = ctx
			first, info, ok := singlefill.Previous[T](ctx, "k")
			if want := (singlefill.ValueInfo{Stale: true, Age: time.Minute + time.Second}); !ok || cachetest.Of(info) != want || !slices.Equal(first, T{"old"}) {
				t.Errorf("Previous = %v, %+v, %t, want the old value and %+v", first, info, ok, want)
			}
			first[0] = "changed"
			if v, _, _ := singlefill.Previous[T](ctx, "k"); !slices.Equal(v, T{"old"}) {
				t.Errorf("Previous = %v after another caller has changed its copy", v)
			}
			if v, _, ok := singlefill.Previous[T](ctx, "other"); ok {
				t.Errorf("another key has %v", v)
			}
			if v, _, ok := singlefill.Previous[string](ctx, "k"); ok {
				t.Errorf("another type has %v", v)
			}
			return outer.GetOrLoad(ctx, "k", func(ctx context.Context, key string) (T, error) {
				if v, _, ok := singlefill.Previous[T](ctx, "k"); ok {
					t.Errorf("the load of another cache has %v", v)
				}
				return T{"new"}, nil
			})
		})
		redistest.Must(t, err)
		for what, ctx := range map[string]context.Context{"after the load": late, "outside": t.Context()} {
			if v, _, ok := singlefill.Previous[T](ctx, "k"); ok {
				t.Errorf("%s: Previous = %v", what, v)
			}
		}
	})
}

// What a Delete has removed does not come back by a source that says "unchanged".
//
//fault:previous
func TestPrevious_DeleteWins(t *testing.T) {
	ctx := context.Background()
	for name, test := range map[string]struct {
		deleteAt string // before this command of the load; empty: during the load
		by       string
		previous bool
		want     error // of a Get afterwards
	}{
		"before the lock, in another process": {deleteAt: "evalsha", by: "other", want: nil},
		"during the load, in this process":    {by: "own", want: singlefill.ErrMiss},
		"during the load, in another process": {by: "other", previous: true, want: singlefill.ErrMiss},
	} {
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			c := cachetest.OldCache(t, rdb, singlefill.Options[string]{StaleIfError: time.Hour}, "old", time.Minute)
			by := c
			if test.by == "other" {
				by = cachetest.NewCacheIn(t, redistest.NewMiniClient(t, m), "ns", &singlefill.Options[string]{})
			}
			deleted := false
			remove := func() {
				if !deleted {
					deleted = true
					redistest.Must(t, by.Delete(ctx, "k"))
				}
			}
			rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
				if cmd.Name() == test.deleteAt {
					remove()
				}
				return nil
			}))
			_, err := c.GetOrLoad(ctx, "k", func(ctx context.Context, key string) (string, error) {
				remove()
				v, _, ok := singlefill.Previous[string](ctx, key)
				if ok != test.previous {
					t.Errorf("Previous = %q, %t, want %t", v, ok, test.previous)
				}
				return v + "!", nil
			})
			redistest.Must(t, err)
			if v, err := by.Get(ctx, "k"); err != test.want || strings.Contains(v, "old") {
				t.Errorf("Get = %q, %v, want %v", v, err, test.want)
			}
		})
	}
}

// Without an answer of Redis nothing tells whether an old value has been deleted; and a remembered
// ErrNotFound is no value.
func TestPrevious_None(t *testing.T) {
	none := func(t *testing.T) singlefill.Loader[string] {
		return func(ctx context.Context, key string) (string, error) {
			if v, _, ok := singlefill.Previous[string](ctx, key); ok {
				t.Errorf("Previous = %q", v)
			}
			return "new", nil
		}
	}
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.OldCache(t, rdb, singlefill.Options[string]{StaleIfError: time.Hour}, "old", time.Minute)
		broken := errors.New("i/o timeout")
		rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			if strings.HasPrefix(cmd.Name(), "eval") {
				return fmt.Errorf("hook: %w", broken)
			}
			return nil
		}))
		_, err := c.GetOrLoad(t.Context(), "k", none(t))
		redistest.Must(t, err)
		absent := cachetest.NewCacheIn(t, redistest.NewMiniClient(t, m), "absent", &singlefill.Options[string]{})
		_, err = absent.GetOrLoad(t.Context(), "k", cachetest.Fails[string](singlefill.ErrNotFound))
		if err != singlefill.ErrNotFound {
			t.Fatal(err)
		}
		redistest.Must(t, absent.Expire(t.Context(), "k"))
		_, err = absent.GetOrLoad(t.Context(), "k", none(t))
		redistest.Must(t, err)
	})
}
