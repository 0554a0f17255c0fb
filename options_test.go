package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// New refuses arguments and options that make no sense, and says which.
//
//fault:bad-options
func TestNew_RefusesBadOptions(t *testing.T) {
	t.Parallel()
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}) // no command is sent
	defer rdb.Close()
	caching := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", Protocol: 3, ClientSideCacheConfig: &redis.ClientSideCacheConfig{}})
	defer caching.Close()
	cluster := func(o redis.ClusterOptions) redis.UniversalClient {
		o.Addrs = []string{"127.0.0.1:1"}
		c := redis.NewClusterClient(&o)
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	const replicas = "reads from replicas (ReadOnly, RouteByLatency or RouteRandomly)"
	mayBeOld := func(what string) string {
		return "Options.Near is set and rdb " + what + ", which could bring an old value back into memory after a Delete: turn one of them off"
	}
	long := strings.Repeat("n", 101)
	type options = singlefill.Options[int]
	const fine = "users"
	for _, test := range []struct {
		rdb       redis.UniversalClient
		namespace string
		ttl       time.Duration
		opts      *options
		want      string // "" for nothing
	}{
		{rdb, fine, time.Minute, nil, ""},
		{rdb, fine, time.Minute, &options{Audit: 1}, ""},
		{rdb, fine, time.Minute, &options{Audit: -1}, ""},
		{rdb, fine, time.Minute, &options{Audit: math.NaN()}, "Options.Audit is NaN: a fraction of at most 1 is allowed, or 0 for none"},
		{rdb, fine, time.Minute, &options{Audit: 1.5}, "Options.Audit is 1.5: a fraction of at most 1 is allowed, or 0 for none"},
		{rdb, "a:b/c d-é%", time.Millisecond, nil, ""},
		{rdb, fine, math.MaxInt64, nil, ""},

		{nil, fine, time.Minute, nil, "rdb is nil: a redis.UniversalClient is needed"},
		{(*redis.Client)(nil), fine, time.Minute, nil, "rdb is a nil *redis.Client: a connected redis.UniversalClient is needed"},
		{redistest.ClientAndPipeline{UniversalClient: rdb}, fine, time.Minute, nil, "rdb is a redistest.ClientAndPipeline, a pipeline, which answers nothing until it is executed: a redis.UniversalClient is needed"},

		{rdb, "", time.Minute, nil, "namespace is empty"},
		{rdb, "us{er}s", time.Minute, nil, `namespace is "us{er}s": braces and control characters are not allowed (byte 2)`},
		{rdb, "users\n", time.Minute, nil, `namespace is "users\n": braces and control characters are not allowed (byte 5)`},
		{rdb, "a\x7f", time.Minute, nil, `namespace is "a\x7f": braces and control characters are not allowed (byte 1)`},
		{rdb, "é\u0085", time.Minute, nil, `namespace is "é\u0085": braces and control characters are not allowed (byte 2)`},
		{rdb, "a\xff", time.Minute, nil, `namespace is "a\xff": valid UTF-8 is needed`},

		{rdb, fine, 0, nil, "ttl is 0s: at least 1ms is allowed"},
		{rdb, fine, 999 * time.Microsecond, nil, "ttl is 999µs: at least 1ms is allowed"},

		{rdb, fine, time.Minute, &options{Jitter: 0.99}, ""},
		{rdb, fine, time.Minute, &options{Jitter: 1}, "Options.Jitter is 1: a fraction below 1 is allowed, or a negative number for none"},
		{rdb, fine, time.Minute, &options{Jitter: math.NaN()}, "Options.Jitter is NaN: a fraction below 1 is allowed, or a negative number for none"},
		{rdb, fine, time.Minute, &options{Jitter: math.Inf(1)}, "Options.Jitter is +Inf: a fraction below 1 is allowed, or a negative number for none"},

		{rdb, fine, time.Minute, &options{NotFoundTTL: time.Millisecond}, ""},
		{rdb, fine, time.Minute, &options{NotFoundTTL: -1}, ""},
		{rdb, fine, time.Minute, &options{NotFoundTTL: 1}, "Options.NotFoundTTL is 1ns: at least 1ms is allowed, or a negative one to remember nothing"},

		{rdb, fine, time.Minute, &options{RedisTimeout: time.Millisecond}, ""},
		{rdb, fine, time.Minute, &options{RedisTimeout: 999 * time.Microsecond}, "Options.RedisTimeout is 999µs: at least 1ms is allowed"},
		{rdb, fine, time.Minute, &options{RedisTimeout: time.Second}, "Options.RedisTimeout is 1s: less than a third of LockTTL (3s, the default) is allowed, so that a renewal can fail and be tried again"},

		{rdb, fine, time.Minute, &options{LockTTL: 1500 * time.Millisecond}, "Options.RedisTimeout is 500ms (the default): less than a third of LockTTL (1.5s) is allowed, so that a renewal can fail and be tried again"},
		{rdb, fine, time.Minute, &options{LockTTL: 1501 * time.Millisecond}, ""},
		{rdb, fine, time.Minute, &options{LockTTL: -time.Second}, "Options.LockTTL is -1s: it must be positive"},
		{rdb, fine, time.Minute, &options{LockTTL: 30 * time.Second}, "Options.LockTTL is 30s: less than LoadTimeout (30s, the default) is allowed"},

		{rdb, fine, time.Minute, &options{LoadTimeout: 3 * time.Second}, "Options.LockTTL is 3s (the default): less than LoadTimeout (3s) is allowed"},
		{rdb, fine, time.Minute, &options{LoadTimeout: 5001 * time.Millisecond}, ""},
		{rdb, fine, time.Minute, &options{LoadTimeout: -1}, "Options.LoadTimeout is -1ns: it must be positive"},

		{rdb, fine, time.Minute, &options{FailureTTL: time.Millisecond}, ""},
		{rdb, fine, time.Minute, &options{FailureTTL: 999 * time.Microsecond}, "Options.FailureTTL is 999µs: at least 1ms is allowed, or 0 for none"},
		{rdb, fine, time.Minute, &options{StaleAfter: time.Second}, "Options.StaleAfter is 1s and StaleIfError is off: it is allowed with StaleIfError only"},
		{rdb, fine, time.Minute, &options{StaleAfter: time.Microsecond, StaleIfError: time.Hour}, "Options.StaleAfter is 1µs: at least 1ms is allowed, or 0 for none"},
		{rdb, fine, time.Minute, &options{Errors: map[string]error{"a\x00b": errDown}}, `Options.Errors has the name "a\x00b": 1 to 100 bytes without control characters are allowed`},
		{rdb, fine, time.Minute, &options{Errors: map[string]error{long: errDown}}, `Options.Errors has the name "` + long[:100] + `": 1 to 100 bytes without control characters are allowed`},
		{rdb, fine, time.Minute, &options{Errors: map[string]error{"down": nil}}, `Options.Errors has nil under the name "down": an error is needed`},
		{rdb, fine, time.Minute, &options{Near: &singlefill.Near{Size: -1}}, "Near.Size is -1: at least 1 is allowed, or 0 for 10,000"},
		{rdb, fine, time.Minute, &options{Near: &singlefill.Near{MaxBytes: 64}}, "Near.MaxBytes is 64: at least 1 MiB is allowed, or 0 for no bound"},
		{rdb, fine, time.Minute, &options{Near: &singlefill.Near{TTL: time.Microsecond}}, "Near.TTL is 1µs: at least 1ms is allowed, or 0 for the life of the value"},
		{rdb, fine, time.Minute, &options{Near: &singlefill.Near{MaxLag: time.Millisecond}}, "Near.MaxLag is 1ms: 10ms to 1h is allowed, or 0 for 1s"},
		{rdb, fine, time.Minute, &options{Near: &singlefill.Near{MaxLag: 2 * time.Hour}}, "Near.MaxLag is 2h0m0s: 10ms to 1h is allowed, or 0 for 1s"},
		{caching, fine, time.Minute, &options{Near: &singlefill.Near{}}, mayBeOld("has client-side caching")},
		{cluster(redis.ClusterOptions{RouteByLatency: true}), fine, time.Minute, &options{Near: &singlefill.Near{}}, mayBeOld(replicas)},
		{cluster(redis.ClusterOptions{ReadOnly: true}), fine, time.Minute, &options{Near: &singlefill.Near{}}, mayBeOld(replicas)},
		{struct{ *redis.Client }{caching}, fine, time.Minute, &options{Near: &singlefill.Near{}}, mayBeOld("has client-side caching")},
		{struct{ *redis.ClusterClient }{cluster(redis.ClusterOptions{ReadOnly: true}).(*redis.ClusterClient)}, fine, time.Minute, &options{Near: &singlefill.Near{}}, mayBeOld(replicas)},
		{wrapped{caching}, fine, time.Minute, &options{Near: &singlefill.Near{}}, ""},
		{cluster(redis.ClusterOptions{RouteRandomly: true}), fine, time.Minute, &options{Near: &singlefill.Near{}}, mayBeOld(replicas)},
		{rdb, fine, time.Minute, &options{MaxBatch: -1}, "Options.MaxBatch is -1: at least 1 is allowed, or 0 for 256"},
		{rdb, fine, time.Minute, &options{MaxLoads: -1}, ""},
		{rdb, fine, time.Minute, &options{Codec: singlefill.Raw}, "Options.Codec Raw takes []byte or string, not int"},
	} {
		c, err := singlefill.New(test.rdb, test.namespace, test.ttl, test.opts)
		got, isNamed := "", true // for the package
		if err != nil {
			got, isNamed = strings.CutPrefix(err.Error(), "singlefill: ")
		}
		if got != test.want || !isNamed {
			t.Errorf("New(%T, %q, %v, %+v)\ngot  %q\nwant %q", test.rdb, test.namespace, test.ttl, test.opts, got, test.want)
		}
		if (c == nil) == (err == nil) {
			t.Errorf("New(%T, %q, %v, %+v) returns %v, %v: want one of both", test.rdb, test.namespace, test.ttl, test.opts, c, err)
		}
		if c != nil {
			_ = c.Close()
		}
	}
	_, err := singlefill.New[map[string]struct{ Body io.Reader }](rdb, fine, time.Minute, nil)
	cachetest.WantErrText(t, "New with a part that cannot be stored", err, "cannot store T[].Body, of type io.Reader")
}

// New copies its options and does not change them.
func TestNew_CopiesOptions(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	var e cachetest.Events
	opts := cachetest.PatientOptions(&singlefill.Options[string]{Codec: singlefill.Raw, Trace: e.Trace(), TTLFunc: lifeInMinutes, Jitter: -1})
	given := *opts.Trace
	ns := redistest.Namespace(t)
	c, err := singlefill.New(rdb, ns, time.Hour, opts)
	redistest.Must(t, err)
	if opts.MaxLoads != 0 || opts.NotFoundTTL != 0 || opts.Trace.Hit == nil || given.Miss == nil {
		t.Errorf("New has changed the options: %+v", opts)
	}
	panics := func(any) error { panic("a codec set after New") }
	*opts.Trace = singlefill.Trace{Hit: func(context.Context, string) { t.Error("a Trace function set after New is called") }}
	*opts = singlefill.Options[string]{Codec: cachetest.BadCodec{OnMarshal: panics, OnUnmarshal: panics}, MaxLoads: -1}
	for range 2 {
		cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("7")).Want(t, "7")
	}
	cachetest.WantStored(t, rdb, ns, "k", "7")
	if life := rdb.PTTL(t.Context(), ns+":{k}").Val(); life > 7*time.Minute || life < 6*time.Minute {
		t.Errorf("the value lives %v, want 7m", life)
	}
	_ = c.Close()
	e.Want(t, "a load and a hit", "start k", "done k <nil>, store error false, stored true, fenced false, unlocked false", "miss k", "hit k")
}

// A cache works at the edges of what New allows.
//
//fault:bad-options
func TestNew_ExtremeTTLs(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		for _, ttl := range []time.Duration{math.MaxInt64, time.Millisecond, 1500 * time.Microsecond} {
			c, err := singlefill.New(rdb, ns, ttl, cachetest.PatientOptions(&singlefill.Options[string]{Jitter: 0.999, StaleIfError: time.Hour}))
			redistest.Must(t, err)
			key := ttl.String()
			cachetest.GoGet(t.Context(), c, key, cachetest.Gives("v")).Want(t, "v")
			redistest.Must(t, c.Set(t.Context(), key, "v"))
			_ = c.Close()
			if s := c.Stats(); s.Stored != 1 || s.StoreErrors != 0 || s.RedisErrors != 0 {
				t.Errorf("ttl %v: %+v, want the value stored", ttl, s)
			}
		}
	})
}

// MaxLoads, LockTTL and LoadTimeout have their documented defaults.
func TestOptions_Defaults(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		for _, test := range []struct{ maxLoads, want int }{{0, 64}, {-1, 100}, {3, 3}} {
			ns := redistest.Namespace(t)
			c, err := singlefill.New(rdb, ns, time.Hour, &singlefill.Options[string]{MaxLoads: test.maxLoads})
			redistest.Must(t, err)
			src := cachetest.NewSource[string](t)
			var herd []*cachetest.Call[string]
			for i := range 100 {
				herd = append(herd, cachetest.GoGet(t.Context(), c, fmt.Sprint(i), src.Load))
			}
			synctest.Wait()
			if n := c.Stats().Loading; n != int64(test.want) {
				t.Errorf("MaxLoads %d: %d loads at a time, want %d", test.maxLoads, n, test.want)
			}
			first := src.Next(t)
			if deadline, _ := first.Ctx.Deadline(); time.Until(deadline) != 30*time.Second {
				t.Errorf("LoadTimeout: a load ends in %v, want 30s", time.Until(deadline))
			}
			if life := m.TTL(ns + ":{" + first.Key + "}:lock"); life != 3*time.Second {
				t.Errorf("LockTTL: a lock lives %v, want 3s", life)
			}
			first.Give("v")
			for range 99 {
				src.Next(t).Give("v")
			}
			for _, a := range herd {
				a.Want(t, "v")
			}
			_ = c.Close()
		}
	})
}

// OptionsFor copies every setting but those that belong to the type.
func TestOptionsFor(t *testing.T) {
	t.Parallel()
	from := &singlefill.Options[string]{TTLFunc: lifeInMinutes, Tags: func(string, string) []string { return nil }, LoadMany: new(manySource).load, Version: 1}
	v := reflect.ValueOf(from).Elem()
	for i := range v.NumField() {
		switch f := v.Field(i); f.Kind() {
		case reflect.Int, reflect.Int64:
			f.SetInt(int64(i + 1))
		case reflect.Float64:
			f.SetFloat(float64(i + 1))
		}
	}
	from.Codec, from.Errors = singlefill.JSON, map[string]error{"down": errors.ErrUnsupported}
	from.Near, from.Trace = new(singlefill.Near), new(singlefill.Trace)
	to := reflect.ValueOf(singlefill.OptionsFor[int](from)).Elem()
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		if knowsT := name == "Version" || name == "TTLFunc" || name == "Tags" || name == "LoadMany"; v.Field(i).IsZero() || to.Field(i).IsZero() != knowsT ||
			!knowsT && !reflect.DeepEqual(to.Field(i).Interface(), v.Field(i).Interface()) {
			t.Errorf("%s is %v, copied as %v", name, v.Field(i), to.Field(i))
		}
	}
	if o := singlefill.OptionsFor[int]((*singlefill.Options[string])(nil)); !reflect.ValueOf(*o).IsZero() {
		t.Errorf("for nil it returns %+v", o)
	}
}

// The life of a value can be a field that is not stored.
func TestTTLFunc_FieldThatIsNotStored(t *testing.T) {
	t.Parallel()
	type session struct {
		User string
		TTL  time.Duration `msgpack:"-"`
	}
	m, rdb := redistest.StartMini(t)
	c, err := singlefill.New(rdb, "sessions", time.Hour, &singlefill.Options[session]{
		Jitter: -1, TTLFunc: func(_ string, s session) time.Duration { return s.TTL },
	})
	redistest.Must(t, err)
	defer c.Close()
	ada := session{"ada", 7 * time.Minute}
	cachetest.GoGet(t.Context(), c, "a", cachetest.Gives(ada)).Want(t, ada)
	if got := m.TTL("sessions:{a}"); got > 7*time.Minute || got < 6*time.Minute { // without TTLFunc an hour
		t.Errorf("the value lives for %v", got)
	}
	cachetest.WantGet(t, c, "a", session{User: "ada"}, nil)
}
