package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/vmihailenco/msgpack/v5"
)

// manyKeysOfACall is how many keys one call asks for.
const manyKeysOfACall = 100

// BenchmarkMany measures calls for many keys: one operation is a call for 100 of them.
func BenchmarkMany(b *testing.B) {
	for _, size := range sizes[:2] {
		b.Run("100_hits/"+size.name, func(b *testing.B) { manyHits(b, size.bytes) })
	}
	b.Run("100_cold_keys/query_of_5_ms", func(b *testing.B) { manyMisses(b, 5*time.Millisecond) })
	b.Run("100_cold_keys/query_that_takes_no_time", func(b *testing.B) { manyMisses(b, 0) })
	for _, load := range []time.Duration{10 * time.Millisecond, 137 * time.Millisecond} {
		b.Run(fmt.Sprintf("stampede/%v_query", load), func(b *testing.B) { manyStampedes(b, 8, herdGoroutines, load) })
	}
	b.Run("one_process/10ms_query", func(b *testing.B) { manyStampedes(b, 1, herdGoroutines, 10*time.Millisecond) })
	b.Run("one_caller/10ms_query", func(b *testing.B) { manyStampedes(b, 1, 1, 10*time.Millisecond) })
	for _, processes := range []int{1, 3, 6} {
		b.Run(fmt.Sprintf("20000_cold_keys/%d_processes", processes), func(b *testing.B) { manyColdKeys(b, processes, 20_000) })
	}
}

// manyColdKeys measures one call for so many keys in each of several new processes. Another client gets a
// value at the same time, again and again.
func manyColdKeys(b *testing.B, processes, keys int) {
	s := redistest.Start(b)
	rdb, ctx := open(b, s.Addr), request(b)
	must(rdb.Set(ctx, "value", "v", 0).Result())
	h := &herd{name: "singlefill", role: "many, singlefill", fresh: true}
	n, worst := 0.0, []float64{} // GETs, in ms
	for round := range rounds(b) {
		n++
		over, gets := make(chan struct{}), make(chan time.Duration)
		go func() {
			var most time.Duration
			for open := true; open; {
				begun := time.Now()
				must(rdb.Get(ctx, "value").Result())
				most = max(most, time.Since(begun))
				select {
				case <-over:
					open = false
				case <-time.After(time.Millisecond):
				}
			}
			gets <- most
		}()
		h.stampede(b, s, processes, stampede{Prefix: fmt.Sprint("cold-", round), Keys: keys, Together: true, Goroutines: 1})
		close(over)
		worst = append(worst, (<-gets).Seconds()*1e3)
	}
	report(b, h.name, func(b *testing.B) {
		b.ReportMetric(h.loads/n/float64(keys), "loads/key")
		b.ReportMetric(h.unlocked/n/float64(keys), "unlocked/key")
		b.ReportMetric(h.stored/n/float64(keys), "stored/key")
		b.ReportMetric(median(h.extra), "p50-ms")
		b.ReportMetric(quantile(h.extra, 1), "max-ms")
		b.ReportMetric(quantile(worst, 1), "max-ms-of-a-GET")
	})
}

// manyOrders are reads of 100 existing keys at once.
type manyOrders struct {
	*hits
	ctx context.Context
}

func newManyOrders(b *testing.B, size int) *manyOrders {
	h := newHits(b, 0, manyKeysOfACall, size)
	return &manyOrders{h, h.contexts[0]}
}

// complete checks what a call has returned.
func complete(values map[string]order, err error) error {
	if err == nil && len(values) != manyKeysOfACall {
		return fmt.Errorf("%d of %d values, %w", len(values), manyKeysOfACall, errMiss)
	}
	return err
}

// floor is a pipeline of GETs, and a map of what they return, decoded.
func (m *manyOrders) floor(rdb redis.UniversalClient) contender {
	m.hits.floor(rdb) // stores
	return contender{"floor", func(int) error {
		gets := make([]*redis.StringCmd, len(m.keys))
		if _, err := rdb.Pipelined(m.ctx, func(p redis.Pipeliner) error {
			for i, key := range m.keys {
				gets[i] = p.Get(m.ctx, "floor:"+key)
			}
			return nil
		}); err != nil {
			return err
		}
		values := make(map[string]order, len(gets))
		for i, get := range gets {
			v, err := decoded(get.Bytes())
			if err != nil {
				return err
			}
			values[m.keys[i]] = v
		}
		return complete(values, nil)
	}}
}

// singlefill is GetOrLoadMany.
func (m *manyOrders) singlefill(name string, c *singlefill.Cache[order]) contender {
	values := make(map[string]order, len(m.keys))
	for _, key := range m.keys {
		values[key] = m.value
	}
	must(0, c.SetMany(m.ctx, values))
	load := func(context.Context, []string) (map[string]order, error) { return nil, errMiss }
	return contender{name, func(int) error { return complete(c.GetOrLoadMany(m.ctx, m.keys, load)) }}
}

// rueidis reads what floor wrote.
func (m *manyOrders) rueidis(c rueidis.Client) contender {
	return contender{"rueidis DoMulti", func(int) error {
		gets := make(rueidis.Commands, len(m.keys))
		for i, key := range m.keys {
			gets[i] = c.B().Get().Key("floor:" + key).Build()
		}
		values := make(map[string]order, len(gets))
		for i, reply := range c.DoMulti(m.ctx, gets...) {
			v, err := decoded(reply.AsBytes())
			if err != nil {
				return err
			}
			values[m.keys[i]] = v
		}
		return complete(values, nil)
	}}
}

// oneByOne makes 100 calls for one key each, as a library needs that has no call for many.
func (m *manyOrders) oneByOne(c contender) contender {
	return contender{c.name + ", one by one", func(int) error {
		for i := range m.keys {
			if err := c.op(i); err != nil {
				return err
			}
		}
		return nil
	}}
}

func manyHits(b *testing.B, size int) {
	addr := redistest.Start(b).Addr
	rdb := open(b, addr)
	m := newManyOrders(b, size)
	c := newCache[order](b, rdb)
	race{ops: 20, bases: []string{"floor"}, contenders: []contender{
		m.floor(rdb),
		m.singlefill("singlefill", c),
		m.oneByOne(m.hits.singlefill("singlefill", c)),
		m.oneByOne(m.goRedisCache(rdb)),
		m.rueidis(openRueidis(b, addr)),
	}}.run(b)
}

// manyMisses are calls for keys that do not exist, with one query for all of them.
func manyMisses(b *testing.B, takes time.Duration) {
	rdb := open(b, redistest.Start(b).Addr)
	value, ctx := orderOf(100), request(b)
	c := newMissCache(b, rdb)
	newKeys := func() []string {
		keys, call := make([]string, manyKeysOfACall), rand.Text()
		for i := range keys {
			keys[i] = fmt.Sprint(call, ":", i)
		}
		return keys
	}
	query := func(_ context.Context, keys []string) (map[string]order, error) {
		if len(keys) != manyKeysOfACall {
			return nil, fmt.Errorf("a query for %d keys", len(keys))
		}
		if takes > 0 {
			time.Sleep(takes)
		}
		values := make(map[string]order, len(keys))
		for _, key := range keys {
			values[key] = value
		}
		return values, nil
	}
	for _, s := range []*redis.Script{getOrLock, store} {
		must(s.Load(ctx, rdb).Result())
	}
	race{ops: 10, bases: []string{"by hand"}, contenders: []contender{
		{"by hand", func(int) error {
			keys := newKeys()
			if err := getNothings(ctx, rdb, keys); err != nil {
				return err
			}
			values, err := query(ctx, keys)
			if err != nil {
				return err
			}
			_, err = rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
				for _, key := range keys {
					v := values[key]
					p.Set(ctx, byHand(key), must(msgpack.Marshal(&v)), missTTL)
				}
				return nil
			})
			return errors.Join(err, complete(values, nil))
		}},
		{"by hand, with locks", func(int) error {
			keys := newKeys()
			if err := getNothings(ctx, rdb, keys); err != nil {
				return err
			}
			return complete(lockAndStoreAll(ctx, rdb, keys, query))
		}},
		{"singlefill", func(int) error { return complete(c.GetOrLoadMany(ctx, newKeys(), query)) }},
	}}.run(b)
}

func byHand(key string) string { return "by-hand:{" + key + "}" }

// getNothings is getNothing for many keys.
func getNothings(ctx context.Context, rdb *redis.Client, keys []string) error {
	gets, _ := rdb.Pipelined(ctx, func(p redis.Pipeliner) error { // each reply has its error
		for _, key := range keys {
			p.Get(ctx, byHand(key))
		}
		return nil
	})
	for _, get := range gets {
		if err := get.Err(); err != redis.Nil {
			return fmt.Errorf("a miss was a hit, or %w", err)
		}
	}
	return nil
}

// lockAndStoreAll is lockAndStore for many keys: two pipelines of scripts, and a query between them.
func lockAndStoreAll(ctx context.Context, rdb *redis.Client, keys []string,
	query singlefill.ManyLoader[order]) (map[string]order, error) {
	tokens := make([]string, len(keys))
	locks, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, key := range keys {
			tokens[i] = rand.Text()
			getOrLock.EvalSha(ctx, p, []string{byHand(key), byHand(key) + ":lock"}, tokens[i], 5000, "", "", "1", "", endless)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	values, err := query(ctx, keys)
	if err != nil {
		return nil, err
	}
	stores, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, key := range keys {
			fields, err := locks[i].(*redis.Cmd).Slice()
			if err != nil || fields[0] != "locked" {
				return fmt.Errorf("the lock was not granted: %v, %w", fields, err)
			}
			keys := []string{byHand(key), byHand(key) + ":lock"}
			store.EvalSha(ctx, p, keys, tokens[i], fields[1], entryOf(values[key]), missTTL.Milliseconds())
		}
		return nil
	})
	for _, stored := range stores {
		if n, _ := stored.(*redis.Cmd).Int(); n != 1 && err == nil {
			err = errors.New("the store was refused")
		}
	}
	return values, err
}
