package histories

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// The processes that make the histories. Each gets plans over a connection of its own, carries out its part of
// each, many at once, and tells of every op. It has no say in what is right.

const processRole = "maker of histories"

func init() { redistest.Role(processRole, runProcess) }

// A setup is the argument of a process.
type setup struct {
	Control  string // address to tell
	Redis    string // address of the server, or of a proxy
	Source   string // address of the server that is the source of truth, which no fault touches
	User     string // of Redis, if not the default one
	Retries  int    // of the client
	Patience patience
}

// A patience is the times for which the process waits, and how soon it is given up for dead.
type patience struct {
	RedisTimeout, LockTTL, LoadTimeout time.Duration
	Lives                              lives
}

// A plan is a history to be made.
type plan struct {
	History   int
	Seed      uint64
	Of        string // a profile of a cache, or a kind of lock
	Name      string // of the key, or of the lock
	Threads   int    // in each process
	Ops       int    // in each thread
	Sole      bool   // one thread makes all writes, and may Set
	LoadTime  time.Duration
	Pause     time.Duration // at most, between two ops
	LongHolds bool          // some leases are to be renewed
	Start     int64         // all threads begin at this time

	Process int // which part this is
}

type process struct {
	setup
	rdb, source *redis.Client
	caches      map[string]*singlefill.Cache[int64]
	ids         atomic.Int64

	mu    sync.Mutex
	out   *json.Encoder     // protected by mu
	loads map[*call][]*call // protected by mu: those that are not done, by the call in whose name they run
}

func runProcess(p *redistest.Child) {
	x := &process{caches: make(map[string]*singlefill.Cache[int64]), loads: make(map[*call][]*call)}
	must(json.Unmarshal([]byte(p.Args[0]), &x.setup))
	conn, err := net.Dial("unix", x.Control)
	must(err)
	x.out = json.NewEncoder(conn)
	x.rdb, x.source = x.client(x.Redis, x.User, x.Retries), x.client(x.Source, "", -1)
	x.rdb.AddHook(arrivals{})
	x.openCaches()
	plans := json.NewDecoder(conn)
	for {
		var p plan
		if err := plans.Decode(&p); err != nil {
			return // the parent has closed the connection
		}
		go x.carryOut(p)
	}
}

func (x *process) client(addr, user string, retries int) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: addr, Username: user, Password: user, PoolSize: 400, MaxRetries: retries, ContextTimeoutEnabled: true,
		ReadTimeout: time.Minute, WriteTimeout: time.Minute, // the library sets its own
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func (x *process) say(r report) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.tell(r)
}

// tell is say for one who holds mu.
func (x *process) tell(r report) { _ = x.out.Encode(r) } // the parent may have left

// trouble is told of what no history should have seen while nothing disturbs it.
func (x *process) trouble(what string, err error) {
	x.say(report{Event: "trouble", op: op{Error: fmt.Sprintf("%s: %v", what, err)}})
}

// carryOut makes this process' part of a history.
func (x *process) carryOut(p plan) {
	thread := x.lockThread
	if _, cached := profiles[p.Of]; cached {
		thread = x.cacheThread
	}
	act := thread(p)
	time.Sleep(time.Duration(p.Start - now()))
	var running sync.WaitGroup
	for i := range p.Threads {
		rng := rand.New(rand.NewPCG(p.Seed, uint64(p.Process*100+i)))
		running.Go(func() {
			for range p.Ops {
				time.Sleep(upTo(rng, p.Pause))
				act(rng, p.Process == 0 && i == 0)
			}
		})
	}
	running.Wait()
	x.leave(p.History)
}

func upTo(rng *rand.Rand, d time.Duration) time.Duration {
	return time.Duration(rng.Int64N(int64(d) + 1))
}

// A call is an op while it is under way. It travels in the context of what it calls.
type call struct {
	x       *process
	history int
	id      int
	doubted atomic.Bool // a command that was to prove the load in its name has failed
	asks    bool        // for a lock
	once    bool        // and does not wait
	ended   atomic.Bool
	arrived atomic.Bool
	sent    atomic.Int64 // when its last command was
	before  atomic.Int64 // when the one before that one was over
	over    atomic.Int64 // when the last one was
}

type callKey struct{}

func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	return c
}

func (x *process) begin(p plan, name string, of int, value int64) *call {
	c := x.newCall(p, name)
	x.say(c.begun(name, of, value))
	return c
}

func (x *process) newCall(p plan, name string) *call {
	c := &call{x: x, history: p.History, id: int(x.ids.Add(1)), once: name == opTryAcquire}
	c.asks = c.once || name == opAcquire
	return c
}

func (c *call) begun(name string, of int, value int64) report {
	return report{History: c.history, Event: "begin", op: op{ID: c.id, Of: of, Name: name, Value: value}, At: now()}
}

func (c *call) context() context.Context {
	return context.WithValue(context.Background(), callKey{}, c)
}

func (c *call) end(o op) {
	at := now()
	c.ended.Store(true)
	o.ID = c.id
	c.x.say(report{History: c.history, Event: "end", op: o, At: at})
}

func (c *call) mark(name string, at int64) { c.x.say(c.marked(name, at)) }

func (c *call) marked(name string, at int64) report {
	return report{History: c.history, Event: "mark", op: op{ID: c.id, Name: name}, At: at}
}
