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

// NewTaking returns a script that takes something for its caller, such as a lock. A call may be in a socket when
// its caller leaves. A frozen server executes what is in its sockets when it goes on, connection by
// connection in any order, after the commands of other connections that undo it; a network may deliver
// a command later still. No mark of an abandonment lives for long enough. So its last argument, which the caller of
// [RunAll] leaves open, is the server's time in µs after which it must take nothing: the time at which the caller
// leaves, by the clock of that server as last seen (clock.go), one TIME every ten minutes for each server and client.
// It is never stated too late, unless the clock was set back since. A script that finds itself late
// answers LATE with the time, and the command is sent again if its caller still waits: after the clock
// was set forward.
//
// Transactions need no such time: an abandonment touches the lock key, and a transaction that has
// watched the key fails then. See TestLock_ArrivesAfterOthers, TestTaking_Until, TestTaking_ClockJumps,
// TestWatch_Abandoned.
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

// evalsha returns the command for a call. The command gets a copy of the call, which may be sent
// again: a hook of the user's client may change the arguments of a command, for example its keys.
func evalsha(ctx context.Context, call []any) *redis.Cmd {
	cmd := redis.NewCmd(ctx, slices.Clone(call)...)
	cmd.SetFirstKeyPos(3)
	return cmd
}

// WithText turns a call into an EVAL.
func (s Script) WithText(call []any) { call[0], call[1] = "eval", s.text }
