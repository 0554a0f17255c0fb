package singlefill

import (
	"context"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"
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
//   - DeleteTag or ExpireTag that cleared the namespace, or failed
//   - time that the cache stops sending commands to Redis, or sends them again
//
// Of each kind it writes ten lines a second at most for each cache; the attribute "dropped" of the
// next line counts those left out. The attribute "cache" is the namespace. A function that the
// program sets in the Trace is kept.
func LogTrace(logger *slog.Logger, opts *LogOptions) *Trace {
	var o LogOptions
	if opts != nil {
		o = *opts
	}
	o.Slow = orDefault(o.Slow, time.Second)
	t := newLog(logger, o)
	t.named = func(t Trace, namespace string) *Trace {
		log := newLog(logger.With("cache", namespace), o)
		t.LoadDone = unlessChanged(t.LoadDone, log.LoadDone)
		t.RedisError = unlessChanged(t.RedisError, log.RedisError)
		t.BadValue = unlessChanged(t.BadValue, log.BadValue)
		t.AuditDone = unlessChanged(t.AuditDone, log.AuditDone)
		t.TagDone = unlessChanged(t.TagDone, log.TagDone)
		t.BreakerChanged = unlessChanged(t.BreakerChanged, log.BreakerChanged)
		t.opening = log.opening
		return &t
	}
	return t
}

// unlessChanged returns log if f is the same method of another log, and f if a program has set it.
func unlessChanged[F any](f, log F) F {
	if reflect.ValueOf(f).Pointer() == reflect.ValueOf(log).Pointer() {
		return log
	}
	return f
}

func newLog(logger *slog.Logger, opts LogOptions) *Trace {
	l := &loadLog{Logger: logger, LogOptions: opts, lines: make(map[string]*sampler)}
	return &Trace{
		LoadDone:       l.loadDone,
		RedisError:     l.redisError,
		BadValue:       l.badValue,
		AuditDone:      l.auditDone,
		TagDone:        l.tagDone,
		BreakerChanged: l.breakerChanged,
		opening:        func(why error) { l.why.Store(&why) },
	}
}

// A loadLog writes lines about loads.
type loadLog struct {
	*slog.Logger
	LogOptions
	mu    sync.Mutex
	lines map[string]*sampler   // by message
	why   atomic.Pointer[error] // the error that has opened the breaker last
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
	}
	if info.StoreErr != nil {
		attrs = append(attrs, slog.Any("store_err", info.StoreErr))
	}
	l.write(ctx, level, message, attrs...)
}

// redisError logs a refusal. Commands that were not answered show in the loads that they cost.
func (l *loadLog) redisError(ctx context.Context, op string, err error) {
	if refusal(err) {
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
	attrs := []slog.Attr{slog.Int("tags", len(info.Tags)), slog.Any("err", info.Err)}
	switch {
	case info.Cleared:
		l.write(ctx, slog.LevelWarn, "what is known of tags may have been lost: the namespace was cleared", attrs...)
	case info.Err != nil:
		l.write(ctx, slog.LevelError, "values with a tag may not have been invalidated", attrs...)
	}
}

func (l *loadLog) breakerChanged(open bool) {
	if !open {
		l.write(context.Background(), slog.LevelInfo, "redis answers again")
		return
	}
	var attrs []slog.Attr
	if why := l.why.Load(); why != nil { // nil: the program has called the function
		attrs = append(attrs, slog.Any("err", *why))
	}
	l.write(context.Background(), slog.LevelWarn, "redis does not answer: no commands are sent", attrs...)
}

func (l *loadLog) write(ctx context.Context, level slog.Level, message string, attrs ...slog.Attr) {
	if !l.Enabled(ctx, level) {
		return
	}
	l.mu.Lock()
	s := l.lines[message]
	if s == nil {
		s = new(sampler)
		l.lines[message] = s
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
