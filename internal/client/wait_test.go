package client

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	miniserver "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/line"
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

// reply and silence are commands.
func reply(context.Context) (int, error)       { return 1, nil }
func silence(ctx context.Context) (int, error) { <-ctx.Done(); return 0, ctx.Err() }

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
					_, _, err := send(ctx, w.Client, &what, []redis.Cmder{cmd}, cmd.Text)
					if err != nil || !sent.Equal(admitted) {
						t.Errorf("%d wait: sent %v after it was admitted; %v", waiting, sent.Sub(admitted), err)
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
		runInBubble(t, way, func(t *testing.T) {
			w, over := occupied(t)
			for _, want := range []error{context.DeadlineExceeded, context.Canceled} {
				ctx, cancel := context.WithTimeout(t.Context(), timeout/2)
				if want == context.Canceled {
					ctx, cancel = context.WithCancel(t.Context())
					time.AfterFunc(timeout/2, cancel)
				}
				begun := time.Now()
				if err := get(w, ctx); err != want || time.Since(begun) != timeout/2 {
					t.Errorf("%v after %v, want %v after %v", err, time.Since(begun), want, timeout/2)
				}
				cancel()
				_ = w.do(nil)
			}
			close(over)
			synctest.Wait()
			alone, together := w.node.alone.state.Load(), w.node.together.state.Load()
			if w.failures("get") != 0 || w.Queued() != 0 || alone+together != 0 {
				t.Errorf("%d failures, %d wait, the gates are %#x and %#x", w.failures("get"), w.Queued(), alone, together)
			}
		})
	}
}

// A command whose caller leaves a server that is away is not sent, though the server is back when the caller looks
// again.
func TestWait_OutageEndsAsCallerLeaves(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w, over := occupied(t)
		go func() {
			_, _ = doNow(context.Background(), w.Client, "silent", "k", silence)
		}()
		time.Sleep(timeout * 9 / 10)
		time.AfterFunc(timeout/2, func() {
			_, _ = doNow(context.Background(), w.Client, "answer", "k", reply)
		})
		_, err := Do(&heldUp{Context: t.Context()}, w.Client, "queued", "k", reply)
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
		n, err := doNow(t.Context(), w.Client, "now", "k", reply)
		if n != 1 || err != nil || time.Since(begun) != 0 {
			t.Errorf("%d, %v after %v, want 1 at once", n, err, time.Since(begun))
		}
		time.AfterFunc(timeout/2, func() { // otherwise the server would be away when the time is over
			_, _ = doNow(context.Background(), w.Client, "other", "k", reply)
		})
		_, err = doNow(t.Context(), w.Client, "now", "k", silence)
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
	for _, breaker := range []bool{true, false} {
		for _, size := range []int{1, 10} {
			name := fmt.Sprintf("breaker: %t, connections: %d", breaker, size)
			eachGet(t, name, func(t *testing.T, _ string, rdb redis.UniversalClient, get getFunc) {
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
						if err := get(w, t.Context()); err == nil || time.Since(begun) > timeout {
							t.Errorf("%v after %v, want an error after %v", err, time.Since(begun), timeout)
						}
					})
				}
				wg.Wait()
				synctest.Wait() // the line tells of it after it has released them
				if w.AnyAway() != breaker || breaker && w.failures("get") > size {
					t.Errorf("breaker open: %t, %d failures", w.AnyAway(), w.failures("get"))
				}
				time.Sleep(time.Minute)
				if alone, together := w.node.alone.state.Load(), w.node.together.state.Load(); alone+together != 0 {
					t.Errorf("the gates are %#x and %#x in the end", alone, together)
				}
			})
		}
	}
}

// A command that gives up when it has been admitted leaves its place to the next one.
func TestGate_GivesUpItsPlace(t *testing.T) {
	t.Parallel()
	g := gate{size: 1}
	g.tryEnter()
	first, next := g.enqueue(parcel{timeout: time.Hour}), g.enqueue(parcel{timeout: time.Hour})
	g.leave(true)
	if !over(first.decided) || over(next.decided) {
		t.Error("they are not admitted in order")
	}
	g.giveUp(first)
	if !over(next.decided) {
		t.Error("the place is lost")
	}
}

// A gate does not give up on a command when the process was held up: an answer may be about to arrive.
func TestGate_HeldUp(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		g := gate{size: 1, line: line.New(nil)}
		g.tryEnter()
		w := g.enqueue(parcel{timeout: timeout})
		begun := time.Now()
		w.begun = begun.Add(-2 * timeout)
		g.mu.Lock()
		g.giveUpOn(1)
		g.mu.Unlock()
		<-w.decided
		if waited := time.Since(begun); !w.stuck || waited != timeout/4 {
			t.Errorf("stuck: %t, %v later, want %v", w.stuck, waited, timeout/4)
		}
	})
}

// A gate admits no more than its size, and forgets no command, however they come, give up and
// leave.
func TestGate_Crowd(t *testing.T) {
	t.Parallel()
	const size = 3
	g := gate{size: size}
	var inside, most atomic.Int64
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for j := range 500 {
				if !g.tryEnter() {
					p := g.enqueue(parcel{timeout: time.Hour})
					if (i+j)%3 == 0 {
						runtime.Gosched() // it may be admitted
						g.giveUp(p)
						continue
					}
					<-p.decided
				}
				for n := inside.Add(1); n > most.Load(); {
					most.Store(n)
				}
				runtime.Gosched()
				inside.Add(-1)
				g.leave(true)
			}
		})
	}
	wg.Wait()
	if most.Load() > size || g.state.Load() != 0 || g.queue.Len() != 0 {
		t.Errorf("%d were inside at a time, want %d at most; in the end the state is %#x, %d wait",
			most.Load(), size, g.state.Load(), g.queue.Len())
	}
}

// All users of one client share its gates, which admit as many commands as its pool has connections.
func TestServer_Shared(t *testing.T) {
	t.Parallel()
	m, rdb := redistest.StartMini(t)
	other := redistest.NewMiniClient(t, m)
	if s := serverOf(rdb, nil); serverOf(rdb, nil) != s || serverOf(other, nil) == s {
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
	script := NewScript("return 1")
	for answer, failures := range map[error]int{nil: 1, replyError("NOSCRIPT No matching script."): 0} {
		for range 20 { // the client returns at the moment at which the time is over
			runInBubble(t, fmt.Sprint(answer), func(t *testing.T) {
				rdb := mute(t)
				rdb.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, _ redis.ProcessHook) error {
					if answer != nil {
						time.Sleep(timeout * 3 / 4)
						return answer
					}
					<-ctx.Done()
					return ctx.Err()
				}))
				w := watch(t, rdb, timeout)
				ctx, cancel := context.WithTimeout(t.Context(), timeout/2)
				defer cancel()
				err := Run(ctx, w.Client, Command{Op: "op", Within: timeout}, callOf(script), (*redis.Cmd).Int).Err
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Run: %v", err)
				}
				time.Sleep(timeout)
				if n := w.failures("op"); n != failures {
					t.Errorf("%d failures, want %d", n, failures)
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
		runInBubble(t, fmt.Sprint("ContextTimeoutEnabled=", bounded), func(t *testing.T) {
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
					if err := w.get(t.Context()); err == nil || time.Since(begun) > 2*timeout {
						t.Errorf("%v after %v, want an error after at most %v", err, time.Since(begun), 2*timeout)
					}
				})
			}
			wg.Wait()
			if w.AnyAway() {
				t.Error("open, although the server answers pings")
			}
		})
	}
}
