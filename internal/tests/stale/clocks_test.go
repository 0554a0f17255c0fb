package stale_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// The clock of a process appears nowhere but in the times of the entries that it writes, and in how it
// reads the times of others. So an entry with times that are ahead has a writer whose clock is ahead, or a
// reader whose clock is behind.

const clockSkew = time.Minute

// A wrong clock shifts life and windows by its error, but Redis ends the entry at its own time.
//
//fault:process-clock
func TestClocks_Freshness(t *testing.T) {
	const life, swr, sie, step = 10 * time.Minute, 3 * time.Minute, 5 * time.Minute, 5 * time.Second
	for _, ahead := range []time.Duration{clockSkew, 0, -clockSkew} {
		name := fmt.Sprintf("ahead by %v", ahead)
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			ns, opts := redistest.Namespace(t), cachetest.StaleOptions(swr, sie)
			opts.RetryAfter = time.Millisecond
			c := cachetest.NewCacheIn(t, rdb, ns, opts)
			begun := time.Now()
			cachetest.PutEntry(t, rdb, ns, "k", entry.Entry{
				WrittenAt: begun.Add(ahead), FreshUntil: begun.Add(ahead + life), Payload: []byte("v"),
			}, life+sie)
			fresh, served, got := time.Duration(0), time.Duration(0), time.Duration(0) // until when
			for ; time.Since(begun) < life+sie+3*time.Minute; time.Sleep(step) {
				at := time.Since(begun)
				if _, err := c.Get(t.Context(), "k"); err == nil {
					got = at
				}
				v, info, err := c.GetOrLoadInfo(t.Context(), "k", cachetest.Fails[string](cachetest.ErrSource))
				switch {
				case err == nil && v == "v":
					served = at
					if !info.Stale {
						fresh = at
					}
				case err != cachetest.ErrSource:
					t.Fatalf("after %v: %v", at, err)
				}
				if info.Age < 0 {
					t.Errorf("the age is %v", info.Age)
				}
			}
			for what, until := range map[string][2]time.Duration{
				"fresh":           {fresh, life + ahead},
				"found by Get":    {got, life + swr + ahead},
				"served at worst": {served, life + sie + min(0, ahead)},
			} {
				if until[0] != until[1]-step {
					t.Errorf("%s until %v, want until %v", what, until[0]+step, until[1])
				}
			}
		})
	}
}

// Memory serves nothing that Redis has ended, however the reader's clock and windows differ from the
// writer's, and whichever command has found the entry.
//
//fault:process-clock
func TestClocks_Near(t *testing.T) {
	const life, step = 3 * time.Second, 250 * time.Millisecond
	for name, reader := range map[string]struct{ behind, window time.Duration }{
		"a clock behind": {20 * time.Second, 0}, "a longer window": {0, time.Hour},
	} {
		for _, way := range []string{"read", "waited for"} {
			cachetest.RunInBubble(t, name+", "+way, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns, opts := redistest.Namespace(t), cachetest.StaleOptions(reader.window, 0)
				opts.Near = &singlefill.Near{}
				c := cachetest.NewCacheIn(t, rdb, ns, opts)
				cachetest.Ask(t.Context(), c, "other", cachetest.Gives("v")) // memory is used from now on
				synctest.Wait()
				other := redistest.NewMiniClient(t, m)
				var begun time.Time
				put := func() {
					begun = time.Now()
					written := begun.Add(reader.behind)
					cachetest.PutEntry(t, other, ns, "k", entry.Entry{WrittenAt: written, FreshUntil: written.Add(life), Payload: []byte("v")}, life)
				}
				if way == "read" {
					put()
				}
				reads := 0
				rdb.AddHook(redistest.Pipelines(func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error {
					err := next(ctx, cmds)
					if cmds[len(cmds)-1].Name() == "get" {
						if reads++; reads == 1 && way == "waited for" {
							put()
						}
					}
					return err
				}))
				served := time.Duration(0)
				for at := time.Duration(0); at < 30*time.Second; at = time.Since(begun) {
					v, err := c.GetOrLoad(t.Context(), "k", cachetest.Fails[string](cachetest.ErrSource))
					if v == "v" {
						served = at
					} else if err == nil {
						t.Fatalf("%q after %v", v, at)
					}
					time.Sleep(step)
				}
				if reads == 0 || served != life-step || c.Stats().NearHits < 5 {
					t.Errorf("served until %v, want %v; %d times from memory", served+step, life, c.Stats().NearHits)
				}
			})
		}
	}
}

// Expire is seen at once, whatever the clocks of the writer and of the process that calls it.
//
//fault:process-clock
func TestClocks_Expire(t *testing.T) {
	for what, opts := range map[string]*singlefill.Options[string]{
		"no windows": cachetest.StaleOptions(0, 0), "refreshed": cachetest.StaleOptions(5*time.Minute, 0),
		"kept for errors": cachetest.StaleOptions(0, 5*time.Minute),
	} {
		for _, writer := range []time.Duration{clockSkew, -clockSkew} {
			for _, expirer := range []time.Duration{clockSkew, 0, -clockSkew} {
				name := fmt.Sprintf("%s, written %v ahead, expired %v ahead", what, writer, expirer)
				cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
					c := cachetest.NewCacheIn(t, rdb, "ns", opts)
					written := time.Now().Add(writer)
					e := entry.Entry{WrittenAt: written, FreshUntil: written.Add(time.Hour), Payload: []byte("old")}
					if expirer != 0 {
						e.Expired, e.FreshUntil = true, time.Now().Add(expirer)
					}
					cachetest.PutEntry(t, rdb, "ns", "k", e, time.Hour)
					if expirer == 0 {
						redistest.Must(t, c.Expire(t.Context(), "k"))
					}
					v, info, err := c.GetOrLoadInfo(t.Context(), "k", cachetest.Gives("new"))
					want := "new"
					if what == "refreshed" {
						want = "old"
					}
					if v != want || err != nil || info.Stale != (want == "old") {
						t.Errorf("%q, %+v, %v; want the %s value", v, info, err, want)
					}
					synctest.Wait()
					cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("newer")).Want(t, "new")
				})
			}
		}
	}
}

// The server's clock may be off: lives end in time, and RetryAfter goes by that clock.
//
//fault:server-clock
func TestClocks_RetryAfter(t *testing.T) {
	const retryAfter = 10 * time.Second // less than LockTTL
	for _, kind := range windowKinds {
		for _, off := range []time.Duration{time.Hour, -time.Hour} {
			name := fmt.Sprintf("%s, off by %v", kind.name, off)
			cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns, opts := redistest.Namespace(t), kind.opts()
				opts.RetryAfter = retryAfter
				fleet := cachetest.NewCaches(t, m, ns, 2, opts)
				m.SetTime(time.Now().Add(off))
				stale := entry.Entry{FreshUntil: time.Now(), Payload: []byte("old")}
				cachetest.PutEntry(t, rdb, ns, "k", stale, time.Minute)
				var loads []time.Duration
				begun := time.Now()
				load := func(context.Context, string) (string, error) {
					loads = append(loads, time.Since(begun))
					return "", cachetest.ErrSource
				}
				for ; time.Since(begun) < 2*retryAfter; time.Sleep(time.Second) {
					m.SetTime(time.Now().Add(off))
					for _, c := range fleet {
						cachetest.GoGet(t.Context(), c, "k", load).Want(t, "old")
						synctest.Wait()
					}
				}
				// Another process asks again each second, and may have done so just before.
				if len(loads) != 2 || loads[0] != 0 || loads[1] < retryAfter || loads[1] > retryAfter+2*time.Second {
					t.Errorf("the source is asked at %v, want now and after %v", loads, retryAfter)
				}
				redistest.Must(t, fleet[0].Set(t.Context(), "k", "new"))
				if life := m.TTL(ns + ":{k}"); life != cachetest.StaleLife+time.Minute {
					t.Errorf("a value lives for %v", life)
				}
			})
		}
	}
}
