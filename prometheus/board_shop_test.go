package prometheus_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
	sfprometheus "github.com/singlefill/singlefill/prometheus"
)

// The role "shop" is a service with traffic of its own: products in memory and in Redis, carts that are
// changed while they are loaded, and jobs that take turns. Its source fails between the lines "fail" and
// "mend".
func init() {
	redistest.Role("shop", func(p *redistest.Child) {
		if err := serveShop(p); err != nil {
			p.Say("error %v", err)
		}
	})
}

var errSource = errors.New("the source is down")

func serveShop(p *redistest.Child) error {
	rdb := redis.NewClient(&redis.Options{Addr: p.Args[0], ContextTimeoutEnabled: true, DialTimeout: time.Second, DialerRetries: 1})
	defer rdb.Close()
	products, err := singlefill.New(rdb, "products", 2*time.Second, &singlefill.Options[string]{
		Near: &singlefill.Near{}, StaleWhileRevalidate: 2 * time.Second, StaleIfError: time.Hour, RetryAfter: -1, EarlyRefresh: -1, Audit: 0.1,
	})
	if err != nil {
		return err
	}
	defer products.Close()
	carts, err := singlefill.New[string](rdb, "carts", 200*time.Millisecond, nil)
	if err != nil {
		return err
	}
	defer carts.Close()
	jobs, err := lock.NewMutex(rdb, "jobs", nil)
	if err != nil {
		return err
	}
	collector := sfprometheus.NewCollector(products, carts)
	jobs.AddTrace(collector.LockTrace("jobs"))
	registry := prometheus.NewRegistry()
	registry.MustRegister(collector)

	var down atomic.Bool
	load := func(ctx context.Context, key string) (string, error) {
		if !sleep(ctx, time.Duration(5+rand.IntN(10))*time.Millisecond) {
			return "", ctx.Err()
		}
		if down.Load() {
			return "", errSource
		}
		return "value of " + key, nil
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var traffic sync.WaitGroup
	each := func(pause time.Duration, do func()) {
		traffic.Go(func() {
			for sleep(ctx, pause) {
				do()
			}
		})
	}
	for range 4 {
		each(2*time.Millisecond, func() { _, _ = products.GetOrLoad(ctx, key(50), load) })
		each(5*time.Millisecond, func() { _, _ = carts.GetOrLoad(ctx, key(20), load) })
	}
	each(20*time.Millisecond, func() { // a product has changed
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_ = products.Expire(ctx, key(50))
	})
	each(20*time.Millisecond, func() { // a cart changes while it is loaded
		_, _ = carts.GetOrLoad(ctx, key(20), func(ctx context.Context, key string) (string, error) {
			return "old", carts.Delete(ctx, key)
		})
	})
	for range 2 {
		each(10*time.Millisecond, func() {
			lease, err := jobs.Acquire(ctx)
			if err != nil {
				return
			}
			sleep(ctx, 20*time.Millisecond)
			_ = lease.Release(ctx)
		})
	}

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), ReadHeaderTimeout: time.Second}
	go server.Serve(listener) //nolint:errcheck // it ends with the process
	p.Say("metrics at %s", listener.Addr())
	for {
		line, ok := p.Next()
		if !ok {
			break
		}
		down.Store(line == "fail")
	}
	stop()
	traffic.Wait()
	return server.Close()
}

func key(n int) string { return strconv.Itoa(rand.IntN(n)) }

// sleep sleeps for d, and reports whether ctx goes on.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
