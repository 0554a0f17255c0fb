package filllock

import (
	"context"
	_ "embed"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/wake"
)

//go:embed lua/set.lua
var setLua string

// A Set writes an entry, and invalidates a running load, in one step on the server.
type Set struct {
	Pair
	Data []byte
	Life time.Duration
}

// Do runs one Set. It reports whether a load was invalidated: those that wait for it are to be
// woken.
func (s Set) Do(ctx context.Context, c *client.Client) (superseded bool, err error) {
	var caller client.Caller
	defer caller.Leave()
	return client.Do(ctx, c, "set", s.Value, func(ctx context.Context) (bool, error) {
		var locks *redis.IntCmd
		err := client.Transaction(ctx, c.Redis, func(p redis.Pipeliner) {
			set := redis.NewStatusCmd(ctx, "set", s.Value, s.Data, "px", s.Life.Milliseconds())
			_ = p.Process(ctx, caller.Only(set))
			locks = p.Del(ctx, s.Lock)
		})
		return locks.Val() > 0, err
	})
}

// SetMany runs sets of one node in one round trip. It returns the error of each, and the one of the
// pipeline. Without scripts the sets are done one after the other.
func SetMany(ctx context.Context, c *client.Client, sets []Set) (errs []error, err error) {
	var caller client.Caller
	defer caller.Leave()
	what := client.Command{Op: "set", Key: sets[0].Value, Keys: len(sets), Within: c.Timeout}
	cmds, err := client.DoWithin(ctx, c, what, func(ctx context.Context) ([]redis.Cmder, error) {
		cmds, err := client.Pipelined(ctx, c.Redis, func(p redis.Pipeliner) {
			for _, s := range sets { // EVAL, since a pipeline cannot fall back from EVALSHA
				set := redis.NewCmd(ctx, "eval", wake.Lua+setLua, 2, s.Value, s.Lock, s.Data, s.Life.Milliseconds())
				set.SetFirstKeyPos(3)
				_ = p.Process(ctx, caller.Only(set))
			}
		})
		if client.ScriptsRefused(err) {
			err = nil
		}
		return cmds, err
	})
	errs = make([]error, len(sets))
	for i, s := range sets {
		switch {
		case cmds == nil: // no answer in time
			errs[i] = err
		case !client.ScriptsRefused(cmds[i].Err()):
			errs[i] = cmds[i].Err()
		case client.Unreachable(err):
			errs[i] = err
		default:
			if _, errs[i] = s.Do(ctx, c); client.Unreachable(errs[i]) {
				err = errs[i]
			}
		}
	}
	return errs, err
}
