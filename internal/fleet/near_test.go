package fleet

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/chart"
	"github.com/singlefill/singlefill/internal/redistest"
)

// deleteRates are the Deletes a second in a fleet that serves from memory.
var deleteRates = []int{0, 10, 100}

// A nearRow is what coherence costs a fleet whose processes all serve from memory.
type nearRow struct {
	wakeUps   bool
	processes int
	deletes   int // a second, of keys that no process reads
	watched   time.Duration
	load      load
	lags      []time.Duration // of each process, from the return of a Delete until it has the new value
}

// share returns the share of the server's thread.
func (r nearRow) share() float64 { return r.load.busy.Seconds() / r.watched.Seconds() }

// serve makes every process return a value from memory, ten times a second. In the meantime
// processes delete other keys, at random times.
func (f *fleet) serve(deletes int, watched time.Duration) (r nearRow) {
	r.processes, r.deletes, r.watched = len(f.processes), deletes, watched
	f.server.take()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var source atomic.Int64
	get := func(p *process) string {
		v, err := p.cache.GetOrLoad(context.Background(), "hot", func(context.Context, string) (string, error) {
			return strconv.FormatInt(source.Load(), 10), nil
		})
		if err != nil {
			f.t.Error(err)
		}
		return v
	}
	var all sync.WaitGroup
	for _, p := range f.processes {
		all.Go(func() {
			for sleep(ctx, rand.N(time.Second)); ctx.Err() == nil; sleep(ctx, 100*time.Millisecond) {
				get(p)
			}
		})
	}
	all.Go(func() {
		for n := 0; deletes > 0 && sleep(ctx, time.Duration(rand.ExpFloat64()*float64(time.Second)/float64(deletes))); n++ {
			all.Go(func() {
				if err := f.random().cache.Delete(context.Background(), "other:"+strconv.Itoa(n)); err != nil {
					f.t.Error(err)
				}
			})
		}
	})
	time.Sleep(5 * time.Second) // every process has the value in memory, and listens
	f.server.take()
	before := f.nearHits()
	time.Sleep(watched)
	r.load = f.server.take()
	if hits := f.nearHits() - before; hits < int64(len(f.processes))*int64(watched/time.Second)*9 {
		f.t.Errorf("%d hits in memory", hits)
	}

	// How long it takes until all of them know of one more Delete.
	source.Add(1)
	if err := f.random().cache.Delete(context.Background(), "hot"); err != nil {
		f.t.Error(err)
	}
	deleted := time.Now()
	var mu sync.Mutex
	var seen sync.WaitGroup
	for _, p := range f.processes {
		seen.Go(func() {
			for get(p) != "1" {
				time.Sleep(5 * time.Millisecond)
			}
			mu.Lock()
			defer mu.Unlock()
			r.lags = append(r.lags, time.Since(deleted))
		})
	}
	seen.Wait()
	stop()
	all.Wait()
	return r
}

func (f *fleet) random() *process { return f.processes[rand.IntN(len(f.processes))] }

func (f *fleet) nearHits() (n int64) {
	for _, p := range f.processes {
		n += p.cache.Stats().NearHits
	}
	return n
}

// TestNearScale is TestScale for fleets of up to 1,000 processes that serve from memory. It runs
// before all tests that are parallel: TestScale writes to the same page.
func TestNearScale(t *testing.T) {
	if testing.Short() || redistest.Race {
		t.Skip("a report, for which nothing runs that other tests do not")
	}
	folder, sizes, rates, commands := *docs, sizes[:3], deleteRates, 100_000
	if folder == "" {
		folder, sizes, rates, commands = copyOfPage(t), sizes[:1], rates[1:2], 2000
	}
	c := measure(t, commands)
	var rows []nearRow
	for _, n := range sizes {
		for _, wakeUps := range []bool{true, false} {
			for _, deletes := range rates {
				inNearFleet(t, n, c, wakeUps, &singlefill.Near{Size: 100}, func(f *fleet) {
					r := f.serve(deletes, 10*time.Second)
					r.wakeUps = wakeUps
					rows = append(rows, r)
					t.Logf("%d processes, wake-ups %v, %d deletes a second: %d commands, %d messages, lag %v at most",
						n, wakeUps, deletes, r.load.commands, r.load.messages, quantile(r.lags, 1))
				})
			}
		}
	}
	writeNear(t, folder, c, rows)
}

// writeNear writes a line for each size and rate. The log of the test has more of each row.
func writeNear(t *testing.T, folder string, c costs, rows []nearRow) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%v to read the log, %v for each new record in it, %v to append one, %v for a message to a listener,\n"+
		"%v for the script that sends it.\n\n", c.logRead, c.logRecord, c.logAppend, c.message, c.script)
	fmt.Fprintf(&b, "| processes | deletes/s | share of a core | no wake-ups | lag | no wake-ups |\n|%s\n", strings.Repeat("---:|", 6))
	for _, r := range rows {
		if !r.wakeUps {
			continue
		}
		without := &nearRow{watched: time.Second}
		for i := range rows {
			if o := &rows[i]; !o.wakeUps && o.processes == r.processes && o.deletes == r.deletes {
				without = o
			}
		}
		fmt.Fprintf(&b, "| %s | %d | %.1f %% | %.1f %% | %s | %s |\n", chart.Thousands(r.processes), r.deletes, 100*r.share(),
			100*without.share(), short(quantile(r.lags, 0.99)), short(quantile(without.lags, 0.99)))
	}
	writeBetween(t, folder, beginNear, endNear, b.Bytes())
}

// A process that serves from memory reads the log little more than twice in each MaxLag, and as often as it is
// woken. However many Deletes there are, processes are woken only so often that a small share of the
// server's time goes to it.
func TestNear_Reads(t *testing.T) {
	t.Parallel()
	const n = 20
	for _, wakeUps := range []bool{true, false} {
		for _, deletes := range []int{0, 50} {
			inNearFleet(t, n, usual, wakeUps, &singlefill.Near{Size: 100}, func(f *fleet) {
				const seconds = 3
				r := f.serve(deletes, seconds*time.Second)
				what := fmt.Sprintf("wake-ups %v, %d deletes", wakeUps, deletes)
				atMost(t, what+": messages", r.load.messages, 2200*seconds)
				// A pause is 7/16 of MaxLag at least, which is a second. A read is two commands. A Delete is four,
				// and two scripts behind it.
				most := 2*(n*(1+seconds*16/7)+r.load.messages) + 8*deletes*seconds
				atMost(t, what+": commands", r.load.commands, most)
				atMost(t, what+": the longest lag", quantile(r.lags, 1), time.Second+50*time.Millisecond)
			})
		}
	}
}
