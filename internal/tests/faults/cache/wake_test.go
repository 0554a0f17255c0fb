package cache_test

import (
	"context"
	"fmt"
	"net"
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

// The tests TestWake_… disturb the connection on which a process listens for wake-ups, and leave
// its commands alone. Each waiter gets its value, from one load, and no connection is left open.

// wakeTTL is the LockTTL of these tests: a waiter that relies on a wake-up that does not come polls
// within this time.
const wakeTTL = 3 * time.Second

// newListeners returns two caches of one source, in which waiters listen.
func newListeners(t testing.TB, a, b redis.UniversalClient) (x, y *cachetest.Cache) {
	t.Helper()
	return newPair(t, a, b, wakeTTL/4, func(o *singlefill.Options[string]) { o.LockTTL = wakeTTL })
}

// A waiting is a call in one process that waits for a load in another one.
type waiting struct {
	t       testing.TB
	a, b    *cachetest.Cache // the load runs in a
	channel string
	goOn    func() // ends the load
	calls   sync.WaitGroup
	before  int64 // number of loads
}

// startWaiting returns when the load runs and the call has polled.
func startWaiting(t testing.TB, s *redistest.Server, a, b *cachetest.Cache, key string) *waiting {
	t.Helper()
	loading, over := make(chan struct{}), make(chan struct{})
	w := &waiting{t: t, a: a, b: b, channel: a.LockKey(key), before: a.Loads.Load()}
	w.goOn = sync.OnceFunc(func() { close(over) })
	t.Cleanup(w.goOn)
	a.During = func(string) { close(loading); <-over }
	w.calls.Go(func() { a.WantValue(key) })
	<-loading
	polls := s.Calls("pttl")
	w.calls.Go(func() { b.WantValue(key) })
	redistest.Await(t, "the call waits for another process", func() bool { return s.Calls("pttl") > polls })
	return w
}

// awaitListening waits until the waiter is subscribed at s.
func (w *waiting) awaitListening(s *redistest.Server) {
	w.t.Helper()
	redistest.Await(w.t, "the waiter listens", func() bool { return subscribers(w.t, s, w.channel) == 1 })
}

// end ends the load, and waits until both calls have the value.
func (w *waiting) end() {
	w.t.Helper()
	begun := time.Now()
	w.goOn()
	w.calls.Wait()
	w.a.During = nil
	w.t.Logf("the waiter had its value %v after the load", time.Since(begun).Round(time.Millisecond))
	w.a.WantLoads(w.before + 1)
}

// subscribers returns the number of connections that are subscribed to a channel.
func subscribers(t testing.TB, s *redistest.Server, channel string) int64 {
	t.Helper()
	n, err := s.Admin().PubSubShardNumSub(context.Background(), channel).Result()
	redistest.Must(t, err)
	return n[channel]
}

// listeners returns the number of connections that have subscribed a channel.
func listeners(t testing.TB, s *redistest.Server) int {
	t.Helper()
	list, err := s.Admin().Do(context.Background(), "client", "list", "type", "pubsub").Text()
	redistest.Must(t, err)
	return strings.Count(list, "id=")
}

// closeListeners closes the caches, and waits until the servers have no connection that listens.
func closeListeners(t testing.TB, servers []*redistest.Server, caches ...*cachetest.Cache) {
	t.Helper()
	for _, c := range caches {
		_ = c.Close()
	}
	for _, s := range servers {
		redistest.Await(t, "no connection listens", func() bool { return listeners(t, s) == 0 })
	}
}

// A message that is lost, late, repeated or cut short, and a connection that is frozen when the
// message comes, cost the waiter one poll.
//
//fault:lost-wake-ups
//fault:strange-wake-ups
//fault:cut-listener
//fault:frozen-listener
func TestWake_Message(t *testing.T) {
	for name, action := range map[string]redistest.Action{
		"lost":                 redistest.DropMessage,
		"late":                 redistest.HoldReply,
		"repeated":             redistest.Twice,
		"cut short":            redistest.ResetReply,
		"lost with the rest":   redistest.DropReply,
		"connection is frozen": redistest.MuteReply,
	} {
		t.Run(name, func(t *testing.T) {
			s, p := start(t)
			a, b := newListeners(t, s.Client(t), p.Client(t))
			rule := p.OnMessage(a.LockKey("k"), action).Times(1)
			w := startWaiting(t, s, a, b, "k")
			w.awaitListening(s)
			w.end()
			awaitHit(t, rule)
			rule.Release()
			startWaiting(t, s, a, b, "afterwards").end()
			wantNoErrors(a, b)
			closeListeners(t, []*redistest.Server{s}, a, b)
		})
	}
}

// A waiter that cannot open a connection to listen polls. It listens as soon as it can.
//
//fault:cut-listener
//fault:frozen-listener
func TestWake_ConnectionRefused(t *testing.T) {
	onSubscribe := func(action redistest.Action) func(p *redistest.Proxy, _ *atomic.Int64) (func() int, func()) {
		return func(p *redistest.Proxy, _ *atomic.Int64) (func() int, func()) {
			rule := p.On(redistest.Command("ssubscribe"), action)
			return rule.Fired, func() { rule.Times(0) }
		}
	}
	// Each begins a fault, and returns how often it has come about, and what ends it.
	for name, begin := range map[string]func(p *redistest.Proxy, refused *atomic.Int64) (times func() int, end func()){
		"refused": func(p *redistest.Proxy, refused *atomic.Int64) (func() int, func()) {
			p.Refuse(true)
			return func() int { return int(refused.Load()) }, func() { p.Refuse(false) }
		},
		"closed":    onSubscribe(redistest.CloseBefore),
		"swallowed": onSubscribe(redistest.DropRequest),
	} {
		t.Run(name, func(t *testing.T) {
			s, p := start(t)
			var refused atomic.Int64 // dials
			one := func(o *redis.Options) { o.PoolSize = 1 }
			dial := func(o *redis.Options) {
				o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := new(net.Dialer).DialContext(ctx, network, addr)
					if err != nil {
						refused.Add(1)
					}
					return conn, err
				}
			}
			a, b := newListeners(t, s.Client(t, one), p.Client(t, one, dial))
			a.MustLoad("before")
			b.WantHit("before") // each has the connection for its commands
			times, end := begin(p, &refused)
			for _, key := range []string{"k1", "k2"} {
				waits := startWaiting(t, s, a, b, key)
				redistest.Await(t, "the fault comes about", func() bool { return times() > 0 })
				waits.end()
			}
			waits := startWaiting(t, s, a, b, "k3")
			if n := subscribers(t, s, waits.channel); n != 0 {
				t.Errorf("%d connections listen in spite of the fault", n)
			}
			end()
			waits.awaitListening(s)
			waits.end()
			wantNoErrors(a, b)
			closeListeners(t, []*redistest.Server{s}, a, b)
		})
	}
}

// info returns a number of a section of INFO.
func info(t testing.TB, s *redistest.Server, section, field string) (n int) {
	t.Helper()
	text, err := s.Admin().Info(context.Background(), section).Result()
	_, number, found := strings.Cut(text, field+":")
	if err != nil || !found {
		t.Fatalf("INFO %s has no %s: %v", section, field, err)
	}
	fmt.Sscan(number, &n)
	return n
}

// A waiter whose slot moves to another node gets its value. Later waiters listen at the new node.
//
//fault:moved-slot
func TestWake_MovedSlot(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	client := cluster.Client(t)
	a, b := newListeners(t, cluster.Client(t), client)
	from := cluster.Owner(t, a.ValueKey("k"))
	b.WantMiss("k") // so that its client knows the nodes
	w := startWaiting(t, from, a, b, "k")
	w.awaitListening(from)
	move := cluster.Move(t, a.ValueKey("k"))
	move.End()
	redistest.Await(t, "the old node ends the subscription", func() bool { return subscribers(t, from, w.channel) == 0 })
	w.end()
	if owner := cluster.Owner(t, a.ValueKey("k")); owner != move.To {
		t.Error("the slot has not changed its node")
	}

	redistest.Await(t, "the client knows the new node", func() bool {
		client.ReloadState(context.Background())
		master, err := client.MasterForKey(context.Background(), w.channel)
		return err == nil && master.Options().Addr == move.To.Addr
	})
	redistest.Must(t, a.Delete(t.Context(), "k"))
	w = startWaiting(t, move.To, a, b, "k")
	w.awaitListening(move.To)
	w.end()
	closeListeners(t, cluster.Nodes, a, b)
}
