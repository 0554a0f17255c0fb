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

// A Reply is what a command has brought. If Err is of Redis, Value may still be set.
type Reply[R any] struct {
	Value R
	Err   error
}

// Run sends a call of a script, as [Send] does.
func Run[R any](ctx context.Context, c *Client, what Command, call ScriptCall, read func(cmd *redis.Cmd) (R, error)) (R, error) {
	r := RunAll(ctx, c, what, []ScriptCall{call}, read)[0]
	return r.Value, r.Err
}

// RunAll sends calls of scripts on keys of one node in one pipeline. Each has its own reply. Calls of scripts that the
// server does not know are sent again, and calls that it has found late, while there is time.
func RunAll[R any](ctx context.Context, c *Client, what Command, calls []ScriptCall, read func(cmd *redis.Cmd) (R, error)) []Reply[R] {
	r, replies := runner[R]{c, what, calls, read}, make([]Reply[R], len(calls))
	left := make([]int, len(calls)) // those without a reply that counts
	for i := range left {
		left[i] = i
	}
	timeout := what.Within
	for end := time.Now().Add(timeout); ; {
		tries := r.run(ctx, end, left)
		text := false
		again := left[:0]
		for k, i := range left {
			replies[i] = tries[k].Reply
			if tries[k].unknown {
				calls[i].WithText(calls[i].Args)
				text = true
			}
			if tries[k].unknown || tries[k].late {
				again = append(again, i)
			}
		}
		switch left = again; {
		case len(left) == 0:
			return replies
		case text: // it has as much time, or a slow server would never know the script
			r.what.Within, end = timeout, time.Now().Add(timeout)
		default:
			r.what.Within = time.Until(end)
		}
	}
}

// A try is a reply that may not count.
type try[R any] struct {
	Reply[R]
	unknown bool // the server does not know the script
	late    bool // it has found the call late, but the caller still waits
}

// A runner is a running RunAll.
type runner[R any] struct {
	c     *Client
	what  Command
	calls []ScriptCall
	read  func(cmd *redis.Cmd) (R, error)
}

// run sends some of the calls. It takes as late what the server has found late before end.
func (r runner[R]) run(ctx context.Context, end time.Time, some []int) []try[R] {
	cmds, sent := make([]*redis.Cmd, len(some)), make([]redis.Cmder, len(some))
	for k, i := range some {
		cmds[k] = Evalsha(ctx, r.calls[i].Args)
		sent[k] = r.calls[i].Of(cmds[k])
	}
	tries, err := Send(ctx, r.c, r.what, sent, func() (tries []try[R], err error) {
		tries = make([]try[R], len(cmds)) // the caller may leave before
		for k, cmd := range cmds {
			t := &tries[k]
			switch err := cmd.Err(); {
			case Unknown(err):
				t.unknown = true
			case Late(err) && time.Now().Before(end):
				t.late = true
			default:
				t.Value, t.Err = r.read(cmd)
			}
		}
		first, err := failureOf(tries)
		for k := range tries { // the pipeline reports the first
			if why := tries[k].Err; k != first && Refused(why) {
				r.c.failed(Detach(ctx), r.what.Op, why)
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
	return tries
}

// failureOf returns the error of a pipeline, and of which command it is: a refusal, which shows that the server answers,
// before other errors.
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

// RetryAll repeats the commands, of n, that are not answered, as [Retry] does for callers that wait. try sends those
// with the indices some.
func RetryAll[R any](ctx context.Context, c *Client, what Command, n int,
	try func(within time.Duration, some []int) []Reply[R]) []Reply[R] {
	replies, left := make([]Reply[R], n), make([]int, n)
	for i := range left {
		left[i] = i
	}
	again := c.Again(what.Key)
	_, _ = Retry(ctx, what.Within, again, func(within time.Duration) (none struct{}, err error) { // each reply has its error
		unanswered := left[:0]
		for k, r := range try(within, left) {
			i := left[k]
			if replies[i] = r; r.Err != nil && again(r.Err) {
				unanswered, err = append(unanswered, i), r.Err
			}
		}
		left = unanswered
		return none, err
	})
	return replies
}
