package bench

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

func BenchmarkZZ(b *testing.B) {
	rdb := open(b, redistest.Start(b).Addr)
	value := orderOf(100)
	c := newMissCache(b, rdb)
	query := func(_ context.Context, keys []string) (map[string]order, error) {
		time.Sleep(10 * time.Millisecond)
		values := make(map[string]order, len(keys))
		for _, key := range keys {
			values[key] = value
		}
		return values, nil
	}
	for b.Loop() {
		keys, call := make([]string, manyKeysOfACall), rand.Text()
		for i := range keys {
			keys[i] = fmt.Sprint(call, ":", i)
		}
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				if err := complete(c.GetOrLoadMany(ctx, keys, query)); err != nil {
					b.Error(err)
				}
			})
		}
		all.Wait()
	}
}
