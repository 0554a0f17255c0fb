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

// outcomes explores a scenario and counts how often it ended with each outcome.
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

// add increments a counter in the wrong way: another add may come between its GET and its SET.
func add(ctx context.Context, rdb *redis.Client) error {
	n, err := rdb.Get(ctx, "n").Int()
	if err == nil || err == redis.Nil {
		err = rdb.Set(ctx, "n", n+1, time.Hour).Err()
	}
	return err
}

// Explore finds a lost update.
func TestExplore_LostUpdate(t *testing.T) {
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

// Explore runs every order.
func TestExplore_EveryOrder(t *testing.T) {
	got := outcomes(t, Plan{}, func(w *World) string {
		var order strings.Builder
		for _, who := range []string{"a", "b", "c"} {
			// In one process, so that all orders lead to different states.
			w.Go("A", who, func(context.Context) {
				w.At("A", who)
				order.WriteString(who)
			})
		}
		w.Run()
		return order.String()
	})
	want(t, got, "abc", "acb", "bac", "bca", "cab", "cba")
	// Two steps of each, in any order.
	if runs := 6 * 5 * 4 * 3 * 2 / (2 * 2 * 2); sum(got) != runs {
		t.Errorf("%d runs, want %d", sum(got), runs)
	}
}

func sum(counts map[string]int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

// A command may arrive after its connection has broken, and is retried.
func TestExplore_BrokenConnection(t *testing.T) {
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

// A caller gives up a command that is held up.
func TestExplore_HeldUpCommand(t *testing.T) {
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

// Time passes only when nothing waits, or by Pauses.
func TestExplore_Time(t *testing.T) {
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

// A message arrives before or after what another process does, or never.
func TestExplore_Messages(t *testing.T) {
	got := outcomes(t, Plan{AtLeast: 100, Sample: 100, Listen: true, Faults: 1, Lose: true}, func(w *World) string {
		listener, publisher := w.Client("A"), w.Client("B")
		heard, done := "never", false
		w.Go("A", "A", func(ctx context.Context) {
			sub := listener.SSubscribe(ctx, "c")
			defer sub.Close()
			if _, err := sub.Receive(ctx); err != nil {
				w.Errorf("%v", err)
			}
			w.Go("B", "B", func(ctx context.Context) {
				n, err := publisher.Eval(ctx, "return redis.call('PUBLISH', KEYS[1], 'm')", []string{"c"}).Int()
				if n != 1 || err != nil {
					w.Errorf("%d clients heard the message, %v", n, err)
				}
				w.At("B", "goes on")
				done = true
			})
			if m, err := sub.ReceiveTimeout(ctx, time.Second); err == nil {
				heard = "before"
				if m, ok := m.(*redis.Message); !ok || m.Channel != "c" || m.Payload != "m" {
					w.Errorf("got %v", m)
				}
				if done {
					heard = "after"
				}
			}
		})
		w.Run()
		return heard
	})
	want(t, got, "after", "before", "never")
}

// An exploration that proves too little fails.
func TestExplorer_Complaint(t *testing.T) {
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
