package cache_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

// keysOf returns the names of n keys.
func keysOf(prefix string, n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprint(prefix, i))
	}
	return keys
}

// Calls for many keys in eight processes, with keys in common and in any order, all end, and each key
// is loaded once.
func TestGetOrLoadMany_OverlappingKeys(t *testing.T) {
	t.Parallel()
	const rounds, keys, each = 12, 24, 16
	f := newFleet(t)
	processes := f.startAll(8, config{})
	for round := range rounds {
		all := keysOf(fmt.Sprintf("round%d/", round), keys)
		tag := fmt.Sprint(round)
		asked := make(map[string]int)
		for _, p := range processes {
			var some []string
			for _, i := range rand.Perm(keys)[:each] {
				some = append(some, all[i])
				asked[all[i]]++
			}
			p.many(tag, some, plan{})
		}
		valueOf := make(map[string]string)
		for o, n := range allDone(processes, tag) {
			key, value, _ := strings.Cut(o.Text, "=")
			if _, twice := valueOf[key]; o.Kind != gotValue || twice || n != asked[key] {
				t.Errorf("%d calls got %v; %d asked for the key; another value is %q", n, o, asked[key], valueOf[key])
			}
			valueOf[key] = value
		}
		for key := range asked {
			if valueOf[key] == "" {
				t.Errorf("no call got a value of %q", key)
			}
			f.wantLoads(key, 1)
		}
	}
}

// When a process is killed while it loads many keys, others load them when its locks have expired.
//
//fault:killed-holder
func TestGetOrLoadMany_KilledHolder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	others := f.startAll(2, config{})
	holder := f.start(shortLock)
	keys := keysOf("k", 5)
	holder.many("killed", keys, plan{Block: true})
	for range keys {
		holder.begun("killed")
	}
	for _, p := range others {
		p.many("waits", keys, plan{})
		for _, key := range keys {
			redistest.Await(t, fmt.Sprintf("%s asks for %q", p.name, key), func() bool { return p.polled(key) > 0 })
		}
	}
	for _, key := range keys {
		f.wantLoads(key, 1)
	}
	holder.Kill()

	got := allDone(others, "waits")
	for o, n := range got {
		if o.Kind != gotValue || n != len(others) {
			t.Errorf("%d calls got %v", n, o)
		}
	}
	if len(got) != len(keys) {
		t.Errorf("calls got %v, want a value of each of %v", got, keys)
	}
	for _, key := range keys {
		f.wantLoads(key, 2)
		if lock := f.locked(key); lock != "" {
			t.Errorf("the lock of %q holds %q", key, lock)
		}
	}
}

// Calls for one key and for many keys in different processes wait for each other's loads. A call for
// many keys loads those that it can lock, and waits for the others.
func TestGetOrLoadMany_MeetsGetOrLoad(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	processes := f.startAll(2, config{})
	one, many := processes[0], processes[1]

	one.get("one", "a", 1, plan{Block: true})
	value := one.begun("one").Value
	many.many("many", []string{"a", "b", "c"}, plan{})
	b, c := many.begun("many"), many.begun("many") // while the load of a blocks
	redistest.Await(t, "the call waits for the load of a", func() bool { return many.polled("a") > 0 })
	many.wantUnfinished("many")
	one.release("one")
	got := many.done("many")
	for _, want := range []string{"a=" + value, b.Key + "=" + b.Value, c.Key + "=" + c.Value} {
		if got[outcome{gotValue, want}] != 1 || len(got) != 3 {
			t.Errorf("got %v, want %q among three", got, want)
		}
	}
	one.wantDone("one", 1, gotValue, value)

	many.many("many2", []string{"x", "y"}, plan{Block: true})
	values := make(map[string]string)
	for range 2 {
		r := many.begun("many2")
		values[r.Key] = r.Value
	}
	one.get("one2", "y", 3, plan{})
	one.waiting("one2", "y")
	many.release("many2")
	one.wantDone("one2", 3, gotValue, values["y"])
	if got := many.done("many2"); got[outcome{gotValue, "y=" + values["y"]}] != 1 || len(got) != 2 {
		t.Errorf("got %v", got)
	}
	for _, key := range []string{"a", "b", "c", "x", "y"} {
		f.wantLoads(key, 1)
	}
}
