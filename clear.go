package singlefill

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
)

// Clear removes every value of the namespace, and supersedes every load that is in flight, in any
// process: no GetOrLoad that begins after Clear has returned gets a value that was loaded before
// Clear was called. What others store while Clear runs may stay.
//
// Its time grows with the number of keys in the database. After an error a part of the values may
// still be there: call Clear again. It is an error, too, if a server is restarted, slots of a Cluster
// move or the cache is closed while Clear runs, if rdb does not reach each server, or if SCAN does not
// find what rdb stores.
func (c *Cache[T]) Clear(ctx context.Context) error { return c.engine.clear(ctx) }

func (c *engine) clear(ctx context.Context) error {
	if err := c.checkOpen(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	defer c.invalidatedAll()
	err := c.clearKnown(ctx, c.sweepAndTell)
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return ctx.Err()
	}
	return wrap(ctx, "clear", err)
}

// sweepAndTell removes what a namespace has, and tells the memory of other processes; also after an error, since
// a part of the values may have been removed.
func (c *engine) sweepAndTell(ctx context.Context) error {
	err := c.sweepAll(ctx)
	if c.near != nil {
		detached := client.Detach(ctx)
		err = errors.Join(err, c.near.AppendAll(detached))
		c.near.WakeOthers(detached)
	}
	return err
}

// invalidatedAll is invalidated for all keys.
func (c *engine) invalidatedAll() {
	c.fills.SupersedeAll()
	if c.near != nil {
		c.near.ForgetAll()
	}
}

// A pass does something with one kind of keys.
type pass struct {
	number  int // 0: it is not reported
	pattern string
	do      func(ctx context.Context, keys []string) error
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
	layout, err := c.layout(ctx)
	if err != nil {
		return err
	}
	pattern := literal(c.namespace) + ":{*}"
	locks := pass{number: 1, pattern: pattern + literal(pairOf("").Lock), do: c.removeLocks}
	if err := c.sweep(ctx, layout.Masters, locks); err != nil {
		return err
	}
	values := pass{number: 2, pattern: pattern, do: c.removeValues}
	keys, err := c.plant(ctx)
	if client.Refused(err) { // perhaps the server is full of values
		if err := c.sweep(ctx, layout.Masters, values); err != nil {
			return err
		}
		keys, err = c.plant(ctx)
	}
	if err != nil {
		return err
	}
	if err := c.sweep(ctx, layout.Masters, values); err != nil {
		return err
	}
	return c.prove(ctx, layout, keys)
}

// layout finds the servers that have keys of the namespace.
func (c *engine) layout(ctx context.Context) (client.Layout, error) {
	return client.Do(ctx, c.client, clearing, "", func(ctx context.Context) (client.Layout, error) {
		return c.client.Layout(ctx, c.namespace)
	})
}

// checkScan looks for a key that no caller can use, on each master.
func (c *engine) checkScan(ctx context.Context, layout client.Layout) error {
	_, err := client.Do(ctx, c.client, clearing, "", func(ctx context.Context) (_ any, err error) {
		for _, master := range layout.Masters {
			_, _, scan := master.Scan(ctx, 0, literal(c.plantedPrefix()), 1)
			err = cmp.Or(err, scan)
		}
		if err == nil { // as Clear asks at its end
			_, err = c.client.Changed(ctx, c.namespace, layout)
		}
		return nil, err
	})
	return err
}

// prove returns an error if some of the values may be left. SCAN should have found the keys that this client
// had stored before: a hook of the user's client may change the names of keys and not the pattern, and some
// types of clients send each step of SCAN to any server.
func (c *engine) prove(ctx context.Context, layout client.Layout, keys []string) error {
	changed, err := client.Do(ctx, c.client, clearing, "", func(ctx context.Context) (bool, error) {
		return c.client.Changed(ctx, c.namespace, layout)
	})
	left, leftErr := c.left(ctx, keys)
	switch err = cmp.Or(err, leftErr); {
	case err != nil:
		return err
	case changed:
		return errors.New("slots of the Cluster have moved or are being moved, or a server was replaced or restarted: call it again when that is over")
	case left > 0:
		return fmt.Errorf("SCAN has not found %d of %d keys that rdb, a %T, had stored: a hook changes the names of keys but not the pattern, or rdb sends the steps of SCAN to several servers", left, planted, c.client.Redis)
	}
	return nil
}

const (
	// planted is how many keys prove that SCAN finds keys. A client that sends each step to any of two
	// servers finds all of them once in 2³² times.
	planted = 32

	// plantedLife is longer than SCAN may take. As a rule Clear removes these keys as it does values.
	plantedLife = 24 * time.Hour
)

// plant stores keys of values that no caller can use.
func (c *engine) plant(ctx context.Context) ([]string, error) {
	group, keys := rand.Text(), make([]string, planted)
	for i := range keys {
		keys[i] = fmt.Sprintf("%s%s:%02d}", c.plantedPrefix(), group, i)
	}
	data, err := entry.Entry{FreshUntil: time.Now(), WrittenAt: time.Now(), NotFound: true}.Encode()
	if err != nil {
		return nil, err
	}
	_, err = each(ctx, c, clearing, keys, func(p redis.Pipeliner, key string) *redis.StatusCmd {
		return p.Set(ctx, key, data, plantedLife)
	})
	return keys, err
}

// plantedPrefix is no prefix of a value key of a caller: see HashTag.
func (c *engine) plantedPrefix() string { return c.namespace + ":{%check:" }

// left returns how many of the keys exist. It makes them end, by a command that no replica answers and
// that may be repeated.
func (c *engine) left(ctx context.Context, keys []string) (left int, err error) {
	cmds, err := each(ctx, c, clearing, keys, func(p redis.Pipeliner, key string) *redis.BoolCmd {
		return p.PExpire(ctx, key, c.opts.lockTTL)
	})
	for _, cmd := range cmds {
		if cmd.Val() {
			left++
		}
	}
	return left, err
}

// each sends a command for each key.
func each[C redis.Cmder](ctx context.Context, c *engine, op string, keys []string, send func(p redis.Pipeliner, key string) C) (cmds []C, err error) {
	for _, keys := range client.ByNode(c.client, keys, func(key string) string { return key }) {
		some, err := client.Retry(ctx, c.opts.redisTimeout, client.Unreachable, func(within time.Duration) (cmds []C, err error) {
			return client.DoWithin(ctx, c.client, within, op, keys[0], func(ctx context.Context) ([]C, error) {
				var cmds []C
				_, err := c.client.Redis.Pipelined(ctx, func(p redis.Pipeliner) error {
					for _, key := range keys {
						cmds = append(cmds, send(p, key))
					}
					return nil
				})
				return cmds, err
			})
		})
		if err != nil {
			return nil, err
		}
		cmds = append(cmds, some...)
	}
	return cmds, nil
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

// sweep runs a pass on all masters at the same time.
func (c *engine) sweep(ctx context.Context, masters []client.Master, p pass) error {
	var progress clearProgress
	errs := make([]error, len(masters))
	var all sync.WaitGroup
	for i, master := range masters {
		errs[i] = errGoexit
		all.Go(func() { errs[i] = c.sweepMaster(ctx, master, p, &progress) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// errGoexit is the error of what has not returned.
var errGoexit = errors.New("Codec, Options.Tags or Options.Trace has called runtime.Goexit")

func (c *engine) sweepMaster(ctx context.Context, master client.Master, p pass, progress *clearProgress) error {
	if p.number > 0 && c.events.TellsClearing() { // without the right to ask, there is no estimate
		keys, _ := client.Do(ctx, c.client, clearing, "", master.Size)
		progress.keys.Add(keys)
	}
	type step struct {
		keys   []string
		cursor uint64
	}
	for cursor := uint64(0); ; {
		if err := c.checkOpen(); err != nil { // Close waits for a rebuild
			return err
		}
		s, err := client.Retry(ctx, c.opts.redisTimeout, client.Unreachable, func(within time.Duration) (step, error) {
			return client.DoWithin(ctx, c.client, within, clearing, "", func(ctx context.Context) (s step, err error) {
				s.keys, s.cursor, err = master.Scan(ctx, cursor, p.pattern, scanCount)
				return s, err
			})
		})
		if err != nil {
			return err
		}
		for keys := range slices.Chunk(s.keys, batch) {
			if err := p.do(ctx, keys); err != nil {
				return err
			}
		}
		removed := slices.DeleteFunc(s.keys, func(key string) bool { return strings.HasPrefix(key, c.plantedPrefix()) })
		c.clearStep(ctx, p, progress, len(removed))
		if cursor = s.cursor; cursor == 0 {
			return nil
		}
	}
}

func (c *engine) clearStep(ctx context.Context, p pass, progress *clearProgress, removed int) {
	if p.number == 0 || !c.events.TellsClearing() {
		return
	}
	info := event.ClearInfo{Pass: p.number, Keys: progress.keys.Load()}
	if info.Scanned = progress.scanned.Add(scanCount); info.Keys > 0 {
		info.Scanned = min(info.Scanned, info.Keys)
	}
	if p.number == 2 {
		info.Removed = progress.removed.Add(int64(removed))
	}
	c.events.Clearing(ctx, info)
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
