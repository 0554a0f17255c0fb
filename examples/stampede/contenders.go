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

// contenders are the ways to save loads.
var contenders = []struct {
	name  string
	open  func(rdb *redis.Client, namespace string, ttl time.Duration, load getter) (get getter, close func() error, err error)
	class string // in the picture
	color string // on a terminal
}{
	{"no protection", unprotected, "c1", "33"},
	{"singleflight alone", inEachProcess, "c3", "35"},
	{"singlefill", inTheFleet, "c0", "36"},
}

func unprotected(rdb *redis.Client, namespace string, ttl time.Duration, load getter) (getter, func() error, error) {
	get := func(ctx context.Context, key string) (string, error) {
		v, err := rdb.Get(ctx, byHand(namespace, key)).Result()
		if !errors.Is(err, redis.Nil) {
			return v, err
		}
		if v, err = load(ctx, key); err != nil {
			return "", err
		}
		return v, rdb.Set(ctx, byHand(namespace, key), v, ttl).Err()
	}
	return get, func() error { return nil }, nil
}

func inEachProcess(rdb *redis.Client, namespace string, ttl time.Duration, load getter) (getter, func() error, error) {
	get, done, err := unprotected(rdb, namespace, ttl, load)
	var flights singleflight.Group
	once := func(ctx context.Context, key string) (string, error) {
		v, err, _ := flights.Do(key, func() (any, error) { return get(ctx, key) })
		return v.(string), err
	}
	return once, done, err
}

func inTheFleet(rdb *redis.Client, namespace string, ttl time.Duration, load getter) (getter, func() error, error) {
	cache, err := singlefill.New[string](rdb, namespace, ttl, nil)
	if err != nil {
		return nil, nil, err
	}
	get := func(ctx context.Context, key string) (string, error) { return cache.GetOrLoad(ctx, key, load) }
	return get, cache.Close, nil
}

func byHand(namespace, key string) string { return namespace + ":" + key }

// forget deletes the keys that a contender may have left in its namespace.
func forget(ctx context.Context, rdb *redis.Client, namespace string, keys []string) error {
	cache, err := singlefill.New[string](rdb, namespace, time.Minute, nil)
	if err != nil {
		return err
	}
	defer cache.Close()
	var names []string
	for _, key := range keys {
		names = append(names, byHand(namespace, key))
	}
	return errors.Join(rdb.Del(ctx, names...).Err(), cache.Delete(ctx, keys...))
}
