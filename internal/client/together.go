package client

import (
	"context"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// A parcel is what a try of a command sends. With a cmd it may go with others; without any commands, its reader sends
// them.
type parcel struct {
	rdb     redis.UniversalClient
	timeout time.Duration // of this try, if it waits at a gate
	ctx     context.Context
	cmd     redis.Cmder
	ahead   redis.Cmder   // goes just ahead of cmd, or nil
	more    []redis.Cmder // go behind cmd, or in place of one: a pipeline
	caller  *Caller       // of the commands, or nil
	first   bool          // before all others that wait
}

// A reader returns what it makes of the replies to the commands of a parcel. A hit needs no closure for it: see
// [Client.Get].
type reader[R any] func(ctx context.Context, p parcel) (R, error)

// execute sends a parcel, unless it has gone together with others, and reads the replies. If ctx ends before a group
// has its replies, nothing is read.
func execute[R any](ctx context.Context, p parcel, together *group, read reader[R]) (none R, err error) {
	if together != nil {
		select {
		case <-together.done:
		case <-ctx.Done():
		}
		switch { // in a busy process both may be long past
		case !over(together.done):
			return none, ctx.Err() // the commands may still get their replies
		case together.late:
			return none, context.DeadlineExceeded
		}
		return read(ctx, p)
	}
	p.caller.begin(p.ctx, ctx)
	switch {
	case p.ahead != nil || p.more != nil:
		_, _ = Pipelined(ctx, p.rdb, func(pipe redis.Pipeliner) { p.addTo(ctx, pipe) }) // each command has its error
	case p.cmd != nil:
		_ = p.rdb.Process(ctx, p.cmd) // which has the error
	}
	return read(ctx, p)
}

func (p parcel) addTo(ctx context.Context, pipe redis.Pipeliner) {
	if p.ahead != nil {
		_ = pipe.Process(ctx, p.ahead)
	}
	if p.cmd != nil {
		_ = pipe.Process(ctx, p.cmd)
	}
	for _, cmd := range p.more {
		_ = pipe.Process(ctx, cmd)
	}
}

// A group is several commands that go in one pipeline, through one connection: the polls of a
// hundred keys, the renewals of a hundred locks, a burst of misses. They have waited for a place at
// the gate. A command that finds one free goes alone, and waits for no other command. With 64
// goroutines a hit takes 0.91 in place of 1.09 × the floor. A quarter of the pool is enough for
// groups: with 100 keys in 8 processes, three quarters of the connections made the last caller wait
// longer, for shorter pipelines.
//
// How many commands a connection can carry in the time of one is not known, since their replies may
// have any length: 256 values of a megabyte take longer than RedisTimeout. So the groups of a server
// begin small. They grow while they are quick, and shrink when one is slow, as in the slow start of
// TCP (RFC 5681). A server that is far away is not slow: short groups would take as long there, and the
// renewals of a few hundred locks would come too late. So beyond an eighth of a command's time groups
// grow no longer than they began, beyond a third they keep their length, and beyond a half they shrink.
// After a command that was not answered the next one goes alone; otherwise a frozen server would keep
// 256 callers waiting. Through a Ring, an unknown client, or a Cluster before its nodes are known, each
// command goes alone: a dead server would hold up commands for others. See
// TestTogether_OnePipeline, TestTogether_OneServerOnly, TestTogether_LeavesAsTheyGo, TestTogether_Length.
type group struct {
	waiters []*waiter     // protected by the mutex of the gate until gone is set
	gone    bool          // the commands are being sent; protected by the mutex of the gate
	done    chan struct{} // closed when each command has its reply, or their time is over
	late    bool          // their time is over; read it after done
}

const (
	firstTogether = 16
	mostTogether  = 256 // a server needs a few milliseconds for them
)

// timeTogether returns how much of the time within a command has if it goes with others, which have as much. What is
// sent again has the rest of all the time, in whole tenths, or it would go alone: hardly another command has the same
// rest. With less than half of all the time it does go alone: the lengths of groups suit commands that have more. See
// TestTogether_SentAgain.
func timeTogether(within, all time.Duration) time.Duration {
	if within < all/2 || within >= all {
		return within
	}
	return within.Truncate(all / 10)
}

// leaveOut removes a command whose caller has left. It returns false if the commands are being sent.
// The caller holds the mutex of the gate.
func (s *group) leaveOut(w *waiter) bool {
	if !s.gone {
		s.waiters = slices.DeleteFunc(s.waiters, func(other *waiter) bool { return other == w })
	}
	return !s.gone
}

// send gives each command the time that it would have alone.
func (s *group) send(g *gate) {
	g.mu.Lock()
	s.gone, g.moved = true, time.Now() // in a busy process it is sent late
	g.mu.Unlock()
	if len(s.waiters) == 0 {
		g.leave(true)
		return
	}
	first, timeout, sent := s.waiters[0], s.waiters[0].timeout, time.Now()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(first.ctx), timeout)
	defer cancel()
	for _, w := range s.waiters {
		w.caller.begin(w.ctx, ctx)
	}
	end := func(answered bool) {
		close(s.done)
		n, took := len(s.waiters), share(answered, time.Since(sent), timeout)
		g.mu.Lock()
		g.most = min(mostTogether, adapted(g.most, n, 2*g.most, firstTogether, took))
		g.mu.Unlock()
		g.leave(answered)
	}
	stop := context.AfterFunc(ctx, func() {
		s.late = true
		end(false)
	})
	_, err := Pipelined(ctx, first.rdb, func(p redis.Pipeliner) { // each command has its error
		for _, w := range s.waiters {
			w.addTo(ctx, p)
		}
	})
	if stop() {
		end(!Unreachable(err))
	}
}

// share returns which part of its timeout a command has taken: all of it if it was not answered.
func share(answered bool, took, timeout time.Duration) float64 {
	if !answered {
		return 1
	}
	return float64(took) / float64(timeout)
}

// adapted returns how much may be sent at a time, in place of most, since what was sent, when it was so much in all,
// has taken a share of its timeout: more if it was quick, up to first if the server may be far away, less if it was
// slow, but not one: that would not show when it can be more again.
func adapted(most, sent, more, first int, share float64) int {
	switch {
	case share > 1./2:
		return max(min(most, sent)/2, 2)
	case sent < most:
	case share <= 1./8:
		return more
	case share <= 1./3:
		return max(most, min(more, first))
	}
	return most
}
