package bench

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-redis/cache/v9"
	"github.com/maypok86/otter/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidisaside"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/viccon/sturdyc"
	"golang.org/x/sync/errgroup"
)

// A peer is a library as one process uses it, with a cache and a client that no other peer shares.
type peer struct {
	get    getter
	delete func(ctx context.Context, key string) error
}

// A place is where a peer is opened.
type place struct {
	addr     string
	closed   func(close func()) // is told what closes the peer
	sent     *commands
	lockLife time.Duration // of peers that have locks; 0 is their default
}

// lockLife is the life of locks for which the cases wait.
const lockLife = 4 * time.Second

// opened returns a peer in this process.
func opened(t *testing.T, s *redistest.Server, p int) peer {
	return peers[p].open(place{s.Addr, t.Cleanup, new(commands), lockLife})
}

func (p place) client(mutate ...func(*redis.Options)) *redis.Client {
	rdb := dialed(p.addr, append(mutate, p.sent.count)...)
	p.closed(func() { _ = rdb.Close() })
	return rdb
}

// peers are the columns of the table of README, in order, but for that of jetcache-go, which was read in its source.
var peers = []struct {
	name string
	open func(p place) peer
}{
	{"singlefill", func(p place) peer { return filled(p, p.client()) }},
	{"rueidisaside", openRueidisaside},
	{"go-redis/cache", openGoRedisCache},
	{"sturdyc", func(place) peer {
		c := sturdyc.New[string](1000, 1, time.Hour, 10)
		return peer{
			func(ctx context.Context, key string, load func() (string, error)) (string, error) {
				return c.GetOrFetch(ctx, key, func(context.Context) (string, error) { return load() })
			},
			func(_ context.Context, key string) error { c.Delete(key); return nil },
		}
	}},
	{"otter with a loader", func(place) peer {
		c := otter.Must(&otter.Options[string, string]{})
		return peer{
			func(ctx context.Context, key string, load func() (string, error)) (string, error) {
				return c.Get(ctx, key, otter.LoaderFunc[string, string](func(context.Context, string) (string, error) { return load() }))
			},
			func(_ context.Context, key string) error { c.Invalidate(key); return nil },
		}
	}},
	{"singleflight and `SETNX`", openSetNX},
}

func filled(p place, rdb *redis.Client) peer {
	c := must(singlefill.New(rdb, "peer", time.Hour, &singlefill.Options[string]{LockTTL: p.lockLife}))
	p.closed(func() { _ = c.Close() })
	return peer{
		func(ctx context.Context, key string, load func() (string, error)) (string, error) {
			return c.GetOrLoad(ctx, key, func(context.Context, string) (string, error) { return load() })
		},
		func(ctx context.Context, key string) error { return c.Delete(ctx, key) },
	}
}

// openRueidisaside is notified by the server, through client-side caching, when the value has been stored.
func openRueidisaside(p place) peer {
	c := must(rueidisaside.NewClient(rueidisaside.ClientOption{ClientTTL: p.lockLife, ClientOption: rueidis.ClientOption{
		InitAddress: []string{p.addr},
		DialCtxFn: func(ctx context.Context, addr string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
			return p.sent.dial(ctx, "tcp", addr)
		},
	}}))
	p.closed(c.Close)
	return peer{
		func(ctx context.Context, key string, load func() (string, error)) (string, error) {
			return c.Get(ctx, time.Hour, "rueidisaside:"+key, func(context.Context, string) (string, error) { return load() })
		},
		func(ctx context.Context, key string) error { return c.Del(ctx, "rueidisaside:"+key) },
	}
}

func openGoRedisCache(p place) peer {
	c := cache.New(&cache.Options{Redis: p.client()})
	return peer{
		func(ctx context.Context, key string, load func() (string, error)) (v string, err error) {
			err = c.Once(&cache.Item{Ctx: ctx, Key: "go-redis/cache:" + key, Value: &v,
				Do: func(*cache.Item) (any, error) { return load() }})
			return v, err
		},
		func(ctx context.Context, key string) error { return c.Delete(ctx, "go-redis/cache:"+key) },
	}
}

func openSetNX(p place) peer {
	rdb := p.client()
	return peer{
		once(func(ctx context.Context, key string, load func() (string, error)) (string, error) {
			key = "set-nx:" + key
			for {
				v, err := rdb.Get(ctx, key).Result()
				if err != redis.Nil {
					return v, err
				}
				locked, err := rdb.SetNX(ctx, key+":lock", "1", cmp.Or(p.lockLife, 10*time.Second)).Result()
				if err != nil {
					return "", err
				}
				if locked {
					defer rdb.Del(ctx, key+":lock")
					if v, err = load(); err == nil {
						err = rdb.Set(ctx, key, v, time.Hour).Err()
					}
					return v, err
				}
				time.Sleep(100 * time.Millisecond)
			}
		}),
		func(ctx context.Context, key string) error { return rdb.Del(ctx, "set-nx:"+key).Err() },
	}
}

// cases are the rows of the table: what happens if two processes, a and b, use a library.
var cases = []struct {
	name string
	tell func(t *testing.T, s *redistest.Server, p int) string
}{
	{"loads if two processes miss at once", func(t *testing.T, s *redistest.Server, p int) string {
		var loads atomic.Int64
		load := func() (string, error) {
			loads.Add(1)
			time.Sleep(time.Second) // in which the other process begins to load, if it does
			return "v", nil
		}
		var both errgroup.Group
		for _, one := range []peer{opened(t, s, p), opened(t, s, p)} {
			both.Go(func() error { _, err := one.get(t.Context(), "k", load); return err })
		}
		redistest.Must(t, both.Wait())
		return fmt.Sprint(loads.Load())
	}},
	{"b deletes the key during a load by a; the next call of a gets", func(t *testing.T, s *redistest.Server, p int) string {
		a, b := opened(t, s, p), opened(t, s, p)
		_, err := a.get(t.Context(), "k", func() (string, error) { return "the old value", b.delete(t.Context(), "k") })
		redistest.Must(t, err)
		v, err := a.get(t.Context(), "k", func() (string, error) { return "the new value", nil })
		redistest.Must(t, err)
		return v
	}},
	{"a load that panics gives its caller", func(t *testing.T, s *redistest.Server, p int) (told string) {
		defer func() {
			if recover() != nil {
				told = "a panic"
			}
		}()
		_, err := opened(t, s, p).get(t.Context(), "k", func() (string, error) { panic("bug") })
		if err == nil {
			return "no error"
		}
		return "an error"
	}},
	{"while Redis is away a call gets", func(t *testing.T, s *redistest.Server, p int) string {
		one := opened(t, s, p)
		s.Kill()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		v, err := one.get(ctx, "k", func() (string, error) { return "the value", nil })
		if err != nil {
			return "an error"
		}
		return v
	}},
	{"a is killed while it loads; a call of b", func(t *testing.T, s *redistest.Server, p int) string {
		a, loads := redistest.Spawn(t, "holder", s.Addr, strconv.Itoa(p)), make(chan bool, 1)
		a.Expect("loads")
		ended := make(chan error, 1)
		b := opened(t, s, p)
		go func() {
			_, err := b.get(context.WithoutCancel(t.Context()), "k", func() (string, error) { loads <- true; return "v", nil })
			ended <- err
		}()
		defer func() { redistest.Must(t, <-ended) }()
		select {
		case <-loads:
			return "loads at once, beside a"
		case <-time.After(lockLife / 4):
		}
		a.Kill()
		<-loads
		return "loads when the lock ends"
	}},
}

func init() {
	redistest.Role("holder", func(c *redistest.Child) {
		p := must(strconv.Atoi(c.Args[1]))
		_, _ = peers[p].open(place{c.Args[0], func(func()) {}, new(commands), lockLife}).get(context.Background(), "k", func() (string, error) {
			c.Say("loads")
			select {}
		})
	})
}

// README says what the libraries do, as here.
func TestCases(t *testing.T) {
	redistest.Shared(t) // or skip
	readme, err := os.ReadFile("../README.md")
	redistest.Must(t, err)
	table := make([][]string, len(cases))
	t.Run("all", func(t *testing.T) {
		for i, c := range cases {
			table[i] = make([]string, len(peers))
			for p := range peers {
				t.Run(c.name+"/"+peers[p].name, func(t *testing.T) {
					t.Parallel()
					table[i][p] = c.tell(t, redistest.Start(t), p)
				})
			}
		}
	})
	for i, c := range cases {
		if row := "| " + c.name + " | " + strings.Join(table[i], " | ") + " | "; !strings.Contains(string(readme), row) {
			t.Errorf("README does not say\n%s", row)
		}
	}
}
