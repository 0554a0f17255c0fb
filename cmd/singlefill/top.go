package main

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// stepsPerView is how many steps of SCAN one view of top makes at most: 100,000 keys.
const stepsPerView = 200

// mostLoads is how many loads top shows.
const mostLoads = 15

func prepareTop(x *execution, flags *flag.FlagSet) func(ctx context.Context, args []string) error {
	interval := flags.Duration("interval", 2*time.Second, "time between two views")
	count := flags.Int("count", 0, "views to show; 0: until it is interrupted")
	return func(ctx context.Context, args []string) error {
		switch {
		case *interval < 100*time.Millisecond:
			return x.wrong("singlefill: -interval is %v: at least 100ms is allowed", *interval)
		case *count < 0:
			return x.wrong("singlefill: -count is %d: 0 or more is allowed", *count)
		}
		return x.top(ctx, args[0], *interval, *count)
	}
}

// A view is what top shows at one time.
type view struct {
	Time      time.Time `json:"time"`
	Namespace string    `json:"namespace"`
	Values    int64     `json:"values"`          // of the last whole pass
	Scanned   float64   `json:"scanned"`         // share of the next pass that is done; 1: it is this view's
	Loads     []load    `json:"loads"`           // seen in the part that was scanned
	Ops       int64     `json:"ops_per_second"`  // of all servers
	Hits      int64     `json:"keyspace_hits"`   // of all keys, since the last view
	Misses    int64     `json:"keyspace_misses"` // the same
	Evicted   int64     `json:"evicted_keys"`    // the same
	Clients   int64     `json:"connected_clients"`
}

func (x *execution) top(ctx context.Context, namespace string, interval time.Duration, count int) error {
	var before map[string]int64
	pass := &scanning{namespace: namespace}
	for n := 1; ; n++ {
		all, err := masters(ctx, x.rdb)
		if err != nil {
			return err
		}
		info, err := serverInfo(ctx, all)
		if err != nil {
			return err
		}
		v := view{Time: time.Now().Truncate(time.Millisecond), Namespace: namespace, Ops: info["instantaneous_ops_per_sec"], Clients: info["connected_clients"]}
		if before != nil {
			since := func(name string) int64 { return max(0, info[name]-before[name]) }
			v.Hits, v.Misses, v.Evicted = since("keyspace_hits"), since("keyspace_misses"), since("evicted_keys")
		}
		before = info
		if err := pass.advance(ctx, x, all); err != nil {
			return err
		}
		v.Values, v.Scanned, v.Loads = pass.values, pass.share, pass.loads
		if err := x.showView(v); err != nil {
			return err
		}
		if n == count {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil // this is how a view ends
		case <-time.After(interval):
		}
	}
}

// serverInfo returns the sums of the numbers that INFO has.
func serverInfo(ctx context.Context, servers []*redis.Client) (map[string]int64, error) {
	sums := make(map[string]int64)
	for _, server := range servers {
		text, err := server.Info(ctx).Result()
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(text) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
			if n, err := strconv.ParseInt(value, 10, 64); err == nil {
				sums[name] += n
			}
		}
	}
	return sums, nil
}

// A scanning goes through the keys of a namespace again and again, a part for each view.
type scanning struct {
	namespace string
	server    int // of the masters
	cursor    uint64
	seen      int64 // values, in this pass
	looked    int64 // keys, in this pass

	values int64 // of the last pass
	share  float64
	loads  []load
}

func (s *scanning) advance(ctx context.Context, x *execution, servers []*redis.Client) error {
	if s.server >= len(servers) {
		s.server, s.cursor = 0, 0
	}
	if s.server == 0 && s.cursor == 0 {
		s.seen, s.looked, s.loads = 0, 0, []load{}
	}
	var total int64
	for _, server := range servers {
		n, err := server.DBSize(ctx).Result()
		if err != nil {
			return err
		}
		total += n
	}
	for range stepsPerView {
		keys, cursor, err := servers[s.server].Scan(ctx, s.cursor, client.Literal(s.namespace)+":{*", scanCount).Result()
		if err != nil {
			return err
		}
		var locks []string
		for _, key := range keys {
			if strings.HasSuffix(key, "}:lock") {
				locks = append(locks, key)
			} else {
				s.seen++
			}
		}
		if len(locks) > 0 {
			found, err := x.readLoads(ctx, s.namespace, locks)
			if err != nil {
				return err
			}
			s.loads = append(s.loads, found...)
		}
		s.looked += scanCount
		if s.cursor = cursor; cursor == 0 {
			if s.server++; s.server == len(servers) {
				s.server, s.values, s.share = 0, s.seen, 1
				return nil
			}
		}
	}
	s.share = min(1, float64(s.looked)/float64(max(total, 1)))
	return nil
}

func (x *execution) showView(v view) error {
	if x.json {
		return x.printJSON(v)
	}
	if x.live {
		fmt.Fprint(x.stdout, "\x1b[H\x1b[2J")
	}
	fmt.Fprintf(x.stdout, "%s  %s\n", v.Time.Format(time.TimeOnly), v.Namespace)
	fmt.Fprintf(x.stdout, "values %d   loads %d", v.Values, len(v.Loads))
	if v.Scanned < 1 {
		fmt.Fprintf(x.stdout, "   (%.0f %% of the keys looked at)", 100*v.Scanned)
	}
	fmt.Fprintf(x.stdout, "\nserver: %d commands/s, %d clients; all keys: %d hits, %d misses, %d evicted since the last view\n\n", v.Ops, v.Clients, v.Hits, v.Misses, v.Evicted)
	if len(v.Loads) > mostLoads {
		v.Loads = v.Loads[:mostLoads]
	}
	if len(v.Loads) > 0 {
		x.printLoads(v.Loads)
		fmt.Fprintln(x.stdout)
	}
	return nil
}
