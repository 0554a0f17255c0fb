package singlefill

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// Clear removes every value of the namespace, and supersedes every load that is in flight, in any
// process: no GetOrLoad that begins after Clear has returned gets a value that was loaded before
// Clear was called. What others store while Clear runs may stay.
//
// Its time grows with the number of keys in the database. After an error, when ctx has ended, and
// if slots of a Cluster moved while it ran, a part of the values may still be there: call Clear
// again.
func (c *Cache[T]) Clear(ctx context.Context) error { return c.engine.clear(ctx) }

func (c *engine) clear(ctx context.Context) error {
	if err := c.checkOpen(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	defer c.invalidatedAll()
	err := c.clearKnown(ctx, c.sweepAll)
	if c.near != nil { // after an error, too: a part of the values may have been removed
		detached := client.Detach(ctx)
		err = errors.Join(err, c.near.AppendAll(detached))
		c.near.WakeOthers(detached)
	}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return ctx.Err()
	}
	return wrap(ctx, "clear", err)
}

// invalidatedAll is invalidated for all keys.
func (c *engine) invalidatedAll() {
	c.fills.SupersedeAll()
	if c.near != nil {
		c.near.ForgetAll()
	}
}

// ClearInfo tells [Trace.Clearing] how far a Clear is.
type ClearInfo struct {
	Pass    int   // 1: locks; 2: values
	Scanned int64 // keys of the database that this pass has looked at, about
	Keys    int64 // keys of the database when the pass began; 0: Redis does not say
	Removed int64 // values that have been removed
}

// A pass removes one kind of keys.
type pass struct {
	number  int
	pattern string
	remove  func(ctx context.Context, keys []string) error
}

// sweepAll removes the locks, and then the values. A load that held its lock when sweepAll began has
// lost it after the first pass, and its value is refused; or it has stored its value before the
// second pass began. That pass finds it, since a SCAN returns each key that exists from its beginning
// to its end. With a single pass, or in the other order, a load could turn its lock into a value
// behind the cursor.
//
// The second pass removes each value together with its lock, which may be that of a load that began
// after the first pass. That load may know the old value, and if it kept its lock, calls after
// Clear could get that value from it in place of an error.
func (c *engine) sweepAll(ctx context.Context) error {
	masters, err := client.Do(ctx, c.client, clearing, "", c.client.Masters)
	if err != nil {
		return err
	}
	values := literal(c.namespace) + ":{*}"
	for _, p := range []pass{
		{1, values + literal(pairOf("").Lock), c.removeLocks},
		{2, values, c.removeValues},
	} {
		if err := c.sweep(ctx, masters, p); err != nil {
			return err
		}
	}
	return nil
}

// clearing is the purpose of the commands of Clear.
const clearing = "clear"

// literal returns a pattern of SCAN that matches s only.
func literal(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}

// scanCount is how many keys of the database one step looks at. It takes a server less than a
// millisecond.
const scanCount = 500

// A clearProgress is what Trace reports. All masters count together.
type clearProgress struct{ scanned, keys, removed atomic.Int64 }

// sweep removes the keys of one pass from all masters at the same time.
func (c *engine) sweep(ctx context.Context, masters []redis.Cmdable, p pass) error {
	var progress clearProgress
	errs := make([]error, len(masters))
	var all sync.WaitGroup
	for i, master := range masters {
		all.Go(func() { errs[i] = c.sweepMaster(ctx, master, p, &progress) })
	}
	all.Wait()
	return errors.Join(errs...)
}

func (c *engine) sweepMaster(ctx context.Context, master redis.Cmdable, p pass, progress *clearProgress) error {
	if c.trace.Load().Clearing != nil { // without the right to ask, there is no estimate
		keys, _ := client.Do(ctx, c.client, clearing, "", func(ctx context.Context) (int64, error) { return master.DBSize(ctx).Result() })
		progress.keys.Add(keys)
	}
	type step struct {
		keys   []string
		cursor uint64
	}
	for cursor := uint64(0); ; {
		s, err := client.Retry(ctx, c.opts.redisTimeout, client.Unreachable, func(within time.Duration) (step, error) {
			return client.DoWithin(ctx, c.client, within, clearing, "", func(ctx context.Context) (s step, err error) {
				s.keys, s.cursor, err = master.Scan(ctx, cursor, p.pattern, scanCount).Result()
				return s, err
			})
		})
		if err != nil {
			return err
		}
		for keys := range slices.Chunk(s.keys, batch) {
			if err := p.remove(ctx, keys); err != nil {
				return err
			}
		}
		c.clearStep(ctx, p, progress, len(s.keys))
		if cursor = s.cursor; cursor == 0 {
			return nil
		}
	}
}

func (c *engine) clearStep(ctx context.Context, p pass, progress *clearProgress, removed int) {
	if c.trace.Load().Clearing == nil {
		return
	}
	info := ClearInfo{Pass: p.number, Keys: progress.keys.Load()}
	if info.Scanned = progress.scanned.Add(scanCount); info.Keys > 0 {
		info.Scanned = min(info.Scanned, info.Keys)
	}
	if p.number == 2 {
		info.Removed = progress.removed.Add(int64(removed))
	}
	c.trace.Load().Clearing(ctx, info)
}

func (c *engine) removeLocks(ctx context.Context, locks []string) error {
	return c.removeAll(ctx, locks, 1, func(p redis.Pipeliner, lock int) *redis.IntCmd {
		return p.Del(ctx, locks[lock])
	})
}

// removeValues removes values, each together with its lock. The server frees the memory of the values
// behind the reply.
func (c *engine) removeValues(ctx context.Context, values []string) error {
	locks := make([]string, len(values))
	for i, value := range values {
		locks[i] = pairOf(value).Lock
	}
	return c.removeAll(ctx, locks, 2, func(p redis.Pipeliner, lock int) *redis.IntCmd {
		return p.Unlink(ctx, values[lock], locks[lock])
	})
}

// removeAll runs a command for each lock, in one pipeline. A command that has removed as many keys as
// it was given has removed the lock: those that wait for it are woken.
func (c *engine) removeAll(ctx context.Context, locks []string, keys int64,
	remove func(p redis.Pipeliner, lock int) *redis.IntCmd) error {
	removed, err := client.Do(ctx, c.client, clearing, locks[0], func(ctx context.Context) (removed []string, err error) {
		cmds := make([]*redis.IntCmd, len(locks))
		_, err = c.client.Redis.Pipelined(ctx, func(p redis.Pipeliner) error {
			for i := range locks {
				cmds[i] = remove(p, i)
			}
			return nil
		})
		for i, cmd := range cmds {
			if cmd.Val() == keys {
				removed = append(removed, locks[i])
			}
		}
		return removed, err
	})
	if len(removed) > 0 {
		c.wake(ctx, removed...)
	}
	return err
}
