// Package local is a client of go-redis that reaches no server: its commands are executed in the memory of this
// process, in a [Store]. It knows those that caches send, and refuses scripts and transactions: what these do for other
// clients, package filllock does in one step of the Store. It answers at once, and also when the context of a command
// has ended.
package local

import (
	"context"
	"errors"
	"net"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/singlefill/singlefill/internal/wake"
)

// A Client is a client of a Store. No hook may be added to it.
type Client struct {
	*redis.Client
	Store *Store
}

// New returns a client of an empty Store. free closes it, and frees what it keeps.
func New(prefix string, most Limits) (c *Client, free func()) {
	rdb := redis.NewClient(&redis.Options{
		Addr:                     "memory",
		Dialer:                   func(context.Context, string, string) (net.Conn, error) { return nil, errNoServer },
		ContextTimeoutEnabled:    true, // as each command returns at once
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	c = &Client{rdb, newStore(prefix, most)}
	rdb.AddHook(hook{c.Store})
	wake.Mute(rdb) // no other process loads
	return c, func() {
		_ = rdb.Close()
		c.Store.close()
	}
}

var errNoServer = errors.New("a local client has no server")

// A hook executes commands in place of sending them.
type hook struct{ store *Store }

// DialHook implements redis.Hook.
func (hook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements redis.Hook.
func (h hook) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		answer(cmd, h.store.run(texts(cmd.Args())))
		return cmd.Err()
	}
}

// ProcessPipelineHook implements redis.Hook. A pipeline is not one step.
func (h hook) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(_ context.Context, cmds []redis.Cmder) (failed error) {
		for _, cmd := range cmds {
			answer(cmd, h.store.run(texts(cmd.Args())))
			if failed == nil {
				failed = cmd.Err()
			}
		}
		return failed
	}
}
