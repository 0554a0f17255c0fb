package lock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/singlefill/singlefill/internal/client"
)

// Check runs every script that this Locker may run, on keys that no lock uses, and returns an error
// that names each purpose for which Redis refuses it. It returns the first error if Redis does not
// answer, and then sends nothing more. The keys are named like the keys of this lock, with
// ":check:" after the name. Check removes them; if it cannot, they expire, within a day. Call it
// when a process starts, and not in a health check, which would end processes during an outage of
// Redis.
func (l *Locker) Check(ctx context.Context) error {
	if err := checkContext(ctx, "check", l.name); err != nil {
		return err
	}
	probe := &target{
		name: l.name, kind: l.kind, keys: keysAt(l.keys.lock + ":check:" + rand.Text()),
		client: l.client, opts: l.opts,
	}
	if _, ok := probe.kind.(semaphore); ok {
		probe.kind = semaphore{1} // so that the second one waits
	}
	holder, waiter := &owner{target: probe, token: rand.Text()}, &owner{target: probe, token: rand.Text()}
	acquire := func(o *owner, r request, want string) error {
		got, err := probe.kind.acquire(ctx, o, probe.opts.RedisTimeout, r)
		if err == nil && got.state != want {
			return fmt.Errorf("unexpected state %q", got.state)
		}
		return err
	}
	var errs []error
	for _, step := range []struct {
		op  string
		run func() error
	}{
		{"acquire", func() error { return acquire(holder, request{}, held) }},
		{"wait", func() error {
			return acquire(waiter, request{enqueue: true, reserves: true, listens: true, waitingSince: time.Now().UnixMicro()}, busy)
		}},
		{"renew", func() error { _, err := probe.kind.renew(ctx, holder, nil); return err }},
		{"release", func() error { return probe.kind.release(ctx, holder, probe.opts.RedisTimeout).Err }},
		{"abandon", func() error { return probe.kind.abandon(ctx, waiter) }},
		{"eval", func() error { // the server may know the scripts now, but forget them later
			_, err := client.Do(ctx, l.client, "check", probe.keys.lock, func(ctx context.Context) (any, error) {
				return l.client.Redis.Eval(ctx, "return 1", []string{probe.keys.lock}).Result()
			})
			return err
		}},
		{"remove the keys of the check", func() error {
			_, err := client.Do(ctx, l.client, "check", probe.keys.lock, func(ctx context.Context) (int64, error) {
				return l.client.Redis.Del(ctx, probe.keys.names()...).Result()
			})
			return err
		}},
	} {
		err := step.run()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && client.Unreachable(err):
			return explain("check: "+step.op, l.name, err)
		case err != nil && (len(errs) == 0 || step.op != "wait"): // without a holder a waiter is none
			errs = append(errs, explain("check: "+step.op, l.name, err))
		}
	}
	return errors.Join(errs...)
}
