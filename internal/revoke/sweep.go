package revoke

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/masters"
)

// clearing is the purpose of the commands below.
const clearing = "clear"

// Layout finds the servers that have keys of the namespace.
func (s *Space) Layout(ctx context.Context) (masters.Layout, error) {
	return client.Do(ctx, s.keys.client, clearing, "", func(ctx context.Context) (masters.Layout, error) {
		return s.masters.Layout(ctx)
	})
}

// CheckScan looks for a key that no caller can use, on each master.
func (s *Space) CheckScan(ctx context.Context, layout masters.Layout) error {
	_, err := client.Do(ctx, s.keys.client, clearing, "", func(ctx context.Context) (_ any, err error) {
		for _, master := range layout.Masters {
			_, _, scan := master.Scan(ctx, 0, masters.Literal(s.plantedPrefix()), 1)
			err = cmp.Or(err, scan)
		}
		if err == nil { // as Clear asks at its end
			_, err = s.masters.Changed(ctx, layout)
		}
		return nil, err
	})
	return err
}

// A pass does something with one kind of keys.
type pass struct {
	number  int // 0: it is not reported
	pattern string
	do      func(ctx context.Context, keys []string) error
}

// sweep removes the locks, and then calls do with all values, a few at a time. It clears if do removes them. A load
// that held its lock when sweep began has lost it after the first pass, and its value is refused; or it has stored its
// value before the second pass began. That pass finds it, since a SCAN returns each key that exists from its beginning
// to its end. With a single pass, or in the other order, a load could turn its lock into a value
// behind the cursor.
//
// Clear removes each value together with its lock, which may belong to a load that began after the
// first pass. That load may know the old value, and if it kept its lock, calls after Clear could
// get that value from it in place of an error.
func (s *Space) sweep(ctx context.Context, do func(ctx context.Context, valueKeys []string) error, clears bool) error {
	layout, err := s.Layout(ctx)
	if err != nil {
		return err
	}
	pattern := masters.Literal(s.namespace) + ":{*}"
	locks := pass{number: 1, pattern: pattern + masters.Literal(filllock.PairOf("").Lock), do: s.RemoveLocks}
	values := pass{number: 2, pattern: pattern, do: do}
	if !clears {
		locks.number, values.number = 0, 0
	}
	if err := s.run(ctx, layout.Masters, locks); err != nil {
		return err
	}
	keys, err := s.plant(ctx)
	if clears && client.Refused(err) { // perhaps the server is full of values
		if err := s.run(ctx, layout.Masters, values); err != nil {
			return err
		}
		keys, err = s.plant(ctx)
	}
	if err != nil {
		return err
	}
	if err := s.run(ctx, layout.Masters, values); err != nil {
		return err
	}
	return s.prove(ctx, layout, keys)
}

// A progress is what Trace reports. All masters count together.
type progress struct{ scanned, keys, removed atomic.Int64 }

// run runs a pass on all masters at the same time.
func (s *Space) run(ctx context.Context, all []masters.Master, p pass) error {
	var progress progress
	return errors.Join(foreign.Each(len(all), func(i int) error { return s.runOn(ctx, all[i], p, &progress) })...)
}

func (s *Space) runOn(ctx context.Context, master masters.Master, p pass, progress *progress) error {
	if p.number > 0 && s.events.TellsClearing() { // without the right to ask, there is no estimate
		keys, _ := client.Do(ctx, s.keys.client, clearing, "", master.Size)
		progress.keys.Add(keys)
	}
	type step struct {
		keys   []string
		cursor uint64
	}
	for cursor := uint64(0); ; {
		if err := s.keys.open(); err != nil { // Close waits for a rebuild
			return err
		}
		found, err := client.Do(ctx, s.keys.client, clearing, "", func(ctx context.Context) (found step, err error) {
			found.keys, found.cursor, err = master.Scan(ctx, cursor, p.pattern, masters.ScanCount)
			return found, err
		})
		if err != nil {
			return err
		}
		for keys := range slices.Chunk(found.keys, client.Batch) {
			if err := p.do(ctx, keys); err != nil {
				return err
			}
		}
		s.report(ctx, p, progress, len(slices.DeleteFunc(found.keys, s.Planted)))
		if cursor = found.cursor; cursor == 0 {
			return nil
		}
	}
}

func (s *Space) report(ctx context.Context, p pass, progress *progress, removed int) {
	if p.number == 0 || !s.events.TellsClearing() {
		return
	}
	info := event.ClearInfo{Pass: p.number, Keys: progress.keys.Load()}
	if info.Scanned = progress.scanned.Add(masters.ScanCount); info.Keys > 0 {
		info.Scanned = min(info.Scanned, info.Keys)
	}
	if p.number == 2 {
		info.Removed = progress.removed.Add(int64(removed))
	}
	s.events.Clearing(ctx, info)
}

// RemoveLocks removes locks.
func (s *Space) RemoveLocks(ctx context.Context, locks []string) error {
	return s.removeAll(ctx, locks, 1, func(lock int) *redis.IntCmd { return redis.NewIntCmd(ctx, "del", locks[lock]) })
}

// RemoveValues removes values, each together with its lock. The server frees the memory of the values
// behind the reply.
func (s *Space) RemoveValues(ctx context.Context, values []string) error {
	locks := make([]string, len(values))
	for i, value := range values {
		locks[i] = filllock.PairOf(value).Lock
	}
	return s.removeAll(ctx, locks, 2, func(lock int) *redis.IntCmd {
		return redis.NewIntCmd(ctx, "unlink", values[lock], locks[lock])
	})
}

// removeAll runs a command for each lock, in one pipeline. A command that has removed as many keys as
// it was given has removed the lock: those that wait for it are woken. After a try without an answer, which may have
// removed the locks, those that wait for any of them are.
func (s *Space) removeAll(ctx context.Context, locks []string, keys int64,
	remove func(lock int) *redis.IntCmd) error {
	what := client.Command{Op: clearing, Key: locks[0], Within: s.keys.client.Timeout, Again: client.Always}
	r := client.DoTries(ctx, s.keys.client, what, func(ctx context.Context) (removed []string, err error) {
		cmds := make([]*redis.IntCmd, len(locks))
		_, err = client.Pipelined(ctx, s.keys.client.Redis, func(p redis.Pipeliner) {
			for i := range locks {
				cmds[i] = remove(i)
				_ = p.Process(ctx, client.Once{Cmder: cmds[i]})
			}
		})
		for i, cmd := range cmds {
			if cmd.Val() == keys {
				removed = append(removed, locks[i])
			}
		}
		return removed, err
	})
	if r.Lost && r.Err == nil {
		r.Value = locks
	}
	if len(r.Value) > 0 {
		s.keys.Wake(ctx, r.Value...)
	}
	return r.Err
}
