package cache_test

import (
	"fmt"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

// When a process is killed while it loads many keys, others load them when its locks have expired.
//
//fault:killed-holder
func TestGetOrLoadMany_KilledHolder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	others := f.startAll(2, config{})
	holder := f.start(shortLock)
	keys := []string{"a", "b", "c", "d", "e"}
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
