package read

import (
	"slices"
	"sync"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
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
	var others sync.WaitGroup
	for i, part := range parts {
		if i < len(parts)-1 {
			others.Go(func() { do(part) })
		} else {
			do(part)
		}
	}
	others.Wait()
}

// patience is how long a call that has missed keys waits for servers that have not answered.
const patience = 5 * time.Millisecond

// read reads keys, and takes what it finds as the replies come. If some are slow to come, it joins the fills of what
// it has missed before. The call holds the turns of what it reads itself until it has taken that and joined.
func (c *call) read(asks []*ask) {
	if len(asks) < 2 {
		c.readPart(asks, nil)
		return
	}
	parts := c.parts(asks)
	if len(parts) == 1 {
		c.readPart(asks, nil)
		return
	}
	replies := make(chan []*ask, len(asks))
	left := len(asks)
	var readers sync.WaitGroup // they look at their asks also after their last replies
	for _, part := range parts {
		readers.Go(func() {
			defer c.replyRest(part, replies)
			c.readPart(part, replies)
		})
	}
	var slow <-chan time.Time
	for left > 0 {
		select {
		case read := <-replies:
			left -= len(read)
			if c.take(read); slow == nil && len(c.misses) > 0 {
				slow = time.After(patience)
			}
		case <-slow:
			slow = nil
			c.join()
		}
	}
	readers.Wait()
}

// readPart reads the keys of one server, and sends what it has read to replies, or takes it. It shares the reads
// with other calls of this process: it reads at once what no other call is reading, and what is left when that is
// over, if no other call has read it by then. Without that 100 hits in one call would take a fifth less time, but a
// stampede of such calls on the same cold keys would send four times as many commands.
func (c *call) readPart(part []*ask, replies chan<- []*ask) {
	for _, a := range part {
		a.turn.Key = a.Key
	}
	c.Reads.Arrive(len(part), turns(part))
	for others := c.takeTurns(part, replies); len(others) > 0; others = c.takeTurns(others, replies) {
		if replies == nil {
			c.join()
		}
		if err := c.Reads.Await(c.ctx, len(others), turns(others)); err != nil {
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

func (c *call) reply(read []*ask, replies chan<- []*ask) {
	switch {
	case len(read) == 0:
	case replies == nil:
		c.take(read)
	default:
		for _, a := range read {
			a.replied = true
		}
		replies <- read
	}
}

// replyRest replies with what readPart has not, since Unmarshal has called runtime.Goexit: these keys are misses. Fills
// decode them once more, and tell their callers.
func (c *call) replyRest(part []*ask, replies chan<- []*ask) {
	rest := slices.DeleteFunc(slices.Clone(part), func(a *ask) bool { return a.replied })
	if len(rest) > 0 {
		look(rest)
		c.reply(rest, replies)
	}
}

func turns(asks []*ask) flight.Turns[value.Lookup] {
	return func(i int) *flight.Turn[value.Lookup] { return &asks[i].turn }
}

// takeTurns reads what the call may read, and replies with that and with what others have read. It returns what is
// left.
func (c *call) takeTurns(asks []*ask, replies chan<- []*ask) (others []*ask) {
	mine, theirs := split(asks, func(a *ask) bool { return a.turn.Held() })
	theirs, others = split(theirs, func(a *ask) bool { return a.turn.Found != nil })
	for _, a := range theirs {
		a.Lookup, a.theirs = a.turn.Found, !a.delegated
	}
	c.reply(theirs, replies)
	if len(mine) > 0 {
		c.readMine(mine)
		c.reply(mine, replies)
	}
	return others
}

// readMine reads keys whose turns the call holds. What has a fill by now is not read.
func (c *call) readMine(asks []*ask) {
	look(asks)
	if unread, _ := c.notFilling(asks); len(unread) > 0 {
		c.Store.Read(c.ctx, lookups(unread))
	}
	for _, a := range asks {
		a.mine = true
		if a.RedisErr == nil || c.ctx.Err() == nil { // otherwise another call of the batch reads
			a.turn.Found = a.Lookup
		}
	}
}

// delegate lets another goroutine read for the batches whose turns the call has got, if this call may leave before it
// has the replies: then the others need no second read.
func (c *call) delegate(asks []*ask) {
	mine, _ := split(asks, func(a *ask) bool { return a.turn.Held() })
	if len(mine) == 0 || !c.Client.MayLeave(c.ctx) {
		return
	}
	background := c.newCall(client.Detach(c.ctx), c.load)
	delegated := c.Reads.Delegate(len(mine), turns(mine))
	all := make([]*ask, len(mine))
	for i, a := range mine {
		a.delegated = true
		all[i] = &ask{turn: delegated[i]}
		all[i].Key = a.Key
	}
	go func() {
		defer c.Reads.End(len(all), turns(all))
		background.readMine(all)
		background.refresh(slices.DeleteFunc(slices.Clone(all), func(a *ask) bool { return !c.Store.Due(a.Lookup) }))
	}()
}
