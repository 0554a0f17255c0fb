package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/masters"
)

// A row is what is known of an entry without its payload.
type row struct {
	Key      string    `json:"key"`
	State    string    `json:"state"`             // fresh, stale, not found, or foreign: no entry
	Written  time.Time `json:"written,omitzero"`  // when it was loaded or set, by its writer's clock
	Age      seconds   `json:"age_seconds"`       // since then
	FreshFor seconds   `json:"fresh_for_seconds"` // negative: stale since
	GoneIn   seconds   `json:"gone_in_seconds"`   // Redis' TTL; negative: it has none
	Load     seconds   `json:"load_seconds"`      // how long its load took; 0: it was set
	Bytes    int64     `json:"bytes"`             // in Redis, with the header
	Version  uint32    `json:"version"`           // Options.Version of its writer
}

const foreign = "foreign"

// rowOf makes a row of the beginning of a value.
func rowOf(key, header string, size int64, ttl time.Duration, now time.Time) row {
	r := row{Key: key, State: foreign, GoneIn: seconds(ttl), Bytes: size}
	e, err := entry.ParseHeader([]byte(header), size)
	if err != nil {
		return r
	}
	r.Written, r.Age, r.FreshFor, r.Load = e.WrittenAt, seconds(e.Age(now)), seconds(e.FreshUntil.Sub(now)), seconds(e.LoadTime)
	r.Version = e.Version
	if e.Expired {
		r.FreshFor = min(r.FreshFor, 0)
	}
	switch {
	case e.NotFound:
		r.State = "not found"
	case r.FreshFor > 0:
		r.State = "fresh"
	default:
		r.State = "stale"
	}
	return r
}

// fresh says in words for how long, or until when, an entry is fresh.
func (r row) fresh() string {
	switch {
	case r.State == foreign:
		return "-"
	case r.FreshFor > 0:
		return fmt.Sprintf("for %v", r.FreshFor)
	case r.FreshFor == 0:
		return "until now"
	}
	return fmt.Sprintf("until %v ago", -r.FreshFor)
}

// rows reads the beginnings of values in one pipeline. Keys that are gone by now are left out.
func (x *execution) rows(ctx context.Context, namespace string, keys []string) (rows []row, err error) {
	headers, sizes, ttls := make([]*redis.StringCmd, len(keys)), make([]*redis.IntCmd, len(keys)), make([]*redis.DurationCmd, len(keys))
	_, _ = x.rdb.Pipelined(ctx, func(p redis.Pipeliner) error { // each command has its error
		for i, key := range keys {
			headers[i], sizes[i], ttls[i] = p.GetRange(ctx, key, 0, entry.HeaderLen+entry.VersionLen-1), p.StrLen(ctx, key), p.PTTL(ctx, key)
		}
		return nil
	})
	now := time.Now()
	for i, key := range keys {
		for _, err := range []error{headers[i].Err(), sizes[i].Err(), ttls[i].Err()} {
			if err != nil && !client.WrongType(err) {
				return nil, err
			}
		}
		ttl := ttls[i].Val()
		if ttl == -2 { // ns, as go-redis has it
			continue
		}
		rows = append(rows, rowOf(userKey(namespace, key), headers[i].Val(), sizes[i].Val(), ttl, now))
	}
	return rows, nil
}

// orders are the values of -sort.
var orders = map[string]func(a, b row) int{
	"key":  func(a, b row) int { return cmp.Compare(a.Key, b.Key) },
	"age":  func(a, b row) int { return cmp.Compare(b.Age, a.Age) },
	"left": func(a, b row) int { return cmp.Compare(a.GoneIn, b.GoneIn) },
	"size": func(a, b row) int { return cmp.Compare(b.Bytes, a.Bytes) },
	"load": func(a, b row) int { return cmp.Compare(b.Load, a.Load) },
}

func prepareList(x *execution, flags *flag.FlagSet) func(ctx context.Context, args []string) error {
	order := flags.String("sort", "key", "`order`: key, age (oldest first), left (gone soonest first), size or load (largest first)")
	limit := flags.Int("limit", 100, "keys to show; 0: all")
	match := flags.String("match", "*", "`pattern` of SCAN that keys have to match")
	return func(ctx context.Context, args []string) error {
		compare := orders[*order]
		switch {
		case compare == nil:
			return x.wrong("singlefill: -sort is %q: key, age, left, size or load is allowed", *order)
		case *limit < 0:
			return x.wrong("singlefill: -limit is %d: 0 or more is allowed", *limit)
		}
		if len(args) == 0 {
			var ofKeys error
			flags.Visit(func(f *flag.Flag) {
				if f.Name == "sort" || f.Name == "limit" || f.Name == "match" {
					ofKeys = x.wrong("singlefill: -%s selects keys: name their NAMESPACE", f.Name)
				}
			})
			if ofKeys != nil {
				return ofKeys
			}
			return x.listNamespaces(ctx)
		}
		return x.list(ctx, args[0], *match, *limit, func(a, b row) int { return cmp.Or(compare(a, b), cmp.Compare(a.Key, b.Key)) })
	}
}

// list prints the first rows of a namespace. It keeps twice as many in memory as it prints.
func (x *execution) list(ctx context.Context, namespace, match string, limit int, compare func(a, b row) int) error {
	found := 0
	kept := []row{}
	trim := func() {
		slices.SortFunc(kept, compare)
		kept = slices.CompactFunc(kept, func(a, b row) bool { return a.Key == b.Key })
		if limit > 0 && len(kept) > limit {
			kept = kept[:limit]
		}
	}
	err := x.scan(ctx, masters.Literal(namespace)+":{"+match+"}", func(keys []string) error {
		rows, err := x.rows(ctx, namespace, keys)
		found += len(rows)
		if kept = append(kept, rows...); limit > 0 && len(kept) >= 2*limit {
			trim()
		}
		return err
	})
	if err != nil {
		return err
	}
	trim()
	var none error
	if found == 0 {
		none = fmt.Errorf("no key of the namespace %s matches %s; ls without a namespace lists namespaces", printable(namespace), match)
	}
	if x.json {
		return cmp.Or(x.printJSON(struct {
			Namespace string `json:"namespace"`
			Found     int    `json:"found"`
			Keys      []row  `json:"keys"`
		}{namespace, found, kept}), none)
	}
	if none != nil {
		return none
	}
	t := x.table("KEY", x.colour(header), "AGE", "FRESH", "GONE IN", "LOAD", "SIZE", "VERSION")
	for _, r := range kept {
		gone := r.GoneIn.String()
		if r.GoneIn < 0 {
			gone = "never"
		}
		t.add(printable(r.Key), x.colour(r.State), r.Age, r.fresh(), gone, r.Load, size(r.Bytes), r.Version)
	}
	_ = t.Flush()
	if len(kept) < found {
		fmt.Fprintf(x.stdout, "%d of %d keys: -limit 0 shows all\n", len(kept), found)
	}
	return nil
}

// listNamespaces prints the namespaces that have an entry, with the number of their keys.
func (x *execution) listNamespaces(ctx context.Context) error {
	type count struct {
		Namespace string `json:"namespace"`
		Keys      int    `json:"keys"`
	}
	found, seen := make(map[string]int), make(map[string]bool) // SCAN may return a key twice
	err := x.scan(ctx, "*:{*}", func(keys []string) error {
		byNamespace := make(map[string][]string)
		for _, key := range keys {
			if namespace, _, _ := strings.Cut(key, ":{"); !seen[key] { // a namespace has no brace
				byNamespace[namespace] = append(byNamespace[namespace], key)
			}
			seen[key] = true
		}
		for namespace, keys := range byNamespace {
			rows, err := x.rows(ctx, namespace, keys)
			if err != nil {
				return err
			}
			for _, r := range rows {
				if r.State != foreign {
					found[namespace]++
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	counts := []count{}
	for _, namespace := range slices.Sorted(maps.Keys(found)) {
		counts = append(counts, count{namespace, found[namespace]})
	}
	if x.json {
		return x.printJSON(counts)
	}
	t := x.table("NAMESPACE", "KEYS")
	for _, c := range counts {
		t.add(printable(c.Namespace), c.Keys)
	}
	_ = t.Flush()
	return nil
}

// header is the head of the column of states.
const header = "STATE"

// colour marks a state on a terminal. The header has the usual colour, in as many bytes: a table counts them.
func (x *execution) colour(state string) string {
	codes := map[string]string{header: "39", "fresh": "32", "stale": "33", "not found": "36", foreign: "31"}
	if !x.live || x.getenv("NO_COLOR") != "" {
		return state
	}
	return "\x1b[" + codes[state] + "m" + state + "\x1b[0m"
}

// printable quotes a key that has characters which a terminal would not show.
func printable(key string) string {
	if quoted := fmt.Sprintf("%q", key); strings.Trim(quoted, `"`) != key || strings.TrimSpace(key) != key {
		return quoted
	}
	return key
}
