// Package wake receives wake-ups: messages by which Redis tells those who wait for a key that it is
// worth asking again.
//
// A wake-up is a hint. It may be lost, late, repeated, forged or meant for somebody else: whoever
// gets one asks, and only the answer counts. So whoever waits must also ask without one: rarely
// while its Ear hears, and otherwise as if there were no wake-ups.
//
// The scripts publish on a channel that has the name of the lock's key. In a Cluster it is a sharded
// channel, in the slot of the key.
package wake

import (
	_ "embed"
	"math"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Lua defines wake(channel, message) for the scripts that publish.
//
//go:embed wake.lua
var Lua string

// latest is how much later than the reply to a command a message comes that was published before it,
// unless it is lost. A channel stays subscribed for longer.
const latest = 500 * time.Millisecond

// distrust is how long nobody listens at a server that has let nobody listen, or whose messages get
// lost.
const distrust = time.Minute

// A Listener listens at one server for everybody in this process who waits for one of its keys. It
// has one connection, which it opens for the first Ear, and closes some time after the last one.
type Listener struct {
	rdb redis.UniversalClient

	mu        sync.Mutex
	line      *line // nil: there is no connection
	plain     bool  // the server has no sharded channels
	oneByOne  bool  // it is a node of a Cluster: a command cannot have channels of two slots
	deafUntil time.Time
}

// A channel is one that somebody listens to, or did so a moment ago.
type channel struct {
	ears   map[*Ear]struct{}
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
		if _, mute := muted.Load(user); mute {
			l.deafUntil = time.Now().Add(math.MaxInt64)
		}
	}
	return l
}

var muted sync.Map // of *redis.Client

// Mute makes nobody listen through a client that has not been used yet: waiters only poll. It is for
// tests of polling.
func Mute(rdb *redis.Client) { muted.Store(rdb, true) }

// An Ear is somebody who listens to one channel.
type Ear struct {
	listener *Listener
	name     string
	tell     func(message string, ok bool)
	since    time.Time
}

// Listen makes tell be called with each message on the channel. With ok false it says that the Ear
// begins to hear, or ceases to: see Hears. tell must return at once. It may be called once more
// after Close.
func (l *Listener) Listen(name string, tell func(message string, ok bool)) *Ear {
	e := &Ear{l, name, tell, time.Now()}
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Now().Before(l.deafUntil) {
		return e
	}
	if l.line == nil {
		l.line = newLine(l)
		go l.line.run()
	}
	c := l.line.channels[name]
	if c == nil {
		c = &channel{ears: make(map[*Ear]struct{})}
		l.line.channels[name] = c
		l.line.want(name)
	}
	c.ears[e] = struct{}{}
	return e
}

// Close ends listening.
func (e *Ear) Close() {
	l := e.listener
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.channel(e.name); c != nil {
		delete(c.ears, e)
	}
}

// Hears reports whether the Ear has heard every message since then, as far as the server can be
// trusted.
func (e *Ear) Hears(then time.Time) bool {
	l := e.listener
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.channel(e.name)
	if c == nil || c.state != subscribed || c.since.After(then) || e.since.After(then) {
		return false
	}
	_, listens := c.ears[e]
	return listens
}

// channel returns nil if nobody listens to such a channel. The caller holds mu.
func (l *Listener) channel(name string) *channel {
	if l.line == nil {
		return nil
	}
	return l.line.channels[name]
}

// Missed notes that what the Ear has waited for came without a message since then. If none comes in
// the next moments either, the messages of this server get lost, and for some time nobody listens
// there.
func (e *Ear) Missed(since time.Time) {
	time.AfterFunc(latest, func() {
		if e.missed(since) {
			e.listener.beDeaf()
		}
	})
}

func (e *Ear) missed(since time.Time) bool {
	l := e.listener
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.channel(e.name)
	return c != nil && c.state == subscribed && !c.since.After(since) && c.last.Before(since)
}

func (l *Listener) beDeaf() {
	l.mu.Lock()
	l.deafUntil = time.Now().Add(distrust)
	told := l.hangUp()
	l.mu.Unlock()
	told.tell("", false)
}

// CloseIdle closes the connection if nobody listens.
func (l *Listener) CloseIdle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.line == nil {
		return
	}
	for _, c := range l.line.channels {
		if len(c.ears) > 0 {
			return
		}
	}
	l.hangUp()
}

// Close closes the connection. Whoever listens hears nothing any more.
func (l *Listener) Close() {
	l.mu.Lock()
	told := l.hangUp()
	l.mu.Unlock()
	told.tell("", false)
}

// hangUp closes the connection, and returns those who hear nothing any more. The caller holds mu.
func (l *Listener) hangUp() (deaf ears) {
	if l.line == nil {
		return nil
	}
	for _, c := range l.line.channels {
		deaf = deaf.with(c)
	}
	l.line.close()
	l.line = nil
	return deaf
}

// ears are told without holding mu.
type ears []*Ear

// with adds those who hear a channel.
func (s ears) with(c *channel) ears {
	if c.state != subscribed {
		return s
	}
	for e := range c.ears {
		s = append(s, e)
	}
	return s
}

func (s ears) tell(message string, ok bool) {
	for _, e := range s {
		e.tell(message, ok)
	}
}
