package lock_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A constructorCase has arguments of the constructors.
type constructorCase struct {
	rdb  redis.UniversalClient
	name string
	size int
	opts *lock.Options
	want string // of the error; "": there is none
}

func constructorCases(rdb redis.UniversalClient) []constructorCase {
	type options = lock.Options
	const ms = time.Millisecond
	const ttlText = ": more than three times RedisTimeout (500ms) is allowed, so that a renewal can fail and be tried again"
	const waiterText = ": more than three times RedisTimeout (500ms) is allowed, so that a waiter can miss a reply and keep its place"
	return []constructorCase{
		{rdb, "n", 1, nil, ""},
		{rdb, "n", 1, &options{}, ""},
		{rdb, "a:b/c {d}é%\x00\xff", math.MaxInt, nil, ""},
		{rdb, strings.Repeat("n", 64<<10), 1, nil, ""},

		{nil, "n", 1, nil, "rdb is nil: a redis.UniversalClient is needed"},
		{(*redis.Client)(nil), "n", 1, nil, "rdb is a nil *redis.Client: a connected redis.UniversalClient is needed"},
		{(*redis.ClusterClient)(nil), "n", 1, nil, "rdb is a nil *redis.ClusterClient: a connected redis.UniversalClient is needed"},
		{redistest.ClientAndPipeline{UniversalClient: rdb}, "n", 1, nil, "rdb is a redistest.ClientAndPipeline, a pipeline, which answers nothing until it is executed: a redis.UniversalClient is needed"},
		{rdb, "", 1, nil, "name is empty"},

		{rdb, "n", 1, &options{TTL: 1500*ms + 3}, ""},
		{rdb, "n", 1, &options{TTL: math.MaxInt64}, ""},
		{rdb, "n", 1, &options{TTL: 1500 * ms}, "Options.TTL is 1.5s" + ttlText},
		{rdb, "n", 1, &options{TTL: 1}, "Options.TTL is 1ns" + ttlText},
		{rdb, "n", 1, &options{TTL: -1}, "Options.TTL is -1ns" + ttlText},
		{rdb, "n", 1, &options{TTL: math.MinInt64}, "Options.TTL is -2562047h47m16.854775808s" + ttlText},
		{rdb, "n", 1, &options{TTL: 4 * ms, RedisTimeout: ms}, ""},
		{rdb, "n", 1, &options{RedisTimeout: 4 * time.Second}, "Options.TTL is 10s: more than three times RedisTimeout (4s) is allowed, so that a renewal can fail and be tried again"},

		{rdb, "n", 1, &options{WaiterTTL: 1500*ms + 3}, ""},
		{rdb, "n", 1, &options{WaiterTTL: math.MaxInt64}, ""},
		{rdb, "n", 1, &options{WaiterTTL: 1500 * ms}, "Options.WaiterTTL is 1.5s" + waiterText},
		{rdb, "n", 1, &options{WaiterTTL: -1}, "Options.WaiterTTL is -1ns" + waiterText},
		{rdb, "n", 1, &options{TTL: time.Minute, RedisTimeout: 4 * time.Second}, "Options.WaiterTTL is 5s: more than three times RedisTimeout (4s) is allowed, so that a waiter can miss a reply and keep its place"},

		{rdb, "n", 1, &options{RedisTimeout: ms}, ""},
		{rdb, "n", 1, &options{RedisTimeout: ms - 1}, "Options.RedisTimeout is 999.999µs: at least 1ms is allowed"},
		{rdb, "n", 1, &options{RedisTimeout: -1}, "Options.RedisTimeout is -1ns: at least 1ms is allowed"},
		{rdb, "n", 1, &options{RedisTimeout: math.MaxInt64, TTL: math.MaxInt64, WaiterTTL: math.MaxInt64},
			"Options.TTL is 2562047h47m16.854775807s: more than three times RedisTimeout (2562047h47m16.854775807s) is allowed, so that a renewal can fail and be tried again"},

		{rdb, "n", 1, &options{MaxHold: ms}, ""},
		{rdb, "n", 1, &options{MaxHold: -7}, ""}, // off
		{rdb, "n", 1, &options{MaxHold: math.MaxInt64}, ""},
		{rdb, "n", 1, &options{MaxHold: 1}, "Options.MaxHold is 1ns: at least 1ms is allowed, or 0 for no end"},

		{rdb, "n", 1, &options{Holder: strings.Repeat("h", 64)}, ""},
		{rdb, "n", 1, &options{Holder: strings.Repeat("h", 65)}, `Options.Holder is "` + strings.Repeat("h", 65) + `": at most 64 bytes are allowed`},

		{rdb, "n", 0, nil, `size of "n" is 0: at least 1 is allowed`},
		{rdb, "n", -1, nil, `size of "n" is -1: at least 1 is allowed`},
		{rdb, strings.Repeat("n", 64<<10), math.MinInt, nil, `size of "` + strings.Repeat("n", 100) + `" is -9223372036854775808: at least 1 is allowed`},
	}
}

// wantOf returns the error of one constructor.
func (c constructorCase) wantOf(constructor string) string {
	switch {
	case c.want == "", strings.HasPrefix(c.want, "size") && constructor != "NewSemaphore":
		return ""
	case strings.HasPrefix(c.want, "Options.WaiterTTL is 5s") && constructor != "NewFairMutex":
		return "" // the other kinds do not use the default
	}
	return "lock: " + c.want
}

// Arguments that make no sense are refused before anything is sent.
//
//fault:bad-options
func TestOptions_Refused(t *testing.T) {
	t.Parallel()
	p := redistest.NewProxy(t, "127.0.0.1:1")
	for _, c := range constructorCases(p.Client(t)) {
		for constructor, create := range map[string]func() (*lock.Locker, error){
			"NewMutex":     func() (*lock.Locker, error) { return lock.NewMutex(c.rdb, c.name, c.opts) },
			"NewFairMutex": func() (*lock.Locker, error) { return lock.NewFairMutex(c.rdb, c.name, c.opts) },
			"NewSemaphore": func() (*lock.Locker, error) { return lock.NewSemaphore(c.rdb, c.name, c.size, c.opts) },
		} {
			l, err := create()
			got, want := "", c.wantOf(constructor)
			if err != nil {
				got = err.Error()
			}
			if got != want || (l == nil) != (err != nil) {
				t.Errorf("%s(%.20q, %d, %+v) = %v, %q; want %q", constructor, c.name, c.size, c.opts, l, got, want)
			}
		}
	}
	if n := p.Commands(); n != 0 {
		t.Errorf("%d commands were sent", n)
	}
}

// Options are copied, and may be shared.
func TestOptions_Copied(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		var e locktest.Events
		opts := &lock.Options{TTL: 6 * time.Second, Trace: e.Trace()}
		was := *opts
		a, b := newLocker(t, kind, rdb, "a", opts), newLocker(t, kind, rdb, "b", opts)
		if *opts != was {
			t.Errorf("the options were changed to %+v", *opts)
		}
		*opts.Trace = lock.Trace{Acquired: func(context.Context, lock.LeaseInfo) { t.Error("the later Trace is called") }}
		*opts = lock.Options{TTL: -1, RedisTimeout: 1}
		for _, l := range []*lock.Locker{a, b} {
			lease := mustAcquire(t, l)
			time.Sleep(3 * time.Second)
			mustRelease(t, lease)
		}
		if n := len(e.Of("renewed")); n != 2 {
			t.Errorf("%d renewals:%s", n, &e)
		}
		e.WantTransitions(t, "acquired released acquired released")
	})
}

// The largest times that are allowed work, on a real server too.
//
//fault:bad-options
func TestOptions_EnormousTimes(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, kind := range kinds {
			name := redistest.Namespace(t)
			opts := patient(lock.Options{TTL: math.MaxInt64, WaiterTTL: math.MaxInt64, MaxHold: math.MaxInt64})
			l := newLocker(t, kind, rdb, name, opts)
			lease := mustAcquire(t, l)
			wantBusy(t, l)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			_, err := l.Acquire(ctx)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: Acquire: %v, want the end of its context", kind, err)
			}
			for key, left := range keysOf(t, rdb, name) {
				if left == -1 { // a life that go-redis cannot express is negative too
					t.Errorf("%s: %q has no TTL", kind, key)
				}
			}
			wantHeld(t, lease)
			mustRelease(t, lease)
		}
	})
}
