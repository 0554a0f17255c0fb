package main

import (
	"errors"
	"slices"
	"testing"
	"time"
)

const ms = time.Millisecond

// quantile returns the value that a share does not exceed.
func TestQuantile(t *testing.T) {
	t.Parallel()
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(i+1)*ms)
	}
	for _, c := range []struct {
		sorted []time.Duration
		q      float64
		want   time.Duration
	}{
		{nil, 0.5, 0},
		{hundred[:1], 0.5, 1 * ms},
		{hundred[:2], 0.5, 1 * ms},
		{hundred[:3], 0.5, 2 * ms},
		{hundred, 0, 1 * ms},
		{hundred, 0.5, 50 * ms},
		{hundred, 0.99, 99 * ms},
		{hundred, 0.991, 100 * ms},
		{hundred, 1, 100 * ms},
	} {
		if got := quantile(c.sorted, c.q); got != c.want {
			t.Errorf("%v of %d: %v, want %v", c.q, len(c.sorted), got, c.want)
		}
	}
}

func loadOf(key string, phase int, began, ended time.Duration) load {
	return load{Key: key, Phase: phase, Began: began, Ended: ended}
}

// A refill is a period in which a key is being loaded.
func TestRefillsOf(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		loads []load
		want  []refill
	}{
		"none": {},
		"one":  {[]load{loadOf("a", cold, 1, 3)}, []refill{{cold, 1, 3, 1, 1}}},
		"a chain of which two run at one time": {
			[]load{loadOf("a", cold, 4, 7), loadOf("a", cold, 0, 3), loadOf("a", cold, 2, 5)},
			[]refill{{cold, 0, 7, 3, 2}},
		},
		"a short one within a long one": {
			[]load{loadOf("a", cold, 0, 9), loadOf("a", cold, 1, 2), loadOf("a", cold, 3, 4)},
			[]refill{{cold, 0, 9, 3, 2}},
		},
		"one after the other": {
			[]load{loadOf("a", cold, 0, 3), loadOf("a", expiring, 3, 6)},
			[]refill{{cold, 0, 3, 1, 1}, {expiring, 3, 6, 1, 1}},
		},
		"of two keys at one time": {
			[]load{loadOf("b", cold, 1, 3), loadOf("a", cold, 0, 3)},
			[]refill{{cold, 0, 3, 1, 1}, {cold, 1, 3, 1, 1}},
		},
	} {
		if got := refillsOf(c.loads); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// A summary counts one phase of all processes.
func TestRecording_Summary(t *testing.T) {
	t.Parallel()
	r := recording{Contender: "x", Load: 100 * ms}
	var first, second report
	for i := range 98 {
		first.call(cold, time.Duration(i+1)*ms/2, nil) // 0.5 ms to 49 ms
	}
	first.call(expiring, 7*ms, nil)
	second.call(cold, 50*ms, errors.New("one"))
	second.call(cold, 120*ms, errors.New("two"))
	first.Commands, second.Commands = [phases]int{150, 1}, [phases]int{100, 2}
	first.Loads = []load{loadOf("a", cold, 0, 100*ms)}
	second.Loads = []load{loadOf("a", cold, 50*ms, 150*ms), loadOf("b", cold, 0, 100*ms), loadOf("a", cold, 200*ms, 300*ms), loadOf("a", expiring, time.Second, 2*time.Second)}
	r.add(0, first)
	r.add(1, second)

	s := r.summary(cold)
	if want := (summary{calls: 100, errors: 2, commands: 250, waited: 2, loads: 4, refills: 3, most: 2, p50: 25 * ms, p99: 50 * ms, max: 120 * ms}); s != want {
		t.Errorf("%+v, want %+v", s, want)
	}
	if s.perCall() != 2.5 || s.perRefill() != 4.0/3 {
		t.Errorf("%v commands per call, %v loads per refill", s.perCall(), s.perRefill())
	}
	if got := r.summary(expiring); got.calls != 1 || got.loads != 1 || got.commands != 3 || got.waited != 0 || got.p99 != 7*ms {
		t.Errorf("expiring: %+v", got)
	}
	if r.FirstError != "one" || r.Loads[0].Process != 0 || r.Loads[1].Process != 1 {
		t.Errorf("%q, %v", r.FirstError, r.Loads)
	}
	if none := (&recording{}).summary(cold); none != (summary{}) || none.perCall() != 0 || none.perRefill() != 0 {
		t.Errorf("of nothing: %+v", none)
	}
}
