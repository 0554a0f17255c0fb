package flight

import (
	"context"
	"sync"
)

// A Load is a node in the graph of loads that wait for other loads of this process, whatever their groups:
// a loader that asks a cache waits for the flight it boards. A circle in the graph would wait for ever.
type Load struct {
	cache any   // the *Group that it belongs to
	outer *Load // the load from inside of which it was begun, or nil
	over  bool  // its flight has ended, though its loader or a context of it may live on; guarded by Group.mu

	waits map[*Load]int // how many calls from inside of it wait for each other load; guarded by graph
}

var graph sync.Mutex

type loadKey struct{}

// Inside returns a context by which calls are known to come from inside l.
func (l *Load) Inside(ctx context.Context) context.Context {
	return context.WithValue(ctx, loadKey{}, l)
}

// LoadOf returns the load from inside of which a call with ctx comes, or nil.
func LoadOf(ctx context.Context) *Load {
	l, _ := ctx.Value(loadKey{}).(*Load)
	return l
}

// inside reports whether l is, or runs inside, a load of cache that is not over. Called with that cache's mu held.
func (l *Load) inside(cache any) bool {
	for ; l != nil; l = l.outer {
		if l.cache == cache && !l.over {
			return true
		}
	}
	return false
}

// waitFor notes that a call from inside l waits for other. It refuses if other already waits for l.
func (l *Load) waitFor(other *Load) bool {
	if l == nil {
		return true
	}
	graph.Lock()
	defer graph.Unlock()
	if other.reaches(l, make(map[*Load]bool)) {
		return false
	}
	if l.waits == nil {
		l.waits = make(map[*Load]int)
	}
	l.waits[other]++
	return true
}

// leave takes back what waitFor noted.
func (l *Load) leave(other *Load) {
	if l == nil {
		return
	}
	graph.Lock()
	defer graph.Unlock()
	if l.waits[other]--; l.waits[other] == 0 {
		delete(l.waits, other)
	}
}

func (l *Load) reaches(target *Load, seen map[*Load]bool) bool {
	if l == target {
		return true
	}
	seen[l] = true
	for next := range l.waits {
		if !seen[next] && next.reaches(target, seen) {
			return true
		}
	}
	return false
}
