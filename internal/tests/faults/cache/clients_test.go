package cache_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Types around the clients of go-redis.
type (
	wrapped        struct{ redis.UniversalClient }
	wrappedCluster struct{ *redis.ClusterClient }
)

func autoPipeline(t *testing.T, rdb redis.UniversalClient) redis.UniversalClient {
	t.Helper()
	ap, err := rdb.AutoPipeline()
	redistest.Must(t, err)
	t.Cleanup(func() { _ = ap.Close() })
	return ap
}

// Whatever client a cache has, Clear, and a DeleteTag that has to clear, remove every value, or return an
// error. If Clear works, Check finds nothing.
//
//fault:any-client
//fault:one-cluster-node
//fault:key-hook
func TestClear_AnyClient(t *testing.T) {
	t.Parallel()
	const fine = ""
	single, cluster, replicated := redistest.Shared(t), redistest.SharedCluster(t), redistest.StartReplicatedCluster(t)
	type client = redis.UniversalClient
	server := func(t *testing.T) client { return single.Client(t) }
	ofCluster := func(t *testing.T) client { return cluster.Client(t) }
	withPrefix := func(open func(t *testing.T) client, hook keyPrefix) func(t *testing.T) client {
		return func(t *testing.T) client {
			rdb := open(t)
			rdb.AddHook(hook)
			return rdb
		}
	}
	ring := func(other string) func(t *testing.T) client {
		return func(t *testing.T) client {
			rdb := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": single.Addr, "b": other}, DisableIdentity: true})
			t.Cleanup(func() { _ = rdb.Close() })
			return rdb
		}
	}
	shard := redistest.Start(t).Addr
	asIs := func(_ *testing.T, rdb client) client { return rdb }
	wrap := func(_ *testing.T, rdb client) client { return wrapped{rdb} }
	// of returns what opens a client, also in another type.
	of := func(open func(t *testing.T) client, wrap func(t *testing.T, rdb client) client) func(*testing.T) (rdb, good client) {
		return func(t *testing.T) (_, _ client) { good := open(t); return wrap(t, good), good }
	}
	// ofReplicas is of for a client of a Cluster that reads from replicas.
	ofReplicas := func(wrap func(t *testing.T, rdb client) client) func(*testing.T) (rdb, good client) {
		return func(t *testing.T) (_, _ client) {
			reads := func(o *redis.ClusterOptions) { o.ReadOnly, o.RouteRandomly = true, true }
			return wrap(t, replicated.Client(t, reads)), replicated.Client(t)
		}
	}
	const onlyOne, hooked = "reaches only a part|does not reach each master of the Cluster", "SCAN has not found"
	for name, test := range map[string]struct {
		open func(t *testing.T) (rdb, good client) // of one server or Cluster
		want string                                // a regular expression that matches the error
	}{
		"wrapped":                      {of(server, wrap), fine},
		"pipelined":                    {of(server, autoPipeline), fine},
		"cluster":                      {of(ofCluster, asIs), fine},
		"cluster wrapped":              {of(ofCluster, wrap), fine},
		"cluster wrapped in a pointer": {of(ofCluster, func(_ *testing.T, rdb client) client { return &wrapped{rdb} }), fine},
		"cluster embedded":             {of(ofCluster, func(_ *testing.T, rdb client) client { return wrappedCluster{rdb.(*redis.ClusterClient)} }), fine},
		"cluster pipelined":            {of(ofCluster, autoPipeline), fine},
		"cluster pipelined, wrapped":   {of(ofCluster, func(t *testing.T, rdb client) client { return wrapped{autoPipeline(t, rdb)} }), fine},
		"cluster, replicas":            {ofReplicas(asIs), fine},
		"cluster, replicas, wrapped":   {ofReplicas(wrap), fine},
		"cluster, own slots": {func(t *testing.T) (_, _ client) {
			good := ofCluster(t)
			return cluster.Client(t, func(o *redis.ClusterOptions) {
				o.ClusterSlots = func(ctx context.Context) ([]redis.ClusterSlot, error) { return good.ClusterSlots(ctx).Result() }
			}), good
		}, fine},
		"cluster of a single server": {of(func(t *testing.T) client { // as behind Sentinel
			rdb := redis.NewClusterClient(&redis.ClusterOptions{ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
				return []redis.ClusterSlot{{End: 16383, Nodes: []redis.ClusterNode{{Addr: single.Addr}}}}, nil
			}})
			t.Cleanup(func() { _ = rdb.Close() })
			return rdb
		}, asIs), fine},
		"one node":          {func(t *testing.T) (_, _ client) { return cluster.Nodes[0].Client(t), ofCluster(t) }, onlyOne},
		"one node, wrapped": {func(t *testing.T) (_, _ client) { return wrapped{cluster.Nodes[1].Client(t)}, ofCluster(t) }, onlyOne},
		"ring":              {of(ring(shard), asIs), fine},
		"ring, a shard away": {of(ring("127.0.0.1:1"), func(t *testing.T, rdb client) client {
			redistest.Await(t, "the shard is marked down", func() bool { return rdb.(*redis.Ring).Len() == 1 })
			return rdb
		}), "reaches 1 shards, and was made with 2"},
		"ring wrapped":          {of(ring(shard), wrap), hooked},
		"prefix":                {of(withPrefix(server, keyPrefix{prefix: "tenant:"}), asIs), hooked},
		"prefix, patterns, too": {of(withPrefix(server, keyPrefix{prefix: "tenant:", scan: true}), asIs), fine},
		"cluster, prefix":       {of(withPrefix(ofCluster, keyPrefix{prefix: "tenant:"}), asIs), hooked},
	} {
		for _, tagged := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/tagged=%t", name, tagged), func(t *testing.T) {
				t.Parallel()
				ctx, ns := t.Context(), redistest.Namespace(t)
				rdb, good := test.open(t)
				opts := &singlefill.Options[string]{Codec: singlefill.Raw}
				writer := newCacheIn(t, good, ns, opts)
				values := make(map[string]string)
				for i := range 300 {
					values[strconv.Itoa(i)] = "old"
				}
				redistest.Must(t, writer.SetMany(ctx, values))
				clear := func(c *singlefill.Cache[string]) error { return c.Clear(ctx) }
				if tagged {
					opts.Tags = func(string, string) []string { return []string{"tag"} }
					clear = func(c *singlefill.Cache[string]) error { return c.DeleteTag(ctx, "tag") }
				}
				c := newCacheIn(t, rdb, ns, opts)
				err := clear(c)
				var left map[string]string
				redistest.Await(t, "the values are read", func() bool {
					var err error
					left, err = writer.GetMany(ctx, slices.Collect(maps.Keys(values)))
					return err == nil && (len(left) == 0 || test.want != fine)
				})
				switch {
				case test.want == fine && err != nil:
					t.Errorf("%v, %d values left", err, len(left))
				case test.want != fine && err == nil:
					t.Errorf("no error, and %d values left", len(left))
				case test.want != fine && !tagged && !regexp.MustCompile(test.want).MatchString(err.Error()):
					t.Errorf("%v, want an error that says %q", err, test.want)
				}
				// A hook that changes patterns does not change channels.
				if err := c.Check(ctx); (err == nil) != (test.want == fine && !strings.HasPrefix(name, "prefix")) {
					t.Errorf("Check: %v", err)
				}
			})
		}
	}
}

// A Clear during which a slot has moved returns an error, since a key may have moved behind the cursor of
// SCAN. The next one removes what is left.
//
//fault:clear-moved-slot
func TestClear_MovedSlot(t *testing.T) {
	t.Parallel()
	ctx, ns, cluster := t.Context(), redistest.Namespace(t), redistest.StartCluster(t)
	for i, rdb := range []redis.UniversalClient{cluster.Client(t), wrapped{cluster.Client(t)}, cluster.Client(t)} {
		end := func() {}
		move := sync.OnceFunc(func() {
			if end = cluster.Move(t, fmt.Sprintf("%s:{%d}", ns, i)).End; i < 2 {
				end()
			} // else it goes on when Clear returns
		})
		c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.Raw, Trace: &singlefill.Trace{
			Clearing: func(context.Context, singlefill.ClearInfo) { move() },
		}})
		redistest.Must(t, c.SetMany(ctx, map[string]string{"0": "old", "1": "old", "2": "old"}))
		cachetest.WantErrText(t, "Clear", c.Clear(ctx), "slots of the Cluster have moved")
		if i == 2 {
			end()
		}
		redistest.Must(t, c.Clear(ctx))
		if left, err := c.GetMany(ctx, []string{"0", "1", "2"}); len(left) > 0 || err != nil {
			t.Errorf("%v is left, %v", left, err)
		}
	}
}

// Commands of the program that block use all connections of the pool: errors, the log line about the
// breaker, and Check say so, and do not blame Redis alone.
//
//fault:pool-in-use
func TestPool_InUse(t *testing.T) {
	t.Parallel()
	for _, bounded := range []bool{false, true} {
		t.Run(fmt.Sprintf("ContextTimeoutEnabled=%t", bounded), func(t *testing.T) {
			t.Parallel()
			ctx, server := t.Context(), redistest.Start(t)
			rdb := server.Client(t, func(o *redis.Options) { o.PoolSize, o.ContextTimeoutEnabled = 10, bounded })
			log := make(lines, 1000)
			c, err := singlefill.New(rdb, "ns", time.Hour, &singlefill.Options[string]{
				RedisTimeout: 200 * time.Millisecond,
				Trace:        singlefill.LogTrace(slog.New(slog.NewTextHandler(log, nil)), nil),
			})
			redistest.Must(t, err)
			defer c.Close()
			redistest.Must(t, c.Set(ctx, "k", "v"))
			var workers sync.WaitGroup
			defer workers.Wait()
			for i := range 10 {
				queue := fmt.Sprint("queue", i)
				workers.Go(func() { _ = rdb.BLPop(context.WithoutCancel(ctx), 0, queue).Err() })
				defer server.Admin().RPush(context.WithoutCancel(ctx), queue, "work")
			}
			redistest.Await(t, "the workers wait", func() bool {
				return strings.Contains(server.Admin().Info(ctx, "clients").Val(), "blocked_clients:10\r")
			})
			const want = "no connection of the pool was free, since other commands of this program use"
			cachetest.WantErrText(t, "Check", c.Check(ctx), want)
			redistest.Await(t, "the breaker opens", func() bool {
				_, _ = c.GetOrLoad(ctx, "k", cachetest.Gives("v"))
				return c.Stats().BreakerOpens > 0
			})
			line := ""
			for !strings.Contains(line, "no commands are sent") {
				line = cachetest.Receive(t, "the line about the breaker", log)
			}
			if !strings.Contains(line, want) {
				t.Errorf("%swant %q", line, want)
			}
			_, err = c.Get(ctx, "k")
			cachetest.WantErrText(t, "Get", err, want)
		})
	}
}

// A frozen server is not taken for a pool in use, although commands that were given up keep connections.
//
//fault:pool-in-use
func TestPool_FrozenServer(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	rdb := server.Client(t, func(o *redis.Options) { o.PoolSize = 10 })
	c := cachetest.New(t, rdb, "ns", 200*time.Millisecond)
	server.Freeze()
	defer server.Thaw()
	var callers sync.WaitGroup
	for i := range 100 {
		callers.Go(func() { c.WantValue(fmt.Sprint(i)) })
	}
	callers.Wait()
	redistest.Await(t, "a command that its caller has left has failed", func() bool { return c.Log.ErrorCount() > 0 })
	if told := fmt.Sprint(c.Log.Errors()); strings.Contains(told, "connection of the pool was free") {
		t.Errorf("told %s, want errors that do not blame other commands", told)
	}
}

// lines are what a slog.Handler writes.
type lines chan string

func (l lines) Write(line []byte) (int, error) {
	l <- string(line)
	return len(line), nil
}

func newCacheIn(t *testing.T, rdb redis.UniversalClient, ns string, opts *singlefill.Options[string]) *singlefill.Cache[string] {
	t.Helper()
	c, err := singlefill.New(rdb, ns, time.Hour, cachetest.PatientOptions(opts))
	redistest.Must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// A keyPrefix is a hook that gives each tenant of a program separate keys. If scan is set, it changes the
// patterns and the replies of SCAN as well.
type keyPrefix struct {
	prefix string
	scan   bool
}

func (h keyPrefix) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h keyPrefix) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.change(cmd)
		err := next(ctx, cmd)
		h.restore(cmd)
		return err
	}
}

func (h keyPrefix) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			h.change(cmd)
		}
		err := next(ctx, cmds)
		for _, cmd := range cmds {
			h.restore(cmd)
		}
		return err
	}
}

func (h keyPrefix) change(cmd redis.Cmder) {
	args := cmd.Args()
	first, last := 1, 1
	switch cmd.Name() {
	case "eval", "evalsha":
		n, _ := strconv.Atoi(fmt.Sprint(args[2]))
		first, last = 3, 2+n
	case "del", "unlink", "exists", "watch":
		last = len(args) - 1
	case "scan":
		if first, last = 3, 3; !h.scan {
			return
		}
	case "multi", "exec", "ping", "info", "cluster", "dbsize", "publish", "spublish", "client", "hello", "unwatch", "time", "command":
		return
	}
	for i := first; i <= last; i++ {
		args[i] = h.prefix + fmt.Sprint(args[i])
	}
}

func (h keyPrefix) restore(cmd redis.Cmder) {
	if scan, ok := cmd.(*redis.ScanCmd); ok && h.scan {
		keys, cursor := scan.Val()
		for i := range keys {
			keys[i] = strings.TrimPrefix(keys[i], h.prefix)
		}
		scan.SetVal(keys, cursor)
	}
}
