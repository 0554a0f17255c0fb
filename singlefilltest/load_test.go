package singlefilltest_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/lock"
	"github.com/singlefill/singlefill/singlefilltest"
)

// A handler that many requests meet at once finds a Redis that answers: with cold keys, with Near, with
// calls for many keys and with locks, in a bubble and in real time.
//
//fault:kit-load
func TestRedis_Load(t *testing.T) {
	const goroutines = 50
	const rounds = 8                  // a miniredis takes a millisecond for a script, and ten with -race
	const patience = 10 * time.Second // in real time the machine may be slow
	type calling = func(ctx context.Context, key string) error
	caching := func(near *singlefill.Near, call func(context.Context, *singlefill.Cache[string], string) (string, error)) func(*testing.T, *redis.Client) calling {
		return func(t *testing.T, rdb *redis.Client) calling {
			cache := newCache(t, rdb, &singlefill.Options[string]{
				RedisTimeout: patience, LockTTL: 10 * patience, LoadTimeout: 20 * patience, Near: near,
			})
			return func(ctx context.Context, key string) error {
				v, err := call(ctx, cache, key)
				if err == nil && v != key {
					err = fmt.Errorf("got %q", v)
				}
				return err
			}
		}
	}
	one := func(ctx context.Context, cache *singlefill.Cache[string], key string) (string, error) {
		return cache.GetOrLoad(ctx, key, func(context.Context, string) (string, error) { return key, nil })
	}
	many := func(ctx context.Context, cache *singlefill.Cache[string], key string) (string, error) {
		values, err := cache.GetOrLoadMany(ctx, []string{key, key + "'"}, func(context.Context, []string) (map[string]string, error) {
			return map[string]string{key: key, key + "'": key}, nil
		})
		return values[key], err
	}
	locking := func(_ *testing.T, rdb *redis.Client) calling {
		return func(ctx context.Context, key string) error {
			mutex, err := lock.NewMutex(rdb, key, &lock.Options{RedisTimeout: patience, TTL: 10 * patience})
			if err != nil {
				return err
			}
			return mutex.Do(ctx, func(context.Context) error { return nil })
		}
	}
	for name, variant := range map[string]func(*testing.T, *redis.Client) calling{
		"GetOrLoad": caching(nil, one), "Near": caching(&singlefill.Near{}, one), "GetOrLoadMany": caching(nil, many), "lock": locking,
	} {
		t.Run(name, func(t *testing.T) {
			both(t, func(t *testing.T) {
				var call calling
				for round := range rounds {
					if round%4 == 0 { // another client, whose connections are all dialled at once
						call = variant(t, singlefilltest.Redis(t))
					}
					var calls sync.WaitGroup
					for g := range goroutines {
						calls.Go(func() {
							if err := call(t.Context(), fmt.Sprint(round, " ", g)); err != nil {
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
