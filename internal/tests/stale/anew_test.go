package stale_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

// numbered is a Loader whose n-th load takes a second and returns "new n".
type numbered struct{ cachetest.Count }

func (s *numbered) load(context.Context, string) (string, error) {
	n := s.Loads.Add(1)
	time.Sleep(time.Second)
	return fmt.Sprint("new ", n), nil
}

// goRefresh calls Refresh in the background.
func goRefresh(ctx context.Context, c *singlefill.Cache[string], load singlefill.Loader[string]) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- c.Refresh(ctx, "k", load) }()
	return ended
}

// Refresh and RefreshMany replace fresh values, whatever the client reads.
func TestRefresh_ReplacesFreshValues(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, cachetest.StaleOptions(0, 0))
		for i := range 5 { // the client's own cache is late at times
			v := fmt.Sprint("v", i)
			redistest.Must(t, c.Refresh(t.Context(), "k", cachetest.Gives(v)))
			cachetest.WantStored(t, look, ns, "k", v)
			load := func(_ context.Context, key string) (string, error) { return v + " of " + key, nil }
			redistest.Must(t, c.RefreshMany(t.Context(), []string{"k", "l", "m"}, cachetest.OneByOne(load)))
			for _, key := range []string{"k", "l", "m"} {
				cachetest.WantStored(t, look, ns, key, v+" of "+key)
			}
		}
		cachetest.WantGet(t, c, "k", "v4 of k", nil)
		cachetest.WantUnlocked(t, look, ns, "k")
	})
}

// Calls of Refresh at the same time share one load in the fleet. During the load readers get the old value at once. A
// later call loads again.
func TestRefresh_OneLoadInTheFleet(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := cachetest.StaleOptions(0, 0)
		opts.StaleAfter = 100 * time.Millisecond
		opts.StaleIfError = time.Hour
		fleet := cachetest.NewCaches(t, m, "ns", 3, opts)
		var src numbered
		redistest.Must(t, fleet[0].Set(t.Context(), "k", "old"))
		var calls []<-chan error
		for i := range 9 {
			calls = append(calls, goRefresh(t.Context(), fleet[i%3], src.load))
			time.Sleep(50 * time.Millisecond)
			begun := time.Now()
			cachetest.GoGet(t.Context(), fleet[(i+1)%3], "k", cachetest.MustNotLoad[string](t)).Want(t, "old")
			cachetest.WantElapsed(t, "the old value", begun, 0)
		}
		for _, ended := range calls {
			redistest.Must(t, <-ended)
		}
		src.WantLoads(t, "nine calls", 1)
		for _, c := range fleet {
			cachetest.GoGet(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).Want(t, "new 1")
		}
		for i, c := range fleet {
			redistest.Must(t, <-goRefresh(t.Context(), c, src.load))
			src.WantLoads(t, "calls one after the other", int64(i+2))
		}
	})
}

// A load of GetOrLoad that is in flight counts, here and in another process.
func TestRefresh_LoadInFlight(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		fleet := cachetest.NewCaches(t, m, "ns", 2, cachetest.StaleOptions(0, 0))
		var src numbered
		first := cachetest.GoGet(t.Context(), fleet[0], "k", src.load)
		time.Sleep(500 * time.Millisecond)
		here, there := goRefresh(t.Context(), fleet[0], src.load), goRefresh(t.Context(), fleet[1], src.load)
		redistest.Must(t, <-here)
		redistest.Must(t, <-there)
		first.Want(t, "new 1")
		src.WantLoads(t, "all", 1)
	})
}

// A value that was there before the call does not pass for a new one: a replica returns an entry that has been
// replaced, and a fill that the call joins finds the value that ended a wait before.
func TestRefresh_ValueFromBefore(t *testing.T) {
	cachetest.RunInBubble(t, "late read", func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCacheIn(t, rdb, "ns", cachetest.StaleOptions(0, 0))
		redistest.Must(t, c.Set(t.Context(), "k", "older"))
		older, _ := cachetest.Stored(t, rdb, "ns:{k}")
		redistest.Must(t, c.Set(t.Context(), "k", "old"))
		rdb.AddHook(cachetest.After(func(cmd redis.Cmder) error {
			if get, ok := cmd.(*redis.StringCmd); ok && cmd.Name() == "get" {
				get.SetVal(older)
			}
			return nil
		}))
		redistest.Must(t, c.Refresh(t.Context(), "k", cachetest.Gives("new")))
		cachetest.WantStored(t, rdb, "ns", "k", "new")
	})
	cachetest.RunInBubble(t, "late poll", func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		fleet := cachetest.NewCaches(t, m, "ns", 2, cachetest.StaleOptions(0, 0))
		var src numbered
		holder := cachetest.GoGet(t.Context(), fleet[0], "k", src.load)
		time.Sleep(100 * time.Millisecond)
		waiter := cachetest.GoGet(t.Context(), fleet[1], "k", src.load)
		synctest.Wait()
		redistest.Must(t, rdb.Del(t.Context(), "ns:{k}:lock").Err()) // whose holder does not store, and wakes no waiter
		now := time.Now()
		cachetest.PutEntry(t, rdb, "ns", "k", entry.Entry{WrittenAt: now, FreshUntil: now.Add(time.Hour), Payload: []byte("stored elsewhere")}, time.Hour)
		refresh := goRefresh(t.Context(), fleet[1], src.load)
		waiter.Want(t, "stored elsewhere")
		redistest.Must(t, <-refresh)
		if v, _ := holder.Result(t); v != "new 1" {
			t.Errorf("the holder's caller got %q", v)
		}
		cachetest.WantStored(t, rdb, "ns", "k", "new 2")
	})
}

// The failure of the load is the caller's, and the old value stays. Until RetryAfter is over the source is left alone.
//
//fault:failed-load
func TestRefresh_Failures(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		fleet := cachetest.NewCaches(t, m, "ns", 2, cachetest.StaleOptions(0, time.Hour))
		redistest.Must(t, fleet[0].Set(t.Context(), "k", "old"))
		here := goRefresh(t.Context(), fleet[0], cachetest.Takes(time.Second, "", cachetest.ErrSource))
		synctest.Wait()
		there := goRefresh(t.Context(), fleet[1], cachetest.MustNotLoad[string](t))
		if err := <-here; err != cachetest.ErrSource {
			t.Errorf("got %v, want the error itself", err)
		}
		remote, resting := <-there, fleet[0].Refresh(t.Context(), "k", cachetest.MustNotLoad[string](t))
		for what, err := range map[string]error{"that waited elsewhere": remote, "within RetryAfter": resting} {
			if r, ok := errors.AsType[*singlefill.RemoteError](err); !ok || r.Message != cachetest.ErrSource.Error() {
				t.Errorf("the call %s got %v, want the failure", what, err)
			}
		}
		cachetest.GoGet(t.Context(), fleet[1], "k", cachetest.MustNotLoad[string](t)).Want(t, "old")
		time.Sleep(time.Second)

		err := fleet[0].Refresh(t.Context(), "k", func(context.Context, string) (string, error) { panic("boom") })
		if _, ok := errors.AsType[*singlefill.PanicError](err); !ok {
			t.Errorf("got %v, want the panic", err)
		}
		cachetest.WantStored(t, rdb, "ns", "k", "old")
		time.Sleep(time.Second)
		redistest.Must(t, fleet[0].Refresh(t.Context(), "k", cachetest.Fails[string](singlefill.ErrNotFound)))
		// ErrNotFound is remembered.
		cachetest.GoGet(t.Context(), fleet[1], "k", cachetest.MustNotLoad[string](t)).WantErr(t, singlefill.ErrNotFound)
		redistest.Must(t, fleet[0].Set(t.Context(), "k", "old"))
		revoked := errors.Join(cachetest.ErrSource, singlefill.ErrNoStale)
		if err := fleet[0].Refresh(t.Context(), "k", cachetest.Fails[string](revoked)); err != revoked {
			t.Errorf("got %v, want the error itself", err)
		}
		cachetest.WantStored(t, rdb, "ns", "k", "")
	})
}

// What is invalidated during the load is loaded again. A value that Expire has made stale is not a new one.
func TestRefresh_Superseded(t *testing.T) {
	for _, how := range []string{"Delete", "Expire"} {
		for _, by := range []string{"here", "there"} {
			cachetest.RunInBubble(t, how+" "+by, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				fleet := cachetest.NewCaches(t, m, "ns", 3, cachetest.StaleOptions(time.Hour, 0))
				var src numbered
				redistest.Must(t, fleet[0].Set(t.Context(), "k", "old"))
				loads := goRefresh(t.Context(), fleet[0], src.load)
				synctest.Wait()
				waits := goRefresh(t.Context(), fleet[1], src.load)
				time.Sleep(500 * time.Millisecond)
				redistest.Must(t, superseding[how].do(t.Context(), map[string]*singlefill.Cache[string]{"here": fleet[0], "there": fleet[2]}[by]))
				redistest.Must(t, <-waits)
				cachetest.WantStored(t, rdb, "ns", "k", "new 2")
				redistest.Must(t, <-loads)
				src.WantLoads(t, "both calls", 2)
			})
		}
	}
}

// Without Redis a call returns an error and loads nothing. If Redis goes away during the load, the caller learns
// that the value may not have been stored. A caller that needs a value gets one all the same.
//
//fault:unreachable
func TestRefresh_RedisAway(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var out cachetest.Outage
		answersGets := cachetest.Outage{Keeps: func(cmd []string) bool { return cmd[0] != "get" }}
		rdb.AddHook(out.Hook())
		rdb.AddHook(answersGets.Hook())
		c := cachetest.NewCacheIn(t, rdb, "ns", cachetest.StaleOptions(0, 0))
		wantErr := func(what string, err error) {
			t.Helper()
			if err == nil || !strings.HasPrefix(err.Error(), "singlefill: refresh: ") {
				t.Errorf("%s: got %v, want an error of Redis", what, err)
			}
		}
		redistest.Must(t, c.Set(t.Context(), "k", "old"))
		during := goRefresh(t.Context(), c, cachetest.Takes(time.Second, "new", nil))
		synctest.Wait()
		out.On.Store(true)
		wantErr("during the load", <-during)
		wantErr("before the load", c.Refresh(t.Context(), "k", cachetest.MustNotLoad[string](t)))
		err := c.RefreshMany(t.Context(), []string{"k", "l"}, func(context.Context, []string) (map[string]string, error) {
			t.Error("the ManyLoader is called")
			return nil, nil
		})
		many, _ := errors.AsType[*singlefill.ManyError](err)
		wantErr("k of many", many.Errs["k"])
		wantErr("l of many", many.Errs["l"])
		out.On.Store(false)
		redistest.Await(t, "Redis is back", func() bool {
			time.Sleep(time.Second)
			return c.Refresh(t.Context(), "k", cachetest.Gives("new")) == nil
		})

		// The GET is answered, and the command that asks for the lock is not.
		redistest.Must(t, c.Delete(t.Context(), "k"))
		answersGets.On.Store(true)
		refresh := goRefresh(t.Context(), c, cachetest.MustNotLoad[string](t))
		synctest.Wait()
		get := cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")) // joins its fill
		wantErr("before the lock", <-refresh)
		get.Want(t, "v")
		answersGets.On.Store(false)
	})
}

// A value that cannot be stored is an error. A value whose life is 0 is no error, and removes the old value.
func TestRefresh_NotStored(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCacheIn(t, rdb, "ns", refreshOptions())
		redistest.Must(t, c.Set(t.Context(), "k", "old"))
		rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			for _, arg := range cmd.Args() {
				if data, ok := arg.([]byte); ok && strings.HasSuffix(string(data), "too large") {
					return refusal("ERR too large")
				}
			}
			return nil
		}))
		if err := c.Refresh(t.Context(), "k", cachetest.Gives("too large")); err == nil || !strings.Contains(err.Error(), "ERR too large") {
			t.Errorf("got %v, want the refusal", err)
		}
		cachetest.WantStored(t, rdb, "ns", "k", "old")
		redistest.Must(t, c.Delete(t.Context(), "k"))
		redistest.Must(t, c.Set(t.Context(), "k", "old"))
		redistest.Must(t, c.Refresh(t.Context(), "k", cachetest.Gives(notToBeKept)))
		cachetest.WantStored(t, rdb, "ns", "k", "")
	})
}
