// Package pitfalls_test shows what docs/pitfalls.md says: that the wrong way goes wrong, and that the
// right one does not.
package pitfalls_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
	"github.com/singlefill/singlefill/lock"
)

func TestMain(m *testing.M) { redistest.Main(m) }

func client(t testing.TB) *redis.Client { return redistest.Shared(t).Client(t) }

// A Loader that uses the context of one request fails for all callers when that request ends.
func TestLoader_RequestsContext(t *testing.T) {
	t.Parallel()
	for _, wrong := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			_, rdb := redistest.StartMini(t)
			c := cachetest.NewCacheIn[string](t, rdb, "ns", nil)
			request, hangUp := context.WithCancel(t.Context())
			hungUp := make(chan struct{})
			load := func(ctx context.Context, _ string) (string, error) {
				<-hungUp
				if wrong {
					ctx = request
				}
				return "v", ctx.Err() // as a query does
			}
			first, second := cachetest.GoGet(request, c, "k", load), cachetest.GoGet(t.Context(), c, "k", load)
			synctest.Wait()
			hangUp()
			first.WantErr(t, context.Canceled)
			close(hungUp)
			if _, err := second.Result(t); errors.Is(err, context.Canceled) != wrong || !wrong && err != nil {
				t.Errorf("with the request's context %t: the other caller got %v", wrong, err)
			}
			if s := c.Stats(); s.Loads != 1 {
				t.Errorf("%d loads, want one that both callers share", s.Loads)
			}
		})
	}
}

// A Loader that passes on ErrNotFound of another cache says that the key of this cache does not exist. A ManyLoader
// that passes on a ManyError of another cache, whose keys by chance equal keys of this cache, says that these keys have
// failed, and that the keys that its map lacks do not exist.
func TestLoader_AsksAnotherCache(t *testing.T) {
	t.Parallel()
	rdb := client(t)
	orgs := cachetest.NewCacheIn[string](t, rdb, redistest.Namespace(t), nil)
	for _, wrong := range []bool{true, false} {
		users := cachetest.NewCacheIn[string](t, rdb, redistest.Namespace(t), nil)
		_, err := users.GetOrLoad(t.Context(), "ann", func(ctx context.Context, _ string) (string, error) {
			org, err := orgs.GetOrLoad(ctx, "acme", cachetest.Fails[string](singlefill.ErrNotFound))
			if errors.Is(err, singlefill.ErrNotFound) && !wrong {
				return "", errors.New("user ann has an organisation that does not exist")
			}
			return org, err
		})
		remembered := singlefill.ErrMiss
		if wrong {
			remembered = singlefill.ErrNotFound
		}
		if err == nil || errors.Is(err, singlefill.ErrNotFound) != wrong {
			t.Errorf("passed on %t: GetOrLoad returned %v", wrong, err)
		}
		cachetest.WantGet(t, users, "ann", "", remembered)

		found, err := users.GetOrLoadMany(t.Context(), []string{"1", "2"}, func(ctx context.Context, ids []string) (map[string]string, error) {
			found := make(map[string]string)
			_, err := orgs.GetOrLoadMany(ctx, []string{"1"}, cachetest.FailsMany[string](cachetest.ErrSource))
			if err != nil && !wrong {
				return nil, fmt.Errorf("organisations of users: %w", err)
			}
			return found, err
		})
		many, ok := errors.AsType[*singlefill.ManyError](err)
		if !ok || len(found) != 0 || len(many.Errs) == 2 == wrong || !errors.Is(err, cachetest.ErrSource) {
			t.Errorf("passed on %t: GetOrLoadMany returned %v, %v", wrong, found, err)
		}
		cachetest.WantGet(t, users, "2", "", remembered)
	}
}

// A map in an interface whose keys are no strings cannot be read back, and is loaded at each call.
func TestMapKeys(t *testing.T) {
	t.Parallel()
	c := cachetest.NewCacheIn[map[string]any](t, client(t), redistest.Namespace(t), nil)
	for range 3 {
		_, err := c.GetOrLoad(t.Context(), "k", cachetest.Gives(map[string]any{"names": map[int]string{1: "a"}}))
		redistest.Must(t, err)
	}
	if s := c.Stats(); s.Loads != 3 || s.BadValues != 2 {
		t.Errorf("%d loads and %d bad values, want 3 and 2", s.Loads, s.BadValues)
	}
}

// MsgPack does not know the tags of encoding/json.
func TestCodec_JSONTags(t *testing.T) {
	t.Parallel()
	type user struct {
		Name     string
		Password string `json:"-"`
	}
	rdb := client(t)
	for _, codec := range []singlefill.Codec{singlefill.MsgPack, singlefill.JSON} {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[user]{Codec: codec})
		redistest.Must(t, c.Set(t.Context(), "k", user{"ann", "hunter2"}))
		stored, _ := cachetest.Stored(t, rdb, ns+":{k}")
		if has := strings.Contains(stored, "hunter2"); has != (codec == singlefill.MsgPack) {
			t.Errorf("%T: Redis has the password: %t", codec, has)
		}
	}
}

// Each process of a fleet begins a job once a night. A lock that is released runs it again when a
// process is a minute late. GetOrLoad with the night as the key runs it once.
func TestNightlyJob(t *testing.T) {
	t.Parallel()
	const fleet = 5
	ns := redistest.Namespace(t)
	locked, loaded := 0, 0
	for range fleet { // one after the other, since clocks differ
		l, err := lock.NewMutex(client(t), ns, nil)
		redistest.Must(t, err)
		redistest.Must(t, l.Do(t.Context(), func(context.Context) error { locked++; return nil }))
		jobs := cachetest.NewCacheIn[string](t, client(t), ns, nil)
		_, err = jobs.GetOrLoad(t.Context(), "report/2026-11-23", func(context.Context, string) (string, error) {
			loaded++
			return "report", nil
		})
		redistest.Must(t, err)
	}
	if locked != fleet || loaded != 1 {
		t.Errorf("%d runs with a lock and %d with GetOrLoad, want one in each process, and one", locked, loaded)
	}
}

// A key is changed while the cache is warmed up. SetMany brings the old value back after the Delete.
// GetOrLoadMany does not store it.
func TestWarmUp_SetMany(t *testing.T) {
	t.Parallel()
	for _, wrong := range []bool{true, false} {
		c := cachetest.NewCacheIn[string](t, client(t), redistest.Namespace(t), nil)
		source := map[string]string{"a": "old", "b": "old"}
		read := func(context.Context, []string) (map[string]string, error) {
			all := maps.Clone(source)
			source["a"] = "new" // by another program, which deletes it
			return all, c.Delete(t.Context(), "a")
		}
		if wrong {
			all, err := read(t.Context(), nil)
			redistest.Must(t, err)
			redistest.Must(t, c.SetMany(t.Context(), all))
		} else {
			_, err := c.GetOrLoadMany(t.Context(), []string{"a", "b"}, read)
			redistest.Must(t, err)
		}
		for key, want := range map[string]bool{"a": wrong, "b": true} {
			v, err := c.GetOrLoad(t.Context(), key, cachetest.Gives("new"))
			redistest.Must(t, err)
			if (v == "old") != want {
				t.Errorf("by SetMany %t: %s is %s", wrong, key, v)
			}
		}
	}
}

// A hundred requests use a token that has been revoked, and learn of it one after the other. If each of them
// deletes it, each Delete supersedes the load that the request before has begun. If each deletes only the value
// that it has seen, there is one load.
func TestDelete_ByEachCallerThatSawABadValue(t *testing.T) {
	t.Parallel()
	const requests = 100
	for _, wrong := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			_, rdb := redistest.StartMini(t)
			tokens := cachetest.NewCacheIn[string](t, rdb, "ns", nil)
			load := cachetest.Takes(50*time.Millisecond, "good", nil)
			redistest.Must(t, tokens.Set(t.Context(), "id", "revoked"))
			var all sync.WaitGroup
			for i := range requests {
				all.Go(func() {
					_, info, err := tokens.GetOrLoadInfo(t.Context(), "id", load)
					time.Sleep(time.Duration(i+1) * time.Millisecond) // until it is refused
					var deleteErr error
					if wrong {
						deleteErr = tokens.Delete(t.Context(), "id")
					} else {
						_, deleteErr = tokens.DeleteIf(t.Context(), "id", info)
					}
					token, err2 := tokens.GetOrLoad(t.Context(), "id", load)
					if err := errors.Join(err, deleteErr, err2); token != "good" || err != nil {
						t.Errorf("%q, %v; want the good token", token, err)
					}
				})
			}
			all.Wait()
			if n := tokens.Stats().Loads; wrong && n < 24 || !wrong && n != 1 {
				t.Errorf("if each one deletes %t: %d loads", wrong, n)
			}
		})
	}
}

// A process dies while it loads a value. A request whose deadline is below LockTTL, the default, fails, as all do until
// the lock of the dead process has ended. With a LockTTL of half of its deadline it takes the lock over, and loads.
func TestLockTTL_BelowDeadline(t *testing.T) {
	t.Parallel()
	for _, wrong := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			m, rdb := redistest.StartMini(t)
			opts := &singlefill.Options[string]{RedisTimeout: 200 * time.Millisecond, LockTTL: time.Second}
			if wrong {
				opts.LockTTL = 0
			}
			newCache := func(rdb *redis.Client) *singlefill.Cache[string] {
				c, err := singlefill.New(rdb, "ns", time.Hour, opts)
				redistest.Must(t, err)
				return c
			}
			mortal := redistest.NewMiniClient(t, m)
			dies, lives := newCache(mortal), newCache(rdb)
			src := cachetest.NewSource[string](t)
			call, load := src.Begin(t.Context(), t, dies, "k")
			mortal.AddHook(redistest.Trips(func([]redis.Cmder) error { return redis.ErrClosed })) // dead
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			v, err := lives.GetOrLoad(ctx, "k", cachetest.Gives("v"))
			if wrong && err != context.DeadlineExceeded || !wrong && (v != "v" || err != nil) {
				t.Errorf("below LockTTL %t: %q, %v", wrong, v, err)
			}
			load.Give("late")
			call.Want(t, "late")
			redistest.Must(t, errors.Join(dies.Close(), lives.Close()))
		})
	}
}

// StaleIfError and StaleWhileRevalidate serve a value after its end, also one whose end is a fact: a token that has
// ended is returned without an error. A copy of the options that turns both off returns the error of the source.
func TestTTLFunc_StaleWindows(t *testing.T) {
	t.Parallel()
	type token struct{ Expires time.Time }
	shared := &singlefill.Options[any]{StaleIfError: time.Hour, StaleWhileRevalidate: time.Minute}
	for _, wrong := range []bool{true, false} {
		for _, late := range []time.Duration{time.Second, 10 * time.Minute} {
			synctest.Test(t, func(t *testing.T) {
				_, rdb := redistest.StartMini(t)
				opts := singlefill.OptionsFor[token](shared)
				if !wrong {
					opts.StaleWhileRevalidate, opts.StaleIfError = 0, 0
				}
				opts.TTLFunc = func(_ string, v token) time.Duration { return time.Until(v.Expires) }
				tokens := cachetest.NewCacheIn(t, rdb, "ns", opts)
				redistest.Must(t, tokens.Set(t.Context(), "id", token{time.Now().Add(time.Minute)}))
				time.Sleep(time.Minute + late)
				down := errors.New("down")
				v, err := tokens.GetOrLoad(t.Context(), "id", cachetest.Fails[token](down))
				if ended := err == nil && time.Now().After(v.Expires); ended != wrong || !wrong && err != down {
					t.Errorf("%v after its end, with both windows %t: %v, %v", late, wrong, v, err)
				}
			})
		}
	}
}
