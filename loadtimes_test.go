package singlefill

import (
	"fmt"
	"testing"
	"time"
)

func TestTheMemoryOfLoadTimesIsBounded(t *testing.T) {
	m := newLoadTimes()
	for i := range 3 * remembered {
		key, took := fmt.Sprint("k", i), time.Second<<(i%4)
		m.note(key, took)
		if e := m.estimate(key, 0); e != (estimate{took, took}) {
			t.Fatalf("%s: %+v, just after a load of %v", key, e, took)
		}
		if n := len(m.keys); n > remembered {
			t.Fatalf("%d keys are remembered, want %d at most", n, remembered)
		}
	}
	m.note("set", 0)
	if e := m.estimate("set", 0); e != (estimate{}) {
		t.Errorf("%+v is expected of a key that was set, in a namespace of loads of all lengths", e)
	}
}

func TestAnEstimateFollowsTheLoads(t *testing.T) {
	for name, c := range map[string]struct {
		loads []int // s
		want  estimate
	}{
		"none":                       {nil, estimate{}},
		"one":                        {[]int{10}, estimate{10, 10}},
		"two":                        {[]int{14, 10}, estimate{9, 15}},
		"two of different orders":    {[]int{1, 10}, estimate{}},
		"a few":                      {[]int{12, 10, 9, 13}, estimate{8, 14}},
		"the first is like no other": {[]int{1, 10, 10, 10, 10}, estimate{10, 10}},
		"the last is like no other":  {[]int{10, 10, 10, 10, 99}, estimate{10, 10}},
		"one is too short, one long": {[]int{10, 1, 10, 99, 10}, estimate{10, 10}},
		"many that vary":             {[]int{13, 7, 9, 11, 8, 12, 10, 10}, estimate{7, 13}},
		"a change, seen once":        {[]int{10, 10, 10, 10, 10, 10, 10, 10, 99}, estimate{10, 10}},
		"a change, seen twice":       {[]int{10, 10, 10, 10, 10, 10, 10, 10, 99, 99}, estimate{}},
		"a change, seen often":       {[]int{10, 10, 10, 99, 99, 99, 99, 99, 99, 99}, estimate{99, 99}},
		"a small change, seen twice": {[]int{10, 10, 10, 10, 10, 10, 10, 10, 18, 18}, estimate{8, 20}},
		"of two orders":              {[]int{10, 1, 10, 1, 10, 10, 10, 10}, estimate{}},
	} {
		var h history
		for _, load := range c.loads {
			h = h.add(time.Duration(load) * time.Second)
		}
		want := estimate{c.want.early * time.Second, c.want.late * time.Second}
		if e := h.estimate(); e != want || h.estimate() != e {
			t.Errorf("%s: loads of %v s: %+v, want %+v", name, c.loads, e, want)
		}
	}
}
