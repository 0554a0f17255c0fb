package local

import (
	"cmp"
	"slices"
)

// A sorted is a sorted set.
type sorted struct {
	scores map[string]float64
	order  []scored
}

type scored struct {
	score  float64
	member string
}

func (a scored) compare(b scored) int {
	return cmp.Or(cmp.Compare(a.score, b.score), cmp.Compare(a.member, b.member))
}

// raise adds a member, or raises its score. It returns how many members it has added.
func (z *sorted) raise(member string, score float64) (added int64) {
	old, known := z.scores[member]
	switch {
	case known && old >= score:
		return 0
	case known:
		z.remove(member)
	case z.scores == nil:
		z.scores = make(map[string]float64)
	}
	z.scores[member] = score
	at, _ := slices.BinarySearchFunc(z.order, scored{score, member}, scored.compare)
	z.order = slices.Insert(z.order, at, scored{score, member})
	if known {
		return 0
	}
	return 1
}

// remove returns how many members it has removed. As a rule these are the first ones.
func (z *sorted) remove(member string) int64 {
	score, known := z.scores[member]
	if !known {
		return 0
	}
	delete(z.scores, member)
	at, _ := slices.BinarySearchFunc(z.order, scored{score, member}, scored.compare)
	if at == 0 {
		z.order[0] = scored{}
		z.order = z.order[1:]
	} else {
		z.order = slices.Delete(z.order, at, at+1)
	}
	return 1
}

// between returns the first members with these scores, at most limit.
func (z *sorted) between(least, most float64, limit int) (members []scored) {
	from, _ := slices.BinarySearchFunc(z.order, least, func(m scored, least float64) int { return cmp.Compare(m.score, least) })
	for _, m := range z.order[from:] {
		if m.score > most || len(members) == limit {
			break
		}
		members = append(members, m)
	}
	return members
}
