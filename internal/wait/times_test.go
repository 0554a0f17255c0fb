package wait

import (
	"fmt"
	"testing"
	"time"
)

// A process remembers the load times of a bounded number of keys.
func TestTimes_Bounded(t *testing.T) {
	m := NewTimes()
	for i := range 3 * remembered {
		key, took := fmt.Sprint("k", i), time.Second<<(i%4)
		m.Note(key, took)
		if e := m.Estimate(key, 0); e != (Estimate{took, took}) {
			t.Fatalf("%s: %+v, just after a load of %v", key, e, took)
		}
		if n := len(m.keys); n > remembered {
			t.Fatalf("%d keys are remembered, want %d at most", n, remembered)
		}
	}
	m.Note("set", 0)
	if e := m.Estimate("set", 0); e != (Estimate{}) {
		t.Errorf("%+v is expected of a key that was set, in a namespace of loads of all lengths", e)
	}
}

// An estimate follows the last loads, and ignores a load that is like no other.
func TestTimes_Estimate(t *testing.T) {
	for name, c := range map[string]struct {
		loads []int // s
		want  Estimate
	}{
		"none":                       {nil, Estimate{}},
		"one":                        {[]int{10}, Estimate{10, 10}},
		"two":                        {[]int{14, 10}, Estimate{9, 15}},
		"two of different orders":    {[]int{1, 10}, Estimate{}},
		"a few":                      {[]int{12, 10, 9, 13}, Estimate{8, 14}},
		"the first is like no other": {[]int{1, 10, 10, 10, 10}, Estimate{10, 10}},
		"the last is like no other":  {[]int{10, 10, 10, 10, 99}, Estimate{10, 10}},
		"one is too short, one long": {[]int{10, 1, 10, 99, 10}, Estimate{10, 10}},
		"many that vary":             {[]int{13, 7, 9, 11, 8, 12, 10, 10}, Estimate{7, 13}},
		"a change, seen once":        {[]int{10, 10, 10, 10, 10, 10, 10, 10, 99}, Estimate{10, 10}},
		"a change, seen twice":       {[]int{10, 10, 10, 10, 10, 10, 10, 10, 99, 99}, Estimate{}},
		"a change, seen often":       {[]int{10, 10, 10, 99, 99, 99, 99, 99, 99, 99}, Estimate{99, 99}},
		"a small change, seen twice": {[]int{10, 10, 10, 10, 10, 10, 10, 10, 18, 18}, Estimate{8, 20}},
		"of two orders":              {[]int{10, 1, 10, 1, 10, 10, 10, 10}, Estimate{}},
	} {
		var h history
		for _, load := range c.loads {
			h = h.add(time.Duration(load) * time.Second)
		}
		want := Estimate{c.want.early * time.Second, c.want.late * time.Second}
		if e := h.estimate(); e != want || h.estimate() != e {
			t.Errorf("%s: loads of %v s: %+v, want %+v", name, c.loads, e, want)
		}
	}
}
