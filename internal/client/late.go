package client

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Caller waits for commands. A client may write a command to a connection long after its caller
// has left: by default go-redis does not look at the context once it has a connection, and making
// one can take any time. The zero Caller waits.
type Caller struct {
	left, sent atomic.Bool

	takes []redis.Cmder // its commands, if they take something: see NewTaking
	clock *clock        // of its server
	end   time.Time     // when it leaves, if its commands take something and are being sent
}

// Leave tells that the caller waits no longer. What has not been sent by then is never executed.
func (c *Caller) Leave() { c.left.Store(true) }

// Only returns cmd, to be executed only if it is sent while the caller waits. The user's client sends it [Once].
func (c *Caller) Only(cmd redis.Cmder) redis.Cmder { return timely{Once{cmd}, c} }

// Explain returns the error of the caller's commands, which tells whether they were sent: see [Unsent].
func (c *Caller) Explain(err error) error {
	if err != nil && !c.sent.Load() {
		return unsent{err}
	}
	return err
}

type timely struct {
	Once
	caller *Caller
}

// Once is a command that the user's client does not send again by itself: its last error would hide the outcome of
// earlier tries. A grant whose reply was lost, then a refused connection, would look like a lock that was never
// acquired. Commands are repeated in one place: see [Again] and TestErrAmbiguous_LostReplyThenRefused.
type Once struct{ redis.Cmder }

// NoRetry is asked by go-redis.
func (Once) NoRetry() bool { return true }

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

// begin sets the last arguments of commands that take something when their caller begins to wait for the replies: it
// leaves when ctx or the command ends.
func (c *Caller) begin(ctx, command context.Context) {
	if c == nil || c.takes == nil {
		return
	}
	c.end, _ = command.Deadline()
	if leaves, hurries := ctx.Deadline(); hurries && leaves.Before(c.end) {
		c.end = time.Now().Add(time.Until(leaves)) // by the monotonic clock, as that of the server is known
	}
	until := c.clock.at(c.end)
	for _, cmd := range c.takes {
		args := cmd.Args()
		args[len(args)-1] = until
	}
}

// see looks at the replies to commands that take something. A LATE that comes after their caller's time is no answer.
func (c *Caller) see() {
	for _, cmd := range c.takes {
		if now, late := lateAt(cmd.Err()); late {
			c.clock.see(now)
			if !time.Now().Before(c.end) {
				cmd.SetErr(context.DeadlineExceeded)
			}
		}
	}
}

// Late reports whether a command arrived too late for its caller, or seemed to, since the clock of the
// server has been changed. It has taken nothing, and is to be sent again if the caller still waits.
func Late(err error) bool {
	_, late := lateAt(err)
	return late
}

// lateAt returns the server's time of a LATE.
func lateAt(err error) (micros int64, late bool) {
	if _, reply := errors.AsType[redis.Error](err); !reply {
		return 0, false
	}
	_, text, late := strings.Cut(err.Error(), "LATE ")
	if late {
		micros, err = strconv.ParseInt(text, 10, 64)
	}
	return micros, late && err == nil
}
