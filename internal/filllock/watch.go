package filllock

import (
	"crypto/rand"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
)

// Where the server refuses scripts, each command of the fill lock is a transaction: it watches and
// reads the keys, decides, and writes with MULTI and EXEC on the same connection. So nothing is
// written if a key has changed since it was read. A cache without Redis runs the same functions, each in
// one step of its Store. Each decides as the script of the same name does.
//
// Each script exists a second time in Go. Some managed services refuse scripts. GET followed by SET
// would be no replacement; WATCH is one, if both decide equally. See TestActs_Agree.

// judge is GetOrLock, whose answer goes into r.
func (q Query) judge(r *Reply) client.Judge {
	l := q.Lock
	return func(tx client.Tx) (func(client.Writer), bool, error) {
		header, err := tx.GetRange(l.Keys.Value, 0, entry.HeaderLen-1)
		if err != nil {
			return nil, false, err
		}
		if header != "" && header != q.Known {
			stored, err := tx.Get(l.Keys.Value)
			if stored == "" && err == nil {
				err = redis.TxFailedErr // it has just been removed: read again
			}
			*r = Reply{Status: Hit, Text: stored}
			return nil, err == nil, err
		}
		record, err := tx.Get(l.Keys.Lock)
		if err != nil {
			return nil, false, err
		}
		left, err := tx.PTTL(l.Keys.Lock)
		if err != nil {
			return nil, false, err
		}
		now, err := tx.Time()
		failure := splitRecord(record).failure
		decides := strings.HasPrefix(record, "F") && (q.For != Unusable || !rememberedUntil(&failure).IsZero())
		// Without the right to ask for the time, now is zero.
		if err != nil && (decides || !client.ScriptsRefused(err)) {
			return nil, false, err
		}
		reply, write := l.judge(record, left, now, q, header != "")
		reply.Known = header != ""
		*r = reply
		if write == "" {
			return nil, true, nil
		}
		return func(w client.Writer) { w.Set(l.Keys.Lock, write, l.ttl) }, true, nil
	}
}

// judge returns the answer of get_or_lock.lua to a lock key that holds record, and what to write
// there. now may be zero: ages are unknown then, and the stamp is random, and so is still unique.
func (l *Lock) judge(record string, left time.Duration, now time.Time, q Query, known bool) (r Reply, write string) {
	was := splitRecord(record)
	state, token, stamp, failure := was.state, was.token, was.stamp, was.failure
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
	var at time.Time
	if state == "H" || state == "F" {
		micros, _ := strconv.ParseInt(stamp, 10, 64)
		at = time.UnixMicro(micros)
	}
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
	if now.IsZero() {
		stamp = rand.Text()[:stampLen]
	} else {
		stamp = digits(now.UnixMicro())
	}
	return Reply{Status: Locked, Text: stamp}, "H" + l.token + stamp + failure
}

// digits returns a time in µs as records have it.
func digits(micros int64) string {
	text := strconv.AppendInt(make([]byte, 0, stampLen+1), micros, 10)
	return strings.Repeat("0", max(0, stampLen-len(text))) + string(text)
}

// parts are the parts of a record in a lock key.
type parts struct{ state, token, stamp, failure string }

// splitRecord returns the parts of a record. They are empty if it is none.
func splitRecord(record string) (p parts) {
	if len(record) <= tokenLen || record[0] != 'X' && len(record) <= tokenLen+stampLen || !strings.Contains("HFX", record[:1]) {
		return p
	}
	p.state, p.token = record[:1], record[1:1+tokenLen]
	if p.state != "X" {
		p.stamp, p.failure = record[1+tokenLen:1+tokenLen+stampLen], record[1+tokenLen+stampLen:]
	}
	return p
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

func (l *Lock) judgeStore(data []byte, life time.Duration) client.Judge {
	return func(tx client.Tx) (func(client.Writer), bool, error) {
		token, grant, err := l.holds(tx)
		if err != nil {
			return nil, false, err
		}
		if grant {
			return func(w client.Writer) {
				w.Set(l.Keys.Value, string(data), life)
				w.Del(l.Keys.Lock)
			}, true, nil
		}
		stored, err := tx.Get(l.Keys.Value)
		if err != nil || !token {
			return nil, stored == string(data), err
		}
		return func(w client.Writer) { w.Del(l.Keys.Lock) }, stored == string(data), nil
	}
}

func (l *Lock) judgeRelease(v ReleaseNote) client.Judge {
	return func(tx client.Tx) (func(client.Writer), bool, error) {
		token, grant, err := l.holds(tx)
		if err != nil || !token {
			return nil, false, err
		}
		var retry int64
		failure := v.Failure
		if v.RetryAfter >= time.Millisecond || v.Remember >= time.Millisecond {
			now, err := tx.Time()
			if err != nil {
				return nil, false, err
			}
			after := func(d time.Duration) int64 { return min(now.UnixMicro()+d.Microseconds(), 9e15) }
			if v.RetryAfter >= time.Millisecond {
				retry = after(v.RetryAfter)
			}
			if v.Remember >= time.Millisecond {
				failure = "T" + digits(after(v.Remember)) + failure
			}
		}
		return func(w client.Writer) {
			if grant && v.Drop {
				w.Del(l.Keys.Value)
			}
			if grant && (v.Failure != "" || retry > 0) {
				w.Set(l.Keys.Lock, "F"+l.token+digits(retry)+failure, v.life(l.ttl))
			} else {
				w.Del(l.Keys.Lock)
			}
		}, grant, nil
	}
}

func (l *Lock) judgeAbandon(tx client.Tx) (func(client.Writer), bool, error) {
	record, err := tx.Get(l.Keys.Lock)
	if err != nil {
		return nil, false, err
	}
	switch was := splitRecord(record); {
	case was.state == "H" && was.token == l.token:
		return func(w client.Writer) { w.Del(l.Keys.Lock) }, true, nil
	case record == "":
		return func(w client.Writer) { w.SetNX(l.Keys.Lock, "X"+l.token, l.ttl) }, false, nil
	case was.state == "F" || was.state == "X":
		// A transaction of this attempt that has seen the same record fails once the record is touched.
		left, err := tx.PTTL(l.Keys.Lock)
		if err != nil || left < time.Millisecond {
			return nil, false, err
		}
		return func(w client.Writer) { w.PExpire(l.Keys.Lock, left) }, false, nil
	}
	return nil, false, nil
}

func (l *Lock) judgeRenew(tx client.Tx) (func(client.Writer), bool, error) {
	_, grant, err := l.holds(tx)
	if err != nil || !grant {
		return nil, false, err
	}
	return func(w client.Writer) { w.PExpire(l.Keys.Lock, l.ttl) }, true, nil
}

// holds reports whether this attempt's token holds the lock, and whether it does so by the known
// grant.
func (l *Lock) holds(tx client.Tx) (token, grant bool, err error) {
	record, err := tx.Get(l.Keys.Lock)
	was := splitRecord(record)
	token = was.state == "H" && was.token == l.token
	return token, token && was.stamp == l.stamp, err
}
