package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/go-redis/cache/v9"
	"github.com/maypok86/otter/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/vmihailenco/msgpack/v5"
	"golang.org/x/sync/singleflight"
)

// hits measures reads of existing keys: the i-th operation reads key i. Each goroutine has its own
// context, as requests have.
type hits struct {
	contexts []context.Context
	keys     []string
	value    order
}

func newHits(b *testing.B, goroutines, keys, size int) *hits {
	h := &hits{value: orderOf(size)}
	for range max(1, goroutines) {
		h.contexts = append(h.contexts, request(b))
	}
	for i := range keys {
		h.keys = append(h.keys, fmt.Sprintf("order:%d", i))
	}
	return h
}

func (h *hits) ctx(i int) context.Context { return h.contexts[i%len(h.contexts)] }

func (h *hits) key(i int) string { return h.keys[i%len(h.keys)] }

// floor is only GET and decode.
func (h *hits) floor(rdb redis.UniversalClient) contender {
	data := must(msgpack.Marshal(&h.value))
	for i := range h.keys {
		must(rdb.Set(h.ctx(i), "floor:"+h.key(i), data, time.Hour).Result())
	}
	return contender{"floor", func(i int) error {
		_, err := getAndDecode(h.ctx(i), rdb, "floor:"+h.key(i))
		return err
	}}
}

func getAndDecode(ctx context.Context, rdb redis.UniversalClient, key string) (order, error) {
	return decoded(rdb.Get(ctx, key).Bytes())
}

func decoded(data []byte, err error) (v order, _ error) {
	if err == nil {
		err = msgpack.Unmarshal(data, &v)
	}
	return v, err
}

var errMiss = errors.New("a hit was a miss")

// singlefill is GetOrLoad.
func (h *hits) singlefill(name string, c *singlefill.Cache[order]) contender {
	for i := range h.keys {
		must(0, c.Set(h.ctx(i), h.key(i), h.value))
	}
	load := func(context.Context, string) (order, error) { return order{}, errMiss }
	return contender{name, func(i int) error {
		_, err := c.GetOrLoad(h.ctx(i), h.key(i), load)
		return err
	}}
}

func (h *hits) goRedisCache(rdb redis.UniversalClient) contender {
	return h.goRedisCacheBy("go-redis/cache", cache.New(&cache.Options{Redis: rdb}))
}

func (h *hits) goRedisCacheBy(name string, c *cache.Cache) contender {
	for i := range h.keys {
		must(0, c.Set(&cache.Item{Key: "go-redis/cache:" + h.key(i), Value: &h.value}))
	}
	load := func(*cache.Item) (any, error) { return nil, errMiss }
	return contender{name, func(i int) error {
		var v order
		return c.Once(&cache.Item{Ctx: h.ctx(i), Key: "go-redis/cache:" + h.key(i), Value: &v, Do: load})
	}}
}

// singleflight is floor with concurrent calls for one key joined. They share one value, which no
// caller may change.
func (h *hits) singleflight(rdb redis.UniversalClient) contender {
	var group singleflight.Group
	return contender{"singleflight", func(i int) error {
		_, err, _ := group.Do(h.key(i), func() (any, error) {
			return getAndDecode(h.ctx(i), rdb, "floor:"+h.key(i))
		})
		return err
	}}
}

// rueidis reads what floor wrote, over one shared connection; with near, from its client-side
// cache.
func (h *hits) rueidis(c rueidis.Client, near bool) contender {
	name := "rueidis Do"
	if near {
		name = "rueidis DoCache"
	}
	return contender{name, func(i int) error {
		get := c.B().Get().Key("floor:" + h.key(i))
		var reply rueidis.RedisResult
		if near {
			reply = c.DoCache(h.ctx(i), get.Cache(), time.Hour)
		} else {
			reply = c.Do(h.ctx(i), get.Build())
		}
		_, err := decoded(reply.AsBytes())
		return err
	}}
}

// otter is a map in this process: no Redis, no decoding, and one shared value.
func (h *hits) otter() contender {
	c := otter.Must(&otter.Options[string, order]{MaximumSize: 1 << 20})
	for i := range h.keys {
		c.Set(h.key(i), h.value)
	}
	return contender{"otter", func(i int) error {
		if _, ok := c.GetIfPresent(h.key(i)); !ok {
			return errMiss
		}
		return nil
	}}
}

func BenchmarkHit(b *testing.B) {
	for _, size := range sizes {
		b.Run("serial/"+size.name, func(b *testing.B) { redisHits(b, 0, 1, size.bytes) })
	}
	b.Run("64_goroutines/64_keys,_2KB", func(b *testing.B) { redisHits(b, 64, 64, 2<<10) })
	b.Run("64_goroutines/64_keys,_2KB,_AutoPipeline", autoPipelinedHits)
	b.Run("64_goroutines/1_key,_100B", func(b *testing.B) { redisHits(b, 64, 1, 100) })
	b.Run("64_goroutines/1_key,_2KB", func(b *testing.B) { redisHits(b, 64, 1, 2<<10) })
	for _, size := range sizes {
		b.Run("client-side_caching/"+size.name, func(b *testing.B) { nearHits(b, size.bytes) })
	}
	b.Run("in_memory/2KB", func(b *testing.B) { memoryHits(b, 2<<10) })
}

// redisHits are hits that Redis answers.
func redisHits(b *testing.B, goroutines, keys, size int) {
	addr := redistest.Start(b).Addr
	rdb := open(b, addr)
	h := newHits(b, goroutines, keys, size)
	r := race{ops: 100, goroutines: goroutines, bases: []string{"floor"}, contenders: []contender{
		h.floor(rdb),
		h.singlefill("singlefill", newCache[order](b, rdb)),
		h.singlefill("singlefill, default client", newCache[order](b, open(b, addr, unbounded))),
		h.goRedisCache(rdb),
		h.singleflight(rdb),
		h.rueidis(openRueidis(b, addr), false),
	}}
	if goroutines > 0 {
		r.ops, r.bases = goroutines*16, append(r.bases, "go-redis/cache")
	}
	r.run(b)
}

func autoPipelinedHits(b *testing.B) {
	rdb := open(b, redistest.Start(b).Addr)
	pipeline := must(rdb.AutoPipeline())
	b.Cleanup(func() { _ = pipeline.Close() })
	h := newHits(b, 64, 64, 2<<10)
	race{ops: 64 * 16, goroutines: 64, bases: []string{"floor", "go-redis/cache"}, contenders: []contender{
		h.floor(pipeline),
		h.singlefill("singlefill", newCache[order](b, pipeline)),
		h.goRedisCache(pipeline),
		h.singleflight(pipeline),
	}}.run(b)
}

// memoryHits are hits of the caches that keep values in this process, against a GET of Redis. See
// BenchmarkNear for more.
func memoryHits(b *testing.B, size int) {
	rdb := open(b, redistest.Start(b).Addr)
	h := newHits(b, 0, 1, size)
	local := cache.New(&cache.Options{Redis: rdb, LocalCache: cache.NewTinyLFU(1000, time.Hour)})
	near := &nearReads{contexts: h.contexts, keys: h.keys, draws: slices.Repeat(h.keys, nearDraws)}
	race{ops: 1000, bases: []string{"floor"}, contenders: []contender{
		h.floor(rdb),
		nearSinglefill(b, "singlefill", near, newCache(b, rdb, singlefill.Options[order]{
			Near: &singlefill.Near{MaxLag: 10 * time.Second},
		}), h.value),
		h.goRedisCacheBy("go-redis/cache", local),
	}}.run(b)
}

// nearHits are answered within this process.
func nearHits(b *testing.B, size int) {
	addr := redistest.Start(b).Addr
	rdb := open(b, addr, func(o *redis.Options) {
		o.Protocol, o.ClientSideCacheConfig = 3, &redis.ClientSideCacheConfig{}
	})
	h := newHits(b, 0, 1, size)
	race{ops: 200, bases: []string{"floor"}, contenders: []contender{
		h.floor(rdb),
		h.singlefill("singlefill", newCache[order](b, rdb)),
		h.goRedisCache(rdb),
		h.rueidis(openRueidis(b, addr), true),
		h.otter(),
	}}.run(b)
}
