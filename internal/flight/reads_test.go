package flight

import (
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// A joined holds the results of arrive.
type joined struct {
	turn *Turn[string]
	err  error
}

// reads are Reads whose callers read one key each.
type reads[V any] = Reads[V, *Turn[V]]

func one[V any](t *Turn[V]) []*Turn[V] { return []*Turn[V]{t} }

// arrive returns a turn of key that the caller holds, or that another caller has read for.
func arrive[V any](ctx context.Context, r *reads[V], key string) (t *Turn[V], err error) {
	t = &Turn[V]{Key: key}
	if r.Arrive(one(t)); !t.Held() {
		if err = r.Await(ctx, one(t)); err != nil {
			r.End(one(t))
		}
	}
	return t, err
}

// goJoin calls arrive in another goroutine, and returns once that call blocks or has returned.
func goJoin(ctx context.Context, r *reads[string], key string) <-chan joined {
	c := make(chan joined, 1)
	go func() {
		turn, err := arrive(ctx, r, key)
		c <- joined{turn, err}
	}()
	synctest.Wait()
	return c
}

// hasJoined returns what arrive has returned.
func hasJoined(t *testing.T, c <-chan joined) joined {
	t.Helper()
	if synctest.Wait(); len(c) == 0 {
		t.Fatal("Join blocks")
	}
	return <-c
}

// wantTurn checks that a caller may read now.
func wantTurn(t *testing.T, c <-chan joined) *Turn[string] {
	t.Helper()
	j := hasJoined(t, c)
	if !j.turn.Held() || j.turn.Found != nil || j.err != nil {
		t.Fatalf("Join returned %v, %v, want a turn", j.turn.Found, j.err)
	}
	return j.turn
}

func wantFound(t *testing.T, c <-chan joined, want string) {
	t.Helper()
	j := hasJoined(t, c)
	if j.turn.Found == nil || *j.turn.Found != want || j.err != nil {
		t.Errorf("Join returned %v, %v, want %q", j.turn.Found, j.err, want)
	}
}

func wantBlocked[V any](t *testing.T, c <-chan V) {
	t.Helper()
	synctest.Wait()
	if len(c) > 0 {
		t.Error("Join has returned, want it to block")
	}
}

func wantIdle(t *testing.T, r *reads[string]) {
	t.Helper()
	r.Drain()
	if len(r.keys) > 0 {
		t.Errorf("%d keys are left", len(r.keys))
	}
}

// end ends a turn. It reports whether other callers share found.
func end(r *reads[string], turn *Turn[string], found string) (shared bool) {
	turn.Found = &found
	r.End(one(turn))
	return turn.Shared
}

// leave ends a turn without a reply.
func leave(r *reads[string], turn *Turn[string]) (shared bool) {
	r.End(one(turn))
	return turn.Shared
}

// A caller never gets a reply that was in transit when it called, and a batch reads once.
func TestReads_ReplyInTransit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := NewReads[string, *Turn[string]]()
		first := wantTurn(t, goJoin(t.Context(), r, "k"))
		b, c := goJoin(t.Context(), r, "k"), goJoin(t.Context(), r, "k")
		wantBlocked(t, b)
		wantBlocked(t, c)
		leave(r, wantTurn(t, goJoin(t.Context(), r, "other")))
		if end(r, first, "1") {
			t.Error("the first reply is shared")
		}
		synctest.Wait()
		reader, member := b, c
		if len(b) == 0 {
			reader, member = c, b
		}
		second := wantTurn(t, reader)
		wantBlocked(t, member)
		late := goJoin(t.Context(), r, "k")
		if !end(r, second, "2") {
			t.Error("the second reply is not shared")
		}
		wantFound(t, member, "2")
		end(r, wantTurn(t, late), "3")
		wantIdle(t, r)
	})
}

// A caller that reads alone ends some of its reads before another caller comes. The second caller waits only for
// the reads that have not ended.
func TestReads_SoleCaller(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := NewReads[string, *Turn[string]]()
		sole := []*Turn[string]{{Key: "a"}, {Key: "b"}, {Key: "c"}}
		r.Arrive(sole)
		r.End(sole[:1])
		a, b := goJoin(t.Context(), r, "a"), goJoin(t.Context(), r, "b")
		end(r, wantTurn(t, a), "of a")
		wantBlocked(t, b)
		r.End(sole[1:])
		end(r, wantTurn(t, b), "of b")
		wantIdle(t, r)
	})
}

// A reader that leaves before it has a reply hands its turn to another member of its batch.
func TestReads_LeavingReader(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := NewReads[string, *Turn[string]]()
		first := wantTurn(t, goJoin(t.Context(), r, "k"))
		members := []<-chan joined{goJoin(t.Context(), r, "k"), goJoin(t.Context(), r, "k"), goJoin(t.Context(), r, "k")}
		end(r, first, "1")
		late := goJoin(t.Context(), r, "k")
		for range 2 { // readers
			synctest.Wait()
			for i, m := range members {
				if len(m) > 0 {
					if leave(r, wantTurn(t, m)) {
						t.Error("no reply is shared")
					}
					members = append(members[:i:i], members[i+1:]...)
					break
				}
			}
		}
		if len(members) != 1 {
			t.Fatalf("%d members have not had the turn, want 1", len(members))
		}
		wantBlocked(t, late)
		end(r, wantTurn(t, members[0]), "2")
		end(r, wantTurn(t, late), "3")
		wantIdle(t, r)
	})
}

// leave takes the token of a batch that has no other member, and wakes the next batch.
func TestReads_TokenOfALeaver(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := NewReads[string, *Turn[string]]()
		end(r, wantTurn(t, goJoin(t.Context(), r, "other")), "")
		first := wantTurn(t, goJoin(t.Context(), r, "k"))
		left := &batch[string]{token: make(chan struct{}, 1), done: make(chan struct{}), size: 1}
		r.list()
		r.keys["k"] = left
		end(r, first, "1") // the token is in the channel now
		next := goJoin(t.Context(), r, "k")
		wantBlocked(t, next)
		leave(r, &Turn[string]{Key: "k", batch: left, waits: true})
		end(r, wantTurn(t, next), "2")
		wantIdle(t, r)
	})
}

// Callers that join and leave at random get what was true after they called, and nothing is left
// behind.
func TestReads_Random(t *testing.T) {
	t.Parallel()
	r := NewReads[int64, *Turn[int64]]()
	var version atomic.Int64
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for range 300 {
				ctx, cancel := context.WithCancel(context.Background())
				if rand.IntN(3) == 0 {
					go cancel()
				}
				called := version.Load()
				turn, err := arrive(ctx, r, "k")
				switch {
				case err != nil:
				case !turn.Held():
					if *turn.Found < called {
						t.Errorf("a caller at %d gets %d", called, *turn.Found)
					}
				default:
					v := version.Load()
					version.Add(1)
					runtime.Gosched()
					if rand.IntN(3) != 0 {
						turn.Found = &v
					}
					r.End(one(turn))
				}
				cancel()
			}
		})
	}
	wg.Wait()
	r.Drain()
	if len(r.keys) != 0 {
		t.Errorf("%d keys are left", len(r.keys))
	}
}
