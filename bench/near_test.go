package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-redis/cache/v9"
	"github.com/maypok86/otter/v2"
	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// BenchmarkNear measures Options.Near. docs/scale.md has a fleet of processes.
func BenchmarkNear(b *testing.B) {
	b.Run("near_hit,_a_string_of_100_B/serial", func(b *testing.B) { nearStrings(b, 0, nearKeys) })
	b.Run("near_hit,_a_string_of_100_B/64_goroutines", func(b *testing.B) { nearStrings(b, 64, nearKeys) })
	b.Run("near_hit,_100_hot_strings/serial", func(b *testing.B) { nearStrings(b, 0, 100) })
	b.Run("near_hit,_100_hot_strings/64_goroutines", func(b *testing.B) { nearStrings(b, 64, 100) })
	b.Run("near_hit,_a_struct_of_2_KB/serial", func(b *testing.B) { nearStructs(b, 0) })
	b.Run("near_hit,_a_struct_of_2_KB/64_goroutines", func(b *testing.B) { nearStructs(b, 64) })
}

const (
	// nearKeys is how many entries are in memory, and nearDraws how many of them are read in turn: a
	// power of two, so that the choice of a key costs next to nothing beside a hit.
	nearKeys  = 10_000
	nearDraws = 1 << 14
)

// nearReads are reads of random keys that are in memory.
type nearReads struct {
	contexts []context.Context
	keys     []string
	draws    []string // random ones of keys
}

func newNearReads(b *testing.B, goroutines, n int) *nearReads {
	h := new(nearReads)
	for range max(1, goroutines) { // 1 or 64
		h.contexts = append(h.contexts, request(b))
	}
	if quick {
		n = 100
	}
	for i := range n {
		h.keys = append(h.keys, fmt.Sprintf("order:%08d", i))
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range nearDraws {
		h.draws = append(h.draws, h.keys[random.IntN(n)])
	}
	return h
}

func (h *nearReads) ctx(i int) context.Context { return h.contexts[i&(len(h.contexts)-1)] }

func (h *nearReads) key(i int) string { return h.draws[i&(nearDraws-1)] }

// ops is the length of a block: n operations, or the next multiple of the number of goroutines.
func (h *nearReads) ops(n int) int {
	return (n + len(h.contexts) - 1) / len(h.contexts) * len(h.contexts)
}

// near returns options of a cache with Near. Contenders take turns: with a long MaxLag a cache does
// not fall asleep until its next turn comes.
func near[T any](share bool) singlefill.Options[T] {
	return singlefill.Options[T]{Near: &singlefill.Near{MaxLag: 10 * time.Second, Share: share}}
}

// nearSinglefill is GetOrLoad of keys that are in memory.
func nearSinglefill[T any](b *testing.B, name string, h *nearReads, c *singlefill.Cache[T], value T) contender {
	load := func(context.Context, string) (T, error) { return value, nil }
	redistest.Await(b, "everything is in memory", func() bool {
		before := c.Stats().NearHits
		err := share(len(h.keys), 64, func(i int) error {
			_, err := c.GetOrLoad(b.Context(), h.keys[i], load)
			return err
		})
		redistest.Must(b, err)
		return c.Stats().NearHits-before == int64(len(h.keys))
	})
	ready := c.Stats()
	b.Cleanup(func() {
		s := c.Stats()
		if far := s.Hits - s.NearHits - (ready.Hits - ready.NearHits); far*100 > s.Hits {
			b.Errorf("%s: %d of %d hits were in Redis", name, far, s.Hits)
		}
	})
	none := func(context.Context, string) (v T, err error) { return v, errMiss }
	return contender{name, func(i int) error {
		_, err := c.GetOrLoad(h.ctx(i), h.key(i), none)
		return err
	}}
}

// fill stores all keys as requests do, each after a read of Redis: other memory is allocated between
// two entries, which puts them as far apart as the entries of a cache in use.
func (h *nearReads) fill(b *testing.B, rdb *redis.Client, set func(key string)) {
	err := share(len(h.keys), 64, func(i int) error {
		if err := rdb.Get(b.Context(), h.keys[i]).Err(); err != redis.Nil {
			return fmt.Errorf("a miss was a hit, or %w", err)
		}
		set(h.keys[i])
		return nil
	})
	redistest.Must(b, err)
}

func nearOtter[T any](b *testing.B, name string, h *nearReads, rdb *redis.Client,
	o otter.Options[string, T], value T) contender {
	o.MaximumSize = nearKeys
	c := otter.Must(&o)
	h.fill(b, rdb, func(key string) { c.Set(key, value) })
	return contender{name, func(i int) error {
		if _, ok := c.GetIfPresent(h.key(i)); !ok {
			return errMiss
		}
		return nil
	}}
}

// nearGoRedisCache has a local cache of encoded values. It is larger than the others, which loses
// none of the keys.
func nearGoRedisCache[T any](h *nearReads, rdb *redis.Client, value T) contender {
	c := cache.New(&cache.Options{Redis: rdb, LocalCache: cache.NewTinyLFU(4*nearKeys, time.Hour)})
	for _, key := range h.keys {
		must(0, c.Set(&cache.Item{Key: "go-redis/cache:" + key, Value: value}))
	}
	load := func(*cache.Item) (any, error) { return nil, errMiss }
	draws := prefixed("go-redis/cache:", h.draws)
	return contender{"go-redis/cache, TinyLFU", func(i int) error {
		var v T
		return c.Once(&cache.Item{Ctx: h.ctx(i), Key: draws[i&(nearDraws-1)], Value: &v, Do: load})
	}}
}

// prefixed returns keys that cost nothing to concatenate in a measurement.
func prefixed(prefix string, keys []string) []string {
	all := make([]string, len(keys))
	for i, key := range keys {
		all[i] = prefix + key
	}
	return all
}

func nearStrings(b *testing.B, goroutines, keys int) {
	rdb := open(b, redistest.Start(b).Addr)
	h := newNearReads(b, goroutines, keys)
	value := strings.Repeat("v", 100)
	var plain sync.Map
	h.fill(b, rdb, func(key string) { plain.Store(key, value) })
	race{ops: h.ops(4 * nearDraws), goroutines: goroutines, bases: []string{"otter"}, contenders: []contender{
		nearOtter(b, "otter", h, rdb, otter.Options[string, string]{}, value),
		nearOtter(b, "otter, its entries expire", h, rdb, otter.Options[string, string]{
			ExpiryCalculator: otter.ExpiryWriting[string, string](time.Hour),
		}, value),
		{"sync.Map", func(i int) error {
			v, _ := plain.Load(h.key(i))
			if _, ok := v.(string); !ok {
				return errMiss
			}
			return nil
		}},
		nearSinglefill(b, "singlefill", h, newCache(b, rdb, near[string](false)), value),
		nearGoRedisCache(h, rdb, value),
	}}.run(b)
}

// An openOrder is an order that cannot be copied field by field, since it may hold anything.
type openOrder struct {
	order
	Note any
}

func nearStructs(b *testing.B, goroutines int) {
	rdb := open(b, redistest.Start(b).Addr)
	h := newNearReads(b, goroutines, nearKeys)
	value := orderOf(2 << 10)
	// Blocks are shorter than for strings, since decoding takes a hundred times as long.
	race{ops: h.ops(2000), goroutines: goroutines, bases: []string{"otter"}, contenders: []contender{
		nearOtter(b, "otter", h, rdb, otter.Options[string, order]{}, value),
		nearSinglefill(b, "singlefill, Share", h, newCache(b, rdb, near[order](true)), value),
		nearSinglefill(b, "singlefill, copied", h, newCache(b, rdb, near[order](false)), value),
		nearSinglefill(b, "singlefill, decoded", h, newCache(b, rdb, near[openOrder](false)), openOrder{value, nil}),
		nearGoRedisCache(h, rdb, value),
	}}.run(b)
}
