package filllock

import (
	"context"
	_ "embed"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/local"
	"github.com/singlefill/singlefill/internal/wake"
)

//go:embed lua/delete_if.lua
var deleteIfLua string

// Delete removes the values and locks of pairs without Redis.
func Delete(memory *local.Store, pairs []Pair) {
	for _, pair := range pairs {
		step := memory.Begin(pair.Value)
		step.Del(pair.Value)
		step.Del(pair.Lock)
		step.End()
	}
}

// DeleteIf removes the entry of pair whose ID is id, and invalidates a running load, in one step on
// the server. If the key holds another entry, or none, it changes nothing.
//
// deleted is false, too, if the command was sent again after its reply was lost, and the first copy had removed the
// entry. lost reports that a reply was lost.
//
// DeleteIf forgets what memory has also if it deletes nothing. Another process may have deleted the entry, and this one
// has not read the record yet. And the reply to the second copy of a command says that there is no such
// entry, so the record is written then, too. A fill of this process is superseded only if the entry
// was removed: otherwise the fill is about a newer entry. See TestNearRules_DeletedElsewhere,
// TestNear_DeleteIfLostReply, TestDeleteIf_DuringLoad.
func DeleteIf(ctx context.Context, c *client.Client, pair Pair, id uint64) (deleted, lost bool, err error) {
	if c.Local != nil {
		deleted, err = client.InOneStep(ctx, c, []string{pair.Value, pair.Lock}, pair.judgeDeleteIf(entry.Random(id)))
		return deleted, false, err
	}
	const unrun = -1
	random, what := entry.Random(id), client.Command{Op: "delete", Key: pair.Value, Within: c.Timeout, Again: client.Always}
	r := client.DoTries(ctx, c, what, func(ctx context.Context) (int, error) {
		cmd := redis.NewCmd(ctx, "eval", wake.Lua+deleteIfLua, 2, pair.Value, pair.Lock, random)
		cmd.SetFirstKeyPos(3)
		_ = c.Redis.Process(ctx, client.Once{Cmder: cmd}) // which has the error
		done, err := cmd.Int()
		if client.ScriptsRefused(err) {
			return unrun, nil
		}
		return done, err
	})
	if r.Value != unrun {
		return r.Value == 1, r.Lost, r.Err
	}
	watched := client.DoTries(ctx, c, what, func(ctx context.Context) (bool, error) {
		return client.InOneStep(ctx, c, []string{pair.Value, pair.Lock}, pair.judgeDeleteIf(random))
	})
	return watched.Value, watched.Lost, watched.Err
}

func (pair Pair) judgeDeleteIf(random string) client.Judge {
	return func(tx client.Tx) (func(client.Writer), bool, error) {
		found, err := tx.GetRange(pair.Value, entry.RandomAt, entry.HeaderLen-1)
		if err != nil || found != random {
			return nil, false, err
		}
		return func(w client.Writer) {
			w.Del(pair.Value)
			w.Del(pair.Lock)
		}, true, nil
	}
}
