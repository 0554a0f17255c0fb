package bench

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/redis/rueidis"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/vmihailenco/msgpack/v5"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// An order is a typical value of a service.
type order struct {
	ID       int64
	Customer string
	Lines    []line
}

type line struct {
	Article  string
	Title    string
	Quantity int
	Price    float64
}

// orderOf returns an order that msgpack encodes in about size bytes.
func orderOf(size int) order {
	o := order{ID: 42, Customer: "Somebody, Somewhere"}
	for i := 0; len(must(msgpack.Marshal(&o))) < size*95/100; i++ {
		o.Lines = append(o.Lines, line{fmt.Sprintf("A-%06d", i), "a thing of some kind", i%7 + 1, 9.99})
	}
	return o
}

// sizes are the sizes of values that are read.
var sizes = []struct {
	name  string
	bytes int
}{{"100B", 100}, {"2KB", 2 << 10}, {"64KB", 64 << 10}}

// open returns a client of the server at addr, with the options that the README recommends. It is
// closed when the benchmark ends.
func open(b testing.TB, addr string, mutate ...func(*redis.Options)) *redis.Client {
	c := dialed(addr, mutate...)
	b.Cleanup(func() { _ = c.Close() })
	return c
}

// dialed is open for a child process.
func dialed(addr string, mutate ...func(*redis.Options)) *redis.Client {
	o := &redis.Options{
		Addr:                     addr,
		ContextTimeoutEnabled:    true,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	for _, m := range mutate {
		m(o)
	}
	return redis.NewClient(o)
}

// unbounded undoes what the README recommends.
func unbounded(o *redis.Options) { o.ContextTimeoutEnabled = false }

func openRueidis(b testing.TB, addr string) rueidis.Client {
	c := must(rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{addr}}))
	b.Cleanup(c.Close)
	return c
}

// newCache returns a cache with default options.
func newCache[T any](b testing.TB, rdb redis.UniversalClient, opts ...singlefill.Options[T]) *singlefill.Cache[T] {
	var o *singlefill.Options[T]
	if len(opts) > 0 {
		o = &opts[0]
	}
	c := must(singlefill.New(rdb, redistest.Namespace(b), time.Hour, o))
	b.Cleanup(func() { _ = c.Close() })
	return c
}

// request returns a context like a handler's, which can be cancelled.
func request(b testing.TB) context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	b.Cleanup(cancel)
	return ctx
}
