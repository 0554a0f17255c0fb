package stale_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
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
					for _, end := range []cachetest.Ending[string]{{Value: "v1", Err: nil}, {Value: notToBeKept, Err: nil}, {Value: "", Err: singlefill.ErrNotFound}, {Value: "", Err: errors.New("boom")}, {Err: errForbidden}} {
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
