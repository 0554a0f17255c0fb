package singlefill

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/masters"
	"github.com/singlefill/singlefill/internal/near"
	"github.com/singlefill/singlefill/internal/revoke"
	"github.com/singlefill/singlefill/internal/tags"
)

// A check is what Check needs.
type check struct {
	client    *client.Client
	namespace string
	lockTTL   time.Duration
	space     *revoke.Space
	near      *near.Tier  // nil: off
	tags      *tags.Index // nil: no value has tags
	fleet     *fleet      // nil: MaxFleetLoads is 0
}

func (c *check) rights(ctx context.Context) error {
	layout, err := c.space.Layout(ctx)
	if client.Unreachable(err) {
		return c.refused("clear", err)
	}
	var errs []error
	for _, key := range c.checkKeys(layout.Masters) {
		node := c.checkNode(ctx, filllock.PairOf(key))
		if errs = append(errs, node); client.Unreachable(node) || ctx.Err() != nil {
			break
		}
	}
	switch {
	case err != nil:
		errs = append(errs, c.refused("clear", err))
	case !client.Unreachable(errs[len(errs)-1]):
		if err := c.space.CheckScan(ctx, layout); err != nil {
			errs = append(errs, c.refused("clear", err))
		}
	}
	if errors.Join(errs...) == nil { // what is refused has nothing to do with names
		errs = append(errs, c.checkNames(ctx, layout.Masters))
	}
	if c.fleet != nil && (len(errs) == 0 || !client.Unreachable(errs[len(errs)-1])) {
		errs = append(errs, c.fleet.slots.Check(ctx))
	}
	if c.near != nil && (len(errs) == 0 || !client.Unreachable(errs[len(errs)-1])) {
		if err := c.near.Check(ctx); err != nil {
			errs = append(errs, c.refused("near", err))
		}
	}
	if c.tags != nil && (len(errs) == 0 || !client.Unreachable(errs[len(errs)-1])) {
		if err := c.tags.Check(ctx); err != nil {
			errs = append(errs, c.refused("tag", err))
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return errors.Join(errs...)
}

// checkKey returns a new value key. The value keys of callers have their tag right behind the
// namespace.
func (c *check) checkKey() string { return c.namespace + ":check:{" + rand.Text() + "}" }

// checkKeys returns a new value key for each master.
func (c *check) checkKeys(servers []masters.Master) (keys []string) {
	for _, master := range servers {
		if key := master.Key(); key != "" {
			keys = append(keys, key+":"+rand.Text())
		}
	}
	if len(keys) == 0 {
		keys = []string{c.checkKey()}
	}
	return keys
}

// checkNode goes through the life of two fills on the node of a pair of keys.
func (c *check) checkNode(ctx context.Context, pair filllock.Pair) error {
	ttl := c.lockTTL
	data, err := entry.Entry{FreshUntil: time.Now().Add(ttl), WrittenAt: time.Now(), NotFound: true}.Encode()
	if err != nil {
		return err
	}
	stored := filllock.New(c.client, pair, ttl)
	released := filllock.New(c.client, pair, ttl)
	within := c.client.Timeout
	take := func(l *filllock.Lock) error {
		r, err := l.GetOrLock(ctx, within, filllock.Query{Take: true})
		if err == nil && r.Status != filllock.Locked {
			return fmt.Errorf("unexpected reply %q", r.Status)
		}
		return err
	}
	do := func(act filllock.Act) error {
		_, err := act.Do(ctx, within)
		return err
	}
	remove := func() error { // as Delete does, but no process with Near needs to learn of it
		_, err := client.Do(ctx, c.client, "delete", pair.Value, func(ctx context.Context) ([]redis.Cmder, error) {
			return c.client.Redis.Pipelined(ctx, func(p redis.Pipeliner) error {
				p.PTTL(ctx, pair.Lock)
				p.Del(ctx, pair.Value, pair.Lock)
				return nil
			})
		})
		return err
	}
	var errs []error
	named := make(map[string]bool)
	for _, step := range []struct {
		op  string
		run func() error
	}{
		{"get", func() error {
			_, err := client.Do(ctx, c.client, "get", pair.Value, func(ctx context.Context) (string, error) {
				return c.client.Redis.Get(ctx, pair.Value).Result()
			})
			if errors.Is(err, redis.Nil) {
				return nil
			}
			return err
		}},
		{"lock", func() error { return take(stored) }},
		{"wait", func() error {
			_, err := filllock.New(c.client, pair, ttl).GetOrLock(ctx, within, filllock.Query{Take: true})
			return err
		}},
		{"renew", func() error { return do(stored.Renew()) }},
		{"store", func() error { return do(stored.Store(data, ttl)) }},
		{"expire", func() error { return filllock.Expire(ctx, c.client, []filllock.Pair{pair}) }},
		{"delete", func() error { _, _, err := filllock.DeleteIf(ctx, c.client, pair, entry.IDOf(data)); return err }},
		{"delete", remove},
		{"lock", func() error { return take(released) }},
		{"release", func() error {
			return do(released.Release(filllock.ReleaseNote{Failure: filllock.NotFoundRecord, RetryAfter: time.Millisecond}))
		}},
		{"abandon", func() error { return do(filllock.New(c.client, pair, ttl).Abandon()) }},
		{"set", func() error { _, err := filllock.Set{Pair: pair, Data: data, Life: ttl}.Do(ctx, c.client); return err }},
		{"clear", func() error { return c.space.RemoveValues(ctx, []string{pair.Value}) }},
		{"delete", remove},
	} {
		err := step.run()
		if err == nil || named[step.op] {
			continue
		}
		named[step.op] = true
		errs = append(errs, c.refused(step.op, err))
		if client.Unreachable(err) {
			break
		}
	}
	if len(errs) > 0 && !client.Unreachable(errs[len(errs)-1]) {
		errs = append(errs, c.checkCommands(ctx, pair))
	}
	return errors.Join(errs...)
}

// checkCommands sends the commands of the scripts one by one: Redis does not name the command that
// it refuses inside a script.
func (c *check) checkCommands(ctx context.Context, pair filllock.Pair) error {
	var errs []error
	ttl := c.lockTTL.Milliseconds()
	for _, args := range [][]any{
		{"get", pair.Value}, {"getrange", pair.Value, 0, 1}, {"set", pair.Value, "", "px", ttl},
		{"setrange", pair.Value, 0, ""}, {"pttl", pair.Value}, {"pexpire", pair.Value, ttl}, {"del", pair.Value},
		{"time"}, {"eval", "return 1", 1, pair.Value}, {"evalsha", "", 1, pair.Value},
	} {
		_, err := client.Do(ctx, c.client, "check", pair.Value, func(ctx context.Context) (any, error) {
			return c.client.Redis.Do(ctx, args...).Result()
		})
		if err != nil && !errors.Is(err, redis.Nil) && !redis.HasErrorPrefix(err, "NOSCRIPT") {
			errs = append(errs, c.refused(fmt.Sprint("command ", args[0]), err))
		}
	}
	return errors.Join(errs...)
}

// refused says what Check has tried to do.
func (c *check) refused(what string, err error) error {
	return fmt.Errorf("singlefill: check of %s: %s: %w", c.namespace, what, err)
}
