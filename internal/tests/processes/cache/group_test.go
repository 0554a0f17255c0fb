package cache_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A group is some processes of a fleet that do the same.
type group struct {
	*fleet
	members []*process
	tags    int
}

// newGroup starts a fleet of four processes.
func newGroup(t *testing.T, c config) *group {
	t.Helper()
	f := newFleet(t)
	return &group{fleet: f, members: f.startAll(4, c)}
}

func (g *group) newTag() string {
	g.tags++
	return fmt.Sprintf("%d of %d", g.tags, len(g.members))
}

// fill has the first process load key, and returns the value.
func (g *group) fill(key string) (value string) {
	g.t.Helper()
	p, tag := g.members[0], g.newTag()
	p.get(tag, key, 1, plan{Source: g.count(sourceKey(g.namespace, key)) > 0})
	value = p.begun(tag).Value
	p.wantDone(tag, 1, gotValue, value)
	return value
}

// read starts n readers in each process.
func (g *group) read(tag, key string, n int, every time.Duration, load plan) {
	g.t.Helper()
	for _, p := range g.members {
		p.order(order{Op: "read", Tag: tag, Key: key, N: n, Every: every, Plan: load})
	}
}

// stop ends the readers and returns what they have got, which must be of the kinds, if any are given.
func (g *group) stop(tag string, kinds ...string) map[outcome]int {
	g.t.Helper()
	for _, p := range g.members {
		p.order(order{Op: "stop", Tag: tag})
	}
	all := allDone(g.members, tag)
	for o, n := range all {
		if len(kinds) > 0 && !slices.Contains(kinds, o.Kind) {
			g.t.Errorf("%d calls %q got %v", n, tag, o)
		}
	}
	return all
}

// wantServed waits until every reader has made so many more calls.
func (g *group) wantServed(tag string, more int64) {
	g.t.Helper()
	before := g.counts(tag)
	redistest.Await(g.t, fmt.Sprintf("every reader %q has made %d more calls", tag, more), func() bool {
		for i, n := range g.counts(tag) {
			if n < before[i]+more {
				return false
			}
		}
		return true
	})
}

func (g *group) counts(tag string) (all []int64) {
	g.t.Helper()
	for _, p := range g.members {
		all = append(all, p.tally(tag).Counts...)
	}
	return all
}

// begun waits until a load for the calls of tag begins in any process.
func (g *group) begun(tag string) (by *process, r report) {
	g.t.Helper()
	redistest.Await(g.t, fmt.Sprintf("a load for %q begins", tag), func() bool {
		for _, p := range g.members {
			if p.has("begun", tag) {
				by, r = p, p.begun(tag)
				return true
			}
		}
		return false
	})
	return by, r
}

// wantAll asserts what each of n calls in each process gets.
func (g *group) wantAll(key string, n int, kind, text string) {
	g.t.Helper()
	tag := g.newTag()
	for _, p := range g.members {
		p.get(tag, key, n, plan{})
	}
	for _, p := range g.members {
		p.wantDone(tag, n, kind, text)
	}
}

// wantRefused releases a load that blocks, and asserts that its store is refused.
func (g *group) wantRefused(p *process, tag, key string) {
	g.t.Helper()
	stored := g.stored(key)
	p.release(tag)
	p.wantRefused()
	if got := g.stored(key); got != stored || got == "" {
		g.t.Errorf("after the refused store Redis has %q, and before it %q", got, stored)
	}
}

// awaitOtherEntry waits until another entry is stored for key.
func (f *fleet) awaitOtherEntry(key, than string) {
	f.t.Helper()
	redistest.Await(f.t, fmt.Sprintf("another entry of %q is stored", key), func() bool { return f.stored(key) != than })
}
