package singlefill_test

import (
	"cmp"
	"context"
	"crypto/sha1"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// Caches. Several in one namespace stand for several processes.

// newCache returns a cache in a new namespace. See newCacheIn.
func newCache[T any](t testing.TB, rdb redis.UniversalClient, opts *singlefill.Options[T]) *singlefill.Cache[T] {
	t.Helper()
	return newCacheIn(t, rdb, redistest.Namespace(t), opts)
}

// newCacheIn returns a cache that lives as long as the test. Timeouts that opts leave open are
// longer than a busy machine makes a command take. At the end every key of the namespace must have
// a TTL.
func newCacheIn[T any](t testing.TB, rdb redis.UniversalClient, namespace string, opts *singlefill.Options[T]) *singlefill.Cache[T] {
	t.Helper()
	c, err := singlefill.New(rdb, namespace, time.Hour, patient(opts))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		checkTTLs(t, rdb, namespace)
	})
	return c
}

// newCaches returns n processes of one namespace, each with its own client.
func newCaches[T any](t testing.TB, m *miniredis.Miniredis, namespace string, n int, opts *singlefill.Options[T]) (caches []*singlefill.Cache[T]) {
	for range n {
		caches = append(caches, newCacheIn(t, redistest.NewMiniClient(t, m), namespace, opts))
	}
	return caches
}

// raw are the options of a cache whose values are stored as they are.
var raw = singlefill.Options[string]{Codec: singlefill.Raw}

func patient[T any](opts *singlefill.Options[T]) *singlefill.Options[T] {
	var p singlefill.Options[T]
	if opts != nil {
		p = *opts
	}
	p.RedisTimeout = cmp.Or(p.RedisTimeout, 5*time.Second)
	p.LockTTL = cmp.Or(p.LockTTL, 20*time.Second)
	p.LoadTimeout = cmp.Or(p.LoadTimeout, time.Minute)
	return &p
}

// checkTTLs fails the test if a key of the namespace would live for ever.
func checkTTLs(t testing.TB, rdb redis.UniversalClient, namespace string) {
	t.Helper()
	ctx := context.Background() // the test's own has ended
	scan := func(ctx context.Context, node redis.Cmdable) error {
		keys := node.Scan(ctx, 0, namespace+":*", 1000).Iterator()
		for keys.Next(ctx) {
			if node.PTTL(ctx, keys.Val()).Val() == -1 {
				t.Errorf("key %.100q has no TTL", keys.Val())
			}
		}
		return keys.Err()
	}
	var err error
	if cluster, ok := rdb.(*redis.ClusterClient); ok {
		err = cluster.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error { return scan(ctx, node) })
	} else {
		err = scan(ctx, rdb)
	}
	if err != nil && !errors.Is(err, redis.ErrClosed) {
		t.Errorf("looking for keys without a TTL: %v", err)
	}
}

// Clients and servers.

// inBubble runs a test with a miniredis in a bubble. Time is fake in it, and stands still while
// anything runs: instants can be compared exactly, and commands take no time unless a test says so.
func inBubble(t *testing.T, run func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		run(t, m, rdb)
	})
}

// userEach is redistest.Each and, beside it, a user who may run no scripts. look may do everything.
func userEach(t *testing.T, run func(t *testing.T, rdb, look redis.UniversalClient)) {
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) { run(t, rdb, rdb) })
	t.Run("no scripts", func(t *testing.T) {
		t.Parallel()
		s := redistest.Start(t)
		run(t, s.Client(t, noScripts(t, s)), s.Admin())
	})
}

// noScripts makes a user of the server who may run no scripts, and makes a client that user.
func noScripts(t testing.TB, s *redistest.Server, more ...string) func(*redis.Options) {
	t.Helper()
	return s.User(t, append([]string{"~*", "&*", "+@all", "-@scripting"}, more...)...)
}

// proxied returns a cache behind a proxy, and one in the same namespace beside it. The server knows
// the scripts.
func proxied(t *testing.T, opts *singlefill.Options[string]) (p *redistest.Proxy, ns string, slow, direct *singlefill.Cache[string], rdb *redis.Client) {
	t.Helper()
	server := redistest.Shared(t)
	rdb = server.Client(t)
	warm := newCache[string](t, rdb, nil)
	_, _ = warm.GetOrLoad(t.Context(), "k", gives("v"))
	_, _ = warm.GetOrLoad(t.Context(), "e", fails[string](errSource))
	p = redistest.NewProxy(t, server.Addr)
	ns = redistest.Namespace(t)
	return p, ns, newCacheIn(t, p.Client(t), ns, opts), newCacheIn(t, rdb, ns, opts), rdb
}

// A hook is called in place of each command; next carries the command out. Pipelines pass.
type hook func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error

func (h hook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := h(ctx, cmd, next)
		if err != nil {
			cmd.SetErr(err)
		}
		return err
	}
}

func (h hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// before is a hook that is called before each command, which fails if do does.
func before(do func(cmd redis.Cmder) error) hook {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if err := do(cmd); err != nil {
			return err
		}
		return next(ctx, cmd)
	}
}

// after is a hook that is called after each command that has succeeded.
func after(do func(cmd redis.Cmder) error) hook {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if err := next(ctx, cmd); err != nil {
			return err
		}
		return do(cmd)
	}
}

// slow is a hook that delays each command.
func slow(d time.Duration) hook {
	return before(func(redis.Cmder) error { time.Sleep(d); return nil })
}

// An outage is a hook that keeps the replies of commands from their callers while it is on.
// Commands without a deadline are the test's, and pass.
type outage struct {
	on      atomic.Bool
	keeps   func(cmd []string) bool // the replies of these commands; nil: of all
	arrives func(cmd []string) bool // the server carries out these commands; nil: none
}

func (o *outage) hook() hook {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		_, bounded := ctx.Deadline()
		if !bounded || !o.on.Load() || o.keeps != nil && !o.keeps(argsOf(cmd)) {
			return next(ctx, cmd)
		}
		if o.arrives != nil && o.arrives(argsOf(cmd)) {
			_ = next(ctx, cmd)
		}
		<-ctx.Done()
		return ctx.Err()
	}
}

func argsOf(cmd redis.Cmder) (args []string) {
	for _, a := range cmd.Args() {
		args = append(args, fmt.Sprint(a))
	}
	return args
}

// isScript matches the calls of a script of the fill lock, by its hash and in full.
func isScript(t testing.TB, name string) func(cmd []string) bool {
	t.Helper()
	text, err := os.ReadFile("internal/filllock/lua/" + name + ".lua")
	if err != nil {
		t.Fatal(err)
	}
	text = append([]byte(wake.Lua), text...)
	hash := fmt.Sprintf("%x", sha1.Sum(text))
	return func(cmd []string) bool {
		return redistest.Command("evalsha", "eval")(cmd) && (cmd[1] == hash || cmd[1] == string(text))
	}
}

// wantCalls checks what the server has executed since ResetCalls, except what the test itself
// sends.
func wantCalls(t testing.TB, server *redistest.Server, what string, want map[string]int64) {
	t.Helper()
	got := server.AllCalls()
	for _, own := range []string{"info", "config|resetstat", "hello"} {
		delete(got, own)
	}
	if !maps.Equal(got, want) {
		t.Errorf("%s: commands %v, want %v", what, got, want)
	}
}

// hitsMayBeLate reports whether the test's client may answer from its own cache, for a moment, what
// was true before a write: counts are not exact then.
func hitsMayBeLate(t *testing.T) bool { return strings.Contains(t.Name()+"/", "/csc/") }

// What is in Redis.

// stored returns what a key holds. It asks by a script, which no client answers from its cache.
func stored(t testing.TB, rdb redis.UniversalClient, key string) (data string, found bool) {
	t.Helper()
	data, err := rdb.Eval(context.Background(), "return redis.call('GET', KEYS[1])", []string{key}).Text()
	if err != nil && !errors.Is(err, redis.Nil) {
		t.Fatal(err)
	}
	return data, err == nil
}

// wantStored checks which value of a Raw cache is in Redis; "" is for none.
func wantStored(t testing.TB, rdb redis.UniversalClient, namespace, key, want string) {
	t.Helper()
	data, found := stored(t, rdb, namespace+":{"+key+"}")
	switch {
	case want == "" && found:
		t.Errorf("%q is in Redis, want nothing", data)
	case want != "" && (len(data) < headerEndAt || data[headerEndAt:] != want):
		t.Errorf("%q is in Redis, want %q", data, want)
	}
}

// wantUnlocked checks that no process holds the fill lock of a key.
func wantUnlocked(t testing.TB, rdb redis.UniversalClient, namespace, key string) {
	t.Helper()
	if record, _ := stored(t, rdb, namespace+":{"+key+"}:lock"); strings.HasPrefix(record, "H") {
		t.Errorf("the fill lock is still held: %q", record)
	}
}

// Where the header of an entry has what Expire changes.
const (
	headerFlagsAt  = 2
	headerRestAt   = 11
	headerRandomAt = 27
	headerEndAt    = 35
)

// putEntry writes an entry as another process would have done.
func putEntry(t testing.TB, look redis.UniversalClient, ns, key string, e entry.Entry, ttl time.Duration) (data string) {
	t.Helper()
	b, err := e.Encode()
	if err == nil {
		err = look.Set(context.Background(), ns+":{"+key+"}", b, ttl).Err()
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// getEntry returns the entry that a key holds.
func getEntry(t testing.TB, look redis.UniversalClient, ns, key string) (data string, e entry.Entry) {
	t.Helper()
	data, _ = stored(t, look, ns+":{"+key+"}")
	e, err := entry.Parse([]byte(data))
	if err != nil {
		t.Fatalf("%s holds no entry: %v", key, err)
	}
	return data, e
}

// awaitSeen waits until the client sees what a key holds: its own cache may be late.
func awaitSeen(t testing.TB, rdb, look redis.UniversalClient, ns, key string) {
	t.Helper()
	redistest.Await(t, "the client sees what is stored under "+key, func() bool {
		data, _ := stored(t, look, ns+":{"+key+"}")
		return rdb.Get(context.Background(), ns+":{"+key+"}").Val() == data
	})
}

// Loaders.

var errSource = errors.New("the source is down")

// gives is a Loader that has an answer at once.
func gives[T any](value T) singlefill.Loader[T] {
	return func(context.Context, string) (T, error) { return value, nil }
}

func fails[T any](err error) singlefill.Loader[T] {
	return func(context.Context, string) (T, error) { var zero T; return zero, err }
}

// takes is a Loader that takes its time.
func takes[T any](d time.Duration, value T, err error) singlefill.Loader[T] {
	return func(context.Context, string) (T, error) { time.Sleep(d); return value, err }
}

// mustNotLoad is the Loader of a call that has to be a hit.
func mustNotLoad[T any](t testing.TB) singlefill.Loader[T] {
	return func(_ context.Context, key string) (T, error) {
		var zero T
		t.Errorf("%q is loaded, want a hit", key)
		return zero, errors.New("loaded")
	}
}

// A source has a Loader whose loads go on until the test says how they end.
type source[T any] struct {
	loads atomic.Int64
	begun chan *loading[T]
	over  chan struct{} // the test is: no Loader must outlive it
}

type loading[T any] struct {
	ctx  context.Context
	key  string
	ends chan ending[T]
}

type ending[T any] struct {
	value T
	err   error
}

// newSource makes a source. Make the caches first: they wait for their loads at the end of the
// test.
func newSource[T any](t testing.TB) *source[T] {
	s := &source[T]{begun: make(chan *loading[T], 100), over: make(chan struct{})}
	t.Cleanup(func() { close(s.over) })
	return s
}

func (s *source[T]) load(ctx context.Context, key string) (T, error) {
	s.loads.Add(1)
	l := &loading[T]{ctx, key, make(chan ending[T], 1)}
	s.begun <- l
	select {
	case e := <-l.ends:
		return e.value, e.err
	case <-s.over:
		var zero T
		return zero, errors.New("the test is over")
	}
}

// next waits for the beginning of a load.
func (s *source[T]) next(t testing.TB) *loading[T] {
	t.Helper()
	return receive(t, "a load begins", s.begun)
}

func (s *source[T]) want(t testing.TB, loads int64) {
	t.Helper()
	if n := s.loads.Load(); n != loads {
		t.Errorf("%d loads, want %d", n, loads)
	}
}

func (l *loading[T]) give(value T)   { l.ends <- ending[T]{value: value} }
func (l *loading[T]) fail(err error) { l.ends <- ending[T]{err: err} }

// A countedSource has a Loader that ends by itself, with value and err, and is counted.
type countedSource struct {
	loads, running, most atomic.Int64 // most: that ran at a time
	takes                time.Duration
	heeds                bool // the Loader ends with its context
	value                string
	err                  error
}

func (s *countedSource) load(ctx context.Context, _ string) (string, error) {
	s.loads.Add(1)
	n := s.running.Add(1)
	for most := s.most.Load(); n > most && !s.most.CompareAndSwap(most, n); most = s.most.Load() {
	}
	defer s.running.Add(-1)
	if !s.heeds {
		time.Sleep(s.takes)
		return s.value, s.err
	}
	select {
	case <-time.After(s.takes):
		return s.value, s.err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// wantLoads counts the loads when all goroutines of the bubble wait.
func (s *countedSource) wantLoads(t testing.TB, what string, want int64) {
	t.Helper()
	synctest.Wait()
	if n := s.loads.Load(); n != want {
		t.Errorf("%s: %d loads, want %d", what, n, want)
	}
}

// Calls.

// A call is a GetOrLoad in a goroutine.
type call[T any] struct {
	answer chan ending[T]
	joined <-chan struct{} // closed when the call waits
}

func goGet[T any](ctx context.Context, c *singlefill.Cache[T], key string, load singlefill.Loader[T]) *call[T] {
	waiting := &waitingContext{Context: ctx, asked: make(chan struct{})}
	a := &call[T]{answer: make(chan ending[T], 1), joined: waiting.asked}
	go func() {
		v, err := c.GetOrLoad(waiting, key, load)
		a.answer <- ending[T]{v, err}
	}()
	return a
}

// A waitingContext tells when its Done is first called, which a GetOrLoad does once it has joined
// the read or the fill of its key.
type waitingContext struct {
	context.Context
	once  sync.Once
	asked chan struct{}
}

func (c *waitingContext) Done() <-chan struct{} {
	c.once.Do(func() { close(c.asked) })
	return c.Context.Done()
}

// waits returns when the call has joined.
func (a *call[T]) waits(t testing.TB) *call[T] {
	t.Helper()
	receive(t, "the call waits", a.joined)
	return a
}

func (a *call[T]) result(t testing.TB) (T, error) {
	t.Helper()
	e := receive(t, "the call returns", a.answer)
	return e.value, e.err
}

func (a *call[T]) want(t testing.TB, value T) {
	t.Helper()
	v, err := a.result(t)
	wantValue(t, v, err, value)
}

// wantErr wants an error that is err itself.
func (a *call[T]) wantErr(t testing.TB, err error) {
	t.Helper()
	if v, got := a.result(t); got != err {
		t.Errorf("got %v, %v; want %v itself", v, got, err)
	}
}

func wantValue[T any](t testing.TB, v T, err error, want T) {
	t.Helper()
	if err != nil || !reflect.DeepEqual(v, want) {
		t.Errorf("got %#v, %v; want %#v", v, err, want)
	}
}

// wantGet calls Get until it returns what is wanted: with client-side caching it may be late.
func wantGet[T any](t testing.TB, c *singlefill.Cache[T], key string, value T, wantErr error) {
	t.Helper()
	var v T
	var err error
	redistest.Await(t, fmt.Sprintf("Get(%.50q) returns %#v, %v", key, value, wantErr), func() bool {
		v, err = c.Get(context.Background(), key)
		return reflect.DeepEqual(v, value) && err == wantErr
	})
}

// An answer is what a GetOrLoadInfo returned, and after how long.
type answer struct {
	value string
	info  singlefill.ValueInfo
	err   error
	took  time.Duration
}

func ask(ctx context.Context, c *singlefill.Cache[string], key string, load singlefill.Loader[string]) answer {
	begun := time.Now()
	v, info, err := c.GetOrLoadInfo(ctx, key, load)
	return answer{v, info, err, time.Since(begun)}
}

// goAsk asks in the background.
func goAsk(ctx context.Context, c *singlefill.Cache[string], key string, load singlefill.Loader[string]) <-chan answer {
	answers := make(chan answer, 1)
	go func() { answers <- ask(ctx, c, key, load) }()
	return answers
}

// want compares with what is wanted. Errors must be the same ones, not only equal.
func (a answer) want(t testing.TB, what string, want answer) {
	t.Helper()
	if a != want {
		t.Errorf("%s: got %+v, want %+v", what, a, want)
	}
}

// getAll asks for n keys at once, and waits for them.
func getAll(ctx context.Context, t testing.TB, c *singlefill.Cache[string], n int, load singlefill.Loader[string]) {
	var callers sync.WaitGroup
	for i := range n {
		callers.Go(func() {
			v, err := c.GetOrLoad(ctx, fmt.Sprint(i), load)
			wantValue(t, v, err, "v")
		})
	}
	callers.Wait()
}

// goClose closes a cache in a goroutine, and returns when the cache refuses calls.
func goClose[T any](t testing.TB, c *singlefill.Cache[T]) (closed <-chan error) {
	t.Helper()
	errs := make(chan error, 1)
	go func() { errs <- c.Close() }()
	redistest.Await(t, "the cache refuses calls", func() bool {
		return c.Delete(context.Background()) == singlefill.ErrClosed
	})
	return errs
}

// receive takes a value that must come.
func receive[V any](t testing.TB, what string, from <-chan V) V {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(15 * time.Second):
		t.Fatalf("not within 15s: %s", what)
		panic("unreachable")
	}
}

// wantElapsed checks how much time has passed since begun, to the nanosecond.
func wantElapsed(t testing.TB, what string, begun time.Time, want time.Duration) {
	t.Helper()
	if d := time.Since(begun); d != want {
		t.Errorf("%s after %v, want %v", what, d, want)
	}
}
