package tags

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A ledger is a source whose values have versions, one for each of their two tags. A key ki has the tags
// ai and bi, of a few each.
type ledger struct {
	now map[string]*atomic.Int64 // the version of a tag in the source
	lag time.Duration            // of Near; 0: off

	mu      sync.Mutex
	deleted map[string][]deletion // of a tag; protected by mu
}

// A deletion is a DeleteTag that has returned.
type deletion struct {
	version int64
	at      time.Time
}

// least returns the version that a read that begins now has to return at least.
func (l *ledger) least(tag string) (version int64) {
	begun := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.deleted[tag] {
		if begun.Sub(d.at) > l.lag || l.lag == 0 {
			version = max(version, d.version)
		}
	}
	return version
}

const someTags = 3

func newLedger(lag time.Duration) *ledger {
	l := &ledger{now: make(map[string]*atomic.Int64), lag: lag, deleted: make(map[string][]deletion)}
	for i := range someTags {
		for _, kind := range []string{"a", "b"} {
			l.now[fmt.Sprint(kind, i)] = new(atomic.Int64)
		}
	}
	return l
}

func (l *ledger) tags(key, _ string) []string {
	var n int
	_, _ = fmt.Sscanf(key, "k%d", &n)
	return []string{fmt.Sprint("a", n%someTags), fmt.Sprint("b", n/someTags%someTags)}
}

// load returns the versions, and takes its time before and after it has looked.
func (l *ledger) load(_ context.Context, key string) (string, error) {
	tags := l.tags(key, "")
	time.Sleep(rand.N(2 * time.Millisecond))
	v := fmt.Sprint(l.now[tags[0]].Load(), " ", l.now[tags[1]].Load())
	time.Sleep(rand.N(2 * time.Millisecond))
	return v, nil
}

func (l *ledger) loadMany(ctx context.Context, keys []string) (map[string]string, error) {
	found := make(map[string]string)
	for _, key := range keys {
		found[key], _ = l.load(ctx, key)
	}
	return found, nil
}

// invalidate changes the source, and then deletes the values with the tag.
func (l *ledger) invalidate(ctx context.Context, c *singlefill.Cache[string], tag string) error {
	version := l.now[tag].Add(1)
	if err := c.DeleteTag(ctx, tag); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deleted[tag] = append(l.deleted[tag], deletion{version, time.Now()})
	return nil
}

// read checks that a value is not older than the last DeleteTag that had returned.
func (l *ledger) read(ctx context.Context, c *singlefill.Cache[string], key string) error {
	tags := l.tags(key, "")
	a, b := l.least(tags[0]), l.least(tags[1])
	var v string
	var err error
	if rand.IntN(2) == 0 {
		v, err = c.GetOrLoad(ctx, key, l.load)
	} else {
		var found map[string]string
		found, err = c.GetOrLoadMany(ctx, []string{key, fmt.Sprint("k", rand.IntN(12))}, l.loadMany)
		v = found[key]
	}
	if err != nil {
		return err
	}
	var gotA, gotB int64
	if _, err = fmt.Sscan(v, &gotA, &gotB); err == nil && (gotA < a || gotB < b) {
		err = fmt.Errorf("%s is %q, although tag %s was deleted at %d and %s at %d before", key, v, tags[0], a, tags[1], b)
	}
	return err
}

// In any order of calls of several processes, whatever is lost of what the tags are kept in and while slots
// move, no read that begins after a DeleteTag returns an older value.
//
//fault:tag-in-load
func TestTags_RandomOrders(t *testing.T) {
	t.Parallel()
	losses := func(t *testing.T, look redis.UniversalClient, ns string, _ int) {
		for _, key := range keysOf(t, look, ns, "") {
			if rand.IntN(20) == 0 {
				redistest.Must(t, look.Del(t.Context(), key).Err())
			}
		}
	}
	for name, disturb := range map[string]func(t *testing.T, look redis.UniversalClient, ns string, step int){
		"undisturbed": func(*testing.T, redis.UniversalClient, string, int) {},
		"losses":      losses,
		// With Near; the records of what was deleted are lost as well.
		"near, losses": func(t *testing.T, look redis.UniversalClient, ns string, step int) {
			if step%10 == 5 {
				redistest.Must(t, look.Del(t.Context(), ns+":log").Err())
			}
			losses(t, look, ns, step)
		},
	} {
		t.Run(name, func(t *testing.T) {
			cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
				if !cachetest.HitsMayBeLate(t) {
					randomOrders(t, rdb, look, disturb)
				}
			})
		})
	}
	t.Run("slots move", func(t *testing.T) {
		if testing.Short() {
			return
		}
		t.Parallel()
		cluster := redistest.StartCluster(t) // the calls of other tests may fail while slots move
		rdb, moves := cluster.Client(t), 0
		randomOrders(t, rdb, rdb, func(t *testing.T, _ redis.UniversalClient, ns string, step int) {
			if books := keysOf(t, rdb, ns, ":book"); step%20 == 10 && len(books) > 0 {
				cluster.Move(t, books[step/20%len(books)]).End()
				moves++
			}
		})
		if moves == 0 {
			t.Error("no slot has moved")
		}
	})
}

func randomOrders(t *testing.T, rdb, look redis.UniversalClient, disturb func(t *testing.T, look redis.UniversalClient, ns string, step int)) {
	ns, lag := redistest.Namespace(t), time.Duration(0)
	var near *singlefill.Near
	if strings.Contains(t.Name(), "/near") {
		lag = 100 * time.Millisecond
		near = &singlefill.Near{MaxLag: lag}
	}
	source := newLedger(lag)
	opts := singlefill.Options[string]{Codec: singlefill.Raw, Tags: source.tags, Near: near}
	caches := make([]*singlefill.Cache[string], 3)
	for i := range caches {
		caches[i] = cachetest.NewCacheIn(t, rdb, ns, &opts)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var running sync.WaitGroup
	call := func(what string, do func(c *singlefill.Cache[string]) error) {
		for _, c := range caches {
			running.Go(func() {
				for ctx.Err() == nil {
					if err := do(c); err != nil && !errors.Is(err, context.Canceled) {
						t.Errorf("%s: %v", what, err)
						stop()
					}
				}
			})
		}
	}
	for range 3 {
		call("read", func(c *singlefill.Cache[string]) error { return source.read(ctx, c, fmt.Sprint("k", rand.IntN(12))) })
	}
	deleted := make(chan struct{}, 1)
	call("DeleteTag", func(c *singlefill.Cache[string]) error {
		time.Sleep(rand.N(5 * time.Millisecond))
		err := source.invalidate(ctx, c, fmt.Sprint([]string{"a", "b"}[rand.IntN(2)], rand.IntN(someTags)))
		if err == nil {
			select {
			case deleted <- struct{}{}:
			default:
			}
		}
		return err
	})
	for step := range 60 {
		select {
		case <-deleted:
		case <-ctx.Done():
		}
		disturb(t, look, ns, step)
	}
	redistest.Await(t, "a hit", func() bool {
		return ctx.Err() != nil || slices.ContainsFunc(caches, func(c *singlefill.Cache[string]) bool { return c.Stats().Hits > 0 })
	})
	stop()
	running.Wait()
}
