package model

import "testing"

// Memory serves nothing that Redis has ended. A second model shows that, of one entry in Redis and one in memory:
// neither the log nor invalidations play a part, and clocks none. Loads store values that live for one tick or
// more, also in place of others; memory keeps what a PTTL and a GET find, for as long as their replies allow.

// An endRule is a rule for how long that is.
type endRule int

const (
	allEndRules endRule = iota
	pttlFirst           // PTTL is executed before GET
	atMostLife          // a value is kept for its own life at most
	fromSending         // that time counts from when the commands were sent
	endOfEndRules
)

// An endEntry is a value: it lives for life, has been in Redis for a part of it, and left is the rest. The zero
// entry is none.
type endEntry struct{ life, left int8 }

type endState struct {
	redis  endEntry
	step   int8     // commands of the read that have been executed, plus 1; 0: none is in transit
	sent   int8     // ticks since the read was sent
	pttl   int8     // its replies; -1: there was no entry
	got    endEntry // left goes on, as in Redis
	memory endEntry // the same
	kept   int8     // for how many more ticks memory serves it
}

const longestLife = 3

func (s endState) next(broken endRule) (all []endState) {
	add := func(do func(s *endState)) {
		n := s
		do(&n)
		all = append(all, n)
	}
	for life := int8(1); life <= longestLife; life++ {
		add(func(s *endState) { s.redis = endEntry{life, life} })
	}
	add(func(s *endState) {
		for _, e := range []*endEntry{&s.redis, &s.got, &s.memory} {
			e.left = max(e.left-1, 0)
		}
		if s.kept = max(s.kept-1, 0); s.redis.left == 0 {
			s.redis = endEntry{}
		}
		if s.step > 0 {
			s.sent = min(s.sent+1, longestLife)
		}
	})
	switch ask := s.step - 1; {
	case ask < 0:
		add(func(s *endState) { s.step, s.sent, s.memory, s.kept = 1, 0, endEntry{}, 0 })
	case ask == 2:
		add(func(s *endState) { s.receive(broken) })
	case (ask == 0) == (broken != pttlFirst):
		add(func(s *endState) {
			s.step++
			if s.pttl = s.redis.left; s.redis == (endEntry{}) {
				s.pttl = -1
			}
		})
	default:
		add(func(s *endState) { s.step, s.got = s.step+1, s.redis })
	}
	return all
}

// receive keeps what the replies have, as keepFound and keep do.
func (s *endState) receive(broken endRule) {
	kept := s.pttl
	if life := s.got.life; kept < 0 || kept > life && broken != atMostLife {
		kept = life
	}
	if broken != fromSending {
		kept = max(kept-s.sent, 0)
	}
	if s.got != (endEntry{}) {
		s.memory, s.kept = s.got, kept
	}
	s.step, s.sent, s.pttl, s.got = 0, 0, 0, endEntry{}
}

// holds is I4: what memory still serves would still be in Redis if nothing had replaced it.
func (s endState) holds() bool { return s.kept <= s.memory.left }

func TestModel_Ends(t *testing.T) {
	t.Parallel()
	for broken := range endOfEndRules {
		seen, todo, violated := map[endState]bool{{}: true}, []endState{{}}, false
		for len(todo) > 0 {
			s := todo[len(todo)-1]
			todo = todo[:len(todo)-1]
			violated = violated || !s.holds()
			for _, n := range s.next(broken) {
				if !seen[n] {
					seen[n] = true
					todo = append(todo, n)
				}
			}
		}
		if violated != (broken != allEndRules) {
			t.Errorf("rule %d is broken: I4 is violated: %t", broken, violated)
		}
		t.Logf("rule %d is broken: %d states", broken, len(seen))
	}
}
