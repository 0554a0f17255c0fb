package singlefill

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/value"
)

// earlySettings returns the settings of a cache with an EarlyRefresh.
func earlySettings(t *testing.T, beta float64) settings {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"}) // which sends nothing
	t.Cleanup(func() { _ = rdb.Close() })
	s, err := resolve(rdb, "early", time.Hour, &Options[any]{EarlyRefresh: beta})
	redistest.Must(t, err)
	return s
}

// earlyHit is the decision of one hit, left before the end of an entry whose load took loadTime.
func earlyHit(s settings, left, loadTime time.Duration) bool {
	now := time.Now()
	return value.New(&value.Type{Policy: s.Policy}, "early", nil, nil, nil).Due(&value.Lookup{
		Found: value.Found{Entry: entry.Entry{FreshUntil: now.Add(left), LoadTime: loadTime}, At: now, Freshness: value.Fresh},
	})
}

// A hit refreshes early with the probability of XFetch, unless EarlyRefresh is off. The load has taken some time.
//
// Of 40,000 draws with a probability of at least 0.13, a tenth is 8 standard errors or more.
func TestEarlyRefresh_Probability(t *testing.T) {
	t.Parallel()
	const draws, loadTime = 40_000, 100 * time.Millisecond
	for _, beta := range []float64{-1, 0.5, 1, 1.5, 2} { // -1: off
		for _, x := range []float64{0, 0.5, 1, 2} { // time left, as a multiple of β·δ
			t.Run(fmt.Sprintf("beta %v, %v left", beta, x), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := earlySettings(t, beta)
					n := 0
					for range draws {
						if earlyHit(s, time.Duration(x*beta*float64(loadTime)), loadTime) {
							n++
						}
					}
					want := math.Exp(-x)
					if beta < 0 {
						want = 0
					}
					if got := float64(n) / draws; math.Abs(got-want) > 0.1*want {
						t.Errorf("refreshed by %.4f of the hits, want %.4f", got, want)
					}
					for range 1000 {
						if earlyHit(s, time.Nanosecond, 0) {
							t.Fatal("a value is refreshed whose load took no time")
						}
					}
				})
			})
		}
	}
}

// What ten minutes of reads of one value cost. By default a fleet loads at most once in half of a life and
// the time of a load, at any rate of reads, and hardly a caller waits. With -v the test prints the table of
// docs/stale.md.
func TestEarlyRefresh_Rates(t *testing.T) {
	t.Parallel()
	const loadTime = time.Second
	span := 10 * time.Minute
	if redistest.Race { // too slow
		span = time.Minute
	}
	betas := []float64{-1, 1, 0} // off; the whole life, as XFetch has it; the default
	table := ""
	for _, times := range []int{2, 4, 10, 100} {
		for _, rate := range []int{100, 10_000} {
			life := time.Duration(times) * loadTime
			var loads, waited [3]int
			for i, beta := range betas {
				loads[i], waited[i] = earlySettings(t, beta).simulate(span, life, loadTime, rate)
			}
			table += fmt.Sprintf("| %v | %d | %d | %d | %d | %d | %d | %d |\n", life, rate,
				loads[0], loads[1], loads[2], waited[0], waited[1], waited[2])
			if most := int(span/(life/2+loadTime)) + 1; loads[2] > most || loads[2] > loads[1] {
				t.Errorf("a life of %v, %d reads/s: %d loads, want %d or less", life, rate, loads[2], min(most, loads[1]))
			}
			if most := 3 * loads[2]; waited[2] > most || waited[2] > waited[0] {
				t.Errorf("a life of %v, %d reads/s: %d callers waited, want %d or less", life, rate, waited[2], most)
			}
		}
	}
	t.Logf("in %v:\n| life | reads/s | loads: off | 1 | default | waited: off | 1 | default |\n%s", span, table)
}

// simulate reads a value at a steady rate, each time in any process of a fleet. It returns how many loads
// begin, and how many readers wait for one. At first the value is fresh.
func (s settings) simulate(d, life, loadTime time.Duration, rate int) (loads, waited int) {
	draws := rand.New(rand.NewPCG(1, 2))
	var now, loaded time.Time // loaded: when the running load ends
	var e entry.Entry
	for running, n := true, int(d.Seconds())*rate; n > 0; n-- {
		if running && !now.Before(loaded) {
			e = entry.Entry{WrittenAt: loaded, FreshUntil: loaded.Add(life), LoadTime: loadTime}
			running = false
		}
		left := e.FreshUntil.Sub(now)
		if left <= 0 {
			waited++
		}
		if !running && s.EarlyBy(&e, draws.ExpFloat64) >= left { // as Due does
			loads++
			running, loaded = true, now.Add(loadTime)
		}
		now = now.Add(time.Second / time.Duration(rate))
	}
	return loads, waited
}
