package otel

import (
	"context"
	"errors"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/singlefill/singlefill"
)

// loads has the metrics and spans of the loads and waits of one cache.
type loads struct {
	spans

	loads       metric.Int64Counter
	durations   metric.Float64Histogram
	waits       metric.Float64Histogram
	redisErrors metric.Int64Counter
}

func newLoads(o *Options, name attribute.KeyValue) (*loads, error) {
	m := &maker{meter: o.meter()}
	l := &loads{
		spans:       newSpans(o, name),
		loads:       m.counter("singlefill.loads", "{load}", "Keys loaded."),
		durations:   m.histogram("singlefill.load.duration", "Duration of the calls of Loaders and ManyLoaders."),
		waits:       m.histogram("singlefill.wait.duration", "Duration of waits for a load in another process."),
		redisErrors: m.counter("singlefill.redis.errors", "{command}", "Redis commands that failed."),
	}
	return l, m.err
}

// trace has no functions for hits and misses: Stats count those.
func (l *loads) trace() *singlefill.Trace {
	return &singlefill.Trace{
		LoadStart:  l.loadStart,
		LoadDone:   l.loadDone,
		ShareDone:  l.shareDone,
		WaitDone:   l.waitDone,
		RedisError: l.redisError,
	}
}

// A call is a call of a Loader or ManyLoader.
type call struct {
	span trace.Span

	mu   sync.Mutex
	done []singlefill.LoadInfo // of the keys whose outcome is known; protected by mu
}

// loadStart puts the call into the context of the Loader. The key is l itself: other instrumentation of
// this cache, and of others whose loads make calls of this one, has its own.
func (l *loads) loadStart(ctx context.Context, key string) context.Context {
	ctx, span := l.startLoad(ctx, key)
	return context.WithValue(ctx, l, &call{span: span})
}

func (l *loads) callOf(ctx context.Context) *call {
	if ctx == nil {
		return nil
	}
	c, _ := ctx.Value(l).(*call)
	return c
}

func (l *loads) loadDone(ctx context.Context, info singlefill.LoadInfo) {
	kind := kindOf(info)
	l.loads.Add(ctx, 1, metric.WithAttributes(l.name, kind, resultKey.String(resultOf(info.Err))))
	c := l.callOf(ctx)
	// Without a call of a Loader, ctx is the context of the GetOrLoad, which may run inside another
	// load of this cache.
	if c == nil || info.Keys == 0 {
		return
	}
	done := c.add(info)
	if len(done) == 1 {
		l.durations.Record(ctx, info.Duration.Seconds(), metric.WithAttributes(l.name, kind))
	}
	if len(done) == info.Keys {
		l.endLoad(c.span, done)
	}
}

// add returns what is known with info.
func (c *call) add(info singlefill.LoadInfo) []singlefill.LoadInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done = append(c.done, info)
	return c.done
}

func (l *loads) shareDone(ctx context.Context, info singlefill.ShareInfo) {
	var load trace.SpanContext
	if c := l.callOf(info.Load); c != nil {
		load = c.span.SpanContext()
	}
	l.waitedForCall(ctx, info, load)
}

func (l *loads) waitDone(ctx context.Context, info singlefill.WaitInfo) {
	l.waits.Record(ctx, info.Duration.Seconds(), metric.WithAttributes(l.name))
	l.waitedForProcess(ctx, info)
}

func (l *loads) redisError(ctx context.Context, op string, _ error) {
	l.redisErrors.Add(ctx, 1, metric.WithAttributes(l.name, opKey.String(op)))
}

func kindOf(info singlefill.LoadInfo) attribute.KeyValue {
	if info.Refresh {
		return kindKey.String("refresh")
	}
	return kindKey.String("call")
}

// Results of a load.
const (
	value    = "value"
	notFound = "not_found"
	failed   = "error"
	panicked = "panic"
)

func resultOf(err error) (result string) {
	if err == nil {
		return value
	}
	defer func() {
		if recover() != nil { // a method of err
			result = failed
		}
	}()
	if _, ok := errors.AsType[*singlefill.PanicError](err); ok {
		return panicked
	}
	if _, ofOthers := errors.AsType[*singlefill.ManyError](err); !ofOthers && errors.Is(err, singlefill.ErrNotFound) {
		return notFound
	}
	return failed
}
