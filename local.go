package singlefill

import (
	"cmp"
	"fmt"
	"time"

	"github.com/singlefill/singlefill/internal/local"
)

// NewLocal returns a [Cache] that needs no Redis: its values are in the memory of this process, and
// no other process nor another Cache has them, whatever its namespace. It is for programs in which
// Redis is optional, for tests, also in bubbles of testing/synctest, and in place of a map of results.
// It takes the options of [New], so that a program can call the one or the other. Close frees what it
// keeps.
//
// All promises hold in this process, and no call fails or waits because of Redis. Values go through
// the Codec, so each caller owns its value. [Options] mean the same, but for these:
//
//   - Near is always on. Size is how many values are kept, by default 10,000: as bytes, and decoded
//     for hits. What failed loads leave for RetryAfter and FailureTTL counts as a value. What has no
//     room is a miss, as if Redis had evicted it: what was stored or read from the bytes longest ago
//     goes first. Near.MaxBytes bounds the bytes and the decoded values together, each by its half.
//   - DeleteTag and ExpireTag find a key by the tags of its last value, with Redis also by those of
//     former ones. A value that has no room any more leaves its tags.
//   - LockTTL, RedisTimeout and Near.MaxLag are checked, and have no meaning.
//   - MaxFleetLoads is refused: MaxLoads is the limit.
//
// A hit costs what it costs with Near. A miss starts a goroutine, and takes some hundred allocations,
// beside the Loader. docs/migrate/memory.md says when a map or another cache is enough.
//
// To go to Redis, call [New] with a client and the same options. To come back, call NewLocal again. No
// other line changes, and each begins with an empty cache, or with what Redis has.
//
// NewLocal starts no goroutine, and neither do values that wait for their end. It returns the errors of New.
func NewLocal[T any](namespace string, ttl time.Duration, opts *Options[T]) (*Cache[T], error) {
	var o Options[T]
	if opts != nil {
		o = *opts
	}
	if o.MaxFleetLoads > 0 {
		return nil, fmt.Errorf("singlefill: Options.MaxFleetLoads is %d: a local cache knows no fleet: 0 is allowed, and MaxLoads", o.MaxFleetLoads)
	}
	o.Near = cmp.Or(o.Near, new(Near))
	half := *o.Near
	half.MaxBytes /= 2                                    // for the bytes, and as much for the values
	rdb, free := local.New(namespace+":{", half.limits()) // see value.Key
	c, err := newCache(rdb, namespace, ttl, &o, func(s *settings) {
		// Only a process that gets no time for so long finds a command unanswered, or loses a lock.
		s.redisTimeout, s.lockTTL, s.near = 10*time.Second, time.Minute, &half
	})
	if err != nil {
		free()
		return nil, err
	}
	c.rooms.near.Alone()
	rdb.Store.Lost = c.rooms.near.Forget
	c.rooms.free = free
	return c, nil
}
