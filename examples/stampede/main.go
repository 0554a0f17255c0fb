// Command stampede compares what a cold key and an expiring key cost in three ways: GET, load, SET
// without protection; the same behind golang.org/x/sync/singleflight; and singlefill.
//
//	go run ./examples/stampede       # with an embedded Redis, unless REDIS_URL names one
//	go run ./examples/stampede -h    # how many processes, goroutines and keys, and how long a load takes
//
// For each way it starts several processes of many goroutines. First all goroutines ask at once for
// cold keys. Then they ask again and again, at a steady pace, while the values expire several
// times. A load only sleeps: a source that gets slower under many loads would make the first two
// ways look worse than they do here.
//
// The table at the end has a line for each way in each phase. A refill is a stretch of time in
// which a key is being loaded. So "each", the loads per refill, is how many loads one miss or one
// expiry causes. The picture has a bar for each load. It also shows why hardly any call waits with
// singlefill when a value expires: a hit has refreshed the value shortly before. So the refills of
// singlefill come sooner than the others, and each of them is one load.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("stampede: ")
	if described, isWorker := os.LookupEnv(workerEnv); isWorker {
		if err := work(described, os.Stdin, os.Stdout); err != nil {
			log.Fatal(err)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// run executes the command line.
func run(ctx context.Context, args []string, out *os.File) error {
	p, usage, err := parseFlags(args)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(out, usage)
		return nil
	}
	if err != nil {
		return err
	}
	_, err = compare(ctx, p, os.Getenv("REDIS_URL"), out)
	if err != nil && ctx.Err() != nil {
		return errors.New("interrupted") // err is a consequence
	}
	return err
}

// compare runs the contenders one after the other, and shows the results.
func compare(ctx context.Context, p plan, url string, out *os.File) (runs []recording, err error) {
	server, err := openServer(ctx, url)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.close(p)) }()
	fmt.Fprintf(out, "%s.\nThis takes about %s.\n\n", p, tidy(p.estimate()))
	page := newPage(out)
	for i, c := range contenders {
		show := page.progress(i, p)
		r, err := runFleet(ctx, p, i, server, show)
		show.end()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		runs = append(runs, r)
	}
	page.writeTable(runs)
	if err := writeFile(p.svg, drawing(p, server.kind, runs)); err != nil {
		return nil, err
	}
	fmt.Fprintf(out, "\nThe picture is in %s.\n", p.svg)
	return runs, nil
}
