package filllock

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/local"
)

//go:embed lua/set.lua
var setLua string

var setScript = newScript(setLua)

// A Set writes an entry, and invalidates a running load, in one step on the server.
//
// It is sent again only if it has certainly not been executed. After a lost reply a second copy could bring back a
// value that another process has seen, and deleted. So the client looks for the entry: see settle and
// TestSet_LostReply.
type Set struct {
	Pair
	local.Tagging
	Data []byte
	Life time.Duration
}

// inMemory sets a value without Redis.
func (s Set) inMemory(c *client.Client) {
	step := c.Local.Begin(s.Value)
	defer step.End()
	step.Tag(s.Value, s.Tagging)
	step.Set(s.Value, string(s.Data), s.Life)
	step.Del(s.Lock)
}

// Do runs one Set. It reports whether a load may have been invalidated: those that wait for it are to be
// woken.
func (s Set) Do(ctx context.Context, c *client.Client) (superseded bool, err error) {
	if c.Local != nil {
		s.inMemory(c)
		return false, nil
	}
	var caller client.Caller
	defer caller.Leave()
	var sent time.Time
	what := client.Command{Op: "set", Key: s.Value, Within: c.Timeout, Again: client.IfUnsent, Caller: &caller, Sent: &sent}
	superseded, err = client.DoWithin(ctx, c, what, func(ctx context.Context) (bool, error) {
		var locks *redis.IntCmd
		err := client.Transaction(ctx, c.Redis, func(p redis.Pipeliner) {
			set := redis.NewStatusCmd(ctx, "set", s.Value, s.Data, "px", s.Life.Milliseconds())
			_ = p.Process(ctx, caller.Only(set))
			locks = p.Del(ctx, s.Lock)
		})
		return locks.Val() > 0, err
	})
	if !client.MayHaveRun(err) {
		return superseded, err
	}
	errs := []error{err}
	settle(ctx, c, sent, []Set{s}, errs)
	return true, errs[0]
}

// SetMany runs sets of one node in one round trip. It returns the error of each, and one of the
// node. Without scripts the sets are done one after the other.
func SetMany(ctx context.Context, c *client.Client, sets []Set) (errs []error, err error) {
	if errs = make([]error, len(sets)); c.Local != nil {
		for _, s := range sets {
			s.inMemory(c)
		}
		return errs, nil
	}
	calls := make([]client.ScriptCall, len(sets))
	for i, s := range sets {
		calls[i] = client.ScriptCall{Script: setScript, Args: append(setScript.Call(2, 2), s.Value, s.Lock, s.Data, s.Life.Milliseconds())}
	}
	var sent time.Time
	what := client.Command{Op: "set", Key: sets[0].Value, Keys: len(sets), Within: c.Timeout, Again: client.IfUnsent, Sent: &sent}
	replies := client.RunAll(ctx, c, what, calls, func(cmd *redis.Cmd) (unrun bool, err error) {
		if err = cmd.Err(); client.ScriptsRefused(err) {
			return true, nil
		}
		return false, err
	})
	var lost []Set
	var why []error
	for i, r := range replies {
		if errs[i] = r.Err; r.Lost {
			lost, why = append(lost, sets[i]), append(why, r.Err)
		} else if client.Unreachable(r.Err) {
			err = r.Err
		}
	}
	if len(lost) > 0 {
		err = settle(ctx, c, sent, lost, why)
	}
	for i, r := range replies {
		switch {
		case r.Lost:
			errs[i], why = why[0], why[1:]
		case !r.Value:
		case client.Unreachable(err):
			errs[i] = err
		default:
			if _, errs[i] = sets[i].Do(ctx, c); client.Unreachable(errs[i]) {
				err = errs[i]
			}
		}
	}
	return errs, err
}

// settle finds out what has become of sets of one node whose replies were lost, in what is left of their time. Those
// whose entries are there are done: their errors become nil. It deletes the keys of the others. It returns an error if
// the node does not answer.
func settle(ctx context.Context, c *client.Client, sent time.Time, sets []Set, errs []error) error {
	what := client.Command{Op: "set", Key: sets[0].Value, Within: c.Timeout - time.Since(sent), Again: client.Always, Spared: true}
	if what.Within < c.Timeout/8 { // after a timeout
		return errs[0]
	}
	there, err := client.DoWithin(ctx, c, what, func(ctx context.Context) (there []bool, failed error) {
		headers := make([]*redis.StringCmd, len(sets))
		_, _ = client.Pipelined(ctx, c.Redis, func(p redis.Pipeliner) { // each reply has its error
			for i, s := range sets {
				headers[i] = p.GetRange(ctx, s.Value, 0, entry.HeaderLen-1)
			}
			// A write, though of nothing: a replica may be behind, and must not answer.
			p.Del(ctx, sets[0].Value+":none")
		})
		for i, header := range headers {
			if err := header.Err(); err != nil && !client.WrongType(err) {
				return nil, err
			}
			data := sets[i].Data
			there = append(there, header.Val() == string(data[:min(len(data), entry.HeaderLen)]))
		}
		return there, nil
	})
	if err != nil {
		return errs[0]
	}
	var gone []string
	for i, s := range sets {
		if there[i] {
			errs[i] = nil
			continue
		}
		errs[i] = fmt.Errorf("the reply was lost, and the value may not be set: %w", errs[i])
		gone = append(gone, s.Value, s.Lock)
	}
	if len(gone) == 0 {
		return nil
	}
	what.Within = max(c.Timeout-time.Since(sent), time.Millisecond)
	_, err = client.DoWithin(ctx, c, what, func(ctx context.Context) ([]redis.Cmder, error) {
		return client.Pipelined(ctx, c.Redis, func(p redis.Pipeliner) {
			for pair := range slices.Chunk(gone, 2) {
				p.Del(ctx, pair...)
			}
		})
	})
	return err
}
