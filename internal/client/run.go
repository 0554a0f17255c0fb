package client

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
)

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
