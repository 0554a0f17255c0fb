package singlefill_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// The multi-process tests run one role, a process that uses a cache. The test gives it orders and it answers
// with reports, each a line of JSON. Whatever an order starts goes on while others are carried out.

const cacheUserRole = "cache user"

func init() { redistest.Role(cacheUserRole, runCacheUser) }

// A config says what cache a process is to make. Times that are zero are patient: no stall of the machine
// that runs the tests makes a command or a lock time out.
type config struct {
	Name      string // of the process
	Direct    bool   // without a proxy: such a process can be given more work, and no waiting can be seen
	Addr      string // of the proxy, or of Redis
	Tally     string // of Redis: for what the tests count; default: the fleet's
	Namespace string

	LockTTL, LoadTimeout, RedisTimeout, NotFoundTTL     time.Duration
	TTL, StaleWhileRevalidate, StaleIfError, RetryAfter time.Duration

	EarlyRefresh  float64
	MaxFleetLoads int
	Outage        bool // Redis is going to fail: what follows from that is nothing to tell

	PoolSize int
}

const (
	defaultTTL          = 10 * time.Minute
	patientLockTTL      = 30 * time.Second
	patientLoadTimeout  = 60 * time.Second
	patientRedisTimeout = 9 * time.Second
)

func (c config) options() *singlefill.Options[string] {
	return &singlefill.Options[string]{
		LockTTL:      cmp.Or(c.LockTTL, patientLockTTL),
		LoadTimeout:  cmp.Or(c.LoadTimeout, patientLoadTimeout),
		RedisTimeout: cmp.Or(c.RedisTimeout, patientRedisTimeout),
		NotFoundTTL:  c.NotFoundTTL,

		StaleWhileRevalidate: c.StaleWhileRevalidate,
		StaleIfError:         c.StaleIfError,
		RetryAfter:           c.RetryAfter,
		EarlyRefresh:         c.EarlyRefresh,
		MaxFleetLoads:        c.MaxFleetLoads,
	}
}

// A plan is what a Loader does, in the order of the fields, before it returns its value.
type plan struct {
	Source   bool          // the value is what the source says, not one of the load's own
	Sleep    time.Duration // take so long
	Block    bool          // wait for the order to release or, one load for each, to pass; or for ctx
	Deaf     bool          // with Block: do not mind ctx
	Fail     string        // return an error of that text; with Source: only while the source is sourceDown
	Panic    string        // panic with that text
	NotFound bool          // return ErrNotFound
}

// sourceDown is what a source says that fails.
const sourceDown = "down"

// An order is what the test tells a process to do. Tag names what is begun by it.
type order struct {
	Op    string
	Tag   string `json:",omitempty"`
	Key   string `json:",omitempty"`
	Value string `json:",omitempty"`
	N     int    `json:",omitempty"` // how many goroutines, or rounds
	Keys  int    `json:",omitempty"` // how many keys
	Start bool   `json:",omitempty"` // the goroutines wait for an order to start
	Plan  plan   `json:",omitzero"`

	Every  time.Duration `json:",omitempty"` // pause before each call
	Config config        `json:",omitzero"`
}

// A report is what a process tells the test.
//
//	done Tag     all calls of Tag have returned, with Outcomes
//	tally Tag    Outcomes, Counts and Overlaps of Tag so far
//	begun Tag    a Loader of Tag begins, Nth in the fleet for Key, to load Value, at At by the server's clock
//	ended Tag    and is about to return
//	unlocked     a Loader ran without the fleet's lock, which no test here gives cause for
//	trouble      a command failed, with Err
//	Op Tag       the order has been carried out
type report struct {
	Event, Tag string
	Key, Value string           `json:",omitempty"`
	Err        string           `json:",omitempty"` // of the order
	Nth        int              `json:",omitempty"`
	At         time.Time        `json:",omitzero"`
	Outcomes   []countedOutcome `json:",omitempty"`
	Stats      singlefill.Stats `json:",omitzero"`
	Pool       redis.PoolStats  `json:",omitzero"`
	Counts     []int64          `json:",omitempty"` // of calls that have returned, by goroutine
	Overlaps   int64            `json:",omitempty"` // loads begun while another one of this process ran
}

// An outcome is what one call has returned.
type outcome struct{ Kind, Text string }

type countedOutcome struct {
	outcome
	N int
}

// Kinds of outcomes.
const (
	gotValue    = "value"
	gotItself   = "the loader's error itself"
	gotRemote   = "a RemoteError"
	gotPanic    = "a PanicError"
	gotNotFound = "ErrNotFound"
	gotMiss     = "ErrMiss"
	gotClosed   = "ErrClosed"
	gotDeadline = "DeadlineExceeded"
	gotError    = "another error"
	gotStale    = "a stale value"
)

// gotStaleFor is the kind of a stale value that is returned because of an error of that kind.
func gotStaleFor(kind string) string { return gotStale + ", for " + kind }

func staleOutcomeOf(key, v string, info singlefill.ValueInfo, err, own error) outcome {
	switch {
	case err != nil || !info.Stale:
		return outcomeOf(key, v, err, own)
	case info.Err == nil:
		return outcome{gotStale, v}
	}
	why := outcomeOf(key, "", info.Err, own)
	return outcome{gotStaleFor(why.Kind), v + ": " + why.Text}
}

func outcomeOf(key, v string, err, own error) outcome {
	var remote *singlefill.RemoteError
	var panicked *singlefill.PanicError
	switch {
	case err == nil:
		return outcome{gotValue, v}
	case own != nil && err == own:
		return outcome{gotItself, err.Error()}
	case err == singlefill.ErrNotFound:
		return outcome{gotNotFound, ""}
	case err == singlefill.ErrMiss:
		return outcome{gotMiss, ""}
	case errors.As(err, &remote) && remote.Key == key:
		return outcome{gotRemote, remote.Message}
	case errors.As(err, &panicked):
		return outcome{gotPanic, fmt.Sprint(panicked.Value)}
	case errors.Is(err, singlefill.ErrClosed):
		return outcome{gotClosed, ""}
	case errors.Is(err, context.DeadlineExceeded):
		return outcome{gotDeadline, ""}
	}
	return outcome{gotError, err.Error()}
}

// Names of what the tests count in Redis, outside of every namespace.
func loadsKey(namespace, key string) string    { return "tally:loads:" + namespace + ":" + key }
func runningKey(namespace, key string) string  { return "tally:running:" + namespace + ":" + key }
func allRunningKey(namespace string) string    { return "tally:running:" + namespace }
func mostRunningKey(namespace string) string   { return "tally:most:" + namespace }
func overlapsKey(namespace, key string) string { return "tally:overlaps:" + namespace + ":" + key }
func sourceKey(namespace, key string) string   { return "tally:source:" + namespace + ":" + key }
func floorKey(namespace, key string) string    { return "tally:floor:" + namespace + ":" + key }

// A cacheUser is the child's state.
type cacheUser struct {
	*redistest.Child
	config
	rdb   *redis.Client // the cache's
	tally *redis.Client
	cache *singlefill.Cache[string]
	loads atomic.Int64

	mu     sync.Mutex
	calls  map[string]*calls // by tag
	errors map[string]error  // by text
}

// calls are the goroutines that one order has begun.
type calls struct {
	order
	start    chan struct{} // closed when they may start
	release  chan struct{} // closed when their Loader may return
	err      error         // that their Loader returns; one for each text
	boarded  sync.WaitGroup
	finished sync.WaitGroup

	stop     chan struct{}  // closed when they may stop
	counts   []atomic.Int64 // see report
	running  atomic.Int64
	overlaps atomic.Int64

	mu       sync.Mutex
	outcomes map[outcome]int
}

func runCacheUser(p *redistest.Child) {
	u := &cacheUser{Child: p, calls: make(map[string]*calls), errors: make(map[string]error)}
	for line, ok := p.Next(); ok; line, ok = p.Next() {
		var o order
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			panic(err)
		}
		u.obey(o)
	}
}

func (u *cacheUser) say(r report) {
	line, err := json.Marshal(r)
	if err != nil {
		panic(err)
	}
	u.Say("%s", line)
}

// obey never waits, so that orders are begun in their order.
func (u *cacheUser) obey(o order) {
	switch o.Op {
	case "new":
		u.open(o)
	case "get":
		u.get(o)
	case "start":
		close(u.tagged(o.Tag).start)
	case "release":
		close(u.tagged(o.Tag).release)
	case "pass":
		c := u.tagged(o.Tag)
		go func() { c.release <- struct{}{} }()
	case "read":
		u.read(o)
	case "stop":
		close(u.tagged(o.Tag).stop)
	case "tally":
		u.say(u.tagged(o.Tag).tally())
	case "boarded":
		c := u.tagged(o.Tag)
		go func() {
			c.boarded.Wait()
			u.say(report{Event: o.Op, Tag: o.Tag})
		}()
	default:
		go u.act(o)
	}
}

func (u *cacheUser) open(o order) {
	u.config = o.Config
	u.rdb = quietClient(u.Addr, u.PoolSize)
	u.must(u.rdb.Ping(context.Background())) // a first connection takes longer than a command
	u.tally = quietClient(u.Tally, 0)
	var err error
	opts := u.options()
	opts.Trace = &singlefill.Trace{
		RedisError: func(_ context.Context, op string, err error) {
			if !u.Outage {
				u.say(report{Event: "trouble", Err: fmt.Sprintf("%s: %v", op, err)})
			}
		},
		LoadDone: func(_ context.Context, l singlefill.LoadInfo) {
			if l.Unlocked && !u.Outage {
				u.say(report{Event: "unlocked", Key: l.Key})
			}
		},
	}
	if u.cache, err = singlefill.New(u.rdb, u.Namespace, cmp.Or(u.TTL, defaultTTL), opts); err != nil {
		panic(err)
	}
	u.say(report{Event: o.Op, Tag: o.Tag})
}

func quietClient(addr string, poolSize int) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: addr, PoolSize: poolSize, PoolTimeout: time.Minute,
		ReadTimeout: time.Minute, WriteTimeout: time.Minute,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

// get begins N goroutines that call GetOrLoadInfo once each.
func (u *cacheUser) get(o order) {
	c := u.begin(o)
	var ready sync.WaitGroup
	for range o.N {
		c.boarded.Add(1)
		ready.Add(1)
		c.finished.Go(func() {
			ready.Done()
			<-c.start
			ctx := &boarding{Context: context.Background(), boarded: sync.OnceFunc(c.boarded.Done)}
			v, info, err := u.cache.GetOrLoadInfo(ctx, o.Key, u.loader(c))
			ctx.boarded()
			c.note(staleOutcomeOf(o.Key, v, info, err, c.err))
		})
	}
	if o.Start {
		go func() {
			ready.Wait()
			u.say(report{Event: "ready", Tag: o.Tag})
		}()
	} else {
		close(c.start)
	}
	go u.finish(c)
}

// read begins N goroutines that call GetOrLoadInfo Every so often until the order to stop.
func (u *cacheUser) read(o order) {
	c := u.begin(o)
	load := func(ctx context.Context, key string) (string, error) {
		if c.running.Add(1) > 1 {
			c.overlaps.Add(1)
		}
		defer c.running.Add(-1)
		return u.loader(c)(ctx, key)
	}
	for i := range o.N {
		c.finished.Go(func() {
			for {
				select {
				case <-c.stop:
					return
				case <-time.After(o.Every):
				}
				v, info, err := u.cache.GetOrLoadInfo(context.Background(), o.Key, load)
				c.note(staleOutcomeOf(o.Key, v, info, err, c.err))
				c.counts[i].Add(1)
			}
		})
	}
	go u.finish(c)
}

func (c *calls) tally() report {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := report{Event: "tally", Tag: c.Tag, Overlaps: c.overlaps.Load()}
	for o, n := range c.outcomes {
		r.Outcomes = append(r.Outcomes, countedOutcome{o, n})
	}
	for i := range c.counts {
		r.Counts = append(r.Counts, c.counts[i].Load())
	}
	return r
}

func (u *cacheUser) begin(o order) *calls {
	c := &calls{
		order: o, start: make(chan struct{}), release: make(chan struct{}), stop: make(chan struct{}),
		counts: make([]atomic.Int64, o.N), outcomes: make(map[outcome]int),
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if text := o.Plan.Fail; text != "" {
		if u.errors[text] == nil {
			u.errors[text] = errors.New(text)
		}
		c.err = u.errors[text]
	}
	u.calls[o.Tag] = c
	return c
}

func (u *cacheUser) tagged(tag string) *calls {
	u.mu.Lock()
	defer u.mu.Unlock()
	if c := u.calls[tag]; c != nil {
		return c
	}
	panic("no calls are tagged " + tag)
}

func (c *calls) note(o outcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.outcomes[o]++
}

func (u *cacheUser) finish(c *calls) {
	c.finished.Wait()
	r := c.tally()
	r.Event = "done"
	u.say(r)
}

// A boarding is a context that tells when its Done is first asked for: a call of GetOrLoad does so only when
// it waits together with the others for the key.
type boarding struct {
	context.Context
	boarded func()
}

func (b *boarding) Done() <-chan struct{} {
	b.boarded()
	return b.Context.Done()
}

// loader makes the Loader of some calls. Every load tells the others of its beginning and its end through
// Redis, past the cache and past the proxy.
func (u *cacheUser) loader(c *calls) singlefill.Loader[string] {
	return func(ctx context.Context, key string) (string, error) {
		value := fmt.Sprintf("%s/%d", u.Name, u.loads.Add(1))
		nth, at := u.loadBegins(key)
		if c.Plan.Source {
			value = u.number(sourceKey(u.Namespace, key))
		}
		u.say(report{Event: "begun", Tag: c.Tag, Key: key, Value: value, Nth: nth, At: at})
		if c.Plan.Sleep > 0 {
			time.Sleep(c.Plan.Sleep)
		}
		if c.Plan.Block {
			cancelled := ctx.Done()
			if c.Plan.Deaf {
				cancelled = nil
			}
			select {
			case <-c.release:
			case <-cancelled:
			}
		}
		u.must(u.tally.Decr(context.Background(), runningKey(u.Namespace, key)))
		u.must(u.tally.Decr(context.Background(), allRunningKey(u.Namespace)))
		u.say(report{Event: "ended", Tag: c.Tag, Key: key, Value: value})
		switch {
		case c.err != nil && (!c.Plan.Source || value == sourceDown):
			return "", c.err
		case c.Plan.Panic != "":
			panic(c.Plan.Panic)
		case c.Plan.NotFound:
			return "", singlefill.ErrNotFound
		}
		return value, nil
	}
}

func (u *cacheUser) loadBegins(key string) (nth int, at time.Time) {
	ctx := context.Background()
	p := u.tally.Pipeline()
	n := p.Incr(ctx, loadsKey(u.Namespace, key))
	running := p.Incr(ctx, runningKey(u.Namespace, key))
	all := p.Incr(ctx, allRunningKey(u.Namespace))
	now := p.Time(ctx)
	if _, err := p.Exec(ctx); err != nil {
		panic(err)
	}
	u.must(u.tally.ZAddGT(ctx, mostRunningKey(u.Namespace), redis.Z{Score: float64(all.Val()), Member: "most"}))
	if running.Val() > 1 {
		u.must(u.tally.Incr(ctx, overlapsKey(u.Namespace, key)))
	}
	return int(n.Val()), now.Val()
}

func (u *cacheUser) must(cmd redis.Cmder) {
	if err := cmd.Err(); err != nil {
		panic(err)
	}
}

func (u *cacheUser) number(key string) string {
	s, err := u.tally.Get(context.Background(), key).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		panic(err)
	}
	return cmp.Or(s, "0")
}

// act carries out an order and reports that it is done.
func (u *cacheUser) act(o order) {
	ctx := context.Background()
	r := report{Event: o.Op, Tag: o.Tag, Key: o.Key}
	var err error
	switch o.Op {
	case "peek": // Get
		v, err := u.cache.Get(ctx, o.Key)
		r.Outcomes = []countedOutcome{{outcomeOf(o.Key, v, err, nil), 1}}
	case "delete":
		err = u.cache.Delete(ctx, o.Key)
	case "expire":
		err = u.cache.Expire(ctx, o.Key)
	case "set":
		err = u.cache.Set(ctx, o.Key, o.Value)
	case "close":
		err = u.cache.Close()
	case "ping":
		err = u.rdb.Ping(ctx).Err()
	case "stats":
		r.Stats, r.Pool = u.cache.Stats(), *u.rdb.PoolStats()
	case "sweep":
		r.Outcomes = u.sweep(o)
	case "churn":
		r.Outcomes = u.churn(o)
	default:
		panic("unknown order " + o.Op)
	}
	if err != nil {
		r.Err = err.Error()
	}
	u.say(r)
}

// sweep has N goroutines ask for all Keys, each beginning with another. It returns the values as "key=value".
func (u *cacheUser) sweep(o order) []countedOutcome {
	c := u.begin(o)
	for i := range o.N {
		c.finished.Go(func() {
			for j := range o.Keys {
				key := fmt.Sprint("key", (i*o.Keys/o.N+j)%o.Keys)
				v, err := u.cache.GetOrLoad(context.Background(), key, u.loader(c))
				got := outcomeOf(key, v, err, nil)
				got.Text = key + "=" + got.Text
				c.note(got)
			}
		})
	}
	c.finished.Wait()
	var all []countedOutcome
	for got, n := range c.outcomes {
		all = append(all, countedOutcome{got, n})
	}
	return all
}

// churn changes the source of its own key N times, and deletes the key from the cache each time; meanwhile
// it reads the keys of all processes, which are named by their numbers. It returns the reads that were older
// than a Delete which had returned before they began.
func (u *cacheUser) churn(o order) (old []countedOutcome) {
	ctx := context.Background()
	c := u.begin(o)
	read := func(reader, key, floor string) {
		v, err := u.cache.GetOrLoad(ctx, key, u.loader(c))
		got, err2 := strconv.Atoi(v)
		least, err3 := strconv.Atoi(floor)
		if err := errors.Join(err, err2, err3); err != nil {
			c.note(outcome{gotError, err.Error()})
		} else if got < least {
			c.note(outcome{gotValue, fmt.Sprintf("%s of %s: %d after the Delete for %d", reader, key, got, least)})
		}
	}
	over := make(chan struct{})
	for n := range o.Keys {
		key := fmt.Sprint("key", n)
		for range 2 {
			c.finished.Go(func() {
				for {
					select {
					case <-over:
						return
					default:
						read("a reader", key, u.number(floorKey(u.Namespace, key)))
					}
				}
			})
		}
	}
	for n := range o.N {
		version := u.tally.Incr(ctx, sourceKey(u.Namespace, o.Key))
		u.must(version)
		if err := u.cache.Delete(ctx, o.Key); err != nil {
			c.note(outcome{gotError, err.Error()})
			break
		}
		u.must(u.tally.Set(ctx, floorKey(u.Namespace, o.Key), version.Val(), 0))
		if n%2 == 0 { // else the next Delete meets the loads that this one has caused
			read("the writer", o.Key, fmt.Sprint(version.Val()))
		}
	}
	close(over)
	c.finished.Wait()
	for got, n := range c.outcomes {
		old = append(old, countedOutcome{got, n})
	}
	return old
}

func valueKey(namespace, key string) string { return namespace + ":{" + key + "}" }
func lockKey(namespace, key string) string  { return valueKey(namespace, key) + ":lock" }

// A fleet is one Redis and the processes that share a namespace there.
type fleet struct {
	t         *testing.T
	server    *redistest.Server
	rdb       *redis.Client
	namespace string
	users     int
}

// newFleet starts a server. When the processes have been killed at the test's end, no key of the namespace
// may be without a TTL.
func newFleet(t *testing.T) *fleet {
	t.Helper()
	server := redistest.Start(t)
	f := &fleet{t: t, server: server, rdb: server.Admin(), namespace: redistest.Namespace(t)}
	t.Cleanup(f.wantEveryKeyToEnd)
	return f
}

func (f *fleet) wantEveryKeyToEnd() {
	f.t.Helper()
	ctx := context.Background()
	keys := f.rdb.Scan(ctx, 0, f.namespace+":*", 1000).Iterator()
	for keys.Next(ctx) {
		if left := f.rdb.PTTL(ctx, keys.Val()).Val(); left == -1 {
			f.t.Errorf("key %q is without a TTL", keys.Val())
		}
	}
	if err := keys.Err(); err != nil {
		f.t.Error(err)
	}
}

// user starts a process with a cache and a proxy of its own.
func (f *fleet) user(c config) *user {
	f.t.Helper()
	return f.spawn(c).ready()
}

// all starts n processes of the same config at once.
func (f *fleet) all(n int, c config) []*user {
	f.t.Helper()
	users := make([]*user, n)
	for i := range users {
		users[i] = f.spawn(c)
	}
	for _, u := range users {
		u.ready()
	}
	return users
}

func (f *fleet) spawn(c config) *user {
	f.t.Helper()
	f.users++
	c.Name = fmt.Sprint("process", f.users)
	c.Addr, c.Tally, c.Namespace = f.server.Addr, cmp.Or(c.Tally, f.server.Addr), f.namespace
	u := &user{t: f.t, name: c.Name, namespace: f.namespace, polls: make(map[string]int)}
	if !c.Direct {
		u.proxy = redistest.NewProxy(f.t, f.server.Addr)
		u.proxy.On(func(cmd []string) bool { u.see(cmd); return false }, redistest.Pass)
		c.Addr = u.proxy.Addr
	}
	u.Process = redistest.Spawn(f.t, cacheUserRole)
	u.order(order{Op: "new", Config: c})
	return u
}

func (f *fleet) count(key string) int {
	f.t.Helper()
	n, err := f.rdb.Get(f.t.Context(), key).Int()
	if err != nil && !errors.Is(err, redis.Nil) {
		f.t.Fatal(err)
	}
	return n
}

// wantLoads asserts how many loads of key have begun in the whole fleet.
func (f *fleet) wantLoads(key string, want int) {
	f.t.Helper()
	if n := f.count(loadsKey(f.namespace, key)); n != want {
		f.t.Errorf("%d loads of %q, want %d", n, key, want)
	}
}

// wantNoOverlap asserts that no two loads of key ran at once.
func (f *fleet) wantNoOverlap(key string) {
	f.t.Helper()
	if n := f.count(overlapsKey(f.namespace, key)); n != 0 {
		f.t.Errorf("%d loads of %q began while another ran", n, key)
	}
}

// stored returns the bytes under the value key, "" if there are none, and locked those under the lock.
func (f *fleet) stored(key string) string { return f.bytes(valueKey(f.namespace, key)) }
func (f *fleet) locked(key string) string { return f.bytes(lockKey(f.namespace, key)) }

func (f *fleet) bytes(name string) string {
	f.t.Helper()
	s, err := f.rdb.Get(f.t.Context(), name).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		f.t.Fatal(err)
	}
	return s
}

// now is the server's clock.
func (f *fleet) now() time.Time {
	f.t.Helper()
	now, err := f.rdb.Time(f.t.Context()).Result()
	if err != nil {
		f.t.Fatal(err)
	}
	return now
}

// lockEnd returns when the lock of key ends, by the server's clock, if nobody does anything.
func (f *fleet) lockEnd(key string) time.Time {
	f.t.Helper()
	var now *redis.TimeCmd
	var left *redis.DurationCmd
	_, err := f.rdb.TxPipelined(f.t.Context(), func(p redis.Pipeliner) error {
		now, left = p.Time(f.t.Context()), p.PTTL(f.t.Context(), lockKey(f.namespace, key))
		return nil
	})
	if err != nil || left.Val() < 0 {
		f.t.Fatalf("lock of %q: %v left, %v", key, left.Val(), err)
	}
	return now.Val().Add(left.Val())
}

// A user is a process of a fleet as the test sees it.
type user struct {
	*redistest.Process
	t         *testing.T
	name      string
	namespace string
	proxy     *redistest.Proxy
	tags      int
	rest      []report // read and not yet waited for

	mu    sync.Mutex
	polls map[string]int // protected by mu: by value key, the scripts that the process has sent
}

var scripts = redistest.Command("EVALSHA", "EVAL")

// see counts the scripts, by the key that each names first.
func (u *user) see(cmd []string) {
	if scripts(cmd) && len(cmd) > 3 {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.polls[cmd[3]]++
	}
}

func (u *user) polled(key string) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.polls[valueKey(u.namespace, key)]
}

func (u *user) ready() *user {
	u.t.Helper()
	u.await("new", "")
	return u
}

func (u *user) order(o order) {
	u.t.Helper()
	line, err := json.Marshal(o)
	if err != nil {
		u.t.Fatal(err)
	}
	u.Send(string(line))
}

// await returns the first report of an event that was not returned before.
func (u *user) await(event, tag string) report {
	u.t.Helper()
	match := func(r report) bool { return r.Event == event && r.Tag == tag }
	if i := slices.IndexFunc(u.rest, match); i >= 0 {
		r := u.rest[i]
		u.rest = slices.Delete(u.rest, i, i+1)
		return r
	}
	for {
		line := u.Line()
		var r report
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			u.t.Fatalf("%s said %q: %v", u.name, line, err)
		}
		switch {
		case match(r):
			return r
		case r.Event == "trouble":
			u.t.Logf("%s: %s", u.name, r.Err)
		case r.Event == "unlocked":
			u.t.Errorf("%s loaded %q without the lock", u.name, r.Key)
		default:
			u.rest = append(u.rest, r)
		}
	}
}

// do gives an order and waits until it has been carried out.
func (u *user) do(o order) report {
	u.t.Helper()
	u.tags++
	o.Tag = fmt.Sprint("order", u.tags)
	u.order(o)
	r := u.await(o.Op, o.Tag)
	if r.Err != "" {
		u.t.Fatalf("%s of %s: %s", o.Op, u.name, r.Err)
	}
	return r
}

func (u *user) delete(key string)       { u.t.Helper(); u.do(order{Op: "delete", Key: key}) }
func (u *user) set(key, value string)   { u.t.Helper(); u.do(order{Op: "set", Key: key, Value: value}) }
func (u *user) stats() singlefill.Stats { u.t.Helper(); return u.do(order{Op: "stats"}).Stats }
func (u *user) pool() redis.PoolStats   { u.t.Helper(); return u.do(order{Op: "stats"}).Pool }

func (u *user) peek(key string) outcome {
	u.t.Helper()
	return u.do(order{Op: "peek", Key: key}).Outcomes[0].outcome
}

// get has n goroutines call GetOrLoad.
func (u *user) get(tag, key string, n int, p plan) {
	u.t.Helper()
	u.order(order{Op: "get", Tag: tag, Key: key, N: n, Plan: p})
}

func (u *user) release(tag string) { u.t.Helper(); u.order(order{Op: "release", Tag: tag}) }

// boarded waits until all calls of tag wait inside of GetOrLoad; one that reads by itself does not yet.
func (u *user) boarded(tag string) {
	u.t.Helper()
	u.order(order{Op: "boarded", Tag: tag})
	u.await("boarded", tag)
}

// waiting waits until all calls of tag, which ask for key, are known to wait for a load in another process.
func (u *user) waiting(tag, key string) { u.t.Helper(); awaitWaiting(place{u, tag, key}) }

// A place is where calls wait.
type place struct {
	*user
	tag, key string
}

// awaitWaiting is waiting for several places at once. Of the three polls that follow the boarding of all
// calls, the first may have been decided upon before, the second has told the process that it waits for all
// of them, and the third says that the second has been answered.
func awaitWaiting(places ...place) {
	for _, p := range places {
		p.t.Helper()
		p.boarded(p.tag)
	}
	before := make([]int, len(places))
	for i, p := range places {
		before[i] = p.polled(p.key)
	}
	for i, p := range places {
		redistest.Await(p.t, fmt.Sprintf("%s waits for %q", p.name, p.key), func() bool { return p.polled(p.key) >= before[i]+3 })
	}
}

// done waits until all calls of tag have returned.
func (u *user) done(tag string) map[outcome]int {
	u.t.Helper()
	return counted(u.await("done", tag).Outcomes)
}

func counted(all []countedOutcome) map[outcome]int {
	m := make(map[outcome]int)
	for _, c := range all {
		m[c.outcome] += c.N
	}
	return m
}

// wantDone waits until all n calls of tag have returned, and asserts what.
func (u *user) wantDone(tag string, n int, kind, text string) {
	u.t.Helper()
	if got := u.done(tag); got[outcome{kind, text}] != n || len(got) != 1 {
		u.t.Errorf("%d calls %q of %s got %v, want %s %q", n, tag, u.name, got, kind, text)
	}
}

// unfinished asserts that calls of tag have not all returned, as far as this process has said.
func (u *user) unfinished(tag string) {
	u.t.Helper()
	u.stats() // an answer that comes after all it has said
	if slices.ContainsFunc(u.rest, func(r report) bool { return r.Event == "done" && r.Tag == tag }) {
		u.t.Errorf("calls %q of %s have returned", tag, u.name)
	}
}
