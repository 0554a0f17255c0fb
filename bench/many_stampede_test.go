package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"golang.org/x/sync/singleflight"
)

// A manyGetter returns the values of keys, and calls load for those that are not there.
type manyGetter func(ctx context.Context, keys []string, load singlefill.ManyLoader[string]) (map[string]string, error)

// manyMembers are the manyGetters by the role of the processes.
var manyMembers = map[string]func(addr string) manyGetter{
	"many, singlefill": func(addr string) manyGetter {
		return must(singlefill.New[string](dialed(addr), "many", time.Hour, nil)).GetOrLoadMany
	},
	"many, singleflight": manyBySingleflight,
}

func init() {
	for role, open := range manyMembers {
		redistest.Role(role, func(p *redistest.Child) { runManyMember(p, open(p.Args[0])) })
	}
}

// manyBySingleflight joins the calls of this process, which are all for the same keys.
func manyBySingleflight(addr string) manyGetter {
	rdb := dialed(addr)
	get := func(ctx context.Context, keys []string, load singlefill.ManyLoader[string]) (map[string]string, error) {
		gets, _ := rdb.Pipelined(ctx, func(p redis.Pipeliner) error { // each reply has its error
			for _, key := range keys {
				p.Get(ctx, "singleflight:"+key)
			}
			return nil
		})
		values := make(map[string]string, len(keys))
		var missing []string
		for i, get := range gets {
			switch v, err := get.(*redis.StringCmd).Result(); err {
			case nil:
				values[keys[i]] = v
			case redis.Nil:
				missing = append(missing, keys[i])
			default:
				return nil, err
			}
		}
		if len(missing) == 0 {
			return values, nil
		}
		loaded, err := load(ctx, missing)
		if err != nil {
			return nil, err
		}
		_, err = rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
			for key, v := range loaded {
				values[key] = v
				p.Set(ctx, "singleflight:"+key, v, time.Hour)
			}
			return nil
		})
		return values, err
	}
	var group singleflight.Group
	return func(ctx context.Context, keys []string, load singlefill.ManyLoader[string]) (map[string]string, error) {
		values, err, _ := group.Do(keys[0], func() (any, error) { return get(ctx, keys, load) })
		return values.(map[string]string), err
	}
}

// A manyStampede is an order to such processes, and manyReports is the reply of one of them.
type manyStampede struct {
	At         time.Time // when it begins
	Prefix     string    // of its keys
	Shuffled   bool      // each caller has an order of the keys of its own
	Goroutines int
	Query      time.Duration // duration of each
}

type manyReports struct {
	Took    []time.Duration // duration of each call
	Queries int
	Loads   map[string]int // of each key
}

func runManyMember(p *redistest.Child, get manyGetter) {
	// Connect first, as a running process has done.
	if _, err := get(context.Background(), []string{"ready"}, func(context.Context, []string) (map[string]string, error) {
		return map[string]string{"ready": ""}, nil
	}); err != nil {
		panic(err)
	}
	p.Say("ready")
	for line, ok := p.Next(); ok; line, ok = p.Next() {
		var s manyStampede
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			panic(err)
		}
		p.Say("%s", must(json.Marshal(s.join(get))))
	}
}

// join takes part in a stampede.
func (s manyStampede) join(get manyGetter) manyReports {
	var mu sync.Mutex
	r := manyReports{Took: make([]time.Duration, s.Goroutines), Loads: make(map[string]int)}
	load := func(_ context.Context, keys []string) (map[string]string, error) {
		time.Sleep(s.Query)
		mu.Lock()
		defer mu.Unlock()
		r.Queries++
		values := make(map[string]string, len(keys))
		for _, key := range keys {
			r.Loads[key]++
			values[key] = "value of " + key
		}
		return values, nil
	}
	start := make(chan struct{})
	var all sync.WaitGroup
	for i := range r.Took {
		keys := make([]string, manyKeysOfACall)
		for j := range keys {
			keys[j] = fmt.Sprint(s.Prefix, "-", j)
		}
		if s.Shuffled {
			rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		}
		all.Go(func() {
			<-start
			begun := time.Now()
			values, err := get(context.Background(), keys, load)
			r.Took[i] = time.Since(begun)
			for _, key := range keys {
				if v := values[key]; err != nil || v != "value of "+key {
					panic(fmt.Sprintf("%s: %q, %v", key, v, err))
				}
			}
		})
	}
	time.Sleep(time.Until(s.At))
	close(start)
	all.Wait()
	return r
}

// A manyHerd is the processes of one contender.
type manyHerd struct {
	name, role string
	once       bool // each key must be loaded once in all
	learns     bool // it may profit from earlier loads
	fresh      bool // each stampede has new processes
	shuffled   bool

	processes []*redistest.Process
	extra     []float64 // ms, of each call: beyond the duration of the query
	loads     float64   // of all stampedes
	queries   float64
	served    served
}

// manyStampedes runs warmUps first, for contenders that can learn how long a query takes.
func manyStampedes(b *testing.B, processes, warmUps int, query time.Duration) {
	s := redistest.Start(b)
	herds := []*manyHerd{
		{name: "singlefill, load time known", role: "many, singlefill", once: true, learns: true},
		{name: "singlefill, new processes", role: "many, singlefill", once: true, fresh: true},
		{name: "singlefill, keys in random order", role: "many, singlefill", once: true, learns: true, shuffled: true},
		{name: "singleflight", role: "many, singleflight"},
	}
	goroutines := herdGoroutines
	if quick {
		goroutines = 2
	}
	number := 0
	run := func(h *manyHerd) { // with new keys
		number++
		h.stampede(b, s, processes, manyStampede{
			Prefix: fmt.Sprint("herd-", number), Shuffled: h.shuffled, Goroutines: goroutines, Query: query,
		})
	}
	for _, h := range herds {
		for i := range warmUps {
			if i == 0 || h.learns {
				run(h)
			}
		}
		h.extra, h.loads, h.queries, h.served = nil, 0, 0, served{}
	}
	n := 0.0
	for round := range rounds(b) {
		n++
		for i := range herds {
			run(herds[(i+round)%len(herds)])
		}
	}
	for _, h := range herds {
		report(b, h.name, func(b *testing.B) {
			b.ReportMetric(h.loads/n/manyKeysOfACall, "loads/key")
			b.ReportMetric(h.queries/n, "queries")
			b.ReportMetric(Median(h.extra), "p50-ms")
			b.ReportMetric(Quantile(h.extra, 0.99), "p99-ms")
			b.ReportMetric(Quantile(h.extra, 1), "max-ms")
			b.ReportMetric(float64(h.served.trips)/n, "round_trips")
			b.ReportMetric(float64(h.served.commands)/n, "commands")
		})
	}
}

// stampede runs one stampede.
func (h *manyHerd) stampede(b *testing.B, s *redistest.Server, processes int, order manyStampede) {
	if h.fresh || h.processes == nil {
		h.renew(b, s, processes)
	}
	before := servedBy(b, s)
	order.At = time.Now().Add(50 * time.Millisecond)
	tell(h.processes, order)
	loads := make(map[string]int)
	for _, p := range h.processes {
		var r manyReports
		hear(p, &r)
		for _, took := range r.Took {
			h.extra = append(h.extra, (took-order.Query).Seconds()*1e3)
		}
		for key, n := range r.Loads {
			loads[key] += n
			h.loads += float64(n)
		}
		h.queries += float64(r.Queries)
	}
	after := servedBy(b, s)
	h.served.trips += after.trips - before.trips - 1 // without this INFO
	h.served.commands += after.commands - before.commands - 1
	if len(loads) != manyKeysOfACall {
		b.Fatalf("%s: %d of %d keys were loaded", h.name, len(loads), manyKeysOfACall)
	}
	for key, n := range loads {
		if h.once && n != 1 {
			b.Fatalf("%s: %s was loaded %d times", h.name, key, n)
		}
	}
}

func (h *manyHerd) renew(b *testing.B, s *redistest.Server, processes int) {
	for _, p := range h.processes {
		p.Kill()
	}
	h.processes = nil
	for range processes {
		h.processes = append(h.processes, redistest.Spawn(b, h.role, s.Addr))
	}
	for _, p := range h.processes {
		p.Expect("ready")
	}
}

// served is what a server has done for all clients.
type served struct {
	trips    int // reads from its connections: a pipeline is one, or one for each 16 KB
	commands int // also those that scripts execute
}

var (
	serverReads = regexp.MustCompile(`total_reads_processed:(\d+)`)
	serverCalls = regexp.MustCompile(`cmdstat_[^:]+:calls=(\d+)`)
)

func servedBy(b *testing.B, s *redistest.Server) (done served) {
	info, err := s.Admin().Info(b.Context(), "all").Result()
	if err != nil {
		b.Fatal(err)
	}
	for _, m := range serverReads.FindAllStringSubmatch(info, -1) {
		done.trips += must(strconv.Atoi(m[1]))
	}
	for _, m := range serverCalls.FindAllStringSubmatch(info, -1) {
		done.commands += must(strconv.Atoi(m[1]))
	}
	return done
}
