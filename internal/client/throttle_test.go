package client

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A throttled is a client with 20 connections, whose pipelines are answered as a test wants.
type throttled struct {
	*Client
	t      *testing.T
	mu     sync.Mutex
	sent   []string // since the last reply; protected by mu
	answer chan error
	all    sync.WaitGroup
}

func newThrottled(t *testing.T) *throttled {
	m, _ := redistest.StartMini(t)
	rdb := redistest.NewMiniClient(t, m, func(o *redis.Options) { o.PoolSize = 20 })
	return &throttled{Client: unwatched(rdb, timeout), t: t, answer: make(chan error)}
}

// send sends a pipeline, unless it has to wait.
func (r *throttled) send(op string, keys int, holds bool) {
	r.all.Go(func() {
		what := Command{Op: op, Key: "k", Keys: keys, Holds: holds, Within: timeout}
		_, _ = DoWithin(r.t.Context(), r.Client, what, func(context.Context) (none struct{}, err error) {
			r.mu.Lock()
			r.sent = append(r.sent, op)
			r.mu.Unlock()
			return none, <-r.answer
		})
	})
	synctest.Wait()
}

// reply answers all pipelines that are on their way, and returns what they are, sorted.
func (r *throttled) reply(err error) (sent []string) {
	r.mu.Lock()
	sent, r.sent = r.sent, nil
	r.mu.Unlock()
	slices.Sort(sent)
	for range sent {
		r.answer <- err
	}
	synctest.Wait()
	return sent
}

// Two pipelines of many keys are on their way at a time. They become more while others wait and the server is quick, up
// to a quarter of the pool, and two again when it is slow or does not answer. A server that is far away gets no more.
//
//fault:own-load
func TestThrottle_Places(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newThrottled(t)
		for range 100 {
			r.send("many", Batch, false)
		}
		const quick, far, slow = timeout / 8, timeout / 3, timeout * 3 / 5
		for i, round := range []struct {
			takes time.Duration
			err   error
			sent  int
		}{
			{quick, nil, 2}, {quick, nil, 4}, {quick, nil, 5}, {slow, nil, 5}, {slow, nil, 2}, {far, nil, 2},
			{quick, nil, 2}, {quick, io.EOF, 4}, {quick, nil, 2}, {far, nil, 4}, {quick, nil, 4},
		} {
			time.Sleep(round.takes)
			if sent := r.reply(round.err); len(sent) != round.sent {
				t.Errorf("round %d: %d pipelines were on their way, want %d", i, len(sent), round.sent)
			}
		}
		for r.reply(nil) != nil {
		}
		r.all.Wait()
		many := r.node.many
		if free := int(many.size - many.state.Load()); free != many.places || many.places != 5 {
			t.Errorf("%d of %d places are free in the end, want 5 of 5", free, many.places)
		}
		for range 50 { // none waits
			r.send("many", Batch, false)
			r.reply(nil)
		}
		if many.places != 5 {
			t.Errorf("%d places, want 5", many.places)
		}
	})
}

// What holds locks goes before what asks for them, and a pipeline of a few keys does not wait for long ones.
func TestThrottle_Order(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newThrottled(t)
		for i := range 3 { // two are sent
			r.send(fmt.Sprint("lock", i), Batch, false)
		}
		r.send("lock3", Batch, false)
		r.send("store", Batch, true)
		r.send("few", fewKeys, false)
		time.Sleep(timeout / 3) // no more are sent than before
		if sent := r.reply(nil); !slices.Equal(sent, []string{"few", "lock0", "lock1"}) {
			t.Errorf("%q went first", sent)
		}
		time.Sleep(timeout / 3)
		if sent := r.reply(nil); !slices.Equal(sent, []string{"lock2", "store"}) {
			t.Errorf("then %q", sent)
		}
		if sent := r.reply(nil); !slices.Equal(sent, []string{"lock3"}) {
			t.Errorf("%q went last", sent)
		}
		r.all.Wait()
	})
}

// A pool of a few connections has places for each kind of commands.
func TestThrottle_SmallPool(t *testing.T) {
	t.Parallel()
	m, _ := redistest.StartMini(t)
	for size := 1; size < 10; size++ {
		s := newServer(redistest.NewMiniClient(t, m, func(o *redis.Options) { o.PoolSize = size }), nil)
		sum := int(s.alone.size + s.together.size + s.many.size)
		if s.many.places < 1 || s.alone.size < 1 || sum > max(3, size) {
			t.Errorf("%d connections: %d alone, %d together, %d for many", size, s.alone.size, s.together.size, s.many.size)
		}
	}
}
