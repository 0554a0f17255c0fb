package singlefill_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha1"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// newCache makes a cache in a namespace of its own. See newCacheIn.
func newCache[T any](t testing.TB, rdb redis.UniversalClient, opts *singlefill.Options[T]) *singlefill.Cache[T] {
	t.Helper()
	return newCacheIn(t, rdb, redistest.Namespace(t), opts)
}

// newCacheIn makes a cache that lives as long as the test; several in one namespace stand for several
// processes. Timeouts that opts leave open are longer than a busy machine makes a command take. At the end no
// key of the namespace may be without a TTL.
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

// stored returns what a key holds now. It asks by a script, which no client answers from a cache of its own.
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
	const headerLen = 35
	data, found := stored(t, rdb, namespace+":{"+key+"}")
	switch {
	case want == "" && found:
		t.Errorf("%q is in Redis, want nothing", data)
	case want != "" && (len(data) < headerLen || data[headerLen:] != want):
		t.Errorf("%q is in Redis, want %q", data, want)
	}
}

// wantUnlocked checks that nobody holds the fill lock of a key.
func wantUnlocked(t testing.TB, rdb redis.UniversalClient, namespace, key string) {
	t.Helper()
	if record, _ := stored(t, rdb, namespace+":{"+key+"}:lock"); strings.HasPrefix(record, "H") {
		t.Errorf("the fill lock is still held: %q", record)
	}
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

// A source is where Loaders load from. Each load stops until the test says how it ends.
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

// newSource makes a source. Make the caches first: they wait for their loads at the end of the test.
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

// gives is a Loader that has an answer at once.
func gives[T any](value T) singlefill.Loader[T] {
	return func(context.Context, string) (T, error) { return value, nil }
}

func fails[T any](err error) singlefill.Loader[T] {
	return func(context.Context, string) (T, error) { var zero T; return zero, err }
}

// mustNotLoad is the Loader of a call that has to be a hit.
func mustNotLoad[T any](t testing.TB) singlefill.Loader[T] {
	return func(_ context.Context, key string) (T, error) {
		var zero T
		t.Errorf("%q is loaded, want a hit", key)
		return zero, errors.New("loaded")
	}
}

// A call is a GetOrLoad that runs by itself.
type call[T any] struct {
	answer  chan ending[T]
	boarded <-chan struct{} // closed when the call waits
}

func goGet[T any](ctx context.Context, c *singlefill.Cache[T], key string, load singlefill.Loader[T]) *call[T] {
	waiting := &waitingContext{Context: ctx, asked: make(chan struct{})}
	a := &call[T]{answer: make(chan ending[T], 1), boarded: waiting.asked}
	go func() {
		v, err := c.GetOrLoad(waiting, key, load)
		a.answer <- ending[T]{v, err}
	}()
	return a
}

// waitingContext tells when somebody waits for its end, which a call of GetOrLoad does once it has a place in
// what is under way for its key.
type waitingContext struct {
	context.Context
	once  sync.Once
	asked chan struct{}
}

func (c *waitingContext) Done() <-chan struct{} {
	c.once.Do(func() { close(c.asked) })
	return c.Context.Done()
}

// waits returns when the call has its place.
func (a *call[T]) waits(t testing.TB) *call[T] {
	t.Helper()
	receive(t, "the call waits", a.boarded)
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

// wantGet asks the cache until it answers as wanted: with client-side caching a Get may be late.
func wantGet[T any](t testing.TB, c *singlefill.Cache[T], key string, value T, wantErr error) {
	t.Helper()
	var v T
	var err error
	redistest.Await(t, fmt.Sprintf("Get(%.50q) answers %#v, %v", key, value, wantErr), func() bool {
		v, err = c.Get(context.Background(), key)
		return reflect.DeepEqual(v, value) && err == wantErr
	})
}

// hitsMayBeLate tells a client whose own cache may answer for a moment what was true before a write: exact
// counts are not to be had there.
func hitsMayBeLate(t *testing.T) bool { return strings.HasSuffix(t.Name(), "/csc") }

type person struct {
	Name  string
	Age   int
	Tags  []string
	Attrs map[string]int
	Boss  *person
}

func newPerson() person {
	return person{"Ann", 42, []string{"a", "b"}, map[string]int{"x": 1}, &person{Name: "Bob"}}
}

func TestValuesComeBackAsTheyWere(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		t.Run("struct", func(t *testing.T) { testRoundTrip(t, rdb, nil, newPerson()) })
		t.Run("pointer", func(t *testing.T) { u := newPerson(); testRoundTrip(t, rdb, nil, &u) })
		t.Run("number", func(t *testing.T) { testRoundTrip(t, rdb, nil, -1.5) })
		t.Run("struct as JSON", func(t *testing.T) {
			testRoundTrip(t, rdb, &singlefill.Options[person]{Codec: singlefill.JSON}, newPerson())
		})
		t.Run("raw string", func(t *testing.T) {
			testRoundTrip(t, rdb, &singlefill.Options[string]{Codec: singlefill.Raw}, "a\x00\xff\r\n")
		})
		t.Run("raw bytes", func(t *testing.T) {
			testRoundTrip(t, rdb, &singlefill.Options[[]byte]{Codec: singlefill.Raw}, bytes.Repeat([]byte{0xc1, 0}, 1<<16))
		})
	})
}

func testRoundTrip[T any](t *testing.T, rdb redis.UniversalClient, opts *singlefill.Options[T], value T) {
	c := newCache(t, rdb, opts)
	v, err := c.GetOrLoad(t.Context(), "loaded", gives(value))
	wantValue(t, v, err, value)
	v, err = c.GetOrLoad(t.Context(), "loaded", mustNotLoad[T](t))
	wantValue(t, v, err, value)
	wantGet(t, c, "loaded", value, nil)
	if err := c.Set(t.Context(), "set", value); err != nil {
		t.Fatal(err)
	}
	v, err = c.GetOrLoad(t.Context(), "set", mustNotLoad[T](t))
	wantValue(t, v, err, value)
	wantGet(t, c, "set", value, nil)
}

func TestGetSaysWhatTheCacheKnows(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := newCache[string](t, rdb, nil)
		if v, err := c.Get(t.Context(), "unknown"); err != singlefill.ErrMiss || v != "" {
			t.Errorf("got %q, %v; want ErrMiss itself", v, err)
		}
		if _, err := c.GetOrLoad(t.Context(), "none", fails[string](singlefill.ErrNotFound)); err != singlefill.ErrNotFound {
			t.Errorf("got %v; want ErrNotFound itself", err)
		}
		wantGet(t, c, "none", "", singlefill.ErrNotFound)
		if err := c.Set(t.Context(), "none", "some"); err != nil {
			t.Fatal(err)
		}
		wantGet(t, c, "none", "some", nil)
		if err := c.Set(t.Context(), "none", "more"); err != nil {
			t.Fatal(err)
		}
		wantGet(t, c, "none", "more", nil)
		if err := c.Delete(t.Context(), "none"); err != nil {
			t.Fatal(err)
		}
		wantGet(t, c, "none", "", singlefill.ErrMiss)
	})
}

func TestDeleteTakesManyKeysAndNone(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.Raw})
		many := 600 // several batches, all nodes of a cluster
		if strings.HasSuffix(t.Name(), "/mini") {
			many = 10 // on a net.Pipe, server and client would both wait for the other to read
		}
		var keys []string
		for i := range many {
			keys = append(keys, fmt.Sprint(i))
		}
		for _, key := range append(keys, "kept") {
			if err := c.Set(t.Context(), key, "v"); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Delete(t.Context()); err != nil {
			t.Errorf("Delete of no keys: %v", err)
		}
		wantStored(t, rdb, ns, keys[0], "v")
		if err := c.Delete(t.Context(), append(keys, "was never there", keys[0])...); err != nil {
			t.Fatal(err)
		}
		for _, key := range keys {
			wantStored(t, rdb, ns, key, "")
		}
		wantStored(t, rdb, ns, "kept", "v")
	})
}

//fault:ended-context
func TestCallsThatCannotBeMadeAreRefusedWithoutACommand(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := newCache[string](t, server.Client(t), nil)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	live := t.Context()

	var err error
	for _, test := range []struct {
		name, want string
		call       func()
	}{
		{"GetOrLoad of no key", "singlefill: key is empty", func() { _, err = c.GetOrLoad(live, "", mustNotLoad[string](t)) }},
		{"Get of no key", "singlefill: key is empty", func() { _, err = c.Get(live, "") }},
		{"Set of no key", "singlefill: key is empty", func() { err = c.Set(live, "", "v") }},
		{"Delete of no key", "singlefill: key is empty", func() { err = c.Delete(live, "k", "") }},
		{"GetOrLoad without a Loader", "singlefill: load is nil", func() { _, err = c.GetOrLoad(live, "k", nil) }},
		{"GetOrLoad cancelled", "context canceled", func() { _, err = c.GetOrLoad(cancelled, "k", mustNotLoad[string](t)) }},
		{"GetOrLoad too late", "context deadline exceeded", func() { _, err = c.GetOrLoad(expired, "k", mustNotLoad[string](t)) }},
		{"Get cancelled", "context canceled", func() { _, err = c.Get(cancelled, "k") }},
		{"Set cancelled", "context canceled", func() { err = c.Set(cancelled, "k", "v") }},
		{"Delete cancelled", "context canceled", func() { err = c.Delete(cancelled, "k") }},
	} {
		server.ResetCalls()
		test.call()
		if err == nil || err.Error() != test.want {
			t.Errorf("%s: got error %v, want %q", test.name, err, test.want)
		}
		wantCalls(t, server, test.name, nil)
	}
}

// wantCalls checks what the server has executed since ResetCalls, looking aside.
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

func TestNewSendsNothing(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr)
	c := newCache[string](t, proxy.Client(t), nil)
	c.Stats()
	if n := proxy.Commands(); n != 0 {
		t.Errorf("New sent %d commands", n)
	}
}

func TestAHitIsOneGET(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := newCache[string](t, server.Client(t), nil)
	_, _ = c.GetOrLoad(t.Context(), "some", gives("v"))
	_, _ = c.GetOrLoad(t.Context(), "none", fails[string](singlefill.ErrNotFound))
	for _, test := range []struct {
		name string
		call func()
	}{
		{"a value", func() { _, _ = c.GetOrLoad(t.Context(), "some", mustNotLoad[string](t)) }},
		{"a remembered not-found", func() { _, _ = c.GetOrLoad(t.Context(), "none", mustNotLoad[string](t)) }},
		{"Get of a value", func() { _, _ = c.Get(t.Context(), "some") }},
		{"Get of nothing", func() { _, _ = c.Get(t.Context(), "unknown") }},
	} {
		server.ResetCalls()
		test.call()
		wantCalls(t, server, test.name, map[string]int64{"get": 1})
	}
}

func TestAMissIsOneGETAndTwoScripts(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr)
	gets := proxy.On(redistest.Command("get"), redistest.Pass)
	scripts := proxy.On(redistest.Command("evalsha"), redistest.Pass)
	c := newCache[string](t, proxy.Client(t), nil)

	if _, err := c.GetOrLoad(t.Context(), "first", gives("v")); err != nil { // the server learns the scripts
		t.Fatal(err)
	}
	if learnt := server.Calls("eval"); learnt != 2 {
		t.Errorf("%d scripts sent in full, want 2", learnt)
	}
	for i, load := range []singlefill.Loader[string]{gives("v"), fails[string](singlefill.ErrNotFound), fails[string](errors.New("no"))} {
		key := fmt.Sprint("miss ", i)
		commands, get, script := proxy.Commands(), gets.Fired(), scripts.Fired()
		if i == 2 {
			script++ // the script that releases without a value is sent in full, once
		}
		_, _ = c.GetOrLoad(t.Context(), key, load)
		get, script, commands = gets.Fired()-get, scripts.Fired()-script, proxy.Commands()-commands
		if i == 2 {
			script, commands = script+1, commands-1
		}
		if get != 1 || script != 2 || commands != 3 {
			t.Errorf("%s: %d GETs and %d scripts in %d commands, want 1, 2, 3", key, get, script, commands)
		}
	}
}

func TestSetAndDeleteAreOneRoundTrip(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := newCache[string](t, server.Client(t), nil)
	server.ResetCalls()
	if err := c.Set(t.Context(), "k", "v"); err != nil {
		t.Error(err)
	}
	wantCalls(t, server, "Set", map[string]int64{"multi": 1, "set": 1, "del": 1, "exec": 1})
	server.ResetCalls()
	if err := c.Delete(t.Context(), "k", "l"); err != nil {
		t.Error(err)
	}
	wantCalls(t, server, "Delete of two keys", map[string]int64{"del": 2})
}

func TestALifeEndsWithinTheTTLAndItsJitter(t *testing.T) {
	t.Parallel()
	const ttl = time.Hour
	const slack = 30 * time.Second // between a write and the look at it
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, test := range []struct {
			name        string
			opts        singlefill.Options[string]
			least, most time.Duration
		}{
			{"a tenth of it by default", singlefill.Options[string]{}, 54 * time.Minute, ttl},
			{"jitter", singlefill.Options[string]{Jitter: 0.5}, ttl / 2, ttl},
			{"no jitter", singlefill.Options[string]{Jitter: -1}, ttl, ttl},
			{"TTLFunc", singlefill.Options[string]{Jitter: -1, TTLFunc: lifeInMinutes}, 7 * time.Minute, 7 * time.Minute},
		} {
			t.Run(test.name, func(t *testing.T) {
				ns := redistest.Namespace(t)
				c := newCacheIn(t, rdb, ns, &test.opts)
				shortest, longest := time.Duration(1<<62), time.Duration(0)
				for i := range 20 {
					for _, name := range []string{"set", "loaded"} {
						key := fmt.Sprint(name, i)
						var err error
						if name == "set" {
							err = c.Set(t.Context(), key, "7")
						} else {
							_, err = c.GetOrLoad(t.Context(), key, gives("7"))
						}
						if err != nil {
							t.Fatal(err)
						}
						life := rdb.PTTL(t.Context(), ns+":{"+key+"}").Val()
						if life > test.most || life < test.least-slack {
							t.Errorf("%s lives %v, want %v to %v", key, life, test.least, test.most)
						}
						shortest, longest = min(shortest, life), max(longest, life)
					}
				}
				if test.least < test.most && longest-shortest < (test.most-test.least)/4 {
					t.Errorf("40 lives from %v to %v: hardly spread", shortest, longest)
				}
			})
		}
	})
}

func lifeInMinutes(_, v string) time.Duration {
	var n int
	_, _ = fmt.Sscan(v, &n)
	return time.Duration(n) * time.Minute
}

func TestSetOfAValueNotToBeKeptRemovesTheOldOne(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.Raw, TTLFunc: lifeInMinutes})
		for _, value := range []string{"7", "0", "7", "-1"} {
			if err := c.Set(t.Context(), "k", value); err != nil {
				t.Fatal(err)
			}
			if value == "7" {
				wantStored(t, rdb, ns, "k", "7")
			} else {
				wantStored(t, rdb, ns, "k", "")
			}
		}
	})
}

func TestSetOfAValueThatCannotBeEncodedChangesNothing(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	c := newCache[any](t, rdb, nil)
	if err := c.Set(t.Context(), "k", "old"); err != nil {
		t.Fatal(err)
	}
	if err := c.Set(t.Context(), "k", func() {}); err == nil {
		t.Error("Set of a func succeeds")
	}
	wantGet[any](t, c, "k", "old", nil)
}

//fault:bad-bytes
func TestBytesThatAreNoEntryAreAMiss(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		whole := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.Raw})
		if err := whole.Set(t.Context(), "whole", "some value"); err != nil {
			t.Fatal(err)
		}
		entry, _ := stored(t, rdb, ns+":{whole}")
		garbage := map[string]string{
			"nothing":      "",
			"text":         "some text of somebody else, long enough for a header",
			"short":        entry[:20],
			"truncated":    entry[:len(entry)-1],
			"overlong":     entry + "x",
			"not msgpack":  entry, // of a cache with another codec
			"other format": entry[:1] + "\x02" + entry[2:],
		}
		for name, data := range garbage {
			t.Run(name, func(t *testing.T) {
				c := newCacheIn[int](t, rdb, ns+name, nil)
				put := func() {
					if err := rdb.Set(t.Context(), ns+name+":{k}", data, time.Hour).Err(); err != nil {
						t.Fatal(err)
					}
				}
				put()
				if _, err := c.Get(t.Context(), "k"); err != singlefill.ErrMiss {
					t.Errorf("Get: %v, want ErrMiss", err)
				}
				v, err := c.GetOrLoad(t.Context(), "k", gives(7))
				wantValue(t, v, err, 7)
				wantGet(t, c, "k", 7, nil)
				if n := c.Stats().BadValues; n < 2 {
					t.Errorf("%d bad values counted, want at least 2", n)
				}
			})
		}
		t.Run("of another type", func(t *testing.T) {
			c := newCacheIn[int](t, rdb, ns+"list", nil)
			for _, key := range []string{":{k}", ":{k}:lock"} {
				if err := rdb.RPush(t.Context(), ns+"list"+key, "a").Err(); err != nil {
					t.Fatal(err)
				}
			}
			v, err := c.GetOrLoad(t.Context(), "k", gives(7))
			wantValue(t, v, err, 7)
			wantGet(t, c, "k", 7, nil)
		})
	})
}

func TestCloseEndsEverythingButStats(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		c := newCache[string](t, rdb, nil)
		if err := c.Set(t.Context(), "k", "v"); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(c.Close(), c.Close()); err != nil {
			t.Errorf("Close twice: %v", err)
		}
		ctx := t.Context()
		_, get := c.Get(ctx, "k")
		_, load := c.GetOrLoad(ctx, "k", mustNotLoad[string](t))
		for name, err := range map[string]error{
			"Get": get, "GetOrLoad": load, "Set": c.Set(ctx, "k", "v"), "Delete": c.Delete(ctx, "k"), "Delete of nothing": c.Delete(ctx),
		} {
			if err != singlefill.ErrClosed {
				t.Errorf("%s after Close: %v, want ErrClosed itself", name, err)
			}
		}
		if s := c.Stats(); s != (singlefill.Stats{}) {
			t.Errorf("%+v, want nothing counted", s)
		}
		if err := rdb.Ping(ctx).Err(); err != nil {
			t.Errorf("Close has closed the client: %v", err)
		}
	})
}

// TestCallsThatCameBeforeCloseHaveTheLoadThatItWaitsFor: also one that came during the read before it.
func TestCallsThatCameBeforeCloseHaveTheLoadThatItWaitsFor(t *testing.T) {
	t.Parallel()
	proxy := redistest.NewProxy(t, redistest.Shared(t).Addr)
	c := newCache[string](t, proxy.Client(t), nil)
	src := newSource[string](t)
	read := proxy.On(redistest.Command("get"), redistest.HoldReply).Times(1)
	first := goGet(t.Context(), c, "k", src.load)
	receive(t, "the read is answered", read.Hit())
	second := goGet(t.Context(), c, "k", src.load).waits(t)
	closed := make(chan error, 1)
	go func() { closed <- c.Close() }()
	redistest.Await(t, "the cache is being closed", func() bool {
		return c.Delete(t.Context()) == singlefill.ErrClosed
	})
	read.Release()
	src.next(t).give("v")
	first.want(t, "v")
	second.want(t, "v")
	if err := receive(t, "Close returns", closed); err != nil {
		t.Errorf("Close: %v", err)
	}
	src.want(t, 1)
}

func TestStatsAreExact(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		if hitsMayBeLate(t) {
			return
		}
		c := newCache[any](t, rdb, nil)
		src := newSource[any](t)
		ctx := t.Context()

		_, _ = c.Get(ctx, "a") // a miss
		first := goGet(ctx, c, "a", src.load)
		load := src.next(t)
		if n := c.Stats().Loading; n != 1 {
			t.Errorf("%d loading, want 1", n)
		}
		second := goGet(ctx, c, "a", src.load).waits(t)
		load.give("v")
		first.want(t, "v")
		second.want(t, "v")

		_, _ = c.GetOrLoad(ctx, "none", fails[any](singlefill.ErrNotFound))
		_, _ = c.GetOrLoad(ctx, "none", mustNotLoad[any](t)) // a hit
		_, _ = c.GetOrLoad(ctx, "b", fails[any](errors.New("no")))
		_, _ = c.GetOrLoad(ctx, "b", func(context.Context, string) (any, error) { panic("no") })
		_, _ = c.GetOrLoad(ctx, "b", gives[any](func() {})) // cannot be encoded

		fenced := goGet(ctx, c, "b", src.load)
		load = src.next(t)
		if err := c.Set(ctx, "b", "w"); err != nil {
			t.Fatal(err)
		}
		load.give("v")
		fenced.want(t, "v")
		_ = c.Close()

		want := singlefill.Stats{
			Hits: 1, Misses: 8, Shared: 1, Loads: 6, LoadsNotFound: 1, LoadErrors: 2, LoadPanics: 1,
			Stored: 2, StoreErrors: 1, Fenced: 1,
		}
		if got := c.Stats(); got != want {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
	})
}

// events records what a Trace is told.
type events struct {
	mu   sync.Mutex
	seen []string
}

func (e *events) add(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seen = append(e.seen, fmt.Sprintf(format, args...))
}

// want compares without regard to the order and forgets.
func (e *events) want(t testing.TB, what string, want ...string) {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	slices.Sort(want)
	slices.Sort(e.seen)
	if !slices.Equal(e.seen, want) {
		t.Errorf("%s: traced %q, want %q", what, e.seen, want)
	}
	e.seen = nil
}

type traceKey struct{}

func (e *events) trace() *singlefill.Trace {
	return &singlefill.Trace{
		Hit:  func(_ context.Context, key string) { e.add("hit %s", key) },
		Miss: func(_ context.Context, key string) { e.add("miss %s", key) },
		LoadStart: func(ctx context.Context, key string) context.Context {
			e.add("start %s", key)
			return context.WithValue(ctx, traceKey{}, "by LoadStart")
		},
		LoadDone: func(_ context.Context, i singlefill.LoadInfo) {
			e.add("done %s %v, store error %t, stored %t, fenced %t, unlocked %t", i.Key, i.Err, i.StoreErr != nil, i.Stored, i.Fenced, i.Unlocked)
		},
		WaitDone:       func(_ context.Context, i singlefill.WaitInfo) { e.add("waited %s, polled %t", i.Key, i.Polls > 0) },
		RedisError:     func(_ context.Context, op string, err error) { e.add("redis %s", op) },
		BadValue:       func(_ context.Context, key string, err error) { e.add("bad %s", key) },
		BreakerChanged: func(open bool) { e.add("breaker %t", open) },
	}
}

func TestATraceIsToldOnceOfEach(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		if hitsMayBeLate(t) {
			return
		}
		ns := redistest.Namespace(t)
		ctx := t.Context()
		traced := func(t *testing.T, run func(c *singlefill.Cache[string], src *source[string]), want ...string) {
			t.Helper()
			var e events
			c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Trace: e.trace()})
			run(c, newSource[string](t))
			_ = c.Close() // LoadDone may come later than the answer
			e.want(t, t.Name(), want...)
		}
		t.Run("load", func(t *testing.T) {
			traced(t, func(c *singlefill.Cache[string], _ *source[string]) {
				_, _ = c.GetOrLoad(ctx, "a", func(ctx context.Context, key string) (string, error) {
					if ctx.Value(traceKey{}) != "by LoadStart" {
						t.Error("the Loader's context is not the one of LoadStart")
					}
					return "v", nil
				})
			}, "start a", "done a <nil>, store error false, stored true, fenced false, unlocked false", "miss a")
		})
		t.Run("hit", func(t *testing.T) {
			traced(t, func(c *singlefill.Cache[string], _ *source[string]) {
				_, _ = c.GetOrLoad(ctx, "a", mustNotLoad[string](t))
				_, _ = c.Get(ctx, "a")
			}, "hit a", "hit a")
		})
		t.Run("Get of nothing", func(t *testing.T) {
			traced(t, func(c *singlefill.Cache[string], _ *source[string]) { _, _ = c.Get(ctx, "unknown") }, "miss unknown")
		})
		t.Run("failure", func(t *testing.T) {
			traced(t, func(c *singlefill.Cache[string], _ *source[string]) {
				_, _ = c.GetOrLoad(ctx, "b", fails[string](errors.New("no")))
			}, "start b", "done b no, store error false, stored false, fenced false, unlocked false", "miss b")
		})
		t.Run("delete during a load", func(t *testing.T) {
			traced(t, func(c *singlefill.Cache[string], src *source[string]) {
				a := goGet(ctx, c, "b", src.load)
				load := src.next(t)
				_ = c.Delete(ctx, "b")
				load.give("v")
				a.want(t, "v")
			}, "start b", "done b <nil>, store error false, stored false, fenced true, unlocked false", "miss b")
		})
		t.Run("bad bytes", func(t *testing.T) {
			if err := rdb.Set(ctx, ns+":{c}", "garbage", time.Hour).Err(); err != nil {
				t.Fatal(err)
			}
			traced(t, func(c *singlefill.Cache[string], _ *source[string]) { _, _ = c.GetOrLoad(ctx, "c", gives("v")) },
				"bad c", "start c", "done c <nil>, store error false, stored true, fenced false, unlocked false", "miss c")
		})
	})
}

func TestAWaitForAnotherProcessIsTracedOnce(t *testing.T) {
	t.Parallel()
	server := redistest.Shared(t)
	proxy := redistest.NewProxy(t, server.Addr)
	asked := proxy.On(isScript(t, "get_or_lock"), redistest.HoldReply)
	ns := redistest.Namespace(t)
	var e events
	there := newCacheIn[string](t, server.Client(t), ns, nil)
	here := newCacheIn(t, proxy.Client(t), ns, &singlefill.Options[string]{Trace: e.trace()})
	src := newSource[string](t)

	loads := goGet(t.Context(), there, "k", src.load)
	load := src.next(t)
	waits := goGet(t.Context(), here, "k", src.load)
	receive(t, "the waiter finds the lock held", asked.Hit())
	asked.Release()
	load.give("v")
	loads.want(t, "v")
	waits.want(t, "v")
	_ = here.Close()
	e.want(t, "a wait", "waited k, polled true", "miss k")
	if s := here.Stats(); s.Waits != 1 || s.Misses != 1 || s.Shared != 0 || s.Loads != 0 {
		t.Errorf("%+v, want one wait and one miss", s)
	}
	src.want(t, 1)
}

// isScript matches the calls of a script of the fill lock, by its hash and in full.
func isScript(t testing.TB, name string) func(cmd []string) bool {
	t.Helper()
	text, err := os.ReadFile("internal/fill/lua/" + name + ".lua")
	if err != nil {
		t.Fatal(err)
	}
	hash := fmt.Sprintf("%x", sha1.Sum(text))
	return func(cmd []string) bool {
		return redistest.Command("evalsha", "eval")(cmd) && (cmd[1] == hash || cmd[1] == string(text))
	}
}

func TestTraceFunctionsAreOptional(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	ns := redistest.Namespace(t)
	c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Trace: &singlefill.Trace{}})
	if err := rdb.Set(t.Context(), ns+":{k}", "garbage", time.Hour).Err(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		v, err := c.GetOrLoad(t.Context(), "k", gives("v"))
		wantValue(t, v, err, "v")
	}
	_ = rdb.Close()
	for range 6 {
		_ = c.Set(t.Context(), "k", "v")
	}
	v, err := c.GetOrLoad(t.Context(), "k", gives("w"))
	wantValue(t, v, err, "w")
}

// TestABadValueIsTracedWithAContextThatDoesNotEnd: what writes it down may take longer than the caller stays.
func TestABadValueIsTracedWithAContextThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	rdb := redistest.Shared(t).Client(t)
	ns := redistest.Namespace(t)
	type tenant struct{}
	var bad []context.Context
	c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Trace: &singlefill.Trace{
		BadValue: func(ctx context.Context, _ string, _ error) { bad = append(bad, ctx) },
	}})
	if err := rdb.Set(t.Context(), ns+":{k}", "garbage", time.Hour).Err(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), tenant{}, "t"), time.Hour)
	defer cancel()
	if _, err := c.Get(ctx, "k"); err != singlefill.ErrMiss {
		t.Fatal(err)
	}
	v, err := c.GetOrLoad(ctx, "k", gives("v"))
	wantValue(t, v, err, "v")
	if err := c.Close(); err != nil || len(bad) < 2 {
		t.Fatalf("%v, %d bad values", err, len(bad))
	}
	for _, ctx := range bad {
		if ctx.Done() != nil || ctx.Value(tenant{}) != "t" {
			t.Errorf("%v", ctx)
		}
	}
}

func TestAPanickingTraceDoesNotHangOtherCallers(t *testing.T) {
	t.Parallel()
	rdb := redistest.Shared(t).Client(t)
	ns := redistest.Namespace(t)
	bad := make(chan struct{})
	goOn := make(chan struct{})
	var once sync.Once
	c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{Trace: &singlefill.Trace{
		BadValue: func(context.Context, string, error) {
			once.Do(func() {
				close(bad)
				<-goOn
				panic("a trace function")
			})
		},
	}})
	if err := rdb.Set(t.Context(), ns+":{k}", "garbage", time.Hour).Err(); err != nil {
		t.Fatal(err)
	}
	panicked := make(chan any, 1)
	go func() {
		defer func() { panicked <- recover() }()
		_, _ = c.GetOrLoad(t.Context(), "k", gives("v"))
	}()
	receive(t, "bad bytes are traced", bad)
	joins := goGet(t.Context(), c, "k", gives("v")).waits(t)
	close(goOn)
	if p := receive(t, "the caller is gone", panicked); p != "a trace function" {
		t.Errorf("panic of the call: %v", p)
	}
	joins.want(t, "v")
	goGet(t.Context(), c, "k", mustNotLoad[string](t)).want(t, "v")
}
