package wake_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
	"github.com/singlefill/singlefill/internal/wake"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// An ear counts the calls of a subscription.
type ear struct {
	*wake.Subscription
	messages, changes atomic.Int64
}

// listen listens until the test ends, and then closes the connection of l, if this is the last one.
func listen(t testing.TB, l *wake.Listener, name string) *ear {
	e := new(ear)
	e.Subscription = l.Listen(name, func(_ string, ok bool) {
		if ok {
			e.messages.Add(1)
		} else {
			e.changes.Add(1)
		}
	})
	t.Cleanup(func() {
		e.Close()
		l.CloseIdle()
	})
	return e
}

func (e *ear) complete() bool { return e.Complete(time.Now()) }

// publish publishes as the scripts do.
func publish(t testing.TB, rdb redis.UniversalClient, name string) {
	t.Helper()
	if err := rdb.Eval(context.Background(), wake.Lua+"wake(KEYS[1], 'm') return 1", []string{name}).Err(); err != nil {
		t.Error(err)
	}
}

// Every server sends a message to all Subscriptions of its channel, and to no other.
func TestListener_Hears(t *testing.T) {
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		if _, cluster := rdb.(*redis.ClusterClient); cluster {
			t.Skip("the cache listens at each node: see TestListener_Cluster")
		}
		l := wake.New(rdb)
		ns := redistest.Namespace(t)
		redistest.Planted(t, ns)
		a, b, other := listen(t, l, ns+"a"), listen(t, l, ns+"a"), listen(t, l, ns+"b")
		redistest.Await(t, "all are complete", func() bool { return a.complete() && b.complete() && other.complete() })
		publish(t, rdb, ns+"a")
		redistest.Await(t, "both get the message", func() bool { return a.messages.Load() == 1 && b.messages.Load() == 1 })
		if n := other.messages.Load(); n != 0 {
			t.Errorf("another channel got %d messages", n)
		}
	})
}

// However many channels there are, they share one connection, which is closed with the last one.
func TestListener_OneConnection(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	dialled := make(chan struct{})
	l := wake.New(s.Client(t, func(o *redis.Options) {
		o.OnConnect = func(context.Context, *redis.Conn) error { <-dialled; return nil }
	}))
	var ears []*ear
	for i := range 3000 {
		ears = append(ears, listen(t, l, fmt.Sprint("c", i)))
	}
	close(dialled)
	redistest.Await(t, "all are complete", func() bool {
		return !slices.ContainsFunc(ears, func(e *ear) bool { return !e.complete() })
	})
	if n := subscribers(t, s); n != 1 {
		t.Errorf("%d connections listen, want 1", n)
	}
	if n := s.Calls("ssubscribe"); n > 1+3 { // those before the connection was dialled, and a thousand each
		t.Errorf("%d commands for 3000 channels", n)
	}
	l.CloseIdle()
	if n := subscribers(t, s); n != 1 {
		t.Errorf("%d connections listen while somebody does, want 1", n)
	}
	for _, e := range ears {
		e.Close()
	}
	l.CloseIdle()
	redistest.Await(t, "the connection is closed", func() bool { return subscribers(t, s) == 0 })
}

func subscribers(t testing.TB, s *redistest.Server) int {
	list, err := s.Admin().Do(context.Background(), "client", "list", "type", "pubsub").Text()
	redistest.Must(t, err)
	return strings.Count(list, "id=")
}

// A channel without a Subscription is unsubscribed, and the connection without a channel is closed.
func TestListener_Idle(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		l := wake.New(rdb)
		a, b := listen(t, l, "a"), listen(t, l, "b")
		synctest.Wait()
		a.Close()
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if channels := m.PubSubChannels(""); len(channels) != 1 || channels[0] != "b" || !b.complete() {
			t.Errorf("subscribed are %q, want b", channels)
		}
		b.Close()
		time.Sleep(13 * time.Second)
		synctest.Wait()
		if n := m.CurrentConnectionCount(); n != 0 {
			t.Errorf("%d connections are open", n)
		}
		again := listen(t, l, "a")
		synctest.Wait()
		time.Sleep(time.Nanosecond)
		if !again.complete() {
			t.Error("no Subscription is complete any more")
		}
	})
}

// Who listens again soon finds the channel subscribed.
func TestListener_KeepsSubscription(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		l := wake.New(rdb)
		listen(t, l, "a").Close()
		synctest.Wait()
		time.Sleep(time.Nanosecond)
		commands := m.CommandCount()
		again := listen(t, l, "a")
		if !again.complete() || m.CommandCount() != commands {
			t.Errorf("complete: %t, after %d commands", again.complete(), m.CommandCount()-commands)
		}
	})
}

// When a connection breaks, its Subscriptions are notified, and not complete until the next one has
// subscribed.
//
//fault:cut-listener
func TestListener_ConnectionBreaks(t *testing.T) {
	for name, breaks := range map[string]func(t *testing.T, s *redistest.Server){
		"killed": func(t *testing.T, s *redistest.Server) {
			redistest.Do(t, s.Admin(), "client", "kill", "type", "pubsub")
		},
		"too slow": func(t *testing.T, s *redistest.Server) { // the server closes it when its buffer overflows
			redistest.Do(t, s.Admin(), "config", "set", "client-output-buffer-limit", "pubsub 1 1 1")
			redistest.Do(t, s.Admin(), "spublish", "a", strings.Repeat("x", 100<<10))
		},
		"restarted": func(_ *testing.T, s *redistest.Server) {
			s.Kill()
			s.Restart()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			l := wake.New(s.Client(t))
			e := listen(t, l, "a")
			redistest.Await(t, "it is complete", e.complete)
			changes := e.changes.Load()
			breaks(t, s)
			redistest.Await(t, "it is told", func() bool { return e.changes.Load() >= changes+2 })
			redistest.Await(t, "it is complete again", e.complete)
			redistest.Do(t, s.Admin(), "config", "set", "client-output-buffer-limit", "pubsub 33554432 8388608 60")
			publish(t, s.Admin(), "a")
			redistest.Await(t, "a message comes", func() bool { return e.messages.Load() > 0 })
		})
	}
}

// A server that refuses a subscription gets no other one for a minute.
//
//fault:lost-wake-ups
func TestListener_Refused(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var tries int
		m.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
			if cmd != "SSUBSCRIBE" {
				return false
			}
			tries++
			c.WriteError("NOPERM this user has no permissions")
			return true
		})
		l := wake.New(rdb)
		for range 100 {
			e := listen(t, l, "a")
			time.Sleep(590 * time.Millisecond)
			if e.complete() {
				t.Error("it is complete")
			}
			e.Close()
		}
		synctest.Wait()
		if tries != 1 {
			t.Errorf("it tried %d times in a minute", tries)
		}
		m.Server().SetPreHook(nil)
		time.Sleep(2 * time.Second)
		e := listen(t, l, "a")
		synctest.Wait()
		time.Sleep(time.Nanosecond)
		if !e.complete() {
			t.Error("it is not complete after a minute")
		}
	})
}

// A connection on which the server leaves a command unanswered is replaced, though others listen on
// it all the time.
func TestListener_Unanswered(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		l := wake.New(rdb)
		a := listen(t, l, "a")
		synctest.Wait()
		var swallowed int
		m.Server().SetPreHook(func(_ *server.Peer, cmd string, _ ...string) bool {
			if cmd == "SUBSCRIBE" {
				swallowed++
			}
			return cmd == "SUBSCRIBE"
		})
		b := listen(t, l, "b")
		synctest.Wait()
		m.Server().SetPreHook(nil)
		time.Sleep(4 * time.Second)
		if swallowed != 1 || !a.complete() || b.complete() {
			t.Errorf("%d commands are unanswered; complete: %t, %t", swallowed, a.complete(), b.complete())
		}
		told := a.changes.Load()
		time.Sleep(3 * time.Second)
		if !a.complete() || !b.complete() || a.changes.Load() != told+2 {
			t.Errorf("complete: %t, %t; a is told %d times", a.complete(), b.complete(), a.changes.Load()-told)
		}
	})
}

// After a message that was lost, there is no subscription for a minute.
func TestListener_Missed(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		l := wake.New(rdb)
		a, b := listen(t, l, "a"), listen(t, l, "b")
		synctest.Wait()
		time.Sleep(time.Nanosecond)
		if !a.complete() || !b.complete() {
			t.Fatal("they are not complete")
		}
		told, begun := b.changes.Load(), time.Now()
		b.Missed(begun)
		publish(t, rdb, "b") // it was only late
		time.Sleep(time.Second)
		if !a.complete() || !b.complete() {
			t.Fatal("they are not complete after a late message")
		}
		a.Missed(begun)
		time.Sleep(time.Second)
		synctest.Wait()
		if a.complete() || b.complete() || b.changes.Load() != told+1 {
			t.Errorf("complete: %t, %t; b is told %d times", a.complete(), b.complete(), b.changes.Load()-told)
		}
		time.Sleep(58 * time.Second)
		if c := listen(t, l, "c"); c.complete() {
			t.Error("somebody listens")
		}
		if n := m.CurrentConnectionCount(); n != 1 {
			t.Errorf("%d connections are open, want that of publish", n)
		}
	})
}
