package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/go-redis/cache/v9"
	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
	"github.com/vmihailenco/msgpack/v5"
)

// BenchmarkMiss measures misses with a load that costs nothing, so that the cost of locking
// remains.
func BenchmarkMiss(b *testing.B) {
	for _, size := range sizes {
		b.Run("serial/"+size.name, func(b *testing.B) { misses(b, 0, size.bytes) })
	}
	b.Run("64_goroutines/2KB", func(b *testing.B) { misses(b, 64, 2<<10) })
	b.Run("20,000_goroutines/100B", func(b *testing.B) { misses(b, 20_000, 100) }) // at once
}

// missTTL keeps the server small.
const missTTL = 10 * time.Second

func newMissCache(b *testing.B, rdb *redis.Client) *singlefill.Cache[order] {
	c := must(singlefill.New[order](rdb, "orders", missTTL, nil))
	b.Cleanup(func() { _ = c.Close() })
	return c
}

func misses(b *testing.B, goroutines, size int) {
	rdb := open(b, redistest.Start(b).Addr)
	value := orderOf(size)
	ctx := request(b)
	newKey := func() string { return rand.Text() }

	c := newMissCache(b, rdb)
	peer := cache.New(&cache.Options{Redis: rdb})

	r := race{ops: 50, goroutines: goroutines, bases: []string{"three by hand", "so in a goroutine"}, contenders: []contender{
		{"three by hand", func(int) error {
			key := newKey()
			return errors.Join(getNothing(ctx, rdb, key), lockAndStore(ctx, rdb, key, value))
		}},
		{"so in a goroutine", func(int) error {
			key := newKey()
			if err := getNothing(ctx, rdb, key); err != nil {
				return err
			}
			done := make(chan error, 1)
			go func() { done <- lockAndStore(ctx, rdb, key, value) }()
			select {
			case err := <-done:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}},
		{"singlefill", func(int) error {
			_, err := c.GetOrLoad(ctx, newKey(), func(context.Context, string) (order, error) { return value, nil })
			return err
		}},
		{"GET, SET", func(int) error {
			key := newKey()
			if err := rdb.Get(ctx, key).Err(); err != redis.Nil {
				return err
			}
			return rdb.Set(ctx, key, must(msgpack.Marshal(&value)), missTTL).Err()
		}},
		{"go-redis/cache", func(int) error {
			var v order
			return peer.Once(&cache.Item{Ctx: ctx, Key: newKey(), Value: &v, TTL: missTTL,
				Do: func(*cache.Item) (any, error) { return &value, nil }})
		}},
	}}
	if goroutines > 0 {
		r.ops = max(64*8, goroutines)
	}
	r.run(b)
}

func script(name string) *redis.Script {
	return redis.NewScript(wake.Lua + string(must(os.ReadFile("../internal/filllock/lua/"+name+".lua"))))
}

var getOrLock, store = script("get_or_lock"), script("store")

// endless is the time of the server up to which a caller waits for its lock.
const endless = int64(1) << 62

// getNothing and lockAndStore send what a GetOrLoad sends on a miss, with only the client: the same
// three commands with the same scripts, a token and a stamp, and an entry of the same format. A
// load that continues when its caller leaves needs its own goroutine in any implementation.
func getNothing(ctx context.Context, rdb *redis.Client, key string) error {
	if err := rdb.Get(ctx, byHand(key)).Err(); err != redis.Nil {
		return fmt.Errorf("a miss was a hit, or %w", err)
	}
	return nil
}

func lockAndStore(ctx context.Context, rdb *redis.Client, key string, value order) error {
	keys := []string{byHand(key), byHand(key) + ":lock"}
	token := rand.Text()
	fields, err := getOrLock.Run(ctx, rdb, keys, token, 5000, "", "", "1", "", endless).Slice()
	if err != nil {
		return err
	}
	if fields[0] != "locked" {
		return fmt.Errorf("the lock was not granted: %v", fields)
	}
	stored, err := store.Run(ctx, rdb, keys, token, fields[1], entryOf(value), missTTL.Milliseconds()).Int()
	if err == nil && stored != 1 {
		err = errors.New("the store was refused")
	}
	return err
}

func entryOf(value order) []byte {
	now := time.Now()
	e := entry.Entry{FreshUntil: now.Add(missTTL), WrittenAt: now, Payload: must(msgpack.Marshal(&value))}
	return must(e.Encode())
}
