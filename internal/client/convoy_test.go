package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A road is a client whose GETs a test counts. Each key k holds "value of k".
type road struct {
	*Client
	*held
	t   *testing.T
	all sync.WaitGroup
}

func newRoad(t *testing.T, keys int) *road {
	m, rdb := redistest.StartMini(t)
	for i := range keys {
		key := fmt.Sprint(i)
		redistest.Must(t, m.Set(key, "value of "+key))
	}
	h := new(held)
	rdb.AddHook(redistest.Trips(h.hook))
	c := New(rdb, timeout, func(_ context.Context, op string, err error) {
		if !h.fails {
			t.Errorf("%s: %v", op, err)
		}
	}, nil, nil)
	return &road{Client: c, held: h, t: t}
}

func (r *road) get(ctx context.Context, v *Convoy, key int) (string, error) {
	cmd := redis.NewStringCmd(ctx, "get", fmt.Sprint(key))
	return Send(ctx, r.Client, Command{Op: "get", Key: fmt.Sprint(key), Within: timeout, Convoy: v}, cmd, cmd.Result)
}

// goGet starts GETs of keys, each of which wants its own value.
func (r *road) goGet(v *Convoy, keys ...int) {
	for _, key := range keys {
		r.all.Go(func() {
			if got, err := r.get(r.t.Context(), v, key); err != nil || got != fmt.Sprint("value of ", key) {
				r.t.Errorf("key %d: %q, %v", key, got, err)
			}
		})
	}
}

// wantSent waits until nothing happens, and checks what has been sent.
func (r *road) wantSent(alone int, pipelines ...int) {
	r.t.Helper()
	synctest.Wait()
	r.held.mu.Lock()
	defer r.held.mu.Unlock()
	if r.alone != alone || fmt.Sprint(r.pipelines) != fmt.Sprint(pipelines) {
		r.t.Errorf("%d went alone, and pipelines of %v; want %d and %v", r.alone, r.pipelines, alone, pipelines)
	}
}

// end waits for all commands, and checks that none is left at a gate.
func (r *road) end() {
	r.t.Helper()
	r.all.Wait()
	synctest.Wait()
	if s := r.node; r.Queued() != 0 || s.together.state.Load() != 0 || s.together.queue.Len() != 0 {
		r.t.Errorf("%d wait; the gate is %#x in the end", r.Queued(), s.together.state.Load())
	}
}

// The commands of a Convoy go in one pipeline, at once when the last of its members has come or has
// told that it sends none, though all connections are free.
func TestConvoy_OnePipeline(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name     string
		complete func(r *road, v *Convoy)
		want     int
	}{
		{"the last one comes", func(r *road, v *Convoy) { r.goGet(v, 3) }, 4},
		{"the last one sends nothing", func(r *road, v *Convoy) { v.Leave() }, 3},
		{"the number becomes known", func(r *road, v *Convoy) { v.Expect(3) }, 3},
	} {
		synctest.Test(t, func(t *testing.T) {
			r, v := newRoad(t, 4), new(Convoy)
			if test.name != "the number becomes known" {
				v.Expect(4)
			}
			begun := time.Now()
			r.goGet(v, 0, 1, 2)
			r.wantSent(0)
			if test.complete(r, v); time.Since(begun) != 0 {
				t.Fatal("time has passed")
			}
			r.wantSent(0, test.want)
			if r.end(); time.Since(begun) != 0 {
				t.Errorf("%s: the commands took %v", test.name, time.Since(begun))
			}
		})
	}
}

// A Convoy does not wait for a member that is late for longer than linger. That member's command goes
// at once and by itself.
func TestConvoy_LateMember(t *testing.T) {
	t.Parallel()
	for _, expected := range []int{0, 3} { // 0: Expect has not been called
		synctest.Test(t, func(t *testing.T) {
			r, v := newRoad(t, 3), new(Convoy)
			if expected > 0 {
				v.Expect(expected)
			}
			r.goGet(v, 0, 1)
			time.Sleep(linger - time.Nanosecond)
			r.wantSent(0)
			time.Sleep(time.Nanosecond)
			r.wantSent(0, 2)
			begun := time.Now()
			r.goGet(v, 2)
			r.wantSent(1, 2)
			v.Leave() // too late to matter
			v.Expect(2)
			if r.end(); time.Since(begun) != 0 {
				t.Errorf("the late command took %v", time.Since(begun))
			}
		})
	}
}

// A Convoy whose members all send nothing has nothing to send. A command that comes nevertheless goes
// at once.
func TestConvoy_Empty(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r, v := newRoad(t, 1), new(Convoy)
		v.Expect(2)
		v.Leave()
		v.Leave()
		r.wantSent(0)
		begun := time.Now()
		r.goGet(v, 0)
		if r.end(); time.Since(begun) != 0 {
			t.Errorf("the command took %v", time.Since(begun))
		}
	})
}

// A caller that leaves before its Convoy departs gets the error of its context at once, and its
// command is not sent. It has come, so the others do not wait for it.
func TestConvoy_CallerLeaves(t *testing.T) {
	t.Parallel()
	for _, leaving := range []int{1, 3} { // of three
		synctest.Test(t, func(t *testing.T) {
			r, v := newRoad(t, 3), new(Convoy)
			v.Expect(4)
			begun := time.Now()
			ctx, cancel := context.WithCancel(t.Context())
			for key := range leaving {
				r.all.Go(func() {
					if _, err := r.get(ctx, v, key); !errors.Is(err, context.Canceled) || time.Since(begun) != 0 {
						t.Errorf("a caller that leaves got %v, after %v", err, time.Since(begun))
					}
				})
			}
			for key := leaving; key < 3; key++ {
				r.goGet(v, key)
			}
			synctest.Wait()
			cancel()
			r.wantSent(0)
			v.Leave() // the fourth
			if leaving < 3 {
				r.wantSent(0, 3-leaving)
			} else {
				r.wantSent(0)
			}
			r.end()
		})
	}
}

// A Convoy that finds no free connection goes in one pipeline when one is free, behind commands that
// came before, and not together with others, also if the command before was not answered.
func TestConvoy_NoFreeConnection(t *testing.T) {
	t.Parallel()
	for _, answered := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			r, v := newRoad(t, 6), new(Convoy)
			r.node.together.size, r.node.together.most = 1, mostTogether
			if !r.node.together.tryEnter() {
				t.Fatal("the gate is closed")
			}
			r.goGet(nil, 0)
			synctest.Wait()
			v.Expect(4)
			r.goGet(v, 1, 2, 3, 4)
			synctest.Wait()
			r.goGet(nil, 5)
			r.wantSent(0)
			r.node.together.leave(answered)
			r.wantSent(2, 4)
			r.end()
		})
	}
}

// A Convoy of any length goes as soon as it can, in pipelines of mostTogether.
func TestConvoy_Long(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const keys = 2*mostTogether + 10
		r, v := newRoad(t, keys), new(Convoy)
		v.Expect(keys)
		for key := range keys {
			r.goGet(v, key)
		}
		r.end()
		if sum := r.pipelines; r.alone != 0 || len(sum) != 3 || sum[0]+sum[1]+sum[2] != keys || max(sum[0], sum[1], sum[2]) != mostTogether {
			t.Errorf("%d went alone, and pipelines of %v", r.alone, sum)
		}
	})
}

// A command for another server than the first one goes as if there were no Convoy.
func TestConvoy_OneServer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		here, elsewhere, v := newRoad(t, 2), newRoad(t, 1), new(Convoy)
		v.Expect(2)
		here.goGet(v, 0)
		synctest.Wait()
		elsewhere.goGet(v, 0)
		elsewhere.wantSent(1)
		here.wantSent(0)
		here.goGet(v, 1)
		here.wantSent(0, 2)
		here.end()
		elsewhere.end()
	})
}
