package client

import (
	"context"
	"sync"

	"github.com/redis/go-redis/v9"
)

// mostTogether is how many scripts are admitted to a node at a time, and so the longest pipeline.
// The server needs a few milliseconds for it.
const mostTogether = 256

// A batcher sends scripts that are due at the same moment in one pipeline: the polls of a hundred
// keys, the renewals of a hundred locks. A script that comes while few others are on their way is
// sent at once, and alone. Those that come while many are wait until the next one returns, and then
// go together.
type batcher struct {
	gate  gate
	limit int // on the connections in use

	mu      sync.Mutex
	sending int       // connections in use
	waiting []*parcel // if sending == limit
}

// A parcel is a command that waits to be sent.
type parcel struct {
	ctx  context.Context
	cmd  *redis.Cmd
	done chan struct{} // closed when cmd has its reply
}

// pipelines returns how many of a client's connections may carry scripts. The others are left to
// the commands that go alone: neither kind waits for the other.
func pipelines(connections int) int { return max(1, connections/4) }

// Send sends a script to the node of key, with those that are due at the same moment. ctx bounds
// it. It must be called within DoScript.
func (c *Client) Send(ctx context.Context, key string, cmd *redis.Cmd) *redis.Cmd {
	if _, ok := c.Redis.(*redis.AutoPipeliner); ok {
		_ = c.Redis.Process(ctx, cmd) // cmd has the error
		return cmd
	}
	b := &c.nodeOf(key).scripts
	b.mu.Lock()
	if b.sending < b.limit {
		b.sending++
		b.mu.Unlock()
		defer b.release(ctx, c)()
		_ = c.Redis.Process(ctx, cmd) // cmd has the error
		return cmd
	}
	p := &parcel{ctx, cmd, make(chan struct{})}
	b.waiting = append(b.waiting, p)
	b.mu.Unlock()
	select {
	case <-p.done:
		return cmd
	case <-ctx.Done():
		late := redis.NewCmd(ctx, cmd.Args()...) // cmd may still get its reply
		late.SetErr(ctx.Err())
		return late
	}
}

// release returns a function to be called when a command or a pipeline has returned: its connection
// can then carry those that wait. A client that does not observe deadlines may return much later
// than it was told to, so that the next ones do not wait for it.
func (b *batcher) release(ctx context.Context, c *Client) func() {
	if c.bounded {
		return func() { b.next(c) }
	}
	next := sync.OnceFunc(func() { b.next(c) })
	stop := context.AfterFunc(ctx, next)
	return func() { stop(); next() }
}

// next lets a connection carry the commands that wait.
func (b *batcher) next(c *Client) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) == 0 {
		b.sending--
		return
	}
	together := b.waiting
	b.waiting = nil
	go b.carry(c, together)
}

// carry sends commands in one pipeline. It ends when the time of the last one does.
func (b *batcher) carry(c *Client, together []*parcel) {
	ctx, cancel := context.WithTimeout(Detach(together[0].ctx), c.Timeout)
	defer cancel()
	defer b.release(ctx, c)()
	_, _ = c.Redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command has its error
		for _, one := range together {
			if one.ctx.Err() == nil { // else its caller has left
				_ = p.Process(ctx, one.cmd)
			}
		}
		return nil
	})
	for _, one := range together {
		close(one.done)
	}
}
