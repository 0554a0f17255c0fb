package read

import (
	"cmp"
	"slices"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/foreign"
)

// parts returns asks in parts that are read together: a few hundred on one server.
func (c *call) parts(asks []*ask) [][]*ask {
	return client.InParts(c.Client, asks, func(a *ask) string { return c.Store.Key(a.Key) })
}

// readAll reads keys, whatever other calls read.
func (c *call) readAll(asks []*ask) {
	look(asks)
	c.inParts(asks, func(part []*ask) { c.Store.Read(c.ctx, lookups(part)) })
}

// inParts calls do for each part of asks, and returns when all calls have.
func (c *call) inParts(asks []*ask, do func(part []*ask)) {
	parts := c.parts(asks)
	if len(parts) == 1 {
		do(parts[0])
		return
	}
	ended := make(chan *foreign.Failure)
	for _, part := range parts {
		foreign.Go(func() { do(part) }, func(f *foreign.Failure) { ended <- f })
	}
	var failure *foreign.Failure
	for range parts {
		failure = cmp.Or(failure, <-ended)
	}
	if failure != nil {
		panic(failure)
	}
}

// patience is how long a call that has missed keys waits for servers that have not answered.
const patience = 5 * time.Millisecond

// read reads keys, and takes what it finds as the replies come. If some are slow to come, it joins the fills of what
// it has missed before. The call holds the turns of what it reads itself until it has taken that and joined.
func (c *call) read(asks []*ask) {
	var parts [][]*ask
	if len(asks) > 1 {
		parts = c.parts(asks)
	}
	if len(parts) < 2 {
		c.readPart(asks, nil)
		return
	}
	replies := make(chan reply, len(asks)+len(parts))
	for _, part := range parts {
		foreign.Go(func() { c.readPart(part, replies) }, func(f *foreign.Failure) {
			if f != nil {
				c.reads.End(part) // other calls need not wait for this one
			}
			replies <- reply{last: true, failure: f}
		})
	}
	var slow <-chan time.Time
	var failure *foreign.Failure
	for left := len(parts); left > 0; {
		select {
		case r := <-replies:
			if r.last {
				left--
				failure = cmp.Or(failure, r.failure)
			}
			if c.take(r.asks) && slow == nil {
				slow = time.After(patience)
			}
		case <-slow:
			slow = nil
			c.join()
		}
	}
	if failure != nil { // the other parts do not use the call any more
		panic(failure)
	}
}

// A reply is asks of a part that have been read. The last one of a part has none.
type reply struct {
	asks    []*ask
	last    bool
	failure *foreign.Failure // why the part has not been read
}

// readPart reads the keys of one server, and sends the replies, or takes them. It shares the reads
// with other calls of this process: it reads at once what no other call is reading, and what is left when that is
// over, if no other call has read it by then. Without that 100 hits in one call would take a fifth less time, but a
// stampede of such calls on the same cold keys would send four times as many commands.
func (c *call) readPart(part []*ask, replies chan<- reply) {
	for _, a := range part {
		a.turn.Key = a.Key
	}
	c.reads.Arrive(part)
	for others := c.takeTurns(part, replies); len(others) > 0; others = c.takeTurns(others, replies) {
		if replies == nil && len(others) < len(part) {
			c.join()
		}
		if err := c.reads.Await(c.ctx, others); err != nil {
			look(others)
			for _, a := range others {
				a.RedisErr = err
			}
			c.reply(others, replies) // take ends their turns
			return
		}
		c.delegate(others)
	}
}

func (c *call) reply(read []*ask, replies chan<- reply) {
	switch {
	case len(read) == 0:
	case replies == nil:
		c.take(read)
	default:
		replies <- reply{asks: read}
	}
}

func held(a *ask) bool { return a.turn.Held() }

// takeTurns reads what the call may read, and replies with that and with what others have read. It returns what is
// left.
func (c *call) takeTurns(asks []*ask, replies chan<- reply) (others []*ask) {
	mine := those(asks, held)
	if len(mine) < len(asks) {
		theirs := those(asks, func(a *ask) bool { return a.turn.Found != nil })
		others = those(asks, func(a *ask) bool { return a.turn.Found == nil && !held(a) })
		for _, a := range theirs {
			if a.Lookup = a.turn.Found; a.by != background {
				a.by = other
			}
		}
		c.reply(theirs, replies)
	}
	if len(mine) > 0 {
		c.readMine(mine)
		c.reply(mine, replies)
	}
	return others
}

// readMine reads keys whose turns the call holds. What has a fill by now is not read.
func (c *call) readMine(asks []*ask) {
	look(asks)
	if unread := c.notFilling(asks); len(unread) > 0 {
		c.Store.Read(c.ctx, lookups(unread))
	}
	for _, a := range asks {
		a.by = self
		if a.RedisErr == nil || c.ctx.Err() == nil { // otherwise another call of the batch reads
			a.turn.Found = a.Lookup
		}
	}
}

// delegate lets another goroutine read for the batches whose turns the call has got, if this call may leave before it
// has the replies: then the others need no second read.
func (c *call) delegate(asks []*ask) {
	mine := those(asks, held)
	if len(mine) == 0 || !c.Client.MayLeave(c.ctx) {
		return
	}
	detached := c.newCall(client.Detach(c.ctx), c.load)
	delegated := c.reads.Delegate(mine)
	all := make([]*ask, len(mine))
	for i, a := range mine {
		a.by = background
		all[i] = &ask{turn: delegated[i]}
		all[i].Key = a.Key
	}
	foreign.Go(func() { // without c, which may be used again when its caller has left: see single
		detached.readMine(all)
		detached.refresh(slices.DeleteFunc(slices.Clone(all), func(a *ask) bool { return !detached.Store.Due(a.Lookup) }))
	}, func(*foreign.Failure) { detached.reads.End(all) }) // without a result the others of the batches read
}
