package singlefill

import (
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/local"
	"github.com/singlefill/singlefill/internal/near"
)

// Near keeps decoded values in the memory of this process: see docs/near.md.
//
// What Delete, Set, Expire, DeleteTag and ExpireTag promise holds exactly in the process that calls
// them. In every other process a call that begins more than MaxLag after that call has returned never
// gets the old value; usually the lag is milliseconds. A process that cannot prove this asks Redis; if
// neither Redis nor the Loader answers, it returns what memory has within [Options.StaleIfError] in
// place of an error. If Redis loses an acknowledged write, the life of the value or TTL is the bound.
// Memory serves nothing that Redis has ended. The monotonic clock counts, which stands still while a
// machine is suspended.
//
// A process without Near tells the others up to a second later, by making them drop their memory: so
// turn it on in all that invalidate.
type Near struct {
	// Size is how many values are kept at most (W-TinyLFU). Default: 10,000.
	Size int

	// MaxBytes bounds the memory of what is kept, by the lengths of keys and entries and 256 bytes for
	// each value: see docs/near.md. Size bounds it, too; a value counts for at least MaxBytes/Size. A
	// value that is larger is not kept. At least 1 MiB. Default: 0, no bound.
	MaxBytes int64

	// TTL is how long a value is kept at most. At least 1 ms. Default: as long as it can be served.
	TTL time.Duration

	// MaxLag bounds how long after an invalidation in another process an old value is served. While
	// values are served, the process sends a command or two in each half of it. From 10 ms to an
	// hour. Default: 1 s.
	MaxLag time.Duration

	// Share makes all callers get the same value, which they must not change. Otherwise each owns
	// its value: that costs nothing for a T without pointers, slices and maps, a copy for other
	// plain types, and decoding for the rest and with a Codec of the user.
	Share bool
}

// checkNear reports the first setting of Near that makes no sense.
func checkNear(n *Near, rdb redis.UniversalClient) error {
	switch {
	case n.Size < 0:
		return fmt.Errorf("singlefill: Near.Size is %d: at least 1 is allowed, or 0 for 10,000", n.Size)
	case n.MaxBytes != 0 && n.MaxBytes < 1<<20:
		return fmt.Errorf("singlefill: Near.MaxBytes is %d: at least 1 MiB is allowed, or 0 for no bound", n.MaxBytes)
	case n.TTL != 0 && n.TTL < time.Millisecond:
		return fmt.Errorf("singlefill: Near.TTL is %v: at least 1ms is allowed, or 0 for the life of the value", n.TTL)
	case n.MaxLag != 0 && (n.MaxLag < 10*time.Millisecond || n.MaxLag > time.Hour):
		return fmt.Errorf("singlefill: Near.MaxLag is %v: 10ms to 1h is allowed, or 0 for 1s", n.MaxLag)
	}
	const old = "could bring an old value back into memory after a Delete"
	switch rdb := rdb.(type) { // types that embed a client, too
	case interface{ Options() *redis.Options }:
		if client.CachesReplies(rdb.Options()) {
			return fmt.Errorf("singlefill: Options.Near is set and rdb has client-side caching, which %s: turn one of them off", old)
		}
	case interface{ Options() *redis.ClusterOptions }:
		if o := rdb.Options(); o.ReadOnly || o.RouteByLatency || o.RouteRandomly {
			return fmt.Errorf("singlefill: Options.Near is set and rdb reads from replicas (ReadOnly, RouteByLatency or RouteRandomly), which %s: turn one of them off", old)
		}
	}
	return nil
}

// limits returns how much memory keeps.
func (n *Near) limits() local.Limits {
	return local.Limits{Keys: orDefault(n.Size, 10_000), Bytes: n.MaxBytes}
}

// newTier returns the memory of a cache. background runs a function until the cache is closed.
func newTier(c *client.Client, namespace string, n *Near, background func(run func(<-chan struct{})), dropped func()) *near.Tier {
	c.ReadFromMasters()
	t := near.New(c, logKey(namespace), n.limits(), orDefault(n.MaxLag, time.Second), background)
	t.Dropped = dropped
	return t
}

// logKey returns the key of the log of a namespace. It is no value key.
func logKey(namespace string) string { return namespace + ":log" }
