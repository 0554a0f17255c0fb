package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
	"github.com/singlefill/singlefill/lock"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// A terminal runs the command.
type terminal struct {
	testing.TB
	url   string
	stdin string // nothing: stdin is no terminal

	progress bool // stderr is a terminal
}

// each runs a test on a server and on a Cluster. rdb may do everything.
func each(t *testing.T, run func(t *testing.T, c terminal, rdb redis.UniversalClient)) {
	t.Parallel()
	t.Run("server", func(t *testing.T) {
		t.Parallel()
		s := redistest.Shared(t)
		run(t, terminal{TB: t, url: s.Addr}, s.Client(t)) // no scheme names a single server
	})
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		c := redistest.SharedCluster(t)
		rdb := c.Client(t)
		run(t, terminal{TB: t, url: "redis://" + rdb.Options().Addrs[0]}, rdb)
	})
}

// run returns what the command writes, and its exit status.
func (c terminal) run(args ...string) (stdout, stderr string, status int) {
	var out, errs bytes.Buffer
	x := &execution{
		stdin: strings.NewReader(c.stdin), stdout: &out, stderr: &errs, ask: c.stdin != "", progress: c.progress,
		getenv: func(name string) string { return map[string]string{"REDIS_URL": c.url}[name] },
	}
	status = x.run(c.Context(), args)
	return out.String(), errs.String(), status
}

// ok returns what the command writes to stdout. The command must succeed.
func (c terminal) ok(args ...string) string {
	c.Helper()
	stdout, stderr, status := c.run(args...)
	if status != 0 || stderr != "" {
		c.Fatalf("singlefill %q: status %d, %s", args, status, stderr)
	}
	return stdout
}

// fails checks that the command fails with a status and a message.
func (c terminal) fails(want int, message string, args ...string) {
	c.Helper()
	stdout, stderr, status := c.run(args...)
	if status != want || !strings.Contains(stderr, message) {
		c.Errorf("singlefill %q: status %d, %q, %q; want status %d and %q", args, status, stdout, stderr, want, message)
	}
}

func check(t testing.TB, errs ...error) {
	t.Helper()
	redistest.Must(t, errors.Join(errs...))
}

// listed returns the states of keys that ls tells, in order.
func (c terminal) listed(args ...string) (keys []string, states map[string]string, found int) {
	c.Helper()
	var list struct {
		Found int
		Keys  []struct{ Key, State string }
	}
	if err := json.Unmarshal([]byte(c.ok(append([]string{"ls", "-json"}, args...)...)), &list); err != nil {
		c.Fatal(err)
	}
	states = make(map[string]string)
	for _, r := range list.Keys {
		keys = append(keys, r.Key)
		states[r.Key] = r.State
	}
	return keys, states, list.Found
}

// ls tells the state of each key, whatever it is called and whatever it holds, and of no other namespace.
func TestList_States(t *testing.T) {
	each(t, func(t *testing.T, c terminal, rdb redis.UniversalClient) {
		ns, ctx := redistest.Namespace(t)+"*[a]", t.Context()
		cache := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{StaleWhileRevalidate: time.Hour})
		want := map[string]string{"old": "stale", "none": "not found", "text": foreign, "list": foreign}
		for _, key := range []string{"plain", "}brace", "%7D", "{x}", "a b", "line\nbreak", "ünï"} {
			check(t, cache.Set(ctx, key, "v"))
			want[key] = "fresh"
		}
		check(t, cache.Set(ctx, "old", "v"), cache.Expire(ctx, "old"))
		_, err := cache.GetOrLoad(ctx, "none", func(context.Context, string) (string, error) { return "", singlefill.ErrNotFound })
		if err != singlefill.ErrNotFound {
			t.Fatal(err)
		}
		check(t, rdb.Set(ctx, ns+":{text}", "no entry", 0).Err(), rdb.RPush(ctx, ns+":{list}", "x").Err(), rdb.Expire(ctx, ns+":{list}", time.Hour).Err())
		check(t, cachetest.NewCacheIn[string](t, rdb, ns+"2", nil).Set(ctx, "other", "v"), cachetest.NewCacheIn[string](t, rdb, strings.Replace(ns, "*", "x", 1), nil).Set(ctx, "other", "v"))
		keys, states, found := c.listed(ns)
		if found != len(want) || !slices.IsSorted(keys) || fmt.Sprint(states) != fmt.Sprint(want) {
			t.Errorf("found %d: %v\nwant %v", found, states, want)
		}
		// In words, how long ago the stale value was fresh, and for how long the others are.
		if text := c.ok("ls", ns); !regexp.MustCompile(`(?m)^old +stale +\S+ +until (now|\S+ ago)  .*$`).MatchString(text) ||
			!regexp.MustCompile(`(?m)^plain +fresh +\S+ +for \S+  `).MatchString(text) || !regexp.MustCompile(`(?m)^list +foreign +- +-  `).MatchString(text) {
			t.Errorf("as text:\n%s", text)
		}
		if text := c.ok("ls", ns); strings.Count(text, "\n") != 1+len(want) || !strings.Contains(text, `"line\nbreak"`) ||
			strings.Count(text, "never") != 1 { // text has no TTL
			t.Errorf("as text:\n%s", text)
		}
		check(t, rdb.Expire(ctx, ns+":{text}", time.Hour).Err())
		if _, states, _ := c.listed(ns, "-match", "*l*"); len(states) != 4 { // plain, old, line, list
			t.Errorf("-match finds %v", states)
		}
	})
}

// ls shows the first keys in an order, and tells that there are more.
func TestList_OrderAndLimit(t *testing.T) {
	each(t, func(t *testing.T, c terminal, rdb redis.UniversalClient) {
		ns, ctx := redistest.Namespace(t), t.Context()
		var i int
		cache := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.Raw, Jitter: -1, TTLFunc: func(key string, _ string) time.Duration {
			return time.Hour + time.Duration(i)*time.Minute
		}})
		for i = range 50 {
			check(t, cache.Set(ctx, fmt.Sprintf("k%02d", i), strings.Repeat("x", (i*7)%50)))
		}
		for order, want := range map[string]string{"key": "k00 k01 k02", "left": "k00 k01 k02", "size": "k07 k14 k21"} {
			keys, _, found := c.listed("-sort", order, "-limit", "3", ns)
			if got := strings.Join(keys, " "); got != want || found != 50 {
				t.Errorf("-sort %s: %s of %d, want %s", order, got, found, want)
			}
		}
		if text := c.ok("ls", "-limit=3", ns); !strings.HasSuffix(text, "3 of 50 keys: -limit 0 shows all\n") {
			t.Errorf("nothing tells that there are more:\n%s", text)
		}
		if keys, _, _ := c.listed("-limit", "0", ns); len(keys) != 50 {
			t.Errorf("-limit 0 shows %d", len(keys))
		}
	})
}

type order struct {
	ID     int
	Items  []string
	Prices map[int]float64
}

// get shows the payload of each codec as JSON, and the header in words.
func TestGet(t *testing.T) {
	each(t, func(t *testing.T, c terminal, rdb redis.UniversalClient) {
		ns, ctx := redistest.Namespace(t), t.Context()
		pack := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[order]{StaleIfError: time.Hour})
		text := cachetest.NewCacheIn(t, rdb, ns+"j", &singlefill.Options[order]{Codec: singlefill.JSON})
		raw := cachetest.NewCacheIn(t, rdb, ns+"r", &singlefill.Options[[]byte]{Codec: singlefill.Raw})
		v := order{7, []string{"tea"}, map[int]float64{3: 1.5}}
		check(t, pack.Set(ctx, "a", v), text.Set(ctx, "a", v), raw.Set(ctx, "a", []byte("plain text")), raw.Set(ctx, "bin", []byte{0xFF, 0}))
		_, _ = pack.GetOrLoad(ctx, "none", func(context.Context, string) (order, error) { return order{}, singlefill.ErrNotFound })
		payload := func(args ...string) string {
			var e struct {
				Codec   string
				Payload json.RawMessage
			}
			check(t, json.Unmarshal([]byte(c.ok(append([]string{"get", "-json"}, args...)...)), &e))
			var b bytes.Buffer
			if e.Payload != nil {
				check(t, json.Compact(&b, e.Payload))
			}
			return e.Codec + " " + b.String()
		}
		for _, test := range []struct{ got, want string }{
			{payload(ns, "a"), `msgpack {"ID":7,"Items":["tea"],"Prices":{"3":1.5}}`},
			{payload(ns+"j", "a"), `json {"ID":7,"Items":["tea"],"Prices":{"3":1.5}}`},
			{payload(ns+"r", "a"), `raw "plain text"`},
			{payload(ns+"r", "bin"), `raw "/wA="`},
			{payload(ns+"j", "a", "-codec", "raw"), `raw "{\"ID\":7,\"Items\":[\"tea\"],\"Prices\":{\"3\":1.5}}"`},
			{payload(ns, "none"), ` `},
		} {
			if test.got != test.want {
				t.Errorf("got %s, want %s", test.got, test.want)
			}
		}
		of := entry.FormatOf
		for _, test := range []struct {
			format        entry.Format
			payload, want string
		}{
			{of("json"), "7", "json 7"},
			{of("raw"), "7", `raw "7"`},
			{0, "7", "msgpack 55"}, // a guess
			{0, `{"a":7}`, `json {"a":7}`},
			{0, "plain", `raw "plain"`},
			{of("zstd+json"), "7", "zstd+json 7"},
			{of("zstd+json"), "\xC1zst\x01", `zstd+json as raw "wXpzdAE="`},
			{of("json"), "plain", `json as raw "plain"`},
			{of("gob"), "7", `unknown as raw "7"`},
			{of("msgpack"), "\x83\x90\x01\x81\x01\x02\x03\xc4\x01a\x91\x80", `msgpack {"[]":1,"a":[{}],"map[1:2]":3}`},
			{of("msgpack"), "\x92\xca\x7f\x80\x00\x00\x81\x01\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", `msgpack ["+Inf",{"1":"NaN"}]`},
		} {
			data, err := entry.Entry{Format: test.format, Payload: []byte(test.payload)}.Encode()
			check(t, err, rdb.Set(ctx, ns+":{e}", data, time.Hour).Err())
			if got := payload(ns, "e"); got != test.want {
				t.Errorf("%#x %q: got %s, want %s", test.format, test.payload, got, test.want)
			}
		}
		if got := c.ok("get", "-payload", ns+"r", "bin"); got != "\xff\x00" {
			t.Errorf("-payload: %q", got)
		}
		shown := c.ok("get", ns, "a")
		for _, want := range []string{`state: +fresh`, `fresh: +for \d+m`, `gone: +in 1h\d+m`, `payload: +\d+ bytes, msgpack`, `"tea"`} {
			if !regexp.MustCompile(want).MatchString(shown) {
				t.Errorf("no %q in\n%s", want, shown)
			}
		}
		if got := c.ok("get", ns, "none"); !strings.Contains(got, "not found: the source had no such value") {
			t.Errorf("an absence is\n%s", got)
		}
		if got := c.ok("ttl", ns, "a"); !regexp.MustCompile(`^fresh: fresh for \d+m.*, gone in 1h\d+m`).MatchString(got) {
			t.Errorf("ttl: %s", got)
		}
		check(t, pack.Expire(ctx, "a"))
		if got := c.ok("ttl", ns, "a"); !strings.HasPrefix(got, "stale: fresh until ") {
			t.Errorf("ttl of a stale value: %s", got)
		}
		check(t, rdb.Set(ctx, ns+":{text}", "no entry", time.Hour).Err())
		c.fails(1, "holds no entry", "get", ns, "text")
		c.fails(1, "holds no entry", "ttl", ns, "text")
		c.fails(1, "has no entry unknown", "get", ns, "unknown")
		c.fails(1, "has no entry unknown", "ttl", ns, "unknown")
		c.fails(1, "KEY is empty", "get", ns, "")
		c.fails(1, "the payload is not json", "get", "-codec=json", ns+"r", "a")
	})
}

// del, expire and clear refuse loads in flight, and reach the memory of processes with Near.
func TestChange_Promises(t *testing.T) {
	each(t, func(t *testing.T, c terminal, rdb redis.UniversalClient) {
		for _, change := range [][]string{{"del", "-timeout=10s", "NS", "k"}, {"expire", "NS", "k"}, {"clear", "-yes", "NS"}} {
			t.Run(change[0], func(t *testing.T) {
				ns, ctx := redistest.Namespace(t), t.Context()
				c := c
				c.TB = t
				args := slices.Clone(change)
				args[slices.Index(args, "NS")] = ns
				there := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Near: &singlefill.Near{MaxLag: 100 * time.Millisecond}})
				check(t, there.Set(ctx, "k", "old"))
				redistest.Await(t, "a hit in memory", func() bool {
					_, err := there.Get(ctx, "k")
					return err == nil && there.Stats().NearHits > 0
				})
				loader := cachetest.NewCacheIn[string](t, rdb, ns, nil)
				v, err := loader.GetOrLoad(ctx, "loading", func(context.Context, string) (string, error) {
					args := slices.Clone(args)
					if args[0] != "clear" {
						args = append(args, "loading")
					}
					c.ok(args...)
					return "loaded before", nil
				})
				if v != "loaded before" || err != nil {
					t.Errorf("the load itself: %q, %v", v, err)
				}
				if _, err := loader.Get(ctx, "loading"); err != singlefill.ErrMiss {
					t.Errorf("the value of a load under way is there: %v", err)
				}
				redistest.Await(t, "memory has forgotten it", func() bool {
					_, err := there.Get(ctx, "k")
					return err == singlefill.ErrMiss
				})
			})
		}
	})
}

// del and expire say which keys had no entry, and succeed.
func TestChange_Absent(t *testing.T) {
	each(t, func(t *testing.T, c terminal, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		there := cachetest.NewCacheIn[string](t, rdb, ns, nil)
		for change, done := range map[string]string{"expire": "made stale", "del": "deleted"} {
			check(t, there.Set(t.Context(), "k", "v"))
			out := c.ok(change, ns, "k", "typo")
			if !strings.Contains(out, "k: "+done+"\n") || !strings.Contains(out, "typo: no entry was there") {
				t.Errorf("%s: %q", change, out)
			}
		}
		if out := c.ok("del", "-json", ns, "typo"); !strings.Contains(strings.Join(strings.Fields(out), ""), `"absent":["typo"]`) {
			t.Errorf("del -json: %s", out)
		}
	})
}

// ls of a namespace without keys fails, and ls without an argument lists those that have some.
func TestList_Namespaces(t *testing.T) {
	each(t, func(t *testing.T, c terminal, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		check(t, cachetest.NewCacheIn[string](t, rdb, ns, nil).Set(t.Context(), "a", "v"))
		check(t, cachetest.NewCacheIn[string](t, rdb, ns, nil).Set(t.Context(), "b:{c}", "v"))
		check(t, rdb.Set(t.Context(), ns+"other:{k}", "no entry", time.Minute).Err())
		c.fails(1, "no key of the namespace "+ns+"typo", "ls", ns+"typo")
		c.fails(1, "no key of the namespace "+ns, "ls", "-match", "x*", ns)
		var list []struct {
			Namespace string
			Keys      int
		}
		check(t, json.Unmarshal([]byte(c.ok("ls", "-json")), &list))
		n := 0
		for _, l := range list {
			if l.Namespace == ns && l.Keys == 2 {
				n++
			}
			if l.Namespace == ns+"other" {
				t.Errorf("a foreign key is listed as a namespace: %v", list)
			}
		}
		if n != 1 {
			t.Errorf("ls: %v", list)
		}
	})
}

// An interrupt ends the question of clear, and nothing is deleted.
func TestClear_Interrupted(t *testing.T) {
	t.Parallel()
	s := redistest.Shared(t)
	c := cachetest.NewCacheIn[string](t, s.Client(t), redistest.Namespace(t), nil)
	check(t, c.Set(t.Context(), "k", "v"))
	ctx, cancel := context.WithCancel(t.Context())
	silent, answer := io.Pipe()
	defer answer.Close()
	asked := &writer{wrote: cancel}
	x := &execution{
		stdin: silent, stdout: io.Discard, stderr: asked, ask: true,
		getenv: func(string) string { return "redis://" + s.Addr },
	}
	if status := x.run(ctx, []string{"clear", c.Namespace()}); status != 1 || !strings.HasSuffix(asked.String(), "interrupted\n") {
		t.Errorf("status %d, %s", status, asked)
	}
	_, err := c.Get(t.Context(), "k")
	check(t, err)
}

// A writer is a buffer that calls wrote when something has been written.
type writer struct {
	bytes.Buffer
	wrote func()
}

func (w *writer) Write(p []byte) (int, error) {
	defer w.wrote()
	return w.Buffer.Write(p)
}

// clear asks for the name of the namespace. It refuses to go on without a terminal or with another answer.
func TestClear_Asks(t *testing.T) {
	t.Parallel()
	s := redistest.Shared(t)
	rdb := s.Client(t)
	ns, ctx := redistest.Namespace(t), t.Context()
	cache := cachetest.NewCacheIn[string](t, rdb, ns, nil)
	for i := range 1000 {
		check(t, cache.Set(ctx, fmt.Sprint(i), "v"))
	}
	c := terminal{TB: t, url: "redis://" + s.Addr}
	c.fails(1, "stdin is no terminal: use -yes", "clear", ns)
	c.stdin = "yes\n"
	c.fails(1, "nothing was deleted", "clear", ns)
	if _, _, found := c.listed(ns); found != 1000 {
		t.Errorf("%d keys are left", found)
	}
	c.stdin = ns + "\n"
	if stdout, _, status := c.run("clear", ns); stdout != "1000 values deleted\n" || status != 0 {
		t.Errorf("%q, status %d", stdout, status)
	}
	c.fails(1, "no key of the namespace", "ls", ns)
}

// locks tells who loads what, and who holds and waits for what, since when.
func TestLocks(t *testing.T) {
	each(t, func(t *testing.T, c terminal, rdb redis.UniversalClient) {
		ns, ctx := redistest.Namespace(t), t.Context()
		cache := cachetest.NewCacheIn[string](t, rdb, ns, nil)
		_, err := cache.GetOrLoad(ctx, "}k", func(context.Context, string) (string, error) {
			var loads []struct {
				Key, Holder string
				Held, Left  float64
			}
			check(t, json.Unmarshal([]byte(strings.ReplaceAll(c.ok("locks", "-json", ns), "_seconds", "")), &loads))
			if len(loads) != 1 || loads[0].Key != "}k" || len(loads[0].Holder) != 26 || loads[0].Held < 0 || loads[0].Held > 60 || loads[0].Left <= 0 || loads[0].Left > 20 {
				t.Errorf("during a load: %+v", loads)
			}
			return "v", nil
		})
		check(t, err)
		if got := strings.TrimSpace(c.ok("locks", "-json", ns)); got != "[]" {
			t.Errorf("after the load: %s", got)
		}

		waits, cancel := context.WithCancel(ctx)
		defer cancel()
		mutex, err := lock.NewMutex(rdb, ns+" mutex", nil)
		check(t, err)
		fair, err := lock.NewFairMutex(rdb, ns+" fair", nil)
		check(t, err)
		semaphore, err := lock.NewSemaphore(rdb, ns+" semaphore", 3, &lock.Options{Holder: "web-1"})
		check(t, err)
		var fences []int64
		for _, l := range []*lock.Locker{mutex, fair, semaphore, semaphore} {
			lease, err := l.Acquire(ctx)
			check(t, err)
			defer lease.Release(ctx)
			fences = append(fences, lease.Fence())
		}
		gone := make(chan struct{})
		defer func() { cancel(); <-gone }()
		go func() { defer close(gone); _, _ = fair.Acquire(waits) }()
		type seen struct {
			Name, Kind string
			Size       int
			Holders    []struct {
				Token, Name string
				Fence       int64
			}
			Waiting int
			Fence   int64
		}
		locks := func() map[string]seen {
			var all []seen
			check(t, json.Unmarshal([]byte(c.ok("locks", "-json")), &all))
			found := make(map[string]seen)
			for _, l := range all {
				if name, ok := strings.CutPrefix(l.Name, ns+" "); ok {
					found[name] = l
				}
			}
			return found
		}
		redistest.Await(t, "a waiter of the fair mutex", func() bool { return locks()["fair"].Waiting == 1 })
		all := locks()
		for name, want := range map[string]struct {
			kind   string
			fences []int64 // of the holders
			size   int
		}{"mutex": {"mutex", fences[:1], 0}, "fair": {"fair mutex", fences[1:2], 0}, "semaphore": {"semaphore", fences[2:], 3}} {
			if l := all[name]; l.Kind != want.kind || len(l.Holders) != len(want.fences) || l.Size != want.size || l.Fence != slices.Max(want.fences) {
				t.Errorf("%s: %+v", name, l)
			}
			for _, h := range all[name].Holders {
				if !slices.Contains(want.fences, h.Fence) {
					t.Errorf("%s has the fence %d, want one of %d", name, h.Fence, want.fences)
				}
				want.fences = slices.DeleteFunc(slices.Clone(want.fences), func(f int64) bool { return f == h.Fence })
				if len(h.Token) != 26 || (h.Name == "web-1") != (name == "semaphore") || !strings.Contains(h.Name, "-1") && !strings.HasSuffix(h.Name, fmt.Sprint(":", os.Getpid())) {
					t.Errorf("%s is held by %+v", name, h)
				}
			}
		}
		text := c.ok("locks")
		for _, want := range []string{"semaphore of 3", "web-1", fmt.Sprint(fences[2]), fmt.Sprint(fences[3])} {
			if !strings.Contains(text, want) {
				t.Errorf("no %s in\n%s", want, text)
			}
		}
	})
}

// A user who may only read can use all commands that change nothing.
func TestReadOnlyUser(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	rdb := s.Client(t)
	ns, ctx := redistest.Namespace(t), t.Context()
	check(t, cachetest.NewCacheIn[string](t, rdb, ns, nil).Set(ctx, "k", "v"))
	var user redis.Options
	s.User(t, "~*", "+@read", "+info", "+ping", "+time")(&user)
	c := terminal{TB: t, url: fmt.Sprintf("redis://%s:%s@%s", user.Username, user.Password, s.Addr)}
	for _, args := range [][]string{{"ls"}, {"ls", ns}, {"get", ns, "k"}, {"ttl", ns, "k"}, {"locks", ns}, {"locks"}} {
		c.ok(args...)
	}
	c.fails(1, "NOPERM", "del", ns, "k")
}

// A Sentinel names the master.
func TestSentinel(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	sentinel := redistest.StartSentinel(t, s)
	ns := redistest.Namespace(t)
	check(t, cachetest.NewCacheIn[string](t, s.Client(t), ns, nil).Set(t.Context(), "k", "v"))
	c := terminal{TB: t, url: "redis://" + sentinel.Addr + "?master_name=" + redistest.MasterName}
	c.ok("get", ns, "k")
	c.ok("del", ns, "k")
	c.fails(1, "has no entry", "get", ns, "k")
}

// A wrong command line is explained, with status 2, before anything is asked.
func TestUsage(t *testing.T) {
	t.Parallel()
	c := terminal{TB: t, url: "redis://127.0.0.1:1"}
	for message, args := range map[string][]string{
		"usage: singlefill [-redis URL]":              nil,
		"not defined: -limit":                         {"-limit=1", "ls"},
		`there is no command "nix"`:                   {"nix"},
		"usage: singlefill ls [flags] [NAMESPACE]":    {"ls", "a", "b"},
		"usage: singlefill get [flags] NAMESPACE KEY": {"get", "ns"},
		"-x":                        {"ls", "-x", "ns"},
		"usage: singlefill version": {"version", "v1"},
		"-timeout is 0s: at least 1ms is allowed":     {"ls", "-timeout=0", "ns"},
		"-timeout is 1ns: at least 1ms is allowed":    {"-timeout=1ns", "ls", "ns"},
		"braces and control characters are not allow": {"ls", "users:{42}"},
		`namespace is "a\nb"`:                         {"tags", "a\nb"},
		"valid UTF-8 is needed":                       {"get", "\xff", "k"},
		"namespace is empty":                          {"locks", ""},
		`namespace is "{ns}"`:                         {"del", "{ns}", "k"},
	} {
		c.fails(2, message, args...)
	}
	if text := c.ok("help"); strings.Count(text, "\n") < 10 || !strings.Contains(text, "version") {
		t.Errorf("help: %s", text)
	}
	info, _ := debug.ReadBuildInfo()
	if got := c.ok("version"); got != info.Main.Version+"\n" { // it asks no server
		t.Errorf("version: %q, want %q", got, info.Main.Version)
	}
	s := redistest.Shared(t)
	c.url = "redis://" + s.Addr
	for message, args := range map[string][]string{
		`-sort is "x": key, age, left, size or load is allowed`: {"ls", "-sort=x", "ns"},
		"-limit is -1: 0 or more is allowed":                    {"ls", "-limit=-1", "ns"},
		"-match selects keys: name their NAMESPACE":             {"ls", "-match=user*"},
		`-codec is "x": auto, msgpack, json or raw is allowed`:  {"get", "-codec=x", "ns", "k"},
	} {
		c.fails(2, message, args...)
	}
	c.ok("del", "ns", "--", "-k")
	ns := redistest.Namespace(t)
	check(t, cachetest.NewCacheIn[string](t, s.Client(t), ns, nil).Set(t.Context(), "k", "v"))
	c.url = "redis://127.0.0.1:1"
	for _, args := range [][]string{
		{"-redis", s.Addr, "-json", "ttl", ns, "k"}, {"ttl", "-redis", s.Addr, ns, "k", "-json"}, {"-redis=nix", "-json", "ttl", "-redis", s.Addr, ns, "k"},
	} {
		if got := c.ok(args...); !strings.Contains(got, `"state": "fresh"`) {
			t.Errorf("%q: %s", args, got)
		}
	}
}

// An address that leads nowhere is named without its password.
func TestConnect_Errors(t *testing.T) {
	t.Parallel()
	c := terminal{TB: t}
	for _, address := range []string{
		"redis://u:secret@127.0.0.1:1", "u:secret@127.0.0.1:1", "redis://u:secret@127.0.0.1:x", "http://u:secret@127.0.0.1",
		"redis://u:secret@127.0.0.1:1?addr=127.0.0.1:2", "redis://:secret@127.0.0.1:1?nix=1",
		// A password is cut.
		"redis://u:secret/@127.0.0.1", "u:secret#@127.0.0.1", "redis://u:secret?@127.0.0.1", "redis://u:%secret@127.0.0.1", "redis://u:1:secret/@127.0.0.1",
		"redis://:1/secret@127.0.0.1", "redis://:1?secret@127.0.0.1", "redis://:1#secret@127.0.0.1", "redis://u@127.0.0.1:1/secret@h?master_name=m",
		"redis://:1?secret@127.0.0.1&addr=h", "unix://u:1/secret@/sock", "redis://127.0.0.1:77777#@127.0.0.1",
	} {
		for _, args := range [][]string{{"ls", "ns"}, {"ls", "-redis", address, "ns"}} {
			c.url = address
			source := "REDIS_URL"
			if len(args) > 2 {
				c.url, source = "", "-redis"
			}
			stdout, stderr, status := c.run(append(args, "-timeout=2s")...)
			if status != 1 || !strings.HasPrefix(stderr, "singlefill: "+source) || strings.Contains(stdout+stderr, "%se") || strings.Contains(stdout+stderr, "secret") || strings.Contains(stderr, "77777") {
				t.Errorf("%s: status %d, %q", address, status, stderr)
			}
		}
	}
}

// A server that takes connections and does not answer is named.
func TestConnect_Frozen(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	s.Freeze()
	defer s.Thaw()
	for source, args := range map[string][]string{"REDIS_URL": nil, "-redis": {"-redis", "redis://u:secret@" + s.Addr}} {
		for _, query := range []string{"", "?addr=" + s.Addr, "?master_name=m"} {
			c := terminal{TB: t, url: "redis://u:secret@" + s.Addr + query}
			stdout, stderr, status := c.run(append([]string{"ls", "ns", "-timeout=100ms"}, args...)...)
			if status != 1 || stdout != "" || !strings.HasPrefix(stderr, "singlefill: "+source+": ") || !strings.Contains(stderr, s.Addr+" does not answer: ") {
				t.Errorf("%q %q: status %d, %q, %q", query, args, status, stdout, stderr)
			}
		}
	}
}

// The node of a Cluster that does not answer is named, also if it is not the one of the URL.
func TestScan_FrozenNode(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t).Nodes
	nodes[1].Freeze()
	defer nodes[1].Thaw()
	c := terminal{TB: t, url: nodes[0].Addr}
	c.fails(1, nodes[1].Addr+" does not answer: ", "ls", "-timeout=100ms", "ns")
}

// Long work shows on a terminal how far it is, and removes the line in the end.
func TestProgress(t *testing.T) {
	each(t, func(t *testing.T, c terminal, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		cache := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Tags: func(string, string) []string { return []string{"eu"} }})
		check(t, cache.DeleteTag(t.Context(), "eu"), cache.Set(t.Context(), "k", "v")) // from now on all tags are known
		c.progress = true
		for _, test := range []struct {
			want string
			args []string
		}{
			{"keys looked at", []string{"ls"}},
			{"keys looked at", []string{"ls", ns}},
			{"keys looked at", []string{"locks", ns}},
			{"1 tags found", []string{"tags", ns}},
			{"1 values deleted", []string{"clear", "-yes", "-tag=eu", ns}},
			{"pass 1 of 2", []string{"clear", "-yes", ns}},
		} {
			stdout, stderr, status := c.run(test.args...)
			if status != 0 || !strings.Contains(stderr, test.want) || !strings.HasSuffix(stderr, "\r\x1b[K") || strings.Contains(stdout, "\r") {
				t.Errorf("%q: status %d, %q, %q; want %q", test.args, status, stdout, stderr, test.want)
			}
		}
	})
}

// The URL's timeouts take the place of -timeout, also for a Cluster of which it names a node.
func TestConnect_Timeouts(t *testing.T) {
	t.Parallel()
	node := redistest.SharedCluster(t).Client(t).Options().Addrs[0]
	for _, more := range []string{"", "&addr=" + node} {
		rdb, err := connect(t.Context(), "redis://"+node+"?write_timeout=7s&read_timeout=0"+more, "", 9*time.Second)
		check(t, err)
		o := rdb.(*redis.ClusterClient).Options()
		if o.DialTimeout != 9*time.Second || o.WriteTimeout != 7*time.Second || o.ReadTimeout != 0 { // 0: none
			t.Errorf("%q: dial %v, read %v, write %v", more, o.DialTimeout, o.ReadTimeout, o.WriteTimeout)
		}
		check(t, rdb.Close())
	}
}

// A server that expects TLS closes the connection, some after an alert. The command says which scheme to use.
func TestConnect_TLSPort(t *testing.T) {
	t.Parallel()
	for name, refuse := range map[string]func(net.Conn){
		"closed": func(conn net.Conn) { _ = tls.Server(conn, new(tls.Config)).Handshake() },
		"alert": func(conn net.Conn) {
			_, _ = conn.Read(make([]byte, 1024))
			_, _ = conn.Write([]byte{21, 3, 1, 0, 2, 2, 70}) // protocol version
		},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		check(t, err)
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				refuse(conn)
				_ = conn.Close()
			}
		}()
		for _, query := range []string{"", "?addr=" + l.Addr().String()} {
			_, stderr, status := terminal{TB: t, url: "redis://u:secret@" + l.Addr().String() + query}.run("ls", "ns")
			if status != 1 || !strings.Contains(stderr, "if it expects TLS, use rediss:// in place of redis://") || strings.Contains(stderr, "secret") {
				t.Errorf("%s, %q: status %d, %q", name, query, status, stderr)
			}
		}
		check(t, l.Close())
	}
}

// ls, ttl and get tell the version of an entry.
func TestVersion(t *testing.T) {
	each(t, func(t *testing.T, c terminal, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		for version, key := range []string{"of no version", "of version 1"} {
			cache, err := singlefill.New(rdb, ns, time.Hour, &singlefill.Options[string]{Version: uint32(version)})
			check(t, err, cache.Set(t.Context(), key, "v"), cache.Close())
			for _, args := range [][]string{{"ttl", "-json", ns, key}, {"get", "-json", ns, key}} {
				var r struct{ Version uint32 }
				check(t, json.Unmarshal([]byte(c.ok(args...)), &r))
				if r.Version != uint32(version) {
					t.Errorf("%q tells version %d", args, r.Version)
				}
			}
		}
		if got := c.ok("get", "-payload", ns, "of version 1"); got != "\xa1v" {
			t.Errorf("the payload is %q", got)
		}
		if got := c.ok("ls", ns); !regexp.MustCompile(`(?m)VERSION$(?:\n.*)*\nof version 1 .* 1$`).MatchString(got) {
			t.Errorf("ls shows no version: %s", got)
		}
	})
}
