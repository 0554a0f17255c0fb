package cache_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Single commands are lost, repeated or late. newWarm is start, and makes the server know the scripts,
// so that each act on the fill lock is one command.
func newWarm(t *testing.T) (*redistest.Server, *redistest.Proxy) {
	t.Helper()
	s, p := start(t)
	cachetest.LoadScripts(t, s)
	return s, p
}

// held returns the record under the lock of key, which begins with H while it is held, and with X
// when an attempt has been abandoned.
func held(s *redistest.Server, c *cachetest.Cache, key string) string {
	return s.Admin().Get(context.Background(), c.LockKey(key)).Val()
}

// A fill whose command was late, since its process was held up for longer than RedisTimeout, asks again.
//
//fault:late-command
func TestLock_HeldUpProcess(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		opt := *rdb.Options()
		opt.ContextTimeoutEnabled = true // the command waits in the goroutine of its caller, so that both are held up
		bounded := redis.NewClient(&opt)
		defer bounded.Close()
		held := false
		c := cachetest.New(t, bounded, "ns", cachetest.Impatient)
		c.MustLoad("before") // the server knows the script, and its clock is known, from here on
		bounded.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if cmd.Name() != "evalsha" || held {
				return next(ctx, cmd)
			}
			held = true
			m.SetTime(time.Now().Add(time.Hour)) // it is late
			err := next(ctx, cmd)
			time.Sleep(2 * cachetest.Impatient)
			return err
		}))
		c.MustLoad("k")
		if info := c.LastLoad(); !held || info.Unlocked || !info.Stored {
			t.Errorf("held up: %t; the load: %+v", held, info)
		}
		_ = c.Close()
	})
}

// A lock command that arrives when others have held the lock since, and no mark of its attempt is left,
// takes nothing either, also where scripts are refused.
//
//fault:late-command
func TestLock_ArrivesAfterOthers(t *testing.T) {
	for _, scripts := range []bool{true, false} {
		for _, bounded := range []bool{true, false} {
			t.Run(fmt.Sprintf("scripts %t, ContextTimeoutEnabled %t", scripts, bounded), func(t *testing.T) {
				s, p := newWarm(t)
				user, takes, calls := func(*redis.Options) {}, cachetest.Script(t, "get_or_lock"), "evalsha"
				if !scripts {
					user, takes, calls = cachetest.NoScripts(t, s), redistest.Command("EXEC"), "exec"
				}
				rule := p.On(takes, redistest.HoldRequest).Times(1)
				c := cachetest.New(t, p.Client(t, redistest.NoRetry, user, func(o *redis.Options) { o.ContextTimeoutEnabled = bounded }),
					redistest.Namespace(t), stallTimeout)
				c.MustLoad("k")
				awaitHit(t, rule)
				redistest.Await(t, "the attempt is marked as abandoned", func() bool { return strings.HasPrefix(held(s, c, "k"), "X") })
				other := cachetest.New(t, s.Client(t, user), c.Namespace, cachetest.Patient)
				other.MustLoad("k")
				other.WantHit("k")
				redistest.Must(t, other.Delete(t.Context(), "k"))
				before := s.Calls(calls)
				rule.Release()
				redistest.Await(t, "the late command is executed", func() bool { return s.Calls(calls) > before })
				if record := held(s, c, "k"); record != "" {
					t.Errorf("the lock key holds %q", record)
				}
			})
		}
	}
}

// A connection that is closed before a command, before its reply, or in the middle of it, costs no call its
// value: that is loaded and stored once, and the lock is free. A client that retries repeats what was executed.
//
//fault:reset
//fault:lost-reply
//fault:lost-request
//fault:repeated-command
//fault:killed-at-store
func TestCommand_LostOnce(t *testing.T) {
	for what, match := range map[string]func(cmd []string) bool{
		"GET":         redistest.Command("GET"),
		"get_or_lock": cachetest.Script(t, "get_or_lock"),
		"store":       cachetest.Script(t, "store"),
		"DEL":         redistest.Command("DEL"),
	} {
		for how, action := range map[string]redistest.Action{
			"is lost":                 redistest.CloseBefore,
			"has its reply lost":      redistest.DropReply,
			"has its reply cut short": redistest.ResetReply,
		} {
			for client, configure := range retries {
				t.Run(what+" "+how+", "+client, func(t *testing.T) {
					s, p := newWarm(t)
					a, b := newPair(t, p.Client(t, configure), s.Client(t), cachetest.Patient)
					rule := p.On(match, action).Times(1)
					a.MustLoad("k")
					stored := s.Admin().Get(t.Context(), a.ValueKey("k")).Val()
					b.MustLoad("k")
					a.WantHit("k")
					a.WantLoads(1)
					if again := s.Admin().Get(t.Context(), a.ValueKey("k")).Val(); stored == "" || again != stored {
						t.Errorf("the entry was %q, and is %q", stored, again)
					}
					if info := a.LastLoad(); info.Fenced || info.Err != nil || !info.Stored {
						t.Errorf("Trace.LoadDone reported %+v", info)
					}
					if err := a.Delete(t.Context(), "k"); err != nil {
						t.Errorf("Delete = %v", err)
					}
					b.WantMiss("k")
					redistest.Await(t, "the lock is free", func() bool { return !redistest.Exists(t, s.Admin(), a.LockKey("k")) })
					if rule.Fired() != 1 {
						t.Errorf("the fault has come about %d times", rule.Fired())
					}
				})
			}
		}
	}
}

// A store that never gets through releases its lock behind the call. The server, or a proxy on the
// way, may refuse a large value by a reset, or sending it may take longer than RedisTimeout.
//
//fault:store-fails
func TestStore_NeverGetsThrough(t *testing.T) {
	s, p := newWarm(t)
	c := cachetest.New(t, p.Client(t), redistest.Namespace(t), stallTimeout, lockTTL(20*time.Second))
	rule := p.On(cachetest.Script(t, "store"), redistest.CloseBefore)
	var key string
	redistest.Await(t, "the fault comes about", func() bool { // a load may run unlocked if the machine stalls
		key = fmt.Sprint("k", c.Loads.Load())
		c.MustLoad(key)
		c.AwaitLoads()
		return rule.Fired() > 0
	})
	if err := c.Close(); err != nil { // it waits for the release
		t.Error(err)
	}
	if redistest.Exists(t, s.Admin(), c.LockKey(key)) {
		t.Errorf("the lock is held for another %v", s.Admin().PTTL(t.Context(), c.LockKey(key)).Val())
	}
}

// A redirection that the client does not follow is retried. A client of a cluster follows MOVED and
// ASK three times and then returns the last of them, which says, like TRYAGAIN, that nothing was
// done.
//
//fault:last-redirection
func TestCommand_LastRedirection(t *testing.T) {
	for _, reply := range []string{"TRYAGAIN x", "MOVED 1 127.0.0.1:1", "ASK 1 127.0.0.1:1"} {
		cachetest.RunInBubble(t, reply, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			c := cachetest.New(t, rdb, "ns", cachetest.Impatient)
			c.MustLoad("before")
			var scripts atomic.Int64
			m.Server().SetPreHook(func(p *server.Peer, cmd string, args ...string) bool {
				if cmd == "EVALSHA" && scripts.Add(1) == 1 {
					p.WriteError(reply)
					return true
				}
				return false
			})
			c.MustLoad("k")
			c.AwaitLoads()
			if info := c.LastLoad(); info.Unlocked || !info.Stored {
				t.Errorf("Trace.LoadDone reported %+v, want a load under the lock", info)
			}
		})
	}
}
