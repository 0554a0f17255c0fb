package otel_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
	"github.com/singlefill/singlefill/lock"
)

// A load has one span, whose parent is the span of the call; the Loader's context carries it. A hit
// has none. What does not exist is no error.
func TestSpans_Load(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	for name, test := range map[string]struct {
		calls int
		load  func(ctx context.Context, c *singlefill.Cache[string]) (string, error)
		want  string
	}{
		"value, and a hit": {2, func(context.Context, *singlefill.Cache[string]) (string, error) {
			return "v", nil
		}, "kind=call load.size=1 load.stored=1"},
		"not found": {1, func(context.Context, *singlefill.Cache[string]) (string, error) {
			return "", fmt.Errorf("no row: %w", singlefill.ErrNotFound)
		}, "kind=call load.not_found=1 load.size=1 load.stored=1"},
		"error": {1, func(context.Context, *singlefill.Cache[string]) (string, error) {
			return "", fmt.Errorf("query: %w", new(sourceError))
		}, `error.type=*otel_test.sourceError kind=call load.size=1 load.stored=0, Error ""`},
		"panic": {1, func(context.Context, *singlefill.Cache[string]) (string, error) {
			panic(singlefill.ErrNotFound)
		}, `error.type=*singlefill.PanicError kind=call load.size=1 load.stored=0, Error ""`},
		"Goexit": {1, func(context.Context, *singlefill.Cache[string]) (string, error) {
			runtime.Goexit()
			return "", nil
		}, `error.type=*singlefill.PanicError kind=call load.size=1 load.stored=0, Error ""`},
		"deleted during the load": {1, func(ctx context.Context, c *singlefill.Cache[string]) (string, error) {
			return "v", c.Delete(ctx, "a")
		}, "kind=call load.fenced=1 load.size=1 load.stored=0"},
	} {
		t.Run(name, func(t *testing.T) {
			x, ns := newTelemetry(t), redistest.Namespace(t)
			c := x.newCache(t, rdb, ns, nil)
			ctx, request := x.request(t.Context())
			var inside trace.SpanContext
			for range test.calls {
				_, _ = c.GetOrLoad(ctx, "a", func(ctx context.Context, _ string) (string, error) {
					inside = trace.SpanContextFromContext(ctx)
					return test.load(ctx, c)
				})
			}
			_ = c.Close() // LoadDone may come later than the answer
			x.wantSpans(t, "load "+ns+": cache="+ns+" "+test.want)
			for _, s := range x.spans.Ended() {
				if s.Parent().SpanID() != request.SpanID() || s.SpanContext().TraceID() != request.TraceID() {
					t.Errorf("the parent is %v, want the span of the call, %v", s.Parent().SpanID(), request.SpanID())
				}
				if s.SpanContext().SpanID() != inside.SpanID() {
					t.Errorf("the Loader runs in the span %v, want %v", inside.SpanID(), s.SpanContext().SpanID())
				}
			}
		})
	}
}

type sourceError struct{}

func (*sourceError) Error() string { return "no" }

// An error whose methods panic is a failed load.
func TestSpans_ErrorThatPanics(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	x := newTelemetry(t)
	x.Keys = true
	c := x.newCache(t, rdb, "ns", nil)
	_, _ = c.GetOrLoad(t.Context(), "k", fails(brokenError{}))
	_ = c.Close()
	x.wantSpans(t, `load ns: cache=ns error.type=_OTHER keys=["k"] kind=call load.size=1 load.stored=0, Error ""`)
}

type brokenError struct{}

func (brokenError) Error() string     { panic("Error") }
func (brokenError) ErrorType() string { panic("ErrorType") }
func (brokenError) Is(error) bool     { panic("Is") }

// inBubble runs a test with the clock of a synctest bubble.
func inBubble(t *testing.T, run func(t *testing.T, x *telemetry, rdb *redis.Client)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x := newTelemetry(t)
		_, rdb := redistest.StartMini(t)
		run(t, x, rdb)
	})
}

func took(s sdktrace.ReadOnlySpan) time.Duration { return s.EndTime().Sub(s.StartTime()) }

// named returns the spans of that name that have been ended.
func (x *telemetry) named(name string) (spans []sdktrace.ReadOnlySpan) {
	for _, s := range x.spans.Ended() {
		if s.Name() == name {
			spans = append(spans, s)
		}
	}
	return spans
}

// A refresh in the background has a span, in the trace of the call that started it.
func TestSpans_Refresh(t *testing.T) {
	inBubble(t, func(t *testing.T, x *telemetry, rdb *redis.Client) {
		c := x.newCache(t, rdb, "ns", &singlefill.Options[string]{StaleWhileRevalidate: time.Hour})
		redistest.Must(t, c.Set(t.Context(), "k", "v"))
		redistest.Must(t, c.Expire(t.Context(), "k"))
		ctx, request := x.request(t.Context())
		if v, err := c.GetOrLoad(ctx, "k", gives("w")); v != "v" || err != nil {
			t.Errorf("%q, %v", v, err)
		}
		synctest.Wait()
		x.wantSpans(t, "load ns: cache=ns kind=refresh load.size=1 load.stored=1")
		if s := x.spans.Ended(); len(s) != 1 || s[0].Parent().SpanID() != request.SpanID() {
			t.Error("the parent is not the span of the call")
		}
		x.wantValues(t, map[string]float64{
			"gets cache=ns layer=redis result=stale":    1,
			"stale.served cache=ns reason=revalidating": 1,
			"loads cache=ns kind=refresh result=value":  1,
			"load.duration cache=ns kind=refresh":       1,
			"stores cache=ns result=stored":             1,
		})
	})
}

// One call of a ManyLoader has one span for all its keys, which ends with the last of them.
func TestSpans_ManyLoader(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	for name, test := range map[string]struct {
		load func(ctx context.Context, c *singlefill.Cache[string]) (map[string]string, error)
		want string
	}{
		"values": {func(ctx context.Context, c *singlefill.Cache[string]) (map[string]string, error) {
			return map[string]string{"x": "v", "y": "v"}, c.Delete(ctx, "y")
		}, "kind=call load.fenced=1 load.not_found=1 load.size=3 load.stored=2"},
		"error": {func(context.Context, *singlefill.Cache[string]) (map[string]string, error) {
			return nil, new(sourceError)
		}, `error.type=*otel_test.sourceError kind=call load.size=3 load.stored=0, Error ""`},
		"panic": {func(context.Context, *singlefill.Cache[string]) (map[string]string, error) {
			panic("no")
		}, `error.type=*singlefill.PanicError kind=call load.size=3 load.stored=0, Error ""`},
	} {
		t.Run(name, func(t *testing.T) {
			x, ns := newTelemetry(t), redistest.Namespace(t)
			c := x.newCache(t, rdb, ns, nil)
			ctx, request := x.request(t.Context())
			_, _ = c.GetOrLoadMany(ctx, []string{"x", "y", "z"}, func(ctx context.Context, _ []string) (map[string]string, error) {
				if n := len(x.spans.Started()); n != 1 {
					t.Errorf("%d spans have begun, want that of the call", n)
				}
				return test.load(ctx, c)
			})
			_ = c.Close()
			x.wantSpans(t, "load "+ns+": cache="+ns+" "+test.want)
			if s := x.spans.Ended(); len(s) != 1 || s[0].Parent().SpanID() != request.SpanID() {
				t.Error("the parent is not the span of the call")
			}
		})
	}
}

// A call that waits for the load of another one has a span of its wait, with a link to the span of the
// load. It is in the trace of the call that waited.
func TestSpans_Shared(t *testing.T) {
	inBubble(t, func(t *testing.T, x *telemetry, rdb *redis.Client) {
		c := x.newCache(t, rdb, "ns", nil)
		load := func(context.Context, string) (string, error) { time.Sleep(3 * time.Second); return "v", nil }
		var wg sync.WaitGroup
		wg.Go(func() {
			ctx, _ := x.request(t.Context())
			_, _ = c.GetOrLoad(ctx, "k", load)
		})
		time.Sleep(time.Second)
		ctx, request := x.request(t.Context())
		if v, err := c.GetOrLoad(ctx, "k", load); v != "v" || err != nil {
			t.Errorf("%q, %v", v, err)
		}
		wg.Wait()
		synctest.Wait()
		x.wantSpans(t, "load ns: cache=ns kind=call load.size=1 load.stored=1", "wait ns: cache=ns wait.for=call")
		wait, first := x.named("wait ns")[0], x.named("load ns")[0]
		if links := wait.Links(); len(links) != 1 || links[0].SpanContext.SpanID() != first.SpanContext().SpanID() {
			t.Errorf("the wait has the links %v, want one to the load", links)
		}
		if wait.Parent().SpanID() != request.SpanID() || took(wait) != 2*time.Second || !wait.EndTime().Equal(time.Now()) {
			t.Errorf("the wait took %v and has the parent %v, want 2s and %v", took(wait), wait.Parent().SpanID(), request.SpanID())
		}
		if n := x.values(t)["wait.duration cache=ns"]; n != 0 {
			t.Errorf("%v waits for another process, want none", n)
		}
	})
}

// A wait for another process has a span, in the trace of the call that waited, without a link. The
// same holds for a call that joins it.
func TestSpans_OtherProcess(t *testing.T) {
	inBubble(t, func(t *testing.T, x *telemetry, rdb *redis.Client) {
		there, here := cachetest.NewCacheIn[string](t, rdb, "ns", nil), x.newCache(t, rdb, "ns", nil)
		var wg sync.WaitGroup
		wg.Go(func() {
			_, _ = there.GetOrLoad(t.Context(), "k", func(context.Context, string) (string, error) { time.Sleep(3 * time.Second); return "v", nil })
		})
		synctest.Wait()
		get := func(request context.Context) {
			if v, err := here.GetOrLoad(request, "k", gives("mine")); v != "v" || err != nil {
				t.Errorf("%q, %v", v, err)
			}
		}
		first, parent := x.request(t.Context())
		wg.Go(func() { get(first) })
		synctest.Wait()
		get(t.Context())
		wg.Wait()
		waits := x.named("wait ns")
		if len(waits) != 2 || len(x.spans.Ended()) != 2 {
			t.Fatalf("%d waits, %d spans, want 2 of each", len(waits), len(x.spans.Ended()))
		}
		for _, s := range waits {
			line := strings.Join(words(s.Attributes()), " ")
			if d := took(s); d < 3*time.Second || d > 4*time.Second || len(s.Links()) > 0 {
				t.Errorf("%s took %v and has the links %v, want 3s and none", line, d, s.Links())
			}
			switch {
			case strings.HasSuffix(line, "wait.for=call"):
			case !strings.Contains(line, "wait.for=process wait.polls=") || s.Parent().SpanID() != parent.SpanID():
				t.Errorf("%s, with the parent %v", line, s.Parent().SpanID())
			}
		}
		if n := x.values(t)["wait.duration cache=ns"]; n != 1 {
			t.Errorf("%v waits, want 1", n)
		}
	})
}

// Neither a key, nor the name of a lock, nor the text of an error is in any span or metric, unless Keys
// is set.
func TestKeys(t *testing.T) {
	for _, keys := range []bool{false, true} {
		t.Run(fmt.Sprint(keys), func(t *testing.T) {
			inBubble(t, func(t *testing.T, x *telemetry, rdb *redis.Client) {
				x.Keys = keys
				there, c := cachetest.NewCacheIn[string](t, rdb, "ns", nil), x.newCache(t, rdb, "ns", &singlefill.Options[string]{LoadTimeout: 30 * time.Second})
				ctx := t.Context()
				var wg sync.WaitGroup
				hangs := func(context.Context, string) (string, error) { time.Sleep(40 * time.Second); return "v", nil }
				get := func(c *singlefill.Cache[string], key string, load singlefill.Loader[string]) {
					wg.Go(func() { _, _ = c.GetOrLoad(ctx, key, load) })
					synctest.Wait()
				}
				get(c, "secret-timeout", hangs)
				get(c, "secret-timeout", hangs) // shares it
				get(there, "secret-there", hangs)
				get(c, "secret-there", hangs) // waits for it
				get(c, "secret-error", fails(errors.New("no row secret-text")))
				get(c, "secret-panic", func(context.Context, string) (string, error) { panic("secret-value") })
				get(c, "secret-deleted", func(ctx context.Context, key string) (string, error) { return "v", c.Delete(ctx, key) })
				_, _ = c.GetOrLoadMany(ctx, []string{"secret-1", "secret-2"}, func(context.Context, []string) (map[string]string, error) {
					return nil, errors.New("no rows secret-text")
				})
				x.lockTrace(t).Waited(ctx, lock.LeaseInfo{Name: "secret-lock", Err: errors.New("secret-lock is held")})
				wg.Wait()
				synctest.Wait()

				if n := len(x.spans.Ended()); n != 8 {
					t.Errorf("%d spans, want one of each kind", n)
				}
				for _, m := range x.collect(t) {
					if text := fmt.Sprintf("%+v", m); strings.Contains(text, "secret") {
						t.Errorf("a metric has a key: %s", text)
					}
				}
				for _, s := range x.spans.Ended() {
					text := fmt.Sprintf("%q %+v %+v %+v %+v", s.Name(), s.Attributes(), s.Events(), s.Links(), s.Status())
					if strings.Contains(text, "secret") != keys {
						t.Errorf("Keys is %t: %s", keys, text)
					}
				}
				if !keys {
					return
				}
				var all strings.Builder
				for _, s := range x.spans.Ended() {
					fmt.Fprintln(&all, words(s.Attributes()), s.Status().Description)
				}
				for _, want := range []string{
					`keys=["secret-timeout"]`, "the load took longer", `keys=["secret-there"]`, "no row secret-text",
					"panicked: secret-value", `keys=["secret-1","secret-2"]`, "lock.name=secret-lock",
				} {
					if !strings.Contains(all.String(), want) {
						t.Errorf("%s is missing in\n%s", want, all.String())
					}
				}
			})
		})
	}
}
