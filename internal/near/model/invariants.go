package model

// An invariant holds in every state.
type invariant struct {
	name  string
	holds func(s *state) bool
}

var (
	redisCurrent = invariant{"I0: after a Delete, Redis has no older value", redisIsCurrent}
	bounded      = invariant{"I1: MaxLag after a Delete, P serves no older value", boundHolds}
	ownDeletes   = invariant{"I2: after a Delete of P, P has no older value", ownDeletesHold}
	knownDeletes = invariant{"I3: after a record is applied, P has no older value", knownDeletesHold}

	invariants = []*invariant{&redisCurrent, &bounded, &ownDeletes, &knownDeletes}
)

// redisIsCurrent is about calls that ask Redis: they return what it has at some time after they
// began.
func redisIsCurrent(s *state) bool {
	for i, d := range s.deletes {
		if d.step == hasReturned && isOlder(s.value, deleteVersion(i)) {
			return false
		}
	}
	return true
}

// boundHolds is about calls that look into memory. The next step of the call returns the value.
func boundHolds(s *state) bool {
	switch s.call.step {
	case proven:
		return !isOlder(s.memory, s.call.oldest)
	case looked:
		return !s.proof.recent || !isOlder(s.call.found, s.call.oldest)
	}
	return true
}

// promised returns the oldest version that a call may return if it begins now: the version of the
// newest Delete that returned MaxLag ago, or earlier. The Deletes of P promise more: see I2.
//
// A failover may lose what the server has acknowledged. If it undoes a Delete before P has read the
// record, P can never learn of it. So such a Delete promises nothing any more.
func (m *model) promised(s *state) version {
	var v version
	for i, d := range s.deletes {
		if d.step == hasReturned && d.age >= m.maxLag && !d.byP && (!d.undone || m.withoutExcuse) {
			v = deleteVersion(i)
		}
	}
	return v
}

func ownDeletesHold(s *state) bool {
	for i, d := range s.deletes {
		if d.step == hasReturned && d.byP && isOlder(s.memory, deleteVersion(i)) {
			return false
		}
	}
	return true
}

func knownDeletesHold(s *state) bool { return !isOlder(s.memory, s.told) }

// isOlder reports whether there is a value and it is older than v.
func isOlder(value, v version) bool { return value != 0 && value < v }

// violated returns an invariant that does not hold, or nil.
func violated(s *state) *invariant {
	for _, i := range invariants {
		if !i.holds(s) {
			return i
		}
	}
	return nil
}
