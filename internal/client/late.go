package client

import (
	"errors"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
)

// A Caller waits for commands. A client may write a command to a connection long after its caller
// has left: by default go-redis does not look at the context once it has a connection, and making
// one can take any time. The zero Caller waits.
type Caller struct{ left, sent atomic.Bool }

// Leave tells that the caller waits no longer. What has not been sent by then is never executed.
func (c *Caller) Leave() { c.left.Store(true) }

// Only returns cmd, to be executed only if it is sent while the caller waits.
func (c *Caller) Only(cmd redis.Cmder) redis.Cmder { return timely{cmd, c} }

type timely struct {
	redis.Cmder
	caller *Caller
}

// Args is called when the command is written to a connection, so not while there is none. A command
// whose caller has left becomes a PING, which keeps the connection usable. A hook may call Args,
// too; a command that was not sent then counts as sent, which does no harm.
func (t timely) Args() []any {
	t.caller.sent.Store(true) // before it asks, as the caller leaves before it looks
	if t.caller.left.Load() {
		return []any{"ping"}
	}
	return t.Cmder.Args()
}

type unsent struct{ error }

func (e unsent) Unwrap() error { return e.error }

// Unsent reports whether err is of a command that was not sent, and never will be.
func Unsent(err error) bool { return errors.As(err, new(unsent)) }
