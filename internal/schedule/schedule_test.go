package schedule

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// outcomes explores a scenario and returns how often it has ended in which way.
func outcomes(t *testing.T, plan Plan, scenario func(w *World) string) map[string]int {
	t.Helper()
	seen := make(map[string]int)
	Explore(t, plan, func(w *World) { seen[scenario(w)]++ })
	return seen
}

func want(t *testing.T, got map[string]int, outcomes ...string) {
	t.Helper()
	if keys := slices.Sorted(maps.Keys(got)); !slices.Equal(keys, outcomes) {
		t.Errorf("got %v, want each of %v", got, outcomes)
	}
}

// add is what nobody should do: another add may come between its GET and its SET.
func add(ctx context.Context, rdb *redis.Client) error {
	n, err := rdb.Get(ctx, "n").Int()
	if err == nil || err == redis.Nil {
		err = rdb.Set(ctx, "n", n+1, time.Hour).Err()
	}
	return err
}

func TestALostUpdateIsFound(t *testing.T) {
	for _, plan := range []Plan{{AtLeast: 10}, {AtLeast: 5, Together: true}, {Sample: 50}} {
		got := outcomes(t, plan, func(w *World) string {
			for _, p := range []string{"A", "B"} {
				rdb := w.Client(p)
				w.Go(p, p, func(ctx context.Context) {
					if err := add(ctx, rdb); err != nil {
						w.Errorf("%v", err)
					}
				})
			}
			w.Run()
			n, _ := w.Server.Get("n")
			return n
		})
		want(t, got, "1", "2")
	}
}

func TestEveryOrderIsRun(t *testing.T) {
	got := outcomes(t, Plan{}, func(w *World) string {
		var order strings.Builder
		for _, who := range []string{"a", "b", "c"} {
			w.Go("A", who, func(context.Context) { // in one process: no two orders come to the same
				w.At("A", who)
				order.WriteString(who)
			})
		}
		w.Run()
		return order.String()
	})
	want(t, got, "abc", "acb", "bac", "bca", "cab", "cba")
	if runs := 6 * 5 * 4 * 3 * 2 / (2 * 2 * 2); sum(got) != runs { // two steps of each in any order
		t.Errorf("%d runs, want %d", sum(got), runs)
	}
}

func sum(counts map[string]int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

func TestWhatComesToTheSameIsExploredOnce(t *testing.T) {
	got := outcomes(t, Plan{}, func(w *World) string {
		for _, p := range []string{"A", "B"} {
			w.Go(p, p, func(context.Context) {
				for range 5 {
					w.At(p, "goes on")
				}
			})
		}
		w.Run()
		return "done"
	})
	// Of the 924 orders of 6 steps each most end where they meet another one; those that do not are those in which
	// one has come to its end, so that there is no choice any more, after so many steps of the other.
	if runs := sum(got); runs != 12 {
		t.Errorf("%d runs have come to their end, want 12", runs)
	}
}

func TestACommandArrivesAfterItsConnectionHasBroken(t *testing.T) {
	got := outcomes(t, Plan{Faults: 1, Break: true, Hit: []string{"A"}}, func(w *World) string {
		a, b := w.Client("A"), w.Client("B")
		w.Go("A", "A", func(ctx context.Context) {
			if err := a.RPush(ctx, "list", "a").Err(); err != nil {
				w.Errorf("it was not tried again: %v", err)
			}
			if err := b.RPush(ctx, "list", "b").Err(); err != nil {
				w.Errorf("%v", err)
			}
		})
		w.Run()
		list, _ := w.Server.List("list")
		return strings.Join(list, "")
	})
	want(t, got, "aab", "ab", "aba")
}

func TestACallerGivesUpWhatIsHeldUp(t *testing.T) {
	for _, plan := range []Plan{
		{Faults: 1, Hold: []time.Duration{3 * Step}},
		{Faults: 1, Cut: []time.Duration{3 * Step}},
		{Faults: 1, Cancel: []string{"A"}},
	} {
		got := outcomes(t, plan, func(w *World) string {
			rdb, result := w.Client("A"), ""
			w.Go("A", "A", func(ctx context.Context) {
				bounded, cancel := context.WithTimeout(ctx, 2*Step)
				defer cancel()
				err := rdb.Set(bounded, "k", "v", time.Hour).Err()
				if err == nil {
					err = ctx.Err()
				}
				if err != nil {
					result = "given up, "
				}
			})
			w.Run()
			v, _ := w.Server.Get("k")
			return result + v
		})
		if got["v"] == 0 || got["given up, v"]+got["given up, "] == 0 {
			t.Errorf("%+v: got %v, want both what goes well and what is given up", plan, got)
		}
	}
}

func TestTimePassesOnlyWhenNothingWaits(t *testing.T) {
	for _, test := range []struct {
		plan Plan
		want []string
	}{
		{Plan{}, []string{"0s"}},
		{Plan{Pauses: 2}, []string{"0s", "1s", "500ms"}},
	} {
		got := outcomes(t, test.plan, func(w *World) (passed string) {
			w.Go("A", "A", func(context.Context) {
				begun := time.Now()
				w.At("A", "waits")
				passed = time.Since(begun).String()
			})
			w.Run()
			return passed
		})
		want(t, got, test.want...)
	}
}

func TestASampleIsTheSameForTheSameSeed(t *testing.T) {
	explore := func() (stories []string) {
		Explore(t, Plan{Sample: 10}, func(w *World) {
			for _, p := range []string{"A", "B"} {
				rdb := w.Client(p)
				w.Go(p, p, func(ctx context.Context) { _ = add(ctx, rdb) })
			}
			w.Run()
			stories = append(stories, strings.Join(w.story, "\n"))
		})
		return stories
	}
	one, two := explore(), explore()
	if !slices.Equal(one, two) {
		t.Error("the same seed gives other schedules")
	}
	if len(slices.Compact(slices.Sorted(slices.Values(one)))) < 2 {
		t.Error("all schedules are the same")
	}
}

func TestAnExplorationThatProvesLittleComplains(t *testing.T) {
	for _, e := range []explorer{
		{plan: Plan{AtLeast: 2}, runs: 1},
		{runs: 100, lost: 21},
	} {
		if e.complaint() == "" {
			t.Errorf("%d runs, of which %d were lost, pass", e.runs, e.lost)
		}
	}
	if e := (explorer{plan: Plan{AtLeast: 2}, runs: 100, lost: 20}); e.complaint() != "" {
		t.Error(e.complaint())
	}
}

func TestAScheduleThatIsNotRepeatableIsNoticed(t *testing.T) {
	e := &explorer{seen: make(map[uint64]bool)}
	state := uint64(0)
	choose := func(what ...string) (int, bool) {
		options := make([]option, len(what))
		for i, s := range what {
			options[i].what = s
		}
		state++
		return e.choose(options, func() uint64 { return state })
	}
	e.begin()
	choose("a", "b")
	choose("c", "d")
	if !e.next() {
		t.Fatal("there is nothing to be done")
	}
	e.begin()
	if _, ok := choose("a", "x"); ok || e.lost != 1 {
		t.Errorf("other choices than before go unnoticed: %v, %d", ok, e.lost)
	}
}
