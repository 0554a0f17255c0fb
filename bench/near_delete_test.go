package bench

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidisaside"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

func oneServer(b *testing.B) redis.UniversalClient { return open(b, redistest.Start(b).Addr) }

func clusterOfThree(b *testing.B) redis.UniversalClient {
	return redistest.StartCluster(b).Client(b, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true })
}

// withAndWithout returns caches without Near and with it, by the names of the contenders.
func withAndWithout(b *testing.B, rdb redis.UniversalClient) ([]string, []*singlefill.Cache[string]) {
	return []string{"without Near", "with Near"}, []*singlefill.Cache[string]{
		newCache[string](b, rdb), newCache(b, rdb, near[string](false)),
	}
}

// nearDeletes deletes keys that have a value. Storing it is not measured.
func nearDeletes(b *testing.B, dial func(b *testing.B) redis.UniversalClient) {
	rdb := dial(b)
	names, caches := withAndWithout(b, rdb)
	ctx := request(b)
	r := race{ops: 50, bases: names[:1]}
	for i, c := range caches {
		r.contenders = append(r.contenders, contender{names[i], func(i int) error {
			return c.Delete(ctx, "order:"+strconv.Itoa(i))
		}})
	}
	r.run(b)
}

// A recorder notes the round trips of a client. Those in the background are scripts, and a Delete has
// none.
type recorder struct {
	mu                       sync.Mutex
	trips, commands, scripts int // protected by mu
}

func (r *recorder) note(cmds []redis.Cmder) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch name := cmds[0].Name(); {
	case strings.HasPrefix(name, "eval"):
		r.scripts += len(cmds)
	case name == "hello": // of a new connection
	default:
		r.trips++
		r.commands += len(cmds)
	}
	return nil
}

// nearCommands counts what a Delete sends. No value is read, so that nothing else is sent.
func nearCommands(b *testing.B, dial func(b *testing.B) redis.UniversalClient) {
	rdb := dial(b)
	sent := new(recorder)
	rdb.AddHook(redistest.Trips(sent.note))
	names, caches := withAndWithout(b, rdb)
	for i, c := range caches {
		const deletes = 20
		for n := range deletes + 1 {
			if n == 1 { // the first one loads the script of the hint
				time.Sleep(50 * time.Millisecond)
				sent.mu.Lock()
				sent.trips, sent.commands, sent.scripts = 0, 0, 0
				sent.mu.Unlock()
			}
			redistest.Must(b, c.Delete(b.Context(), "order:"+strconv.Itoa(n)))
		}
		_ = c.Close() // waits for what goes on in the background
		report(b, names[i], func(b *testing.B) {
			b.ReportMetric(float64(sent.trips)/deletes, "round_trips")
			b.ReportMetric(float64(sent.commands)/deletes, "commands")
			b.ReportMetric(float64(sent.scripts)/deletes, "scripts_behind_it")
		})
	}
}

// A follower is a process that returns the value of a key again and again, from memory if it can.
// The source of the value is a key in the same server.
type follower struct {
	source *redis.Client
	get    func(ctx context.Context, key string) (string, error)
	delete func(ctx context.Context, key string) error
	close  func()
}

// followers are the followers by name.
var followers = map[string]func(f *follower, addr string){
	"near":                (*follower).near,
	"near, no wake-ups":   (*follower).nearWithoutWakeUps,
	"near, rueidisaside":  (*follower).rueidisaside,
	"near, no near cache": (*follower).far,
}

func init() {
	for name := range followers {
		redistest.Role(name, func(p *redistest.Child) { newFollower(name, p.Args[0]).run(p) })
	}
}

func newFollower(name, addr string) *follower {
	f := &follower{source: dialed(addr)}
	followers[name](f, addr)
	return f
}

func (f *follower) load(ctx context.Context, _ string) (string, error) {
	return f.source.Get(ctx, "source").Result()
}

func (f *follower) near(addr string) { f.caching(dialed(addr), &singlefill.Near{}) }

func (f *follower) nearWithoutWakeUps(addr string) {
	f.caching(dialed(addr, withoutChannels(addr)), &singlefill.Near{})
}

// far asks Redis at each call. It shows what a load and its waiters take, and the pauses of await.
func (f *follower) far(addr string) { f.caching(dialed(addr), nil) }

func (f *follower) caching(rdb *redis.Client, n *singlefill.Near) {
	c := must(singlefill.New(rdb, "lag", time.Hour, &singlefill.Options[string]{Near: n}))
	f.close = func() { _, _ = c.Close(), rdb.Close() }
	f.get = func(ctx context.Context, key string) (string, error) { return c.GetOrLoad(ctx, key, f.load) }
	f.delete = func(ctx context.Context, key string) error { return c.Delete(ctx, key) }
}

func (f *follower) rueidisaside(addr string) {
	c := must(rueidisaside.NewClient(rueidisaside.ClientOption{ClientOption: rueidis.ClientOption{InitAddress: []string{addr}}}))
	f.close = c.Close
	f.get = func(ctx context.Context, key string) (string, error) {
		return c.Get(ctx, time.Hour, "aside:"+key, f.load)
	}
	f.delete = func(ctx context.Context, key string) error { return c.Del(ctx, "aside:"+key) }
}

// run waits for each value that it is told of. It reports when a call has returned the value, and says when
// memory serves it.
func (f *follower) run(p *redistest.Child) {
	ctx := context.Background()
	for value := range redistest.Orders[string](p) {
		for must(f.get(ctx, "k")) != value {
			time.Sleep(100 * time.Microsecond)
		}
		p.Report(time.Now())
		for range 20 { // it is in memory, and used
			must(f.get(ctx, "k"))
			time.Sleep(time.Millisecond)
		}
		p.Say("serves it")
	}
}

// change makes value the one of the source, and returns when Delete has returned.
func (f *follower) change(ctx context.Context, value string) (deleted time.Time) {
	must("OK", f.source.Set(ctx, "source", value, 0).Err())
	must("OK", f.delete(ctx, "k"))
	return time.Now()
}

// A pack is the followers of one contender, and one in this process, which deletes.
type pack struct {
	name, role string
	deleter    *follower
	processes  []*redistest.Process
	lags       []float64 // ms
}

// lags measures how long after the return of a Delete the last of n processes returns the new value.
func lags(b *testing.B, n int) {
	s := redistest.Start(b)
	packs := []*pack{
		{name: "singlefill", role: "near"},
		{name: "singlefill, no wake-ups", role: "near, no wake-ups"},
		{name: "singlefill without Near", role: "near, no near cache"},
		{name: "rueidisaside", role: "near, rueidisaside"},
	}
	for _, k := range packs {
		k.deleter = newFollower(k.role, s.Addr)
		b.Cleanup(func() { k.deleter.close(); _ = k.deleter.source.Close() })
		for range n {
			k.processes = append(k.processes, redistest.Spawn(b, k.role, s.Addr))
		}
	}
	for round := range rounds(b) {
		for i := range packs {
			packs[(i+round)%len(packs)].lag(b.Context(), round)
		}
	}
	for _, k := range packs {
		report(b, k.name, func(b *testing.B) {
			b.ReportMetric(Median(k.lags), "p50-ms")
			b.ReportMetric(Quantile(k.lags, 0.99), "p99-ms")
			b.ReportMetric(Quantile(k.lags, 1), "max-ms")
			b.ReportMetric(float64(len(k.lags)), "deletes")
		})
	}
}

// lag measures one Delete.
func (k *pack) lag(ctx context.Context, round int) {
	last := func() (last time.Time) {
		for _, p := range k.processes {
			var at time.Time
			if p.Hear(&at); at.After(last) {
				last = at
			}
		}
		for _, p := range k.processes {
			p.Expect("serves it")
		}
		return last
	}
	await := func(value string) {
		for _, p := range k.processes {
			p.Order(value)
		}
	}
	old, value := fmt.Sprint(2*round), fmt.Sprint(2*round+1)
	k.deleter.change(ctx, old) // also what the other packs have left
	await(old)
	last()
	await(value)
	time.Sleep(10 * time.Millisecond)
	deleted := k.deleter.change(ctx, value)
	k.lags = append(k.lags, max(0, last().Sub(deleted).Seconds()*1e3))
}
