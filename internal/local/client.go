// Package local is a client of go-redis that reaches no server: its commands are executed in the memory of this
// process. It knows those that caches send, and refuses scripts, so that transactions do what scripts would do, as
// for a user who may run none. It answers at once, and also when the context of a command has ended.
package local

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/singlefill/singlefill/internal/wake"
)

// New returns a client of an empty store that keeps at most size values: keys with a prefix that end with a brace. No
// hook may be added to it. free closes it, and frees what it keeps.
func New(prefix string, size int) (rdb *redis.Client, free func()) {
	rdb = redis.NewClient(&redis.Options{
		Addr:                     "memory",
		Dialer:                   func(context.Context, string, string) (net.Conn, error) { return nil, errNoServer },
		PoolSize:                 64,   // commands at a time: more would only wait for each other
		ContextTimeoutEnabled:    true, // as each command returns at once
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	h := &hook{store: newStore(prefix, size)}
	rdb.AddHook(h)
	h.added = true
	wake.Mute(rdb) // no other process loads
	return rdb, func() {
		_ = rdb.Close()
		h.store.close()
	}
}

var errNoServer = errors.New("a local client has no server")

// A hook executes commands in place of sending them.
//
// go-redis asks a hook for its functions when it is added to a client, and again for each [redis.Tx] when that
// begins: a Tx has other functions.
type hook struct {
	store *store
	added bool
	turns [slots]turn
}

// DialHook implements redis.Hook.
func (*hook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements redis.Hook.
func (h *hook) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	var watching *turn
	var number uint64
	return func(_ context.Context, cmd redis.Cmder) error {
		args := texts(cmd.Args())
		switch args[0] {
		case "watch":
			watching = h.turnOf(args[1])
			number = watching.begin(h.store.now)
		case "unwatch":
			watching.end(number)
		}
		answer(cmd, h.store.do(args))
		return cmd.Err()
	}
}

// ProcessPipelineHook implements redis.Hook. A pipeline is one step, so MULTI and EXEC have nothing to do, except
// that a transaction of a Tx fails if a key has changed, in the slot of its keys, since its WATCH. All keys that a
// Tx watches are in that slot, because of Clusters.
func (h *hook) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	inTx := h.added
	return func(_ context.Context, cmds []redis.Cmder) (failed error) {
		all := make([][]string, len(cmds))
		for i, cmd := range cmds {
			all[i] = texts(cmd.Args())
		}
		since := never
		if inTx && all[0][0] == "multi" {
			watching := h.turnOf(all[1][1])
			since = watching.since
			defer watching.end(watching.owner.Load())
		}
		for i, reply := range h.store.doAll(all, since) {
			answer(cmds[i], reply)
			if failed == nil {
				failed = cmds[i].Err()
			}
		}
		return failed
	}
}

func (h *hook) turnOf(key string) *turn { return &h.turns[slot(key)] }

// A turn belongs to one Tx at a time, from its WATCH to its EXEC or UNWATCH. So EXEC knows whose WATCH it is about,
// which go-redis does not tell; and of many transactions at once that watch one key, not all but one fail.
type turn struct {
	mu    sync.Mutex    // locked while the turn belongs to a Tx
	owner atomic.Uint64 // number of that Tx; 0: none
	last  uint64        // number that was given; protected by mu
	since uint64        // changes of the store at the WATCH; protected by mu
}

// begin waits until the turn belongs to a new Tx. It returns the number of the Tx. No Tx takes long, as all that it
// does is commands that return at once. None may begin within another one: they may need the same turn.
func (t *turn) begin(changes func() uint64) (number uint64) {
	t.mu.Lock()
	t.last++
	t.owner.Store(t.last)
	t.since = changes()
	return t.last
}

// end ends the turn of a Tx, if it has not ended.
func (t *turn) end(number uint64) {
	if number != 0 && t.owner.CompareAndSwap(number, 0) {
		t.mu.Unlock()
	}
}
