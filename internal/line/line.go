// Package line tells whether a server answers.
package line

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"weak"
)

// A Server is the other end of a Line.
type Server interface {
	// Ping returns nil if the server serves: an error reply may show that, too. key is of a command that was not
	// answered, or empty. While the line is away, Ping tries each connection that lies idle.
	Ping(ctx context.Context, key string, away bool) error

	// Explain returns the error of a command that got no answer for some time.
	Explain(err error, within time.Duration) error
}

// ErrGone is what Ping returns when the user's client has been closed, so that the line is of no use.
var ErrGone = errors.New("the client is closed")

// ErrUnknown is in place of the error of a command whose reply shows nothing: the client had it in memory.
var ErrUnknown = errors.New("the reply is not of the server")

// A Line is what this process knows of one server through one client, for all users of that client. It answers one
// question: has the server answered anything since a command was sent that is still owed an answer?
//
//  1. A silence begins when the first command is sent of those sent since the last answer. An answer ends it. If other
//     commands are on their way, the next silence begins at that moment. A failure without an answer changes nothing.
//  2. A watcher watches a silence. At half of a user's Timeout it pings; a ping that fails at once is sent again. At
//     Timeout, if no ping has been answered and the first one has had a quarter of the time, the line is away for users
//     with this Timeout or a shorter one: callers that wait are released, and nothing is sent but pings, about a
//     Timeout apart. They are not regular, or they might miss a server that comes and goes regularly.
//  3. Only an answer that shows that the server serves counts. LOADING, CLUSTERDOWN and MASTERDOWN do not.
//  4. A watcher that wakes up too late was held up, with this process. Answers may be about to arrive. It begins
//     to measure again, unless the line is away: then it pings.
//
// So a request that asks several caches in turn waits for a silent server once, and a restart of the server, which
// fails many commands quickly, sends no caller away.
type Line struct {
	server Server

	mu       sync.Mutex
	users    []weak.Pointer[User]
	flying   int // commands that were sent, and have neither been answered nor failed
	silence  silence
	key      string        // of the last command that began a silence, or failed
	answered time.Time     // when the last answer came; zero: none has
	opened   chan struct{} // closed when the line goes away, perhaps only for users with less time
	watcher  *watcher      // nil: there is none

	outage atomic.Pointer[Outage] // nil: the line is not away; written with mu
}

// A silence is zero if the server owes no answer.
type silence struct {
	since  time.Time
	err    error     // of the last command that has failed, or else of a ping
	asked  time.Time // when the first ping was sent; zero: none was
	pinged time.Time // when the last ping was sent
	again  time.Time // when to ping again; zero: when the last ping has failed
}

// A watcher looks at a silence when something is due. It is a timer, and no goroutine, so it keeps no bubble of a test
// from ending.
type watcher struct {
	timer *time.Timer
	pings context.Context // ends with it
	end   func()
}

// A User sends commands over a Line.
type User struct {
	Timeout time.Duration
	Away    func(o *Outage) // is called when the line goes away for the user; it must not wait
}

// An Outage lasts until the server answers.
type Outage struct {
	Err  error         // that began it
	Over chan struct{} // closed when it is over

	within atomic.Int64 // the longest Timeout of users for whom the line is away
}

// New returns a line to a server.
func New(server Server) *Line {
	return &Line{server: server, opened: make(chan struct{})}
}

// Join adds a user, which the line does not keep alive.
func (l *Line) Join(u *User) {
	l.mu.Lock()
	l.users = append(l.users, weak.Make(u))
	o := l.Away(u.Timeout)
	l.watch() // the user may have less time than the others
	l.mu.Unlock()
	if o != nil {
		u.Away(o)
	}
}

// Leave removes a user. The last one ends the watch and the outage, whose end no user would notice.
func (l *Line) Leave(u *User) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.users = slices.DeleteFunc(l.users, func(p weak.Pointer[User]) bool { return p.Value() == u })
	l.watch()
}

// Send notes that a command is sent at a time. It returns when the silence began in which it is sent.
func (l *Line) Send(key string, at time.Time) (since time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.flying++; l.silence.since.IsZero() {
		l.silence.since, l.key = later(at, l.answered), cmp.Or(key, l.key)
	}
	if l.watcher == nil {
		l.watch()
	}
	return l.silence.since
}

// Done notes the outcome of a command that was sent: an answer that shows that the server serves, or an error.
func (l *Line) Done(key string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flying--
	switch {
	case err == nil:
		l.serves()
	case err != ErrUnknown:
		l.silence.err, l.key = err, cmp.Or(key, l.key)
	case l.flying == 0 && l.silence.err == nil && l.within() == 0:
		l.silence = silence{}
	}
}

// Away returns the outage for users with a Timeout, or nil.
func (l *Line) Away(timeout time.Duration) *Outage {
	if o := l.outage.Load(); o != nil && int64(timeout) <= o.within.Load() {
		return o
	}
	return nil
}

// Opened returns a channel that is closed when the line goes away next, perhaps only for users with less time.
func (l *Line) Opened() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.opened
}

// Last returns when the last answer came, or zero.
func (l *Line) Last() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.answered
}

// Silence returns for how long the server has owed an answer.
func (l *Line) Silence() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.silence.since.IsZero() {
		return 0
	}
	return time.Since(l.silence.since)
}

// serves notes an answer.
func (l *Line) serves() {
	l.answered, l.silence = time.Now(), silence{}
	if l.flying > 0 {
		l.silence.since = l.answered
	}
	l.end()
}

// end ends the outage.
func (l *Line) end() {
	if o := l.outage.Swap(nil); o != nil {
		close(o.Over)
		l.watch() // the next silence may have begun
	}
}

// watch sets the timer to what is due next. If nothing is, it ends the watch, and the outage, whose end no user would
// notice.
func (l *Line) watch() {
	at, _ := l.due()
	switch w := l.watcher; {
	case w == nil && !at.IsZero():
		l.watcher = newWatcher(time.Until(at), l.look)
	case w != nil && !at.IsZero():
		w.timer.Reset(time.Until(at))
	case w != nil:
		w.timer.Stop()
		w.end()
		l.watcher = nil
		l.end()
	}
}

func newWatcher(after time.Duration, look func()) *watcher {
	w := &watcher{timer: time.AfterFunc(after, look)}
	w.pings, w.end = context.WithCancel(context.Background())
	return w
}

func (l *Line) look() {
	l.Look()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watch()
}

// due returns when to look next, and if the line goes away then, for users with which Timeout. Zero: nothing is owed,
// or no user is left.
func (l *Line) due() (at time.Time, away time.Duration) {
	s, within := &l.silence, l.within()
	next, longest := l.timeouts(within)
	switch {
	case s.since.IsZero() || longest == 0:
		return time.Time{}, 0
	case s.asked.IsZero():
		return s.since.Add(cmp.Or(within, next) / 2), 0
	case next == 0:
		return s.again, 0
	}
	judged := later(s.since.Add(next), s.asked.Add(next/4))
	if !s.again.IsZero() && s.again.Before(judged) {
		return s.again, 0
	}
	return judged, next
}

// within returns the longest Timeout of users for whom the line is away, or 0.
func (l *Line) within() time.Duration {
	if o := l.outage.Load(); o != nil {
		return time.Duration(o.within.Load())
	}
	return 0
}

// timeouts returns the next longer Timeout of a user, or 0, and the longest one.
func (l *Line) timeouts(above time.Duration) (next, longest time.Duration) {
	l.users = slices.DeleteFunc(l.users, func(p weak.Pointer[User]) bool {
		u := p.Value()
		if u != nil {
			longest = max(longest, u.Timeout)
			if u.Timeout > above && (next == 0 || u.Timeout < next) {
				next = u.Timeout
			}
		}
		return u == nil
	})
	return next, longest
}

// Look does what is due. The watcher calls it in time, and a command that has waited for as long as it may, to learn
// whether the line is away.
func (l *Line) Look() {
	// With thousands of runnable goroutines, an answer may have come to a goroutine that has not run yet, since timers
	// overtake it. The first Gosched lets the scheduler poll the network, the second lets the readers run.
	runtime.Gosched()
	runtime.Gosched()
	var told []*User
	l.mu.Lock()
	now := time.Now()
	next, _ := l.timeouts(l.within())
	switch at, away := l.due(); {
	case at.IsZero() || now.Before(at): // something was answered
	case (away > 0 || l.within() == 0) && now.Sub(at) > next/10:
		l.silence = silence{since: now}
	case away > 0:
		told = l.leave(away)
		l.ask(now)
	default:
		l.ask(now)
	}
	o := l.outage.Load()
	l.mu.Unlock()
	for _, u := range told {
		u.Away(o)
	}
}

// leave goes away for users with a Timeout, and returns those for whom it was not away.
func (l *Line) leave(timeout time.Duration) (told []*User) {
	was, o := l.within(), l.outage.Load()
	if o == nil {
		o = &Outage{Over: make(chan struct{})}
		if o.Err = l.silence.err; o.Err == nil {
			o.Err = l.server.Explain(context.DeadlineExceeded, timeout)
		}
	}
	o.within.Store(int64(timeout))
	l.outage.Store(o)
	close(l.opened)
	l.opened = make(chan struct{})
	for _, p := range l.users {
		if u := p.Value(); u != nil && was < u.Timeout && u.Timeout <= timeout {
			told = append(told, u)
		}
	}
	return told
}

// ask sends a ping.
func (l *Line) ask(now time.Time) {
	s, within := &l.silence, l.within()
	if s.asked.IsZero() {
		s.asked = now
	}
	s.pinged, s.again = now, time.Time{}
	if within > 0 {
		s.again = now.Add(within * 9 / 8)
	}
	key, away, pings := l.key, within > 0, l.watcher.pings
	_, longest := l.timeouts(0)
	go func() {
		ctx, cancel := context.WithTimeout(pings, longest)
		defer cancel()
		err := l.server.Ping(ctx, key, away)
		if pings.Err() == nil {
			err = cmp.Or(err, ctx.Err()) // an answer that comes too late shows nothing
			l.pinged(now, l.server.Explain(err, longest))
		}
	}()
}

// pinged notes the outcome of a ping.
func (l *Line) pinged(sent time.Time, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := &l.silence
	switch {
	case err == nil:
		l.serves()
	case errors.Is(err, ErrGone):
		l.users = nil
		l.watch()
	case sent.Before(l.answered), s.pinged.After(sent): // it was sent in another silence, or is not the last one
	default:
		if s.err == nil {
			s.err = err
		}
		if within := l.within(); within > 0 {
			s.again = sent.Add(within*3/4 + rand.N(within/2))
		} else {
			next, _ := l.timeouts(0)
			s.again = time.Now().Add(next / 8)
		}
		l.watch()
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
