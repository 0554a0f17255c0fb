package cache_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// The tests TestNear_… keep values in the memory of two processes, change the source, and call
// Delete in one of them. What they assert is the promise of Options.Near: no call of this process
// that begins after the Delete gets an older value, and no call of the other process that begins
// more than MaxLag after it.

// nearLag is the MaxLag of these tests.
const nearLag = 200 * time.Millisecond

// A nearCache is a cache with Near. The value of each key is the version of the source, "1" at
// first.
type nearCache struct {
	*cachetest.Cache
	t       testing.TB
	version *atomic.Int64 // of the source, which caches share
}

// newNear returns two caches of one source in one namespace.
func newNear(t testing.TB, maxLag time.Duration, a, b redis.UniversalClient, redisTimeout time.Duration) (x, y *nearCache) {
	t.Helper()
	first, second := newPair(t, a, b, redisTimeout, func(o *singlefill.Options[string]) { o.Near = &singlefill.Near{MaxLag: maxLag} })
	version := new(atomic.Int64)
	version.Store(1)
	return &nearCache{first, t, version}, &nearCache{second, t, version}
}

// startNear is start with two caches. The proxy is between it and b.
func startNear(t *testing.T) (s *redistest.Server, p *redistest.Proxy, a, b *nearCache) {
	t.Helper()
	s, p = start(t)
	a, b = newNear(t, nearLag, s.Client(t), p.Client(t), cachetest.Patient)
	return s, p, a, b
}

// logKey returns the Redis key of the log.
func (c *nearCache) logKey() string { return c.Namespace + ":log" }

// refusals returns how many commands for the log have failed.
func (c *nearCache) refusals() int { return len(c.Log.Errors()["near"]) }

// get calls GetOrLoad, and returns the version that it gets.
func (c *nearCache) get(key string) (version int64) {
	c.t.Helper()
	v, err := c.GetOrLoad(context.Background(), key, func(context.Context, string) (string, error) {
		return strconv.FormatInt(c.version.Load(), 10), nil
	})
	if err == nil {
		version, err = strconv.ParseInt(v, 10, 64)
	}
	redistest.Must(c.t, err)
	return version
}

// isHit reports whether a call is served from memory.
func (c *nearCache) isHit(key string) bool {
	c.t.Helper()
	before := c.Stats().NearHits
	c.get(key)
	return c.Stats().NearHits > before
}

// awaitHits waits until keys are served from memory.
func (c *nearCache) awaitHits(keys ...string) {
	c.t.Helper()
	for _, key := range keys {
		redistest.Await(c.t, "a hit in memory", func() bool { return c.isHit(key) })
	}
}

// bothHit waits until both processes serve keys from memory.
func bothHit(a, b *nearCache, keys ...string) {
	a.t.Helper()
	a.awaitHits(keys...)
	b.awaitHits(keys...)
}

// wantUnproven waits until nothing can be served from memory. Only a fault makes that last: then a call
// for key is no hit.
func (c *nearCache) wantUnproven(key string) {
	c.t.Helper()
	redistest.Await(c.t, "memory is not proven to be current", func() bool {
		age := c.Stats().NearAge
		return age < 0 || age >= nearLag
	})
	if c.isHit(key) {
		c.t.Error("a hit in memory without a proof")
	}
}

// A change is a new version of the source, and when the Delete after it returned.
type change struct {
	version int64
	at      time.Time
}

// change changes the source, and deletes keys.
func (c *nearCache) change(keys ...string) (d change) {
	c.t.Helper()
	d.version = c.version.Add(1)
	err := c.Delete(context.Background(), keys...)
	d.at = time.Now()
	if err != nil {
		c.t.Fatalf("Delete: %v", err)
	}
	for _, key := range keys {
		if got := c.get(key); got < d.version {
			c.t.Errorf("the process that called Delete got version %d of %s after it, want %d", got, key, d.version)
		}
	}
	return d
}

// wantNew calls until a call has begun more than MaxLag after a Delete returned, and a little
// longer. It fails the test if a call that began so late gets an older version.
func (c *nearCache) wantNew(d change, keys ...string) {
	c.t.Helper()
	for _, key := range keys {
		redistest.Await(c.t, "MaxLag has passed", func() bool {
			begun := time.Now()
			got := c.get(key)
			late := begun.Sub(d.at)
			if late > nearLag && got < d.version {
				c.t.Fatalf("a call that began %v after Delete returned got version %d of %s, want %d", late, got, key, d.version)
			}
			return late > nearLag+nearLag/4
		})
	}
}

// wantWorking fails the test unless both processes serve keys from memory again, and the promise
// holds.
func wantWorking(a, b *nearCache, keys ...string) {
	a.t.Helper()
	bothHit(a, b, keys...)
	b.wantNew(a.change(keys...), keys...)
	b.awaitHits(keys...)
}

// readsLog matches the commands that read the log from the last known record on.
func readsLog(c *nearCache) func(cmd []string) bool {
	return func(cmd []string) bool { return strings.EqualFold(cmd[0], "xrange") && cmd[1] == c.logKey() }
}

// A process that Redis does not answer asks its source instead of its memory after MaxLag. It comes
// back by itself.
//
//fault:near-unreachable
func TestNear_NoAnswer(t *testing.T) {
	for _, name := range []string{"refused", "black hole", "replies lost"} {
		t.Run(name, func(t *testing.T) {
			s, p := start(t)
			a, b := newNear(t, nearLag, s.Client(t), p.Client(t), cachetest.Impatient)
			bothHit(a, b, "k")
			end := outages[name](s, p)
			b.wantNew(a.change("k"), "k")
			b.wantUnproven("k")
			end()
			wantWorking(a, b, "k")
		})
	}
}

// A log that has lost records is noticed, whatever has been written since.
//
//fault:near-lost-log
func TestNear_LostLog(t *testing.T) {
	for name, lose := range map[string]func(t *testing.T, s *redistest.Server, a *nearCache){
		"deleted, and begun again with the same IDs": func(t *testing.T, s *redistest.Server, a *nearCache) {
			records, err := s.Admin().XRange(t.Context(), a.logKey(), "-", "+").Result()
			redistest.Must(t, err)
			_, err = s.Admin().TxPipelined(t.Context(), func(p redis.Pipeliner) error { // as a process may
				p.Del(t.Context(), a.logKey())
				for _, r := range records[:len(records)-1] {
					p.XAdd(t.Context(), &redis.XAddArgs{Stream: a.logKey(), ID: r.ID, Values: []string{"name", ""}})
				}
				p.PExpire(t.Context(), a.logKey(), time.Minute)
				return nil
			})
			redistest.Must(t, err)
		},
		"trimmed, and written": func(t *testing.T, s *redistest.Server, a *nearCache) {
			redistest.Do(t, s.Admin(), "xtrim", a.logKey(), "maxlen", 0)
			a.change("other")
		},
		"flushed by a restart": func(_ *testing.T, s *redistest.Server, _ *nearCache) { s.Restart() },
	} {
		t.Run(name, func(t *testing.T) {
			s, p, a, b := startNear(t)
			var drops atomic.Int64
			b.AddTrace(&singlefill.Trace{NearDropped: func() { drops.Add(1) }})
			bothHit(a, b, "k", "other")
			rule := p.On(readsLog(b), redistest.HoldRequest)
			redistest.Await(t, "a read of the log is held", func() bool { b.get("k"); return rule.Fired() > 0 })
			deleted := a.change("k")
			lose(t, s, a)
			if b.Stats().NearDrops != 0 || drops.Load() != 0 {
				t.Error("the first read of the log counts as a drop")
			}
			rule.Release()
			b.wantNew(deleted, "k")
			redistest.Await(t, "memory is dropped", func() bool {
				b.get("k")
				return b.Stats().NearDrops > 0 && drops.Load() > 0
			})
			wantWorking(a, b, "k", "other")
		})
	}
}

// A failover may lose the last records. A process that has read one of them empties its memory.
//
//fault:near-failover
func TestNear_Failover(t *testing.T) {
	for name, test := range map[string]struct {
		loses bool                                                            // the replica lacks the last record
		then  func(t *testing.T, replica *redistest.Server, log, last string) // after the failover
		drops bool
	}{
		"all records":          {},
		"without the last one": {loses: true, drops: true},
		"another record has its ID": {loses: true, drops: true, then: func(t *testing.T, replica *redistest.Server, log, last string) {
			redistest.Do(t, replica.Admin(), "xadd", log, last, "name", "")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			master := redistest.Start(t)
			replica := redistest.StartReplica(t, master)
			p := redistest.NewProxy(t, master.Addr)
			a, b := newNear(t, nearLag, p.Client(t), p.Client(t), cachetest.Patient)
			bothHit(a, b, "k")
			redistest.Await(t, "the replica has the value and the log", func() bool {
				n, err := replica.Admin().Exists(t.Context(), a.ValueKey("k"), a.logKey()).Result()
				return err == nil && n == 2
			})
			if test.loses {
				redistest.LoseMaster(t, replica) // it is cut off
			}
			b.wantNew(a.change("k"), "k")
			newest, err := master.Admin().XRevRangeN(t.Context(), a.logKey(), "+", "-", 1).Result()
			if err != nil || len(newest) != 1 {
				t.Fatalf("the newest record is %v, %v", newest, err)
			}
			has := func() bool {
				records, err := replica.Admin().XRange(t.Context(), a.logKey(), newest[0].ID, newest[0].ID).Result()
				redistest.Must(t, err)
				return len(records) == 1
			}
			if !test.loses {
				redistest.Await(t, "the replica has the last record", has)
			} else if has() {
				t.Fatal("the replica has the last record")
			}
			drops := b.Stats().NearDrops
			master.Kill()
			redistest.Do(t, replica.Admin(), "replicaof", "no", "one")
			if test.then != nil {
				test.then(t, replica, a.logKey(), newest[0].ID)
			}
			p.Redirect(replica.Addr)
			p.Cut()
			wantWorking(a, b, "k")
			if dropped := b.Stats().NearDrops > drops; dropped != test.drops {
				t.Errorf("memory was dropped: %t, want %t", dropped, test.drops)
			}
		})
	}
}

// A master that has become a replica proves nothing: its log may lag.
//
//fault:near-failover
func TestNear_Demoted(t *testing.T) {
	s, _, a, b := startNear(t)
	wantWorking(a, b, "k")
	promote := redistest.LoseMaster(t, s)
	b.wantUnproven("k")
	if redistest.ErrorsSaid(t, "READONLY", s) == 0 {
		t.Error("the server has not refused a command")
	}
	promote()
	wantWorking(a, b, "k")
}

// A server without memory refuses to append to the log. Then Delete removes the log, for which
// there is always memory.
//
//fault:near-refused
func TestNear_OutOfMemory(t *testing.T) {
	s, _, a, b := startNear(t)
	bothHit(a, b, "k")
	before := redistest.ErrorsSaid(t, "OOM", s)
	redistest.Do(t, s.Admin(), "config", "set", "maxmemory", 1)
	deleted := a.change("k")
	if redistest.ErrorsSaid(t, "OOM", s) == before {
		t.Error("the server has not refused a command")
	}
	if redistest.Exists(t, s.Admin(), a.logKey()) {
		t.Error("the log is still there")
	}
	b.wantNew(deleted, "k")
	if err := a.Set(t.Context(), "k", "v"); err == nil {
		t.Error("Set = nil without memory")
	}
	redistest.Do(t, s.Admin(), "config", "set", "maxmemory", 0)
	wantWorking(a, b, "k")
}

// A server that refuses the DEL as well has not deleted anything, though it may be writable again a moment later.
// Delete says so.
//
//fault:near-refused
func TestNear_RefusedDelete(t *testing.T) {
	s, _, a, b := startNear(t)
	bothHit(a, b, "k")
	mend := redistest.FailSaves(t, s)
	if err := a.Delete(t.Context(), "k"); !redis.HasErrorPrefix(err, "MISCONF") {
		t.Errorf("Delete = %v, want the refusal", err)
	}
	mend()
	wantWorking(a, b, "k")
}

// A Delete whose caller leaves in the middle of its command shares nothing with the command, which
// goes on: see the race detector.
//
//fault:near-cancelled
func TestNear_DeleteIsCancelled(t *testing.T) {
	s, _, a, b := startNear(t)
	bothHit(a, b, "k")
	before := s.Calls("del")
	for range 50 {
		ctx, cancel := context.WithCancel(t.Context())
		if err := a.Delete(redistest.OnDone(ctx, cancel), "k"); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("Delete = %v", err)
		}
	}
	redistest.Await(t, "commands of callers that have left are executed", func() bool { return s.Calls("del") > before })
	wantWorking(a, b, "k")
}

// A DeleteIf whose reply is lost is sent again, and answered that there is no such entry. Other processes
// learn of it all the same.
//
//fault:lost-reply
func TestNear_DeleteIfLostReply(t *testing.T) {
	_, p, a, b := startNear(t)
	bothHit(a, b, "k")
	_, info, err := b.GetOrLoadInfo(t.Context(), "k", cachetest.MustNotLoad[string](t))
	redistest.Must(t, err)
	b.version.Add(1)
	lost := p.On(cachetest.Script(t, "delete_if"), redistest.DropReply).Times(1)
	if deleted, err := b.DeleteIf(t.Context(), "k", info); deleted || err != nil || lost.Fired() != 1 {
		t.Errorf("DeleteIf = %t, %v, and %d replies were lost", deleted, err, lost.Fired())
	}
	redistest.Await(t, "the other process has forgotten the value", func() bool { return a.get("k") == 2 })
	wantWorking(a, b, "k")
}

// Another program stores something else under the key of the log. Nothing is served from memory
// then, until a Delete removes it.
//
//fault:near-foreign-log
func TestNear_ForeignLog(t *testing.T) {
	s, _, a, b := startNear(t)
	redistest.Do(t, s.Admin(), "set", a.logKey(), "something else", "px", 3_600_000)
	redistest.Await(t, "the log cannot be read", func() bool { b.get("k"); return b.refusals() > 2 })
	if n := b.Stats().NearHits; n != 0 {
		t.Errorf("%d hits in memory without a log", n)
	}
	b.wantNew(a.change("k"), "k")
	wantWorking(a, b, "k")

	deleted := a.change("k")
	redistest.Do(t, s.Admin(), "set", a.logKey(), "something else", "px", 3_600_000)
	b.wantNew(deleted, "k")
	b.wantUnproven("k")
	if redistest.ErrorsSaid(t, "WRONGTYPE", s) == 0 {
		t.Error("the server has not refused a command")
	}
	redistest.Do(t, s.Admin(), "del", a.logKey())
	wantWorking(a, b, "k")
}

// Records that make no sense are as good as a loss of records.
//
//fault:near-foreign-log
func TestNear_ForeignRecord(t *testing.T) {
	s, _, a, b := startNear(t)
	bothHit(a, b, "k")
	for _, record := range [][]any{{"name", "too short"}, {"x", "1", "y", "2"}, {"", ""}, {"name", strings.Repeat("x", 1<<20)}} {
		redistest.Do(t, s.Admin(), append([]any{"xadd", a.logKey(), "*"}, record...)...)
		b.wantNew(a.change("k"), "k")
	}
	if b.Stats().NearDrops == 0 {
		t.Error("no record was noticed")
	}
	wantWorking(a, b, "k")
}

// A user without a right gets values, and the promise holds. Without the commands of the log nothing
// is served from memory for longer than MaxLag.
//
//fault:near-missing-right
func TestNear_MissingRight(t *testing.T) {
	for rule, serves := range map[string]bool{
		"-xadd":         false,
		"-xrange":       false,
		"-xrevrange":    false,
		"-pexpire":      false,
		"resetchannels": true,
		"-@pubsub":      true,
		"-@scripting":   true,
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			asUser := s.User(t, append([]string{"~*", "&*", "+@all"}, rule)...)
			a, b := newNear(t, nearLag, s.Client(t, asUser), s.Client(t, asUser), cachetest.Patient)
			if serves {
				for range 2 {
					wantWorking(a, b, "k")
				}
				if n := a.Stats().RedisErrors + b.Stats().RedisErrors; n != 0 {
					t.Errorf("%d errors of Redis", n)
				}
				return
			}
			for range 2 {
				b.wantNew(a.change("k"), "k")
			}
			redistest.Await(t, "commands for the log are refused", func() bool { b.get("k"); return b.refusals() > 2 })
			b.wantUnproven("k")
			if n, err := s.Admin().PTTL(t.Context(), a.logKey()).Result(); err != nil || n == -1 {
				t.Errorf("the log has no TTL: %v, %v", n, err)
			}
		})
	}
}

// When the log moves to another node, or its node is replaced, processes listen there: with a MaxLag of
// an hour nothing but a message tells them of a Delete.
//
//fault:near-lost-hints
//fault:moved-slot
func TestNear_ListensWhereTheLogIs(t *testing.T) {
	for name, move := range map[string]func(t *testing.T, cluster *redistest.Cluster, log string){
		"its slot moves": func(t *testing.T, cluster *redistest.Cluster, log string) { cluster.Move(t, log).End() },
		"its node dies":  func(t *testing.T, cluster *redistest.Cluster, log string) { cluster.Owner(t, log).Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := redistest.StartReplicatedCluster(t)
			often := func(o *redis.ClusterOptions) { o.ClusterStateReloadInterval, o.DialerRetries = 500*time.Millisecond, 1 }
			a, b := newNear(t, time.Hour, cluster.Client(t, often), cluster.Client(t, often), cachetest.Patient)
			key := "k"
			for i := 0; cluster.Owner(t, a.ValueKey(key)) == cluster.Owner(t, a.logKey()); i++ {
				key = fmt.Sprint("k", i) // its node lives
			}
			hear := func() {
				b.awaitHits(key)
				version := a.version.Add(1)
				redistest.Await(t, "the other process hears of a Delete", func() bool {
					_ = a.Delete(t.Context(), key) // it fails until the log has a master again
					return b.get(key) >= version
				})
			}
			hear()
			move(t, cluster, a.logKey())
			hear()
		})
	}
}

// Delete of many keys on all nodes of a Cluster is noticed in other processes, also while the slot
// of the log moves to another node.
//
//fault:near-cluster
func TestNear_Cluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	a, b := newNear(t, nearLag, cluster.Client(t), cluster.Client(t), cachetest.Patient)
	keys, nodes := keysOf("k", 30), make(map[*redistest.Server]bool)
	for _, key := range keys {
		nodes[cluster.Owner(t, a.ValueKey(key))] = true
	}
	if len(nodes) != len(cluster.Nodes) {
		t.Fatalf("the keys are on %d nodes", len(nodes))
	}
	wantWorking(a, b, keys...)

	before := redistest.ErrorsSaid(t, "ASK", cluster.Nodes...)
	move := cluster.Move(t, a.logKey())
	wantWorking(a, b, keys[:3]...)
	deleted := a.change(keys[:3]...)
	move.Take(a.logKey())
	b.wantNew(deleted, keys[:3]...)
	wantWorking(a, b, keys[:3]...)
	if redistest.ErrorsSaid(t, "ASK", cluster.Nodes...) == before {
		t.Error("no command was redirected")
	}
	deleted = a.change(keys[:3]...)
	move.End()
	b.wantNew(deleted, keys[:3]...)
	wantWorking(a, b, keys...)
}

// While the node of the log does not answer, Delete of a key on another node returns an error, and
// the values on other nodes are read from Redis.
//
//fault:near-cluster
func TestNear_FrozenLogNode(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	a, b := newNear(t, nearLag, cluster.Client(t), cluster.Client(t), cachetest.Impatient)
	node, key := cluster.Owner(t, a.logKey()), ""
	for i := 0; key == ""; i++ {
		if k := fmt.Sprint("k", i); cluster.Owner(t, a.ValueKey(k)) != node {
			key = k
		}
	}
	wantWorking(a, b, key)
	node.Freeze()
	defer node.Thaw()
	b.wantUnproven(key)
	if err := a.Delete(t.Context(), key); err == nil {
		t.Error("Delete = nil, though other processes cannot be told")
	}
	node.Thaw()
	wantWorking(a, b, key)
}
