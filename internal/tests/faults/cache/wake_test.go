package cache_test

import (
	"context"
	"strings"
	"sync"
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
