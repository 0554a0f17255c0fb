package bench

import (
	"context"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// BenchmarkTried compares ways to bound the time of one GET.
func BenchmarkTried(b *testing.B) {
	b.Run("a_bound_on_each_GET/serial", func(b *testing.B) { bounds(b, 0) })
	b.Run("a_bound_on_each_GET/64_goroutines", func(b *testing.B) { bounds(b, 64) })
}

func bounds(b *testing.B, goroutines int) {
	addr := redistest.Start(b).Addr
	rdb := open(b, addr)
	h := newHits(b, goroutines, max(1, goroutines), 100)
	const limit = 500 * time.Millisecond
	r := race{ops: 200, goroutines: goroutines, bases: []string{"floor"}, contenders: []contender{
		h.floor(rdb),
		{"a context with a timer", func(i int) error {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(h.ctx(i)), limit)
			defer cancel()
			_, err := getAndDecode(ctx, rdb, "floor:"+h.key(i))
			return err
		}},
		{"a goroutine, a context with a timer", func(i int) error {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(h.ctx(i)), limit)
			defer cancel()
			replies := make(chan error, 1)
			go func() {
				_, err := getAndDecode(ctx, rdb, "floor:"+h.key(i))
				replies <- err
			}()
			select {
			case err := <-replies:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}},
		h.singlefill("singlefill, timers shared", newCache[order](b, rdb)),
		h.singlefill("singlefill, default client", newCache[order](b, open(b, addr, unbounded))),
	}}
	if goroutines > 0 {
		r.ops = goroutines * 16
	}
	r.run(b)
}
