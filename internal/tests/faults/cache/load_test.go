package cache_test

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Without Redis each process loads a key once at a time, and all its callers get the value.
//
//fault:unreachable
func TestLoad_WithoutRedis(t *testing.T) {
	t.Parallel()
	const processes, callers = 4, 100
	synctest.Test(t, func(t *testing.T) {
		link, rdb := redistest.StartMiniLink(t)
		link.BlackHole(true)
		var caches []*cachetest.Cache
		for range processes {
			c := cachetest.New(t, rdb, "ns", cachetest.Impatient)
			c.During = func(string) { time.Sleep(time.Second) }
			caches = append(caches, c)
		}
		begun := time.Now()
		var wg sync.WaitGroup
		for _, c := range caches {
			for range callers {
				wg.Go(func() { c.MustLoad("k") })
			}
		}
		wg.Wait()
		if took := time.Since(begun); took != cachetest.Impatient+time.Second {
			t.Errorf("took %v, want RedisTimeout and one load", took)
		}
		for _, c := range caches {
			c.WantLoads(1)
		}
		for range callers { // one after another: they join the load that runs
			for _, c := range caches {
				wg.Go(func() { c.MustLoad("k") })
			}
			time.Sleep(30 * time.Millisecond)
		}
		wg.Wait()
		for _, c := range caches {
			if most := c.Most.Load(); most != 1 {
				t.Errorf("%d loads of one key ran at a time in one process", most)
			}
			if n := c.Loads.Load(); n > 4 {
				t.Errorf("%d loads in 4 s at 1 s each", n)
			}
		}
	})
}

// MaxLoads holds without Redis.
//
//fault:unreachable
func TestMaxLoads_WithoutRedis(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		link, rdb := redistest.StartMiniLink(t)
		link.BlackHole(true)
		c := cachetest.New(t, rdb, "ns", cachetest.Impatient, func(o *singlefill.Options[string]) { o.MaxLoads = 3 })
		c.During = func(string) { time.Sleep(100 * time.Millisecond) }
		begun := time.Now()
		var wg sync.WaitGroup
		for i := range 60 {
			wg.Go(func() { c.WantValue(fmt.Sprintf("k%d", i)) })
		}
		wg.Wait()
		if most := c.Most.Load(); most != 3 {
			t.Errorf("%d loads ran at a time, MaxLoads is 3", most)
		}
		if took, want := time.Since(begun), cachetest.Impatient+20*100*time.Millisecond; took != want {
			t.Errorf("took %v, want %v", took, want)
		}
		c.WantLoads(60)
	})
}
