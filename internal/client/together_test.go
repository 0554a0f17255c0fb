package client

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A road is a client whose GETs a test counts and holds up. Each key k holds "value of k".
type road struct {
	*Client
	t   *testing.T
	all sync.WaitGroup

	mu        sync.Mutex // protects what follows
	takes     time.Duration
	fails     error
	alone     int
	pipelines []int // lengths
}

// newRoad returns a road to keys, each of which lives for as many hours as its number, and one more.
func newRoad(t *testing.T, keys int, takes time.Duration) *road {
	m, rdb := redistest.StartMini(t)
	for i := range keys {
		key := fmt.Sprint(i)
		redistest.Must(t, m.Set(key, "value of "+key))
		m.SetTTL(key, time.Duration(i+1)*time.Hour)
	}
	r := &road{Client: unwatched(rdb, timeout), t: t, takes: takes}
	rdb.AddHook(redistest.Trips(r.trip))
	return r
}

// trip is called before each round trip.
func (r *road) trip(cmds []redis.Cmder) error {
	if cmds[len(cmds)-1].Name() != "get" {
		return nil
	}
	r.mu.Lock()
	if len(cmds) == 1 {
		r.alone++
	} else {
		r.pipelines = append(r.pipelines, len(cmds))
	}
	takes := r.takes
	r.mu.Unlock()
	time.Sleep(takes)
	return r.fails
}

func (r *road) get(ctx context.Context, key int) (string, error) {
	cmd := redis.NewStringCmd(ctx, "get", fmt.Sprint(key))
	what := Command{Op: "get", Key: fmt.Sprint(key), Within: timeout}
	s, _, err := send(ctx, r.Client, &what, []redis.Cmder{cmd}, cmd.Result)
	return s, err
}

// wantSent waits until nothing happens, and checks what has been sent.
func (r *road) wantSent(alone int, pipelines ...int) {
	r.t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
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

// goTogether runs functions at a time, each of which sends a command. They wait at the gate, in this order, until they
// go in one pipeline.
func goTogether(c *Client, runs ...func()) (all *sync.WaitGroup) {
	g := c.node.together
	g.size, g.most = 1, mostTogether
	g.tryEnter()
	all = new(sync.WaitGroup)
	for _, run := range runs {
		all.Go(run)
		synctest.Wait()
	}
	g.leave(true)
	return all
}

// Commands that come while all connections are in use go together when one returns, and each gets
// its own reply. What comes to a free connection does not wait.
func TestTogether_OnePipeline(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const keys = 50
		r := newRoad(t, keys, 10*time.Millisecond)
		r.node.together.size, r.node.together.most = 2, mostTogether
		begun := time.Now()
		for key := range keys {
			r.all.Go(func() {
				if got, err := r.get(t.Context(), key); err != nil || got != fmt.Sprint("value of ", key) {
					t.Errorf("key %d: %q, %v", key, got, err)
				}
			})
		}
		synctest.Wait()
		if n := r.Queued(); n != keys-2 {
			t.Errorf("%d commands wait, want %d", n, keys-2)
		}
		r.end()
		if took := time.Since(begun); took != 2*r.takes {
			t.Errorf("all took %v, want %v", took, 2*r.takes)
		}
		r.wantSent(2, keys-2)
	})
}

// Commands whose connections break, each after another time, go together when they are sent again, unless little of
// their time is left.
func TestTogether_SentAgain(t *testing.T) {
	const keys = 8
	for when, want := range map[time.Duration]struct {
		alone     int
		pipelines []int
	}{
		0:                {keys, []int{keys}},
		timeout * 6 / 10: {keys + keys, nil},
	} {
		runInBubble(t, fmt.Sprint("after ", when), func(t *testing.T) {
			r := newRoad(t, keys, 0)
			g := r.node.together
			g.size, g.most, r.fails = keys, mostTogether, io.ErrUnexpectedEOF
			for key := range keys {
				r.takes = when + time.Duration(key)*time.Millisecond
				r.all.Go(func() {
					if _, _, err := r.Get(t.Context(), nil, fmt.Sprint(key)); err != nil {
						t.Errorf("key %d: %v", key, err)
					}
				})
				synctest.Wait()
			}
			g.state.Add(keys) // no place is free any more
			time.Sleep(when + 2*keys*time.Millisecond)
			synctest.Wait()
			r.takes, r.fails = 0, nil
			g.state.Add(^uint64(keys - 2))
			g.leave(true)
			r.wantSent(want.alone, want.pipelines...)
			r.end()
		})
	}
}

// A command that is sent ahead of a GET is about the same key, also among others in one pipeline.
func TestGet_Ahead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const keys = 10
		r := newRoad(t, keys, 10*time.Millisecond)
		r.node.together.size = 1
		for i := range keys {
			r.all.Go(func() {
				key := fmt.Sprint(i)
				pttl := redis.NewDurationCmd(t.Context(), time.Millisecond, "pttl", key)
				data, _, err := r.Get(t.Context(), pttl, key)
				if hours := (pttl.Val() + time.Minute).Hours(); string(data) != "value of "+key || err != nil || int(hours) != i+1 {
					t.Errorf("%s: %q, %v, and it lives for %v", key, data, err, pttl.Val())
				}
			})
		}
		r.end()
		r.wantSent(0, 2, 2*(keys-1))
	})
}

// Through a client that may reach several servers commands do not go together.
func TestTogether_OneServerOnly(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRoad(t, 1, 10*time.Millisecond)
		c := unwatched(wrapped{r.Redis}, timeout)
		c.node.alone.size = 2
		for range 20 {
			r.all.Go(func() { _, _, _ = c.Get(t.Context(), nil, "0") })
		}
		r.all.Wait()
		r.wantSent(20)
	})
	for _, rdb := range []redis.UniversalClient{
		redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}}),
		redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}}),
	} {
		if s := newServer(rdb, nil); s.together != s.alone {
			t.Errorf("commands through a %T may go together", rdb)
		}
		_ = rdb.Close()
	}
}

// The pipelines grow while the server is quick, a little also while it is far away, and shrink to two commands when it
// is slow. After a command that was not answered the next one goes alone.
func TestTogether_Length(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		takes time.Duration
		fails error
		most  int
		want  string
	}{
		"quick":                  {time.Millisecond, nil, firstTogether, "[16 32 64 128 256 256 247]"},
		"quick again":            {time.Millisecond, nil, 2, "[2 4 8 16 32 64 128 256 256 233]"},
		"far":                    {timeout * 3 / 10, nil, 2, "[2 4 8 16 16 16 16 16"},
		"far from the beginning": {timeout * 3 / 10, nil, 64, "[64 64 64 64"},
		"very far":               {timeout * 2 / 5, nil, firstTogether, "[16 16 16 16"},
		"slow":                   {timeout * 3 / 5, nil, 256, "[256 128 64 32 16 8 4 2 2 2 2 2"},
		"no answer":              {time.Millisecond, io.ErrUnexpectedEOF, firstTogether, "[]"},
	} {
		runInBubble(t, name, func(t *testing.T) {
			r := newRoad(t, 1, test.takes)
			r.fails = test.fails
			r.node.together.size, r.node.together.most = 1, test.most
			for range 1000 {
				r.all.Go(func() {
					if _, err := r.get(t.Context(), 0); Unreachable(err) != (test.fails != nil) {
						t.Error(err)
					}
				})
			}
			r.end()
			if got := fmt.Sprint(r.pipelines); !strings.HasPrefix(got, test.want) {
				t.Errorf("%d alone and pipelines of %.80s, want %s", r.alone, got, test.want)
			}
		})
	}
}

// A caller can leave until its command goes. A command that goes gets its reply, wherever its caller
// is.
func TestTogether_LeavesAsTheyGo(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRoad(t, 1, 0)
		g := &gate{size: 1, most: mostTogether}
		g.tryEnter()
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		var waiters []*waiter
		for range 4 {
			waiters = append(waiters, g.enqueue(parcel{rdb: r.Redis, timeout: timeout, ctx: ended, cmd: redis.NewStringCmd(ended, "get", "0")}))
		}
		if !g.giveUp(waiters[0]) {
			t.Error("a caller cannot leave while its command waits")
		}
		g.mu.Lock() // holds up the group
		g.state.Add(^uint64(0))
		g.admit(true)
		if !waiters[1].group.leaveOut(waiters[1]) {
			t.Error("a caller cannot leave before its command goes")
		}
		g.mu.Unlock()
		synctest.Wait()
		if g.giveUp(waiters[2]) {
			t.Error("a caller can leave when its command has gone")
		}
		for i, want := range []string{"", "", "value of 0", "value of 0"} {
			if got := waiters[i].cmd.(*redis.StringCmd).Val(); got != want {
				t.Errorf("command %d: %q, want %q", i, got, want)
			}
		}
		r.wantSent(0, 2)
		if state := g.state.Load(); state != 0 {
			t.Errorf("the gate is %#x in the end", state)
		}
	})
}

// A command whose reply is lost keeps its place until its time is over, and no longer, though a client
// that does not observe deadlines keeps the connection.
func TestTogether_LostReply(t *testing.T) {
	t.Parallel()
	for _, callers := range []int{1, 5} {
		runInBubble(t, fmt.Sprint(callers), func(t *testing.T) {
			r := newRoad(t, 1, time.Hour)
			lost := func() {
				want := "no answer within " + timeout.String() + ": context deadline exceeded"
				if _, _, err := r.Get(t.Context(), nil, "0"); err == nil || err.Error() != want {
					t.Errorf("%v, want %s", err, want)
				}
			}
			all := goTogether(r.Client, slices.Repeat([]func(){lost}, callers)...)
			synctest.Wait()
			r.mu.Lock()
			r.takes = 0
			r.mu.Unlock()
			time.Sleep(timeout / 3)
			begun := time.Now()
			if _, _, err := r.Get(t.Context(), nil, "0"); err != nil || time.Since(begun) != timeout-timeout/3 {
				t.Errorf("%v after %v, want %v", err, time.Since(begun), timeout-timeout/3)
			}
			all.Wait()
			time.Sleep(2 * time.Hour)
			if r.end(); len(r.pipelines) != min(1, callers-1) {
				t.Errorf("pipelines of %v", r.pipelines)
			}
		})
	}
}

// A caller does not wait for as long as the more patient ones whose commands queue with its own.
func TestTogether_TimeoutsDiffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		hasty := newRoad(t, 1, time.Hour).Client
		patient := unwatched(hasty.Redis, time.Minute)
		get := func(c *Client) func() {
			return func() {
				begun := time.Now()
				if _, _, err := c.Get(t.Context(), nil, "0"); time.Since(begun) > 2*c.Timeout {
					t.Errorf("one with %v has waited for %v: %v", c.Timeout, time.Since(begun), err)
				}
			}
		}
		goTogether(hasty, get(patient), get(patient), get(hasty), get(hasty)).Wait()
		time.Sleep(2 * time.Hour)
	})
}

// A reply that has come in time is taken, also by a caller that a busy process lets run too late.
func TestTogether_LateCaller(t *testing.T) {
	g := &group{done: make(chan struct{})}
	close(g.done)
	for range 100 {
		n, err := execute(ended, parcel{}, g, func(context.Context, parcel) (int, error) { return 1, nil })
		if n != 1 || err != nil {
			t.Fatalf("%d, %v, want what the group has brought", n, err)
		}
	}
}
