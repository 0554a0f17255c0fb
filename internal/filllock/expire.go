package filllock

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/wake"
)

// A Pair is the two Redis keys of one cache key.
type Pair struct{ Value, Lock string }

// PairOf returns the pair of a value key.
func PairOf(valueKey string) Pair { return Pair{Value: valueKey, Lock: valueKey + ":lock"} }

// Expire marks the entries of pairs stale, without removing them, and invalidates their running
// loads. Each pair is one step on the server; all pairs share one round trip. Without scripts the
// pairs are done one after the other.
//
// Each try has new random bytes. With the same ones a second copy of a command would give them to an entry that was
// stored since, and a process that knows the first entry by them would take the two for one.
func Expire(ctx context.Context, c *client.Client, pairs []Pair) error {
	if len(pairs) == 0 {
		return nil
	}
	now := time.Now()
	if c.Local != nil {
		return expireEach(ctx, c, pairs, now)
	}
	what := client.Command{Op: "expire", Key: pairs[0].Value, Keys: len(pairs), Within: c.Timeout, Again: client.Always}
	refused, err := client.DoWithin(ctx, c, what, func(ctx context.Context) (refused []Pair, err error) {
		cmds, err := c.Redis.Pipelined(ctx, func(p redis.Pipeliner) error {
			for _, pair := range pairs { // EVAL, since a pipeline cannot fall back from EVALSHA
				fresh, random := entry.Stale(now)
				expire := redis.NewCmd(ctx, "eval", wake.Lua+expireLua, 2, pair.Value, pair.Lock, fresh, random)
				expire.SetFirstKeyPos(3)
				_ = p.Process(ctx, client.Once{Cmder: expire})
			}
			return nil
		})
		if !client.ScriptsRefused(err) {
			return nil, err
		}
		for i, cmd := range cmds {
			if err := cmd.Err(); client.ScriptsRefused(err) {
				refused = append(refused, pairs[i])
			} else if err != nil {
				return nil, err
			}
		}
		return refused, nil
	})
	if err != nil {
		return err
	}
	return expireEach(ctx, c, refused, now)
}

// expireEach expires pairs one after the other.
func expireEach(ctx context.Context, c *client.Client, pairs []Pair, now time.Time) (err error) {
	for _, pair := range pairs {
		_, err = client.Do(ctx, c, "expire", pair.Value, func(ctx context.Context) (bool, error) {
			return client.InOneStep(ctx, c, []string{pair.Value, pair.Lock}, pair.judgeExpire(now))
		})
		if err != nil {
			break
		}
	}
	return err
}

func (pair Pair) judgeExpire(now time.Time) client.Judge {
	return func(tx client.Tx) (func(client.Writer), bool, error) {
		header, err := tx.GetRange(pair.Value, 0, entry.HeaderLen-1)
		if err != nil {
			return nil, false, err
		}
		patches := entry.Expire(header, now)
		return func(w client.Writer) {
			if patches == nil {
				w.Del(pair.Value)
			}
			for _, patch := range patches {
				w.SetRange(pair.Value, patch.At, patch.Bytes)
			}
			w.Del(pair.Lock)
		}, patches != nil, nil
	}
}
