package filllock

import (
	"context"
	_ "embed"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/wake"
)

//go:embed lua/delete_if.lua
var deleteIfLua string

// DeleteIf removes the entry of pair whose ID is id, and invalidates a running load, in one step on
// the server. If the key holds another entry, or none, it changes nothing.
//
// deleted is false, too, if the client has sent the command again after the connection broke, and the
// first one had removed the entry. repeated reports that the command may have been sent again.
//
// DeleteIf forgets what memory has also if it deletes nothing, and counts how often it is sent.
// Another process may have deleted the entry, and this one has not read the record yet. And
// go-redis sends a command again whose reply was lost: the second reply says that there is no such
// entry, so the record is written then, too. A fill of this process is superseded only if the entry
// was removed: otherwise the fill is about a newer entry. See TestNearRules_DeletedElsewhere,
// TestNear_DeleteIfLostReply, TestDeleteIf_DuringLoad.
func DeleteIf(ctx context.Context, c *client.Client, pair Pair, id uint64) (deleted, repeated bool, err error) {
	random := &counted{text: entry.Random(id)}
	const unrun = -1
	done, err := client.Do(ctx, c, "delete", pair.Value, func(ctx context.Context) (int, error) {
		done, err := c.Redis.Eval(ctx, wake.Lua+deleteIfLua, []string{pair.Value, pair.Lock}, random).Int()
		if client.ScriptsRefused(err) {
			return unrun, nil
		}
		return done, err
	})
	if done == unrun {
		deleted, err = client.Do(ctx, c, "delete", pair.Value, func(ctx context.Context) (bool, error) {
			return client.Watch(ctx, c.Redis, []string{pair.Value, pair.Lock}, pair.watchDeleteIf(random.text))
		})
		return deleted, false, err
	}
	return done == 1, random.written.Load() > 1, err
}

func (pair Pair) watchDeleteIf(random string) client.WatchFunc {
	return func(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
		found, err := tx.GetRange(ctx, pair.Value, entry.RandomAt, entry.HeaderLen-1).Result()
		if err != nil && !client.WrongType(err) {
			return nil, false, err
		}
		if found != random {
			return nil, false, nil
		}
		return func(p redis.Pipeliner) { p.Del(ctx, pair.Value, pair.Lock) }, true, nil
	}
}

// A counted is an argument that counts how often its command is written to a connection.
type counted struct {
	text    string
	written atomic.Int32
}

// MarshalBinary implements encoding.BinaryMarshaler, which go-redis calls when it writes a command.
func (c *counted) MarshalBinary() ([]byte, error) {
	c.written.Add(1)
	return []byte(c.text), nil
}
