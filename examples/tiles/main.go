// Command tiles is an HTTP service with an expensive computation: a map of the Mandelbrot set, tile
// by tile. It runs as three processes that share one Redis, and shows on a page what each of them
// does.
//
//	go run ./examples/tiles             # with an embedded Redis, in a separate process
//	REDIS_URL=redis://127.0.0.1:6379 go run ./examples/tiles
//
// The page asks all three processes for each tile, which is nevertheless computed once. Its buttons
// kill a process, or Redis: the map goes on.
//
// service.go is the code to copy. The rest is for the demonstration: fleet.go starts and restarts
// the processes, feed.go sends the page what they do.
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
	ports     = processes + 2 // with the ports of the page and of the embedded Redis
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

// supervise runs all processes and serves the page until SIGINT or SIGTERM.
func supervise(args []string) error {
	flags := flag.NewFlagSet("tiles", flag.ExitOnError)
	port := flags.Int("port", 8080, fmt.Sprintf("first of %d neighbouring `port`s of 127.0.0.1; 0: some that are free", ports))
	away := flags.Duration("away", 6*time.Second, "`time` for which a process that was killed stays away")
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
	defer server.Close() // also the streams, which do not end by themselves
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	fmt.Printf("The map is on http://%s, and its processes on ports %d to %d. Ctrl-C ends all.\n", listener.Addr(), first, pagePort-1)

	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		return nil
	}
}

// freePorts returns the first of enough adjacent free ports: first, or any if first is 0.
func freePorts(first int) (int, error) {
	if first < 0 || first > lastPort+1-ports {
		return 0, fmt.Errorf("-port is %d: 0 to %d is allowed", first, lastPort+1-ports)
	}
	if first != 0 {
		return first, checkFree(first)
	}
	var err error
	for range 100 {
		// Below the range of outgoing connections, which could take the port of a dead process.
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
			return fmt.Errorf("port %d: %w; ports %d to %d are needed, and -port names others", port, errors.Unwrap(err), first, first+ports-1)
		}
		defer listener.Close()
	}
	return nil
}

// local returns the loopback address of a port.
func local(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
