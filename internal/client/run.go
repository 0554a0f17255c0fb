package client

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// A ScriptCall is a call of a script: see [Script.Call].
type ScriptCall struct {
	Script
	Args []any
}

// Run sends a call of a script, as [RunAll] does.
func Run[R any](ctx context.Context, c *Client, what Command, call ScriptCall, read func(cmd *redis.Cmd) (R, error)) Reply[R] {
	return RunAll(ctx, c, what, []ScriptCall{call}, read)[0]
}

// RunAll sends calls of scripts on keys of one node in one pipeline: either all take something, or none. Each has its
// own reply. Calls of scripts that the server does not know are sent again, and calls that it has found late, while
// there is time; and calls without an answer, if what allows that.
func RunAll[R any](ctx context.Context, c *Client, what Command, calls []ScriptCall, read func(cmd *redis.Cmd) (R, error)) []Reply[R] {
	what.takes = calls[0].takes
	r := runner[R]{repeat{Command: what, view: c}, c, calls, read}
	replies, left := make([]Reply[R], len(calls)), make([]int, len(calls)) // left are those without a reply that counts
	for i := range left {
		left[i] = i
	}
	for {
		tries, sent := r.run(ctx, left)
		var text bool
		var failed error // of calls that have no answer
		var again, unanswered []int
		for k, i := range left {
			t := tries[k]
			t.Lost = replies[i].Lost || isLost(t.Err)
			replies[i] = t.Reply
			switch {
			case t.unknown:
				calls[i].WithText(calls[i].Args)
				text = true
				again = append(again, i)
			case t.late:
				again = append(again, i)
			case r.repeats(t.Err):
				unanswered, failed = append(unanswered, i), t.Err
			}
		}
		repeats := r.again(ctx, sent, failed)
		if repeats {
			again = append(again, unanswered...)
		}
		switch left = again; {
		case len(left) == 0:
			return replies
		case text: // it has as much time, or a slow server would never know the script
			r.Within = what.Within
		case !repeats:
			r.Within = max(r.Within-time.Since(sent), time.Millisecond) // a group may end a little later
		}
	}
}

// A try is a reply that may not count.
type try[R any] struct {
	Reply[R]
	unknown bool // the server does not know the script
	late    bool // it has found the call late, but the caller waits
}

// A runner is a running RunAll.
type runner[R any] struct {
	repeat
	client *Client
	calls  []ScriptCall
	read   func(cmd *redis.Cmd) (R, error)
}

// run sends some of the calls.
func (r *runner[R]) run(ctx context.Context, some []int) (tries []try[R], sent time.Time) {
	cmds := make([]redis.Cmder, len(some))
	for k, i := range some {
		cmds[k] = evalsha(ctx, r.calls[i].Args)
	}
	tries, sent, err := send(ctx, r.client, &r.Command, cmds, func() (tries []try[R], err error) {
		tries = make([]try[R], len(cmds)) // the caller may leave before
		for k, cmd := range cmds {
			t := &tries[k]
			switch err := cmd.Err(); {
			case Unknown(err):
				t.unknown = true
			case Late(err):
				t.late = true
			default:
				t.Value, t.Err = r.read(cmd.(*redis.Cmd))
			}
		}
		first, err := failureOf(tries)
		for k := range tries { // the pipeline reports the first
			if why := tries[k].Err; k != first && Refused(why) {
				r.client.failed(Detach(ctx), r.Op, why)
			}
		}
		return tries, err
	})
	for k := range tries {
		if Unreachable(err) && Unreachable(tries[k].Err) {
			tries[k].Err = err // which tells more
		}
	}
	if tries == nil {
		tries = slices.Repeat([]try[R]{{Reply: Reply[R]{Err: err}}}, len(some))
	}
	return tries, sent
}

// failureOf returns the error of a pipeline, and of which command it is: a refusal, which shows that the server
// answers, before other errors.
func failureOf[R any](tries []try[R]) (first int, err error) {
	for i := range tries {
		switch why := tries[i].Err; {
		case why == nil || errors.Is(why, redis.Nil):
		case Refused(why):
			return i, why
		case err == nil:
			first, err = i, why
		}
	}
	return first, err
}
