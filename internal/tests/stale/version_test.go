package stale_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A user as a program stored it before it had a Mail, and as the next program reads it.
type (
	oldUser struct{ Name string }
	newUser struct{ Name, Mail string }
)

var (
	ann     = oldUser{"Ann"}
	annMail = newUser{"Ann", "ann@example.com"}
)

// versions returns a process of the old program and one of the new one, in one namespace.
func versions(t *testing.T, rdb redis.UniversalClient, opts singlefill.Options[any]) (
	ns string, before *singlefill.Cache[oldUser], after *singlefill.Cache[newUser]) {
	ns = redistest.Namespace(t)
	opts.Jitter = -1
	next := singlefill.OptionsFor[newUser](&opts)
	next.Version = 1
	return ns, cachetest.NewCacheIn(t, rdb, ns, singlefill.OptionsFor[oldUser](&opts)), cachetest.NewCacheIn(t, rdb, ns, next)
}

func wantVersion(t *testing.T, rdb redis.UniversalClient, ns, key string, want uint32) {
	t.Helper()
	if _, e := cachetest.GetEntry(t, rdb, ns, key); e.Version != want {
		t.Errorf("the entry has version %d, want %d", e.Version, want)
	}
}

// An entry of a lower version is a miss for each call. It is loaded once and replaced, and the old program then gets
// the new entry.
func TestVersion_Lower(t *testing.T) {
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		ns, before, after := versions(t, rdb, singlefill.Options[any]{EarlyRefresh: -1, StaleIfError: time.Hour})
		redistest.Must(t, before.Set(ctx, "k", ann))
		wantVersion(t, rdb, ns, "k", 0)
		cachetest.WantGet(t, after, "k", newUser{}, singlefill.ErrMiss)
		if all, err := after.GetMany(ctx, []string{"k"}); len(all) > 0 || err != nil {
			t.Errorf("GetMany returned %v, %v", all, err)
		}
		down := errors.New("down")
		if v, err := after.GetOrLoad(ctx, "k", cachetest.Fails[newUser](down)); err != down {
			t.Errorf("got %v, %v although an old shape is no fallback", v, err)
		}
		cachetest.WantGet(t, before, "k", ann, nil)

		v, err := after.GetOrLoad(ctx, "k", func(ctx context.Context, key string) (newUser, error) {
			if v, _, ok := singlefill.Previous[newUser](ctx, key); ok {
				t.Errorf("Previous returned %v, which lacks a field", v)
			}
			return annMail, nil
		})
		cachetest.WantValue(t, v, err, annMail)
		wantVersion(t, rdb, ns, "k", 1)
		v, err = after.GetOrLoad(ctx, "k", cachetest.MustNotLoad[newUser](t))
		cachetest.WantValue(t, v, err, annMail)
		cachetest.AwaitSeen(t, rdb, rdb, ns, "k")
		old, err := before.GetOrLoad(ctx, "k", cachetest.MustNotLoad[oldUser](t))
		cachetest.WantValue(t, old, err, ann)
	})
}

// So is a remembered ErrNotFound of a lower version.
func TestVersion_LowerNotFound(t *testing.T) {
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		_, before, after := versions(t, rdb, singlefill.Options[any]{})
		_, err := before.GetOrLoad(t.Context(), "k", cachetest.Fails[oldUser](singlefill.ErrNotFound))
		if err != singlefill.ErrNotFound {
			t.Fatal(err)
		}
		v, err := after.GetOrLoad(t.Context(), "k", cachetest.Gives(annMail))
		cachetest.WantValue(t, v, err, annMail)
	})
}

// An entry of a higher version is served. It is not refreshed early, since a process of its version would load it
// again. A stale one is replaced by any version, also after a rollback.
func TestVersion_Higher(t *testing.T) {
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		for kind, of := range cachetest.RefreshKinds {
			ns, before, _ := versions(t, rdb, singlefill.Options[any]{EarlyRefresh: 1, StaleWhileRevalidate: time.Hour, Codec: singlefill.JSON})
			e := of(`{"Name":"Ann","Mail":"ann@example.com"}`)
			e.Format, e.Version = entry.FormatOf("json"), 1
			cachetest.PutEntry(t, rdb, ns, "k", e, time.Hour)
			load := cachetest.MustNotLoad[oldUser](t)
			if kind == "stale" {
				load = cachetest.Gives(ann)
			}
			v, err := before.GetOrLoad(t.Context(), "k", load)
			cachetest.WantValue(t, v, err, ann)
			if kind == "stale" {
				redistest.Await(t, "the refresh", func() bool { return before.Stats().Loads == 1 })
				redistest.Await(t, "its entry", func() bool {
					_, e := cachetest.GetEntry(t, rdb, ns, "k")
					return e.Version == 0
				})
			} else if s := before.Stats(); s.Refreshes > 0 {
				t.Errorf("%s: %d refreshes", kind, s.Refreshes)
			}
		}
	})
}

// Memory serves no entry of a lower version, and does not refresh one of a higher version early.
func TestVersion_Near(t *testing.T) {
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		if cachetest.HitsMayBeLate(t) {
			t.Skip("New refuses Near with this client")
		}
		ctx := t.Context()
		_, before, after := versions(t, rdb, singlefill.Options[any]{Near: new(singlefill.Near)})
		redistest.Must(t, before.Set(ctx, "k", ann))
		cachetest.WantGet(t, after, "k", newUser{}, singlefill.ErrMiss)
		v, err := after.GetOrLoad(ctx, "k", cachetest.Gives(annMail))
		cachetest.WantValue(t, v, err, annMail)
		for range 3 {
			v, err = after.GetOrLoad(ctx, "k", cachetest.MustNotLoad[newUser](t))
			cachetest.WantValue(t, v, err, annMail)
		}
	})
}

// DeleteIf removes an entry of a higher version that a process of a lower one has been served.
func TestVersion_DeleteIf(t *testing.T) {
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		_, before, after := versions(t, rdb, singlefill.Options[any]{})
		redistest.Must(t, after.Set(ctx, "k", annMail))
		v, info, err := before.GetOrLoadInfo(ctx, "k", cachetest.MustNotLoad[oldUser](t))
		cachetest.WantValue(t, v, err, ann)
		if ok, err := before.DeleteIf(ctx, "k", info); !ok || err != nil {
			t.Errorf("DeleteIf returned %t, %v", ok, err)
		}
	})
}
