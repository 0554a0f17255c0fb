package bench

import (
	"context"
	"errors"
	"fmt"
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

// lockLife is the life of the locks of the peers that have one.
const lockLife = 4 * time.Second

// peers are the columns of the table of README, in order, but for that of jetcache-go, which was read in its source.
var peers = []struct {
	name string
	open func(addr string, closed func(close func())) peer
}{
	{"singlefill", func(addr string, closed func(func())) peer {
		rdb := client(addr, closed)
		c := must(singlefill.New(rdb, "cases", time.Hour, &singlefill.Options[string]{LockTTL: lockLife}))
		closed(func() { _ = c.Close() })
		return peer{
			func(ctx context.Context, key string, load func() (string, error)) (string, error) {
				return c.GetOrLoad(ctx, key, func(context.Context, string) (string, error) { return load() })
			},
			func(ctx context.Context, key string) error { return c.Delete(ctx, key) },
		}
	}},
	{"rueidisaside", func(addr string, closed func(func())) peer {
		c := must(rueidisaside.NewClient(rueidisaside.ClientOption{
			ClientOption: rueidis.ClientOption{InitAddress: []string{addr}}, ClientTTL: lockLife,
		}))
		closed(c.Close)
		return peer{
			func(ctx context.Context, key string, load func() (string, error)) (string, error) {
				return c.Get(ctx, time.Hour, "a:"+key, func(context.Context, string) (string, error) { return load() })
			},
			func(ctx context.Context, key string) error { return c.Del(ctx, "a:"+key) },
		}
	}},
	{"go-redis/cache", func(addr string, closed func(func())) peer {
		c := cache.New(&cache.Options{Redis: client(addr, closed)})
		return peer{
			func(ctx context.Context, key string, load func() (string, error)) (v string, err error) {
				err = c.Once(&cache.Item{Ctx: ctx, Key: "b:" + key, Value: &v, Do: func(*cache.Item) (any, error) { return load() }})
				return v, err
			},
			func(ctx context.Context, key string) error { return c.Delete(ctx, "b:"+key) },
		}
	}},
	{"sturdyc", func(string, func(func())) peer {
		c := sturdyc.New[string](1000, 1, time.Hour, 10)
		return peer{
			func(ctx context.Context, key string, load func() (string, error)) (string, error) {
				return c.GetOrFetch(ctx, key, func(context.Context) (string, error) { return load() })
			},
			func(_ context.Context, key string) error { c.Delete(key); return nil },
		}
	}},
	{"otter with a loader", func(string, func(func())) peer {
		c := otter.Must(&otter.Options[string, string]{})
		return peer{
			func(ctx context.Context, key string, load func() (string, error)) (string, error) {
				return c.Get(ctx, key, otter.LoaderFunc[string, string](func(context.Context, string) (string, error) { return load() }))
			},
			func(_ context.Context, key string) error { c.Invalidate(key); return nil },
		}
	}},
	{"singleflight and `SETNX`", func(addr string, closed func(func())) peer {
		rdb := client(addr, closed)
		return peer{
			once(func(ctx context.Context, key string, load func() (string, error)) (string, error) {
				for {
					v, err := rdb.Get(ctx, "c:"+key).Result()
					if !errors.Is(err, redis.Nil) {
						return v, err
					}
					locked, err := rdb.SetNX(ctx, "c:"+key+":lock", "1", lockLife).Result()
					if err != nil {
						return "", err
					}
					if locked {
						defer rdb.Del(ctx, "c:"+key+":lock")
						if v, err = load(); err == nil {
							err = rdb.Set(ctx, "c:"+key, v, time.Hour).Err()
						}
						return v, err
					}
					time.Sleep(20 * time.Millisecond)
				}
			}),
			func(ctx context.Context, key string) error { return rdb.Del(ctx, "c:"+key).Err() },
		}
	}},
}

// client returns a client of one process.
func client(addr string, closed func(func())) *redis.Client {
	rdb := dialed(addr)
	closed(func() { _ = rdb.Close() })
	return rdb
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
		for _, one := range []peer{peers[p].open(s.Addr, t.Cleanup), peers[p].open(s.Addr, t.Cleanup)} {
			both.Go(func() error { _, err := one.get(t.Context(), "k", load); return err })
		}
		redistest.Must(t, both.Wait())
		return fmt.Sprint(loads.Load())
	}},
	{"b deletes the key during a load by a; the next call of a gets", func(t *testing.T, s *redistest.Server, p int) string {
		a, b := peers[p].open(s.Addr, t.Cleanup), peers[p].open(s.Addr, t.Cleanup)
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
		_, err := peers[p].open(s.Addr, t.Cleanup).get(t.Context(), "k", func() (string, error) { panic("bug") })
		if err == nil {
			return "no error"
		}
		return "an error"
	}},
	{"while Redis is away a call gets", func(t *testing.T, s *redistest.Server, p int) string {
		one := peers[p].open(s.Addr, t.Cleanup)
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
		b := peers[p].open(s.Addr, t.Cleanup)
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
		_, _ = peers[p].open(c.Args[0], func(func()) {}).get(context.Background(), "k", func() (string, error) {
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
