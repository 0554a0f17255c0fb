// Package pitfalls_test shows what docs/pitfalls.md says: that the wrong way goes wrong, and that the
// right one does not.
package pitfalls_test

import (
	"context"
	"errors"
	"maps"
	"slices"
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
			first, second := make(chan error, 1), make(chan error, 1)
			get := func(ctx context.Context, result chan<- error) {
				_, err := c.GetOrLoad(ctx, "k", load)
				result <- err
			}
			go get(request, first)
			go get(t.Context(), second)
			synctest.Wait()
			hangUp()
			if err := <-first; !errors.Is(err, context.Canceled) {
				t.Errorf("the caller that hung up got %v", err)
			}
			close(hungUp)
			if err := <-second; errors.Is(err, context.Canceled) != wrong || !wrong && err != nil {
				t.Errorf("with the request's context %t: the other caller got %v", wrong, err)
			}
			if s := c.Stats(); s.Loads != 1 {
				t.Errorf("%d loads, want one that both callers share", s.Loads)
			}
		})
	}
}

// A nil pointer without an error is a value, and is cached like one.
func TestLoader_NilNil(t *testing.T) {
	t.Parallel()
	type user struct{ Name string }
	c := cachetest.NewCacheIn[*user](t, client(t), redistest.Namespace(t), nil)
	wrong := func(context.Context, string) (*user, error) { return nil, nil }
	right := func(context.Context, string) (*user, error) { return nil, singlefill.ErrNotFound }
	for range 2 {
		if u, err := c.GetOrLoad(t.Context(), "wrong", wrong); u != nil || err != nil {
			t.Errorf("%v, %v", u, err)
		}
		if _, err := c.GetOrLoad(t.Context(), "right", right); !errors.Is(err, singlefill.ErrNotFound) {
			t.Errorf("err = %v, want ErrNotFound", err)
		}
	}
	if s := c.Stats(); s.Loads != 2 {
		t.Errorf("%d loads, want that of each key: both are cached", s.Loads)
	}
}

// Keys of maps that the codec brings back as something else.
func TestMapKeys(t *testing.T) {
	t.Parallel()
	t.Run("in an interface", func(t *testing.T) {
		t.Parallel()
		c := cachetest.NewCacheIn[map[string]any](t, client(t), redistest.Namespace(t), nil)
		for range 3 {
			_, err := c.GetOrLoad(t.Context(), "k", func(context.Context, string) (map[string]any, error) {
				return map[string]any{"names": map[int]string{1: "a"}}, nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		if s := c.Stats(); s.Loads != 3 || s.BadValues != 2 {
			t.Errorf("%d loads and %d bad values, want 3 and 2: the map cannot be read back", s.Loads, s.BadValues)
		}
	})
	t.Run("in a type", func(t *testing.T) {
		t.Parallel()
		type names struct{ Names map[int]string }
		c := cachetest.NewCacheIn[names](t, client(t), redistest.Namespace(t), nil)
		for range 3 {
			v, err := c.GetOrLoad(t.Context(), "k", func(context.Context, string) (names, error) {
				return names{map[int]string{1: "a"}}, nil
			})
			if err != nil || v.Names[1] != "a" {
				t.Fatal(v, err)
			}
		}
		if s := c.Stats(); s.Loads != 1 {
			t.Errorf("%d loads", s.Loads)
		}
	})
	t.Run("times", func(t *testing.T) {
		t.Parallel()
		noon := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
		c := cachetest.NewCacheIn[map[time.Time]int](t, client(t), redistest.Namespace(t), nil)
		if err := c.Set(t.Context(), "k", map[time.Time]int{noon: 1}); err != nil {
			t.Fatal(err)
		}
		v, err := c.Get(t.Context(), "k")
		if _, found := v[noon]; found || len(v) != 1 || err != nil {
			t.Errorf("%v, %v: noon in UTC was found, but the codec returns local times", v, err)
		}
		for at := range v {
			if !at.Equal(noon) {
				t.Errorf("%v, want another form of %v", at, noon)
			}
		}
	})
}

// With Share all callers have the same value.
func TestNear_Share(t *testing.T) {
	t.Parallel()
	for _, share := range []bool{true, false} {
		c := cachetest.NewCacheIn(t, client(t), redistest.Namespace(t), &singlefill.Options[[]string]{Near: &singlefill.Near{Share: share}})
		get := func() []string {
			v, err := c.GetOrLoad(t.Context(), "k", func(context.Context, string) ([]string, error) { return []string{"b", "a"}, nil })
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		redistest.Await(t, "a hit in memory", func() bool { get(); return c.Stats().NearHits > 0 })
		slices.Sort(get())
		if changed := get()[0] == "a"; changed != share {
			t.Errorf("Share %t: another caller sees the change: %t", share, changed)
		}
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
		if err := c.Set(t.Context(), "k", user{"ann", "hunter2"}); err != nil {
			t.Fatal(err)
		}
		stored, err := rdb.Get(t.Context(), ns+":{k}").Result()
		if err != nil {
			t.Fatal(err)
		}
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
	runs := make(chan string, 2*fleet)
	job := func() (report string, err error) { runs <- "run"; return "report", nil }
	count := func() (n int) {
		for len(runs) > 0 {
			<-runs
			n++
		}
		return n
	}

	wrong := func(l *lock.Locker) {
		err := l.Do(t.Context(), func(context.Context) error { _, err := job(); return err })
		if err != nil {
			t.Error(err)
		}
	}
	for range fleet { // one after the other, since clocks differ
		l, err := lock.NewMutex(client(t), ns, nil)
		if err != nil {
			t.Fatal(err)
		}
		wrong(l)
	}
	if n := count(); n != fleet {
		t.Errorf("with a lock: %d runs, want one in each process", n)
	}

	done := make(chan struct{})
	for i := range fleet {
		jobs, err := singlefill.New(client(t), ns, 48*time.Hour, &singlefill.Options[string]{LoadTimeout: time.Hour, EarlyRefresh: -1})
		if err != nil {
			t.Fatal(err)
		}
		defer jobs.Close()
		begin := func() {
			_, err := jobs.GetOrLoad(t.Context(), "report/2026-11-23", func(context.Context, string) (string, error) { return job() })
			if err != nil {
				t.Error(err)
			}
		}
		if i == fleet-1 { // a minute late
			for range fleet - 1 {
				<-done
			}
			begin()
		} else {
			go func() { begin(); done <- struct{}{} }()
		}
	}
	if n := count(); n != 1 {
		t.Errorf("with GetOrLoad: %d runs, want one", n)
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
			v, err := c.GetOrLoad(t.Context(), key, func(context.Context, string) (string, error) { return "new", nil })
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
			load := func(context.Context, string) (string, error) {
				time.Sleep(50 * time.Millisecond)
				return "good", nil
			}
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

// Workers that block take the connections of the client that a cache uses: each read of a warm key then
// waits, and loads. Caches and locks share a client of two connections.
func TestClient_BlockingCommands(t *testing.T) {
	t.Parallel()
	ns, warm := redistest.Namespace(t), client(t)
	redistest.Must(t, cachetest.NewCacheIn[string](t, warm, ns, nil).Set(t.Context(), "k", "v"))
	const connections = 2
	small := func(o *redis.Options) { o.PoolSize = connections }
	for _, wrong := range []bool{true, false} {
		rdb := redistest.Shared(t).Client(t, small)
		queue := rdb
		if !wrong {
			queue = redistest.Shared(t).Client(t, small)
		}
		var workers sync.WaitGroup
		for range connections {
			workers.Go(func() {
				if err := queue.BLPop(t.Context(), 0, ns+"-queue").Err(); err != nil {
					t.Error(err)
				}
			})
		}
		redistest.Await(t, "the workers block", func() bool {
			s := queue.PoolStats()
			return s.TotalConns-s.IdleConns == connections
		})
		c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{RedisTimeout: 200 * time.Millisecond})
		v, err := c.GetOrLoad(t.Context(), "k", func(context.Context, string) (string, error) { return "loaded", nil })
		if (v == "loaded") != wrong || err != nil {
			t.Errorf("workers on the client of the cache %t: %q, %v", wrong, v, err)
		}
		if !wrong {
			l, err := lock.NewMutex(rdb, ns, nil)
			redistest.Must(t, err)
			redistest.Must(t, l.Do(t.Context(), func(context.Context) error { return nil }))
		}
		redistest.Must(t, warm.RPush(t.Context(), ns+"-queue", 1, 2).Err())
		workers.Wait()
	}
}
