package client

import (
	"context"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Script is called by its hash, and by its text while the server does not know it. redis.Script
// does the same with more allocations.
type Script struct {
	text, hash any  // strings
	takes      bool // something, until a time
}

// NewScript returns the script with this text.
func NewScript(text string) Script { return Script{text: text, hash: redis.NewScript(text).Hash()} }

// NewTaking returns a script that takes something. The last argument of a call is left to [Send]: the
// server's time in µs after which the script must take nothing, but answer with LATE and the time.
func NewTaking(text string) Script {
	s := NewScript(text)
	s.takes = true
	return s
}

// Call returns the beginning of an EVALSHA, with room for so many keys and arguments. The caller
// appends them.
func (s Script) Call(keys, args int) []any {
	return append(make([]any, 0, 3+keys+args), "evalsha", s.hash, keys)
}

// Evalsha returns the command for a call. The command gets a copy of the call, which may be sent
// again: a hook of the user's client may change the arguments of a command, for example its keys.
func Evalsha(ctx context.Context, call []any) *redis.Cmd {
	cmd := redis.NewCmd(ctx, slices.Clone(call)...)
	cmd.SetFirstKeyPos(3)
	return cmd
}

// Of returns a command of the script as it is to be sent.
func (s Script) Of(cmd redis.Cmder) redis.Cmder {
	if s.takes {
		return taking{cmd}
	}
	return cmd
}

// Unknown reports whether the server does not know the script of an EVALSHA that failed with err.
func Unknown(err error) bool { return err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") }

// WithText turns a call into an EVAL.
func (s Script) WithText(call []any) { call[0], call[1] = "eval", s.text }

// Run sends a call of a script, as [Send] does.
func Run[R any](ctx context.Context, c *Client, what Command, call []any,
	read func(cmd *redis.Cmd) (R, error)) (R, error) {
	type reply struct {
		value         R
		unknown, late bool
	}
	timeout := what.Within
	for end := time.Now().Add(timeout); ; {
		cmd := Evalsha(ctx, call)
		r, err := Send(ctx, c, what, what.Script.Of(cmd), func() (reply, error) {
			switch err := cmd.Err(); {
			case Unknown(err):
				return reply{unknown: true}, nil
			case Late(err) && time.Now().Before(end):
				return reply{late: true}, nil
			}
			r, err := read(cmd)
			return reply{value: r}, err
		})
		switch {
		case r.unknown: // the text has as much time, or a slow server would never know the script
			what.Script.WithText(call)
			what.Within, end = timeout, time.Now().Add(timeout)
		case r.late:
			what.Within = time.Until(end)
		default:
			return r.value, err
		}
	}
}
