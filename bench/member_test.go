package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"golang.org/x/sync/singleflight"
)

// A member is a process of a herd.
type member struct {
	sent commands

	mu    sync.Mutex
	loads map[string]int // protected by mu: of each key
	calls int            // protected by mu: of the load

	stats func() singlefill.Stats // nil: it has none
}

// A getter returns the value of a key, and calls load if there is none.
type getter func(ctx context.Context, key string, load func() (string, error)) (string, error)

// A manyGetter returns the values of keys, and calls load for those that are not there.
type manyGetter func(ctx context.Context, keys []string, load singlefill.ManyLoader[string]) (map[string]string, error)

// members are the getters by name.
var members = map[string]func(m *member, addr string) manyGetter{
	"singlefill":              ofOneKey(func(p place) getter { return filled(p, p.client()).get }),
	"singlefill, no wake-ups": ofOneKey(withoutWakeUps),
	"go-redis/cache":          ofOneKey(func(p place) getter { return openGoRedisCache(p).get }),
	"singleflight":            ofOneKey(openSingleflight),
	"SET NX":                  ofOneKey(func(p place) getter { return openSetNX(p).get }),
	"rueidisaside":            ofOneKey(func(p place) getter { return openRueidisaside(p).get }),
	"many, singlefill":        (*member).manySinglefill,
	"many, singleflight":      (*member).manySingleflight,
}

// ofOneKey makes a manyGetter of a getter, for calls of one key.
func ofOneKey(open func(p place) getter) func(m *member, addr string) manyGetter {
	return func(m *member, addr string) manyGetter {
		get := open(place{addr, func(func()) {}, &m.sent, 0})
		return func(ctx context.Context, keys []string, load singlefill.ManyLoader[string]) (map[string]string, error) {
			v, err := get(ctx, keys[0], func() (string, error) {
				values, err := load(ctx, keys)
				return values[keys[0]], err
			})
			return map[string]string{keys[0]: v}, err
		}
	}
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
	Together   bool // each call is for all keys
	Shuffled   bool // each call in another order
	Goroutines int
	Load       time.Duration // duration of each load
}

type reports struct {
	Took     []time.Duration // duration of each call
	Loads    map[string]int  // of each key
	Calls    int             // of the load
	Commands int64
	Stats    singlefill.Stats // since the process began
}

func (m *member) run(p *redistest.Child, get manyGetter) {
	// Connect first, as a running process has done.
	m.join(stampede{Prefix: "ready", Keys: 1, Goroutines: 1}, get)
	p.Say("ready")
	for s := range redistest.Orders[stampede](p) {
		p.Report(m.join(s, get))
	}
}

// join takes part in a stampede.
func (m *member) join(s stampede, get manyGetter) reports {
	m.loads, m.calls = make(map[string]int), 0
	m.sent.n.Store(0)
	load := func(_ context.Context, keys []string) (map[string]string, error) {
		time.Sleep(s.Load)
		m.mu.Lock()
		defer m.mu.Unlock()
		m.calls++
		values := make(map[string]string, len(keys))
		for _, key := range keys {
			m.loads[key]++
			values[key] = "value of " + key
		}
		return values, nil
	}
	took := make([]time.Duration, s.Goroutines)
	start := make(chan struct{})
	var all sync.WaitGroup
	for i := range took {
		keys := s.keys(i)
		all.Go(func() {
			<-start
			begun := time.Now()
			values, err := get(context.Background(), keys, load)
			took[i] = time.Since(begun)
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
	m.mu.Lock()
	defer m.mu.Unlock()
	r := reports{Took: took, Loads: m.loads, Calls: m.calls, Commands: m.sent.n.Load()}
	if m.stats != nil {
		r.Stats = m.stats()
	}
	return r
}

// keys returns the keys of the i-th call.
func (s stampede) keys(i int) (keys []string) {
	if !s.Together {
		return []string{fmt.Sprint(s.Prefix, "-", i%s.Keys)}
	}
	for j := range s.Keys {
		keys = append(keys, fmt.Sprint(s.Prefix, "-", j))
	}
	if s.Shuffled {
		rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	}
	return keys
}

// withoutWakeUps is singlefill as a user of Redis who may not subscribe to any channel, nor publish:
// its waiters have to poll.
func withoutWakeUps(p place) getter { return filled(p, p.client(withoutChannels(p.addr))).get }

// withoutChannels creates a user without the right to use channels.
func withoutChannels(addr string) func(o *redis.Options) {
	const user, password = "without-channels", "secret"
	admin := dialed(addr)
	defer admin.Close()
	must(admin.Do(context.Background(),
		"ACL", "SETUSER", user, "on", ">"+password, "~*", "+@all", "resetchannels").Result())
	return func(o *redis.Options) { o.Username, o.Password = user, password }
}

func openSingleflight(p place) getter {
	rdb := p.client()
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

func (m *member) manySinglefill(addr string) manyGetter {
	c := must(singlefill.New[string](dialed(addr, m.sent.count), "many", time.Hour, nil))
	m.stats = c.Stats
	return c.GetOrLoadMany
}

// manySingleflight joins the calls of this process, which are all for the same keys.
func (m *member) manySingleflight(addr string) manyGetter {
	rdb := dialed(addr, m.sent.count)
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
