//go:build !race

// A search has one goroutine and takes ten times as long with -race: scripts/test runs it without.

package model

import (
	"testing"
	"time"
)

// The invariants hold in every state.
func TestModel(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		model model
		long  bool
	}{
		{"one Delete", model{deletes: 1, log: 2, maxLag: 2, others: allStripes}, false},
		{"short pages", model{deletes: 1, log: 3, maxLag: 3, others: allStripes, page: 2}, false},
		{"two Deletes", model{deletes: 2, log: 2, maxLag: 2}, true},
		{"failover", model{deletes: 1, log: 2, maxLag: 2, others: otherStripes, failover: true}, true},
	} {
		if test.long && (testing.Short()) {
			continue // it takes seconds
		}
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			begun := time.Now()
			x := test.model.search()
			violation, path := x.check()
			t.Logf("%d states in %v", len(x.nodes), time.Since(begun).Round(time.Millisecond))
			if violation != nil {
				trace, _ := test.model.replay(path)
				t.Fatalf("violated: %s\n%s", violation.name, trace)
			}
		})
	}
}

// A protocol that breaks a rule violates an invariant.
func TestModel_BrokenRules(t *testing.T) {
	t.Parallel()
	var (
		quiet    = model{deletes: 1, log: 2, maxLag: 2}
		busy     = model{deletes: 1, log: 2, maxLag: 2, others: allStripes}
		pages    = model{deletes: 1, log: 3, maxLag: 2, others: allStripes, page: 2}
		replicas = model{deletes: 1, log: 2, maxLag: 2, failover: true}
	)
	tests := []struct {
		name      string
		model     model
		rule      rule
		violation *invariant
	}{
		{"the record is appended before DEL is answered", busy, recordAfterDel, &knownDeletes},
		{"a refused record is ignored", busy, resetIfRefused, &bounded},
		{"Delete returns before the generation changes", busy, bumpBeforeReturn, &ownDeletes},
		{"a load that began before DEL is stored", busy, fence, &redisCurrent},

		{"a replica answers the read", replicas, masterOnly, &bounded},
		{"the read is exclusive", quiet, inclusive, &bounded},
		{"records are compared by ID only", quiet, nonces, &bounded},
		{"nothing is dropped when the record is missing", busy, dropAtLoss, &bounded},
		{"nothing is dropped at the start", busy, dropAtStart, &bounded},
		{"a full reply is a proof", pages, readToEnd, &bounded},
		{"the age of a proof counts from the reply", busy, proofFromSending, &bounded},
		{"the proof is noted before the generations change", busy, generationsThenProof, &bounded},

		{"the generation is taken when GET is answered", busy, generationBeforeGet, &ownDeletes},
		{"the generation is taken when the store is answered", busy, generationBeforeStore, &ownDeletes},
		{"a call looks at the proof last", busy, proofThenGeneration, &bounded},
	}
	for i, test := range tests {
		if test.rule != rule(i+1) {
			t.Fatalf("%s: rule %d, want %d", test.name, test.rule, i+1)
		}
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.model.broken = test.rule
			test.model.wantViolation(t, test.violation)
		})
	}
	if want := int(endOfRules) - 1; len(tests) != want {
		t.Errorf("%d rules are broken, want %d", len(tests), want)
	}
}

// A failover that loses the record of a Delete before P has read it breaks the promise of this
// Delete: its excuse is needed.
func TestModel_LostRecord(t *testing.T) {
	t.Parallel()
	m := model{deletes: 1, log: 2, maxLag: 2, failover: true, withoutExcuse: true}
	m.wantViolation(t, &bounded)
}

func (m *model) wantViolation(t *testing.T, want *invariant) {
	t.Helper()
	x := m.search()
	violation, path := x.check()
	if violation == nil {
		t.Fatalf("no violation in %d states", len(x.nodes))
	}
	trace, again := m.replay(path)
	t.Logf("after %d states, violated: %s\n%s", len(x.nodes), violation.name, trace)
	if violation != want {
		t.Errorf("want a violation of: %s", want.name)
	}
	if again != violation {
		t.Errorf("the trace does not show it without tidy")
	}
}

// After each kind of loss P can serve the new value. A P that served nothing would keep all
// invariants.
func TestModel_HitsAfterLosses(t *testing.T) {
	t.Parallel()
	missing := func(s *state) bool { return s.log.index(s.at) < 0 }
	for _, test := range []struct {
		name   string
		model  model
		action string
		then   func(s *state) bool
	}{
		{"read", model{log: 2}, "P applies the rest of it", func(s *state) bool { return s.told == 2 }},
		{"trimmed", model{log: 1}, "the record for v2 is answered", missing},
		{"lost", model{log: 2}, "the log is lost", missing},
		{"refused", model{log: 2}, "DEL of the log for v2 is answered", missing},
		{"failover", model{log: 2, failover: true}, "the replica becomes the master", missing},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			m := test.model
			m.deletes, m.maxLag = 1, 2
			s := m.initial()
			s = m.goOn(t, s, "", m.hits(1))
			s = m.goOn(t, s, test.action, test.then)
			m.goOn(t, s, "", m.hits(2))
		})
	}
}

// The bound is tight: one tick earlier P may serve the old value.
func TestModel_JustBeforeMaxLag(t *testing.T) {
	t.Parallel()
	m := model{deletes: 1, log: 2, maxLag: 2}
	m.goOn(t, m.initial(), "a tick passes", func(s *state) bool {
		d := s.deletes[0]
		return d.step == hasReturned && !d.byP && d.age == m.maxLag-1 && m.hits(1)(s)
	})
}

// hits returns a function that reports whether memory can serve v.
func (m *model) hits(v version) func(s *state) bool {
	return func(s *state) bool { return s.memory == v && s.proof.age < m.maxLag }
}

// goOn returns a state that can be reached from s. The name of the last action is last, unless that
// is empty.
func (m *model) goOn(t *testing.T, s state, last string, reached func(s *state) bool) state {
	t.Helper()
	end, path := m.search().run(s, func(a *action, s *state) bool {
		return (last == "" || a.name == last) && reached(s)
	})
	if path == nil {
		t.Fatalf("not reached: %q", last)
	}
	for _, a := range path {
		t.Log(a.name)
	}
	return end
}
