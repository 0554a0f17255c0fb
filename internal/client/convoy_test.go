package client

import (
	"context"
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
