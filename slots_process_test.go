package singlefill_test

import (
	"fmt"
	"testing"
	"time"
)

// MaxFleetLoads bounds the loads of four processes.
func TestMaxFleetLoads_FourProcesses(t *testing.T) {
	t.Parallel()
	const processes, keys, limit = 4, 50, 5
	f := newFleet(t)
	users := f.all(processes, config{Direct: true, MaxFleetLoads: limit})
	for _, u := range users {
		for k := range keys {
			key := fmt.Sprint(u.name, k)
			u.get(key, key, 1, plan{Sleep: 5 * time.Millisecond})
		}
	}
	for _, u := range users {
		for k := range keys {
			if got := u.done(fmt.Sprint(u.name, k)); len(got) != 1 {
				t.Errorf("%s, key %d: %v", u.name, k, got)
			}
		}
	}
	most, err := f.rdb.ZScore(t.Context(), mostRunningKey(f.namespace), "most").Result()
	if err != nil || most > limit || most < 2 {
		t.Errorf("%v loads at once, %v; want %d at most, and more than one", most, err, limit)
	}
}
