package flight

// The refresh of a key: see Flight. It and the other flight of the key never load side by side.

// Refresh begins a refresh of the entry of, or returns nil: one is under way or has ended only now, a flight is
// about to bring another value anyway, or the group is closed. It counts as running.
func (g *Group[R]) Refresh(key, of string) *Flight[R] {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r := g.refreshes[key]; r != nil && (!r.ended || r.Of == of) || g.closed {
		return nil
	}
	if f := g.flights[key]; f != nil && f.Nudge != nil {
		return nil
	}
	r := &Flight[R]{Key: key, turn: FirstTurn, Load: Load{cache: g}, Nudge: make(chan struct{}, 1), Refresh: true, Of: of}
	g.refreshes[key] = r
	g.Running.Add(1)
	return r
}

// HandOver ends a flight if another one of its key may come to load, and sends its callers on to that: two loads
// of one key never run side by side. The other one is a refresh, which may have begun before they came, so that
// they board it as they would any flight that they find; or, if f is the refresh, a flight that fills.
func (g *Group[R]) HandOver(f *Flight[R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.handOver(f)
}

func (g *Group[R]) handOver(f *Flight[R]) bool {
	if f.Refresh {
		other := g.flights[f.Key]
		if other == nil || other.Nudge == nil {
			return false
		}
		g.end(f, nil, 0)
		return true
	}
	r := g.refreshes[f.Key]
	if r == nil || r.ended {
		return false
	}
	g.pass(f, r)
	g.end(f, nil, 0)
	f.next, f.handed = r, r.turn
	return true
}
