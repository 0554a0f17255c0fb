package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A ManyLoader that never returns costs the keys that it was called for LoadTimeout. A key of the same
// call that has waited for another process is loaded after that.
func TestGetOrLoadMany_HangingLoader(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		opts := cachetest.Raw
		opts.RedisTimeout, opts.LockTTL, opts.LoadTimeout = time.Second, 5*time.Second, 12*time.Second
		c := cachetest.NewCacheIn(t, rdb, ns, &opts)
		other := cachetest.NewCacheIn(t, redistest.NewMiniClient(t, m), ns, &cachetest.Raw)
		src := cachetest.NewSource[string](t)
		elsewhere := cachetest.GoGet(t.Context(), other, "waits", src.Load)
		held := src.Next(t)

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		hang := make(chan struct{})
		done := make(chan struct{})
		go func() {
			defer close(done)
			values, err := c.GetOrLoadMany(ctx, []string{"hangs", "waits"}, func(_ context.Context, keys []string) (map[string]string, error) {
				if slices.Contains(keys, "hangs") {
					<-hang
				}
				return map[string]string{"waits": "v2"}, nil
			})
			var many *singlefill.ManyError
			if !errors.As(err, &many) || len(many.Errs) != 1 || !errors.Is(many.Errs["hangs"], context.DeadlineExceeded) {
				t.Errorf("err = %v, want that of LoadTimeout for one key", err)
			}
			if ctx.Err() != nil || values["waits"] != "v2" {
				t.Errorf("values = %v, ctx.Err() = %v", values, ctx.Err())
			}
		}()
		time.Sleep(13 * time.Second)
		if err := other.Delete(t.Context(), "waits"); err != nil {
			t.Error(err)
		}
		<-done
		close(hang)
		held.Give("v1")
		elsewhere.Want(t, "v1")
		synctest.Wait()
	})
}

// An error of the ManyLoader that wraps ErrNotFound is remembered, and is no error of the call. A panic
// with such an error is a failure.
func TestGetOrLoadMany_WrappedNotFound(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &cachetest.Raw)
		wrapped := fmt.Errorf("no row: %w", singlefill.ErrNotFound)
		values, err := c.GetOrLoadMany(t.Context(), []string{"a", "b"}, func(context.Context, []string) (map[string]string, error) {
			return nil, wrapped
		})
		if len(values) != 0 || err != nil {
			t.Errorf("got %v, %v for what does not exist", values, err)
		}
		if _, err := c.Get(t.Context(), "a"); err != singlefill.ErrNotFound {
			t.Errorf("Get = %v, want ErrNotFound", err)
		}

		_, err = c.GetOrLoadMany(t.Context(), []string{"c", "d"}, func(context.Context, []string) (map[string]string, error) {
			panic(wrapped)
		})
		if _, panicked := errors.AsType[*singlefill.PanicError](err); !panicked {
			t.Errorf("err = %v, want a PanicError", err)
		}
		if _, err := c.Get(t.Context(), "c"); err != singlefill.ErrMiss {
			t.Errorf("Get after a panic = %v, want ErrMiss", err)
		}
	})
}
