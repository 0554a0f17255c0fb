package client

import (
	"context"
	"slices"

	"github.com/redis/go-redis/v9"
)

// A Script is called by its hash, and by its text while the server does not know it. redis.Script
// does the same with more allocations.
type Script struct{ text, hash any } // strings

// NewScript returns the script with this text.
func NewScript(text string) Script { return Script{text, redis.NewScript(text).Hash()} }

// Call returns the beginning of an EVALSHA, with room for so many keys and arguments. The caller
// appends them.
func (s Script) Call(keys, args int) []any {
	return append(make([]any, 0, 3+keys+args), "evalsha", s.hash, keys)
}

// Command returns the command for a call. The command gets a copy of the call, which may be sent
// again: a hook of the user's client may change the arguments of a command, for example its keys.
func Command(ctx context.Context, call []any) *redis.Cmd {
	cmd := redis.NewCmd(ctx, slices.Clone(call)...)
	cmd.SetFirstKeyPos(3)
	return cmd
}

// Run sends a call. send may send it several times.
func (s Script) Run(call []any, send func(call []any) *redis.Cmd) *redis.Cmd {
	cmd := send(call)
	if err := cmd.Err(); err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") {
		call[0], call[1] = "eval", s.text
		cmd = send(call)
	}
	return cmd
}
