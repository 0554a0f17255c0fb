package singlefill

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/codec"
)

// Options tune a [Cache]. A nil *Options, like the zero value, is the default, made for services that load
// in milliseconds to seconds. In every field zero means the default; negative means off, where off has a meaning.
// [New] copies what it is given.
type Options[T any] struct {
	// Codec turns values into bytes. Default: MsgPack.
	Codec Codec

	// TTLFunc gives the life of one value, in place of New's ttl: a token that knows when it expires.
	// Less than 1 ms: do not keep this value; those who waited for it in this process still get it,
	// those in other processes load in turn. It is called with values from Loaders and from Set,
	// from many goroutines. Default: New's ttl for all.
	TTLFunc func(key string, v T) time.Duration

	// Jitter shortens each life at random by up to this fraction, so that entries written together do
	// not expire together. Below 1. Default: 0.1; negative: off.
	Jitter float64

	// NotFoundTTL is how long ErrNotFound is remembered; as with values, it is kept and may be served for the
	// stale windows after that. Default: ttl, at most a minute; negative: not at all.
	NotFoundTTL time.Duration

	// EarlyRefresh is β of XFetch: a hit shortly before the end of a value's life may refresh it in the
	// background, in one process of the fleet, so that nobody waits when it ends. It is decided by lot, with
	// probability exp(-time left / (β × load time)): loads that take long are refreshed sooner, as they are with
	// a higher β. A key that nobody reads is not refreshed, nor one whose load took less than 1 ms, nor one that
	// was Set. Default: 1; negative: off.
	EarlyRefresh float64

	// StaleWhileRevalidate is how long after its life a value is served at once, as by a hit, while one
	// process of the fleet refreshes it behind its readers (RFC 5861). A reader waits for neither the lock nor
	// MaxLoads; a refresh that finds no place to load lets those come first who wait for a load, and is tried
	// again a second later. At least 1 ms. Default: off.
	StaleWhileRevalidate time.Duration

	// StaleIfError is how long after its life a value is returned if its load, which the callers wait for,
	// fails, panics or takes longer than LoadTimeout, and to a caller whose deadline comes first (RFC 5861; a
	// caller that joins a load here needs 10 ms and a round trip of patience for that). It is never returned
	// later than that, however long the load took. It begins with the life's end too: beyond
	// StaleWhileRevalidate if it is the longer one. At least 1 ms. Default: off.
	StaleIfError time.Duration

	// RetryAfter is how long after a failed refresh of a value that can still be served the whole fleet leaves
	// the source alone; the value is served meanwhile. It takes a Redis that can be told; and calls for which
	// there is nothing to serve do not care. At least 1 ms. Default: 1 s; negative: off.
	RetryAfter time.Duration

	// LockTTL is the life of the fill lock, renewed while a load runs: the time after which a dead holder
	// is replaced. More than 3 × RedisTimeout and less than LoadTimeout. Default: 5 s.
	LockTTL time.Duration

	// LoadTimeout is the deadline of one load, and the end of its lock's renewal. A Loader that ignores its
	// context is left behind then: its callers get an error that wraps context.DeadlineExceeded, its result
	// is dropped. Default: 30 s.
	LoadTimeout time.Duration

	// RedisTimeout bounds each Redis command of this cache, whatever the client's own settings, from the moment at which
	// it can be sent: while all connections of the client's pool are in use commands wait in their order.
	// At least 1 ms. Default: 500 ms.
	RedisTimeout time.Duration

	// MaxLoads is how many loads of this cache may run at once in this process; more wait, first come,
	// first served. A load that waits for other loads, of this cache or of others, lends its place to one of
	// them at a time, or loads that hold all places and wait would wait for ever. So nested loads may exceed
	// the limit of their own cache by one for each load that waits for them. Default: 64; negative: no limit.
	MaxLoads int

	// MaxFleetLoads is how many loads of this namespace may run at once in the whole fleet: one more bound, on
	// top of MaxLoads, by a lock.Semaphore named "<namespace>:loads". More wait, in no order. It costs each load
	// two or three more round trips, and while loads wait, each process asks for a place some ten times a second.
	// Where Redis cannot be asked MaxLoads alone holds. While processes disagree on the number, as when it is
	// being changed, those that come later are not bound, and tell Trace.RedisError. A nested load runs in a
	// lent place here too. Default: no limit.
	MaxFleetLoads int

	// Trace is told what happens. Default: nobody.
	Trace *Trace
}

// settings are Options with every default filled in and off spelled as zero.
type settings[T any] struct {
	codec                Codec
	ttlFunc              func(key string, v T) time.Duration
	jitter               float64
	ttl                  time.Duration
	notFoundTTL          time.Duration // 0: not remembered
	earlyRefresh         float64       // 0: off
	staleWhileRevalidate time.Duration // 0: off
	staleIfError         time.Duration // 0: off
	retryAfter           time.Duration // 0: off
	lockTTL              time.Duration
	loadTimeout          time.Duration
	redisTimeout         time.Duration
	maxLoads             int // 0: no limit
	maxFleetLoads        int // 0: no limit
	trace                Trace
}

// resolve checks the arguments of New. It touches nothing.
func resolve[T any](rdb redis.UniversalClient, namespace string, ttl time.Duration, opts *Options[T]) (settings[T], error) {
	if err := client.Check(rdb); err != nil {
		return settings[T]{}, fmt.Errorf("singlefill: %w", err)
	}
	if err := checkNamespace(namespace); err != nil {
		return settings[T]{}, err
	}
	if ttl < time.Millisecond {
		return settings[T]{}, fmt.Errorf("singlefill: ttl is %v: at least 1ms is allowed", ttl)
	}
	if opts == nil {
		opts = &Options[T]{}
	}
	s := settings[T]{
		codec:                opts.Codec,
		ttlFunc:              opts.TTLFunc,
		jitter:               max(0, orDefault(opts.Jitter, 0.1)),
		ttl:                  ttl,
		notFoundTTL:          max(0, orDefault(opts.NotFoundTTL, min(ttl, time.Minute))),
		earlyRefresh:         max(0, orDefault(opts.EarlyRefresh, 1)),
		staleWhileRevalidate: max(0, opts.StaleWhileRevalidate),
		staleIfError:         max(0, opts.StaleIfError),
		retryAfter:           max(0, orDefault(opts.RetryAfter, time.Second)),
		lockTTL:              orDefault(opts.LockTTL, 5*time.Second),
		loadTimeout:          orDefault(opts.LoadTimeout, 30*time.Second),
		redisTimeout:         orDefault(opts.RedisTimeout, 500*time.Millisecond),
		maxLoads:             max(0, orDefault(opts.MaxLoads, 64)),
		maxFleetLoads:        max(0, opts.MaxFleetLoads),
	}
	if s.codec == nil {
		s.codec = MsgPack
	}
	if opts.Trace != nil {
		s.trace = *opts.Trace
	}
	return s, s.check()
}

func (s settings[T]) check() error {
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
	case s.retryAfter > 0 && s.retryAfter < time.Millisecond:
		return fmt.Errorf("singlefill: Options.RetryAfter is %v: at least 1ms is allowed, or a negative one for none", s.retryAfter)
	case s.redisTimeout < time.Millisecond:
		return fmt.Errorf("singlefill: Options.RedisTimeout is %v: at least 1ms is allowed", s.redisTimeout)
	case s.lockTTL <= 0:
		return fmt.Errorf("singlefill: Options.LockTTL is %v: it must be positive", s.lockTTL)
	case s.loadTimeout <= 0:
		return fmt.Errorf("singlefill: Options.LoadTimeout is %v: it must be positive", s.loadTimeout)
	case s.redisTimeout >= s.lockTTL/3:
		return fmt.Errorf("singlefill: Options.RedisTimeout is %v: less than a third of LockTTL (%v) is allowed, so that a renewal can fail and be tried again", s.redisTimeout, s.lockTTL)
	case s.lockTTL >= s.loadTimeout:
		return fmt.Errorf("singlefill: Options.LockTTL is %v: less than LoadTimeout (%v) is allowed", s.lockTTL, s.loadTimeout)
	}
	return codec.Takes(s.codec, reflect.TypeFor[T]())
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
