package client

import (
	"context"
	"sync"

	"github.com/redis/go-redis/v9"
)

// mostTogether is how many commands wait to be sent together, and so the longest pipeline. A server
// needs a few milliseconds for it.
const mostTogether = 256

// A batcher sends commands that are due at the same moment in one pipeline: the polls of a hundred
// keys, the renewals of a hundred locks. A command that comes while few others are on their way is
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
	cmd  redis.Cmder
	done chan struct{} // closed when cmd has its reply
}

// open sets how many connections the batcher may use.
func (b *batcher) open(limit int) {
	b.limit = limit
	b.gate.size = uint64(limit + mostTogether)
}

// SendScript sends a script to the node of key, with others that are due at the same moment. ctx
// bounds it. It must be called within DoScript. cmd has the reply if the error is nil.
func (c *Client) SendScript(ctx context.Context, key string, cmd redis.Cmder) error {
	return c.send(ctx, &c.nodeOf(key).scripts, cmd)
}

func (c *Client) send(ctx context.Context, b *batcher, cmd redis.Cmder) error {
	if c.pipelines {
		_ = c.Redis.Process(ctx, cmd) // cmd has the error
		return nil
	}
	b.mu.Lock()
	if b.sending < b.limit {
		b.sending++
		b.mu.Unlock()
		defer b.release(ctx, c)()
		_ = c.Redis.Process(ctx, cmd) // cmd has the error
		return nil
	}
	p := &parcel{ctx, cmd, make(chan struct{})}
	b.waiting = append(b.waiting, p)
	b.mu.Unlock()
	c.queued.Add(1)
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return ctx.Err() // cmd may still get its reply
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
	c.queued.Add(-int64(len(together)))
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
