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
		"tags":              BenchmarkTags,
		"lost tags":         BenchmarkTagsLost,
		"large tag":         BenchmarkTagsLarge,
		"serial hits":       func(b *testing.B) { serialHits(b, redistest.Start(b).Addr, 100) },
		"parallel hits":     func(b *testing.B) { parallelHits(b, redistest.Start(b).Addr, 64, 100) },
		"pipelined hits":    autoPipelinedHits,
		"near hits":         func(b *testing.B) { nearHits(b, 100) },
		"memory hits":       func(b *testing.B) { memoryHits(b, 100) },
		"near strings":      func(b *testing.B) { nearStrings(b, 0, 100) },
		"near structs":      func(b *testing.B) { nearStructs(b, 64) },
		"near misses":       func(b *testing.B) { nearMisses(b, 0, 100) },
		"near deletes":      func(b *testing.B) { nearDeletes(b, oneServer) },
		"near commands":     func(b *testing.B) { nearCommands(b, oneServer) },
		"lags":              func(b *testing.B) { lags(b, 2) },
		"near memory":       func(b *testing.B) { nearMemory(b, 100) },
		"near hit ratios":   func(b *testing.B) { nearRatios(b, 100, 10, 1000) },
		"misses":            func(b *testing.B) { misses(b, redistest.Start(b).Addr, 64, 100) },
		"round trips":       func(b *testing.B) { roundTrips(b, time.Microsecond) },
		"distant hits":      func(b *testing.B) { serialHits(b, distant(b, redistest.Start(b), time.Microsecond), 100) },
		"stampedes":         func(b *testing.B) { stampedes(b, 2, 1, 1, 5*time.Millisecond) },
		"polling stampedes": func(b *testing.B) { stampedes(b, 2, 1, 1, 101*time.Millisecond) },
		"bounds":            func(b *testing.B) { bounds(b, 64) },
		"free locks":        freeLocks,
		"hand-overs": func(b *testing.B) {
			handOvers(b, 2, time.Millisecond, 100*time.Millisecond, []string{"Mutex", "FairMutex", "Semaphore of 1"})
		},
		"drain":          func(b *testing.B) { drain(b, 2, 2, 10*time.Millisecond) },
		"standing queue": func(b *testing.B) { standingQueue(b, 2, 2, 50*time.Millisecond, []string{"FairMutex"}) },
		"many hits":      func(b *testing.B) { manyHits(b, 100) },
		"many near hits": func(b *testing.B) { manyNearHits(b, 100) },
		"many misses":    func(b *testing.B) { manyMisses(b, time.Millisecond) },
		"many stampedes": func(b *testing.B) { manyStampedes(b, 2, 1, 5*time.Millisecond) },
		"clears":         func(b *testing.B) { clears(b, 1_000_000) },
		"idle caches":    func(b *testing.B) { idleCaches(b, 10) },
		"waiting":        func(b *testing.B) { waitingGoroutines(b, 10) },
		"running loads":  func(b *testing.B) { runningLoads(b, 10) },
		"held locks":     func(b *testing.B) { heldLocks(b, 10) },
		"goroutines":     func(b *testing.B) { manyGoroutines(b, 10) },
		"keys":           func(b *testing.B) { manyKeys(b, 10) },
		"processes":      func(b *testing.B) { manyProcesses(b, 2, 10) },
	} {
		t.Run(name, func(t *testing.T) {
			if testing.Benchmark(run).N == 0 {
				t.Error("it failed: go test -bench . says why")
			}
		})
	}
}
