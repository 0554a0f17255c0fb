package cache_test

import (
	"testing"
	"time"
)

// A hundred requests of four processes use a token that is refused, and call DeleteIf and GetOrLoad: one of them
// deletes it, and all get the token of one load. Afterwards Redis has that token.
func TestDeleteIf_RefusedToken(t *testing.T) {
	for name, c := range map[string]config{"Redis": {Direct: true}, "Near": {Direct: true, Near: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const requests = 25
			f := newFleet(t)
			processes := f.startAll(4, c)
			for _, p := range processes {
				p.Order(order{Op: "replace", Tag: "token", Key: "k", N: requests, Every: 2 * time.Millisecond, Plan: plan{Sleep: 50 * time.Millisecond}})
			}
			for _, p := range processes {
				p.await("ready", "token")
			}
			f.wantLoads("k", 1)
			for _, p := range processes {
				p.Order(order{Op: "start", Tag: "token"})
			}
			values, deleted := make(map[outcome]int), int64(0)
			for _, p := range processes {
				done := p.await("done", "token")
				for _, o := range done.Outcomes {
					values[o.outcome] += o.N
				}
				for _, n := range done.Counts {
					deleted += n
				}
			}
			f.wantLoads("k", 2)
			if deleted != 1 {
				t.Errorf("%d requests have deleted the token, want one", deleted)
			}
			if len(values) != 1 || values[processes[0].peek("k")] != len(processes)*requests {
				t.Errorf("the requests got %v, want all the token that is stored", values)
			}
		})
	}
}
