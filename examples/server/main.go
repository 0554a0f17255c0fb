// Command server is an HTTP service whose slow query is cached with singlefill.
//
//	go run ./examples/server            # with an embedded Redis
//	REDIS_URL=redis://127.0.0.1:6379 go run ./examples/server
//	curl 127.0.0.1:8080/products/42     # 404 for a product that does not exist, such as 1000
//	curl 127.0.0.1:8080/stats
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
)

type Product struct {
	ID   string `json:"id"`
	Name string `json:"name"`
}

// queryProduct simulates a slow query among 999 products. It is a Loader: a real one passes ctx to
// its database.
func queryProduct(ctx context.Context, id string) (Product, error) {
	select {
	case <-time.After(500 * time.Millisecond):
	case <-ctx.Done():
		return Product{}, ctx.Err()
	}
	if n, err := strconv.Atoi(id); err != nil || n < 1 || n > 999 {
		return Product{}, fmt.Errorf("product %q: %w", id, singlefill.ErrNotFound)
	}
	return Product{ID: id, Name: "Product " + id}, nil
}

func main() {
	if err := run(os.Args[1:], queryProduct); err != nil {
		log.Fatal(err)
	}
}

// run serves until SIGINT or SIGTERM, then closes everything in reverse order.
func run(args []string, query singlefill.Loader[Product]) error {
	flags := flag.NewFlagSet("server", flag.ExitOnError)
	listen := flags.String("listen", "127.0.0.1:8080", "`address` to listen on; port 0: any free port")
	timeout := flags.Duration("timeout", 2*time.Second, "deadline of one request")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	rdb, closeRedis, err := openRedis(os.Getenv("REDIS_URL"))
	if err != nil {
		return err
	}
	defer closeRedis()
	products, err := singlefill.New[Product](rdb, "products", 10*time.Minute, nil)
	if err != nil {
		return err
	}
	defer products.Close() // waits for loads that outlive their requests, and stores their values

	s := &service{products: products, query: query, timeout: *timeout}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /products/{id}", s.product)
	mux.HandleFunc("GET /stats", s.stats)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	listener, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	fmt.Printf("listening on http://%s\n", listener.Addr())
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()

	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		stop() // a second signal ends the process at once
	}
	ctx, cancel := context.WithTimeout(context.Background(), *timeout+time.Second)
	defer cancel()
	return server.Shutdown(ctx) // answers the requests in flight
}

// openRedis returns a client of the Redis at url, or of an embedded Redis if url is empty.
func openRedis(url string) (*redis.Client, func(), error) {
	closeEmbedded := func() {}
	if url == "" {
		mini, err := miniredis.Run()
		if err != nil {
			return nil, nil, err
		}
		mini.ClockTTL(true) // otherwise no key would expire
		url, closeEmbedded = "redis://"+mini.Addr(), mini.Close
	}
	options, err := redis.ParseURL(url)
	if err != nil {
		return nil, nil, err
	}
	// A slow cache is worse than none. By default go-redis needs seconds and many attempts to
	// notice that a server is gone, and ignores the context while it waits for a reply.
	options.ContextTimeoutEnabled = true
	options.DialTimeout = 500 * time.Millisecond
	options.ReadTimeout = 500 * time.Millisecond
	options.MaxRetries = 1 // for a connection that broke while it was idle
	options.DialerRetries = 1
	rdb := redis.NewClient(options)
	return rdb, func() { rdb.Close(); closeEmbedded() }, nil
}

type service struct {
	products *singlefill.Cache[Product]
	query    singlefill.Loader[Product]
	timeout  time.Duration
}

func (s *service) product(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), s.timeout)
	defer cancel()
	product, err := s.products.GetOrLoad(ctx, r.PathValue("id"), s.query)
	switch {
	case err == nil:
		reply(w, product)
	case errors.Is(err, singlefill.ErrNotFound):
		http.Error(w, "no such product", http.StatusNotFound)
	case errors.Is(err, context.DeadlineExceeded): // the load goes on, and a later request finds its value
		http.Error(w, "this takes too long, try again", http.StatusGatewayTimeout)
	case r.Context().Err() != nil: // the client has left
	default:
		log.Printf("product %q: %v", r.PathValue("id"), err)
		http.Error(w, "something went wrong", http.StatusInternalServerError)
	}
}

func (s *service) stats(w http.ResponseWriter, _ *http.Request) { reply(w, s.products.Stats()) }

func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil {
		log.Printf("reply: %v", err)
	}
}
