package tags

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// keysOf returns the keys in which a namespace has its tags, with an end.
func keysOf(t *testing.T, look redis.UniversalClient, ns, end string) (keys []string) {
	t.Helper()
	scan := func(ctx context.Context, node redis.Cmdable) error {
		found := node.Scan(ctx, 0, ns+":tags:*"+end, 1000).Iterator()
		for found.Next(ctx) {
			keys = append(keys, found.Val())
		}
		return found.Err()
	}
	if cluster, ok := look.(*redis.ClusterClient); ok {
		var mu sync.Mutex
		redistest.Must(t, cluster.ForEachMaster(t.Context(), func(ctx context.Context, node *redis.Client) error {
			mu.Lock()
			defer mu.Unlock()
			return scan(ctx, node)
		}))
	} else {
		redistest.Must(t, scan(t.Context(), look))
	}
	slices.Sort(keys)
	return keys
}

// lose removes keys of the tags, as an eviction does.
func lose(end string) func(t *testing.T, look redis.UniversalClient, ns string) {
	return func(t *testing.T, look redis.UniversalClient, ns string) {
		t.Helper()
		lost := keysOf(t, look, ns, end)
		if len(lost) == 0 {
			t.Fatalf("there is no key *%s", end)
		}
		for _, key := range lost {
			redistest.Must(t, look.Del(t.Context(), key).Err())
		}
	}
}

// Whatever is lost of what the tags are kept in, DeleteTag leaves no value with its tag, and deletes no other.
//
//fault:tags-lost
func TestDeleteTag_Loss(t *testing.T) {
	t.Parallel()
	for name, loss := range map[string]func(t *testing.T, look redis.UniversalClient, ns string){
		"books":      lose(":book"),
		"indexes":    lose(":index"),
		"everything": lose(""),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
				redistest.SkipLocal(t, "it loses nothing")
				c, ns := newCache(t, rdb)
				ctx := t.Context()
				all := []string{"k1", "k2", "k3", "other"}
				for _, again := range []string{"nothing", "another key with the tag", "a key with another tag"} {
					redistest.Must(t, c.SetMany(ctx, map[string]string{"k1": "a", "other": "e"}))
					loss(t, look, ns)
					switch again {
					case "another key with the tag":
						cachetest.GoGet(ctx, c, "k2", cachetest.Gives("a")).Want(t, "a")
						redistest.Must(t, c.Set(ctx, "k3", "a"))
					case "a key with another tag":
						redistest.Must(t, c.SetMany(ctx, map[string]string{"k2": "ab", "k3": "ca"}))
					}
					before := c.Stats().TagRebuilds
					redistest.Must(t, c.DeleteTag(ctx, "a"))
					wantKeys(t, look, ns, again+" is stored after the loss", all, []string{"other"})
					if n := c.Stats().TagRebuilds - before; n != 1 {
						t.Errorf("%s is stored after the loss: all values were read %d times, want once", again, n)
					}
					// From then on the indexes are complete.
					redistest.Must(t, c.SetMany(ctx, map[string]string{"k1": "a", again: "d"}))
					redistest.Must(t, c.DeleteTag(ctx, "a", "unused"))
					wantKeys(t, look, ns, "after that", []string{"k1", again}, []string{again})
					if n := c.Stats().TagRebuilds - before; n != 1 {
						t.Errorf("all values were read again")
					}
				}
			})
		})
	}
}

// A load in flight is not stored if the marks that would have refused it were lost.
//
//fault:tags-lost
func TestDeleteTag_LossDuringLoad(t *testing.T) {
	t.Parallel()
	for _, lost := range []string{":book", ":index", ""} {
		for _, later := range []string{"nothing", "a load", "a Set"} {
			t.Run(fmt.Sprint("lost *", lost, ", then ", later), func(t *testing.T) {
				t.Parallel()
				cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
					redistest.SkipLocal(t, "it loses nothing")
					c, ns := newCache(t, rdb)
					ctx := t.Context()
					redistest.Must(t, c.Set(ctx, "k", "x")) // so that there is an index
					src := cachetest.NewSource[string](t)
					before, load := src.Begin(ctx, t, c, "cold")
					redistest.Must(t, c.DeleteTag(ctx, "x"))
					lose(lost)(t, look, ns)
					switch later {
					case "a load":
						cachetest.GoGet(ctx, c, "other", cachetest.Gives("xy")).Want(t, "xy")
					case "a Set":
						redistest.Must(t, c.Set(ctx, "other", "xy"))
					}
					load.Give("x")
					before.Want(t, "x")
					cachetest.WantStored(t, look, ns, "cold", "")
				})
			})
		}
	}
}

// The first DeleteTag of a namespace finds out the tags of what was stored before there were tags. It is enough
// for many calls at once.
func TestDeleteTag_First(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		redistest.SkipLocal(t, "it loses nothing")
		ns := redistest.Namespace(t)
		ctx := t.Context()
		redistest.Must(t, cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw).Set(ctx, "old", "a"))
		opts := tagged // with time for a hundred calls at once, on a busy machine
		opts.RedisTimeout, opts.LockTTL, opts.LoadTimeout = 20*time.Second, 70*time.Second, 2*time.Minute
		c := cachetest.NewCacheIn(t, rdb, ns, &opts)
		done := make(chan error)
		const calls = 100
		for i := range calls {
			go func() { done <- c.DeleteTag(ctx, fmt.Sprint("tag", i)) }()
		}
		for range calls {
			redistest.Must(t, <-done)
		}
		wantKeys(t, look, ns, "the first DeleteTag", []string{"old"}, []string{"old"})
		if n := c.Stats().TagRebuilds; n != 1 {
			t.Errorf("%d calls read all values %d times, want once", calls, n)
		}
		if n := len(keysOf(t, look, ns, ":index")); n != 1 {
			t.Errorf("there are %d indexes, want that of a", n)
		}
		redistest.Must(t, c.DeleteTag(ctx, "a"))
		wantKeys(t, look, ns, "its tag is deleted", []string{"old"}, nil)
	})
}

// A master that takes over the slot of an index may lack its newest members, whose values are on other
// masters.
//
//fault:tags-lost
func TestDeleteTag_MasterReplaced(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartReplicatedCluster(t)
	rdb := cluster.Client(t)
	ns := redistest.Namespace(t)
	c := cachetest.NewCacheIn(t, rdb, ns, &tagged)
	ctx := t.Context()
	redistest.Must(t, c.Clear(ctx))
	redistest.Must(t, c.SetMany(ctx, map[string]string{"k1": "a", "k2": "a"}))
	var index string
	for _, node := range cluster.Nodes {
		for _, key := range node.Admin().Keys(ctx, ns+":tags:*:index").Val() {
			index = key
		}
	}
	master := cluster.Owner(t, index)
	replica := cluster.Replicas[slices.Index(cluster.Nodes, master)]
	redistest.Must(t, replica.Admin().ClusterFailover(ctx).Err())
	redistest.Await(t, "the replica has taken over, and all nodes and the client know it", func() bool {
		id := replica.Admin().ClusterMyID(ctx).Val()
		for _, node := range slices.Concat(cluster.Nodes, cluster.Replicas) {
			leads := func(line string) bool { return strings.HasPrefix(line, id) && strings.Contains(line, "master -") }
			if !slices.ContainsFunc(strings.Split(node.Admin().ClusterNodes(ctx).Val(), "\n"), leads) {
				return false
			}
		}
		return strings.Contains(replica.Admin().Info(ctx, "replication").Val(), "role:master") &&
			rdb.ZRem(ctx, index, "k1").Val() == 1 // as if this member had not arrived
	})
	redistest.Must(t, c.DeleteTag(ctx, "a"))
	wantKeys(t, rdb, ns, "after the failover", []string{"k1", "k2"}, nil)
	redistest.Must(t, c.SetMany(ctx, map[string]string{"k1": "a", "other": "b"}))
	redistest.Must(t, c.DeleteTag(ctx, "a"))
	wantKeys(t, rdb, ns, "after that", []string{"k1", "other"}, []string{"other"})
}

// A server that takes over without the last invalidations must not take a load that knows of them for one
// that knows of the next.
//
//fault:tags-lost
func TestDeleteTag_RolledBack(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		c, ns := newCache(t, rdb)
		ctx := t.Context()
		before := make(map[string]map[string]string)
		for _, book := range keysOf(t, look, ns, ":book") {
			before[book] = look.HGetAll(ctx, book).Val()
		}
		redistest.Must(t, c.DeleteTag(ctx, "x"))
		src := cachetest.NewSource[string](t)
		call, load := src.Begin(ctx, t, c, "cold")
		for book, fields := range before {
			redistest.Must(t, look.Del(ctx, book).Err())
			redistest.Must(t, look.HSet(ctx, book, fields).Err())
			redistest.Must(t, look.PExpire(ctx, book, time.Hour).Err())
		}
		redistest.Must(t, c.DeleteTag(ctx, "x"))
		load.Give("x")
		call.Want(t, "x")
		cachetest.WantStored(t, look, ns, "cold", "")
	})
}

// A server that takes over while DeleteTag runs, and lacks the mark, would let a load from before store its value:
// DeleteTag begins again.
//
//fault:tags-lost
func TestDeleteTag_MarkLost(t *testing.T) {
	t.Parallel()
	s, ctx := redistest.Start(t, "--appendonly", "yes", "--appendfsync", "always"), t.Context()
	rdb := s.Client(t)
	c, other := cachetest.NewCacheIn(t, rdb, "ns", &tagged), cachetest.NewCacheIn(t, s.Client(t), "ns", &tagged)
	redistest.Must(t, c.Clear(ctx))
	redistest.Must(t, c.Set(ctx, "k", "a"))
	redistest.Must(t, c.DeleteTag(ctx, "a")) // the server knows the script
	src := cachetest.NewSource[string](t)
	call, load := src.Begin(ctx, t, other, "cold")
	book := strings.TrimSuffix(keysOf(t, s.Admin(), "ns", ":a:index")[0], "a:index") + "book"
	before := s.Admin().HGetAll(ctx, book).Val()
	var commands, replaced atomic.Int64 // from the mark on
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		if args := cmds[0].Args(); len(args) > 3 && args[3] == book || commands.Load() > 0 {
			if commands.Add(1) == 2 {
				s.Restart()
				redistest.Must(t, s.Admin().Del(ctx, book).Err())
				redistest.Must(t, s.Admin().HSet(ctx, book, before).Err())
				redistest.Must(t, s.Admin().PExpire(ctx, book, time.Hour).Err())
				replaced.Add(1)
			}
		}
		return nil
	}))
	redistest.Must(t, c.DeleteTag(ctx, "a"))
	if replaced.Load() != 1 || c.Stats().TagRebuilds != 0 {
		t.Errorf("the server was replaced %d times, %+v", replaced.Load(), c.Stats())
	}
	load.Give("a")
	call.Want(t, "a")
	cachetest.WantStored(t, s.Admin(), "ns", "cold", "")
}

// A DeleteTag in another process may have removed the values that an index has lost. They may still be in the
// memory of this process: its own DeleteTag forgets them, although it finds none of them in Redis.
//
//fault:tags-lost
func TestDeleteTag_LossWithNear(t *testing.T) {
	for name, loss := range map[string]func(t *testing.T, look redis.UniversalClient, ns string){
		"books":   lose(":book"),
		"indexes": lose(":index"),
		"everything": func(t *testing.T, look redis.UniversalClient, _ string) {
			redistest.Must(t, look.FlushAll(t.Context()).Err())
		},
	} {
		for _, before := range []bool{false, true} { // it has called DeleteTag before
			cachetest.RunInBubble(t, fmt.Sprintf("%s, seen before %t", name, before), func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				redistest.Mute(m)
				ns, ctx := redistest.Namespace(t), t.Context()
				opts := tagged
				opts.Near = &singlefill.Near{MaxLag: time.Hour}
				here, there := cachetest.NewCacheIn(t, rdb, ns, &opts), cachetest.NewCaches(t, m, ns, 1, &opts)[0]
				redistest.Must(t, there.Clear(ctx)) // the indexes are complete
				if before {
					redistest.Must(t, here.DeleteTag(ctx, "a"))
				}
				cachetest.Ask(ctx, here, "k", cachetest.Gives("a"))
				for range 2 { // the first read of the log may find the Clear, and forget
					synctest.Wait()
					cachetest.Ask(ctx, here, "k", cachetest.MustNotLoad[string](t))
				}
				if here.Stats().NearHits == 0 {
					t.Fatal("memory does not serve")
				}
				loss(t, rdb, ns)
				redistest.Must(t, there.DeleteTag(ctx, "a"))
				redistest.Must(t, here.DeleteTag(ctx, "a"))
				cachetest.GoGet(ctx, here, "k", cachetest.Gives("ab")).Want(t, "ab")
				for _, seen := range []bool{false, true} {
					redistest.Must(t, here.DeleteTag(ctx, "c"))
					hits := here.Stats().NearHits
					cachetest.Ask(ctx, here, "k", cachetest.MustNotLoad[string](t))
					if n := here.Stats().NearHits - hits; seen && n != 1 {
						t.Error("a DeleteTag forgets everything again")
					}
				}
			})
		}
	}
}

// A server that is restarted while it is scanned, and has all of its data, goes on in another order: DeleteTag reads
// the indexes again, and Clear returns an error.
//
//fault:scan-restart
func TestScan_Restart(t *testing.T) {
	for command, call := range map[string]func(c *singlefill.Cache[string], ctx context.Context) error{
		"zscan": func(c *singlefill.Cache[string], ctx context.Context) error { return c.DeleteTag(ctx, "a") },
		"scan":  (*singlefill.Cache[string]).Clear,
	} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			s, ctx := redistest.Start(t, "--appendonly", "yes", "--appendfsync", "always"), t.Context()
			rdb := s.Client(t)
			opts := tagged
			opts.RedisTimeout, opts.LockTTL = 5*time.Second, 20*time.Second
			c := cachetest.NewCacheIn(t, rdb, "ns", &opts)
			redistest.Must(t, c.Clear(ctx))
			values := make(map[string]string)
			for i := range 5000 {
				values[fmt.Sprint("k", i)] = "a"
			}
			redistest.Must(t, c.SetMany(ctx, values))
			var steps, restarts atomic.Int64
			rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
				if !slices.ContainsFunc(cmds, func(cmd redis.Cmder) bool { return cmd.Name() == command }) {
					return nil
				}
				if n := steps.Add(1); n == 5 || n == 17 { // in the midst of each pass of Clear
					s.Restart()
					restarts.Add(1)
				}
				return nil
			}))
			err := call(c, ctx)
			if restarts.Load() == 0 {
				t.Fatalf("no restart in %d steps", steps.Load())
			}
			left := 0
			for key := range values {
				n, err := s.Admin().Exists(ctx, "ns:{"+key+"}").Result()
				redistest.Must(t, err)
				left += int(n)
			}
			if err == nil && left > 0 || err != nil && !strings.Contains(err.Error(), "restarted") {
				t.Errorf("%v, and %d of %d values are left", err, left, len(values))
			}
		})
	}
}

// DeleteTag of a program with a higher Version deletes the values of older ones, also if it has to read all values.
func TestDeleteTag_LowerVersion(t *testing.T) {
	t.Parallel()
	for name, loss := range map[string]func(t *testing.T, look redis.UniversalClient, ns string){
		"nothing": func(*testing.T, redis.UniversalClient, string) {}, "indexes": lose(":index"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
				before, ns := newCache(t, rdb)
				next := tagged
				next.Version = 1
				after := cachetest.NewCacheIn(t, rdb, ns, &next)
				redistest.Must(t, before.SetMany(t.Context(), map[string]string{"k1": "a", "k2": "b", "k3": "b"}))
				if name != "nothing" {
					redistest.SkipLocal(t, "it loses nothing")
				}
				loss(t, look, ns)
				redistest.Must(t, after.DeleteTag(t.Context(), "a"))
				wantKeys(t, look, ns, "its tag is deleted", []string{"k1", "k2", "k3"}, []string{"k2", "k3"})
				redistest.Must(t, after.DeleteTag(t.Context(), "b"))
				wantKeys(t, look, ns, "all tags are deleted", []string{"k1", "k2", "k3"}, nil)
			})
		})
	}
}
