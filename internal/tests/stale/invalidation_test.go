package stale_test

import (
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

// A Delete, Set or Expire during a refresh wins, however the refresh ends.
//
//fault:delete-in-load
func TestRefresh_InvalidationWins(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		for kind := range cachetest.RefreshKinds {
			for how, leaves := range supersededLeaves {
				for _, where := range []string{"here", "elsewhere"} {
					for _, end := range []cachetest.Ending[string]{{Value: "v1", Err: nil}, {Value: notToBeKept, Err: nil}, {Value: "", Err: singlefill.ErrNotFound}, {Value: "", Err: errors.New("boom")}} {
						name := fmt.Sprintf("%s, %s %s, %v", kind, how, where, end)
						r := beginRefresh(t, rdb, look, cachetest.RefreshKinds[kind]("v0"))
						supersede(t, r.by(where), how)
						r.load.Ends <- end
						_ = r.Close()
						cachetest.WantStored(t, look, r.ns, "k", leaves)
						cachetest.WantUnlocked(t, look, r.ns, "k")
						if how == "Expire" {
							if _, e := cachetest.GetEntry(t, look, r.ns, "k"); !e.Expired {
								t.Errorf("%s: the entry is not expired any more", name)
							}
						}
						r.src.Want(t, 1)
						if s := r.Stats(); s.Refreshes != 1 || s.Stored != 0 || (end.Value == "v1") != (s.Fenced == 1) || s.RedisErrors != 0 {
							t.Errorf("%s: %+v, want one refresh, refused", name, s)
						}
						if lock, found := cachetest.Stored(t, look, r.ns+":{k}:lock"); found {
							t.Errorf("%s: the lock key holds %q", name, lock)
						}
					}
				}
			}
		}
	})
}

// expireKeys expires keys and waits until the client sees it: its own cache may be late.
func expireKeys(t testing.TB, c *singlefill.Cache[string], rdb, look redis.UniversalClient, ns string, keys ...string) {
	t.Helper()
	redistest.Must(t, c.Expire(t.Context(), keys...))
	for _, key := range keys {
		cachetest.AwaitSeen(t, rdb, look, ns, key)
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
			redistest.Must(t, c.Expire(t.Context(), test.keys...))
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
		c := cachetest.NewCache(t, rdb, opts)
		var keys []string
		for i := range 60 {
			keys = append(keys, fmt.Sprint(i))
			redistest.Must(t, c.Set(t.Context(), keys[i], "old"))
		}
		begun := time.Now()
		redistest.Must(t, c.Expire(t.Context(), keys...))
		if took := time.Since(begun); took < 2*opts.RedisTimeout {
			t.Errorf("Expire took %v, which shows nothing: it should take longer than RedisTimeout", took)
		}
		for _, key := range keys {
			if _, info, err := c.GetOrLoadInfo(t.Context(), key, cachetest.Gives("new")); !info.Stale || err != nil {
				t.Fatalf("%s after Expire: %+v, %v", key, info, err)
			}
		}
	})
}
