package client

import (
	"context"
	"slices"

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

// WithText turns a call into an EVAL.
func (s Script) WithText(call []any) { call[0], call[1] = "eval", s.text }
