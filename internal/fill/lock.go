// Package fill is the fill lock: one holder per key across all processes, and the right to store a value only
// while holding it. Value and lock are two keys in one slot, so that every act is one step on the server.
package fill

import (
	"context"
	"crypto/rand"
	_ "embed"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
)

//go:embed lua/get_or_lock.lua
var getOrLockLua string

//go:embed lua/store.lua
var storeLua string

//go:embed lua/release.lua
var releaseLua string

//go:embed lua/abandon.lua
var abandonLua string

//go:embed lua/renew.lua
var renewLua string

//go:embed lua/expire.lua
var expireLua string

var (
	getOrLockScript = redis.NewScript(getOrLockLua)
	storeScript     = redis.NewScript(storeLua)
	releaseScript   = redis.NewScript(releaseLua)
	abandonScript   = redis.NewScript(abandonLua)
	renewScript     = redis.NewScript(renewLua)
	expireScript    = redis.NewScript(expireLua)
)

// A Lock is one attempt to hold the lock of one key. Its token is new with each attempt, so that
// nothing done with it can touch a lock that another attempt has taken, even in this process.
//
// Every act is one step on the server and does nothing unless this attempt still holds the lock. Every act is
// safe to repeat, and to arrive late, because the client may send a command twice when a reply was lost: each
// grant of the lock has a stamp of its own, made by the server, which Store, Release and Renew have to show.
type Lock struct {
	InDoubt bool // some command to take the lock was not answered and may still arrive: Abandon it in the end

	client *client.Client
	value  string // key of the value
	key    string // key of the lock
	token  string
	stamp  string // of the grant
	ttl    time.Duration
	held   time.Time // when the command was sent by which the lock was last taken or prolonged
}

// New returns a new attempt, which holds nothing yet. The token is 130 bits from crypto/rand.
func New(c *client.Client, value, key string, ttl time.Duration) *Lock {
	return &Lock{client: c, value: value, key: key, token: rand.Text(), ttl: ttl}
}

// Key returns the key of the lock, by which its node is known.
func (l *Lock) Key() string { return l.key }

const tokenLen, stampLen = 26, 16

// What a Query's Known entry is to those who ask.
const (
	Unusable = ""       // no answer
	Fallback = "spare"  // an answer if the load fails, or while the source is to be left alone after a failed refresh
	Served   = "served" // their answer already: the load is a refresh, and there is none once the entry is gone
)

// A Query is what GetOrLock asks.
type Query struct {
	Known   string // header of an entry that is there as far as they know, or empty
	Awaited string // token of the holder that an earlier reply named, or empty
	Take    bool   // take the lock, if nobody holds it
	For     string // what the known entry is to them
}

// How GetOrLock answers.
const (
	Hit     = "hit"     // Text is an entry
	Locked  = "locked"  // the lock is ours; Text is the stamp of the grant
	Busy    = "busy"    // Text is the holder's token, Left what remains of its lock, Age the time since its grant
	Failed  = "failed"  // Text is the word left by the load that we waited for, or by the refresh after which to wait for Left
	Free    = "free"    // the lock could be taken, but we only looked
	Gone    = "gone"    // there is nothing to refresh
	Refused = "refused" // this attempt has been abandoned
)

// A Reply is GetOrLock's answer.
type Reply struct {
	Status, Text string
	Left         time.Duration
	Known        bool          // the known entry is still there
	Age          time.Duration // by the server's clock; less than 0 if that has been set back since
}

// GetOrLock looks for an entry other than the known one, else takes the lock if nobody holds it.
func (l *Lock) GetOrLock(ctx context.Context, within time.Duration, q Query) (Reply, error) {
	sent := time.Now()
	r, err := client.DoWithin(ctx, l.client, within, "lock", l.value, func(ctx context.Context) (Reply, error) {
		r, err := parseLockReply(getOrLockScript.Run(ctx, l.client.Redis, []string{l.value, l.key},
			l.token, l.ttl.Milliseconds(), q.Known, q.Awaited, flag(q.Take), q.For))
		if client.ScriptsRefused(err) {
			return l.watchGetOrLock(ctx, q)
		}
		return r, err
	})
	switch {
	case err != nil:
		l.InDoubt = l.InDoubt || q.Take && client.Unreachable(err)
	case r.Status == Locked:
		l.held, l.stamp = sent, r.Text
	}
	return r, err
}

func flag(set bool) string {
	if set {
		return "1"
	}
	return "0"
}

func parseLockReply(cmd *redis.Cmd) (r Reply, err error) {
	fields, err := cmd.Slice()
	if err != nil {
		return r, err
	}
	if len(fields) == 5 {
		status, ok1 := fields[0].(string)
		text, ok2 := fields[1].(string)
		left, ok3 := fields[2].(int64)
		known, ok4 := fields[3].(int64)
		age, ok5 := fields[4].(int64)
		if ok1 && ok2 && ok3 && ok4 && ok5 {
			return Reply{status, text, time.Duration(left) * time.Millisecond, known == 1, time.Duration(age) * time.Microsecond}, nil
		}
	}
	return r, fmt.Errorf("unexpected reply %v", fields)
}

// Store writes the entry and releases the lock. false: refused, and nothing was written.
func (l *Lock) Store(ctx context.Context, within time.Duration, data []byte, life time.Duration) (bool, error) {
	return l.act(ctx, within, "store", storeScript, []string{l.value, l.key}, l.watchStore(data, life), l.stamp, data, life.Milliseconds())
}

// What a load leaves behind that brought nothing to store.
type ReleaseNote struct {
	Failure    string        // for those who have been waiting for this load; empty: they have to try themselves
	RetryAfter time.Duration // how long those who have something to serve are to leave the source alone
	Drop       bool          // the value is not to be kept any more
}

// life is how long what is left behind lives: nobody sleeps longer than the ttl of the lock.
func (v ReleaseNote) life(ttl time.Duration) time.Duration { return max(ttl, v.RetryAfter) }

// Release gives the lock back and leaves what is to be left. What is not ours stays as it is.
func (l *Lock) Release(ctx context.Context, within time.Duration, v ReleaseNote) (bool, error) {
	return l.act(ctx, within, "release", releaseScript, []string{l.key, l.value}, l.watchRelease(v),
		l.stamp, v.Failure, v.RetryAfter.Milliseconds(), v.life(l.ttl).Milliseconds(), flag(v.Drop))
}

// Abandon gives up an attempt whose outcome is unknown. The command that was to take the lock can arrive later
// than this one; it is refused then, for the ttl of the lock, unless others have used the lock meanwhile. If it
// then takes the lock for nobody, that ends with the ttl too.
func (l *Lock) Abandon(ctx context.Context) (bool, error) {
	return l.act(ctx, l.client.Timeout, "abandon", abandonScript, []string{l.key}, l.watchAbandon, l.ttl.Milliseconds())
}

// Renew prolongs the lock. false: it is lost.
func (l *Lock) Renew(ctx context.Context) (bool, error) {
	return l.act(ctx, l.client.Timeout, "renew", renewScript, []string{l.key}, l.watchRenew, l.stamp, l.ttl.Milliseconds())
}

func (l *Lock) act(ctx context.Context, within time.Duration, op string, script *redis.Script, keys []string, judge watchFunc, args ...any) (bool, error) {
	return client.DoWithin(ctx, l.client, within, op, keys[0], func(ctx context.Context) (bool, error) {
		done, err := script.Run(ctx, l.client.Redis, keys, append([]any{l.token}, args...)...).Int()
		if client.ScriptsRefused(err) {
			return watch(ctx, l.client.Redis, keys, judge)
		}
		return done == 1, err
	})
}
