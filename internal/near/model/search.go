package model

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
)

// A search visits states, breadth first.
type search struct {
	model   *model
	actions []action

	nodes []node
	table []int32 // a hash table: indexes of nodes, plus 1
	seed  maphash.Seed
}

// A node is a state, and the action by which the search found it in another state.
type node struct {
	state  state
	action int8
	from   int32
}

func (m *model) search() *search {
	actions := m.actions()
	return &search{
		model: m, actions: actions,
		table: make([]int32, 1<<10), seed: maphash.MakeSeed(),
	}
}

// run visits the states that can be reached from a state. It ends when stop returns true for a
// state and the action that led to it, and returns that state and the path: all actions that led to
// it. Without such a state, path is nil.
func (x *search) run(from state, stop func(*action, *state) bool) (end state, path []*action) {
	x.add(&node{state: from, from: -1})
	next := new(node)
	for i := 0; i < len(x.nodes); i++ {
		next.from = int32(i)
		for a := range x.actions {
			next.state, next.action = x.nodes[i].state, int8(a)
			if !x.actions[a].step(&next.state) {
				continue
			}
			x.model.tidy(&next.state)
			if stop(&x.actions[a], &next.state) {
				return next.state, append(x.path(i), &x.actions[a])
			}
			x.add(next)
		}
	}
	return state{}, nil
}

// add adds a node, unless there is one with its state.
func (x *search) add(n *node) {
	if 2*len(x.nodes) >= len(x.table) {
		x.table = make([]int32, 4*len(x.table))
		for i := range x.nodes {
			*x.slot(&x.nodes[i].state) = int32(i + 1)
		}
	}
	if slot := x.slot(&n.state); *slot == 0 {
		x.nodes = append(x.nodes, *n)
		*slot = int32(len(x.nodes))
	}
}

// slot returns the element of the table for a state.
func (x *search) slot(s *state) *int32 {
	mask := uint64(len(x.table) - 1)
	for h := maphash.Comparable(x.seed, *s); ; h++ {
		if i := &x.table[h&mask]; *i == 0 || x.nodes[*i-1].state == *s {
			return i
		}
	}
}

// path returns the actions that led to a node.
func (x *search) path(i int) (path []*action) {
	for ; x.nodes[i].from >= 0; i = int(x.nodes[i].from) {
		path = append(path, &x.actions[x.nodes[i].action])
	}
	slices.Reverse(path)
	return path
}

// check visits all states. It ends at the first violation of an invariant, and returns the
// invariant and the actions that led there.
func (x *search) check() (violation *invariant, path []*action) {
	_, path = x.run(x.model.initial(), func(_ *action, s *state) bool {
		violation = violated(s)
		return violation != nil
	})
	return violation, path
}

// replay repeats actions from the initial state, without tidy. It returns a line for each, and the
// invariant that does not hold at the end.
func (m *model) replay(path []*action) (trace string, violation *invariant) {
	s := m.initial()
	var b strings.Builder
	for _, a := range path {
		if !a.step(&s) {
			fmt.Fprintf(&b, "%s: this is not possible\n", a.name)
			return b.String(), nil
		}
		fmt.Fprintf(&b, "%-44s %v\n", a.name, &s)
	}
	return b.String(), violated(&s)
}
