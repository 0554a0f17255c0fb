package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
)

// caches are all caches of the service.
type caches struct {
	products *singlefill.Cache[Product]
	catalog  *singlefill.Cache[Catalog] // under one key
}

const catalogKey = "all"

// ofProducts is the tag of what is made of all products: who changes one need not know its keys.
const ofProducts = "products"

// settings are what the caches have in common.
func settings() *singlefill.Options[any] {
	return &singlefill.Options[any]{
		RedisTimeout:         200 * time.Millisecond,
		LockTTL:              time.Second, // half of the deadline of a request, which outlives a holder that dies
		StaleWhileRevalidate: time.Minute,
		StaleIfError:         time.Hour, // a database that is down takes no reader along
		Errors:               map[string]error{"overloaded": errOverloaded},
		Trace:                singlefill.LogTrace(slog.Default(), nil),
	}
}

func openCaches(rdb redis.UniversalClient, shared *singlefill.Options[any]) (*caches, error) {
	forProducts := singlefill.OptionsFor[Product](shared)
	forProducts.Near = &singlefill.Near{MaxLag: time.Second}
	products, err := singlefill.New(rdb, "products", 10*time.Minute, forProducts)
	if err != nil {
		return nil, err
	}
	forCatalog := singlefill.OptionsFor[Catalog](shared)
	forCatalog.Tags = func(string, Catalog) []string { return []string{ofProducts} }
	catalog, err := singlefill.New(rdb, "catalog", time.Minute, forCatalog)
	if err != nil {
		return nil, err
	}
	return &caches{products, catalog}, nil
}

// check tries the rights of the Redis user when the service starts. It works without them, so what is
// missing is an error in the log. An operator, not a probe, has to act on it.
func (c *caches) check(ctx context.Context) error {
	return errors.Join(c.products.Check(ctx), c.catalog.Check(ctx))
}

// changed removes products that have changed. What is made of all of them is only made stale: it is
// refreshed behind the next reader. (The first ExpireTag of a namespace reads all of its values, to know their tags.)
func (c *caches) changed(ctx context.Context, ids ...string) error {
	return errors.Join(c.products.Delete(ctx, ids...), c.catalog.ExpireTag(ctx, ofProducts))
}

// clear is for the day on which everything has changed, such as after an import.
func (c *caches) clear(w http.ResponseWriter, r *http.Request) {
	if err := errors.Join(c.products.Clear(r.Context()), c.catalog.Clear(r.Context())); err != nil {
		slog.Error("not all is cleared: try again", "err", err)
		http.Error(w, "not all is cleared, try again", http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// shutdown waits until ctx ends for loads that outlive their requests, and stores their values. Then it leaves the
// keys to other processes.
func (c *caches) shutdown(ctx context.Context) {
	var all sync.WaitGroup
	all.Go(func() { _ = c.products.Shutdown(ctx) })
	all.Go(func() { _ = c.catalog.Shutdown(ctx) })
	all.Wait()
}
