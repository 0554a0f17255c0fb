package singlefill

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// LogOptions configure [LogTrace]. A nil *LogOptions, like the zero value, means the defaults.
type LogOptions struct {
	// Slow is how long a load takes at least that is logged although nothing was wrong. Default: 1 s.
	// Negative: no load is logged for that.
	Slow time.Duration

	// Keys adds the keys to the lines. They may be secret. Default: no. The text of an error is written
	// as it is, and may contain a key, too.
	Keys bool
}

// LogTrace returns a [Trace] for [Options.Trace] or [Cache.AddTrace] that writes what an operator has
// to know to logger:
//
//   - a line for each load that failed, ran without the fill lock, could not be stored, was refused by
//     Redis or was slow; for the first of these that applies to it
//   - a line for each command that Redis refuses: a right is missing, or it is out of memory
//   - a line for each value that cannot be decoded: two types in one namespace, or another program
//   - a line each time that the cache stops sending commands to Redis, and that it sends them again
//
// Of each kind it writes ten lines a second at most, so that an outage does not fill the disk. The next
// line that it writes tells by the attribute "dropped" how many there would have been.
//
// A logger for several caches should tell them apart:
//
//	users.AddTrace(singlefill.LogTrace(logger.With("cache", "users"), nil))
func LogTrace(logger *slog.Logger, opts *LogOptions) *Trace {
	l := &loadLog{Logger: logger, lines: make(map[string]*sampler)}
	if opts != nil {
		l.LogOptions = *opts
	}
	l.Slow = orDefault(l.Slow, time.Second)
	return &Trace{
		LoadDone:   l.loadDone,
		RedisError: l.redisError,
		BadValue:   l.badValue,
		BreakerChanged: func(open bool) {
			if open {
				l.write(context.Background(), slog.LevelWarn, "redis does not answer: no commands are sent")
			} else {
				l.write(context.Background(), slog.LevelInfo, "redis answers again")
			}
		},
	}
}

// A loadLog writes lines about loads.
type loadLog struct {
	*slog.Logger
	LogOptions
	mu    sync.Mutex
	lines map[string]*sampler // by message
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
