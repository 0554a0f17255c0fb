package otel

import (
	"context"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/singlefill/singlefill"
)

// spans makes the spans of one cache, or of the locks of one label.
type spans struct {
	tracer trace.Tracer
	name   attribute.KeyValue // the namespace or the label
	keys   bool               // Options.Keys
}

func newSpans(o *Options, name attribute.KeyValue) spans {
	return spans{tracer: o.TracerProvider.Tracer(scope), name: name, keys: o.Keys}
}

// startLoad begins the span of a call of a Loader, or of a ManyLoader whose first key is key.
func (s *spans) startLoad(ctx context.Context, key string) (context.Context, trace.Span) {
	return s.tracer.Start(ctx, "load "+s.name.Value.AsString(), trace.WithAttributes(s.withKeys([]attribute.KeyValue{s.name}, key)...))
}

// endLoad ends the span of a call when the outcomes of all its keys are known.
func (s *spans) endLoad(span trace.Span, done []singlefill.LoadInfo) {
	defer span.End()
	if !span.IsRecording() {
		return
	}
	var stored, absent, fenced, storeErrors, unlocked int
	var queued time.Duration
	var err error
	keys := make([]string, len(done))
	for i, info := range done {
		keys[i] = info.Key
		stored += count(info.Stored)
		fenced += count(info.Fenced)
		storeErrors += count(info.StoreErr != nil)
		unlocked += count(info.Unlocked)
		queued = max(queued, info.Queued)
		switch result := resultOf(info.Err); {
		case result == notFound:
			absent++
		case result != value && err == nil:
			err = info.Err
		}
	}
	slices.Sort(keys) // the outcomes come in any order
	attrs := []attribute.KeyValue{
		kindOf(done[0]),
		attribute.Int("singlefill.load.size", len(done)),
		attribute.Int("singlefill.load.stored", stored),
	}
	some := func(name string, n int) {
		if n > 0 {
			attrs = append(attrs, attribute.Int(name, n))
		}
	}
	some("singlefill.load.not_found", absent)
	some("singlefill.load.fenced", fenced)
	some("singlefill.load.store_errors", storeErrors)
	some("singlefill.load.unlocked", unlocked)
	if queued > 0 {
		attrs = append(attrs, attribute.Float64("singlefill.load.queued", queued.Seconds()))
	}
	span.SetAttributes(s.withKeys(attrs, keys...)...)
	s.fail(span, err)
}

// waitedForCall makes the span of a wait for a load that another call of this process has begun. load is
// the span of that load, if there is one.
func (s *spans) waitedForCall(ctx context.Context, info singlefill.ShareInfo, load trace.SpanContext) {
	var link []trace.SpanStartOption
	if load.IsValid() {
		link = append(link, trace.WithLinks(trace.Link{SpanContext: load}))
	}
	attrs := []attribute.KeyValue{attribute.String("singlefill.wait.for", "call")}
	s.waited(ctx, info.Duration, s.withKeys(attrs, info.Key), link...).End()
}

func (s *spans) waitedForProcess(ctx context.Context, info singlefill.WaitInfo) {
	attrs := []attribute.KeyValue{attribute.String("singlefill.wait.for", "process"), attribute.Int("singlefill.wait.polls", info.Polls)}
	s.waited(ctx, info.Duration, s.withKeys(attrs, info.Key)).End()
}

// waited returns the span of a wait that is over.
func (s *spans) waited(ctx context.Context, d time.Duration, attrs []attribute.KeyValue,
	more ...trace.SpanStartOption) trace.Span {
	more = append(more, trace.WithTimestamp(time.Now().Add(-d)), trace.WithAttributes(append(attrs, s.name)...))
	_, span := s.tracer.Start(ctx, "wait "+s.name.Value.AsString(), more...)
	return span
}

func (s *spans) withKeys(attrs []attribute.KeyValue, keys ...string) []attribute.KeyValue {
	if s.keys {
		attrs = append(attrs, attribute.StringSlice("singlefill.keys", keys))
	}
	return attrs
}

// fail gives span the status of err. The text of an error may contain a key.
func (s *spans) fail(span trace.Span, err error) {
	if err == nil {
		return
	}
	kind, text := semconv.ErrorTypeOther, ""
	func() {
		defer func() { _ = recover() }() // of a method of err
		kind = semconv.ErrorType(err)
		if s.keys {
			text = err.Error()
		}
	}()
	span.SetStatus(codes.Error, text)
	span.SetAttributes(kind)
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}
