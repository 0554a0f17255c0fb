package singlefill

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
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

// rights tries everything that the cache does.
func (c *check) rights(ctx context.Context) error {
	t := &trial{check: c}
	var layout masters.Layout
	t.try("clear", func() (err error) { layout, err = c.space.Layout(ctx); return err })
	known := t.errs == nil
	for _, key := range c.checkKeys(layout.Masters) {
		if ctx.Err() == nil && !t.over() {
			t.fills(ctx, filllock.PairOf(key))
		}
	}
	if known {
		t.try("clear", func() error { return c.space.CheckScan(ctx, layout) })
	}
	if t.errs == nil { // what is refused has nothing to do with names
		t.add(c.checkNames(ctx, layout.Masters))
	}
	if c.fleet != nil && !t.over() {
		t.add(c.fleet.slots.Check(ctx))
	}
	if c.near != nil {
		t.try("near", func() error { return c.near.Check(ctx) })
	}
	if c.tags != nil {
		t.try("tag", func() error { return c.tags.Check(ctx) })
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return errors.Join(t.errs...)
}

// A trial is a Check on its way.
type trial struct {
	*check
	errs []error
}

// try tries what the cache does, unless Redis has not answered before.
func (t *trial) try(what string, do func() error) {
	if t.over() {
		return
	}
	if err := do(); err != nil {
		t.add(t.refused(what, err))
	}
}

func (t *trial) over() bool { return len(t.errs) > 0 && client.Unreachable(t.errs[len(t.errs)-1]) }

func (t *trial) add(err error) {
	if err != nil && !slices.ContainsFunc(t.errs, func(said error) bool { return said.Error() == err.Error() }) {
		t.errs = append(t.errs, err)
	}
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

// fills goes through the life of two fills on the node of a pair of keys.
func (t *trial) fills(ctx context.Context, pair filllock.Pair) {
	c, ttl, within := t.client, t.lockTTL, t.client.Timeout
	data, err := entry.Entry{FreshUntil: time.Now().Add(ttl), WrittenAt: time.Now(), NotFound: true}.Encode()
	if err != nil {
		t.add(err)
		return
	}
	stored, released := filllock.New(c, pair, ttl), filllock.New(c, pair, ttl)
	take := func(l *filllock.Lock) error {
		r, err := l.GetOrLock(ctx, within, filllock.Query{Take: true})
		if err == nil && r.Status != filllock.Locked {
			return fmt.Errorf("unexpected reply %q", r.Status)
		}
		return err
	}
	wait := func() error {
		_, err := filllock.New(c, pair, ttl).GetOrLock(ctx, within, filllock.Query{Take: true})
		return err
	}
	do := func(act filllock.Act) error { _, err := act.Do(ctx, within); return err }
	remove := func() error { // as Delete does, but no process with Near needs to learn of it
		return cmp.Or(t.send(ctx, pair, "delete", "pttl", pair.Lock), t.send(ctx, pair, "delete", "del", pair.Value, pair.Lock))
	}
	before := len(t.errs)
	for _, step := range []struct {
		op  string
		run func() error
	}{
		{"get", func() error { return t.send(ctx, pair, "get", "get", pair.Value) }},
		{"lock", func() error { return take(stored) }},
		{"wait", wait},
		{"renew", func() error { return do(stored.Renew()) }},
		{"store", func() error { return do(stored.Store(data, ttl)) }},
		{"expire", func() error { return filllock.Expire(ctx, c, []filllock.Pair{pair}) }},
		{"delete", func() error { _, _, err := filllock.DeleteIf(ctx, c, pair, entry.IDOf(data)); return err }},
		{"delete", remove},
		{"lock", func() error { return take(released) }},
		{"release", func() error {
			return do(released.Release(filllock.ReleaseNote{Failure: filllock.NotFoundRecord, RetryAfter: time.Millisecond}))
		}},
		{"abandon", func() error { return do(filllock.New(c, pair, ttl).Abandon()) }},
		{"set", func() error { _, err := filllock.Set{Pair: pair, Data: data, Life: ttl}.Do(ctx, c); return err }},
		{"clear", func() error { return t.space.RemoveValues(ctx, []string{pair.Value}) }},
		{"delete", remove},
	} {
		t.try(step.op, step.run)
	}
	if len(t.errs) > before {
		t.commands(ctx, pair)
	}
}

// commands sends the commands of the scripts one by one: Redis does not name the command that it refuses inside a
// script.
func (t *trial) commands(ctx context.Context, pair filllock.Pair) {
	ttl := t.lockTTL.Milliseconds()
	for _, args := range [][]any{
		{"get", pair.Value}, {"getrange", pair.Value, 0, 1}, {"set", pair.Value, "", "px", ttl},
		{"setrange", pair.Value, 0, ""}, {"pttl", pair.Value}, {"pexpire", pair.Value, ttl}, {"del", pair.Value},
		{"time"}, {"eval", "return 1", 1, pair.Value}, {"evalsha", "", 1, pair.Value},
	} {
		t.try(fmt.Sprint("command ", args[0]), func() error {
			err := t.send(ctx, pair, "check", args...)
			if redis.HasErrorPrefix(err, "NOSCRIPT") {
				return nil
			}
			return err
		})
	}
}

// send sends a command to the node of a pair of keys.
func (c *check) send(ctx context.Context, pair filllock.Pair, op string, args ...any) error {
	_, err := client.Do(ctx, c.client, op, pair.Value, func(ctx context.Context) (any, error) {
		return c.client.Redis.Do(ctx, args...).Result()
	})
	if errors.Is(err, redis.Nil) {
		return nil
	}
	return err
}

// refused says what Check has tried to do.
func (c *check) refused(what string, err error) error {
	return fmt.Errorf("singlefill: check of %s: %s: %w", c.namespace, what, err)
}
