package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// inBubble runs a test in a bubble of testing/synctest, in parallel with others.
func inBubble(t *testing.T, run func(t *testing.T)) {
	t.Parallel()
	synctest.Test(t, run)
}

// runInBubble runs a subtest in a bubble.
func runInBubble(t *testing.T, name string, run func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, run) })
}

const timeout = 150 * time.Millisecond

// A watcher is a Client that records what it reports.
type watcher struct {
	*Client
	mu     sync.Mutex
	failed []string // protected by mu: ops
	told   []bool   // protected by mu: of the breaker
	close  func()   // ends the background work; may be called again
}

func watch(t testing.TB, rdb redis.UniversalClient, timeout time.Duration) *watcher {
	w := &watcher{}
	closing := make(chan struct{})
	var begins sync.Mutex // a line may begin work when nothing is left to wait for
	var running sync.WaitGroup
	w.close = sync.OnceFunc(func() {
		begins.Lock()
		close(closing)
		begins.Unlock()
		running.Wait()
		w.Client.Close()
	})
	t.Cleanup(w.close)
	w.Client = New(rdb, timeout, func(_ context.Context, op string, err error) {
		if err == nil {
			t.Error("told of a failure without an error")
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.failed = append(w.failed, op)
	}, func(why error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.told = append(w.told, why != nil)
	}, func(run func(<-chan struct{})) {
		begins.Lock()
		defer begins.Unlock()
		if !over(closing) {
			running.Go(func() { run(closing) })
		}
	})
	return w
}

// answers reports whether the node of a key answers a ping.
func (w *watcher) answers(key string) bool {
	_, err := doNow(context.Background(), w.Client, "ping", key, func(ctx context.Context) (string, error) {
		return w.nodeOf(key).rdb.Ping(ctx).Result()
	})
	return !Unreachable(err)
}

// doNow is Do of a command that does not queue.
func doNow[R any](ctx context.Context, c *Client, op, key string, cmd func(ctx context.Context) (R, error)) (R, error) {
	return DoWithin(ctx, c, Command{Op: op, Key: key, Within: c.Timeout, Now: true}, cmd)
}

func (w *watcher) failures(op string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.failed {
		if f == op {
			n++
		}
	}
	return n
}

func (w *watcher) reported() []bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.told)
}

func (w *watcher) get(ctx context.Context) error {
	_, err := Do(ctx, w.Client, "get", "k", func(ctx context.Context) (string, error) { return w.Redis.Get(ctx, "k").Result() })
	return err
}

// do runs a command that returns err.
func (w *watcher) do(err error) error {
	what := Command{Op: "test", Key: "k", Within: w.Timeout} // which is sent once
	_, got := DoWithin(context.Background(), w.Client, what, func(context.Context) (int, error) { return 0, err })
	return got
}

// mute returns a client of a server that never answers, with the timeouts of go-redis. It is for bubbles: at the end
// the goroutines of the client have their time to end.
func mute(t testing.TB, mutate ...func(*redis.Options)) *redis.Client {
	opt := &redis.Options{Addr: "127.0.0.1:6379", PoolSize: 1000, DisableIdentity: true}
	opt.Dialer = func(context.Context, string, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go func() { // it reads everything and writes nothing
			_, _ = io.Copy(io.Discard, theirs)
			_ = theirs.Close()
		}()
		return ours, nil
	}
	for _, m := range mutate {
		m(opt)
	}
	rdb := redis.NewClient(opt)
	t.Cleanup(func() {
		time.Sleep(time.Minute)
		_ = rdb.Close()
	})
	return rdb
}

// wrapped hides the type of the client, so that it counts as a client that ignores deadlines.
type wrapped struct{ redis.UniversalClient }

// Do returns exactly at the nearer one of its timeout and the end of ctx.
func TestDo_NearerEnd(t *testing.T) {
	t.Parallel()
	const never = time.Hour
	for _, c := range []struct {
		name               string
		deadline, cancelAt time.Duration
		// bounded is when Do returns with a client that observes deadlines.
		bounded time.Duration
		// unbounded is when it returns with other clients, whose replies Do waits for in another
		// goroutine.
		unbounded time.Duration
		// err is what Do returns; context.DeadlineExceeded also means a timeout noticed by the
		// client.
		err error
	}{
		{"timeout", never, never, timeout, timeout, context.DeadlineExceeded},
		{"nearer deadline", 40 * time.Millisecond, never, 40 * time.Millisecond, 40 * time.Millisecond, context.DeadlineExceeded},
		{"later deadline", time.Second, never, timeout, timeout, context.DeadlineExceeded},
		{"cancelled, with a near deadline", 100 * time.Millisecond, 30 * time.Millisecond, 30 * time.Millisecond, 30 * time.Millisecond, context.Canceled},
		{"cancelled in the middle of a command", never, 30 * time.Millisecond, timeout, 30 * time.Millisecond, context.Canceled},
	} {
		for kind, open := range muteKinds() {
			for way, get := range gets {
				runInBubble(t, c.name+", "+kind+", "+way, func(t *testing.T) {
					w := watch(t, open(t), timeout)
					ctx, cancel := context.WithTimeout(t.Context(), c.deadline)
					defer cancel()
					if c.cancelAt != never {
						time.AfterFunc(c.cancelAt, cancel)
					}
					want := c.unbounded
					if kind == "observes deadlines" {
						want = c.bounded
					}
					begun := time.Now()
					err := get(w, ctx)
					took := time.Since(begun)
					if err == nil || took != want || want < timeout && err != c.err {
						t.Errorf("%v after %v, want %v after %v", err, took, c.err, want)
					}
					time.Sleep(timeout)
					if n := w.failures("get"); n != 1 {
						t.Errorf("the command was counted %d times", n)
					}
				})
			}
		}
	}
}

// gets are the functions that send a GET as a reader does, not while the server is away: who has asked before it sends
// may have asked a moment too early.
var gets = map[string]func(w *watcher, ctx context.Context) error{
	"Do": func(w *watcher, ctx context.Context) error {
		_, err := DoWithin(ctx, w.Client, Command{Op: "get", Key: "k", Within: w.Timeout, Again: Always, Spared: true},
			func(ctx context.Context) (string, error) { return w.Redis.Get(ctx, "k").Result() })
		return err
	},
	"Get": func(w *watcher, ctx context.Context) error {
		_, _, err := w.Get(ctx, nil, "k")
		return err
	},
}

// muteKinds are clients of a server that never answers; only one kind observes deadlines.
func muteKinds() map[string]func(t testing.TB) redis.UniversalClient {
	return map[string]func(t testing.TB) redis.UniversalClient{
		"default": func(t testing.TB) redis.UniversalClient { return mute(t) },
		"wrapped": func(t testing.TB) redis.UniversalClient { return wrapped{mute(t)} },
		"observes deadlines": func(t testing.TB) redis.UniversalClient {
			return mute(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		},
	}
}

// Do with a context that has ended sends nothing and counts no failure.
//
//fault:ended-context
func TestDo_EndedContext(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	w := watch(t, rdb, time.Minute)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Do(ctx, w.Client, "test", "k", func(context.Context) (int, error) { t.Error("called"); return 0, nil })
	if err != context.Canceled || w.failures("test") != 0 {
		t.Errorf("%v, counted %d times", err, w.failures("test"))
	}
	if err := gets["Get"](w, ctx); err != context.Canceled {
		t.Errorf("Get: %v", err)
	}
}

// New does not change the options of the user's client, whose hooks see every command.
func TestNew_UserClient(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	before := *rdb.Options()
	var saw []string
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			if cmd.Name() != "hello" {
				saw = append(saw, cmd.Name())
			}
		}
		return nil
	}))
	w := watch(t, rdb, time.Minute)
	_ = w.get(t.Context())
	_, err := Do(t.Context(), w.Client, "set", "k", func(ctx context.Context) ([]redis.Cmder, error) {
		return w.Redis.TxPipelined(ctx, func(p redis.Pipeliner) error { p.Del(ctx, "k"); return nil })
	})
	redistest.Must(t, err)
	if !w.answers("") || !slices.Equal(saw, []string{"get", "multi", "del", "exec", "ping"}) {
		t.Errorf("the hook saw %q", saw)
	}
	after := rdb.Options()
	if after.ContextTimeoutEnabled != before.ContextTimeoutEnabled || after.ReadTimeout != before.ReadTimeout ||
		after.WriteTimeout != before.WriteTimeout || after.MaxRetries != before.MaxRetries ||
		after.PoolSize != before.PoolSize {
		t.Errorf("the options were %+v, and are %+v", before, *after)
	}
}

var errLost = errors.New("connection lost")

// openBreaker opens the breaker, in a bubble. The server does not answer pings.
func (w *watcher) openBreaker() {
	_ = w.do(errLost)
	time.Sleep(timeout)
	synctest.Wait()
}

// loading is the reply of a server that does not serve.
const loading = "LOADING Redis is loading the dataset in memory"

// A breaker opens only after enough silence, however many commands fail in it. Any answer ends a silence. When it is
// open, nothing is sent for a caller who has seen it closed.
func TestBreaker_Opens(t *testing.T) {
	t.Parallel()
	for _, answer := range []error{
		nil, redis.Nil, replyError("NOPERM this user has no permissions"), replyError("OOM command not allowed"),
		replyError("WRONGTYPE Operation"), replyError("READONLY You can't write"), replyError("ERR something"),
	} {
		synctest.Test(t, func(t *testing.T) {
			w := watch(t, mute(t), timeout)
			for range 3 {
				for range 10 {
					if err := w.do(errLost); err != errLost {
						t.Errorf("Do = %v", err)
					}
				}
				time.Sleep(timeout - 1)
				_ = w.do(errLost)
				if w.AnyAway() || w.Refusal("k") != nil {
					t.Fatal("open after less silence than a command may take")
				}
				_ = w.do(answer)
				time.Sleep(10 * timeout)
			}
			w.openBreaker()
			if !w.AnyAway() || !errors.Is(w.Refusal("k"), errLost) || !slices.Equal(w.reported(), []bool{true}) {
				t.Errorf("open %t, Refusal %v, told %v", w.AnyAway(), w.Refusal("k"), w.reported())
			}
			begun := time.Now()
			for way, get := range gets {
				if err := get(w, t.Context()); !errors.Is(err, ErrAway) || time.Since(begun) != 0 {
					t.Errorf("%s: %v after %v", way, err, time.Since(begun))
				}
			}
			if time.Sleep(timeout); w.failures("get") != 0 {
				t.Errorf("%d GETs were sent", w.failures("get"))
			}
		})
	}
}

// A replyError is an error reply of the server.
type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}

// Callers that leave early do not open the breaker of a slow server, nor hide a dead one.
//
//fault:impatient-callers
func TestBreaker_ImpatientCallers(t *testing.T) {
	t.Parallel()
	for kind, open := range muteKinds() {
		runInBubble(t, kind, func(t *testing.T) {
			w := watch(t, open(t), timeout)
			// The server answers, but later than the callers wait.
			var wg sync.WaitGroup
			for range 50 {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
					defer cancel()
					_, err := Do(ctx, w.Client, "slow", "k", func(ctx context.Context) (int, error) {
						time.Sleep(50 * time.Millisecond)
						return 1, ctx.Err()
					})
					if err != context.DeadlineExceeded {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			time.Sleep(time.Second)
			if w.AnyAway() || w.failures("slow") != 0 {
				t.Errorf("open %t after %d failures", w.AnyAway(), w.failures("slow"))
			}
			// A dead server is noticed even if every caller leaves early.
			for range 5 {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
				if err := w.get(ctx); err != context.DeadlineExceeded {
					t.Error(err)
				}
				cancel()
			}
			if w.AnyAway() {
				t.Error("open before the first command is over")
			}
			time.Sleep(timeout)
			if !w.AnyAway() || w.failures("get") != 5 {
				t.Errorf("open %t after %d failures", w.AnyAway(), w.failures("get"))
			}
		})
	}
}

// A breaker closes by itself once the server gives any answer.
func TestBreaker_Closes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		answer string // "" is PONG
		closes bool
	}{
		{"pong", "", true},
		{"a refusal", "NOPERM this user has no permissions to run the 'ping' command", true},
		{"loading", "LOADING Redis is loading the dataset in memory", false},
		{"busy", "BUSY Redis is busy running a script", false},
		{"master down", "MASTERDOWN Link with MASTER is down", false},
	} {
		runInBubble(t, c.name, func(t *testing.T) {
			m, rdb := redistest.StartMini(t)
			w := watch(t, rdb, timeout)
			m.SetError(loading)
			w.openBreaker()
			if !w.AnyAway() {
				t.Fatal("not open")
			}
			m.SetError(c.answer)
			time.Sleep(10 * timeout)
			if w.AnyAway() == c.closes {
				t.Errorf("open %t", w.AnyAway())
			}
			m.SetError("")
			time.Sleep(10 * timeout)
			if w.AnyAway() || w.Refusal("k") != nil || !slices.Equal(w.reported(), []bool{true, false}) {
				t.Fatalf("with the server back: open %t, told %v", w.AnyAway(), w.reported())
			}
		})
	}
}

// A server that goes down and comes back again and again neither blocks the breaker nor makes it report
// a wrong state.
//
//fault:flapping
func TestBreaker_ConcurrentCallers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		w := watch(t, rdb, 5*time.Millisecond)
		var stop atomic.Bool
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for !stop.Load() {
					if w.Refusal("k") == nil {
						_ = w.get(context.Background())
					}
					time.Sleep(100 * time.Microsecond) // wakes all at one instant
				}
			})
		}
		for range 50 {
			opened := len(w.reported())
			m.SetError(loading)
			redistest.Await(t, "open", func() bool { return len(w.reported()) > opened && w.AnyAway() })
			m.SetError("")
			redistest.Await(t, "closed", func() bool { return !w.AnyAway() })
		}
		stop.Store(true)
		wg.Wait()
		redistest.Await(t, "closed for good", func() bool { return !w.AnyAway() && len(w.reported())%2 == 0 })
		for i, open := range w.reported() {
			if open != (i%2 == 0) {
				t.Fatalf("reported %v", w.reported())
			}
		}
	})
}

// Unreachable is true for errors of servers that cannot answer, and false for refusals.
func TestUnreachable(t *testing.T) {
	t.Parallel()
	m, _ := redistest.StartMini(t)
	rdb := redistest.NewMiniClient(t, m, redistest.NoRetry)
	redistest.Must(t, rdb.Ping(t.Context()).Err()) // connected before the errors
	for text, want := range map[string]bool{
		"LOADING Redis is loading the dataset in memory":                     true,
		"BUSY Redis is busy running a script.":                               true,
		"MASTERDOWN Link with MASTER is down":                                true,
		"CLUSTERDOWN The cluster is down":                                    true,
		"TRYAGAIN Multiple keys request during rehashing of slot":            true,
		"ERR max number of clients reached":                                  true,
		"MOVED 866 127.0.0.1:7002":                                           true,
		"ASK 866 127.0.0.1:7002":                                             true,
		"READONLY You can't write against a read only replica.":              false,
		"OOM command not allowed when used memory > 'maxmemory'.":            false,
		"NOPERM this user has no permissions to run the 'get' command":       false,
		"ERR The user executing the script can't run this command":           false,
		"WRONGTYPE Operation against a key holding the wrong kind of value":  false,
		"NOREPLICAS Not enough good replicas to write.":                      false,
		"MISCONF Redis is configured to save RDB snapshots":                  false,
		"NOSCRIPT No matching script.":                                       false,
		"NOAUTH Authentication required.":                                    false,
		"WRONGPASS invalid username-password pair":                           false,
		"EXECABORT Transaction discarded because of previous errors.":        false,
		"CROSSSLOT Keys in request don't hash to the same slot":              false,
		"ERR unknown command":                                                false,
		"BUSYGROUP Consumer Group name already exists":                       false,
		"BUSYKEY Target key name already exists.":                            false,
		"ERR value is not an integer or out of range":                        false,
		"ERR Error running script: LOADING is a word that users write, too.": false,
	} {
		m.SetError(text)
		reply := rdb.Get(t.Context(), "k").Err() // as go-redis returns it
		for _, err := range []error{reply, replyError(text), fmt.Errorf("wrapped: %w", reply)} {
			if got := Unreachable(err); got != want {
				t.Errorf("Unreachable(%v), a %T, = %t", err, err, got)
			}
		}
	}
	for _, err := range []error{
		io.EOF, io.ErrUnexpectedEOF, context.DeadlineExceeded, context.Canceled, redis.ErrClosed, redis.ErrPoolTimeout,
		&net.OpError{Op: "dial", Err: errors.New("connection refused")}, errors.New("anything else"),
	} {
		if !Unreachable(err) {
			t.Errorf("Unreachable(%v) = false", err)
		}
	}
	if Unreachable(nil) || Unreachable(redis.Nil) {
		t.Error("an answer is unreachable")
	}
}

// ScriptsRefused is true for a refusal of the script command itself, and false for one within a
// script.
func TestScriptsRefused(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"NOPERM this user has no permissions to run the 'evalsha' command": true,
		"ERR unknown command 'evalsha', with args beginning with:":         true,
		"ERR The user executing the script can't run this command":         false,
		"NOSCRIPT No matching script. Please use EVAL.":                    false,
		"OOM command not allowed when used memory > 'maxmemory'.":          false,
	} {
		if got := ScriptsRefused(replyError(text)); got != want {
			t.Errorf("ScriptsRefused(%q) = %t", text, got)
		}
	}
	if ScriptsRefused(nil) || ScriptsRefused(io.EOF) || ScriptsRefused(context.DeadlineExceeded) {
		t.Error("what may have been executed counts as refused")
	}
	if !WrongType(replyError("WRONGTYPE Operation against a key")) || WrongType(nil) || WrongType(io.EOF) {
		t.Error("WrongType")
	}
}

// A hook that changes the arguments of a command changes no other command, also when the server
// does not know the script, so that it is sent twice.
func TestScript_HookChangesArguments(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			if strings.HasPrefix(cmd.Name(), "eval") {
				cmd.Args()[3] = "tenant:" + cmd.Args()[3].(string)
			}
		}
		return nil
	}))
	w := watch(t, rdb, time.Minute)
	script := NewScript("return {KEYS[1], ARGV[1]}")
	for _, when := range []string{"unknown", "known"} {
		r := Run(t.Context(), w.Client, Command{Op: "op", Key: "key", Within: w.Timeout}, ScriptCall{script, append(script.Call(1, 1), "key", "arg")},
			func(cmd *redis.Cmd) ([]string, error) { return cmd.StringSlice() })
		if got := r.Value; r.Err != nil || strings.Join(got, " ") != "tenant:key arg" {
			t.Errorf("a script that is %s: %q, %v", when, got, r.Err)
		}
	}
	if n := w.failures("op"); n != 0 {
		t.Errorf("%d failures", n)
	}
}

// A command without an answer is sent again after growing pauses, until the time of one command has passed.
func TestDo_Repeats(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	broken, refused := errors.New("broken"), replyError("ERR refused")
	for what, c := range map[string]struct {
		takes time.Duration   // of each try
		errs  []error         // of the tries; the last one is repeated
		ends  time.Duration   // when ctx ends; 0: never
		at    []time.Duration // when the tries begin
		want  error
		after time.Duration
	}{
		"an answer":         {takes: 3 * ms, errs: []error{nil}, at: []time.Duration{0}, after: 3 * ms},
		"one that comes":    {takes: 3 * ms, errs: []error{broken, broken, nil}, at: []time.Duration{0, 5 * ms, 12 * ms}, after: 15 * ms},
		"a refusal":         {errs: []error{broken, refused}, at: []time.Duration{0, 2 * ms}, want: refused, after: 2 * ms},
		"a client closed":   {errs: []error{redis.ErrClosed}, at: []time.Duration{0}, want: redis.ErrClosed},
		"none":              {errs: []error{broken}, at: []time.Duration{0, 2 * ms, 6 * ms, 14 * ms, 30 * ms, 62 * ms}, want: broken, after: 62 * ms},
		"most of it":        {takes: 88 * ms, errs: []error{broken}, at: []time.Duration{0, 90 * ms}, want: broken, after: 100*ms - 1},
		"nearly all of it":  {takes: 89 * ms, errs: []error{broken}, at: []time.Duration{0}, want: broken, after: 89 * ms},
		"a caller who ends": {errs: []error{broken}, ends: 10 * ms, at: []time.Duration{0, 2 * ms, 6 * ms}, want: broken, after: 10 * ms},
	} {
		runInBubble(t, what, func(t *testing.T) {
			ctx := t.Context()
			if c.ends > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, c.ends)
				defer cancel()
			}
			begun := time.Now()
			var at []time.Duration
			_, rdb := redistest.StartMini(t)
			what := Command{Op: "op", Key: "k", Within: 100 * ms, Again: Always}
			n, err := DoWithin(ctx, watch(t, rdb, time.Second).Client, what, func(ctx context.Context) (int, error) {
				at = append(at, time.Since(begun))
				end, _ := ctx.Deadline()
				if left := (100*ms - time.Since(begun)).Truncate(10 * ms); time.Until(end) != left {
					t.Errorf("after %v the command has %v, want %v", time.Since(begun), time.Until(end), left)
				}
				time.Sleep(min(c.takes, time.Until(end)-1))
				return len(at), c.errs[min(len(at), len(c.errs))-1]
			})
			if n != len(at) || err != c.want || time.Since(begun) != c.after || !slices.Equal(at, c.at) {
				t.Errorf("got the reply of try %d, %v, after %v and tries at %v; want %v after %v and tries at %v",
					n, err, time.Since(begun), at, c.want, c.after, c.at)
			}
		})
	}
}

// A command that was on its way when the breaker opened may still be executed, whatever has opened the breaker.
func TestMayHaveRun_BreakerOpens(t *testing.T) {
	for _, opener := range []error{&net.OpError{Op: "dial"}, redis.ErrPoolTimeout} {
		if MayHaveRun(opener) {
			t.Errorf("%v: a command without a connection was executed", opener)
		}
		if err := fmt.Errorf("%w: %w", ErrAway, opener); !MayHaveRun(err) {
			t.Errorf("%v: the command was not executed", err)
		}
	}
}
