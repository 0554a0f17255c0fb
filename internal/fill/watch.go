package fill

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
)

// The acts of the fill lock where the server refuses scripts: the keys are watched, read and judged here,
// and written with MULTI and EXEC on the same connection, so that nothing is written if either key has
// changed in between. Each decides as the script of the same name does.

// A watchFunc judges and says what to write, if anything, and what the act then answers.
type watchFunc func(ctx context.Context, tx *redis.Tx) (write func(p redis.Pipeliner), done bool, err error)

// watch runs an act until no other client comes between; ctx bounds that.
func (l *Lock) watch(ctx context.Context, keys []string, judge watchFunc) (done bool, err error) {
	for {
		err = l.client.Redis.Watch(ctx, func(tx *redis.Tx) error {
			var write func(p redis.Pipeliner)
			write, done, err = judge(ctx, tx)
			if err != nil || write == nil {
				return err
			}
			return client.Transaction(ctx, tx, write)
		}, keys...)
		if !errors.Is(err, redis.TxFailedErr) {
			return done && err == nil, err
		}
	}
}

func (l *Lock) watchGetOrLock(ctx context.Context, seen, awaited string, take bool) (r Reply, err error) {
	_, err = l.watch(ctx, []string{l.value, l.key}, func(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
		stored, err := getString(ctx, tx, l.value)
		if err != nil {
			return nil, false, err
		}
		if stored != "" && entry.Header(stored) != seen {
			r = Reply{Status: Hit, Text: stored}
			return nil, true, nil
		}
		record, err := getString(ctx, tx, l.key)
		if err != nil {
			return nil, false, err
		}
		left, err := tx.PTTL(ctx, l.key).Result()
		if err != nil {
			return nil, false, err
		}
		var write string
		r, write = l.judge(record, left, awaited, take)
		if write == "" {
			return nil, true, nil
		}
		return func(p redis.Pipeliner) { p.Set(ctx, l.key, write, l.ttl) }, true, nil
	})
	return r, err
}

// judge answers what get_or_lock answers to a lock key that holds record, and what is to be written there.
func (l *Lock) judge(record string, left time.Duration, awaited string, take bool) (r Reply, write string) {
	state, token, stamp, word := splitRecord(record)
	switch {
	case token == l.token && state == "H":
		return Reply{Status: Locked, Text: stamp}, record
	case token == l.token:
		return Reply{Status: Refused}, ""
	case awaited != "" && word != "" && (state == "F" || token != awaited):
		return Reply{Status: Failed, Text: word}, ""
	case state == "H" && left != -1:
		return Reply{Status: Busy, Text: token, Left: left}, ""
	case !take:
		return Reply{Status: Free}, ""
	}
	if state != "F" {
		word = ""
	}
	stamp = rand.Text()[:stampLen] // as unique as the server's
	return Reply{Status: Locked, Text: stamp}, "H" + l.token + stamp + word
}

func splitRecord(record string) (state, token, stamp, word string) {
	if len(record) <= tokenLen || record[0] == 'H' && len(record) <= tokenLen+stampLen || !strings.Contains("HFX", record[:1]) {
		return "", "", "", "" // none of ours
	}
	state, token, word = record[:1], record[1:1+tokenLen], record[1+tokenLen:]
	if state == "H" {
		stamp, word = word[:stampLen], word[stampLen:]
	}
	return state, token, stamp, word
}

func (l *Lock) watchStore(data []byte, life time.Duration) watchFunc {
	return func(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
		token, grant, err := l.holds(ctx, tx)
		if err != nil {
			return nil, false, err
		}
		if grant {
			return func(p redis.Pipeliner) {
				p.Set(ctx, l.value, data, life)
				p.Del(ctx, l.key)
			}, true, nil
		}
		stored, err := getString(ctx, tx, l.value)
		if err != nil || !token {
			return nil, stored == string(data), err
		}
		return func(p redis.Pipeliner) { p.Del(ctx, l.key) }, stored == string(data), nil
	}
}

func (l *Lock) watchRelease(word string) watchFunc {
	return func(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
		token, grant, err := l.holds(ctx, tx)
		if err != nil || !token {
			return nil, false, err
		}
		return func(p redis.Pipeliner) {
			if word == "" || !grant {
				p.Del(ctx, l.key)
			} else {
				p.Set(ctx, l.key, "F"+l.token+word, l.ttl)
			}
		}, grant, nil
	}
}

func (l *Lock) watchAbandon(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
	record, err := getString(ctx, tx, l.key)
	switch state, token, _, _ := splitRecord(record); {
	case err != nil:
		return nil, false, err
	case state == "H" && token == l.token:
		return func(p redis.Pipeliner) { p.Del(ctx, l.key) }, true, nil
	case record == "":
		return func(p redis.Pipeliner) { p.SetNX(ctx, l.key, "X"+l.token, l.ttl) }, false, nil
	}
	return nil, false, nil
}

func (l *Lock) watchRenew(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
	_, grant, err := l.holds(ctx, tx)
	if err != nil || !grant {
		return nil, false, err
	}
	return func(p redis.Pipeliner) { p.PExpire(ctx, l.key, l.ttl) }, true, nil
}

// holds reports whether our token holds the lock, and whether by the grant that we know.
func (l *Lock) holds(ctx context.Context, tx *redis.Tx) (token, grant bool, err error) {
	record, err := getString(ctx, tx, l.key)
	state, holder, stamp, _ := splitRecord(record)
	token = state == "H" && holder == l.token
	return token, token && stamp == l.stamp, err
}

// getString reads a key; one that is missing or of a foreign type counts as ”.
func getString(ctx context.Context, tx *redis.Tx, key string) (string, error) {
	s, err := tx.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) || client.WrongType(err) {
		return "", nil
	}
	return s, err
}
