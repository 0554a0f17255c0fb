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

var (
	getOrLockScript = redis.NewScript(getOrLockLua)
	storeScript     = redis.NewScript(storeLua)
	releaseScript   = redis.NewScript(releaseLua)
	abandonScript   = redis.NewScript(abandonLua)
	renewScript     = redis.NewScript(renewLua)
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

const tokenLen, stampLen = 26, 16

// How GetOrLock answers.
const (
	Hit     = "hit"     // Text is an entry
	Locked  = "locked"  // the lock is ours; Text is the stamp of the grant
	Busy    = "busy"    // Text is the holder's token, Left what remains of its lock
	Failed  = "failed"  // Text is the word left by the load that we waited for
	Free    = "free"    // the lock could be taken, but we only looked
	Refused = "refused" // this attempt has been abandoned
)

// A Reply is GetOrLock's answer.
type Reply struct {
	Status, Text string
	Left         time.Duration
}

// GetOrLock looks for an entry other than the one with the header seen, else takes the lock if take says so
// and nobody holds it. awaited is the token of the holder that an earlier reply named, or empty.
func (l *Lock) GetOrLock(ctx context.Context, within time.Duration, seen, awaited string, take bool) (Reply, error) {
	sent := time.Now()
	r, err := client.DoWithin(ctx, l.client, within, "lock", func(ctx context.Context) (Reply, error) {
		flag := "0"
		if take {
			flag = "1"
		}
		r, err := parseLockReply(getOrLockScript.Run(ctx, l.client.Redis, []string{l.value, l.key},
			l.token, l.ttl.Milliseconds(), seen, awaited, flag))
		if client.ScriptsRefused(err) {
			return l.watchGetOrLock(ctx, seen, awaited, take)
		}
		return r, err
	})
	switch {
	case err != nil:
		l.InDoubt = l.InDoubt || take && client.Unreachable(err)
	case r.Status == Locked:
		l.held, l.stamp = sent, r.Text
	}
	return r, err
}

func parseLockReply(cmd *redis.Cmd) (r Reply, err error) {
	fields, err := cmd.Slice()
	if err != nil {
		return r, err
	}
	if len(fields) == 3 {
		status, ok1 := fields[0].(string)
		text, ok2 := fields[1].(string)
		left, ok3 := fields[2].(int64)
		if ok1 && ok2 && ok3 {
			return Reply{status, text, time.Duration(left) * time.Millisecond}, nil
		}
	}
	return r, fmt.Errorf("unexpected reply %v", fields)
}

// Store writes the entry and releases the lock. false: refused, and nothing was written.
func (l *Lock) Store(ctx context.Context, within time.Duration, data []byte, life time.Duration) (bool, error) {
	return l.act(ctx, within, "store", storeScript, []string{l.value, l.key}, l.watchStore(data, life), l.stamp, data, life.Milliseconds())
}

// Release gives the lock back. What is not ours stays as it is. failure, if not empty, is left behind for those
// who have been waiting for this load. It lives for the ttl of the lock, and nobody sleeps longer than that.
func (l *Lock) Release(ctx context.Context, within time.Duration, word string) (bool, error) {
	return l.act(ctx, within, "release", releaseScript, []string{l.key}, l.watchRelease(word), l.stamp, word, l.ttl.Milliseconds())
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

func (l *Lock) act(ctx context.Context, within time.Duration, op string, script *redis.Script, keys []string, watch watchFunc, args ...any) (bool, error) {
	return client.DoWithin(ctx, l.client, within, op, func(ctx context.Context) (bool, error) {
		done, err := script.Run(ctx, l.client.Redis, keys, append([]any{l.token}, args...)...).Int()
		if client.ScriptsRefused(err) {
			return l.watch(ctx, keys, watch)
		}
		return done == 1, err
	})
}
