package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
)

// taskEnv is the environment variable with the task of a process that supervise has started.
const taskEnv = "SINGLEFILL_TILES"

// A task describes one process.
type task struct {
	Name     string
	Listen   string
	RedisURL string // empty: this process is the Redis
	PagePort int
}

// work runs one process. It writes to standard output when it is ready, and ends when its input
// ends, since its parent wants that or is gone.
func work(description string) error {
	signal.Ignore(os.Interrupt) // the terminal sends it to the parent, too
	var t task
	if err := json.Unmarshal([]byte(description), &t); err != nil {
		return err
	}
	log.SetPrefix(t.Name + ": ")
	run := serveTiles
	if t.RedisURL == "" {
		run = serveRedis
	}
	return run(t, func() {
		fmt.Println("ready")
		_, _ = io.Copy(io.Discard, os.Stdin)
	})
}

func serveRedis(t task, untilEnd func()) error {
	mini := miniredis.NewMiniRedis()
	if err := mini.StartAddr(t.Listen); err != nil {
		return err
	}
	defer mini.Close()
	mini.ClockTTL(true) // otherwise no key would expire
	untilEnd()
	return nil
}

func serveTiles(t task, untilEnd func()) error {
	rdb, err := newClient(t.RedisURL)
	if err != nil {
		return err
	}
	defer rdb.Close()
	feed := newFeed()
	tiles, err := newCache(rdb, cacheOptions(feed.trace()))
	if err != nil {
		return err
	}
	defer tiles.Close()
	s := &service{name: t.Name, tiles: tiles, render: render}
	listener, err := net.Listen("tcp", t.Listen)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: s.handler(feed, t.PagePort), ReadHeaderTimeout: 5 * time.Second}
	defer server.Close()
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	ended := make(chan struct{})
	go func() { untilEnd(); close(ended) }()
	select {
	case err := <-failed:
		return err
	case <-ended:
		return nil
	}
}

func (s *service) handler(feed *feed, pagePort int) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /tiles/{tile...}", s.tile)
	mux.HandleFunc("POST /clear/{zoom}", s.clear)
	mux.HandleFunc("GET /events", feed.serve(s.tiles.Stats))
	return allowPage(pagePort, mux)
}

// allowPage lets the scripts of the page, which has another port, read the answers, and clear. Scripts of
// other pages may do neither.
func allowPage(port int, next http.Handler) http.Handler {
	pages := []string{"http://" + local(port), fmt.Sprintf("http://localhost:%d", port)}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Add("Vary", "Origin")
		if origin := r.Header.Get("Origin"); slices.Contains(pages, origin) {
			w.Header().Set("Access-Control-Allow-Origin", origin)
			w.Header().Set("Access-Control-Expose-Headers", "Tile-Process, Tile-Took")
		} else if r.Method == http.MethodPost {
			http.Error(w, "only the page may do this", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// newClient returns a client for a cache. By default go-redis is too patient for one: see
// examples/server.
func newClient(url string) (*redis.Client, error) {
	options, err := redis.ParseURL(url)
	if err != nil {
		return nil, fmt.Errorf("REDIS_URL: %w", err)
	}
	options.ContextTimeoutEnabled = true
	options.DialTimeout = 500 * time.Millisecond
	options.MaxRetries = 1
	options.DialerRetries = 1
	logging.Disable() // the page shows when Redis is gone
	return redis.NewClient(options), nil
}
