package cache_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// maxPolls returns how often a process may poll for a key in that time, if it knows nothing of the
// key's loads. The pauses grow from 2 ms to a fifth of the load's age, and to 250 ms at most; each
// may be a quarter shorter. Two more polls are in transit at the beginning, and due to the last
// callers.
func maxPolls(wait time.Duration) int {
	n := 2
	for waited := time.Duration(0); waited < wait; n++ {
		waited += min(max(2*time.Millisecond, waited/5), 250*time.Millisecond) * 3 / 4
	}
	return n
}

// Waiting costs few commands, however many callers wait.
//
//fault:long-waits
func TestWait_FewCommands(t *testing.T) {
	for _, callers := range []int{1, 100} {
		t.Run(fmt.Sprint(callers), func(t *testing.T) {
			t.Parallel()
			f, holder, waiter := newPair(t)
			v := holder.block("load", "k").Value

			gets := waiter.proxy.On(redistest.Command("GET"), redistest.Pass)
			waiter.get("waits", "k", callers, plan{})
			waiter.joined("waits")
			begun, before := f.now(), waiter.polled("k")
			others := waiter.proxy.On(func(cmd []string) bool { return !scripts(cmd) }, redistest.Pass)
			redistest.Await(t, "the calls have waited for 2 s", func() bool { return f.now().Sub(begun) > 2*time.Second })
			polls, wait := waiter.polled("k")-before, f.now().Sub(begun)
			waiter.wantUnfinished("waits")

			if most := maxPolls(wait); polls > most {
				t.Errorf("%d polls in %v, want %d at most", polls, wait, most)
			}
			// The second GET is for callers that began during the first. A connection to listen costs a
			// few commands.
			if gets.Fired() > 2 || others.Fired() > 5 {
				t.Errorf("%d GETs, want 2 at most; %d other commands", gets.Fired(), others.Fired())
			}
			holder.release("load")
			waiter.wantDone("waits", callers, gotValue, v)
			f.wantLoads("k", 1)
		})
	}
}

// New callers bring the next poll forward, since the value may have arrived; but not one poll each.
//
//fault:long-waits
func TestWait_NewCallers(t *testing.T) {
	t.Parallel()
	f, holder, waiter := newPair(t)
	v := holder.block("load", "k").Value
	waiter.get("first", "k", 1, plan{})
	waiter.joined("first")

	const crowds, crowd = 100, 20
	begun, before := f.now(), waiter.polled("k")
	for i := range crowds {
		tag := fmt.Sprint("crowd", i)
		waiter.get(tag, "k", crowd, plan{})
		waiter.joined(tag)
	}
	polls, wait := waiter.polled("k")-before, f.now().Sub(begun)
	if most := maxPolls(wait) + int(wait/(10*time.Millisecond)); polls > most {
		t.Errorf("%d polls in %v for %d callers, want at most %d", polls, wait, crowds*crowd, most)
	}
	holder.release("load")
	waiter.wantDone("first", 1, gotValue, v)
	for i := range crowds {
		waiter.wantDone(fmt.Sprint("crowd", i), crowd, gotValue, v)
	}
	f.wantLoads("k", 1)
}

// Waiting holds no connection.
//
//fault:waiting-callers
func TestWait_NoConnection(t *testing.T) {
	t.Parallel()
	const keys, callers, connections = 50, 10, 2
	f := newFleet(t)
	holder, waiter := f.start(config{}), f.start(config{PoolSize: connections})
	var groups []waiters
	for i := range keys {
		key := fmt.Sprint("key", i)
		holder.block(key, key)
		waiter.get(key, key, callers, plan{})
		groups = append(groups, waiters{waiter, key, key})
	}
	awaitWaiting(groups...)
	redistest.Await(t, "all connections are idle while callers wait for all keys", func() bool {
		pool := waiter.pool()
		if pool.TotalConns > connections {
			t.Fatalf("pool %+v", pool)
		}
		return pool.TotalConns > 0 && pool.IdleConns == pool.TotalConns
	})
	waiter.do(order{Op: "ping"})
	waiter.set("another", "v")
	if got := waiter.peek("another"); got != (outcome{gotValue, "v"}) {
		t.Errorf("Get while callers wait: %v", got)
	}
	waiter.get("own", "own", 5, plan{})
	v := waiter.begun("own").Value
	waiter.wantDone("own", 5, gotValue, v)
	if s := waiter.stats(); s.Loading != 0 || s.Waits != 0 || s.RedisErrors != 0 {
		t.Errorf("while callers wait Stats are %+v", s)
	}
	for i := range keys {
		holder.release(fmt.Sprint("key", i))
	}
	for i := range keys {
		key := fmt.Sprint("key", i)
		waiter.wantDone(key, callers, gotValue, fmt.Sprintf("%s/%d", holder.name, i+1))
	}
	if s := waiter.stats(); s.Waits != keys || s.Loads != 1 {
		t.Errorf("Stats are %+v", s)
	}
}
