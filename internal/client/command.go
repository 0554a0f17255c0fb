package client

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Command describes a command or pipeline.
type Command struct {
	Op     string        // as failures are reported
	Key    string        // any of its keys, which are all on one node; empty: no node is known
	Keys   int           // of a pipeline; it waits for other pipelines of many keys: see throttle
	Holds  bool          // its caller holds the locks of the keys: of those that wait it goes first
	Within time.Duration // the bound of all tries, at most Client.Timeout
	Again  Again         // whether it is sent again without an answer
	Now    bool          // it is rare, and all callers depend on it: it does not queue at the gate, only at the pool
	Spared bool          // it is not sent while the server is away
	Cached bool          // the user's client may answer it from memory, which shows nothing of the server
	Caller *Caller       // of its commands, if one tells whether they were sent
	takes  bool          // something: see NewTaking

	// Sent, if it is not nil, is set to when the command was about to be sent: after the wait at the gate, and
	// before the server can have executed it. If it is sent again, that counts.
	Sent *time.Time
}

func (what Command) admittedAt(t time.Time) {
	if what.Sent != nil {
		*what.Sent = t
	}
}

// A Reply is what a command has brought. If Err is of Redis, Value may still be set.
type Reply[R any] struct {
	Value R
	Err   error
	// Lost tells that a try of the command had no answer, and may have been executed, or may still be.
	Lost bool
}

// Again says whether a command that has no answer is sent again, since its connection may have broken, or the server
// may be about to return. A command whose reply was lost may have been executed.
type Again int

const (
	Never    Again = iota
	IfUnsent       // only if it has certainly not been executed
	Always         // it may as well be executed twice, or once, at the later time
)

const (
	firstPause = 2 * time.Millisecond
	maxPause   = 50 * time.Millisecond
)

// A repeat is the tries of a command. Each gets the rest of the time that the first one had. In the last tenth of that
// time there is no other try, since it would hardly be answered. So there is none after RedisTimeout: a slow server
// would get more to do.
type repeat struct {
	Command
	view     view
	begun    time.Time     // when the first try was sent
	least    time.Duration // that a try needs
	pause    time.Duration // before the next try
	replicas int           // may still refuse tries
	lost     bool          // a try: see Reply
}

// A view is what a repeat has to know of the server and of the connections to it.
type view interface {
	Away(key string) bool
	connections() int // how many may be to a replica
}

// again waits until the command is to be sent again, and returns true. err is how the last try has ended, nil included.
// Pauses grow. But after a READONLY the command is sent at once, through another connection, since go-redis closes this
// one: after a failover behind one address, each connection may be one to the old master.
func (r *repeat) again(ctx context.Context, sent time.Time, err error) bool {
	if r.begun.IsZero() {
		r.begun, r.least = sent, max(r.Within/10, time.Millisecond)
		r.pause, r.replicas = firstPause, -1
	}
	r.lost = r.lost || isLost(err)
	if sent.IsZero() || !r.repeats(err) || r.view.Away(r.Key) {
		return false
	}
	pause := r.pause
	if redis.IsReadOnlyError(err) {
		if r.replicas < 0 {
			r.replicas = r.view.connections()
		}
		if r.replicas--; r.replicas < 0 {
			return false
		}
		pause = 0
	} else {
		r.pause = min(2*pause, maxPause)
	}
	within := r.Within - time.Since(sent) - pause
	if within < r.least || pause > 0 && !Sleep(ctx, pause) || ctx.Err() != nil || r.view.Away(r.Key) {
		return false
	}
	r.Within = within
	return true
}

// repeats reports whether a command that has ended with err may be sent again while there is time.
func (r *repeat) repeats(err error) bool {
	return err != nil && err != redis.Nil && (r.Again == Always || r.Again == IfUnsent && !MayHaveRun(err)) &&
		(redis.IsReadOnlyError(err) || Unreachable(err) && !errors.Is(err, redis.ErrClosed) && !errors.Is(err, ErrAway))
}

// Sleep waits for d or until ctx ends. It reports whether ctx has not ended.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}
