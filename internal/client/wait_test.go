package client

import (
	"context"
	"errors"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	miniserver "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// occupied returns a watcher that can send no command until over is closed. Its pool is larger than
// one, since go-redis shares the timers of commands that wait for a connection between bubbles.
func occupied(t *testing.T) (w *watcher, over chan struct{}) {
	w, over = watch(t, mute(t), timeout), make(chan struct{})
	for _, g := range []*gate{w.node.alone, w.node.together} {
		g.size = 1
		g.tryEnter()
		go func() { <-over; g.leave(true) }()
	}
	return w, over
}

// A command's time begins when it is sent; waiting commands are sent in order, however long that
// takes.
//
//fault:many-commands
func TestWait_TimeBeginsWhenSent(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := watch(t, mute(t), timeout)
		w.node.alone.size = 2
		const commands, takes = 100, timeout * 9 / 10
		var wg sync.WaitGroup
		var sent atomic.Int64
		for i := range commands {
			wg.Go(func() {
				n, err := Do(t.Context(), w.Client, "slow", "k", func(ctx context.Context) (int64, error) {
					n := sent.Add(1)
					time.Sleep(takes)
					return n, ctx.Err()
				})
				if turn := int64(i)/2 + 1; err != nil || (n+1)/2 != turn {
					t.Errorf("command %d was sent as number %d: %v", i, n, err)
				}
			})
			synctest.Wait()
		}
		if n := w.Queued(); n != commands-2 {
			t.Errorf("%d wait, want %d", n, commands-2)
		}
		begun := time.Now()
		wg.Wait()
		if took := time.Since(begun); took != commands/2*takes {
			t.Errorf("all took %v, want %v", took, commands/2*takes)
		}
		if w.failures("slow") != 0 || w.AnyAway() || w.Queued() != 0 {
			t.Errorf("%d failures, breaker open: %t, %d wait", w.failures("slow"), w.AnyAway(), w.Queued())
		}
	})
}

// A command is dated when it is admitted: not before its wait, and not when its caller notices, since others may have
// taken it along by then.
func TestWait_Sent(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		_, rdb := redistest.StartMini(t)
		w := watch(t, rdb, timeout)
		w.node.together.size = 1
		for waiting := range 3 { // two go in one pipeline
			admitted := time.Now()
			if waiting > 0 {
				admitted = admitted.Add(timeout / 2)
				w.node.together.tryEnter()
				time.AfterFunc(timeout/2, func() { w.node.together.leave(true) })
			}
			var wg sync.WaitGroup
			for range max(waiting, 1) {
				wg.Go(func() {
					var sent time.Time
					ctx := &heldUp{Context: t.Context()}
					cmd := redis.NewCmd(ctx, "ping")
					what := Command{Op: "ping", Key: "k", Within: timeout, Sent: &sent}
					if s, _, err := send(ctx, w.Client, &what, []redis.Cmder{cmd}, cmd.Text); s != "PONG" || err != nil || !sent.Equal(admitted) {
						t.Errorf("%d wait: sent %v after it was admitted; %q, %v", waiting, sent.Sub(admitted), s, err)
					}
				})
			}
			wg.Wait()
		}
	})
}

// A heldUp is the context of a caller that is held up when it begins to wait.
type heldUp struct {
	context.Context
	asked int
}

func (c *heldUp) Err() error {
	if c.asked++; c.asked == 2 { // the first question comes before the gate
		time.Sleep(timeout * 3 / 4)
	}
	return c.Context.Err()
}

// A caller that leaves while its command waits gets its own error at once, and the command is not
// sent and does not fail.
//
//fault:many-commands
func TestWait_CallerLeaves(t *testing.T) {
	t.Parallel()
	for way, get := range gets {
		synctest.Test(t, func(t *testing.T) {
			w, over := occupied(t)
			for _, c := range []struct {
				deadline, cancelAt time.Duration
				want               error
			}{
				{deadline: timeout * 2 / 3, cancelAt: time.Hour, want: context.DeadlineExceeded},
				{deadline: time.Hour, cancelAt: timeout / 3, want: context.Canceled},
			} {
				ctx, cancel := context.WithTimeout(t.Context(), c.deadline)
				time.AfterFunc(c.cancelAt, cancel)
				after, want := min(c.deadline, c.cancelAt), c.want
				begun := time.Now()
				if err := get(w, ctx); err != want || time.Since(begun) != after {
					t.Errorf("%s: %v after %v, want %v after %v", way, err, time.Since(begun), want, after)
				}
				cancel()
				_, _ = Do(t.Context(), w.Client, "answer", "", func(context.Context) (int, error) { return 0, nil })
			}
			close(over)
			synctest.Wait()
			if w.failures("get") != 0 || w.Queued() != 0 || w.node.alone.state.Load()+w.node.together.state.Load() != 0 {
				t.Errorf("%s: %d failures, %d wait, the gates are %#x and %#x", way, w.failures("get"), w.Queued(), w.node.alone.state.Load(), w.node.together.state.Load())
			}
			time.Sleep(time.Hour)
		})
	}
}

// A command whose caller leaves a server that is away is not sent, though the server is back when the caller looks
// again.
func TestWait_OutageEndsAsCallerLeaves(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w, over := occupied(t)
		go func() {
			_, _ = doNow(context.Background(), w.Client, "silent", "k", func(ctx context.Context) (int, error) { <-ctx.Done(); return 0, ctx.Err() })
		}()
		time.Sleep(timeout * 9 / 10)
		time.AfterFunc(timeout/2, func() {
			_, _ = doNow(context.Background(), w.Client, "answer", "k", func(context.Context) (int, error) { return 1, nil })
		})
		_, err := Do(&heldUp{Context: t.Context()}, w.Client, "queued", "k", func(context.Context) (int, error) { return 1, nil })
		if !errors.Is(err, ErrAway) {
			t.Errorf("%v, want %v", err, ErrAway)
		}
		close(over)
		synctest.Wait()
		if state := w.node.alone.state.Load(); state != 0 {
			t.Errorf("the gate is %#x in the end", state)
		}
	})
}

// A command that is sent Now overtakes the commands that wait, is bounded, and counts as they do.
func TestDo_Now(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w, over := occupied(t)
		defer synctest.Wait()
		defer close(over)
		begun := time.Now()
		n, err := doNow(t.Context(), w.Client, "now", "k", func(context.Context) (int, error) { return 1, nil })
		if n != 1 || err != nil || time.Since(begun) != 0 {
			t.Errorf("%d, %v after %v, want 1 at once", n, err, time.Since(begun))
		}
		time.AfterFunc(timeout/2, func() { // otherwise the server would be away when the time is over
			_, _ = doNow(context.Background(), w.Client, "other", "k", func(context.Context) (int, error) { return 1, nil })
		})
		_, err = doNow(t.Context(), w.Client, "now", "k", func(ctx context.Context) (int, error) { <-ctx.Done(); return 0, ctx.Err() })
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) != timeout || w.failures("now") != 1 {
			t.Errorf("%v after %v, %d failures; want one failure after %v", err, time.Since(begun), w.failures("now"), timeout)
		}
	})
}

// However many commands wait at a frozen server, none takes longer than one command may, also without a
// breaker, as in a lock. Only those that were sent, and those that it takes to open a breaker, count as
// failed.
//
//fault:many-commands-frozen
func TestWait_FrozenServer(t *testing.T) {
	t.Parallel()
	for kind, open := range map[string]func(o *redis.Options){
		"default":            func(*redis.Options) {},
		"observes deadlines": func(o *redis.Options) { o.ContextTimeoutEnabled = true },
		"without breaker":    func(*redis.Options) {},
	} {
		for way, get := range gets {
			for _, size := range []int{1, 10} {
				synctest.Test(t, func(t *testing.T) {
					rdb, breaker := mute(t, open), kind != "without breaker"
					w := watch(t, rdb, timeout)
					if !breaker {
						w.close()
						w.Client = New(rdb, timeout, w.Client.failed, nil, nil)
					}
					w.node.alone.size, w.node.together.size = uint64(size), uint64(size)
					begun := time.Now()
					var wg sync.WaitGroup
					for range 1000 {
						wg.Go(func() {
							if err := get(w, t.Context()); err == nil {
								t.Error("no error")
							}
							if took := time.Since(begun); took > timeout {
								t.Errorf("%s, %s, %d connections: a command took %v", kind, way, size, took)
							}
						})
					}
					wg.Wait()
					synctest.Wait() // the line tells of it after it has released them
					if w.AnyAway() != breaker || breaker && w.failures("get") > size {
						t.Errorf("%s, %s, %d connections: breaker open: %t, %d failures", kind, way, size, w.AnyAway(), w.failures("get"))
					}
					time.Sleep(time.Minute)
					if alone, together := w.node.alone.state.Load(), w.node.together.state.Load(); alone+together != 0 {
						t.Errorf("%s, %s: the gates are %#x and %#x in the end", kind, way, alone, together)
					}
				})
			}
		}
	}
}

// All users of one client share its gate and what they know of its server.
func TestServer_Shared(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	other := redistest.Start(t).Client(t)
	a, b, c := watch(t, rdb, timeout), watch(t, rdb, time.Minute), watch(t, other, timeout)
	if a.node.server != b.node.server || a.node.server == c.node.server {
		t.Error("two users of one client do not share a gate, or those of two do")
	}
	pipeline, err := rdb.AutoPipeline()
	redistest.Must(t, err)
	for rdb, want := range map[redis.UniversalClient]int{
		redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", PoolSize: 7}):                            7,
		redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", PoolSize: 7, MaxActiveConns: 5}):         5,
		redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", PoolSize: 7, MaxActiveConns: 9}):         7,
		redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}):                                         10 * runtime.GOMAXPROCS(0),
		redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}, PoolSize: 3}):   3,
		redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}, PoolSize: 4}): 4,
		wrapped{rdb}: 10 * runtime.GOMAXPROCS(0),
		pipeline:     pipelined,
	} {
		if got := connections(rdb); got != want {
			t.Errorf("a %T has %d connections, want %d", rdb, got, want)
		}
		if _, ok := rdb.(wrapped); !ok {
			_ = rdb.Close()
		}
	}
}

// A client that is no longer used is not kept alive by its server.
func TestServer_Forgotten(t *testing.T) {
	t.Parallel()
	var collected atomic.Bool
	var at clientAddr
	func() {
		type client struct{ redis.UniversalClient }
		rdb := &client{}
		runtime.AddCleanup(rdb, func(*atomic.Bool) { collected.Store(true) }, &collected)
		at = clientAddr{reflect.TypeOf(rdb), reflect.ValueOf(rdb).Pointer()}
		if s := serverOf(rdb, nil); serverOf(rdb, nil) != s {
			t.Error("it is not remembered")
		}
	}()
	redistest.Await(t, "the client and its server are forgotten", func() bool {
		runtime.GC()
		servers.mu.Lock()
		defer servers.mu.Unlock()
		_, known := servers.of[at]
		return collected.Load() && !known
	})
}

// A read is bounded even if OnConnect ignores its context.
func TestBounded_OnConnect(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, _ := redistest.StartMini(t)
		t.Cleanup(func() { time.Sleep(time.Hour) }) // the last connections are made
		rdb := redistest.NewMiniClient(t, m, func(o *redis.Options) {
			o.ContextTimeoutEnabled = true
			o.OnConnect = func(context.Context, *redis.Conn) error { time.Sleep(time.Minute); return errors.New("too late") }
		})
		w := watch(t, rdb, timeout)
		for way, get := range gets {
			begun := time.Now()
			if err := get(w, t.Context()); err == nil || time.Since(begun) > timeout {
				t.Errorf("%s: %v after %v", way, err, time.Since(begun))
			}
		}
	})
}

// A command counts by its own outcome, also if its caller has left before: it failed if it had no answer.
// A server that does not know a script has answered.
func TestSend_CallerLeaves(t *testing.T) {
	t.Parallel()
	for answer, failures := range map[string]int{"": 1, "NOSCRIPT No matching script.": 0} {
		for range 20 { // the client returns at the moment at which the time is over
			synctest.Test(t, func(t *testing.T) {
				rdb := mute(t)
				rdb.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, _ redis.ProcessHook) error {
					if answer == "" {
						<-ctx.Done()
						return ctx.Err()
					}
					time.Sleep(timeout * 3 / 4)
					return replyError(answer)
				}))
				w := watch(t, rdb, timeout)
				ctx, cancel := context.WithTimeout(t.Context(), timeout/2)
				defer cancel()
				script := NewScript("return 1")
				err := Run(ctx, w.Client, Command{Op: "op", Within: timeout}, ScriptCall{script, script.Call(0, 0)}, (*redis.Cmd).Int).Err
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Run: %v", err)
				}
				time.Sleep(time.Minute)
				if n := w.failures("op"); n != failures {
					t.Errorf("answered %q: %d failures, want %d", answer, n, failures)
				}
			})
		}
	}
}

// Pings that are answered, on connections that work, do not keep commands in the queue behind others that are not
// answered, on connections that do not.
//
//fault:many-commands
func TestWait_OnlyPingsAnswered(t *testing.T) {
	t.Parallel()
	for _, bounded := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m, _ := redistest.StartMini(t)
			// A GET gets no reply.
			m.Server().SetPreHook(func(_ *miniserver.Peer, cmd string, _ ...string) bool { return cmd == "GET" })
			rdb := redistest.NewMiniClient(t, m, func(o *redis.Options) { o.ContextTimeoutEnabled = bounded })
			w := watch(t, rdb, timeout)
			w.node.alone.size = 1
			begun := time.Now()
			var wg sync.WaitGroup
			for range 10 {
				wg.Go(func() {
					if err := w.get(t.Context()); err == nil {
						t.Error("a reply to a command that is not answered")
					}
				})
			}
			wg.Wait()
			if took := time.Since(begun); took > 2*timeout {
				t.Errorf("the last one failed after %v, want at most %v", took, 2*timeout)
			}
			if w.AnyAway() {
				t.Error("open, although the server answers pings")
			}
		})
	}
}
