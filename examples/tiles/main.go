// Command tiles is an HTTP service whose handlers wrap an expensive computation: the tiles of a map
// of the Mandelbrot set. It runs as three processes that share one Redis. A page shows what each of
// them does.
//
//	go run ./examples/tiles             # with an embedded Redis, in another process
//	REDIS_URL=redis://127.0.0.1:6379 go run ./examples/tiles
//
// The page asks all three processes for each tile, and still each tile is computed once. It reads
// the visible tiles again and again, as many visitors would: these reads are hits. It has buttons
// that kill a process, or Redis: the map goes on.
//
// The code to copy is in service.go. The rest is for the show: fleet.go starts the processes, and
// restarts them after they were killed; feed.go reports to the page what they do.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const (
	processes = 3
	ports     = processes + 2 // one more each for the page and the embedded Redis
	lastPort  = 1<<16 - 1
)

func main() {
	run := func() error { return supervise(os.Args[1:]) }
	if description, ok := os.LookupEnv(taskEnv); ok {
		run = func() error { return work(description) }
	}
	if err := run(); err != nil {
		log.Fatalf("tiles: %v", err)
	}
}

const usage = `Usage: tiles [flags]

Serves a map of the Mandelbrot set, whose tiles three processes compute. They share one Redis,
so each tile is computed once. Open the page whose address it prints: the page shows what
each process does, and has buttons that kill a process or Redis.
It embeds a Redis, unless the environment variable REDIS_URL names one, which it never kills.

`

// supervise runs all processes and serves the page until SIGINT or SIGTERM.
func supervise(args []string) error {
	flags := flag.NewFlagSet("tiles", flag.ExitOnError)
	port := flags.Int("port", 8080, fmt.Sprintf("first of %d consecutive `port`s of 127.0.0.1; 0: any free ports", ports))
	away := flags.Duration("away", 6*time.Second, "`time` after which a killed process is started again")
	flags.Usage = func() {
		fmt.Fprint(flags.Output(), usage)
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *away < leastAway {
		return fmt.Errorf("-away is %v: at least %v is allowed", *away, leastAway)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	first, err := freePorts(*port)
	if err != nil {
		return err
	}
	fleet, err := startFleet(plan(first, os.Getenv("REDIS_URL")), *away)
	if err != nil {
		return err
	}
	defer fleet.close()
	pagePort := first + processes
	listener, err := net.Listen("tcp", local(pagePort))
	if err != nil {
		return err
	}
	server := &http.Server{Handler: newPage(fleet, pagePort), ReadHeaderTimeout: 5 * time.Second}
	defer server.Close() // also closes the streams, which have no end
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	fmt.Printf("The map is on http://%s, and its processes listen on ports %d to %d. Ctrl-C ends all of them.\n", listener.Addr(), first, pagePort-1)

	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		return nil
	}
}

// freePorts returns the first of enough consecutive free ports: first itself or, if it is 0, any.
func freePorts(first int) (int, error) {
	if first < 0 || first > lastPort+1-ports {
		return 0, fmt.Errorf("-port is %d: 0 to %d is allowed", first, lastPort+1-ports)
	}
	if first != 0 {
		return first, checkFree(first)
	}
	var err error
	for range 100 {
		// Below the range of ports for outgoing connections: a port in that range could be taken
		// while its process is dead.
		first = 20000 + rand.N(12000)
		if err = checkFree(first); err == nil {
			return first, nil
		}
	}
	return 0, err
}

func checkFree(first int) error {
	for port := first; port < first+ports; port++ {
		listener, err := net.Listen("tcp", local(port))
		if err != nil {
			return fmt.Errorf("port %d: %w; ports %d to %d are needed, choose others with -port", port, errors.Unwrap(err), first, first+ports-1)
		}
		defer listener.Close()
	}
	return nil
}

// local returns the address of a port that only this machine can reach.
func local(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
