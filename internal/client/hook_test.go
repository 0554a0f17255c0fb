package client

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A pipeline that a hook of the user refuses is no answer: each of its commands fails.
func TestPipelined_RefusedByHook(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		rdb, errRefusing := mute(t), errors.New("the hook refuses")
		rdb.AddHook(redistest.Pipelines(func(context.Context, []redis.Cmder, redis.ProcessPipelineHook) error { return errRefusing }))
		w := watch(t, rdb, timeout)
		if _, _, err := w.GetMany(t.Context(), nil, []string{"a", "b"}); !errors.Is(err, errRefusing) {
			t.Errorf("GetMany: %v", err)
		}
		get := func() {
			if _, _, err := w.Get(t.Context(), nil, "a"); !errors.Is(err, errRefusing) {
				t.Errorf("Get: %v", err)
			}
		}
		goTogether(w.Client, get, get).Wait()
	})
}

// A function of Trace that leaves by panic or runtime.Goexit keeps no caller waiting, and no place at the gate.
func TestDo_TraceLeaves(t *testing.T) {
	t.Parallel()
	for name, way := range map[string]struct {
		leave func()
		cmd   func(context.Context) (int, error)
	}{
		"panic in the caller": {
			func() { panic("RedisError") },
			func(ctx context.Context) (int, error) { <-ctx.Done(); time.Sleep(time.Second); return 0, nil },
		},
		"Goexit of the command": {runtime.Goexit, func(context.Context) (int, error) { return 0, errors.New("at once") }},
	} {
		runInBubble(t, name, func(t *testing.T) {
			c := New(mute(t), timeout, func(context.Context, string, error) { way.leave() }, func(error) {}, nil)
			var caller sync.WaitGroup // which waits for ever if it is kept: then the bubble fails
			caller.Go(func() {
				defer func() { _ = recover() }()
				_, _ = Do(t.Context(), c, "test", "k", way.cmd)
			})
			caller.Wait()
			if places := c.node.alone.state.Load(); places != 0 {
				t.Errorf("%d places are taken", places)
			}
			time.Sleep(time.Minute) // the command ends
		})
	}
}

// A command that has failed has its own error, though the server goes away while Trace is told of it.
func TestDo_SlowTrace(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := watch(t, mute(t), timeout)
		c := New(w.Redis, timeout, func(context.Context, string, error) { time.Sleep(2 * timeout) }, nil, nil)
		go func() { _ = w.get(t.Context()) }()
		time.Sleep(timeout * 9 / 10)
		_, err := DoWithin(t.Context(), c, Command{Op: "test", Key: "k", Within: timeout}, func(context.Context) (int, error) { return 0, errLost })
		if err != errLost || !w.AnyAway() {
			t.Errorf("%v, want %v; away: %t", err, errLost, w.AnyAway())
		}
	})
}

// Replies from the memory of a client show nothing of the server: they keep no breaker from opening.
func TestBreaker_ClientSideCaching(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		rdb := mute(t, func(o *redis.Options) { o.Protocol, o.ClientSideCacheConfig = 3, &redis.ClientSideCacheConfig{} })
		rdb.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if len(cmd.Args()) > 1 && cmd.Args()[1] == "hot" {
				return nil
			}
			return next(ctx, cmd)
		}))
		w := watch(t, rdb, timeout)
		time.Sleep(time.Minute)
		begun := time.Now()
		var wg sync.WaitGroup
		wg.Go(func() {
			for !w.AnyAway() && time.Since(begun) < time.Minute {
				_, _, _ = w.Get(t.Context(), nil, "hot")
				time.Sleep(timeout / 30)
			}
		})
		for range 3 {
			_, _, _ = w.Get(t.Context(), nil, "cold")
		}
		if took := time.Since(begun); took > timeout {
			t.Errorf("three callers have waited for %v in all, want one %v", took, timeout)
		}
		wg.Wait()
	})
}
