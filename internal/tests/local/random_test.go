package local

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A row is a key of a source of versions.
type row struct {
	version atomic.Int64 // of the source
	deleted atomic.Int64 // the version that the source had before the last Delete that has returned
	running atomic.Int64 // loads
}

// load returns the version and how many loads of the row run.
func (r *row) load() (version, running int64) {
	running = r.running.Add(1)
	defer r.running.Add(-1)
	version = r.version.Load()
	for range rand.IntN(20) {
		runtime.Gosched()
	}
	return version, running
}

// deletes changes the rows, and calls do, after which no older version may be seen.
func deletes(rows []*row, do func() error) error {
	versions := make([]int64, len(rows))
	for i, r := range rows {
		versions[i] = r.version.Add(1)
	}
	err := do()
	for i, r := range rows {
		for old := r.deleted.Load(); old < versions[i] && !r.deleted.CompareAndSwap(old, versions[i]); {
			old = r.deleted.Load()
		}
	}
	return err
}

// Whatever is called at the same time, in a cache with too little room: no call gets a version older than a Delete,
// DeleteTag or Clear that returned before the call, and what none of them is about is loaded once at a time.
func TestLocal_Random(t *testing.T) {
	for _, all := range []bool{false, true} { // whether there are calls that are about all keys
		t.Run(fmt.Sprint(all), func(t *testing.T) {
			t.Parallel()
			testRandom(t, all)
		})
	}
}

func testRandom(t *testing.T, all bool) {
	const keys, revoked = 100, 50 // the others are not deleted by themselves
	rows, index, tagged := make([]*row, keys), make(map[string]*row), make(map[string][]*row)
	for i := range rows {
		name := fmt.Sprint(i)
		rows[i] = new(row)
		index[name] = rows[i]
		tagged[name[:1]] = append(tagged[name[:1]], rows[i])
	}
	c := newCache(t, &singlefill.Options[int64]{
		Near:                 &singlefill.Near{Size: keys * 3 / 4},
		StaleWhileRevalidate: life,
		Tags:                 func(key string, _ int64) []string { return []string{key[:1]} },
	})
	load := func(_ context.Context, names []string) (map[string]int64, error) {
		found := make(map[string]int64)
		for _, name := range names {
			version, running := index[name].load()
			if running > 1 && !all && slices.Index(rows, index[name]) >= revoked {
				t.Errorf("%s: %d loads at a time", name, running)
			}
			found[name] = version
		}
		return found, nil
	}
	ctx := t.Context()
	var calls sync.WaitGroup
	for range 50 {
		calls.Go(func() {
			for range 40 {
				least := make(map[string]int64)
				for _, i := range rand.Perm(keys)[:1+rand.IntN(30)] {
					least[fmt.Sprint(i)] = rows[i].deleted.Load()
				}
				found, err := c.GetOrLoadMany(ctx, slices.Collect(maps.Keys(least)), load)
				redistest.Must(t, err)
				for name, old := range least {
					if v, ok := found[name]; !ok || v < old {
						t.Errorf("%s: version %d, %t, want %d or later", name, v, ok, old)
					}
				}
			}
		})
	}
	for range 4 {
		calls.Go(func() {
			for range 100 {
				i, n := rand.IntN(revoked), rand.IntN(40)
				name := fmt.Sprint(i)
				var err error
				switch {
				case all && n == 0:
					err = deletes(rows, func() error { return c.Clear(ctx) })
				case all && n == 1:
					err = deletes(tagged[name[:1]], func() error { return c.DeleteTag(ctx, name[:1]) })
				case n < 15:
					err = c.Expire(ctx, name)
				default:
					err = deletes(rows[i:i+1], func() error { return c.Delete(ctx, name) })
				}
				redistest.Must(t, err)
			}
		})
	}
	calls.Wait()
}
