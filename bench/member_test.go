package bench

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-redis/cache/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidisaside"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"golang.org/x/sync/singleflight"
)

// A member is a process of a herd.
type member struct {
	sent  commands
	loads atomic.Int64

	mu    sync.Mutex
	polls []int
}

// A getter returns the value of a key, and calls load if there is none.
type getter func(ctx context.Context, key string, load func() (string, error)) (string, error)

// members are the getters by name.
var members = map[string]func(m *member, addr string) getter{
	"singlefill":              (*member).singlefill,
	"singlefill, no wake-ups": (*member).withoutWakeUps,
	"go-redis/cache":          (*member).goRedisCache,
	"singleflight":            (*member).singleflight,
	"SET NX":                  (*member).setNX,
	"rueidisaside":            (*member).rueidisaside,
}

func init() {
	for name, open := range members {
		redistest.Role(name, func(p *redistest.Child) {
			m := new(member)
			m.run(p, open(m, p.Args[0]))
		})
	}
}

// A stampede is an order to members, and reports is the reply of one of them.
type stampede struct {
	At         time.Time // when it begins
	Prefix     string    // prefix of its keys
	Keys       int
	Goroutines int
	Load       time.Duration // duration of each load
}

type reports struct {
	Took     []time.Duration // duration of each call
	Polls    []int           // of each wait for another process
	Loads    int64
	Commands int64
}

func (m *member) run(p *redistest.Child, get getter) {
	// Connect first, as a running process has done.
	if _, err := get(context.Background(), "ready", func() (string, error) { return "", nil }); err != nil {
		panic(err)
	}
	p.Say("ready")
	for line, ok := p.Next(); ok; line, ok = p.Next() {
		var s stampede
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			panic(err)
		}
		p.Say("%s", must(json.Marshal(m.join(s, get))))
	}
}

// join takes part in a stampede.
func (m *member) join(s stampede, get getter) reports {
	m.polls = nil
	m.loads.Store(0)
	m.sent.n.Store(0)
	load := func() (string, error) {
		m.loads.Add(1)
		time.Sleep(s.Load)
		return "value", nil
	}
	took := make([]time.Duration, s.Goroutines)
	start := make(chan struct{})
	var all sync.WaitGroup
	for i := range took {
		key := fmt.Sprintf("%s-%d", s.Prefix, i%s.Keys)
		all.Go(func() {
			<-start
			begun := time.Now()
			if v, err := get(context.Background(), key, load); err != nil || v != "value" {
				panic(fmt.Sprintf("%q, %v", v, err))
			}
			took[i] = time.Since(begun)
		})
	}
	time.Sleep(time.Until(s.At))
	close(start)
	all.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	return reports{took, m.polls, m.loads.Load(), m.sent.n.Load()}
}

func (m *member) waited(polls int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.polls = append(m.polls, polls)
}

func (m *member) singlefill(addr string) getter { return m.filled(dialed(addr, m.sent.count)) }

// withoutWakeUps is singlefill as a user of Redis who may not subscribe to any channel, nor publish:
// its waiters have to poll.
func (m *member) withoutWakeUps(addr string) getter {
	return m.filled(dialed(addr, m.sent.count, withoutChannels(addr)))
}

// withoutChannels creates such a user.
func withoutChannels(addr string) func(o *redis.Options) {
	const user, password = "without-channels", "secret"
	admin := dialed(addr)
	defer admin.Close()
	must(admin.Do(context.Background(),
		"ACL", "SETUSER", user, "on", ">"+password, "~*", "+@all", "resetchannels").Result())
	return func(o *redis.Options) { o.Username, o.Password = user, password }
}

func (m *member) filled(rdb *redis.Client) getter {
	c := must(singlefill.New(rdb, "stampede", time.Hour, &singlefill.Options[string]{
		Trace: &singlefill.Trace{WaitDone: func(_ context.Context, w singlefill.WaitInfo) { m.waited(w.Polls) }},
	}))
	return func(ctx context.Context, key string, load func() (string, error)) (string, error) {
		return c.GetOrLoad(ctx, key, func(context.Context, string) (string, error) { return load() })
	}
}

func (m *member) goRedisCache(addr string) getter {
	c := cache.New(&cache.Options{Redis: dialed(addr, m.sent.count)})
	return func(ctx context.Context, key string, load func() (string, error)) (v string, err error) {
		err = c.Once(&cache.Item{Ctx: ctx, Key: "go-redis/cache:" + key, Value: &v,
			Do: func(*cache.Item) (any, error) { return load() }})
		return v, err
	}
}

func (m *member) singleflight(addr string) getter {
	rdb := dialed(addr, m.sent.count)
	return once(func(ctx context.Context, key string, load func() (string, error)) (string, error) {
		v, err := rdb.Get(ctx, "singleflight:"+key).Result()
		if err != redis.Nil {
			return v, err
		}
		if v, err = load(); err == nil {
			err = rdb.Set(ctx, "singleflight:"+key, v, time.Hour).Err()
		}
		return v, err
	})
}

// once joins the concurrent calls of this process.
func once(get getter) getter {
	var group singleflight.Group
	return func(ctx context.Context, key string, load func() (string, error)) (string, error) {
		v, err, _ := group.Do(key, func() (any, error) { return get(ctx, key, load) })
		return v.(string), err
	}
}

func (m *member) setNX(addr string) getter {
	rdb := dialed(addr, m.sent.count)
	return once(func(ctx context.Context, key string, load func() (string, error)) (string, error) {
		key = "set-nx:" + key
		for polls := 0; ; polls++ {
			v, err := rdb.Get(ctx, key).Result()
			if err != redis.Nil {
				m.waited(polls)
				return v, err
			}
			locked, err := rdb.SetNX(ctx, key+":lock", "1", 10*time.Second).Result()
			if err != nil {
				return "", err
			}
			if locked {
				if v, err = load(); err == nil {
					err = rdb.Set(ctx, key, v, time.Hour).Err()
				}
				rdb.Del(ctx, key+":lock")
				return v, err
			}
			time.Sleep(100 * time.Millisecond)
		}
	})
}

// rueidisaside is notified by the server, through client-side caching, when the value has been
// stored.
func (m *member) rueidisaside(addr string) getter {
	c := must(rueidisaside.NewClient(rueidisaside.ClientOption{ClientOption: rueidis.ClientOption{
		InitAddress: []string{addr},
		DialCtxFn: func(ctx context.Context, addr string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
			return m.sent.dial(ctx, "tcp", addr)
		},
	}}))
	return func(ctx context.Context, key string, load func() (string, error)) (string, error) {
		return c.Get(ctx, time.Hour, "rueidisaside:"+key, func(context.Context, string) (string, error) {
			return load()
		})
	}
}
