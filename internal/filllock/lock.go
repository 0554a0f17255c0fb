// Package filllock is the fill lock: one holder per key across all processes, and the right to store a
// value only while holding it. Value and lock are two keys in one slot, so that each command is one
// step on the server.
package filllock

import (
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/local"
	"github.com/singlefill/singlefill/internal/wake"
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
	getOrLockScript = client.NewTaking(wake.Lua + getOrLockLua)
	storeScript     = newScript(storeLua)
	releaseScript   = newScript(releaseLua)
	abandonScript   = newScript(abandonLua)
	renewScript     = newScript(renewLua)
)

func newScript(text string) client.Script { return client.NewScript(wake.Lua + text) }

// A Lock is one attempt to hold the lock of one key. Each attempt has a new token, so that no
// command for it touches a lock that another attempt holds, even in this process.
//
// Each command is one step on the server, and does nothing unless this attempt still holds the
// lock. Commands may be repeated and may arrive late, because the client may send one twice when a
// reply was lost. The server gives each grant of the lock a stamp, which Store, Release and Renew
// must show.
type Lock struct {
	// InDoubt is set when a command to take the lock was not answered and may still arrive, or when the
	// lock could not be released. Such an attempt must be abandoned in the end.
	InDoubt bool
	late    time.Time // from then on a command in doubt takes nothing

	Keys   Pair
	client *client.Client
	token  string
	stamp  string // of the grant
	ttl    time.Duration
	args   args
	// held is when the command was sent that last took or prolonged the lock.
	held time.Time
}

// args are arguments of commands, which are made once. Without Redis there are none.
type args struct{ value, lock, token, ttl any }

// New returns a new attempt, which holds nothing yet.
func New(c *client.Client, pair Pair, ttl time.Duration) *Lock {
	return NewMany(c, []Pair{pair}, ttl)[0]
}

// NewMany returns attempts for keys that are asked for together. They have one token, of 130 bits from crypto/rand, by
// which waiters see what one process loads at once.
func NewMany(c *client.Client, pairs []Pair, ttl time.Duration) []*Lock {
	token, all, locks := rand.Text(), make([]Lock, len(pairs)), make([]*Lock, len(pairs)) // two allocations
	var args args
	if c.Local == nil {
		args.token, args.ttl = token, ttl.Milliseconds()
	}
	for i, pair := range pairs {
		if c.Local == nil {
			args.value, args.lock = pair.Value, pair.Lock
		}
		all[i] = Lock{Keys: pair, client: c, token: token, ttl: ttl, args: args}
		locks[i] = &all[i]
	}
	return locks
}

const tokenLen, stampLen = 26, 16

// What the entry in Query.Known is good for.
const (
	Unusable = ""         // no caller may get it
	Fallback = "fallback" // callers may get it if the load fails or backs off
	// Served: callers have got it. The load is a refresh, which ends once the entry is gone.
	Served = "served"
)

// A Query is a question to GetOrLock.
type Query struct {
	Lock    *Lock
	Known   string // header of the entry that was last seen, or empty
	Awaited string // token of the holder that an earlier reply named, or empty
	Take    bool   // take the lock if it is free
	For     string // what the known entry is good for: Unusable, Fallback or Served
	Spared  bool   // as in client.Command
}

// The answers of GetOrLock.
const (
	Hit    = "hit"    // Text is an entry
	Locked = "locked" // this attempt holds the lock; Text is the stamp of the grant
	// Busy: Text is the holder's token, Left the rest of its TTL, Age the time since its grant.
	Busy = "busy"
	// Failed: Text is the failure of the load that was awaited; or of a refresh, and Left is how
	// long to back off; or one that is remembered for callers with an Unusable entry or none, and Left
	// is for how long.
	Failed  = "failed"
	Free    = "free"    // the lock is free, and Take is false
	Gone    = "gone"    // there is nothing to refresh
	Refused = "refused" // this attempt has been abandoned

	unrun = "unrun" // the server runs no scripts for this user
)

// A Reply is the answer of GetOrLock.
type Reply struct {
	Status, Text string
	Left         time.Duration
	Known        bool // the known entry is still there
	// Age is counted by the server's clock. It is negative if that was set back since the grant.
	Age time.Duration
	// Kept is for how long Redis keeps the entry of a Hit: negative without a TTL, and 0 if that is not
	// known, since the server runs no scripts.
	Kept time.Duration
}

// GetOrLock asks for keys of one server: each question returns an entry other than the known one, or else takes the
// lock if it is free.
//
// Each grant has a stamp besides the token. The client may send the locking command twice. If the
// second copy arrives after a Delete, the same token holds the lock again: a value loaded before
// the Delete would be stored after it. See TestLock_LateGrant.
func GetOrLock(ctx context.Context, within time.Duration, queries []Query) []Answer {
	c, first, n := queries[0].Lock.client, queries[0].Lock.Keys, len(queries)
	if sent := time.Now(); c.Local != nil {
		answers := make([]Answer, n)
		for i, q := range queries {
			_, answers[i].Err = client.InMemory(c.Local, q.Lock.Keys.Value, q.judge(&answers[i].Value))
			q.answered(within, sent, answers[i])
		}
		return answers
	}
	calls := make([]client.ScriptCall, n)
	for i, q := range queries {
		l := q.Lock
		calls[i] = client.ScriptCall{Script: getOrLockScript, Args: append(getOrLockScript.Call(2, 7), l.args.value, l.args.lock,
			l.args.token, l.args.ttl, q.Known, q.Awaited, q.Take, q.For, 0)}
	}
	sent := make([]time.Time, n)
	sent[0] = time.Now()
	what := client.Command{Op: "lock", Key: first.Value, Keys: n, Within: within, Again: client.Always,
		Spared: queries[0].Spared, Sent: &sent[0]}
	answers := client.RunAll(ctx, c, what, calls, parseLockReply)
	var left []int
	for i := range sent {
		if sent[i] = sent[0]; answers[i].Value.Status == unrun {
			left = append(left, i)
		}
	}
	if left != nil {
		twins(left, func(i int) {
			what, keys := what, queries[i].Lock.Keys
			what.Key, what.Sent = keys.Value, &sent[i]
			answers[i] = client.DoTries(ctx, c, what, func(ctx context.Context) (r Reply, err error) {
				_, err = client.InOneStep(ctx, c, []string{keys.Value, keys.Lock}, queries[i].judge(&r))
				return r, err
			})
		})
	}
	for i, q := range queries {
		q.answered(within, sent[i], answers[i])
	}
	return answers
}

// twins runs the transactions of commands whose scripts the server does not run, at the same time: so none is repeated
// for another one, and a server that does not answer costs the time of one.
func twins(of []int, run func(i int)) {
	if len(of) == 1 {
		run(of[0])
		return
	}
	var all sync.WaitGroup
	for _, i := range of {
		all.Go(func() { run(i) })
	}
	all.Wait()
}

// An Answer is a Reply to GetOrLock, or an error.
type Answer = client.Reply[Reply]

// GetOrLock asks for one key.
func (l *Lock) GetOrLock(ctx context.Context, within time.Duration, q Query) (Reply, error) {
	q.Lock = l
	a := GetOrLock(ctx, within, []Query{q})[0]
	return a.Value, a.Err
}

// answered notes what GetOrLock has brought.
func (q Query) answered(within time.Duration, sent time.Time, a Answer) {
	l := q.Lock
	if a.Err == nil && a.Value.Status == Locked {
		l.held, l.stamp = sent, a.Value.Text
	}
	if q.Take && a.Lost {
		l.InDoubt = true
		if errors.Is(a.Err, client.ErrAway) { // before its time was over
			l.late = time.Now().Add(within)
		}
	}
}

func parseLockReply(cmd *redis.Cmd) (r Reply, err error) {
	fields, err := cmd.Slice()
	switch {
	case client.ScriptsRefused(err):
		return Reply{Status: unrun}, nil
	case err != nil:
		return r, err
	}
	if len(fields) == 5 {
		status, ok1 := fields[0].(string)
		text, ok2 := fields[1].(string)
		left, ok3 := fields[2].(int64)
		known, ok4 := fields[3].(int64)
		age, ok5 := fields[4].(int64)
		if ok1 && ok2 && ok3 && ok4 && ok5 {
			r = Reply{Status: status, Text: text, Known: known == 1, Age: time.Duration(age) * time.Microsecond}
			if left := time.Duration(left) * time.Millisecond; status == Hit {
				r.Kept = left
			} else {
				r.Left = left
			}
			return r, nil
		}
	}
	return r, fmt.Errorf("unexpected reply %v", fields)
}

// An Act is a command of an attempt on its lock: see [Do].
type Act struct {
	lock *Lock
	op   string
	client.ScriptCall
	keys    [2]string // the second may be empty
	twin    client.Judge
	tagging local.Tagging
}

// Tagged is the act with the tags of the value that it stores. With Redis they have been noted before: see package
// tags.
func (a Act) Tagged(t local.Tagging) Act {
	a.tagging = t
	return a
}

// inMemory carries out an act without Redis. It releases the lock of a value whose tags have been invalidated.
func (a Act) inMemory() (done bool, err error) {
	l := a.lock
	step := l.client.Local.Begin(l.Keys.Lock)
	defer step.End()
	write, done, err := a.twin(step)
	if done && write != nil && !step.Tag(l.Keys.Value, a.tagging) {
		write, _, err = l.judgeRelease(ReleaseNote{})(step)
		done = false
	}
	if write != nil {
		write(step)
	}
	return done, err
}

func (l *Lock) act(op string, script client.Script, keys [2]string, twin client.Judge, args ...any) Act {
	call := script.Call(2, 1+len(args))
	for _, key := range keys {
		switch key {
		case l.Keys.Value:
			call = append(call, l.args.value)
		case l.Keys.Lock:
			call = append(call, l.args.lock)
		default:
			call[2] = 1
		}
	}
	return Act{lock: l, op: op, ScriptCall: client.ScriptCall{Script: script, Args: append(append(call, l.args.token), args...)}, keys: keys, twin: twin}
}

// Do carries out acts on keys of one server, in one pipeline. Each has its own answer: whether the attempt held the
// lock, or an error.
func Do(ctx context.Context, within time.Duration, acts ...Act) []Done {
	c, all := acts[0].lock.client, make([]Done, len(acts))
	if c.Local != nil {
		for i, act := range acts {
			all[i].Value, all[i].Err = act.inMemory()
		}
		return all
	}
	what := client.Command{Op: acts[0].op, Key: acts[0].keys[0], Keys: len(acts), Holds: true, Within: within, Again: client.Always}
	calls := make([]client.ScriptCall, len(acts))
	for i, act := range acts {
		calls[i] = act.ScriptCall
	}
	const unrun = -1
	replies := client.RunAll(ctx, c, what, calls, func(cmd *redis.Cmd) (int, error) {
		done, err := cmd.Int()
		if client.ScriptsRefused(err) {
			return unrun, nil
		}
		return done, err
	})
	var left []int
	for i, r := range replies {
		all[i] = Done{Value: r.Value == 1, Err: r.Err, Lost: r.Lost}
		if r.Value == unrun {
			left = append(left, i)
		}
	}
	if left != nil {
		twins(left, func(i int) {
			act, what := acts[i], what
			what.Op, what.Key = act.op, act.keys[0]
			all[i] = client.DoTries(ctx, c, what, func(ctx context.Context) (bool, error) {
				return client.InOneStep(ctx, c, slices.DeleteFunc(act.keys[:], func(key string) bool { return key == "" }), act.twin)
			})
		})
	}
	return all
}

// Done is the answer to an Act.
type Done = client.Reply[bool]

// Do carries out one act.
func (a Act) Do(ctx context.Context, within time.Duration) (done bool, err error) {
	d := Do(ctx, within, a)[0]
	return d.Value, d.Err
}

// Store writes the entry and releases the lock. The answer is false if the server refused and wrote
// nothing.
//
// store.lua reports "stored" although the lock is gone, if the value is the very entry to be
// stored: the first copy of the command stored it, and its reply was lost. Headers are random, so
// no two entries are equal. See TestCommand_LostOnce.
func (l *Lock) Store(data []byte, life time.Duration) Act {
	if l.client.Local != nil {
		return Act{lock: l, twin: l.judgeStore(data, life)}
	}
	return l.act("store", storeScript, [2]string{l.Keys.Value, l.Keys.Lock}, l.judgeStore(data, life),
		l.stamp, data, life.Milliseconds())
}

// A ReleaseNote is what a load that has no value to store leaves for others.
type ReleaseNote struct {
	// Failure is for the processes that have waited for this load. If it is empty, they load
	// themselves.
	Failure string
	// RetryAfter is how long processes that have a value to serve must back off.
	RetryAfter time.Duration
	// Remember is how long processes that have no value to serve get Failure. It needs one.
	Remember time.Duration
	Drop     bool // remove the value, too
}

// life is the TTL of the note. No waiter pauses for longer than the TTL of the lock.
func (v ReleaseNote) life(ttl time.Duration) time.Duration { return max(ttl, v.RetryAfter, v.Remember) }

// Release releases the lock and leaves the note. If this attempt does not hold the lock, it does
// nothing.
//
// A failed load leaves a mark instead of deleting the lock, and the next holder's lock keeps the
// mark. The callers that waited share the failure; otherwise each of them would load and fail in
// turn. A new caller may take the lock before they ask again. See TestOrders_FailedLoad.
func (l *Lock) Release(v ReleaseNote) Act {
	return l.act("release", releaseScript, [2]string{l.Keys.Lock, l.Keys.Value}, l.judgeRelease(v), l.stamp,
		v.Failure, v.RetryAfter.Milliseconds(), v.life(l.ttl).Milliseconds(), v.Drop, v.Remember.Milliseconds())
}

// Late returns when a command of the attempt that is still in transit takes nothing any more.
func (l *Lock) Late() time.Time { return l.late }

// Abandon gives up an attempt whose outcome is unknown: it releases the lock if the attempt has taken it.
// A command of it that is still in transit is to be late by now, or Abandon is to be repeated then. If the clock of the
// server has been set back since, the server refuses it for the TTL of the lock, unless another attempt uses the lock
// in between.
//
// Abandon writes to a lock that is free. The command that it gives up may arrive after it, and
// would take the lock for LockTTL without a load if the clock of the server was set back. See
// TestAbandon_RefusesAttempt.
//
// An abandonment is tried until Redis answers, and first of all while the breaker is open. A frozen
// server may have granted the lock just before; it executes the abandonment as soon as it goes on.
// See TestServer_FrozenTakesNothing.
func (l *Lock) Abandon() Act {
	return l.act("abandon", abandonScript, [2]string{l.Keys.Lock}, l.judgeAbandon, l.args.ttl)
}

// Renew prolongs the lock. The answer is false if the lock is lost.
func (l *Lock) Renew() Act {
	return l.act("renew", renewScript, [2]string{l.Keys.Lock}, l.judgeRenew, l.stamp, l.args.ttl)
}
