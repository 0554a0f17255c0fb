package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
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
	close  func() // ends the background work; may be called again
	mu     sync.Mutex
	failed map[string]int // how often, by op; protected by mu
	told   []bool         // of the breaker; protected by mu
}

func watch(t testing.TB, rdb redis.UniversalClient, timeout time.Duration) *watcher {
	w, closing := &watcher{failed: make(map[string]int)}, make(chan struct{})
	w.close = sync.OnceFunc(func() {
		close(closing)
		w.Client.Close()
	})
	t.Cleanup(w.close)
	w.Client = New(rdb, timeout, func(_ context.Context, op string, err error) {
		if err == nil {
			t.Error("told of a failure without an error")
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.failed[op]++
	}, func(why error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.told = append(w.told, why != nil)
	}, func(run func(<-chan struct{})) { go run(closing) })
	return w
}

// unwatched returns a Client that watches no server, as that of a lock, and reports nothing.
func unwatched(rdb redis.UniversalClient, timeout time.Duration) *Client {
	return New(rdb, timeout, func(context.Context, string, error) {}, nil, nil)
}

// read sends a GET.
func (w *watcher) read(ctx context.Context) (string, error) { return w.Redis.Get(ctx, "k").Result() }

// doNow is Do of a command that does not queue.
func doNow[R any](ctx context.Context, c *Client, op, key string, cmd func(ctx context.Context) (R, error)) (R, error) {
	return DoWithin(ctx, c, Command{Op: op, Key: key, Within: c.Timeout, Now: true}, cmd)
}

func (w *watcher) failures(op string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failed[op]
}

func (w *watcher) reported() []bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.told)
}

func (w *watcher) get(ctx context.Context) error {
	_, err := Do(ctx, w.Client, "get", "k", w.read)
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

// Do and Get return exactly at the nearer one of their timeout and the end of the context, but a client that observes
// deadlines notices a cancellation only with the reply.
func TestDo_NearerEnd(t *testing.T) {
	t.Parallel()
	const never = time.Hour
	for name, c := range map[string]struct {
		deadline, cancelAt time.Duration
		err                error // of the context
	}{
		"timeout":                         {never, never, nil},
		"nearer deadline":                 {40 * time.Millisecond, never, context.DeadlineExceeded},
		"later deadline":                  {time.Second, never, nil},
		"cancelled, with a near deadline": {100 * time.Millisecond, 30 * time.Millisecond, context.Canceled},
		"cancelled":                       {never, 30 * time.Millisecond, context.Canceled},
	} {
		eachGet(t, name, func(t *testing.T, kind string, rdb redis.UniversalClient, get getFunc) {
			w := watch(t, rdb, timeout)
			ctx, cancel := context.WithTimeout(t.Context(), c.deadline)
			defer cancel()
			time.AfterFunc(c.cancelAt, cancel)
			want := min(timeout, c.deadline, c.cancelAt)
			if kind == bounded && c.deadline > timeout {
				want = timeout
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

type getFunc func(w *watcher, ctx context.Context) error

// gets are the functions that send a GET as a reader does, not while the server is away: who has asked before it sends
// may have asked a moment too early.
var gets = map[string]getFunc{
	"Do": func(w *watcher, ctx context.Context) error {
		what := Command{Op: "get", Key: "k", Within: w.Timeout, Again: Always, Spared: true}
		_, err := DoWithin(ctx, w.Client, what, w.read)
		return err
	},
	"Get": func(w *watcher, ctx context.Context) error {
		_, _, err := w.Get(ctx, nil, "k")
		return err
	},
}

// bounded is the kind of clients that observe deadlines.
const bounded = "observes deadlines"

// muteKinds are clients of a server that never answers.
var muteKinds = map[string]func(t testing.TB) redis.UniversalClient{
	"default": func(t testing.TB) redis.UniversalClient { return mute(t) },
	"wrapped": func(t testing.TB) redis.UniversalClient { return &wrapped{mute(t)} },
	bounded: func(t testing.TB) redis.UniversalClient {
		return mute(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	},
}

// eachGet runs a subtest in a bubble for each kind of client and each way to send a GET.
func eachGet(t *testing.T, name string, run func(t *testing.T, kind string, rdb redis.UniversalClient, get getFunc)) {
	for kind, open := range muteKinds {
		for way, get := range gets {
			runInBubble(t, name+"/"+kind+"/"+way, func(t *testing.T) { run(t, kind, open(t), get) })
		}
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
	before := fmt.Sprintf("%+v", *rdb.Options())
	var saw []string
	noteTrips(rdb, func(cmds []redis.Cmder) {
		for _, cmd := range cmds {
			saw = append(saw, cmd.Name())
		}
	})
	w := watch(t, rdb, time.Minute)
	_ = w.get(t.Context())
	_, err := Do(t.Context(), w.Client, "set", "k", func(ctx context.Context) ([]redis.Cmder, error) {
		return w.Redis.TxPipelined(ctx, func(p redis.Pipeliner) error { p.Del(ctx, "k"); return nil })
	})
	redistest.Must(t, err)
	redistest.Must(t, w.node.server.Ping(t.Context(), "", false))
	if want := []string{"get", "multi", "del", "exec", "ping"}; !slices.Equal(saw, want) {
		t.Errorf("the hook saw %q, want %q", saw, want)
	}
	if after := fmt.Sprintf("%+v", *rdb.Options()); after != before {
		t.Errorf("the options were %s, and are %s", before, after)
	}
}

// noteTrips calls note before each round trip of a client, but for the HELLO of a connection.
func noteTrips(rdb *redis.Client, note func(cmds []redis.Cmder)) {
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		if cmds[0].Name() != "hello" {
			note(cmds)
		}
		return nil
	}))
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
	for kind, open := range muteKinds {
		runInBubble(t, kind, func(t *testing.T) {
			w := watch(t, open(t), timeout)
			impatient := func(call func(ctx context.Context) error) {
				ctx, cancel := context.WithTimeout(t.Context(), timeout/15)
				defer cancel()
				if err := call(ctx); err != context.DeadlineExceeded {
					t.Error(err)
				}
			}
			var wg sync.WaitGroup
			for range 50 {
				wg.Go(func() {
					impatient(func(ctx context.Context) error {
						_, err := Do(ctx, w.Client, "slow", "k", func(ctx context.Context) (int, error) {
							time.Sleep(timeout / 3)
							return 1, ctx.Err()
						})
						return err
					})
				})
			}
			wg.Wait()
			if time.Sleep(time.Second); w.AnyAway() || w.failures("slow") != 0 {
				t.Errorf("open %t after %d failures", w.AnyAway(), w.failures("slow"))
			}
			for range 5 { // from here on nothing is answered
				impatient(w.get)
			}
			if w.AnyAway() {
				t.Error("open before the first command is over")
			}
			if time.Sleep(timeout); !w.AnyAway() || w.failures("get") != 5 {
				t.Errorf("open %t after %d failures", w.AnyAway(), w.failures("get"))
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
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for ctx.Err() == nil {
					_ = gets["Get"](w, t.Context())
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
		stop()
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
		"WRONGTYPE Operation against a key holding the wrong kind of value":  false,
		"NOREPLICAS Not enough good replicas to write.":                      false,
		"MISCONF Redis is configured to save RDB snapshots":                  false,
		"NOSCRIPT No matching script.":                                       false,
		"NOAUTH Authentication required.":                                    false,
		"EXECABORT Transaction discarded because of previous errors.":        false,
		"CROSSSLOT Keys in request don't hash to the same slot":              false,
		"ERR unknown command":                                                false,
		"BUSYGROUP Consumer Group name already exists":                       false,
		"BUSYKEY Target key name already exists.":                            false,
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
	for err, want := range map[error]bool{
		io.EOF: true, io.ErrUnexpectedEOF: true, context.DeadlineExceeded: true, context.Canceled: true,
		redis.ErrClosed: true, redis.ErrPoolTimeout: true, errors.New("anything else"): true,
		&net.OpError{Op: "dial", Err: errors.New("connection refused")}: true,
		nil: false, redis.Nil: false, // an answer
	} {
		if got := Unreachable(err); got != want {
			t.Errorf("Unreachable(%v) = %t", err, got)
		}
	}
}

// ScriptsRefused is true for a refusal of the script command itself, and false for what may have been executed.
func TestScriptsRefused(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]bool{
		replyError("NOPERM this user has no permissions to run the 'evalsha' command"): true,
		replyError("ERR unknown command 'evalsha', with args beginning with:"):         true,
		replyError("ERR The user executing the script can't run this command"):         false,
		replyError("NOSCRIPT No matching script. Please use EVAL."):                    false,
		replyError("OOM command not allowed when used memory > 'maxmemory'."):          false,
		io.EOF: false, context.DeadlineExceeded: false, nil: false,
	} {
		if got := ScriptsRefused(err); got != want {
			t.Errorf("ScriptsRefused(%v) = %t", err, got)
		}
	}
	if !WrongType(replyError("WRONGTYPE Operation against a key")) || WrongType(nil) || WrongType(io.EOF) {
		t.Error("WrongType")
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
			ctx, cancel := context.WithTimeout(t.Context(), cmp.Or(c.ends, time.Hour))
			defer cancel()
			begun := time.Now()
			var at []time.Duration
			_, rdb := redistest.StartMini(t)
			what := Command{Op: "op", Key: "k", Within: 100 * ms, Again: Always}
			n, err := DoWithin(ctx, watch(t, rdb, time.Second).Client, what, func(ctx context.Context) (int, error) {
				at = append(at, time.Since(begun))
				end, _ := ctx.Deadline()
				if left := 100*ms - time.Since(begun); time.Until(end) != left {
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

// What fails while the server is away fails at once.
func TestDo_FailsWhileAway(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := watch(t, mute(t), timeout)
		_ = w.get(t.Context())
		time.Sleep(time.Millisecond) // the line looks at the same time
		begun := time.Now()
		_, err := Do(t.Context(), w.Client, "test", "k", func(context.Context) (int, error) { return 0, errLost })
		if took := time.Since(begun); err != errLost || took > 0 || !w.AnyAway() {
			t.Errorf("%v after %v; away: %t", err, took, w.AnyAway())
		}
	})
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
