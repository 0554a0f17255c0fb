package filllock

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// fixtures returns n fixtures of one client.
func (f backend) fixtures(t testing.TB, n int) []*fixture {
	first := f.fixture(t)
	all := []*fixture{first}
	for range n - 1 {
		b := f.fixture(t)
		b.client = first.client
		all = append(all, b)
	}
	return all
}

// setsOf returns a Set for each of the fixtures. Each has a value and a life of its own.
func setsOf(all []*fixture) (sets []Set) {
	for i, b := range all {
		sets = append(sets, Set{Pair{b.Keys.Value, b.Keys.Lock}, fmt.Appendf(nil, "entry %d", i), lifeOf(i)})
	}
	return sets
}

func lifeOf(i int) time.Duration { return time.Duration(i+1) * time.Hour }

// wantSet checks that the set of number i has been done, or has not.
func (b *fixture) wantSet(i int, done bool) {
	b.t.Helper()
	if !done {
		b.want(b.Keys.Value, state{text: entryA}, 0)
		b.want(b.Keys.Lock, held(other), 0)
		return
	}
	b.want(b.Keys.Value, state{text: fmt.Sprint("entry ", i)}, lifeOf(i))
	b.want(b.Keys.Lock, state{}, 0)
}

// SetMany stores each entry under its key, with its own life, whatever is there, and removes each
// lock. With scripts that takes one round trip.
func TestSetMany_States(t *testing.T) {
	t.Parallel()
	eachBackend(t, func(t *testing.T, f backend) {
		values := []state{{}, {text: entryA}, {list: true}, {text: "garbage", forever: true}}
		locks := []state{{}, held(other), failed(other, "boom"), abandoned(other)}
		all := f.fixtures(t, len(values)*len(locks))
		for i, b := range all {
			b.set(b.Keys.Value, values[i%len(values)])
			b.set(b.Keys.Lock, locks[i/len(values)])
		}
		var trips []int // how many commands each of them has
		f.rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			if name := cmds[0].Name(); len(cmds) > 1 && (name == "eval" || name == "multi") {
				trips = append(trips, len(cmds))
			}
			return nil
		}))
		errs, err := SetMany(t.Context(), all[0].client, setsOf(all))
		if err != nil || len(errs) != len(all) || errors.Join(errs...) != nil {
			t.Errorf("SetMany = %v, %v", errs, err)
		}
		for i, b := range all {
			b.wantSet(i, true)
		}
		if want := []int{len(all)}; !strings.Contains(t.Name(), "without_scripts") && !slices.Equal(trips, want) {
			t.Errorf("pipelines of %v commands, want %v", trips, want)
		}
	})
}
