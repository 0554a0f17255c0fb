package main

import (
	"cmp"
	"context"
	"flag"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/masters"
)

// A load is a fill lock that is held: a process loads the key.
type load struct {
	Key    string  `json:"key"`
	Holder string  `json:"holder"`       // token
	Held   seconds `json:"held_seconds"` // since the grant, by the server's clock
	Left   seconds `json:"left_seconds"` // of the lock, if it is not renewed
}

// A heldLock is a lock of package lock.
type heldLock struct {
	Name    string   `json:"name"`
	Kind    string   `json:"kind"`           // mutex, semaphore, or free: only a fence is left
	Size    int      `json:"size,omitempty"` // of a semaphore
	Holders []holder `json:"holders"`
	Waiting int64    `json:"waiting"` // of a fair mutex, all waiters; of the others, those that are to be woken
	Fence   int64    `json:"fence"`   // the last one that was granted
}

type holder struct {
	Token string  `json:"token"`
	Name  string  `json:"name,omitempty"` // Options.Holder
	Fence int64   `json:"fence"`
	Held  seconds `json:"held_seconds"` // since the grant, by the server's clock
	Left  seconds `json:"left_seconds"` // of the lease, if it is not renewed
}

func prepareLocks(x *execution, _ *flag.FlagSet) func(ctx context.Context, args []string) error {
	return func(ctx context.Context, args []string) error {
		if len(args) == 0 {
			return x.locks(ctx)
		}
		loads, err := x.loads(ctx, args[0])
		if err != nil {
			return err
		}
		if x.json {
			return x.printJSON(loads)
		}
		t := x.table("KEY", "LOADING FOR", "LOCK LEFT", "HOLDER")
		for _, l := range loads {
			t.add(printable(l.Key), l.Held, l.Left, l.Holder)
		}
		_ = t.Flush()
		return nil
	}
}

// loads returns the fill locks that are held in a namespace, the oldest first.
func (x *execution) loads(ctx context.Context, namespace string) (loads []load, err error) {
	loads = []load{}
	err = x.scan(ctx, masters.Literal(namespace)+":{*}:lock", func(keys []string) error {
		found, err := x.readLoads(ctx, namespace, keys)
		loads = append(loads, found...)
		return err
	})
	slices.SortFunc(loads, func(a, b load) int { return cmp.Or(cmp.Compare(b.Held, a.Held), cmp.Compare(a.Key, b.Key)) })
	return slices.CompactFunc(loads, func(a, b load) bool { return a.Key == b.Key }), err
}

// A fill lock that is held has the letter H, a token of 26 characters, and the time of the grant in 16
// digits, µs of the server's clock.
const (
	tokenEnd = 1 + 26
	stampEnd = tokenEnd + 16
)

func (x *execution) readLoads(ctx context.Context, namespace string, keys []string) (loads []load, err error) {
	values, ttls := make([]*redis.StringCmd, len(keys)), make([]*redis.DurationCmd, len(keys))
	now, err := x.serverTime(ctx, keys[0])
	if err != nil {
		return nil, err
	}
	_, _ = x.rdb.Pipelined(ctx, func(p redis.Pipeliner) error { // each command has its error
		for i, key := range keys {
			values[i], ttls[i] = p.GetRange(ctx, key, 0, stampEnd-1), p.PTTL(ctx, key)
		}
		return nil
	})
	for i, key := range keys {
		if err := cmp.Or(values[i].Err(), ttls[i].Err()); err != nil && !client.Refused(err) {
			return nil, err
		}
		v := values[i].Val()
		stamp, err := strconv.ParseInt(v[min(len(v), tokenEnd):], 10, 64)
		if len(v) != stampEnd || v[0] != 'H' || err != nil {
			continue
		}
		loads = append(loads, load{
			Key: userKey(namespace, strings.TrimSuffix(key, ":lock")), Holder: v[1:tokenEnd],
			Held: seconds(now.Sub(time.UnixMicro(stamp))), Left: seconds(max(0, ttls[i].Val())),
		})
	}
	return loads, nil
}

// serverTime returns the time of the server that has key.
func (x *execution) serverTime(ctx context.Context, key string) (time.Time, error) {
	if cluster, ok := x.rdb.(*redis.ClusterClient); ok {
		master, err := cluster.MasterForKey(ctx, key)
		if err != nil {
			return time.Time{}, err
		}
		return master.Time(ctx).Result()
	}
	return x.rdb.Time(ctx).Result()
}

// locks prints the locks of package lock. The names of their keys are {name}:lock, with an ending for all
// but the first.
func (x *execution) locks(ctx context.Context) error {
	found := make(map[string]bool)
	err := x.scan(ctx, "{*}:lock*", func(keys []string) error {
		for _, key := range keys {
			if i := strings.LastIndex(key, "}:lock"); i > 0 {
				found[key[:i+len("}:lock")]] = true
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	all := []heldLock{}
	for key := range found {
		l, err := x.readLock(ctx, key)
		if err != nil {
			return err
		}
		all = append(all, l)
	}
	slices.SortFunc(all, func(a, b heldLock) int { return strings.Compare(a.Name, b.Name) })
	if x.json {
		return x.printJSON(all)
	}
	t := x.table("LOCK", "KIND", "HELD FOR", "LEASE LEFT", "WAITING", "FENCE", "HOLDER")
	for _, l := range all {
		kind := l.Kind
		if l.Size > 0 {
			kind += " of " + strconv.Itoa(l.Size)
		}
		if len(l.Holders) == 0 {
			t.add(printable(l.Name), kind, "-", "-", l.Waiting, l.Fence, "")
		}
		for _, h := range l.Holders {
			t.add(printable(l.Name), kind, h.Held, h.Left, l.Waiting, h.Fence, printable(cmp.Or(h.Name, h.Token)))
		}
	}
	_ = t.Flush()
	return nil
}

// newHolder returns the holder that has the token: 26 characters, and its name. A fence is the time of its grant in µs,
// unless the clock was put back.
func newHolder(token string, fence int64, left time.Duration, now time.Time) holder {
	n := min(len(token), 26)
	return holder{token[:n], token[n:], fence, seconds(max(0, now.Sub(time.UnixMicro(fence)))), seconds(left)}
}

// readLock reads the keys of a lock. A mutex has the token of its holder under the first. A semaphore has
// there the ends of its leases, in ms of the server's clock, and their fences in a hash.
func (x *execution) readLock(ctx context.Context, key string) (heldLock, error) {
	l := heldLock{Name: client.Untag(strings.TrimSuffix(strings.TrimPrefix(key, "{"), "}:lock")), Kind: "free", Holders: []holder{}}
	now, err := x.serverTime(ctx, key)
	if err != nil {
		return l, err
	}
	var token, fence *redis.StringCmd
	var left *redis.DurationCmd
	var leases *redis.ZSliceCmd
	var details *redis.MapStringStringCmd
	var waiting, queued *redis.IntCmd
	_, _ = x.rdb.Pipelined(ctx, func(p redis.Pipeliner) error { // each command has its error; some meet another type
		token, left, fence = p.Get(ctx, key), p.PTTL(ctx, key), p.Get(ctx, key+":fence")
		leases, details = p.ZRangeWithScores(ctx, key, 0, -1), p.HGetAll(ctx, key+":details")
		waiting, queued = p.ZCard(ctx, key+":waiting"), p.ZCard(ctx, key+":queue")
		return nil
	})
	for _, err := range []error{token.Err(), left.Err(), fence.Err(), leases.Err(), details.Err(), waiting.Err(), queued.Err()} {
		if err != nil && !client.Refused(err) {
			return l, err
		}
	}
	number, _, _ := strings.Cut(fence.Val(), " ") // of a mutex that is held, the token follows
	l.Fence, _ = strconv.ParseInt(number, 10, 64)
	l.Waiting = waiting.Val() + queued.Val()
	if token.Err() == nil {
		l.Kind = "mutex"
		l.Holders = append(l.Holders, newHolder(token.Val(), l.Fence, max(0, left.Val()), now))
	}
	if queued.Val() > 0 {
		l.Kind = "fair mutex"
	}
	if size, err := strconv.Atoi(details.Val()["size"]); err == nil {
		l.Kind, l.Size = "semaphore", size
		for _, lease := range leases.Val() {
			name, _ := lease.Member.(string)
			if end := time.UnixMilli(int64(lease.Score)); end.After(now) {
				fence, _ := strconv.ParseInt(details.Val()[name], 10, 64)
				l.Holders = append(l.Holders, newHolder(name, fence, end.Sub(now), now))
			}
		}
	}
	return l, nil
}
