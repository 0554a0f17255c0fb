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
