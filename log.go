package singlefill

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/singlefill/singlefill/internal/client"
)

// LogOptions configure [LogTrace]. A nil *LogOptions, like the zero value, means the defaults.
type LogOptions struct {
	// Slow is how long a load takes at least that is logged although nothing was wrong. Default: 1
	// s; negative: off.
	Slow time.Duration

	// Keys adds the keys to the lines, which may be secret. Default: no; but the text of an error
	// may contain a key.
	Keys bool
}

// LogTrace returns a Trace for [Options.Trace] or [Cache.AddTrace] that writes what an operator has
// to know to logger, a line for each
//
//   - load that failed, ran without the fill lock, could not be stored, was refused by Redis or was
//     slow: the first of these
//   - command that Redis refuses, value that cannot be decoded, stale hit that an audit found
//   - DeleteTag or ExpireTag that had to read, or to remove, all values, or failed
//   - time that the cache stops sending commands to Redis, or sends them again
//
// Of each kind it writes ten lines a second at most for each cache; the attribute "dropped" of the
// next line counts those left out. The attribute "cache" is the namespace. A function that the
// program sets in the Trace takes the place of the log's lines, unless it calls the function that
// was there. The lines of the last kind are written in any case.
func LogTrace(logger *slog.Logger, opts *LogOptions) *Trace {
	l := &loadLog{Logger: logger, lines: make(map[line]*sampler)}
	if opts != nil {
		l.LogOptions = *opts
	}
	l.Slow = orDefault(l.Slow, time.Second)
	return &Trace{
		LoadDone:       l.loadDone,
		RedisError:     l.redisError,
		BadValue:       l.badValue,
		AuditDone:      l.auditDone,
		TagDone:        l.tagDone,
		BreakerChanged: func(bool) {}, // as a function of the program may call it; breaker writes the lines
		named:          l.named,
	}
}

// A loadLog writes lines about loads.
type loadLog struct {
	*slog.Logger
	LogOptions
	mu    sync.Mutex
	lines map[line]*sampler
}

// A line is what is sampled: a message of one cache.
type line struct{ cache, message string }

// named returns t for one cache. Its functions, also functions of the program that call functions of
// the log, find the namespace in their contexts.
func (l *loadLog) named(t Trace, namespace string) *Trace {
	t.LoadDone = within(namespace, t.LoadDone)
	t.RedisError = within2(namespace, t.RedisError)
	t.BadValue = within2(namespace, t.BadValue)
	t.AuditDone = within(namespace, t.AuditDone)
	t.TagDone = within(namespace, t.TagDone)
	t.breaker = func(why error) { l.breaker(inCache(context.Background(), namespace), why) }
	return &t
}

// cacheKey is the key under which a context of the log has the namespace.
type cacheKey struct{}

func inCache(ctx context.Context, namespace string) context.Context {
	return context.WithValue(ctx, cacheKey{}, namespace)
}

func within[A any](namespace string, f func(context.Context, A)) func(context.Context, A) {
	if f == nil {
		return nil
	}
	return func(ctx context.Context, a A) { f(inCache(ctx, namespace), a) }
}

func within2[A, B any](namespace string, f func(context.Context, A, B)) func(context.Context, A, B) {
	if f == nil {
		return nil
	}
	return func(ctx context.Context, a A, b B) { f(inCache(ctx, namespace), a, b) }
}

func (l *loadLog) loadDone(ctx context.Context, info LoadInfo) {
	level, message := slog.LevelWarn, ""
	switch {
	case info.Fenced:
		level, message = slog.LevelInfo, "load refused: its key was changed meanwhile, or its lock was lost"
	case info.Err != nil && !isNotFound(info.Err):
		message = "load failed"
	case info.Unlocked:
		message = "load without the lock: redis did not answer, or refused"
	case info.StoreErr != nil:
		message = "loaded value not stored"
	case l.Slow >= 0 && info.Duration >= l.Slow:
		level, message = slog.LevelInfo, "load was slow"
	default:
		return
	}
	attrs := []slog.Attr{slog.Duration("duration", info.Duration)}
	if l.Keys {
		attrs = append(attrs, slog.String("key", info.Key))
	}
	if info.Queued > 0 {
		attrs = append(attrs, slog.Duration("queued", info.Queued))
	}
	if info.Refresh {
		attrs = append(attrs, slog.Bool("refresh", true))
	}
	if info.Unlocked {
		attrs = append(attrs, slog.Bool("unlocked", true))
	}
	if info.Err != nil {
		attrs = append(attrs, slog.Any("err", info.Err))
		if stack := stackOf(info.Err); stack != "" { // no caller has it if this is a refresh
			attrs = append(attrs, slog.String("stack", stack))
		}
	}
	if info.StoreErr != nil {
		attrs = append(attrs, slog.Any("store_err", info.StoreErr))
	}
	l.write(ctx, level, message, attrs...)
}

// stackOf returns the stack of a Loader that panicked, or "".
func stackOf(err error) (stack string) {
	defer func() { _ = recover() }() // of a method of err
	if p, ok := errors.AsType[*PanicError](err); ok {
		stack = string(p.Stack)
	}
	return stack
}

// redisError logs a refusal. Commands that were not answered show in the loads that they cost.
func (l *loadLog) redisError(ctx context.Context, op string, err error) {
	if client.Refused(err) {
		l.write(ctx, slog.LevelWarn, "redis refused a command", slog.String("op", op), slog.Any("err", err))
	}
}

func (l *loadLog) badValue(ctx context.Context, key string, err error) {
	attrs := []slog.Attr{slog.Any("err", err)}
	if l.Keys {
		attrs = append(attrs, slog.String("key", key))
	}
	l.write(ctx, slog.LevelWarn, "a value in redis is not one of this cache: another type in its namespace, or another program", attrs...)
}

func (l *loadLog) auditDone(ctx context.Context, info AuditInfo) {
	if !info.Stale {
		return
	}
	attrs := []slog.Attr{slog.Duration("age", info.Age), slog.Bool("near", info.Near)}
	if l.Keys {
		attrs = append(attrs, slog.String("key", info.Key))
	}
	l.write(ctx, slog.LevelWarn, "a hit was stale: the source had another value for more than a second", attrs...)
}

func (l *loadLog) tagDone(ctx context.Context, info TagInfo) {
	tags := slog.Int("tags", len(info.Tags))
	switch {
	case info.Err != nil:
		l.write(ctx, slog.LevelError, "values with a tag may not have been invalidated", tags, slog.Any("err", info.Err))
	case info.Cleared:
		l.write(ctx, slog.LevelWarn, "the tags of the values were not known, as at first, or after a loss in redis: the namespace was cleared", tags)
	case info.Rebuilt:
		l.write(ctx, slog.LevelInfo, "the tags of the values were not known, as at first, or after a loss in redis: all values were read", tags)
	}
}

// breaker logs that the breaker has opened, or closed if why is nil.
func (l *loadLog) breaker(ctx context.Context, why error) {
	if why == nil {
		l.write(ctx, slog.LevelInfo, "redis answers again")
		return
	}
	l.write(ctx, slog.LevelWarn, "redis does not answer: no commands are sent", slog.Any("err", why))
}

func (l *loadLog) write(ctx context.Context, level slog.Level, message string, more ...slog.Attr) {
	if !l.Enabled(ctx, level) {
		return
	}
	var attrs []slog.Attr
	cache, _ := ctx.Value(cacheKey{}).(string)
	if cache != "" {
		attrs = append(attrs, slog.String("cache", cache))
	}
	attrs = append(attrs, more...)
	l.mu.Lock()
	s := l.lines[line{cache, message}]
	if s == nil {
		s = new(sampler)
		l.lines[line{cache, message}] = s
	}
	dropped, ok := s.take(time.Now())
	l.mu.Unlock()
	if !ok {
		return
	}
	if dropped > 0 {
		attrs = append(attrs, slog.Int("dropped", dropped))
	}
	l.LogAttrs(ctx, level, message, attrs...)
}

// maxLines is how many lines of one kind are written in one second.
const maxLines = 10

// A sampler lets the first lines of each second pass.
type sampler struct {
	since   time.Time
	lines   int // in the second that began then
	dropped int // since the last line that passed
}

func (s *sampler) take(now time.Time) (dropped int, ok bool) {
	if now.Sub(s.since) >= time.Second {
		s.since, s.lines = now, 0
	}
	if s.lines++; s.lines > maxLines {
		s.dropped++
		return 0, false
	}
	dropped, s.dropped = s.dropped, 0
	return dropped, true
}
