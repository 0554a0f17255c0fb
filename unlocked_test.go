package singlefill_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// An outage is a hook that keeps the replies of commands from their callers, as long as it is on.
type outage struct {
	on      atomic.Bool
	keeps   func(cmd []string) bool // the replies of these commands; nil: of all
	arrives func(cmd []string) bool // the server carries out these commands; nil: none
}

func (o *outage) DialHook(next redis.DialHook) redis.DialHook { return next }

func (o *outage) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if !o.on.Load() || o.keeps != nil && !o.keeps(argsOf(cmd)) {
			return next(ctx, cmd)
		}
		if o.arrives != nil && o.arrives(argsOf(cmd)) {
			_ = next(ctx, cmd)
		}
		<-ctx.Done()
		cmd.SetErr(ctx.Err())
		return ctx.Err()
	}
}

func (o *outage) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// inOutage runs a test with two processes, one of which cannot reach Redis while down is on.
func inOutage(t *testing.T, down *outage, run func(t *testing.T, here, there *singlefill.Cache[string])) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		faulty := redistest.NewMiniClient(t, m)
		faulty.AddHook(down)
		ns := redistest.Namespace(t)
		there := newCacheIn(t, rdb, ns, &singlefill.Options[string]{RedisTimeout: time.Second})
		here := newCacheIn(t, faulty, ns, &singlefill.Options[string]{RedisTimeout: time.Second})
		run(t, here, there)
		down.on.Store(false)
	})
}

// What was loaded while Redis could not be asked is not given to callers that came after a Delete,
// once Redis is back.
//
//fault:away-at-end
func TestUnlocked_LateCallerAfterTheOutage(t *testing.T) {
	down := new(outage)
	inOutage(t, down, func(t *testing.T, here, there *singlefill.Cache[string]) {
		src := newSource[string](t)
		down.on.Store(true)
		early := goGet(t.Context(), here, "k", src.load)
		load := src.next(t)
		time.Sleep(1500 * time.Millisecond)
		down.on.Store(false)
		time.Sleep(2 * time.Second)
		if err := there.Delete(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		late := goGet(t.Context(), here, "k", gives("new"))
		synctest.Wait()
		load.give("old")
		early.want(t, "old")
		late.want(t, "new")
		if s := here.Stats(); s.LoadsUnlocked != 1 || s.BreakerOpens != 0 {
			t.Errorf("%+v, want one load without the lock, and the breaker closed", s)
		}
	})
}

// While Redis cannot be asked all callers share a load, late ones too.
//
//fault:away-at-end
func TestUnlocked_LateCallerDuringTheOutage(t *testing.T) {
	down := new(outage)
	inOutage(t, down, func(t *testing.T, here, there *singlefill.Cache[string]) {
		src := newSource[string](t)
		down.on.Store(true)
		early := goGet(t.Context(), here, "k", src.load)
		load := src.next(t)
		late := goGet(t.Context(), here, "k", src.load)
		time.Sleep(3 * time.Second)
		load.give("v")
		early.want(t, "v")
		late.want(t, "v")
		src.want(t, 1)
	})
}

// LoadsUnlocked counts loads that have begun.
func TestUnlocked_CountedAtTheBeginning(t *testing.T) {
	down := new(outage)
	inOutage(t, down, func(t *testing.T, here, there *singlefill.Cache[string]) {
		src := newSource[string](t)
		down.on.Store(true)
		a := goGet(t.Context(), here, "k", src.load)
		load := src.next(t)
		if n := here.Stats().LoadsUnlocked; n != 1 {
			t.Errorf("%d loads without the lock while one runs, want 1", n)
		}
		load.give("v")
		a.want(t, "v")
	})
}

// A lock that was taken without a reply is given up as soon as Redis is back, also if the first
// attempt to do so fails.
func TestUnlocked_LockInDoubtIsAbandoned(t *testing.T) {
	down := &outage{keeps: redistest.Command("evalsha"), arrives: isScript(t, "get_or_lock")}
	inOutage(t, down, func(t *testing.T, here, there *singlefill.Cache[string]) {
		goGet(t.Context(), here, "warm", gives("v")).want(t, "v")
		down.on.Store(true)
		goGet(t.Context(), here, "k", gives("v")).want(t, "v")
		time.Sleep(3 * time.Second)
		down.on.Store(false)
		begun := time.Now()
		goGet(t.Context(), there, "k", gives("v")).want(t, "v")
		if d := time.Since(begun); d > 2*time.Second {
			t.Errorf("another process loads %v after the outage, want 2s at most: LockTTL is 20s", d)
		}
	})
}
