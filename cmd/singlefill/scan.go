package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/masters"
)

// mastersOf returns a client of each server that has a part of the keys.
func mastersOf(ctx context.Context, rdb redis.UniversalClient) (all []*redis.Client, err error) {
	cluster, ok := rdb.(*redis.ClusterClient)
	if !ok {
		return []*redis.Client{rdb.(*redis.Client)}, nil
	}
	var mu sync.Mutex
	err = cluster.ForEachMaster(ctx, func(_ context.Context, master *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, master)
		return nil
	})
	return all, err
}

// scan calls each for the keys that match a pattern, on one master after the other. A key that moves
// at that time may come twice, or not at all.
func (x *execution) scan(ctx context.Context, pattern string, each func(keys []string) error) error {
	all, err := mastersOf(ctx, x.rdb)
	if err != nil {
		return err
	}
	var total, scanned int64
	for _, master := range all {
		size, err := master.DBSize(ctx).Result()
		if err != nil {
			return err
		}
		total += size
	}
	defer x.clearProgress()
	for _, master := range all {
		for cursor := uint64(0); ; {
			keys, next, err := master.Scan(ctx, cursor, pattern, masters.ScanCount).Result()
			if err != nil {
				return err
			}
			if len(keys) > 0 {
				if err := each(keys); err != nil {
					return err
				}
			}
			scanned = min(scanned+masters.ScanCount, total)
			x.showProgress("%d of %d keys looked at", scanned, total)
			if cursor = next; cursor == 0 {
				break
			}
		}
	}
	return nil
}

// showProgress replaces the line on a terminal, at most ten times a second.
func (x *execution) showProgress(format string, args ...any) {
	if x.progress && time.Since(x.shown) >= time.Second/10 {
		x.shown = time.Now()
		fmt.Fprintf(x.stderr, "\r\x1b[K"+format, args...)
	}
}

func (x *execution) clearProgress() {
	if x.progress {
		fmt.Fprint(x.stderr, "\r\x1b[K")
	}
}

// userKey is the reverse of value.Key.
func userKey(namespace, valueKey string) string {
	return client.Untag(strings.TrimSuffix(strings.TrimPrefix(valueKey, namespace+":{"), "}"))
}
