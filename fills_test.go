package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A value that is in Redis is found although the fill of its key waits for a place to load.
//
//fault:long-queue
func TestMaxLoads_ValueOfAQueuedKey(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		src := newSource[string](t)
		goGet(t.Context(), c, "busy", src.load)
		src.next(t)
		var queue []*call[string]
		for i := range 50 {
			queue = append(queue, goGet(t.Context(), c, fmt.Sprint("k", i), src.load))
		}
		synctest.Wait()
		if err := c.Set(t.Context(), "k7", "set"); err != nil { // here; elsewhere is the same
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if v, err := c.GetOrLoad(ctx, "k7", src.load); v != "set" || err != nil {
			t.Errorf("a later caller got %q, %v", v, err)
		}
		queue[7].want(t, "set") // and so does the one that waited
	})
}

// aroundHook is called before each command, with its context.
type aroundHook func(ctx context.Context, cmd redis.Cmder) error

func (h aroundHook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h aroundHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if err := h(ctx, cmd); err != nil {
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}

func (h aroundHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// silence answers no command.
func silence(ctx context.Context, _ redis.Cmder) error {
	if _, ok := ctx.Deadline(); !ok {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

// A fill whose read was not answered, and which then waited for a place, asks Redis before it loads.
func TestMaxLoads_LockAfterTheQueue(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var mute atomic.Bool
		rdb.AddHook(aroundHook(func(ctx context.Context, cmd redis.Cmder) error {
			if cmd.Name() == "get" && mute.Swap(false) {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}))
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1, RedisTimeout: time.Second})
		src := newSource[string](t)
		first := goGet(t.Context(), c, "x", src.load)
		busy := src.next(t)
		mute.Store(true)
		y := goGet(t.Context(), c, "y", gives("y"))
		time.Sleep(1100 * time.Millisecond) // it is in the queue
		synctest.Wait()
		busy.give("x")
		first.want(t, "x")
		y.want(t, "y")
		synctest.Wait()
		if s := c.Stats(); s.LoadsUnlocked != 0 || s.Stored != 2 {
			t.Errorf("unlocked %d, stored %d", s.LoadsUnlocked, s.Stored)
		}
	})
}

// A wait for a place in the fleet that ends in the middle of a command is no outage.
func TestMaxFleetLoads_SlowRedis(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		rdb.AddHook(aroundHook(func(ctx context.Context, cmd redis.Cmder) error {
			time.Sleep(20 * time.Millisecond)
			return nil
		}))
		opts := &singlefill.Options[string]{MaxFleetLoads: 1}
		ns := redistest.Namespace(t)
		a, b := newCacheIn(t, rdb, ns, opts), newCacheIn(t, rdb, ns, opts)
		src := newSource[string](t)
		goGet(t.Context(), a, "x", src.load)
		src.next(t)
		goGet(t.Context(), b, "y", src.load)
		for range 50 {
			time.Sleep(time.Second)
			synctest.Wait()
			if n := a.Stats().Loading + b.Stats().Loading; n > 1 {
				t.Fatalf("%d loads at a time in the fleet", n)
			}
		}
	})
}

// While Redis is silent the limit of the process holds alone: the fleet's delays no load.
func TestMaxFleetLoads_Outage(t *testing.T) {
	took := make(map[int]time.Duration)
	for _, fleet := range []int{0, 64} {
		t.Run(fmt.Sprint(fleet), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, rdb := redistest.StartMini(t)

				c := newCache(t, rdb, &singlefill.Options[string]{MaxFleetLoads: fleet})
				rdb.AddHook(aroundHook(silence))
				begun := time.Now()
				var calls []*call[string]
				for i := range 1000 {
					calls = append(calls, goGet(t.Context(), c, fmt.Sprint(i), takes(100*time.Millisecond, "v", nil)))
				}
				for _, a := range calls {
					<-a.answer
				}
				took[fleet] = time.Since(begun)
			})
		})
	}
	if took[64] > 3*took[0] {
		t.Errorf("1000 loads took %v, and %v with MaxFleetLoads", took[0], took[64])
	}
}

// A place that is lent to a load of another cache is given back before its own cache is closed.
func TestClose_LentPlace(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var fleet atomic.Int64
		rdb.AddHook(cmdHook(func(cmd redis.Cmder) error {
			if s := fmt.Sprint(cmd.Args()...); strings.HasPrefix(cmd.Name(), "eval") && strings.Contains(s, ":loads") {
				fleet.Add(1)
			}
			return nil
		}))
		one := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1, MaxFleetLoads: 1})
		two := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		src := newSource[string](t)
		goGet(t.Context(), two, "busy", src.load)
		busy := src.next(t)
		a := goGet(t.Context(), one, "a", func(ctx context.Context, _ string) (string, error) {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			_, err := two.GetOrLoad(ctx, "b", src.load)
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			return "a", nil
		})
		b := src.next(t)
		a.want(t, "a")
		var n int64
		closed := make(chan struct{})
		go func() {
			_ = one.Close()
			n = fleet.Load()
			close(closed)
		}()
		synctest.Wait()
		b.give("b")
		busy.give("busy")
		<-closed
		time.Sleep(time.Minute)
		if d := fleet.Load() - n; d != 0 {
			t.Errorf("%d commands of a cache that is closed", d)
		}
	})
}

// Loads that Close waits for may ask for several keys, one after the other, in one place.
func TestClose_NestedLoads(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		begun, goOn := make(chan bool), make(chan bool)
		a := goGet(t.Context(), c, "a", func(ctx context.Context, _ string) (string, error) {
			close(begun)
			<-goOn
			b := goGet(ctx, c, "b", takes(time.Second, "b", nil))
			d := goGet(ctx, c, "d", takes(time.Second, "d", nil))
			v1, err1 := b.result(t)
			v2, err2 := d.result(t)
			return v1 + v2, errors.Join(err1, err2)
		})
		<-begun
		go func() { _ = c.Close() }()
		synctest.Wait()
		close(goOn)
		a.want(t, "bd")
	})
}

type exitCodec struct{ singlefill.Codec }

func (exitCodec) Marshal(any) ([]byte, error) { runtime.Goexit(); return nil, nil }

// A codec that exits its goroutine fails the load. Callers do not load again and again.
func TestLoad_CodecExits(t *testing.T) {
	for _, down := range []bool{false, true} {
		t.Run(fmt.Sprint("down ", down), func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				c := newCache(t, rdb, &singlefill.Options[string]{Codec: exitCodec{singlefill.Raw}})
				if down {
					_ = rdb.Close()
				}
				var loads atomic.Int64
				_, err := c.GetOrLoad(t.Context(), "k", func(context.Context, string) (string, error) {
					loads.Add(1)
					return "v", nil
				})
				var panicked *singlefill.PanicError
				if !errors.As(err, &panicked) || loads.Load() != 1 {
					t.Errorf("Redis down: %t: %v after %d loads", down, err, loads.Load())
				}
			})
		})
	}
}

// afterHook is called after each command.
type afterHook func(cmd redis.Cmder) error

func (h afterHook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h afterHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if err == nil {
			if err = h(cmd); err != nil {
				cmd.SetErr(err)
			}
		}
		return err
	}
}

func (h afterHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Callers that joined a failed load share its failure, also if the reply to its release was lost.
func TestFailure_LostReplyOfTheRelease(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		isRelease := isScript(t, "release")
		var lost atomic.Bool
		rdb.AddHook(afterHook(func(cmd redis.Cmder) error {
			if isRelease(argsOf(cmd)) && !lost.Swap(true) {
				return errors.New("connection reset")
			}
			return nil
		}))
		c := newCache[string](t, rdb, nil)
		src := newSource[string](t)
		first := goGet(t.Context(), c, "k", src.load)
		load := src.next(t)
		time.Sleep(time.Second)
		joins := goGet(t.Context(), c, "k", gives("loaded again")).waits(t)
		synctest.Wait()
		load.fail(errSourceDown)
		first.wantErr(t, errSourceDown)
		joins.wantErr(t, errSourceDown)
	})
}

// A reader does not wait for each caller of its batch that leaves.
func TestReads_LeaversDelayNoReader(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache[string](t, rdb, nil)
		if err := c.Set(t.Context(), "k", "v"); err != nil {
			t.Fatal(err)
		}
		rdb.AddHook(cmdHook(func(cmd redis.Cmder) error { time.Sleep(30 * time.Millisecond); return nil }))
		goGet(t.Context(), c, "k", mustNotLoad[string](t)) // a read in flight
		synctest.Wait()
		for i := range 40 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(30*time.Millisecond+time.Duration(i+1)*29*time.Millisecond, cancel)
			goGet(ctx, c, "k", mustNotLoad[string](t))
			synctest.Wait()
		}
		begun := time.Now()
		goGet(t.Context(), c, "k", mustNotLoad[string](t)).want(t, "v")
		if took := time.Since(begun); took > 100*time.Millisecond {
			t.Errorf("a hit took %v", took)
		}
		time.Sleep(time.Minute)
	})
}
