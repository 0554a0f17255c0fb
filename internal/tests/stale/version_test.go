package stale_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
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

// An entry of a lower version, or an ErrNotFound that was remembered by it, is a miss for each call. It is loaded once
// and replaced, and the old program then gets the new entry.
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
		redistest.Must(t, errors.Join(before.Set(ctx, "lower", ann), after.Set(ctx, "own", annMail)))
		all, err := after.GetOrLoadMany(ctx, []string{"lower", "own"}, func(_ context.Context, keys []string) (map[string]newUser, error) {
			if !slices.Equal(keys, []string{"lower"}) {
				t.Errorf("GetOrLoadMany loads %q", keys)
			}
			return map[string]newUser{"lower": annMail}, nil
		})
		if want := map[string]newUser{"lower": annMail, "own": annMail}; err != nil || !maps.Equal(all, want) {
			t.Errorf("GetOrLoadMany returned %v, %v", all, err)
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

		if _, err = before.GetOrLoad(ctx, "none", cachetest.Fails[oldUser](singlefill.ErrNotFound)); err != singlefill.ErrNotFound {
			t.Fatal(err)
		}
		v, err = after.GetOrLoad(ctx, "none", cachetest.Gives(annMail))
		cachetest.WantValue(t, v, err, annMail)
	})
}

// A new process that has waited for the load of an old one does not get its value: it loads, once.
func TestVersion_LowerWhileWaiting(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		ns, before, after := versions(t, rdb, singlefill.Options[any]{})
		var loads cachetest.Count
		load := func(context.Context, string) (newUser, error) { defer loads.Begin()(); return annMail, nil }
		old := cachetest.GoGet(t.Context(), before, "k", cachetest.Takes(time.Second, ann, nil))
		synctest.Wait()
		calls := []*cachetest.Call[newUser]{cachetest.GoGet(t.Context(), after, "k", load), cachetest.GoGet(t.Context(), after, "k", load)}
		old.Want(t, ann)
		for _, call := range calls {
			call.Want(t, annMail)
		}
		loads.WantLoads(t, "the new process", 1)
		wantVersion(t, rdb, ns, "k", 1)
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
			load := cachetest.Gives(ann)
			if kind != "stale" {
				e.FreshUntil = time.Now().Add(time.Hour) // so that it is not stale however slow the machine is
				load = cachetest.MustNotLoad[oldUser](t)
			}
			cachetest.PutEntry(t, rdb, ns, "k", e, time.Hour)
			v, err := before.GetOrLoad(t.Context(), "k", load)
			cachetest.WantValue(t, v, err, ann)
			if kind == "stale" {
				redistest.Await(t, "the refresh", func() bool { return before.Stats().Loads == 1 })
				redistest.Await(t, "its entry", func() bool {
					_, e := cachetest.GetEntry(t, rdb, ns, "k")
					return e.Version == 0
				})
				continue
			}
			if s := before.Stats(); s.Refreshes > 0 {
				t.Errorf("%s: %d refreshes", kind, s.Refreshes)
			}
			redistest.Must(t, before.Expire(t.Context(), "k"))
			wantVersion(t, rdb, ns, "k", 1)
		}
	})
}

// Memory serves no entry of a lower version, and does not refresh one of a higher version early.
func TestVersion_Near(t *testing.T) {
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		if cachetest.HitsMayBeLate(t) {
			return // New refuses Near with this client
		}
		ctx := t.Context()
		ns, before, after := versions(t, rdb, singlefill.Options[any]{EarlyRefresh: 1, Near: new(singlefill.Near), Codec: singlefill.JSON})
		redistest.Must(t, before.Set(ctx, "k", ann))
		cachetest.WantGet(t, after, "k", newUser{}, singlefill.ErrMiss)
		v, err := after.GetOrLoad(ctx, "k", cachetest.Gives(annMail))
		cachetest.WantValue(t, v, err, annMail)
		for range 3 {
			v, err = after.GetOrLoad(ctx, "k", cachetest.MustNotLoad[newUser](t))
			cachetest.WantValue(t, v, err, annMail)
		}
		e := cachetest.RefreshKinds["early"](`{"Name":"Ann","Mail":"ann@example.com"}`)
		e.Format, e.Version, e.FreshUntil = entry.FormatOf("json"), 1, time.Now().Add(time.Hour)
		cachetest.PutEntry(t, rdb, ns, "early", e, time.Hour)
		redistest.Await(t, "a hit in memory", func() bool {
			v, err := before.GetOrLoad(ctx, "early", cachetest.MustNotLoad[oldUser](t))
			cachetest.WantValue(t, v, err, ann)
			return before.Stats().NearHits > 0
		})
		if s := before.Stats(); s.Refreshes > 0 {
			t.Errorf("%d refreshes", s.Refreshes)
		}
	})
}

// An audit of an entry of a higher version compares the fields that T has.
func TestVersion_Audit(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		before := newAuditor(t, rdb, singlefill.Options[oldUser]{})
		after := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[newUser]{Version: 1})
		redistest.Must(t, after.Set(t.Context(), "k", annMail))
		before.hit(t, "k", cachetest.Gives(ann))
		before.want(t, singlefill.AuditInfo{Key: "k"})
		before.hit(t, "k", cachetest.Gives(oldUser{"Anne"}))
		before.want(t, singlefill.AuditInfo{Key: "k"}, singlefill.AuditInfo{Key: "k", Stale: true, Age: 2 * time.Second})
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
