package singlefilltest_test

import (
	"context"
	"flag"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/lock"
	"github.com/singlefill/singlefill/singlefilltest"
)

// The number of rounds is small, since a miniredis takes a millisecond for a script, and ten with -race.
var rounds = flag.Int("rounds", 8, "rounds of TestRedis_Load, of 50 calls at once")

// A handler that many requests meet at once finds a Redis that answers: with cold keys, with Near, with
// calls for many keys and with locks, in a bubble and in real time.
//
//fault:kit-load
func TestRedis_Load(t *testing.T) {
	const goroutines = 50
	const patience = 10 * time.Second // in real time the machine may be slow
	load := func(_ context.Context, key string) (string, error) { return key, nil }
	loadMany := func(_ context.Context, keys []string) (map[string]string, error) {
		found := make(map[string]string, len(keys))
		for _, key := range keys {
			found[key] = key
		}
		return found, nil
	}
	caching := func(opts *singlefill.Options[string], call func(ctx context.Context, cache *singlefill.Cache[string], key string) (string, error)) func(*testing.T, *redis.Client) func(string) error {
		return func(t *testing.T, rdb *redis.Client) func(key string) error {
			cache := newCache(t, rdb, opts)
			return func(key string) error {
				v, err := call(t.Context(), cache, key)
				if err == nil && v != key {
					err = fmt.Errorf("got %q", v)
				}
				return err
			}
		}
	}
	one := func(ctx context.Context, cache *singlefill.Cache[string], key string) (string, error) {
		return cache.GetOrLoad(ctx, key, load)
	}
	for name, variant := range map[string]func(*testing.T, *redis.Client) func(key string) error{
		"GetOrLoad": caching(&singlefill.Options[string]{RedisTimeout: patience, LockTTL: 10 * patience, LoadTimeout: 20 * patience}, one),
		"Near":      caching(&singlefill.Options[string]{RedisTimeout: patience, LockTTL: 10 * patience, LoadTimeout: 20 * patience, Near: &singlefill.Near{}}, one),
		"GetOrLoadMany": caching(&singlefill.Options[string]{RedisTimeout: patience, LockTTL: 10 * patience, LoadTimeout: 20 * patience}, func(ctx context.Context, cache *singlefill.Cache[string], key string) (string, error) {
			values, err := cache.GetOrLoadMany(ctx, []string{key, key + "'"}, loadMany)
			return values[key], err
		}),
		"lock": func(t *testing.T, rdb *redis.Client) func(key string) error {
			return func(key string) error {
				mutex, err := lock.NewMutex(rdb, key, &lock.Options{RedisTimeout: patience, TTL: 10 * patience})
				if err != nil {
					return err
				}
				lease, err := mutex.Acquire(t.Context())
				if err != nil {
					return err
				}
				return lease.Release(t.Context())
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			both(t, func(t *testing.T) {
				var call func(key string) error
				for round := range *rounds {
					if round%4 == 0 { // another client, whose connections are all dialled at once
						call = variant(t, singlefilltest.Redis(t))
					}
					var calls sync.WaitGroup
					for g := range goroutines {
						calls.Go(func() {
							if err := call(fmt.Sprint(round, " ", g)); err != nil {
								t.Errorf("round %d: %v", round, err)
							}
						})
					}
					calls.Wait()
					if t.Failed() {
						return
					}
				}
			})
		})
	}
}
