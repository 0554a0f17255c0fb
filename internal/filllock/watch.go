package filllock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
)

// Where the server refuses scripts, each command of the fill lock is a transaction: it watches and
// reads the keys, decides, and writes with MULTI and EXEC on the same connection. So nothing is
// written if a key has changed since it was read. Each decides as the script of the same name does.
//
// Each script exists a second time in Go. Some managed services refuse scripts. GET followed by SET
// would be no replacement; WATCH is one, if both decide equally. See TestWatch_AgreesWithScripts.

// watchGetOrLock is GetOrLock.
func (l *Lock) watchGetOrLock(ctx context.Context, q Query) (r Reply, err error) {
	_, err = client.Watch(ctx, l.client.Redis, []string{l.Keys.Value, l.Keys.Lock}, func(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
		header, err := tx.GetRange(ctx, l.Keys.Value, 0, entry.HeaderLen-1).Result()
		if err != nil && !client.WrongType(err) {
			return nil, false, err
		}
		if header != "" && header != q.Known {
			stored, err := getString(ctx, tx, l.Keys.Value)
			if stored == "" && err == nil {
				err = redis.TxFailedErr // it has just been removed: read again
			}
			r = Reply{Status: Hit, Text: stored}
			return nil, err == nil, err
		}
		record, err := getString(ctx, tx, l.Keys.Lock)
		if err != nil {
			return nil, false, err
		}
		left, err := tx.PTTL(ctx, l.Keys.Lock).Result()
		if err != nil {
			return nil, false, err
		}
		now, err := tx.Time(ctx).Result()
		_, _, _, failure := splitRecord(record)
		decides := strings.HasPrefix(record, "F") && (q.For != Unusable || !rememberedUntil(&failure).IsZero())
		// Without the right to ask for the time, now is zero.
		if err != nil && (decides || !client.ScriptsRefused(err)) {
			return nil, false, err
		}
		var write string
		r, write = l.judge(record, left, now, q, header != "")
		r.Known = header != ""
		if write == "" {
			return nil, true, nil
		}
		return func(p redis.Pipeliner) { p.Set(ctx, l.Keys.Lock, write, l.ttl) }, true, nil
	})
	return r, err
}

// judge returns the answer of get_or_lock.lua to a lock key that holds record, and what to write
// there. now may be zero: ages are unknown then, and the stamp is random, and so is still unique.
func (l *Lock) judge(record string, left time.Duration, now time.Time, q Query, known bool) (r Reply, write string) {
	state, token, stamp, failure := splitRecord(record)
	remembered := rememberedUntil(&failure)
	switch {
	case token == l.token && state == "H":
		return Reply{Status: Locked, Text: stamp}, record
	case token == l.token:
		return Reply{Status: Refused}, ""
	case q.For == Served && !known:
		return Reply{Status: Gone}, ""
	case q.Awaited != "" && failure != "" && (state == "F" || token != q.Awaited):
		return Reply{Status: Failed, Text: failure}, ""
	}
	if left < 0 {
		state, failure = "", ""
	}
	micros, _ := strconv.ParseInt(stamp, 10, 64)
	at := time.UnixMicro(micros)
	if state == "H" {
		return Reply{Status: Busy, Text: token, Left: left, Age: now.Sub(at)}, ""
	}
	if state == "F" && q.For != Unusable && known {
		if rest := at.Sub(now); rest > 0 {
			return Reply{Status: Failed, Text: failure, Left: min(rest, left)}, ""
		}
	}
	if rest := remembered.Sub(now); state == "F" && q.For == Unusable && !remembered.IsZero() && rest > 0 {
		return Reply{Status: Failed, Text: failure, Left: min(rest, left)}, ""
	}
	if !q.Take {
		return Reply{Status: Free}, ""
	}
	stamp = rand.Text()[:stampLen]
	if !now.IsZero() {
		stamp = fmt.Sprintf("%016d", now.UnixMicro())
	}
	return Reply{Status: Locked, Text: stamp}, "H" + l.token + stamp + failure
}

// splitRecord returns the parts of a record in a lock key. They are empty if it is not a record.
func splitRecord(record string) (state, token, stamp, failure string) {
	if len(record) <= tokenLen || record[0] != 'X' && len(record) <= tokenLen+stampLen || !strings.Contains("HFX", record[:1]) {
		return "", "", "", ""
	}
	state, token = record[:1], record[1:1+tokenLen]
	if state != "X" {
		stamp, failure = record[1+tokenLen:1+tokenLen+stampLen], record[1+tokenLen+stampLen:]
	}
	return state, token, stamp, failure
}

// rememberedUntil takes the time until which a failure is remembered from in front of it. It is zero without one.
func rememberedUntil(failure *string) (until time.Time) {
	f := *failure
	if len(f) <= stampLen || f[0] != 'T' {
		return until
	}
	micros, err := strconv.ParseUint(f[1:1+stampLen], 10, 63)
	if err != nil {
		return until
	}
	*failure = f[1+stampLen:]
	return time.UnixMicro(int64(micros))
}

func (l *Lock) watchStore(data []byte, life time.Duration) client.WatchFunc {
	return func(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
		token, grant, err := l.holds(ctx, tx)
		if err != nil {
			return nil, false, err
		}
		if grant {
			return func(p redis.Pipeliner) {
				p.Set(ctx, l.Keys.Value, data, life)
				p.Del(ctx, l.Keys.Lock)
			}, true, nil
		}
		stored, err := getString(ctx, tx, l.Keys.Value)
		if err != nil || !token {
			return nil, stored == string(data), err
		}
		return func(p redis.Pipeliner) { p.Del(ctx, l.Keys.Lock) }, stored == string(data), nil
	}
}

func (l *Lock) watchRelease(v ReleaseNote) client.WatchFunc {
	return func(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
		token, grant, err := l.holds(ctx, tx)
		if err != nil || !token {
			return nil, false, err
		}
		var retry int64
		failure := v.Failure
		if v.RetryAfter >= time.Millisecond || v.Remember >= time.Millisecond {
			now, err := tx.Time(ctx).Result()
			if err != nil {
				return nil, false, err
			}
			after := func(d time.Duration) int64 { return min(now.UnixMicro()+d.Microseconds(), 9e15) }
			if v.RetryAfter >= time.Millisecond {
				retry = after(v.RetryAfter)
			}
			if v.Remember >= time.Millisecond {
				failure = fmt.Sprintf("T%016d%s", after(v.Remember), failure)
			}
		}
		return func(p redis.Pipeliner) {
			if grant && v.Drop {
				p.Del(ctx, l.Keys.Value)
			}
			if grant && (v.Failure != "" || retry > 0) {
				p.Set(ctx, l.Keys.Lock, fmt.Sprintf("F%s%016d%s", l.token, retry, failure), v.life(l.ttl))
			} else {
				p.Del(ctx, l.Keys.Lock)
			}
		}, grant, nil
	}
}

func (l *Lock) watchAbandon(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
	record, err := getString(ctx, tx, l.Keys.Lock)
	if err != nil {
		return nil, false, err
	}
	switch state, token, _, _ := splitRecord(record); {
	case state == "H" && token == l.token:
		return func(p redis.Pipeliner) { p.Del(ctx, l.Keys.Lock) }, true, nil
	case record == "":
		return func(p redis.Pipeliner) { p.SetNX(ctx, l.Keys.Lock, "X"+l.token, l.ttl) }, false, nil
	case state == "F" || state == "X":
		// A transaction of this attempt that has seen the same record fails once the record is touched.
		left, err := tx.PTTL(ctx, l.Keys.Lock).Result()
		if err != nil || left < time.Millisecond {
			return nil, false, err
		}
		return func(p redis.Pipeliner) { p.PExpire(ctx, l.Keys.Lock, left) }, false, nil
	}
	return nil, false, nil
}

func (l *Lock) watchRenew(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
	_, grant, err := l.holds(ctx, tx)
	if err != nil || !grant {
		return nil, false, err
	}
	return func(p redis.Pipeliner) { p.PExpire(ctx, l.Keys.Lock, l.ttl) }, true, nil
}

// holds reports whether this attempt's token holds the lock, and whether it does so by the known
// grant.
func (l *Lock) holds(ctx context.Context, tx *redis.Tx) (token, grant bool, err error) {
	record, err := getString(ctx, tx, l.Keys.Lock)
	state, holder, stamp, _ := splitRecord(record)
	token = state == "H" && holder == l.token
	return token, token && stamp == l.stamp, err
}

// getString returns a string key. A missing key or one of a foreign type counts as empty.
func getString(ctx context.Context, tx *redis.Tx, key string) (string, error) {
	s, err := tx.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) || client.WrongType(err) {
		return "", nil
	}
	return s, err
}
