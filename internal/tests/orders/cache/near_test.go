package cache_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/schedule"
)

// The processes of these tests keep values in memory. Scenarios check that a call of the process
// that announced a change gets the new value, and that a call of another process does if it begins
// more than MaxLag after the announcement.

const maxLag = 8 * schedule.Step

// goRead starts an actor that calls GetOrLoad again and again, for longer than MaxLag after a
// change. Most calls find the value in memory.
func (s *scenario) goRead(process string, calls int, pause time.Duration) {
	s.Go(process, process, func(ctx context.Context) {
		for i := range calls {
			_, _ = s.get(ctx, process, fmt.Sprint(process, i))
			time.Sleep(pause)
		}
	})
}

// goAnnounce starts an actor that keeps the value in memory, changes it, and calls GetOrLoad at once
// and more than MaxLag later in both processes.
func (s *scenario) goAnnounce(process, other string, announce announcement) {
	s.Go(process, process, func(ctx context.Context) {
		_, _ = s.get(ctx, process, process+", before the change,")
		s.At(process, "changes the source")
		s.change(ctx, process, announce)
		_, _ = s.get(ctx, process, process+", after the change,")
		_, _ = s.get(ctx, other, other+", after the change,")
		time.Sleep(maxLag + schedule.Step)
		_, _ = s.get(ctx, process, process+", long after the change,")
		_, _ = s.get(ctx, other, other+", long after the change,")
	})
}

// goLose starts an actor that deletes the log.
func (s *scenario) goLose() {
	s.Go("X", "X", func(context.Context) {
		s.Note("X", "the log is deleted")
		if err := s.admin.Del(context.Background(), "ns:log").Err(); err != nil {
			s.Errorf("DEL: %v", err)
		}
	})
}

// stored stores the value, so that the first call reads it.
func (s *scenario) stored() {
	c, err := singlefill.New(s.admin, "ns", ttl, &singlefill.Options[string]{Codec: singlefill.JSON, Jitter: -1})
	if err != nil {
		panic(err)
	}
	defer c.Close()
	if err := c.Set(context.Background(), "k", "v1"); err != nil {
		panic(err)
	}
}

// exploreNear is explore of a scenario in which processes keep values in memory, to its end. It fails the
// test if no call was served from memory.
func exploreNear(t *testing.T, plan schedule.Plan, run func(s *scenario)) {
	t.Helper()
	hits := int64(0)
	opts := singlefill.Options[string]{Near: &singlefill.Near{MaxLag: maxLag, Size: 100}}
	explore(t, plan, opts, func(s *scenario) {
		s.mayOverlap = true
		s.Aside = func(args []string) bool { return slices.Contains(args, "ns:log:{ns:log}") || aside(args) }
		run(s)
		s.end()
		for _, c := range s.caches {
			hits += c.Stats().NearHits
		}
	})
	t.Logf("%d hits in memory", hits)
	if hits == 0 {
		t.Error("no call was served from memory")
	}
}

// In a sample of the orders of a read, its value in transit, an announcement, its record, a read of
// the log and a loss of the log, no process serves the old value for longer than MaxLag.
func TestOrders_NearAll(t *testing.T) {
	for _, how := range announcements {
		for _, test := range []struct {
			name  string
			plan  schedule.Plan
			loses bool
		}{
			{"", schedule.Plan{AtLeast: 50, Sample: 100, Together: true}, false},
			{", and the log is lost", schedule.Plan{AtLeast: 50, Sample: 100, Together: true}, true},
			{", replies in transit", schedule.Plan{AtLeast: 50, Sample: 60}, false},
		} {
			t.Run(how.name+test.name, func(t *testing.T) {
				t.Parallel()
				exploreNear(t, test.plan, func(s *scenario) {
					s.stored()
					s.goRead("B", 2, 0) // the first read of the log drops what the first call found
					if test.loses {     // there are too many orders otherwise
						s.Run()
						s.goRead("B", 2, 3*schedule.Step)
						s.goLose()
					}
					s.Go("A", "A", func(ctx context.Context) {
						s.change(ctx, "A", how.announce)
						for range 4 {
							time.Sleep(3 * schedule.Step) // so that B goes on reading the log
							_, _ = s.get(ctx, "B", "B, after the change,")
						}
					})
				})
			})
		}
	}
}

// Longer schedules, in which both processes read before and after the change: the log is lost; commands or
// replies are late, connections break, and processes are cut off.
func TestOrders_Near(t *testing.T) {
	for name, test := range map[string]struct {
		plan  schedule.Plan
		reads int // of B
		loses bool
	}{
		"":                      {schedule.Plan{AtLeast: 8, Sample: 8, Pauses: 4}, 4, false},
		", and the log is lost": {schedule.Plan{AtLeast: 8, Sample: 8, Pauses: 4}, 4, true},
		", with faults": {schedule.Plan{
			AtLeast: 12, Sample: 12, Pauses: 4, Faults: 2, Break: true,
			Hold: []time.Duration{3 * schedule.Step, maxLag + 2*schedule.Step},
			Cut:  []time.Duration{maxLag + 2*schedule.Step},
		}, 5, true},
	} {
		for _, how := range announcements {
			t.Run(how.name+name, func(t *testing.T) {
				t.Parallel()
				exploreNear(t, test.plan, func(s *scenario) {
					s.goRead("B", test.reads, 3*schedule.Step)
					s.goAnnounce("A", "B", how.announce)
					if test.loses {
						s.goLose()
					}
				})
			})
		}
	}
}
