package singlefill

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// Options tune a [Cache]. A nil *Options, like the zero value, selects the defaults, which suit
// services whose loads take milliseconds to seconds. In each field zero means the default; a
// negative value means off where off has a meaning. [New] copies the options.
type Options[T any] struct {
	// Codec turns values into bytes. Default: MsgPack.
	Codec Codec

	// TTLFunc returns the life of one value, in place of the ttl given to New: for example of a
	// token that knows when it expires. With less than 1 ms the value is not stored: the callers of
	// this process that waited for it get it, those in other processes load one after the other.
	// TTLFunc is called with values from Loaders and from Set, from many goroutines. Default: the
	// ttl given to New.
	TTLFunc func(key string, v T) time.Duration

	// Jitter shortens each life at random by up to this fraction, so that entries written together
	// do not expire together. It must be below 1. Default: 0.1; negative: off.
	Jitter float64

	// NotFoundTTL is how long ErrNotFound is remembered. Like a value it may then be served within
	// the stale windows. Default: the ttl given to New, at most a minute; negative: ErrNotFound is
	// not remembered.
	NotFoundTTL time.Duration

	// EarlyRefresh is β of XFetch: a hit shortly before a value expires may refresh it in the
	// background, in one process of the fleet, so that normally no caller waits when it expires.
	// The probability is exp(-time left / (β × load time)): the longer a load takes, and the higher
	// β, the sooner. A key without readers is not refreshed, nor a value whose load took less than
	// 1 ms, nor one that was Set. Default: 1; negative: off.
	EarlyRefresh float64

	// StaleWhileRevalidate is how long after it has expired a value is served at once, as by a hit,
	// while one process of the fleet refreshes it in the background (RFC 5861). A reader waits
	// neither for the lock nor for MaxLoads. A refresh that finds no free slot leaves them to loads
	// that callers wait for; the next one is tried a second later. At least 1 ms. Default: off.
	StaleWhileRevalidate time.Duration

	// StaleIfError is how long after it has expired a value is returned if its load fails, panics
	// or takes longer than LoadTimeout, or if the deadline of the caller comes before the load ends
	// (RFC 5861). A caller that joins a running load gets it at its deadline if that is 10 ms and a
	// round trip away or more. The value is never returned after this time, however long the load
	// took. The window begins when the value expires, like that of StaleWhileRevalidate. The old
	// value is in Redis: while Redis does not answer there is none to serve. At least 1 ms.
	// Default: off.
	StaleIfError time.Duration

	// StaleAfter bounds the wait of callers that have a value within StaleIfError: they get it as
	// soon as the load has been in flight for this time, in this process or another one. The load
	// goes on. So a source that hangs does not take its readers along. It requires StaleIfError. At
	// least 1 ms. Default: off, callers wait until the load ends or their deadline comes.
	StaleAfter time.Duration

	// RetryAfter is how long the whole fleet leaves the source alone after a failed refresh of a
	// value that can still be served; the value is served until then. It requires a reachable
	// Redis. Calls without a value to serve are not delayed. At least 1 ms. Default: 1 s; negative:
	// off.
	RetryAfter time.Duration

	// LockTTL is the life of the fill lock, which is renewed while a load runs: the time after
	// which a dead holder is replaced. More than 3 × RedisTimeout and less than LoadTimeout.
	// Default: 5 s.
	LockTTL time.Duration

	// LoadTimeout is the deadline of one load; its lock is not renewed after that. If a Loader
	// ignores its context, its callers get an error that wraps context.DeadlineExceeded, and its
	// result is dropped. Default: 30 s.
	LoadTimeout time.Duration

	// RedisTimeout bounds each Redis command of this cache, whatever the settings of the client. It
	// begins when the command is sent: while all connections of the client's pool are in use,
	// commands wait in order. At least 1 ms. Default: 500 ms.
	RedisTimeout time.Duration

	// MaxLoads is how many loads of this cache may run at once in this process. Other loads wait,
	// first come, first served. A load that waits for other loads, of this cache or another one,
	// lends its slot to one of them at a time; otherwise loads that hold all slots could wait for
	// each other. So nested loads may exceed the limit of their own cache by one for each load that
	// waits for them. Default: 64; negative: no limit.
	MaxLoads int

	// MaxFleetLoads is how many loads of this namespace may run at once in all processes, besides
	// the bound of MaxLoads. Loads wait for it in no order. It costs each load two or three round
	// trips, and each process with loads that wait some ten commands a second. While Redis does not
	// answer, or refuses to say, only MaxLoads holds: Stats.LoadsUnlimited counts that. While
	// processes disagree on the number, as during a deployment that changes it, the larger one
	// bounds the loads of all, until LockTTL after the last load of a process that has it. A nested
	// load runs in a lent slot here, too. Default: no limit.
	MaxFleetLoads int

	// MaxBatch is how many keys one call of a [ManyLoader] gets at most. Calls for more keys run at the
	// same time, each in a place of MaxLoads. Default: 256.
	MaxBatch int

	// Errors names errors of the source that mean the same in every process, such as "down" for
	// ErrDown. If a load fails with one of them (errors.Is), callers that waited in other processes
	// get a [*RemoteError] that unwraps to the error that their Options have under the same name.
	// If several match, the first name in alphabetical order counts. Processes that lack the name
	// get the text only. A name has at most 100 bytes and no control characters. Default: none.
	Errors map[string]error

	// Near keeps values in the memory of this process. It costs Delete nothing more on a single
	// server, and a round trip with other clients; Set and Expire a round trip. New refuses it with a
	// client that reads from replicas or has client-side caching. Default: nil, off.
	Near *Near

	// Trace has functions to call when something happens. Default: none.
	Trace *Trace
}

// settings are Options with the defaults filled in. Off is zero.
type settings struct {
	staleWindows
	codec         Codec
	jitter        float64
	ttl           time.Duration
	notFoundTTL   time.Duration // 0: not remembered
	earlyRefresh  float64
	lockTTL       time.Duration
	loadTimeout   time.Duration
	redisTimeout  time.Duration
	maxLoads      int // 0: no limit
	maxFleetLoads int // 0: no limit
	maxBatch      int
	errors        sentinels
	near          *Near // nil: off
	trace         Trace
}

// staleWindows are the options that say how an expired value may be served.
type staleWindows struct {
	staleWhileRevalidate time.Duration
	staleIfError         time.Duration
	staleAfter           time.Duration // 0: off
	retryAfter           time.Duration
}

// withoutType returns o without TTLFunc, the only option that knows T. The rest of the code is then
// compiled once, and not for each T.
func withoutType[T any](o *Options[T]) *Options[any] {
	return &Options[any]{
		Codec:                o.Codec,
		Jitter:               o.Jitter,
		NotFoundTTL:          o.NotFoundTTL,
		EarlyRefresh:         o.EarlyRefresh,
		StaleWhileRevalidate: o.StaleWhileRevalidate,
		StaleIfError:         o.StaleIfError,
		StaleAfter:           o.StaleAfter,
		RetryAfter:           o.RetryAfter,
		LockTTL:              o.LockTTL,
		LoadTimeout:          o.LoadTimeout,
		RedisTimeout:         o.RedisTimeout,
		MaxLoads:             o.MaxLoads,
		MaxFleetLoads:        o.MaxFleetLoads,
		MaxBatch:             o.MaxBatch,
		Errors:               o.Errors,
		Near:                 o.Near,
		Trace:                o.Trace,
	}
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
		staleWindows: staleWindows{
			staleWhileRevalidate: max(0, opts.StaleWhileRevalidate),
			staleIfError:         max(0, opts.StaleIfError),
			staleAfter:           max(0, opts.StaleAfter),
			retryAfter:           max(0, orDefault(opts.RetryAfter, time.Second)),
		},
		codec:         opts.Codec,
		jitter:        max(0, orDefault(opts.Jitter, 0.1)),
		ttl:           ttl,
		notFoundTTL:   max(0, orDefault(opts.NotFoundTTL, min(ttl, time.Minute))),
		earlyRefresh:  max(0, orDefault(opts.EarlyRefresh, 1)),
		lockTTL:       orDefault(opts.LockTTL, 5*time.Second),
		loadTimeout:   orDefault(opts.LoadTimeout, 30*time.Second),
		redisTimeout:  orDefault(opts.RedisTimeout, 500*time.Millisecond),
		maxLoads:      max(0, orDefault(opts.MaxLoads, 64)),
		maxFleetLoads: max(0, opts.MaxFleetLoads),
		maxBatch:      orDefault(opts.MaxBatch, 256),
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
	case math.IsNaN(s.jitter) || s.jitter >= 1:
		return fmt.Errorf("singlefill: Options.Jitter is %v: a fraction below 1 is allowed, or a negative number for none", s.jitter)
	case s.notFoundTTL > 0 && s.notFoundTTL < time.Millisecond:
		return fmt.Errorf("singlefill: Options.NotFoundTTL is %v: at least 1ms is allowed, or a negative one to remember nothing", s.notFoundTTL)
	case math.IsNaN(s.earlyRefresh) || math.IsInf(s.earlyRefresh, 0):
		return fmt.Errorf("singlefill: Options.EarlyRefresh is %v: a finite number is allowed, a negative one for none", s.earlyRefresh)
	case s.staleWhileRevalidate > 0 && s.staleWhileRevalidate < time.Millisecond:
		return fmt.Errorf("singlefill: Options.StaleWhileRevalidate is %v: at least 1ms is allowed, or 0 for none", s.staleWhileRevalidate)
	case s.staleIfError > 0 && s.staleIfError < time.Millisecond:
		return fmt.Errorf("singlefill: Options.StaleIfError is %v: at least 1ms is allowed, or 0 for none", s.staleIfError)
	case s.staleAfter > 0 && s.staleAfter < time.Millisecond:
		return fmt.Errorf("singlefill: Options.StaleAfter is %v: at least 1ms is allowed, or 0 for none", s.staleAfter)
	case s.staleAfter > 0 && s.staleIfError == 0:
		return fmt.Errorf("singlefill: Options.StaleAfter is %v and StaleIfError is off: it is allowed with StaleIfError only", s.staleAfter)
	case s.retryAfter > 0 && s.retryAfter < time.Millisecond:
		return fmt.Errorf("singlefill: Options.RetryAfter is %v: at least 1ms is allowed, or a negative one for none", s.retryAfter)
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
	if i := strings.IndexFunc(namespace, func(r rune) bool { return r == '{' || r == '}' || r < ' ' || r == 0x7f }); i >= 0 {
		return fmt.Errorf("singlefill: namespace is %.100q: braces and control characters are not allowed (byte %d)", namespace, i)
	}
	return nil
}
