package singlefill

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/value"
)

// Options tune a [Cache]. A nil *Options, like the zero value, selects the defaults, which suit
// loads of milliseconds to seconds. In each field zero means the default, and negative means off
// where off has a meaning. New copies the options. Like all structs of this package, Options may
// get fields: write literals with the names of the fields.
type Options[T any] struct {
	// Codec turns values into bytes. Default: [MsgPack].
	Codec Codec

	// Version tells entries of different shapes of T apart. Raise it when a value that an older program stored, decoded
	// as T, must not be served, for example since it lacks a new field. An entry of a lower version is a miss: it is
	// loaded once in the fleet and replaced when it is asked for. An entry of a higher version is served, so that old
	// and new processes of a deployment never replace each other's entries in turn: see docs/values.md. Default: 0.
	Version uint32

	// TTLFunc returns the life of one value in place of the ttl given to [New]. With less than 1 ms
	// the value is not stored: callers of this process that waited get it, those in other processes
	// load one after the other. The stale windows begin when that life ends: turn them off for values that
	// cannot be used later, such as tokens. It is called from many goroutines. Default: none.
	TTLFunc func(key string, v T) time.Duration

	// Tags returns the tags of a value, such as "region:eu", for DeleteTag and ExpireTag; for a
	// remembered ErrNotFound v is the zero value. It must be a pure function, the same in every
	// process, and return the same for a value before it is encoded and after it is decoded, which
	// singlefilltest.Tags checks: at most 32 tags of 1 to 256 bytes. It must return. If it panics or returns
	// others, the value is not stored: Set returns that error, LoadInfo.StoreErr has it. Tags cost a hit
	// nothing, and a load two round trips. Default: none.
	Tags func(key string, v T) []string

	// LoadMany, a ManyLoader, loads values that are stale, or expire soon, in place of the functions that calls give:
	// keys that different calls find within 5 ms are loaded together, MaxBatch at most. Its ctx has the
	// values of one of these calls, so what it returns may depend on its keys alone. What a caller waits
	// for is loaded by the function of the call. Default: none.
	LoadMany func(ctx context.Context, keys []string) (map[string]T, error)

	// Jitter shortens each life at random by up to this fraction, below 1, so that entries written
	// together do not expire together. Default: 0.1; negative: off.
	Jitter float64

	// NotFoundTTL is how long ErrNotFound is remembered, and then served within the stale windows
	// like a value. Default: the ttl given to New, at most a minute; negative: it is not
	// remembered.
	NotFoundTTL time.Duration

	// EarlyRefresh is β of XFetch: with the probability exp(-time left / (β × load time)) a hit
	// refreshes its value in the background, in one process of the fleet, so that normally no
	// caller waits when it expires. The more often a value is read, the earlier: see docs/stale.md.
	// A value that was Set, or whose load took less than 1 ms, is not refreshed. Default: 1, but no
	// refresh in the first half of a life; another number holds for the whole life; negative: off.
	EarlyRefresh float64

	// StaleWhileRevalidate is how long after it has expired a value is served at once, as by a hit,
	// while one process of the fleet refreshes it (RFC 5861). At least 1 ms. Default: off.
	StaleWhileRevalidate time.Duration

	// StaleIfError is how long after it has expired a value is returned if its load fails, panics
	// or takes longer than LoadTimeout, and to a caller whose deadline comes before the load ends,
	// if that was 10 ms and a round trip away. Not in place of [ErrNoStale]. At least 1 ms. Default:
	// off.
	StaleIfError time.Duration

	// StaleAfter is how long a load may be in flight, in any process, until its callers get a value
	// within StaleIfError, which it requires; the load goes on. At least 1 ms. Default: off.
	StaleAfter time.Duration

	// RetryAfter is how long after a failed load no process loads a key that has a stale value to serve,
	// but for calls that must not return that value. While Redis does not answer, it has no effect. At
	// least 1 ms. Default: 1 s; negative: off.
	RetryAfter time.Duration

	// FailureTTL is how long the fleet remembers that a load of this process has failed: calls without a
	// value to serve get a [*RemoteError] in place of a load, also in processes with FailureTTL off.
	// Panics, errors of a context, LoadTimeout and ErrClosed are not remembered. Delete, Set or Expire of
	// the key, or Clear, makes the fleet forget the failure. While Redis does not answer, no failure is
	// remembered. At least 1 ms. Default: off.
	FailureTTL time.Duration

	// LockTTL is the life of the fill lock, which is renewed at each third of it until the value is stored, for
	// LoadTimeout at most: the time after which a dead holder is replaced. Requests whose deadline is
	// shorter fail until then: see docs/pitfalls.md. A holder that is frozen for less than two thirds of
	// LockTTL keeps its lock. More than 3 × RedisTimeout and less than LoadTimeout. Default: 3 s.
	LockTTL time.Duration

	// LoadTimeout is the deadline of one load. If a Loader ignores its context, its callers get an
	// error that wraps context.DeadlineExceeded, and its result is dropped. Default: 30 s.
	LoadTimeout time.Duration

	// RedisTimeout bounds each Redis command, whatever the settings of the client, from the moment
	// it is sent: while all connections of the pool are in use, commands wait in order. At least 1
	// ms. Default: 500 ms.
	RedisTimeout time.Duration

	// MaxLoads is how many loads of this cache run at once in this process; others wait in order.
	// A call of a [ManyLoader] counts as one. While Redis does not answer, the source has to bear
	// MaxLoads loads from each process. A load that waits for nested loads lends its slot to one of
	// them at a time, in any cache. A nested load keeps the slot if the wait ends before the load
	// does, or is for other keys of its call, so each key waited for may add one load. Default:
	// 64; negative: no limit.
	MaxLoads int

	// MaxFleetLoads is how many loads of this namespace run at once in all processes. Waiting loads
	// are served in no particular order, and each costs two or three extra round trips. While Redis
	// does not answer only MaxLoads holds, and Stats.LoadsUnlimited counts such loads. If processes
	// disagree, as during a deployment, the larger limit applies while a process that has it loads and,
	// if others load then, for up to LockTTL longer. Nested loads may exceed this limit as they may
	// exceed MaxLoads.
	// [NewLocal] refuses it. Default: no limit.
	MaxFleetLoads int

	// MaxBatch is how many keys one call of a [ManyLoader] gets at most. For more keys several calls
	// run at the same time, each in a slot of MaxLoads. Default: 256.
	MaxBatch int

	// Errors names errors of the source that mean the same in every process, such as "down" for
	// ErrDown. If a load fails with one (errors.Is), waiters in other processes get a
	// [*RemoteError] that unwraps to the error that their Options have under that name. If several
	// match, the first name in alphabetical order counts. A name has 1 to 100 bytes, no control
	// characters. Default: none.
	Errors map[string]error

	// Near keeps values in the memory of this process: [NewLocal] always does. [New] refuses it with a client that
	// reads from replicas or has client-side caching. Default: nil, off.
	Near *Near

	// Audit is the fraction, at most 1, of fresh hits that are checked against the source in the
	// background, at most 100 at once: see docs/audit.md. The Loader runs as for a refresh, never
	// beside another load of the key in this process, and its value is not stored. Default: 0, off;
	// negative: off.
	Audit float64

	// Trace has functions to call when something happens. Default: none.
	Trace *Trace
}

// OptionsFor returns options for a cache of T with the settings of o, or the defaults if it is nil:
// all but Version, TTLFunc, Tags and LoadMany, which belong to the type of o. So caches share what they have in common:
//
//	shared := &singlefill.Options[any]{StaleIfError: time.Hour}
//	users, err := singlefill.New(rdb, "users", time.Hour, singlefill.OptionsFor[User](shared))
//
// A copy may differ. A token is of no use after its end, so its cache has no stale windows:
//
//	forTokens := singlefill.OptionsFor[Token](shared)
//	forTokens.StaleWhileRevalidate, forTokens.StaleIfError = 0, 0
//	forTokens.TTLFunc = func(_ string, t Token) time.Duration { return time.Until(t.Expires) }
func OptionsFor[T, From any](o *Options[From]) *Options[T] {
	if o == nil {
		return new(Options[T])
	}
	return &Options[T]{
		Codec:                o.Codec,
		Jitter:               o.Jitter,
		NotFoundTTL:          o.NotFoundTTL,
		EarlyRefresh:         o.EarlyRefresh,
		StaleWhileRevalidate: o.StaleWhileRevalidate,
		StaleIfError:         o.StaleIfError,
		StaleAfter:           o.StaleAfter,
		RetryAfter:           o.RetryAfter,
		FailureTTL:           o.FailureTTL,
		LockTTL:              o.LockTTL,
		LoadTimeout:          o.LoadTimeout,
		RedisTimeout:         o.RedisTimeout,
		MaxLoads:             o.MaxLoads,
		MaxFleetLoads:        o.MaxFleetLoads,
		MaxBatch:             o.MaxBatch,
		Errors:               o.Errors,
		Near:                 o.Near,
		Audit:                o.Audit,
		Trace:                o.Trace,
	}
}

// settings are Options with the defaults filled in. Off is zero.
type settings struct {
	value.Policy
	codec         Codec
	staleAfter    time.Duration // 0: off
	retryAfter    time.Duration // 0: off
	failureTTL    time.Duration // 0: off
	lockTTL       time.Duration
	loadTimeout   time.Duration
	redisTimeout  time.Duration
	maxLoads      int // 0: no limit
	maxFleetLoads int // 0: no limit
	maxBatch      int
	audit         float64
	errors        sentinels
	near          *Near // nil: off
	trace         Trace
}

// resolve checks the arguments of New and fills in the defaults.
func resolve(rdb redis.UniversalClient, namespace string, ttl time.Duration, opts *Options[any]) (settings, error) {
	if err := client.Check(rdb); err != nil {
		return settings{}, fmt.Errorf("singlefill: %w", err)
	}
	if err := checkNamespace(namespace); err != nil {
		return settings{}, err
	}
	if ttl < time.Millisecond {
		return settings{}, fmt.Errorf("singlefill: ttl is %v: at least 1ms is allowed", ttl)
	}
	s := settings{
		Policy: value.Policy{
			TTL:                  ttl,
			NotFoundTTL:          max(0, orDefault(opts.NotFoundTTL, min(ttl, time.Minute))),
			Jitter:               max(0, orDefault(opts.Jitter, 0.1)),
			EarlyRefresh:         max(0, orDefault(opts.EarlyRefresh, 1)),
			SecondHalf:           opts.EarlyRefresh == 0,
			StaleWhileRevalidate: max(0, opts.StaleWhileRevalidate),
			StaleIfError:         max(0, opts.StaleIfError),
		},
		codec:         opts.Codec,
		staleAfter:    max(0, opts.StaleAfter),
		retryAfter:    max(0, orDefault(opts.RetryAfter, time.Second)),
		failureTTL:    max(0, opts.FailureTTL),
		lockTTL:       orDefault(opts.LockTTL, 3*time.Second),
		loadTimeout:   orDefault(opts.LoadTimeout, 30*time.Second),
		redisTimeout:  orDefault(opts.RedisTimeout, 500*time.Millisecond),
		maxLoads:      max(0, orDefault(opts.MaxLoads, 64)),
		maxFleetLoads: max(0, opts.MaxFleetLoads),
		maxBatch:      orDefault(opts.MaxBatch, 256),
		audit:         max(0, opts.Audit),
	}
	if s.codec == nil {
		s.codec = MsgPack
	}
	if opts.Trace != nil {
		s.trace = *opts.Trace
	}
	if opts.Near != nil {
		if err := checkNear(opts.Near, rdb); err != nil {
			return settings{}, err
		}
		s.near = new(*opts.Near)
	}
	for _, name := range slices.Sorted(maps.Keys(opts.Errors)) {
		s.errors = append(s.errors, sentinel{name, opts.Errors[name]})
	}
	return s, s.check(opts)
}

// check reports the first setting that makes no sense. opts are the options as they were given.
func (s settings) check(opts *Options[any]) error {
	switch {
	case math.IsNaN(s.Jitter) || s.Jitter >= 1:
		return fmt.Errorf("singlefill: Options.Jitter is %v: a fraction below 1 is allowed, or a negative number for none", s.Jitter)
	case s.NotFoundTTL > 0 && s.NotFoundTTL < time.Millisecond:
		return fmt.Errorf("singlefill: Options.NotFoundTTL is %v: at least 1ms is allowed, or a negative one to remember nothing", s.NotFoundTTL)
	case math.IsNaN(s.EarlyRefresh) || math.IsInf(s.EarlyRefresh, 0):
		return fmt.Errorf("singlefill: Options.EarlyRefresh is %v: a finite number is allowed, a negative one for none", s.EarlyRefresh)
	case s.StaleWhileRevalidate > 0 && s.StaleWhileRevalidate < time.Millisecond:
		return fmt.Errorf("singlefill: Options.StaleWhileRevalidate is %v: at least 1ms is allowed, or 0 for none", s.StaleWhileRevalidate)
	case s.StaleIfError > 0 && s.StaleIfError < time.Millisecond:
		return fmt.Errorf("singlefill: Options.StaleIfError is %v: at least 1ms is allowed, or 0 for none", s.StaleIfError)
	case s.staleAfter > 0 && s.staleAfter < time.Millisecond:
		return fmt.Errorf("singlefill: Options.StaleAfter is %v: at least 1ms is allowed, or 0 for none", s.staleAfter)
	case s.staleAfter > 0 && s.StaleIfError == 0:
		return fmt.Errorf("singlefill: Options.StaleAfter is %v and StaleIfError is off: it is allowed with StaleIfError only", s.staleAfter)
	case s.retryAfter > 0 && s.retryAfter < time.Millisecond:
		return fmt.Errorf("singlefill: Options.RetryAfter is %v: at least 1ms is allowed, or a negative one for none", s.retryAfter)
	case s.failureTTL > 0 && s.failureTTL < time.Millisecond:
		return fmt.Errorf("singlefill: Options.FailureTTL is %v: at least 1ms is allowed, or 0 for none", s.failureTTL)
	case !(s.audit <= 1): // also NaN
		return fmt.Errorf("singlefill: Options.Audit is %v: a fraction of at most 1 is allowed, or 0 for none", s.audit)
	case s.redisTimeout < time.Millisecond:
		return fmt.Errorf("singlefill: Options.RedisTimeout is %v: at least 1ms is allowed", s.redisTimeout)
	case s.maxBatch < 1:
		return fmt.Errorf("singlefill: Options.MaxBatch is %d: at least 1 is allowed, or 0 for 256", s.maxBatch)
	case s.lockTTL <= 0:
		return fmt.Errorf("singlefill: Options.LockTTL is %v: it must be positive", s.lockTTL)
	case s.loadTimeout <= 0:
		return fmt.Errorf("singlefill: Options.LoadTimeout is %v: it must be positive", s.loadTimeout)
	}
	byDefault := func(given time.Duration, text string) string {
		if given == 0 {
			return text
		}
		return ""
	}
	switch {
	case s.redisTimeout >= s.lockTTL/3:
		return fmt.Errorf("singlefill: Options.RedisTimeout is %v%s: less than a third of LockTTL (%v%s) is allowed, so that a renewal can fail and be tried again",
			s.redisTimeout, byDefault(opts.RedisTimeout, " (the default)"), s.lockTTL, byDefault(opts.LockTTL, ", the default"))
	case s.lockTTL >= s.loadTimeout:
		return fmt.Errorf("singlefill: Options.LockTTL is %v%s: less than LoadTimeout (%v%s) is allowed",
			s.lockTTL, byDefault(opts.LockTTL, " (the default)"), s.loadTimeout, byDefault(opts.LoadTimeout, ", the default"))
	}
	for _, known := range s.errors {
		switch {
		case known.err == nil:
			return fmt.Errorf("singlefill: Options.Errors has nil under the name %.100q: an error is needed", known.name)
		case known.name == "" || len(known.name) > 100 || strings.IndexFunc(known.name, unicode.IsControl) >= 0:
			return fmt.Errorf("singlefill: Options.Errors has the name %.100q: 1 to 100 bytes without control characters are allowed", known.name)
		}
	}
	return nil
}

// orDefault returns v unless it is the zero value of its type.
func orDefault[V comparable](v, def V) V {
	var zero V
	if v == zero {
		return def
	}
	return v
}

func checkNamespace(namespace string) error {
	if namespace == "" {
		return fmt.Errorf("singlefill: namespace is empty")
	}
	if !utf8.ValidString(namespace) { // a label of a metric cannot have it
		return fmt.Errorf("singlefill: namespace is %.100q: valid UTF-8 is needed", namespace)
	}
	if i := strings.IndexFunc(namespace, func(r rune) bool { return r == '{' || r == '}' || unicode.IsControl(r) }); i >= 0 {
		return fmt.Errorf("singlefill: namespace is %.100q: braces and control characters are not allowed (byte %d)", namespace, i)
	}
	return nil
}
