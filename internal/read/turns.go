package read

import (
	"slices"
	"time"

	"github.com/singlefill/singlefill/internal/bulk"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
)

// read reads keys, in a pipeline for each part of them: a few hundred on one server. It yields the
// parts as they come, and nil once if the next one is slow to come. With again, what Redis does not
// answer is read again, for RedisTimeout in all.
func (m *many) read(asks []*ask, again bool) func(yield func([]*ask) bool) {
	return func(yield func([]*ask) bool) {
		var parts [][]*ask
		for _, group := range m.locate(asks) {
			parts = slices.AppendSeq(parts, slices.Chunk(group, client.Batch))
		}
		if len(parts) == 1 {
			m.readPart(parts[0], again)
			yield(parts[0])
			return
		}
		done := make(chan []*ask, len(parts))
		for _, part := range parts {
			go func() {
				m.readPart(part, again)
				done <- part
			}()
		}
		var slow <-chan time.Time
		for n := len(parts); n > 0; {
			select {
			case part := <-done:
				n--
				yield(part)
				slow = time.After(bulk.Gather)
			case <-slow:
				yield(nil)
			}
		}
	}
}

// locate finds out which keys are on one server.
func (m *many) locate(asks []*ask) (groups [][]*ask) {
	groups = client.ByNode(m.Client, asks, func(a *ask) string { return m.Store.Key(a.Key) })
	for node, group := range groups {
		for _, a := range group {
			a.node = node
		}
	}
	return groups
}

// readPart reads the keys of one node. It shares their reads with other calls of this process: it
// reads at once what no other call is reading, and what is left when that is over, if no other call
// has read it by then.
func (m *many) readPart(part []*ask, again bool) {
	if !again { // GetMany, which like Get shares nothing
		m.getAll(part)
		return
	}
	var mine, others []*ask
	for _, a := range part {
		if a.turn = m.Reads.Arrive(a.Key); a.turn.Arrived == 0 {
			mine = append(mine, a)
		} else {
			others = append(others, a)
		}
	}
	for {
		m.takeTurns(mine)
		if len(others) == 0 {
			return
		}
		mine, others = m.awaitTurns(others)
	}
}

// awaitTurns waits until the first of asks has its turn or has been read, and returns those that have
// their turns by then, and those that still wait.
func (m *many) awaitTurns(asks []*ask) (mine, others []*ask) {
	for i, a := range asks {
		var found *value.Lookup
		over := true
		if i == 0 {
			var err error
			if a.turn, found, err = a.turn.Wait(m.ctx); err != nil {
				a.RedisErr = err
				for _, a := range asks[1:] {
					a.turn.Leave()
					a.RedisErr = err
				}
				return nil, nil
			}
		} else {
			found, over = a.turn.Try()
		}
		switch {
		case !over:
			others = append(others, a)
		case found != nil:
			a.Lookup, a.shared, a.theirs = *found, true, true
		default:
			mine = append(mine, a)
		}
	}
	return mine, others
}

// takeTurns reads keys until Redis answers, for RedisTimeout in all. What has a fill by now is not
// read.
func (m *many) takeTurns(asks []*ask) {
	ended := false
	defer func() {
		for _, a := range asks {
			if !ended || m.ctx.Err() != nil && a.RedisErr != nil { // another call of the batch reads
				a.turn.End(nil)
			} else {
				a.shared = a.turn.End(&a.Lookup) && m.Store.Type.Clone != nil
			}
		}
	}()
	var left []*ask
	for _, a := range asks {
		if !m.Fills.Filling(a.Key) {
			left = append(left, a)
		}
	}
	for pause := wait.MinPause; len(left) > 0; pause *= 2 {
		m.getAll(left)
		left = slices.DeleteFunc(left, func(a *ask) bool { return a.RedisErr == nil })
		if len(left) == 0 {
			break
		}
		if first := left[0]; !m.Store.ReadAgain(m.ctx, &first.Lookup, pause) {
			for _, a := range left {
				a.Asked = first.Asked
				m.Store.Recall(&a.Lookup)
			}
			break
		}
	}
	ended = true
}

// getAll reads keys in one pipeline.
func (m *many) getAll(asks []*ask) {
	all := make([]*value.Lookup, len(asks))
	for i, a := range asks {
		all[i] = &a.Lookup
	}
	m.Store.GetMany(m.ctx, all)
}
