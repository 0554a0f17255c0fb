package singlefill_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

func TestSmoke(t *testing.T) {
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c, err := singlefill.New[string](rdb, t.Name(), time.Minute, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		var loads atomic.Int64
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				v, err := c.GetOrLoad(context.Background(), "k", func(ctx context.Context, key string) (string, error) {
					loads.Add(1)
					time.Sleep(50 * time.Millisecond)
					return "v:" + key, nil
				})
				if v != "v:k" || err != nil {
					t.Error(v, err)
				}
			})
		}
		wg.Wait()
		if loads.Load() != 1 {
			t.Error("loads", loads.Load())
		}
		t.Logf("%+v", c.Stats())
		if err := c.Delete(t.Context(), "k"); err != nil {
			t.Error(err)
		}
		if _, err := c.Get(t.Context(), "k"); !errors.Is(err, singlefill.ErrMiss) {
			t.Error(err)
		}
		boom := errors.New("boom")
		if _, err := c.GetOrLoad(t.Context(), "e", func(ctx context.Context, key string) (string, error) { return "", boom }); err != boom {
			t.Error(err)
		}
		if err := c.Set(t.Context(), "e", "x"); err != nil {
			t.Error(err)
		}
		if v, err := c.Get(t.Context(), "e"); v != "x" || err != nil {
			t.Error(v, err)
		}
	})
}
func TestMain(m *testing.M) { redistest.Main(m) }
