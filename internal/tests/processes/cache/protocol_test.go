package cache_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
)

// The test gives orders to its processes, and they answer with reports. Each is a line of JSON.

// A config describes the cache of a process. With times that are zero no stall of the machine makes
// a command or a lock time out.
type config struct {
	Name      string // of the process
	Direct    bool   // no proxy: the process can do more work, and the test cannot see its commands
	Addr      string // of the proxy, or of Redis
	Counters  string // address of the Redis in which loads count themselves
	Namespace string

	LockTTL, LoadTimeout, RedisTimeout, NotFoundTTL, StaleWhileRevalidate time.Duration

	PoolSize int
	Near     bool
}

const (
	defaultTTL          = 10 * time.Minute
	patientLockTTL      = 30 * time.Second
	patientLoadTimeout  = 60 * time.Second
	patientRedisTimeout = 9 * time.Second
)

// shortLock is for a holder that is going to lose its lock. A stalled machine could keep the
// process from renewing it, so LockTTL is as long as a test can wait.
var shortLock = config{LockTTL: 2500 * time.Millisecond, RedisTimeout: 800 * time.Millisecond}

func (c config) options() *singlefill.Options[string] {
	opts := &singlefill.Options[string]{
		LockTTL:      cmp.Or(c.LockTTL, patientLockTTL),
		LoadTimeout:  cmp.Or(c.LoadTimeout, patientLoadTimeout),
		RedisTimeout: cmp.Or(c.RedisTimeout, patientRedisTimeout),
		NotFoundTTL:  c.NotFoundTTL,

		StaleWhileRevalidate: c.StaleWhileRevalidate,
	}
	if c.Near {
		opts.Near = &singlefill.Near{}
	}
	return opts
}

// A plan is what a Loader does, in the order of the fields, before it returns its value.
type plan struct {
	Sleep     time.Duration // sleep so long
	Block     bool          // wait for the order release, or for ctx; or for the order pass, which lets one load go on
	IgnoreCtx bool          // with Block: do not wait for ctx
	Fail      string        // return an error with this text
	Panic     string        // panic with this text
	NotFound  bool          // return ErrNotFound
}

// An order is what the test has a process do. Tag names what the order starts.
type order struct {
	Op    string
	Tag   string `json:",omitempty"`
	Key   string `json:",omitempty"`
	N     int    `json:",omitempty"` // how many goroutines
	Start bool   `json:",omitempty"` // the goroutines wait for the order start
	Plan  plan   `json:",omitzero"`

	Every  time.Duration `json:",omitempty"` // pause before each call; of serve, the grace
	Config config        `json:",omitzero"`
}

// A report is what a process tells the test.
//
//	begun Tag    a Loader of Tag begins to load Value for Key, At the server's time
//	joined Tag   all calls of Tag wait in GetOrLoad
//	done Tag     all calls of Tag have returned, with Outcomes
//	tally Tag    Outcomes and Counts of Tag so far
//	unlocked     a Loader ran without the fill lock, for which no test here gives a reason
//	trouble      a command failed with Err
//	Op Tag       another order has been carried out
type report struct {
	Event, Tag string
	Key, Value string           `json:",omitempty"`
	Err        string           `json:",omitempty"` // of the order
	At         time.Time        `json:",omitzero"`
	Outcomes   []countedOutcome `json:",omitempty"`
	Stats      singlefill.Stats `json:",omitzero"`
	Pool       redis.PoolStats  `json:",omitzero"`
	Counts     []int64          `json:",omitempty"` // calls that have returned, by goroutine
}

// An outcome is what one call has returned.
type outcome struct{ Kind, Text string }

type countedOutcome struct {
	outcome
	N int
}

// Kinds of outcomes.
const (
	gotValue    = "value"
	gotOwn      = "the Loader's error itself"
	gotRemote   = "a RemoteError"
	gotPanic    = "a PanicError"
	gotNotFound = "ErrNotFound"
	gotMiss     = "ErrMiss"
	gotClosed   = "ErrClosed"
	gotDeadline = "DeadlineExceeded"
	gotError    = "another error"
	gotStale    = "a stale value"
)

func outcomeOf(key, v string, info singlefill.ValueInfo, err, own error) outcome {
	var remote *singlefill.RemoteError
	var panicked *singlefill.PanicError
	switch {
	case err == nil && info.Stale:
		return outcome{gotStale, v}
	case err == nil:
		return outcome{gotValue, v}
	case own != nil && err == own:
		return outcome{gotOwn, err.Error()}
	case err == singlefill.ErrNotFound:
		return outcome{gotNotFound, ""}
	case err == singlefill.ErrMiss:
		return outcome{gotMiss, ""}
	case errors.As(err, &remote) && remote.Key == key:
		return outcome{gotRemote, remote.Message}
	case errors.As(err, &panicked):
		return outcome{gotPanic, fmt.Sprint(panicked.Value)}
	case errors.Is(err, singlefill.ErrClosed):
		return outcome{gotClosed, ""}
	case errors.Is(err, context.DeadlineExceeded):
		return outcome{gotDeadline, ""}
	}
	return outcome{gotError, err.Error()}
}

// The Redis keys under which loads are counted, outside of every namespace.
func loadsKey(namespace, key string) string    { return "count:loads:" + namespace + ":" + key }
func runningKey(namespace, key string) string  { return "count:running:" + namespace + ":" + key }
func overlapsKey(namespace, key string) string { return "count:overlaps:" + namespace + ":" + key }

// The Redis keys of the cache.
func valueKey(namespace, key string) string { return namespace + ":{" + key + "}" }
func lockKey(namespace, key string) string  { return valueKey(namespace, key) + ":lock" }
