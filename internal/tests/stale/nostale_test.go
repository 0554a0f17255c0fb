package stale_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
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

var (
	errSuspended = errors.New("the user is suspended")
	errForbidden = fmt.Errorf("%w (%w)", errSuspended, singlefill.ErrNoStale)
)

// noStaleOptions returns options with which old values are served for an hour in place of an error.
func noStaleOptions() *singlefill.Options[string] {
	opts := cachetest.StaleOptions(0, time.Hour)
	opts.Errors = map[string]error{"suspended": errSuspended}
	return opts
}

// An error that is or wraps ErrNoStale is returned to all that wait, here unchanged, and the old value is gone in
// all processes: a later failure of another kind is not hidden by it either.
//
//fault:failed-load
func TestErrNoStale_IsSeenByAll(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		fleet := cachetest.NewCaches(t, m, "ns", 2, noStaleOptions())
		cachetest.SetStale(t, fleet[0], "k", "old", time.Second)
		src := cachetest.NewSource[string](t)
		first := cachetest.GoAsk(t.Context(), fleet[0], "k", src.Load)
		load := src.Next(t)
		second, there := cachetest.GoAsk(t.Context(), fleet[0], "k", src.Load), cachetest.GoAsk(t.Context(), fleet[1], "k", src.Load)
		time.Sleep(time.Second)
		load.Fail(errForbidden)
		for what, answer := range map[string]<-chan cachetest.Answer{"the first": first, "the second": second} {
			if a := cachetest.Receive(t, what, answer); a.Err != errForbidden || a.Value != "" || a.Info != (singlefill.ValueInfo{}) {
				t.Errorf("%s: got %+v, want the error itself", what, a)
			}
		}
		a := cachetest.Receive(t, "elsewhere", there)
		failure, ok := errors.AsType[*singlefill.RemoteError](a.Err)
		if !ok || failure.Message != errForbidden.Error() || !errors.Is(a.Err, singlefill.ErrNoStale) || !errors.Is(a.Err, errSuspended) {
			t.Errorf("elsewhere: got %+v, want the failure of the other process", a)
		}
		cachetest.WantStored(t, rdb, "ns", "k", "")
		cachetest.WantUnlocked(t, rdb, "ns", "k")
		for _, c := range fleet {
			if a := cachetest.Ask(t.Context(), c, "k", cachetest.Fails[string](cachetest.ErrSource)); a.Err != cachetest.ErrSource {
				t.Errorf("a later failure: got %+v, want it", a)
			}
			if s := c.Stats(); s.Stale != 0 {
				t.Errorf("%d stale values served", s.Stale)
			}
		}
	})
}

// After a refresh in the background has failed with ErrNoStale no call gets the old value, in any process.
//
//fault:failed-load
func TestErrNoStale_Refresh(t *testing.T) {
	t.Parallel()
	for kind, old := range cachetest.RefreshKinds {
		for _, where := range []string{"here", "elsewhere"} {
			t.Run(kind+", "+where, func(t *testing.T) {
				t.Parallel()
				cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
					r := beginRefresh(t, rdb, look, old("v0"))
					r.load.Fail(errForbidden)
					redistest.Await(t, "the old value is gone", func() bool {
						_, found := cachetest.Stored(t, look, r.ns+":{k}")
						return !found
					})
					cachetest.AwaitSeen(t, rdb, look, r.ns, "k")
					next := cachetest.GoGet(t.Context(), r.by(where), "k", r.src.Load) // RetryAfter is an hour
					r.src.Next(t).Give("v1")
					next.Want(t, "v1")
					redistest.Await(t, "a failed load", func() bool { return r.Stats().LoadErrors > 0 })
					if s := r.Stats(); s.LoadErrors != 1 || s.Refreshes != 1 || s.StoreErrors != 0 {
						t.Errorf("%+v, want one refresh, which failed", s)
					}
				})
			})
		}
	}
}

// The memory of this process and of others forgets the old value, as after a Delete: also if the source says, too,
// that there is none, and if the reply to the release is lost: the client sends it again, and Redis
// refuses the second one.
//
//fault:failed-load
//fault:lost-reply
func TestErrNoStale_Near(t *testing.T) {
	for name, failure := range map[string]error{
		"the error": errForbidden, "not found": errors.Join(singlefill.ErrNotFound, errForbidden), "lost reply": errForbidden,
	} {
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			opts := cachetest.StaleOptions(time.Hour, 0)
			opts.Near = &singlefill.Near{MaxLag: time.Second}
			there, here := cachetest.NewCaches(t, m, "ns", 1, opts)[0], cachetest.NewCacheIn(t, rdb, "ns", opts)
			cachetest.PutEntry(t, rdb, "ns", "k", cachetest.RefreshKinds["stale"]("old"), time.Hour)
			for _, c := range []*singlefill.Cache[string]{there, here} {
				for c.Stats().NearStale == 0 { // Get begins no refresh
					v, err := c.Get(t.Context(), "k")
					cachetest.WantValue(t, v, err, "old")
					time.Sleep(10 * time.Millisecond)
				}
			}
			rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
				if cmds[0].Name() == "xrange" { // here does not get the log
					return refusal("NOPERM no log")
				}
				return nil
			}))
			var lost atomic.Bool
			rdb.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
				err := next(ctx, cmd)
				if m.Exists("ns:{k}") || name != "lost reply" || !lost.CompareAndSwap(false, true) {
					return err
				}
				return next(ctx, cmd) // as the client does
			}))
			cachetest.GoGet(t.Context(), here, "k", cachetest.Fails[string](failure)).Want(t, "old")
			synctest.Wait() // until it has been refreshed
			if age := here.Stats().NearAge; age < 0 || age >= time.Second || name == "lost reply" && !lost.Load() {
				t.Fatalf("the age of memory is %v, and a reply was lost: %t", age, lost.Load())
			}
			if a := cachetest.Ask(t.Context(), here, "k", cachetest.Fails[string](errForbidden)); a.Err != errForbidden && a.Err != singlefill.ErrNotFound {
				t.Errorf("the next call here: %+v, want the error", a)
			}
			v := ""
			for range 20 { // its memory stays proven
				time.Sleep(100 * time.Millisecond)
				v, _ = there.Get(t.Context(), "k")
			}
			if v == "old" {
				t.Error("the old value is served elsewhere, after MaxLag")
			}
		})
	}
}

// If the old value cannot be removed, the callers get the error, and LoadDone why.
func TestErrNoStale_ReleaseUnanswered(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var info singlefill.LoadInfo
		opts := noStaleOptions()
		opts.Trace = &singlefill.Trace{LoadDone: func(_ context.Context, i singlefill.LoadInfo) { info = i }}
		c := cachetest.NewCaches(t, m, "ns", 1, opts)[0]
		cachetest.SetStale(t, c, "k", "old", time.Second)
		src := cachetest.NewSource[string](t)
		early := cachetest.GoAsk(t.Context(), c, "k", src.Load)
		load := src.Next(t)
		late := cachetest.GoAsk(t.Context(), c, "k", src.Load)
		synctest.Wait()
		m.SetError("LOADING Redis is loading the dataset in memory")
		load.Fail(errForbidden)
		for what, answer := range map[string]<-chan cachetest.Answer{"early": early, "late": late} {
			if a := cachetest.Receive(t, what, answer); a.Err != errForbidden {
				t.Errorf("%s: got %+v, want the error", what, a)
			}
		}
		time.Sleep(time.Minute) // the release is tried again, for RedisTimeout
		m.SetError("")
		if info.Err != errForbidden || info.StoreErr == nil {
			t.Errorf("LoadDone was called with %+v, want both errors", info)
		}
	})
}

// ErrNoStale counts for the keys that have it, and not in a panic, which says nothing about the source.
func TestErrNoStale_OnlyReturned(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCacheIn(t, rdb, "ns", noStaleOptions())
		for _, key := range []string{"k", "other"} {
			cachetest.PutEntry(t, rdb, "ns", key, entry.Entry{
				FreshUntil: time.Now().Add(-time.Second), WrittenAt: time.Now().Add(-time.Minute), Payload: []byte("old " + key),
			}, time.Hour)
		}
		a := cachetest.Ask(t.Context(), c, "k", func(context.Context, string) (string, error) { panic(errForbidden) })
		if a.Value != "old k" || a.Err != nil || !errors.Is(a.Info.Err, errForbidden) {
			t.Errorf("a panic: got %+v, want the old value", a)
		}
		time.Sleep(2 * time.Second) // RetryAfter
		got, err := c.GetOrLoadMany(t.Context(), []string{"k"}, func(context.Context, []string) (map[string]string, error) {
			panic(errForbidden)
		})
		if err != nil || got["k"] != "old k" {
			t.Errorf("a panic of a ManyLoader: got %q, %v; want the old value", got, err)
		}
		time.Sleep(2 * time.Second)
		failed := &singlefill.ManyError{Errs: map[string]error{"k": errForbidden, "other": cachetest.ErrSource}}
		got, err = c.GetOrLoadMany(t.Context(), []string{"k", "other"}, cachetest.FailsMany[string](failed))
		many, ok := errors.AsType[*singlefill.ManyError](err)
		if !ok || len(many.Errs) != 1 || many.Errs["k"] != errForbidden || len(got) != 1 || got["other"] != "old other" {
			t.Errorf("many: got %q, %v; want the old value and the error", got, err)
		}
		cachetest.WantStored(t, rdb, "ns", "k", "")
		cachetest.WantStored(t, rdb, "ns", "other", "old other")
	})
}

// What has been stored while the load ran is not removed.
func TestErrNoStale_SetDuringTheLoad(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		fleet := cachetest.NewCaches(t, m, "ns", 2, noStaleOptions())
		cachetest.SetStale(t, fleet[0], "k", "old", time.Second)
		src := cachetest.NewSource[string](t)
		call := cachetest.GoAsk(t.Context(), fleet[0], "k", src.Load)
		load := src.Next(t)
		redistest.Must(t, fleet[1].Set(t.Context(), "k", "set"))
		load.Fail(errForbidden)
		if a := cachetest.Receive(t, "the call", call); a.Err != errForbidden {
			t.Errorf("got %+v, want the error", a)
		}
		cachetest.WantStored(t, rdb, "ns", "k", "set")
	})
}
