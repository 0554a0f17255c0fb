package bench

import (
	"flag"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// Every benchmark runs, which go test alone does not check.
func TestBenchmarks(t *testing.T) {
	redistest.Shared(t) // or skip
	benchtime := flag.Lookup("test.benchtime").Value
	before := benchtime.String()
	redistest.Must(t, benchtime.Set("1x"))
	quick = true
	t.Cleanup(func() { _ = benchtime.Set(before); quick = false })
	for name, run := range map[string]func(b *testing.B){
		"serial hits":       func(b *testing.B) { redisHits(b, 0, 1, 100) },
		"parallel hits":     func(b *testing.B) { redisHits(b, 64, 64, 100) },
		"pipelined hits":    autoPipelinedHits,
		"near hits":         func(b *testing.B) { nearHits(b, 100) },
		"memory hits":       func(b *testing.B) { memoryHits(b, 100) },
		"near strings":      func(b *testing.B) { nearStrings(b, 0, 100) },
		"near structs":      func(b *testing.B) { nearStructs(b, 64) },
		"in memory":         BenchmarkLocal,
		"misses":            func(b *testing.B) { misses(b, 64, 100) },
		"memory":            func(b *testing.B) { memory(b, 100) },
		"stampedes":         func(b *testing.B) { stampedes(b, 2, 1, 1, 5*time.Millisecond) },
		"polling stampedes": func(b *testing.B) { stampedes(b, 2, 1, 1, 101*time.Millisecond) },
		"many hits":         func(b *testing.B) { manyHits(b, 100) },
		"many misses":       func(b *testing.B) { manyMisses(b, time.Millisecond) },
		"many cold keys":    func(b *testing.B) { manyColdKeys(b, 2, 1000) },
		"many stampedes":    func(b *testing.B) { manyStampedes(b, 2, 1, 5*time.Millisecond) },
	} {
		t.Run(name, func(t *testing.T) {
			if testing.Benchmark(run).N == 0 {
				t.Error("it failed: go test -bench . says why")
			}
		})
	}
}
