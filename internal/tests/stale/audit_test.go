package stale_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// An auditor is a cache that audits each hit, and its findings.
type auditor[T any] struct {
	*singlefill.Cache[T]
	mu    sync.Mutex
	infos []singlefill.AuditInfo
}

func newAuditor[T any](t *testing.T, rdb redis.UniversalClient, opts singlefill.Options[T]) *auditor[T] {
	t.Helper()
	a := new(auditor[T])
	opts.Audit, opts.EarlyRefresh = 1, -1
	opts.Trace = &singlefill.Trace{
		AuditDone: func(_ context.Context, info singlefill.AuditInfo) {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.infos = append(a.infos, info)
		},
		LoadStart: func(ctx context.Context, key string) context.Context {
			t.Errorf("the load of %s is traced", key)
			return ctx
		},
	}
	a.Cache = cachetest.NewCacheIn(t, rdb, "ns", &opts)
	return a
}

// hit wants a hit, and waits until the goroutines it has started have ended or sleep.
func (a *auditor[T]) hit(t *testing.T, key string, load singlefill.Loader[T]) {
	t.Helper()
	if _, err := a.GetOrLoad(t.Context(), key, load); err != nil && err != singlefill.ErrNotFound {
		t.Error(err)
	}
	synctest.Wait()
}

// want waits for longer than an audit takes, and wants what all audits so far have found.
func (a *auditor[T]) want(t *testing.T, infos ...singlefill.AuditInfo) {
	t.Helper()
	time.Sleep(2 * time.Second)
	synctest.Wait()
	if len(a.infos) != len(infos) {
		t.Fatalf("audits: %+v, want %+v", a.infos, infos)
	}
	var audits, stale int64
	for i, info := range infos {
		if got := a.infos[i]; got.Key != info.Key || got.Stale != info.Stale || got.Near != info.Near || got.Age != info.Age ||
			!errors.Is(got.Err, info.Err) {
			t.Errorf("audit %d: %+v, want %+v", i, got, info)
		}
		if info.Err == nil {
			audits++
		}
		if info.Stale {
			stale++
		}
	}
	if s := a.Stats(); s.Audits != audits || s.AuditsStale != stale || s.Loads != 0 || s.Refreshes != 0 || s.LoadErrors != 0 {
		t.Errorf("%+v, want %d audits, %d stale, and no load", s, audits, stale)
	}
}

// What was served is compared with the source, and what differs with Redis a second later.
func TestAudit(t *testing.T) {
	const key = "k"
	for name, test := range map[string]struct {
		source string
		err    error                                           // of the source
		during func(t *testing.T, c *singlefill.Cache[string]) // half a second after the difference
		stale  bool
	}{
		"the same":            {source: "v"},
		"differs":             {source: "new", stale: true},
		"exists no more":      {err: singlefill.ErrNotFound, stale: true},
		"deleted in a moment": {source: "new", during: func(t *testing.T, c *singlefill.Cache[string]) { redistest.Must(t, c.Delete(t.Context(), key)) }},
		"expired in a moment": {source: "new", during: func(t *testing.T, c *singlefill.Cache[string]) { redistest.Must(t, c.Expire(t.Context(), key)) }},
		"set, to the same value": {source: "new", during: func(t *testing.T, c *singlefill.Cache[string]) {
			redistest.Must(t, c.Set(t.Context(), key, "v"))
		}},
	} {
		for _, mode := range []struct {
			near  bool
			codec singlefill.Codec
		}{{false, singlefill.MsgPack}, {true, singlefill.MsgPack}, {true, cachetest.KeyedCodec{Codec: singlefill.MsgPack}}} {
			near := mode.near
			cachetest.RunInBubble(t, fmt.Sprintf("%s/near=%t/%T", name, near, mode.codec), func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				opts := singlefill.Options[string]{Codec: mode.codec}
				if near {
					opts.Near = new(singlefill.Near)
				}
				c := newAuditor(t, rdb, opts)
				redistest.Must(t, c.Set(t.Context(), key, "v"))
				if near {
					cachetest.WantGet(t, c.Cache, key, "v", nil)
					cachetest.WantGet(t, c.Cache, key, "v", nil) // proves memory
				}
				time.Sleep(time.Minute)
				if near {
					cachetest.WantGet(t, c.Cache, key, "v", nil)
					synctest.Wait()
				}
				wasNear := c.Stats().NearHits
				c.hit(t, key, cachetest.Takes(0, test.source, test.err))
				info := singlefill.AuditInfo{Key: key, Stale: test.stale, Age: time.Minute, Near: near}
				if got := c.Stats().NearHits - wasNear; near != (got == 1) {
					t.Fatalf("%d hits in memory", got)
				}
				time.Sleep(time.Second / 2)
				if test.during != nil {
					test.during(t, c.Cache)
				}
				c.want(t, info)
			})
		}
	}
}

// An audit whose load fails, hangs or panics has found out nothing, and neither has one during which
// the cache is closed.
//
//fault:audit
func TestAudit_FindsNothing(t *testing.T) {
	boom := errors.New("boom")
	for name, test := range map[string]struct {
		load singlefill.Loader[string]
		want error
	}{
		"an error": {cachetest.Fails[string](boom), boom},
		"a panic":  {func(context.Context, string) (string, error) { panic(boom) }, boom},
		"LoadTimeout": {func(ctx context.Context, _ string) (string, error) {
			time.Sleep(time.Hour)
			return "new", nil
		}, context.DeadlineExceeded},
	} {
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			c := newAuditor(t, rdb, singlefill.Options[string]{LoadTimeout: 30 * time.Second})
			redistest.Must(t, c.Set(t.Context(), "k", "v"))
			c.hit(t, "k", test.load)
			time.Sleep(30 * time.Second)
			c.want(t, singlefill.AuditInfo{Key: "k", Err: test.want})
			time.Sleep(time.Hour)
		})
	}
	cachetest.RunInBubble(t, "Close", func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newAuditor(t, rdb, singlefill.Options[string]{})
		redistest.Must(t, c.Set(t.Context(), "differs", "v"))
		redistest.Must(t, c.Set(t.Context(), "loads", "v"))
		c.hit(t, "differs", cachetest.Gives("new"))
		c.hit(t, "loads", func(ctx context.Context, _ string) (string, error) {
			<-ctx.Done()
			return "", ctx.Err()
		})
		begun := time.Now()
		c.Close()
		cachetest.WantElapsed(t, "Close returns", begun, 0)
		if len(c.infos) != 2 {
			t.Errorf("audits: %+v", c.infos)
		}
		for _, info := range c.infos {
			if want := map[string]error{"differs": singlefill.ErrClosed, "loads": context.Canceled}[info.Key]; info.Err != want {
				t.Errorf("%+v, want the error %v", info, want)
			}
		}
	})
}

// Audits leave the slots to loads that callers wait for, run once at a time for each key, and send
// nothing if they find no difference.
//
//fault:audit
func TestAudit_YieldsToCallers(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		a := newAuditor(t, rdb, singlefill.Options[string]{})
		redistest.Must(t, a.Set(t.Context(), "k", "v"))
		source := cachetest.NewSource[string](t)
		a.hit(t, "k", source.Load)
		for range 10 {
			a.hit(t, "k", source.Load) // the first audit still runs
		}
		source.Next(t).Give("v")
		synctest.Wait()
		source.Want(t, 1)
		a.want(t, singlefill.AuditInfo{Key: "k"})
		cachetest.WantCommands(t, m, "a hit and its audit", 1, 1, func() { a.hit(t, "k", cachetest.Gives("v")) })
		a.hit(t, "k", cachetest.Gives("new"))
		a.hit(t, "k", cachetest.MustNotLoad[string](t)) // the second look at the first hit is to come
		a.want(t, singlefill.AuditInfo{Key: "k"}, singlefill.AuditInfo{Key: "k", Age: 2 * time.Second},
			singlefill.AuditInfo{Key: "k", Age: 2 * time.Second, Stale: true})

		c := cachetest.NewCacheIn(t, rdb, "busy", &singlefill.Options[string]{MaxLoads: 1, Audit: 1})
		redistest.Must(t, c.Set(t.Context(), "k", "v"))
		caller, load := source.Begin(t.Context(), t, c, "cold")
		_, err := c.GetOrLoad(t.Context(), "k", cachetest.MustNotLoad[string](t))
		redistest.Must(t, err)
		synctest.Wait()
		load.Give("v")
		caller.Want(t, "v")
		if n := c.Stats().Audits; n != 0 {
			t.Errorf("%d audits while a caller has the only slot", n)
		}

		c = cachetest.NewCacheIn(t, rdb, "refreshed", &singlefill.Options[string]{Audit: 1})
		redistest.Must(t, c.Set(t.Context(), "k", "v"))
		refresh := goRefresh(t.Context(), c, source.Load)
		load = source.Next(t)
		cachetest.GoGet(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).Want(t, "v") // a load of the key runs
		synctest.Wait()
		load.Give("v")
		redistest.Must(t, <-refresh)
	})
}

// A call that misses during an audit ends the audit's context, and loads when its Loader has returned. After a
// Delete in this process the audit is superseded, and the call loads at once.
//
//fault:audit
func TestAudit_MissMeanwhile(t *testing.T) {
	for name, here := range map[string]bool{"deleted elsewhere": false, "deleted here": true} {
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			c := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[string]{Audit: 1})
			deletes := c
			if !here {
				deletes = cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[string]{})
			}
			source := cachetest.NewSource[string](t)
			redistest.Must(t, c.Set(t.Context(), "k", "v"))
			cachetest.GoGet(t.Context(), c, "k", source.Load).Want(t, "v")
			audit := source.Next(t)
			redistest.Must(t, deletes.Delete(t.Context(), "k"))
			miss := cachetest.GoGet(t.Context(), c, "k", source.Load)
			synctest.Wait()
			if audit.Ctx.Err() != context.Canceled {
				t.Errorf("the context of the audit says %v", audit.Ctx.Err())
			}
			want := map[bool]int64{true: 2, false: 1}[here]
			source.Want(t, want)
			audit.Give("v")
			source.Next(t).Give("new")
			miss.Want(t, "new")
		})
	}
}

// About the fraction of hits is audited that the options say, also of calls for many keys.
func TestAudit_Fraction(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Audit: 0.1})
		redistest.Must(t, c.Set(t.Context(), "k", "v"))
		for i := range 5_000 {
			var err error
			if i%2 == 0 {
				_, err = c.GetOrLoad(t.Context(), "k", cachetest.Gives("v"))
			} else {
				_, err = c.GetOrLoadMany(t.Context(), []string{"k"}, cachetest.GivesMany(map[string]string{"k": "v"}))
			}
			redistest.Must(t, err)
			synctest.Wait()
		}
		if n := c.Stats().Audits; n < 300 || n > 700 { // a deviation of 9 σ
			t.Errorf("%d of 5,000 hits were audited, want about 500", n)
		}
	})
}
