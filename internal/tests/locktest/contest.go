package locktest

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// A Contest checks that a semaphore never has more holders than its size, in two ways: it asks the
// server in one step, and it notes from when till when each lease was held, by the server's clock.
type Contest struct {
	T    testing.TB
	Rdb  redis.UniversalClient
	Name string
	Size int

	mu     sync.Mutex
	spells [][2]int64 // protected by mu: µs
	fences []int64    // protected by mu
}

// Run takes, holds and releases the semaphore in n goroutines, each for so many rounds.
func (c *Contest) Run(n, rounds int, l func(who int) *lock.Locker) {
	var wg sync.WaitGroup
	for who := range n {
		wg.Go(func() {
			for range rounds {
				lease, err := l(who).Acquire(c.T.Context())
				if err != nil {
					c.T.Error(err)
					return
				}
				from := c.look()
				till := c.look()
				if err := lease.Release(c.T.Context()); err != nil {
					c.T.Error(err)
				}
				c.mu.Lock()
				c.fences = append(c.fences, lease.Fence())
				c.spells = append(c.spells, [2]int64{from, till})
				c.mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(c.spells) != n*rounds {
		c.T.Errorf("held %d times, want %d", len(c.spells), n*rounds)
	}
	if most := overlap(c.spells); most > c.Size {
		c.T.Errorf("%d held it at once, of %d", most, c.Size)
	}
	slices.Sort(c.fences)
	if same := len(c.fences) - len(slices.Compact(c.fences)); same != 0 {
		c.T.Errorf("%d leases had the fence of another", same)
	}
	redistest.Await(c.T, "nothing is left", func() bool {
		n, err := c.Rdb.Eval(context.Background(), `return redis.call('EXISTS', KEYS[1]) + redis.call('EXISTS', KEYS[2])`,
			[]string{Key(c.Name), Key(c.Name) + ":details"}).Int()
		return n == 0 && err == nil
	})
}

// look counts the holders, and returns the server's time in µs.
func (c *Contest) look() int64 {
	r, err := c.Rdb.Eval(context.Background(), `
		local t = redis.call('TIME')
		local ms = string.format('(%.0f', math.floor(tonumber(t[1]) * 1000 + tonumber(t[2]) / 1000))
		return {tonumber(t[1]), tonumber(t[2]), redis.call('ZCOUNT', KEYS[1], ms, '+inf')}`, []string{Key(c.Name)}).Int64Slice()
	if err != nil {
		c.T.Error(err)
		return 0
	}
	if r[2] > int64(c.Size) {
		c.T.Errorf("%d hold it, of %d", r[2], c.Size)
	}
	return r[0]*1_000_000 + r[1]
}

// overlap returns how many of the spells overlap at most. Those that touch do not: a spell that
// ends within a µs may have ended before.
func overlap(spells [][2]int64) (most int) {
	type edge struct {
		at int64
		by int
	}
	var edges []edge
	for _, s := range spells {
		edges = append(edges, edge{s[0], 1}, edge{s[1], -1})
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.by, b.by)) })
	n := 0
	for _, e := range edges {
		n += e.by
		most = max(most, n)
	}
	return most
}
