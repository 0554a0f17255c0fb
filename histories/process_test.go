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

// The processes that run the histories. Each receives plans over its own connection, runs its part
// of many plans at once, and reports every op. It judges nothing.

const processRole = "maker of histories"

func init() { redistest.Role(processRole, runProcess) }

// A setup is the argument of a process.
type setup struct {
	Control  string // address for plans and reports
	Redis    string // address of the server or of a proxy
	Source   string // address of the source of truth, which no fault affects
	User     string // Redis user, if not the default one
	Retries  int    // of the client
	Timeouts timeouts
}

// timeouts are the timeouts of a process, and the TTLs after which it is taken for dead.
type timeouts struct {
	RedisTimeout, LockTTL, LoadTimeout time.Duration
	MaxLag                             time.Duration // of caches with Near
	TTL                                time.Duration // of leases and of waiters
}

// A plan describes a history to be run.
type plan struct {
	History   int
	Seed      uint64
	Of        string // a cache profile, or a kind of lock
	Name      string // of the key or the lock; of several keys the first one: see at
	Keys      int    // of a cache
	Threads   int    // in each process
	Ops       int    // in each thread
	Sole      bool   // one thread makes all writes, and may call Set
	LoadTime  time.Duration
	Pause     time.Duration // longest pause between two ops
	LongHolds bool          // some leases are held until they are renewed
	Start     int64         // when all threads begin

	Process int // index of the process
	Key     int // index of the key that an op is about
}

// at returns the plan of the ops of one key.
func (p plan) at(key int) plan {
	if p.Key = key; key > 0 {
		p.Name += fmt.Sprint(" ", key)
	}
	return p
}

type process struct {
	setup
	rdb, source *redis.Client
	caches      map[string]*singlefill.Cache[int64]
	ids         atomic.Int64

	mu  sync.Mutex
	out *json.Encoder // protected by mu
	// Protected by mu: loads that are not done, by the call that started them.
	loads map[*call][]*call
}

func runProcess(p *redistest.Child) {
	x := &process{caches: make(map[string]*singlefill.Cache[int64]), loads: make(map[*call][]*call)}
	must(json.Unmarshal([]byte(p.Args[0]), &x.setup))
	conn, err := net.Dial("unix", x.Control)
	must(err)
	x.out = json.NewEncoder(conn)
	x.rdb, x.source = x.client(x.Redis, x.User, x.Retries), x.client(x.Source, "", -1)
	x.rdb.AddHook(redistest.Commands(noteCommands))
	for name, p := range profiles {
		x.caches[name] = x.openCache(name, p)
	}
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

func (x *process) send(r report) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.sendLocked(r)
}

// sendLocked is send for callers that hold mu.
func (x *process) sendLocked(r report) { _ = x.out.Encode(r) } // the parent may have left

// trouble reports an error that must not happen without faults.
func (x *process) trouble(what string, err error) {
	x.send(report{Event: "trouble", op: op{Error: fmt.Sprintf("%s: %v", what, err)}})
}

// carryOut runs this process' part of a history.
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
	x.finish(p.History)
}

func upTo(rng *rand.Rand, d time.Duration) time.Duration {
	return time.Duration(rng.Int64N(int64(d) + 1))
}

// A call is a running op. It is passed in the context of the method that it calls.
type call struct {
	x       *process
	history int
	id      int
	key     int
	doubted atomic.Bool // a command that would have proved its load failed
	asks    bool        // acquires a lock
	once    bool        // without waiting
	ended   atomic.Bool
	sent    atomic.Int64 // when its last command was sent
	before  atomic.Int64 // when the command before that was answered
	over    atomic.Int64 // when the last command was answered
}

type callKey struct{}

func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	return c
}

func (x *process) begin(p plan, name string, of int, value int64) *call {
	c := x.newCall(p, name)
	x.send(c.begun(name, of, value))
	return c
}

func (x *process) newCall(p plan, name string) *call {
	c := &call{x: x, history: p.History, id: int(x.ids.Add(1)), key: p.Key, once: name == opTryAcquire}
	c.asks = c.once || name == opAcquire
	return c
}

func (c *call) begun(name string, of int, value int64) report {
	return report{History: c.history, Event: "begin", op: op{ID: c.id, Of: of, Key: c.key, Name: name, Value: value}, At: now()}
}

func (c *call) context() context.Context {
	return context.WithValue(context.Background(), callKey{}, c)
}

func (c *call) end(o op) {
	at := now()
	c.ended.Store(true)
	o.ID = c.id
	c.x.send(report{History: c.history, Event: "end", op: o, At: at})
}

func (c *call) mark(name string, at int64) { c.x.send(c.marked(name, at)) }

func (c *call) marked(name string, at int64) report {
	return report{History: c.history, Event: "mark", op: op{ID: c.id, Name: name}, At: at}
}
