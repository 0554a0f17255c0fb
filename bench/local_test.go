package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/maypok86/otter/v2"
	gocache "github.com/patrickmn/go-cache"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"golang.org/x/sync/singleflight"
)

// BenchmarkLocal compares NewLocal with what one would take in its place. No server is needed.
func BenchmarkLocal(b *testing.B) {
	b.Run("hit,_a_string_of_100_B/serial", func(b *testing.B) { localHits(b, 0, locals(b, localText)) })
	b.Run("hit,_a_string_of_100_B/64_goroutines", func(b *testing.B) { localHits(b, 64, locals(b, localText)) })
	b.Run("hit,_a_struct_of_2_KB", localStructs)
	b.Run("miss/serial", func(b *testing.B) { localMisses(b, 0) })
	b.Run("miss/64_goroutines", func(b *testing.B) { localMisses(b, 64) })
	b.Run("set", localSets)
	b.Run("trace,_Zipf_1.01_of_200,000_keys", localTrace)
	b.Run("memory", localMemory)
	for _, n := range []int{50_000, 200_000} {
		b.Run(fmt.Sprintf("SetMany,_one_tag_each/%d", n), func(b *testing.B) { localSetMany(b, n) })
	}
}

// localKeys is how many values each keeps, but for the map.
const localKeys = 10_000

// A local is a cache in the memory of a process. get loads a value that is not there.
type local struct {
	name     string
	get, set func(key string)
}

// localLoads counts the loads of all.
var localLoads atomic.Int64

func localText() string { return strings.Repeat("v", 100) }

// newLocal returns a cache of NewLocal. value makes a value.
func newLocal[T any](b *testing.B, name string, value func() T, share bool) local {
	near := singlefill.Near{Size: localKeys, Share: share}
	c := must(singlefill.NewLocal("local", time.Hour, &singlefill.Options[T]{Near: &near}))
	b.Cleanup(func() { _ = c.Close() })
	ctx := request(b)
	load := func(context.Context, string) (T, error) { localLoads.Add(1); return value(), nil }
	return local{
		name, func(key string) { must(c.GetOrLoad(ctx, key, load)) }, func(key string) { must(0, c.Set(ctx, key, value())) },
	}
}

// locals returns empty caches.
func locals[T any](b *testing.B, value func() T) []local {
	ctx := request(b)
	var mu sync.Mutex
	plain := make(map[string]T)
	set := func(key string) {
		mu.Lock()
		defer mu.Unlock()
		plain[key] = value()
	}
	otters := otter.Must(&otter.Options[string, T]{MaximumSize: localKeys, ExpiryCalculator: otter.ExpiryWriting[string, T](time.Hour)})
	load := otter.LoaderFunc[string, T](func(context.Context, string) (T, error) { localLoads.Add(1); return value(), nil })
	goCache, group := gocache.New(time.Hour, 0), new(singleflight.Group)
	return []local{
		{"a map and a mutex", func(key string) {
			mu.Lock()
			_, ok := plain[key]
			mu.Unlock()
			if !ok {
				localLoads.Add(1)
				set(key)
			}
		}, set},
		{"otter", func(key string) { must(otters.Get(ctx, key, load)) }, func(key string) { otters.Set(key, value()) }},
		{"go-cache and singleflight", func(key string) {
			if _, ok := goCache.Get(key); ok {
				return
			}
			_, _, _ = group.Do(key, func() (any, error) {
				localLoads.Add(1)
				v := value()
				goCache.SetDefault(key, v)
				return v, nil
			})
		}, func(key string) { goCache.SetDefault(key, value()) }},
		newLocal(b, "NewLocal", value, false),
	}
}

// localRace lets caches do the same. A block has n operations.
func localRace(b *testing.B, goroutines, n int, caches []local, op func(c local, i int)) {
	r := race{ops: n, goroutines: goroutines, bases: []string{"otter"}}
	for _, c := range caches {
		r.contenders = append(r.contenders, contender{c.name, func(i int) error { op(c, i); return nil }})
	}
	r.run(b)
}

func localHits(b *testing.B, goroutines int, caches []local) {
	const keys = 1000 // which each keeps
	h := newNearReads(b, goroutines, keys)
	for _, c := range caches {
		for range 20 { // the first hits are of what is encoded
			for _, key := range h.keys {
				c.get(key)
			}
		}
	}
	localRace(b, goroutines, h.ops(1<<13), caches, func(c local, i int) { c.get(h.key(i)) })
}

// localStructs hits a struct that NewLocal copies for each caller, shares, or decodes for each.
func localStructs(b *testing.B) {
	o := orderOf(2 << 10)
	value := func() order { return o }
	localHits(b, 0, append(locals(b, value), newLocal(b, "NewLocal, Share", value, true),
		newLocal(b, "NewLocal, decoded", func() openOrder { return openOrder{o, nil} }, false)))
}

func localMisses(b *testing.B, goroutines int) {
	var n atomic.Int64
	localRace(b, goroutines, 1<<10, locals(b, localText), func(c local, _ int) { c.get(strconv.FormatInt(n.Add(1), 10)) })
}

func localSets(b *testing.B) {
	h := newNearReads(b, 0, localKeys/2)
	localRace(b, 0, 1<<13, locals(b, localText), func(c local, i int) { c.set(h.key(i)) })
}

// localTrace gets keys that are drawn from more than there is room for, and reports how many were hits.
func localTrace(b *testing.B) {
	trace := make([]string, 300_000)
	zipf := rand.NewZipf(rand.New(rand.NewPCG(1, 2)), 1.01, 1, 199_999)
	for i := range trace {
		trace[i] = strconv.FormatUint(zipf.Uint64(), 10)
	}
	if quick {
		trace = trace[:100]
	}
	for _, c := range locals(b, localText) {
		before, begun := localLoads.Load(), time.Now()
		for _, key := range trace {
			c.get(key)
		}
		took := time.Since(begun)
		report(b, c.name, func(b *testing.B) {
			b.ReportMetric(took.Seconds(), "s/trace")
			b.ReportMetric(100-100*float64(localLoads.Load()-before)/float64(len(trace)), "%hits")
		})
	}
}

// localMemory reports how much memory a value takes that has been loaded and read.
func localMemory(b *testing.B) {
	caches := locals(b, localText)
	for _, c := range caches {
		before := redistest.Heap()
		for range 3 {
			for k := range localKeys {
				c.get(strconv.Itoa(k))
			}
		}
		bytes := float64(redistest.Heap()-before) / localKeys
		report(b, c.name, func(b *testing.B) { b.ReportMetric(bytes, "B/value") })
	}
	runtime.KeepAlive(caches)
}

func localSetMany(b *testing.B, n int) {
	values := make(map[string]string, n)
	for i := range n {
		values[strconv.Itoa(i)] = "v"
	}
	tags := func(string, string) []string { return []string{"all"} }
	b.ResetTimer()
	for range b.N {
		c := must(singlefill.NewLocal("local", time.Hour, &singlefill.Options[string]{Near: &singlefill.Near{Size: n}, Tags: tags}))
		must(0, c.SetMany(b.Context(), values))
		_ = c.Close()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/value")
}
