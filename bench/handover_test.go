package bench

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// BenchmarkHandOver measures locks for which processes wait.
func BenchmarkHandOver(b *testing.B) {
	own := []string{"Mutex", "FairMutex", "Semaphore of 1"}
	for _, n := range []int{2, 50} {
		names := own
		if n == 2 {
			names = append(names, "redislock", "redsync")
		}
		for _, hold := range []time.Duration{2 * time.Millisecond, 50 * time.Millisecond, 500 * time.Millisecond} {
			b.Run(fmt.Sprintf("%d_processes/held_for_%v", n, hold), func(b *testing.B) {
				handOvers(b, n, hold, max(time.Second, 8*hold), names)
			})
		}
	}
	b.Run("drain,_after_a_hold_of_6s/50_waiters_in_10_processes", func(b *testing.B) {
		drain(b, 10, 5, 6*time.Second)
	})
	b.Run("standing_queue/1000_waiters_in_10_processes", func(b *testing.B) {
		standingQueue(b, 10, 100, 5*time.Second, own)
	})
}

// handOvers measures how long a contended lock is idle: from the call that releases it until
// another process has it.
func handOvers(b *testing.B, processes int, hold, window time.Duration, names []string) {
	s := redistest.Start(b)
	rivals := spawnRivals(b, s, processes)
	idle, commands := make([][]float64, len(names)), make([]float64, len(names))
	for round := range rounds(b) {
		for i := range names {
			i = (i + round) % len(names)
			from := time.Now().Add(margin)
			c := contest{
				Locker: names[i], Name: fmt.Sprint("handed over:", names[i], round),
				Waiters: 1, Hold: hold, From: from, Until: from.Add(window),
			}
			o := c.start(rivals)()
			idle[i] = append(idle[i], gaps(c, o.Turns)...)
			commands[i] += float64(o.Commands)
		}
	}
	for i, name := range names {
		if len(idle[i]) == 0 {
			b.Fatalf("%s: not handed over within %v", name, window)
		}
		report(b, name, func(b *testing.B) {
			b.ReportMetric(Median(idle[i]), "p50-ms")
			b.ReportMetric(Quantile(idle[i], 0.99), "p99-ms")
			b.ReportMetric(commands[i]/float64(len(idle[i])), "commands/hand-over")
			b.ReportMetric(float64(len(idle[i])), "hand-overs")
		})
	}
}

// gaps returns the times, in ms, between the turns that began in the measured time and those before
// them.
func gaps(c contest, turns []turn) (ms []float64) {
	for i := 1; i < len(turns); i++ {
		if at := turns[i].Acquired; at.After(c.From) && at.Before(c.Until) {
			ms = append(ms, at.Sub(turns[i-1].Released).Seconds()*1e3)
		}
	}
	return ms
}

// drain measures how long a queue of fair waiters, which hold the lock for 1 ms each, takes to be
// served, from the release by a holder that kept the lock long.
func drain(b *testing.B, processes, waiters int, hold time.Duration) {
	s := redistest.Start(b)
	rivals := spawnRivals(b, s, processes)
	const name = "FairMutex"
	var took, commands []float64
	for round := range rounds(b) {
		c := contest{
			Locker: name, Name: fmt.Sprint("drained:", round), Waiters: waiters, Hold: time.Millisecond, Once: true,
			Until: time.Now().Add(hold + 15*time.Second),
		}
		release := held(b, s, c)
		end := c.start(rivals)
		time.Sleep(hold)
		released := time.Now()
		release()
		o := end()
		if len(o.Turns) != processes*waiters {
			b.Fatalf("%d of %d waiters had the lock", len(o.Turns), processes*waiters)
		}
		took = append(took, o.Turns[len(o.Turns)-1].Acquired.Sub(released).Seconds()*1e3)
		commands = append(commands, float64(o.Commands))
	}
	report(b, name, func(b *testing.B) {
		b.ReportMetric(Median(took), "until_the_last-ms")
		b.ReportMetric(Median(commands), "commands")
	})
}

// standingQueue measures the commands of waiters while the lock is not released.
func standingQueue(b *testing.B, processes, waiters int, window time.Duration, names []string) {
	s := redistest.Start(b)
	rivals := spawnRivals(b, s, processes)
	for _, name := range names {
		from := time.Now().Add(window / 2) // the first questions are not a standing queue's
		c := contest{Locker: name, Name: "standing:" + name, Waiters: waiters, From: from, Until: from.Add(window)}
		release := held(b, s, c)
		o := c.start(rivals)()
		release()
		if len(o.Turns) > 0 {
			b.Fatalf("%s: granted to %d waiters while it was held", name, len(o.Turns))
		}
		report(b, name, func(b *testing.B) {
			b.ReportMetric(float64(o.Commands)/window.Seconds(), "commands/s")
		})
	}
}

// held acquires the lock of a contest in this process.
func held(b *testing.B, s *redistest.Server, c contest) (release func()) {
	ctx := request(b)
	for _, l := range lockers(open(b, s.Addr)) {
		if l.name == c.Locker {
			release := must(l.lock(c.Name)(ctx))
			return func() { must(0, release(ctx)) }
		}
	}
	panic("no locker is named " + c.Locker)
}

// gaps are those before the turns that begin in the measured time.
func TestGaps(t *testing.T) {
	begun := time.Now()
	at := func(ms int) time.Time { return begun.Add(time.Duration(ms) * time.Millisecond) }
	turns := []turn{{at(0), at(5)}, {at(9), at(12)}, {at(15), at(18)}, {at(20), at(25)}, {at(31), at(33)}}
	got := gaps(contest{From: at(10), Until: at(30)}, turns)
	if want := []float64{3, 2}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
