// Package wake receives wake-ups: Pub/Sub messages by which Redis tells the waiters of a key that
// polling it again is worthwhile.
//
// A wake-up is a hint. It may be lost, late, repeated, forged or meant for another waiter: a waiter
// that gets one polls, and only the reply counts. So a waiter must also poll without wake-ups: rarely
// while its Subscription is complete, and otherwise as often as if there were none.
//
// The scripts publish on a channel that has the name of the lock's key. In a Cluster it is a sharded
// channel, in the slot of the key.
package wake

import (
	_ "embed"
	"math"
	"runtime"
	"sync"
	"time"
	"weak"

	"github.com/redis/go-redis/v9"
)

// Lua defines wake(channel, message) for the scripts that publish.
//
//go:embed wake.lua
var Lua string

// latest is how much later than the reply to a command a message may arrive that was published before
// that command. After this time it counts as lost. A channel stays subscribed for longer.
const latest = 500 * time.Millisecond

// disabledFor is how long a Listener does not subscribe after its server has refused a subscription or
// lost a message.
const disabledFor = time.Minute

// A Listener subscribes at one server for all waiters of this process. It has one connection, which it
// opens for the first Subscription, and closes some time after the last one.
type Listener struct {
	rdb redis.UniversalClient

	mu            sync.Mutex
	conn          *connection // nil: there is no connection
	plain         bool        // the server has no sharded channels
	oneByOne      bool        // it is a node of a Cluster: a command cannot have channels of two slots
	disabledUntil time.Time
}

// A channel has Subscriptions, or had one in the last seconds.
//
// A channel stays subscribed for a second or two after the last wait. The next wait for a hot key
// then sends nothing to listen, and all that end in a second are unsubscribed by one command. See
// TestListener_KeepsSubscription.
type channel struct {
	subs   map[*Subscription]struct{}
	state  state
	since  time.Time // when it was subscribed
	last   time.Time // of the messages
	unused bool      // since the last sweep
}

type state int

const (
	wanted     state = iota // to be subscribed
	requested               // the server has not answered
	subscribed              // every message arrives
	refused                 // the server does not send messages of this channel
)

// New returns a Listener at the server of rdb.
func New(rdb redis.UniversalClient) *Listener {
	l := &Listener{rdb: rdb}
	if user, ok := rdb.(*redis.Client); ok {
		if _, mute := muted.Load(weak.Make(user)); mute {
			l.disabledUntil = time.Now().Add(math.MaxInt64)
		}
	}
	return l
}

var muted sync.Map // of weak.Pointer[redis.Client]

// Mute disables the Listener of a client that has not been used yet, so that waiters only poll.
func Mute(rdb *redis.Client) {
	of := weak.Make(rdb)
	muted.Store(of, true)
	runtime.AddCleanup(rdb, func(of weak.Pointer[redis.Client]) { muted.Delete(of) }, of)
}

// A Subscription is one waiter's interest in one channel.
type Subscription struct {
	listener *Listener
	name     string
	notify   func(message string, ok bool)
	since    time.Time
}

// Listen subscribes to a channel, and calls notify with each message on it. It calls notify with ok false
// when the Subscription becomes complete and when it ceases to be: see Complete. notify must return at
// once. It may be called once more after Close.
func (l *Listener) Listen(name string, notify func(message string, ok bool)) *Subscription {
	s := &Subscription{l, name, notify, time.Now()}
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Now().Before(l.disabledUntil) {
		return s
	}
	if l.conn == nil {
		l.conn = newConnection(l)
		go l.conn.run()
	}
	c := l.conn.channels[name]
	if c == nil {
		c = &channel{subs: make(map[*Subscription]struct{})}
		l.conn.channels[name] = c
		l.conn.want(name)
	} else if c.state == refused { // the slot may have come to this node since
		l.conn.want(name)
	}
	c.subs[s] = struct{}{}
	return s
}

// Close ends the Subscription.
func (s *Subscription) Close() {
	l := s.listener
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.channel(s.name); c != nil {
		delete(c.subs, s)
	}
}

// Complete reports whether the Subscription has received every message since then. It does not notice
// a message that the server or the network has lost without an error.
//
// A waiter that listens polls when its subscription is confirmed. What was published between its
// last poll and the subscription is lost to it. After that it polls at the end of the holder's
// lock, or a little after the load should have ended. See TestWake_PublishedBeforeSubscribed and
// TestWake_AtTheStore.
func (s *Subscription) Complete(then time.Time) bool {
	l := s.listener
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.channel(s.name)
	if c == nil || c.state != subscribed || c.since.After(then) || s.since.After(then) {
		return false
	}
	_, listens := c.subs[s]
	return listens
}

// Pending reports whether the server has not answered the Subscription.
func (s *Subscription) Pending() bool {
	l := s.listener
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.channel(s.name)
	return c != nil && (c.state == wanted || c.state == requested)
}

// channel returns nil if there is no such channel. The caller holds mu.
func (l *Listener) channel(name string) *channel {
	if l.conn == nil {
		return nil
	}
	return l.conn.channels[name]
}

// Missed notes that the waiter's load or lease has ended, and that no message has arrived since then.
// If none arrives in the next moments either, this server loses messages, and the Listener is disabled
// for some time.
//
// After one wake-up that did not come, a process does not listen for a minute. Then its waiters
// poll as if there were no wake-ups: the holder may lack the right to publish, or its version of
// singlefill may not publish. A message may come later than the reply to a poll, so half a second
// decides. See TestWake_Lost and TestListener_Missed.
func (s *Subscription) Missed(since time.Time) {
	time.AfterFunc(latest, func() {
		if s.missed(since) {
			s.listener.disable()
		}
	})
}

func (s *Subscription) missed(since time.Time) bool {
	l := s.listener
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.channel(s.name)
	return c != nil && c.state == subscribed && !c.since.After(since) && c.last.Before(since)
}

func (l *Listener) disable() {
	l.mu.Lock()
	l.disabledUntil = time.Now().Add(disabledFor)
	affected := l.disconnect()
	l.mu.Unlock()
	affected.notify("", false)
}

// CloseIdle closes the connection if there is no Subscription.
func (l *Listener) CloseIdle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return
	}
	for _, c := range l.conn.channels {
		if len(c.subs) > 0 {
			return
		}
	}
	l.disconnect()
}

// Close closes the connection. No Subscription is complete any more.
func (l *Listener) Close() {
	l.mu.Lock()
	affected := l.disconnect()
	l.mu.Unlock()
	affected.notify("", false)
}

// disconnect closes the connection, and returns the Subscriptions that were complete. The caller holds
// mu.
func (l *Listener) disconnect() (lost subscriptions) {
	if l.conn == nil {
		return nil
	}
	for _, c := range l.conn.channels {
		lost = lost.with(c)
	}
	l.conn.close()
	l.conn = nil
	return lost
}

// subscriptions are notified without holding mu.
type subscriptions []*Subscription

// with adds the Subscriptions of a channel, if they are complete.
func (s subscriptions) with(c *channel) subscriptions {
	if c.state != subscribed {
		return s
	}
	for e := range c.subs {
		s = append(s, e)
	}
	return s
}

func (s subscriptions) notify(message string, ok bool) {
	for _, e := range s {
		e.notify(message, ok)
	}
}
