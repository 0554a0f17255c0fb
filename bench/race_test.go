package bench

import (
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A contender does the same work as the other contenders of its race.
type contender struct {
	name string
	op   func(i int) error // the i-th operation of a block
}

// A race measures contenders in turn: a block of operations of each, in an order that rotates with
// every round. So a disturbance of the machine affects all of them, and hardly the ratio of two
// adjacent blocks. It reports the medians, over the rounds, of the time of one operation, and of
// its ratio to the times of the bases in the same round.
type race struct {
	ops        int // per block
	goroutines int // that share a block; 0: only the caller's
	bases      []string
	contenders []contender
}

// quick makes blocks as short as possible, to check that they run.
var quick bool

func (r race) run(b *testing.B) {
	b.Helper()
	if quick {
		r.ops = max(1, r.goroutines)
	}
	allocs := make([]float64, len(r.contenders))
	for i, c := range r.contenders {
		r.block(b, c) // dials, loads scripts, fills pools
		if r.goroutines == 0 {
			n := 0
			allocs[i] = testing.AllocsPerRun(min(r.ops, 100), func() { _ = c.op(n); n++ })
		}
	}
	times := make([][]float64, len(r.contenders))
	for round := range rounds(b) {
		for i := range r.contenders {
			i = (i + round) % len(r.contenders)
			times[i] = append(times[i], r.block(b, r.contenders[i]).Seconds()*1e9/float64(r.ops))
		}
	}
	for i, c := range r.contenders {
		report(b, c.name, func(b *testing.B) {
			b.ReportMetric(median(times[i]), "ns/op")
			for _, base := range r.bases {
				b.ReportMetric(median(ratios(times[i], times[r.index(base)])), "×"+strings.ReplaceAll(base, " ", "_"))
			}
			if r.goroutines == 0 {
				b.ReportMetric(allocs[i], "allocs")
				b.ReportMetric(allocs[i]-allocs[r.index(r.bases[0])], "+allocs")
			}
		})
	}
}

func (r race) index(name string) int {
	for i, c := range r.contenders {
		if c.name == name {
			return i
		}
	}
	panic("no contender is named " + name)
}

// block runs one block and returns its duration.
func (r race) block(b *testing.B, c contender) time.Duration {
	b.Helper()
	begun := time.Now()
	err := share(r.ops, r.goroutines, c.op)
	took := time.Since(begun)
	if err != nil {
		b.Fatalf("%s: %v", c.name, err)
	}
	return took
}

// share does n operations, distributed over the goroutines; with 0 in the caller's goroutine.
func share(n, goroutines int, op func(i int) error) error {
	if goroutines == 0 {
		for i := range n {
			if err := op(i); err != nil {
				return err
			}
		}
		return nil
	}
	var failed atomic.Pointer[error]
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			for i := g; i < n; i += goroutines {
				if err := op(i); err != nil {
					failed.Store(&err)
				}
			}
		})
	}
	all.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

func ratios(xs, ys []float64) []float64 {
	rs := make([]float64, len(xs))
	for i := range xs {
		rs[i] = xs[i] / ys[i]
	}
	return rs
}

// quantile returns the element of the sorted xs at the share q of their number: with 1 the largest. It returns 0 if xs
// is empty.
func quantile(xs []float64, q float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(xs))
	return sorted[min(int(q*float64(len(xs))), len(xs)-1)]
}

// median returns the middle of xs, the mean of the two in the middle if their number is even, or 0
// if xs is empty.
func median(xs []float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(xs))
	return (sorted[(len(xs)-1)/2] + sorted[len(xs)/2]) / 2
}

// rounds yields the number of each round, until -benchtime has passed or is reached as a count.
func rounds(b *testing.B) func(yield func(int) bool) {
	b.Helper()
	text := flag.Lookup("test.benchtime").Value.String()
	count, limit := 0, time.Duration(0)
	var err error
	if n, found := strings.CutSuffix(text, "x"); found {
		count, err = strconv.Atoi(n)
	} else {
		limit, err = time.ParseDuration(text)
	}
	if err != nil {
		b.Fatalf("-benchtime is %q: %v", text, err)
	}
	return func(yield func(int) bool) {
		begun := time.Now()
		for n := 0; n == 0 || n < count || time.Since(begun) < limit; n++ {
			if !yield(n) {
				return
			}
		}
	}
}

// report prints metrics as the result of a benchmark of that name. It omits the time of that
// benchmark, which does nothing, unless metrics sets it.
func report(b *testing.B, name string, metrics func(b *testing.B)) {
	b.Run(name, func(b *testing.B) {
		b.ReportMetric(0, "ns/op")
		metrics(b)
	})
}

// must returns v. An error ends the process, since the measurement would be meaningless.
func must[V any](v V, err error) V {
	if err != nil {
		panic(fmt.Sprintf("bench: %v", err))
	}
	return v
}
