package singlefill

import (
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/entry"
)

// earlyCache is a cache whose lot alone is under test; it sends nothing.
func earlyCache(t *testing.T, beta float64) *Cache[string] {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"})
	t.Cleanup(func() { _ = rdb.Close() })
	c, err := New(rdb, "early", time.Hour, &Options[string]{EarlyRefresh: beta})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// earlyHit is the decision of one hit, left before the end of an entry whose load took loadTime.
func earlyHit(c *Cache[string], left, loadTime time.Duration) bool {
	now := time.Now()
	return c.early(&entry.Entry{FreshUntil: now.Add(left), LoadTime: loadTime}, now)
}

// Of 40,000 draws with a probability of at least 0.13, a tenth is 8 standard errors or more.
func TestAHitRefreshesEarlyWithTheProbabilityOfXFetch(t *testing.T) {
	t.Parallel()
	const draws, loadTime = 40_000, 100 * time.Millisecond
	for _, beta := range []float64{0.5, 1, 1.5, 2} {
		for _, x := range []float64{0, 0.5, 1, 2} { // time left, as a multiple of β·δ
			t.Run(fmt.Sprintf("beta %v, %v left", beta, x), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c := earlyCache(t, beta)
					n := 0
					for range draws {
						if earlyHit(c, time.Duration(x*beta*float64(loadTime)), loadTime) {
							n++
						}
					}
					if got, want := float64(n)/draws, math.Exp(-x); math.Abs(got/want-1) > 0.1 {
						t.Errorf("refreshed by %.4f of the hits, want %.4f", got, want)
					}
				})
			})
		}
	}
}

// Readers come densely. The first who decides begins a load, and without a lock all who decide before its end
// load too: e^(1/β) loads for each expiry, however dense the readers are.
//
// The number is geometrically distributed, with a standard deviation below its mean: the mean of 4,000 cycles
// has a standard error below 1.5 %, so that a tenth is 6 of them and more, and the steps are so small that
// they add less than 1 %.
func TestWithoutALockXFetchLoadsAsOftenAsItsAuthorsSay(t *testing.T) {
	t.Parallel()
	const cycles, readsPerLoad, loadTime = 4_000, 200, time.Second
	const step = loadTime / readsPerLoad
	for _, test := range []struct{ beta, want float64 }{{0.5, 7.39}, {1, 2.72}, {1.5, 1.95}, {2, 1.65}} {
		t.Run(fmt.Sprint("beta ", test.beta), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := earlyCache(t, test.beta)
				// Where nobody has decided before with a probability of e^-0.007.
				begin := time.Duration(test.beta * (math.Log(readsPerLoad*test.beta) + 5) * float64(loadTime))
				loads := 0
				for range cycles {
					left := begin
					for !earlyHit(c, left, loadTime) {
						left -= step
					}
					loads++
					for end := left - loadTime + step; left > end; {
						if left -= step; earlyHit(c, left, loadTime) {
							loads++
						}
					}
				}
				if got := float64(loads) / cycles; math.Abs(got/test.want-1) > 0.1 {
					t.Errorf("%.3f loads for each expiry, want %v", got, test.want)
				}
			})
		})
	}
}

func TestNoHitRefreshesEarlyWhatTookNoTimeOrWhenThatIsOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, test := range []struct {
			name     string
			beta     float64
			loadTime time.Duration
		}{
			{"off", -1, time.Hour},
			{"a load time of 0", 1, 0},
			{"a load time of 0 and a high β", 1e9, 0},
		} {
			c := earlyCache(t, test.beta)
			for _, left := range []time.Duration{time.Hour, time.Second, time.Millisecond, 1, 0} {
				for range 1000 {
					if earlyHit(c, left, test.loadTime) {
						t.Fatalf("%s: refreshed, %v before the end", test.name, left)
					}
				}
			}
		}
	})
}
