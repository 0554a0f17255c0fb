package main

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"golang.org/x/sync/singleflight"
)

// A getter returns the value of a key: a load is a getter, and so is a cache in front of it.
type getter = func(ctx context.Context, key string) (string, error)

// contenders are the ways to save loads. Each opens a cache, and returns what closes it.
var contenders = []struct {
	name  string
	open  func(rdb *redis.Client, namespace string, ttl time.Duration, load getter) (getter, func() error, error)
	color string // class in the picture
}{
	{"singleflight alone", inEachProcess, "c3"},
	{"SET NX by hand", byHand, "c1"},
	{"singlefill", inTheFleet, "c0"},
}

// inEachProcess loads once in each process.
func inEachProcess(rdb *redis.Client, namespace string, ttl time.Duration, load getter) (getter, func() error, error) {
	var flights singleflight.Group
	get := func(ctx context.Context, key string) (string, error) {
		v, err, _ := flights.Do(key, func() (any, error) {
			v, err := rdb.Get(ctx, namespace+":"+key).Result()
			if !errors.Is(err, redis.Nil) {
				return v, err
			}
			if v, err = load(ctx, key); err != nil {
				return "", err
			}
			return v, rdb.Set(ctx, namespace+":"+key, v, ttl).Err()
		})
		return v.(string), err
	}
	return get, func() error { return nil }, nil
}

// byHand is the lock that is often written: it loads once, unless a load takes longer than the lock
// lives. Then a caller deletes the lock of another.
func byHand(rdb *redis.Client, namespace string, ttl time.Duration, load getter) (getter, func() error, error) {
	get := func(ctx context.Context, key string) (string, error) {
		name, lock := namespace+":"+key, namespace+":lock:"+key
		for {
			v, err := rdb.Get(ctx, name).Result()
			if !errors.Is(err, redis.Nil) {
				return v, err
			}
			err = rdb.SetArgs(ctx, lock, "locked", redis.SetArgs{Mode: "NX", TTL: ttl}).Err()
			if err != nil && !errors.Is(err, redis.Nil) {
				return "", err
			}
			if err != nil { // another process has it
				time.Sleep(20 * time.Millisecond)
				continue
			}
			defer rdb.Del(ctx, lock)
			if v, err = rdb.Get(ctx, name).Result(); !errors.Is(err, redis.Nil) {
				return v, err // stored since the first GET
			}
			if v, err = load(ctx, key); err != nil {
				return "", err
			}
			return v, rdb.Set(ctx, name, v, ttl).Err()
		}
	}
	return get, func() error { return nil }, nil
}

// inTheFleet loads once in all processes.
func inTheFleet(rdb *redis.Client, namespace string, ttl time.Duration, load getter) (getter, func() error, error) {
	cache, err := singlefill.New[string](rdb, namespace, ttl, nil)
	if err != nil {
		return nil, nil, err
	}
	get := func(ctx context.Context, key string) (string, error) { return cache.GetOrLoad(ctx, key, load) }
	return get, cache.Close, nil
}
