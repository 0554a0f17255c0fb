package cachetest

import (
	"context"
	"sync"
)

// OnJoin returns a context for one call of GetOrLoad. It calls joined once, when its Done is called
// for the first time: GetOrLoad does so only when it waits for a read or load that it shares with
// other calls for the key.
func OnJoin(ctx context.Context, joined func()) context.Context {
	return &joinContext{ctx, sync.OnceFunc(joined)}
}

type joinContext struct {
	context.Context
	joined func()
}

func (c *joinContext) Done() <-chan struct{} {
	c.joined()
	return c.Context.Done()
}
