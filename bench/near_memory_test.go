package bench

import (
	"context"
	"fmt"
	"math/rand"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/maypok86/otter/v2"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// nearMemory measures what an entry takes, with a key of 14 bytes and a value of 100.
func nearMemory(b *testing.B, n int) {
	rdb := open(b, redistest.Start(b).Addr)
	key := func(i int) string { return fmt.Sprintf("order:%08d", i) }
	value := func() string { return strings.Repeat("v", 100) }

	texts := make([][2]string, n)
	reportBytes(b, "the key and the value", n, func() {
		for i := range texts {
			texts[i] = [2]string{key(i), value()}
		}
	})
	clear(texts)

	plain := new(sync.Map)
	reportBytes(b, "sync.Map", n, func() {
		for i := range n {
			plain.Store(key(i), value())
		}
	})
	plain.Clear()

	var bare *otter.Cache[string, string]
	reportBytes(b, "otter", n, func() {
		bare = otter.Must(&otter.Options[string, string]{MaximumSize: n})
		for i := range n {
			bare.Set(key(i), value())
		}
		bare.CleanUp()
	})
	bare.InvalidateAll()

	opts := near[string](false)
	opts.Near.Size = n
	namespace := redistest.Namespace(b)
	load := func(context.Context, string) (string, error) { return value(), nil }
	all := func(c *singlefill.Cache[string]) {
		redistest.Await(b, "everything is in memory", func() bool {
			before := c.Stats().NearHits
			err := share(n, 16, func(i int) error {
				_, err := c.GetOrLoad(b.Context(), key(i), load)
				return err
			})
			return err == nil && c.Stats().NearHits-before == int64(n)
		})
	}
	cached := func() *singlefill.Cache[string] { return must(singlefill.New(rdb, namespace, time.Hour, &opts)) }
	first := cached() // which loads, and fills the pools of the client
	all(first)
	var c *singlefill.Cache[string]
	reportBytes(b, "singlefill", n, func() {
		c = cached()
		all(c)
	})
	_ = c.Close()
	_ = first.Close() // not before: its memory would be freed while that of c is measured
}

// nearRatios measures the share of reads that memory answers, with the same reads for all.
func nearRatios(b *testing.B, keys, size, reads int) {
	names := make([]string, keys)
	for i := range names {
		names[i] = fmt.Sprintf("order:%08d", i)
	}
	zipf := rand.NewZipf(rand.New(rand.NewSource(1)), 1.01, 1, uint64(keys-1))
	trace := make([]string, reads)
	for i := range trace {
		trace[i] = names[zipf.Uint64()]
	}

	bare := otter.Must(&otter.Options[string, string]{MaximumSize: size})
	hits := 0
	for _, key := range trace {
		if _, ok := bare.GetIfPresent(key); ok {
			hits++
		} else {
			bare.Set(key, "v")
		}
	}
	ratio := float64(hits) / float64(reads)
	report(b, "otter", func(b *testing.B) { b.ReportMetric(ratio, "hit_ratio") })

	rdb := open(b, redistest.Start(b).Addr)
	namespace := redistest.Namespace(b)
	source := must(singlefill.New[string](rdb, namespace, time.Hour, nil))
	defer source.Close()
	redistest.Must(b, share(keys, 64, func(i int) error { return source.Set(b.Context(), names[i], "v") }))
	c := must(singlefill.New(rdb, namespace, time.Hour, &singlefill.Options[string]{Near: &singlefill.Near{Size: size}}))
	defer c.Close()
	none := func(context.Context, string) (string, error) { return "", errMiss }
	get := func(i int) error {
		_, err := c.GetOrLoad(b.Context(), trace[i], none)
		return err
	}
	redistest.Await(b, "memory serves", func() bool { return get(0) == nil && c.Stats().NearHits > 0 })
	before := c.Stats().NearHits
	redistest.Must(b, share(reads, 0, get))
	ours := float64(c.Stats().NearHits-before) / float64(reads)
	report(b, "singlefill", func(b *testing.B) { b.ReportMetric(ours, "hit_ratio") })
}
