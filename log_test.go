package singlefill_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// logTo returns a logger without times.
func logTo(b *bytes.Buffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

// LogTrace writes one line for each load that an operator has to know of, and none for any other.
func TestLogTrace_Lines(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		opts *singlefill.LogOptions
		run  func(t *testing.T, c *singlefill.Cache[any], rdb *redis.Client)
		want string

		reply string // of Redis to every command; "": none
	}{
		{"hits, loads and no value", nil, func(t *testing.T, c *singlefill.Cache[any], _ *redis.Client) {
			_, _ = c.GetOrLoad(t.Context(), "k", cachetest.Gives[any]("v"))
			_, _ = c.GetOrLoad(t.Context(), "k", cachetest.Gives[any]("v"))
			_, _ = c.GetOrLoad(t.Context(), "none", cachetest.Fails[any](singlefill.ErrNotFound))
		}, "", ""},
		{"failed", nil, func(t *testing.T, c *singlefill.Cache[any], _ *redis.Client) {
			_, _ = c.GetOrLoad(t.Context(), "secret", cachetest.Fails[any](errors.New("boom")))
		}, "level=WARN msg=\"load failed\" cache=ns duration=0s err=boom\n", ""},
		{"failed, slow, with its key", &singlefill.LogOptions{Keys: true}, func(t *testing.T, c *singlefill.Cache[any], _ *redis.Client) {
			_, _ = c.GetOrLoad(t.Context(), "k", cachetest.Takes[any](3*time.Second, nil, errors.New("boom")))
		}, "level=WARN msg=\"load failed\" cache=ns duration=3s key=k err=boom\n", ""},
		{"slow", nil, func(t *testing.T, c *singlefill.Cache[any], _ *redis.Client) {
			_, _ = c.GetOrLoad(t.Context(), "a", cachetest.Takes[any](time.Second-1, "v", nil))
			_, _ = c.GetOrLoad(t.Context(), "b", cachetest.Takes[any](time.Second, "v", nil))
		}, "level=INFO msg=\"load was slow\" cache=ns duration=1s\n", ""},
		{"slow is off", &singlefill.LogOptions{Slow: -1}, func(t *testing.T, c *singlefill.Cache[any], _ *redis.Client) {
			_, _ = c.GetOrLoad(t.Context(), "k", cachetest.Takes[any](5*time.Second, "v", nil))
		}, "", ""},
		{"not encoded", nil, func(t *testing.T, c *singlefill.Cache[any], _ *redis.Client) {
			_, _ = c.GetOrLoad(t.Context(), "k", cachetest.Gives[any](func() {}))
		}, "level=WARN msg=\"loaded value not stored\" cache=ns duration=0s store_err=", ""},
		{"refused", nil, func(t *testing.T, c *singlefill.Cache[any], _ *redis.Client) {
			_, _ = c.GetOrLoad(t.Context(), "k", func(ctx context.Context, key string) (any, error) { return "v", c.Delete(ctx, key) })
		}, "level=INFO msg=\"load refused: its key was changed meanwhile, or its lock was lost\" cache=ns duration=0s\n", ""},
		{"Redis is silent", nil, func(t *testing.T, c *singlefill.Cache[any], rdb *redis.Client) {
			_ = rdb.Close()
			_, _ = c.GetOrLoad(t.Context(), "k", cachetest.Gives[any]("v"))
		}, "level=WARN msg=\"load without the lock: redis did not answer, or refused\" cache=ns duration=0s unlocked=true\n", ""},
		{"Redis is out of memory", nil, func(t *testing.T, c *singlefill.Cache[any], _ *redis.Client) {
			_, _ = c.GetOrLoad(t.Context(), "k", cachetest.Gives[any]("v"))
		}, "level=WARN msg=\"redis refused a command\" cache=ns op=get err=\"OOM command not allowed\"\n" +
			"level=WARN msg=\"redis refused a command\" cache=ns op=lock err=\"OOM command not allowed\"\n" +
			"level=WARN msg=\"load without the lock: redis did not answer, or refused\" cache=ns duration=0s unlocked=true\n", "OOM command not allowed"},
		{"another type in the namespace", &singlefill.LogOptions{Keys: true}, func(t *testing.T, c *singlefill.Cache[any], rdb *redis.Client) {
			rdb.Set(t.Context(), "ns:{k}", "other", time.Hour)
			_, _ = c.GetOrLoad(t.Context(), "k", cachetest.Gives[any]("v"))
		}, "level=WARN msg=\"a value in redis is not one of this cache: another type in its namespace, or another program\" cache=ns " +
			"err=\"singlefill: entry is shorter than its header\" key=k\n", ""},
		{"a stale hit", nil, func(t *testing.T, c *singlefill.Cache[any], rdb *redis.Client) {
			redistest.Must(t, c.Set(t.Context(), "k", "old"))
			_, _ = c.GetOrLoad(t.Context(), "k", cachetest.Gives[any]("new"))
			time.Sleep(2 * time.Second)
		}, "level=WARN msg=\"a hit was stale: the source had another value for more than a second\" cache=ns age=0s near=false\n", ""},
	} {
		cachetest.RunInBubble(t, test.name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			var b bytes.Buffer
			c, err := singlefill.New(rdb, "ns", time.Hour, &singlefill.Options[any]{Audit: 1})
			redistest.Must(t, err)
			c.AddTrace(singlefill.LogTrace(logTo(&b), test.opts))
			m.SetError(test.reply)
			test.run(t, c, rdb)
			m.SetError("")
			redistest.Must(t, c.Close())
			got := b.String()
			if i := strings.Index(got, "store_err="); i >= 0 {
				got = got[:i+len("store_err=")]
			}
			if got != test.want {
				t.Errorf("wrote\n%s, want\n%s", got, test.want)
			}
		})
	}
}

// An outage writes ten lines of a kind each second. The next line tells how many were dropped.
func TestLogTrace_Sampled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		trace := singlefill.LogTrace(logTo(&b), nil)
		fail := func(n int) {
			for range n {
				trace.LoadDone(t.Context(), singlefill.LoadInfo{Key: "k", Err: errors.New("boom")})
			}
		}
		want := func(what string, lines int, last string) {
			t.Helper()
			got := strings.Split(strings.TrimSpace(b.String()), "\n")
			if len(got) != lines || !strings.HasSuffix(got[len(got)-1], last) {
				t.Errorf("%s: %d lines, the last one %q; want %d, that ends with %q", what, len(got), got[len(got)-1], lines, last)
			}
			b.Reset()
		}
		fail(1000)
		want("a thousand in a second", 10, "err=boom")
		trace.LoadDone(t.Context(), singlefill.LoadInfo{Key: "k", Fenced: true})
		want("another kind", 1, "duration=0s")
		time.Sleep(time.Second)
		fail(1)
		want("in the next second", 1, "dropped=990")
		fail(1)
		want("after that", 1, "err=boom")
	})
}

// The lines of the breaker name the cache, and are written whatever the program does with the function.
// The first one says why: here a client of one node of a Cluster is sent to another.
//
//fault:one-cluster-node
func TestLogTrace_Breaker(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var b bytes.Buffer
		trace, changes := singlefill.LogTrace(logTo(&b), nil), 0
		logged := trace.BreakerChanged
		trace.BreakerChanged = func(open bool) { changes++; logged(open) }
		for _, ns := range []string{"users", "orders"} {
			c, err := singlefill.New(rdb, ns, time.Hour, &singlefill.Options[string]{Trace: trace})
			redistest.Must(t, err)
			m.SetError("MOVED 1 127.0.0.1:1") // the client repeats no such command
			for !c.Stats().BreakerOpen {
				_, _ = c.GetOrLoad(t.Context(), "k", cachetest.Gives("v"))
			}
			m.SetError("")
			for c.Stats().BreakerOpen {
				time.Sleep(time.Second)
			}
			synctest.Wait()
			redistest.Must(t, c.Close())
			var got string
			for line := range strings.Lines(b.String()) {
				if !strings.Contains(line, "load without the lock") {
					got += line
				}
			}
			want := "level=WARN msg=\"redis does not answer: no commands are sent\" cache=" + ns + " err=\"MOVED 1 127.0.0.1:1\"\n" +
				"level=INFO msg=\"redis answers again\" cache=" + ns + "\n"
			if got != want {
				t.Errorf("wrote\n%s, want\n%s", got, want)
			}
			b.Reset()
		}
		if changes != 4 {
			t.Errorf("the function of the program was called %d times, want 4", changes)
		}
	})
}

// The line of a load that panicked has the stack: of a refresh no caller gets it.
func TestLogTrace_PanicInARefresh(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var b bytes.Buffer
		opts := singlefill.Options[string]{StaleWhileRevalidate: time.Hour, Trace: singlefill.LogTrace(logTo(&b), nil)}
		c := cachetest.OldCache(t, rdb, opts, "old", time.Second)
		cachetest.GoGet(t.Context(), c, "k", panicsInARefresh).Want(t, "old")
		synctest.Wait()
		for _, want := range []string{"msg=\"load failed\" cache=ns ", " refresh=true err=\"singlefill: Loader panicked: boom\" stack=", "panicsInARefresh"} {
			if !strings.Contains(b.String(), want) {
				t.Errorf("wrote\n%s, want %q", b.String(), want)
			}
		}
	})
}

func panicsInARefresh(context.Context, string) (string, error) { panic("boom") }

// A namespace that was cleared for its tags had no error, and one whose Clear failed was not cleared.
func TestLogTrace_Tags(t *testing.T) {
	t.Parallel()
	for want, info := range map[string]singlefill.TagInfo{
		"": {Tags: []string{"a"}, Keys: 3},
		"level=WARN msg=\"the tags of the values were not known, as at first, or after a loss in redis: the namespace was cleared\" tags=1\n": {
			Tags: []string{"a"}, Cleared: true,
		},
		"level=ERROR msg=\"values with a tag may not have been invalidated\" tags=2 err=boom\n": {
			Tags: []string{"a", "b"}, Cleared: true, Err: errors.New("boom"),
		},
	} {
		var b bytes.Buffer
		singlefill.LogTrace(logTo(&b), nil).TagDone(t.Context(), info)
		if b.String() != want {
			t.Errorf("%+v: wrote\n%s, want\n%s", info, b.String(), want)
		}
	}
}
