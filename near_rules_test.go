package singlefill_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A pipelineHook is called in place of each pipeline; next carries it out.
type pipelineHook func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error

func (h pipelineHook) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (h pipelineHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (h pipelineHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error { return h(ctx, cmds, next) }
}

// A Delete whose caller leaves shares nothing with its commands, which go on. The race detector
// notices if it does.
func TestNearRules_DeleteLeaves(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	rdb := s.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = false })
	rdb.AddHook(pipelineHook(func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error {
		time.Sleep(100 * time.Millisecond) // not synchronized with the caller
		return next(ctx, cmds)
	}))
	c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Near: &singlefill.Near{}})
	ctx, leave := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer leave()
	if err := c.Delete(ctx, "k"); err != context.DeadlineExceeded {
		t.Errorf("got %v", err)
	}
	redistest.Await(t, "the record is in the log", func() bool { return s.Calls("xadd") > 0 })
}

// A value that was in transit during an invalidation of this process is not kept, whichever command
// has found or stored it.
func TestNearRules_InTransit(t *testing.T) {
	for name, test := range map[string]struct {
		command func(t *testing.T) func(cmd []string) bool
		found   bool // there is a value; otherwise it is loaded
		late    bool // it is stored just after the read has missed it
	}{
		"read":   {func(*testing.T) func([]string) bool { return redistest.Command("get") }, true, false},
		"locked": {func(t *testing.T) func([]string) bool { return cachetest.Script(t, "get_or_lock") }, true, true},
		"stored": {func(t *testing.T) func([]string) bool { return cachetest.Script(t, "store") }, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				redistest.Mute(m)
				ns, ctx := redistest.Namespace(t), t.Context()
				here := cachetest.NewCacheIn(t, rdb, ns, near(singlefill.Near{MaxLag: time.Hour}))
				there := cachetest.NewCaches(t, m, ns, 1, near(singlefill.Near{}))[0]
				awaitNear(t, here, "other", cachetest.Gives("v"))
				store := func() { must(t, there.Set(ctx, "k", "old")) }
				if test.found && !test.late {
					store()
				}
				matches := test.command(t)
				var done atomic.Bool
				rdb.AddHook(cachetest.After(func(cmd redis.Cmder) error {
					if matches(cachetest.Args(cmd)) && done.CompareAndSwap(false, true) {
						must(t, here.Delete(ctx, "k"))
					}
					return nil
				}))
				rdb.AddHook(cachetest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
					err := next(ctx, cmd)
					if test.late && cmd.Name() == "get" && !done.Load() {
						store()
					}
					return err
				}))
				if _, err := here.GetOrLoad(ctx, "k", cachetest.Gives("old")); err != nil {
					t.Error(err)
				}
				if !done.Load() {
					t.Error("nothing was deleted")
				}
				v, err := here.GetOrLoad(ctx, "k", cachetest.Gives("new"))
				cachetest.WantValue(t, v, err, "new")
			})
		})
	}
}

// The process that invalidates serves nothing old from memory, though it does not read the log.
func TestNearRules_OwnInvalidation(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		redistest.Mute(m)
		ctx := t.Context()
		c := cachetest.NewCache(t, rdb, near(singlefill.Near{MaxLag: time.Hour}))
		for name, change := range map[string]func() error{
			"Delete": func() error { return c.Delete(ctx, "k") },
			"Set":    func() error { return c.Set(ctx, "k", "new") },
			"Expire": func() error { return c.Expire(ctx, "k") },
		} {
			awaitNear(t, c, "k", cachetest.Gives("old"))
			must(t, change())
			v, err := c.GetOrLoad(ctx, "k", cachetest.Gives("new"))
			if cachetest.WantValue(t, v, err, "new"); t.Failed() {
				t.Fatal(name)
			}
			must(t, c.Delete(ctx, "k"))
		}
	})
}

// A process that has not read the log for MaxLag asks Redis.
func TestNearRules_NoProof(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns, ctx := redistest.Namespace(t), t.Context()
		here := cachetest.NewCacheIn(t, rdb, ns, near(singlefill.Near{}))
		there := cachetest.NewCaches(t, m, ns, 1, near(singlefill.Near{}))[0]
		awaitNear(t, here, "k", cachetest.Gives("old"))
		time.Sleep(time.Minute) // until it does not read the log any more
		must(t, there.Delete(ctx, "k"))
		time.Sleep(time.Second)
		v, err := here.GetOrLoad(ctx, "k", cachetest.Gives("new"))
		cachetest.WantValue(t, v, err, "new")
	})
}

// A client that is not known to reach one server only.
type wrapped struct{ redis.UniversalClient }

// MaxLag after an invalidation every process has noticed it: though its command took long, while
// others read the log and the old value; and though the server refuses the record.
func TestNearRules_OtherProcess(t *testing.T) {
	const maxLag, long = time.Second, 3010 * time.Millisecond
	type cache = *singlefill.Cache[string]
	for name, test := range map[string]struct {
		wrap   func(rdb *redis.Client) redis.UniversalClient
		change func(ctx context.Context, c cache) error
	}{
		"Delete":            {nil, func(ctx context.Context, c cache) error { return c.Delete(ctx, "k") }},
		"Delete by servers": {func(rdb *redis.Client) redis.UniversalClient { return wrapped{rdb} }, func(ctx context.Context, c cache) error { return c.Delete(ctx, "k") }},
		"Set":               {nil, func(ctx context.Context, c cache) error { return c.Set(ctx, "k", "new") }},
		"Expire":            {nil, func(ctx context.Context, c cache) error { return c.Expire(ctx, "k") }},
	} {
		for _, refused := range []bool{false, true} {
			t.Run(name+map[bool]string{false: "", true: ", record refused"}[refused], func(t *testing.T) {
				cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
					var refuses atomic.Bool
					m.Server().SetPreHook(func(c *server.Peer, cmd string, args ...string) bool {
						if cmd == "XADD" && refuses.Load() {
							c.WriteError("OOM command not allowed when used memory > 'maxmemory'.")
							return true
						}
						return redistest.Muted(c, cmd, args...)
					})
					ns, ctx := redistest.Namespace(t), t.Context()
					opts := near(singlefill.Near{MaxLag: maxLag})
					here := cachetest.NewCaches(t, m, ns, 1, opts)[0]
					var there cache
					if test.wrap != nil {
						there = cachetest.NewCacheIn(t, test.wrap(rdb), ns, opts)
						rdb.AddHook(byServers(long))
					} else {
						there = cachetest.NewCacheIn(t, rdb, ns, opts)
						rdb.AddHook(slowInvalidations(long))
					}
					var source atomic.Pointer[string]
					old, fresh := "old", "new"
					source.Store(&old)
					load := func(context.Context, string) (string, error) { return *source.Load(), nil }
					awaitNear(t, here, "k", load)
					refuses.Store(refused)
					returned := make(chan error)
					go func() { returned <- test.change(ctx, there) }()
					for busy := true; busy; {
						select {
						case err := <-returned:
							must(t, err)
							busy = false
						case <-time.After(50 * time.Millisecond):
							_, err := here.GetOrLoad(ctx, "k", load)
							must(t, err)
						}
					}
					source.Store(&fresh)
					for begun := time.Now(); time.Since(begun) < maxLag; time.Sleep(50 * time.Millisecond) {
						_, err := here.Get(ctx, "other") // so that it goes on reading the log
						if err != singlefill.ErrMiss {
							t.Error(err)
						}
					}
					v, err := here.GetOrLoad(ctx, "k", load)
					cachetest.WantValue(t, v, err, "new")
				})
			})
		}
	}
}

// slowInvalidations is a hook that delays pipelines that invalidate before they are sent.
func slowInvalidations(d time.Duration) pipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error {
		if !slices.ContainsFunc(cmds, forTheLog) {
			time.Sleep(d)
		}
		return next(ctx, cmds)
	}
}

// byServers is slowInvalidations for pipelines whose parts reach several servers: the one with the
// log executes its part at once.
func byServers(d time.Duration) pipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error {
		var log, others []redis.Cmder
		for _, cmd := range cmds {
			if forTheLog(cmd) {
				log = append(log, cmd)
			} else {
				others = append(others, cmd)
			}
		}
		if len(log) > 0 {
			if err := next(ctx, log); err != nil || len(others) == 0 {
				return err
			}
		}
		time.Sleep(d)
		return next(ctx, others)
	}
}

func forTheLog(cmd redis.Cmder) bool {
	return len(cmd.Args()) > 1 && strings.HasSuffix(cachetest.Args(cmd)[1], ":log")
}
