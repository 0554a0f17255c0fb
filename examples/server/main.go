// Command server is an HTTP service whose slow query is cached with singlefill. An update deletes the
// changed product from the cache: see update.go.
//
//	go -C examples/server run .         # with an embedded Redis
//	REDIS_URL=redis://127.0.0.1:6379 go -C examples/server run .
//	curl 127.0.0.1:8080/products/42     # 404 for a product that does not exist, such as 1000
//	curl -X PUT -d '{"name": "Teapot"}' 127.0.0.1:8080/products/42
//	curl 127.0.0.1:8080/catalog         # stale for a moment after an update
//	curl -X POST 127.0.0.1:8080/clear   # everything has changed
//	curl 127.0.0.1:8080/metrics         # also /health
//
// The dashboard for Grafana and the alert rules are in the folder grafana of the repository.
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
	"sync"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/lock"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
)

func main() {
	if err := run(os.Args[1:], newMemory()); err != nil {
		log.Fatal(err)
	}
}

// grace is how long loads may go on when the requests have ended: Kubernetes kills a process after 30 s.
const grace = 20 * time.Second

// run serves until SIGINT or SIGTERM, then closes everything in reverse order.
func run(args []string, db database) error {
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
	caches, err := openCaches(rdb, settings())
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), grace)
		defer cancel()
		caches.shutdown(ctx)
	}()
	if err := caches.check(ctx); err != nil {
		log.Printf("the cache will not do all of its work: %v", err)
	}

	outbox, err := lock.NewMutex(rdb, "outbox", nil)
	if err != nil {
		return err
	}

	metrics, err := observe(caches, outbox)
	if err != nil {
		return err
	}
	s := &service{caches: caches, db: db, outbox: outbox, timeout: *timeout, metrics: metrics}
	working, stopWorking := context.WithCancel(ctx)
	var worker sync.WaitGroup
	worker.Go(func() { s.workOff(working) })
	defer worker.Wait()
	defer stopWorking()
	server := &http.Server{Handler: otelhttp.NewHandler(s.routes(), ""), ReadHeaderTimeout: 5 * time.Second}
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
	*caches
	db      database
	outbox  *lock.Locker // of the process that works off the outbox
	metrics http.Handler
	timeout time.Duration
}

func (s *service) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /products/{id}", s.product)
	mux.HandleFunc("PUT /products/{id}", s.rename)
	mux.HandleFunc("GET /catalog", s.all)
	mux.HandleFunc("POST /clear", s.clear) // behind your authentication
	mux.HandleFunc("GET /health", s.health)
	mux.Handle("GET /metrics", s.metrics)
	return mux
}

func (s *service) product(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), s.timeout)
	defer cancel()
	product, info, err := s.products.GetOrLoadInfo(ctx, r.PathValue("id"), s.db.Product)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	keepUntil(w, info.Expires)
	reply(w, product)
}

func (s *service) all(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), s.timeout)
	defer cancel()
	catalog, info, err := s.catalog.GetOrLoadInfo(ctx, catalogKey, s.db.Catalog)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	keepUntil(w, info.Expires)
	reply(w, catalog)
}

// keepUntil lets the client keep a value for as long as the cache takes it for fresh, and no stale one.
func keepUntil(w http.ResponseWriter, expires time.Time) {
	seconds := max(0, int(time.Until(expires).Seconds()))
	w.Header().Set("Cache-Control", fmt.Sprintf("private, max-age=%d", seconds))
}

func (s *service) fail(w http.ResponseWriter, r *http.Request, err error) {
	switch {
	case errors.Is(err, singlefill.ErrNotFound):
		http.Error(w, "no such product", http.StatusNotFound)
	case errors.Is(err, errOverloaded): // here, or in the process that has asked the database
		w.Header().Set("Retry-After", "1")
		http.Error(w, "the database is overloaded, try again", http.StatusServiceUnavailable)
	case errors.Is(err, context.DeadlineExceeded): // a load goes on, and a later request finds its value
		http.Error(w, "this takes too long, try again", http.StatusGatewayTimeout)
	case r.Context().Err() != nil: // the client has left
	default:
		log.Printf("%s: %v", r.URL, err)
		http.Error(w, "something went wrong", http.StatusInternalServerError)
	}
}

func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil {
		log.Printf("reply: %v", err)
	}
}
