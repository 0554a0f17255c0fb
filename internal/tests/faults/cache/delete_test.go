package cache_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A Delete or Set without Redis returns an error, and later callers in its process load again.
//
//fault:unreachable-delete
func TestDelete_WithoutRedis(t *testing.T) {
	t.Parallel()
	for name, invalidate := range map[string]func(context.Context, *cachetest.Cache) error{
		"delete": func(ctx context.Context, c *cachetest.Cache) error { return c.Delete(ctx, "k") },
		"set":    func(ctx context.Context, c *cachetest.Cache) error { return c.Set(ctx, "k", "v1") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				link, rdb := redistest.StartMiniLink(t)
				link.BlackHole(true)
				c := cachetest.New(t, rdb, "ns", cachetest.Impatient)
				var version, loads atomic.Int64
				finish := make(chan struct{})
				load := func(context.Context, string) (string, error) {
					v := fmt.Sprintf("v%d", version.Load())
					if loads.Add(1) == 1 {
						<-finish
					}
					return v, nil
				}
				first := make(chan string)
				go func() {
					v, err := c.GetOrLoad(context.Background(), "k", load)
					if err != nil {
						t.Error(err)
					}
					first <- v
				}()
				time.Sleep(2 * cachetest.Impatient)
				if loads.Load() != 1 {
					t.Fatal("the first load has not begun")
				}

				version.Store(1)
				begun := time.Now()
				err := invalidate(t.Context(), c)
				if took := time.Since(begun); err == nil || took > cachetest.Impatient {
					t.Errorf("%s = %v after %v", name, err, took)
				}
				if v, err := c.GetOrLoad(t.Context(), "k", load); v != "v1" || err != nil {
					t.Errorf("the later caller got %q, %v", v, err)
				}
				close(finish)
				if v := <-first; v != "v0" {
					t.Errorf("the first caller got %q", v)
				}
			})
		})
	}
}

// A load that begins while a Set, Delete or Expire is being sent may be older than it, so later
// callers do not join the load.
//
//fault:failed-delete
func TestInvalidation_LoadDuringCommand(t *testing.T) {
	t.Parallel()
	for name, invalidate := range map[string]func(context.Context, *cachetest.Cache) error{
		"delete": func(ctx context.Context, c *cachetest.Cache) error { return c.Delete(ctx, "k") },
		"expire": func(ctx context.Context, c *cachetest.Cache) error { return c.Expire(ctx, "k") },
		"set":    func(ctx context.Context, c *cachetest.Cache) error { return c.Set(ctx, "k", "v1") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				link, rdb := redistest.StartMiniLink(t)
				link.BlackHole(true)
				c := cachetest.New(t, rdb, "ns", cachetest.Impatient)
				for i := 0; !c.Stats().BreakerOpen; i++ {
					c.MustLoad(fmt.Sprint("other", i))
				}
				done := make(chan error, 1)
				go func() { done <- invalidate(t.Context(), c) }()
				time.Sleep(cachetest.Impatient / 2) // the command has been sent
				finish := make(chan struct{})
				older := make(chan string, 1)
				go func() {
					v, err := c.GetOrLoad(t.Context(), "k", func(context.Context, string) (string, error) {
						<-finish
						return "older", nil
					})
					if err != nil {
						t.Error(err)
					}
					older <- v
				}()
				synctest.Wait()
				if err := <-done; err == nil || c.Stats().Loading != 1 {
					t.Fatalf("%s = %v, with %d loads running", name, err, c.Stats().Loading)
				}
				v, err := c.GetOrLoad(t.Context(), "k", func(context.Context, string) (string, error) { return "newer", nil })
				if v != "newer" || err != nil {
					t.Errorf("the later caller got %q, %v", v, err)
				}
				close(finish)
				if v := <-older; v != "older" {
					t.Errorf("the first caller got %q", v)
				}
			})
		})
	}
}

// A Delete of many keys without Redis takes RedisTimeout once, and its error comes at the caller's
// deadline at the latest.
//
//fault:unreachable-delete
//fault:delete-many
func TestDelete_ManyKeysWithoutRedis(t *testing.T) {
	t.Parallel()
	for _, n := range []int{200, 5000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				link, rdb := redistest.StartMiniLink(t)
				link.BlackHole(true)
				c := cachetest.New(t, rdb, "ns", cachetest.Impatient)
				var keys []string
				for i := range n {
					keys = append(keys, fmt.Sprint("k", i))
				}
				wantOnce := func(when string) {
					t.Helper()
					begun := time.Now()
					if err := c.Delete(t.Context(), keys...); err == nil || time.Since(begun) != cachetest.Impatient {
						t.Errorf("%s: Delete = %v after %v, want an error after %v", when, err, time.Since(begun), cachetest.Impatient)
					}
				}
				wantOnce("at first")
				ctx, cancel := context.WithTimeout(t.Context(), cachetest.Impatient/2)
				defer cancel()
				if err := c.Delete(ctx, keys...); err != context.DeadlineExceeded {
					t.Errorf("at the caller's deadline: %v", err)
				}
				for range 10 {
					begun := time.Now()
					if err := c.Delete(t.Context(), keys...); err == nil || time.Since(begun) > cachetest.Impatient {
						t.Errorf("Delete = %v after %v", err, time.Since(begun))
					}
				}
				if !c.Stats().BreakerOpen {
					t.Fatal("the breaker is closed")
				}
				wantOnce("with the breaker open")
				_ = c.Close()
				time.Sleep(time.Minute)
			})
		})
	}
}
