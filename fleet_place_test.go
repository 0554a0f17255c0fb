package singlefill_test

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

func TestALoadGivesItsPlaceInTheFleetBackHoweverItEnds(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{MaxFleetLoads: 1})
		for how, load := range map[string]singlefill.Loader[string]{
			"a value":   gives("v"),
			"an error":  fails[string](errors.New("boom")),
			"not found": fails[string](singlefill.ErrNotFound),
			"a panic":   func(context.Context, string) (string, error) { panic("boom") },
			"Goexit":    func(context.Context, string) (string, error) { runtime.Goexit(); return "", nil },
			"a timeout": func(ctx context.Context, _ string) (string, error) { <-ctx.Done(); return "", ctx.Err() },
		} {
			_, _ = c.GetOrLoad(t.Context(), how, load)
			synctest.Wait()
			if n, err := rdb.Exists(t.Context(), "{"+ns+":loads}:lock").Result(); n != 0 || err != nil {
				t.Errorf("after %s the place is still held, %v", how, err)
			}
		}
	})
}
