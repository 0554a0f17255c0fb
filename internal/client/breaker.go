package client

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/foreign"
)

// A breaker spares callers the wait for a node that does not answer. All caches and locks on one client
// share it: what one of them learns protects all. It opens after Limit failures in a row, or after one
// failure and an unanswered ping, if no answer has come for as long as a command may take. Quick failures
// alone, as from a server that is restarting, cost callers nothing. Then the caches probe the node in the
// background until it answers, so that no caller has to try. A command whose caller has left counts by its
// own outcome, whatever the caller's deadline was. Any answer closes the breaker.
//
// Caches may differ in how long they wait. A cache whose Timeout was not answered opens the breaker for all
// caches with the same or a shorter Timeout: a hasty cache does not make a patient cache believe that a slow
// node is dead.
//
// The breaker has no half-open state. To try a dead server with a caller's command would cost that
// caller RedisTimeout. A probe asks in the background. The breaker needs silence as well as
// failures: a restart of the server fails many commands quickly, and is over soon.
//
// One failure is enough if a ping was not answered either. When a command has waited for half of
// RedisTimeout and the server has answered nothing since, the cache sends a ping. It counts as
// unanswered after a quarter, until its answer comes, so that a slow command alone opens no
// breaker. So a caller that asks several caches, one after the other, waits for RedisTimeout once.
// The command that failed may have been sent before the last answer: then the breaker opens
// RedisTimeout after that answer (expect), and not when commands that its caller and others have
// sent since have failed, too. See TestBreaker_OneCaller, TestBreaker_AfterTheLastAnswer,
// TestBreaker_SlowPing, TestBreaker_Opens, TestBreaker_Closes.
type breaker struct {
	outage  atomic.Pointer[outage] // nil: closed; set with server.mu
	opening atomic.Pointer[chan struct{}]
}

// An outage is a silence of a node.
//
// An opening breaker releases waiting callers. Their commands go on, and count by their own
// outcome, like commands of callers that have left; Close waits for them. With
// ContextTimeoutEnabled a command runs in its caller's goroutine, where nothing can interrupt it.
// So while other commands are on their way and none has been answered, it gets a goroutine, as
// without the option. A command is not repeated while the breaker is open (Again). A caller that
// has found the breaker closed does not wait either if it has opened before the command was sent
// (Spared). See TestBreaker_OpensForThoseThatWait, TestBreaker_OpensBeforeTheCommand,
// TestReachable_BreakerOpens, TestBreaker_FirstRequests, TestServer_SilentForAnyCall.
type outage struct {
	err  error           // that opened the breaker
	key  string          // of its command
	over context.Context // ends when the node has answered
	end  func()          // ends over

	patience atomic.Int64 // the longest Timeout that has passed without an answer
	probes   atomic.Int64 // caches that probe the node
}

// shows records that a cache got no answer within d. It returns false if that, or a longer wait,
// was known.
func (o *outage) shows(d time.Duration) bool {
	for known := o.patience.Load(); known < int64(d); known = o.patience.Load() {
		if o.patience.CompareAndSwap(known, int64(d)) {
			return true
		}
	}
	return false
}

// Limit is how many failures in a row open a breaker.
const Limit = 5

// away returns the outage of a node if a cache with the same or a longer Timeout got no answer. A lock, which
// does not probe, relies on the breaker only while a cache does.
//
// A patient cache asks for itself. A cache with a short RedisTimeout opens the breaker for those
// that are no more patient. The others send a ping, and believe it when that was not answered
// within their own time. See TestBreaker_TooSlowForOne and TestBreaker_SharedByHastyAndPatient.
func (c *Client) away(n *node) *outage {
	o := n.outage.Load()
	if o == nil || o.patience.Load() < int64(c.Timeout) || c.background == nil && o.probes.Load() == 0 {
		return nil
	}
	return o
}

// refusal returns an error if the breaker is open. It sends no command.
func (c *Client) refusal(n *node) error {
	o := c.away(n)
	if o == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrAway, o.err)
}

// opens returns a channel that is closed when the breaker opens, perhaps only for others.
func (s *server) opens() <-chan struct{} { return *s.opening.Load() }

// opened tells those that wait for it that the breaker has opened for more of them.
func (s *server) opened() { close(*s.opening.Swap(new(make(chan struct{})))) }

// least returns how long a command is given at least: see limit.
func (c *Client) least() time.Duration { return c.Timeout - c.Timeout/16 }

// Away reports whether the breaker of key's node is open, so that the node must not be asked.
func (c *Client) Away(key string) bool { return c.away(c.nodeOf(key)) != nil }

// Refusal returns the error that opened the breaker of key's node, or nil if it is closed.
func (c *Client) Refusal(key string) error { return c.refusal(c.nodeOf(key)) }

// Refused is Refusal for a command that then is not sent.
func (c *Client) Refused(key string) error {
	if err := c.Refusal(key); err != nil {
		return unsent{err}
	}
	return nil
}

// Again returns a function for [Retry] that reports whether to repeat a command on key's node for a caller that waits:
// it was not answered, and the breaker is closed.
func (c *Client) Again(key string) func(err error) bool {
	return func(err error) bool { return Unreachable(err) && !errors.Is(err, ErrAway) && !c.Away(key) }
}

// Gone reports whether a breaker stays open because the user has closed the client.
func (c *Client) Gone() bool { return c.closed.Err() != nil }

// AnyAway reports whether the breaker of any node is open.
func (c *Client) AnyAway() bool { return c.nodes.open.Load() > 0 }

// Silent reports whether the node of key has not answered for as long as a command may take. Even then, one
// unanswered command does not show an outage.
func (c *Client) Silent(key string) bool {
	s := c.nodeOf(key).server
	return s.silentSince(s.begun) >= c.least()
}

// yieldToReaders is called before a command counts as unanswered. With thousands of runnable
// goroutines, the answer may have come to a goroutine that has not run yet, since timers overtake
// it. The first Gosched lets the scheduler poll the network, the second lets the readers run.
func yieldToReaders() {
	runtime.Gosched()
	runtime.Gosched()
}

// noteFailure counts a command that was not answered, and opens the breaker when it has to. It
// returns false if another command has opened it.
//
// A failure counts at once only if its command was sent after the last answer. Commands share a
// limit and fail together; an answer after they were sent proves more than they do. A failure that
// is noticed much later than RedisTimeout does not count either: this process was held up. See
// TestBreaker_VolleyAroundAnAnswer, TestBreaker_FailureBeforeAnAnswer, TestBreaker_HeldUpProcess.
func (c *Client) noteFailure(call call, err error) bool {
	n := call.node
	if c.stalled(time.Since(call.sent)) {
		return true
	}
	failures, since := n.noteFailure(call.sent)
	if failures == 0 {
		c.expect(n, err, call.Key)
		return true
	}
	if failures < Limit && !n.mute() || time.Since(n.begun)-since < c.least() {
		return true
	}
	return c.open(n, err, call.Key)
}

// expect is called when a command has failed that was sent before the last answer. If that stays the last one, the
// breaker opens when all commands sent after it have had their time, as by the failure of the first of them: perhaps
// none was, and the caller goes on with its next command. A ping must not have been answered either, and it must have
// had as much time as one for a command that fails: half of a command's, see doubt.
func (c *Client) expect(n *node, err error, key string) {
	if n.limit.half == nil { // it sends no pings
		return
	}
	answered, known := n.answered.Load(), n.overtaken.Load()
	if known == answered || !n.overtaken.CompareAndSwap(known, answered) {
		return
	}
	last := n.begun.Add(time.Duration(answered))
	asks := last.Add(c.Timeout / 2)
	time.AfterFunc(time.Until(asks), func() { c.doubt(n, last) })
	time.AfterFunc(time.Until(last.Add(c.Timeout)), func() {
		yieldToReaders()
		asked := n.doubted.Load()
		if n.mute() && n.answered.Load() == answered && !c.stalled(time.Since(last)) &&
			asked > answered && time.Duration(asked) <= asks.Sub(n.begun)+c.Timeout/16 {
			c.open(n, err, key)
		}
	})
}

// open opens the breaker for all caches and locks that are no more patient, unless an answer has come just now. It
// returns false if it is open for them already.
func (c *Client) open(n *node, err error, key string) bool {
	o, begins := n.open(err, key, c.Timeout)
	if n.silentSince(n.begun) < c.least() { // the answer may not have met the outage
		n.close(o)
		return true
	}
	if !begins && !o.shows(c.Timeout) {
		return c.away(n) == nil
	}
	n.opened() // before caches hear of it, which may take long
	if !begins {
		return true
	}
	for _, u := range n.watchers() {
		if u != n {
			u.client.watch(u, o, false)
		}
	}
	if n.client != nil {
		c.watch(n, o, true)
	}
	return true
}

// open opens the breaker, since a cache got no answer within d. It returns the outage, which others may have noticed
// before.
func (s *server) open(err error, key string, d time.Duration) (o *outage, begins bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o = s.outage.Load(); o != nil {
		return o, false
	}
	o = &outage{err: err, key: key}
	o.over, o.end = context.WithCancel(context.Background())
	o.patience.Store(int64(d)) // before others see it: the cache that begins an outage has it watched
	s.outage.Store(o)
	return o, true
}

// close closes the breaker, since the node has answered.
func (s *server) close(o *outage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.outage.CompareAndSwap(o, nil) {
		o.end()
	}
}

// watch has a cache probe a node until its silence is over. The cache that has noticed the outage reports
// it at once.
func (c *Client) watch(n *node, o *outage, noticed bool) {
	if n.watched.Swap(o) == o {
		return
	}
	c.background(func(closing <-chan struct{}) {
		if o.probes.Add(1) == 1 {
			n.opened() // for locks, which rely on the breaker from now on
		}
		defer func() {
			if o.probes.Add(-1) == 0 && over(closing) { // nobody would notice its end any more
				n.close(o)
			}
		}()
		c.recover(n, o, noticed, closing)
	})
	if noticed {
		c.tell(o)
	}
}

// tell reports an outage, and its end at once, also while a probe is on its way.
//
// A panic of Trace.BreakerChanged is recovered and reported as a RedisError. A panic in another
// function of Trace may end the process. This function is also called in the background when Redis
// comes back, the worst time for a crash. See TestBreaker_PanickingTrace.
func (c *Client) tell(o *outage) {
	c.change(+1, o.err)
	c.background(func(closing <-chan struct{}) {
		select {
		case <-o.over.Done():
		case <-c.closed.Done():
		case <-closing:
		}
		if o.over.Err() != nil {
			c.change(-1, nil)
		}
	})
}

// stalled reports whether something that should end after c.Timeout ended so much later that this
// process itself must have been stalled. The answer may have come in time, so its absence proves
// nothing.
func (c *Client) stalled(took time.Duration) bool { return took > c.Timeout+c.Timeout/10 }

// recover probes the node until it answers in any way, which closes its breaker. It also closes it when
// the Cluster has another node in place of this one. It gives up when its owner closes, or when the user
// has closed the client.
func (c *Client) recover(n *node, o *outage, told bool, closing <-chan struct{}) {
	begun, tick := time.Now(), time.NewTicker(c.Timeout)
	defer tick.Stop()
	for first := true; !over(closing) && o.over.Err() == nil; first = false {
		if !told && c.away(n) == o {
			told = true
			c.tell(o)
		}
		if told || !first { // otherwise a hasty cache has opened it, and this one asks for itself
			select {
			case <-closing:
			case <-o.over.Done():
			case <-tick.C:
			}
			if over(closing) || o.over.Err() != nil { // a probe may take a whole tick, so that several are ready
				return
			}
		}
		switch err := c.probe(n, o, closing); {
		case errors.Is(err, redis.ErrClosed):
			c.setClosed()
			return
		case Unreachable(err) && time.Since(begun) >= c.least() && !over(closing):
			if o.shows(c.Timeout) {
				n.opened()
			}
		}
	}
}

func over(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// probe asks a node for an answer, unless the Cluster has another one in its place. A cache that closes does not wait
// for the probes of others.
func (c *Client) probe(n *node, o *outage, closing <-chan struct{}) error {
	if c.nodeOf(o.key).server != n.server {
		n.close(o)
		return nil
	}
	waiting, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-closing:
			cancel()
		case <-waiting.Done():
		}
	}()
	return c.reach(context.Background(), waiting, n, time.Now(), waiting.Err)
}

// changes queues reports that a first breaker opened, or that the last one closed. Reports are made
// one at a time and in order, by the goroutine that finds none in progress: the user's function may
// take its time, and may cause another change.
type changes struct {
	mu        sync.Mutex
	pending   []error // why the first one opened; nil: the last one closed; protected by mu
	reporting bool    // protected by mu
}

func (c *Client) change(by int64, why error) {
	q := &c.changes
	q.mu.Lock()
	defer q.mu.Unlock()
	if open := c.nodes.open.Add(by); open == 0 || by > 0 && open == 1 {
		q.pending = append(q.pending, why)
	}
	if q.reporting {
		return
	}
	q.reporting = true
	defer func() { q.reporting = false }()
	for len(q.pending) > 0 {
		why := q.pending[0]
		q.pending = q.pending[1:]
		func() {
			q.mu.Unlock()
			defer q.mu.Lock()
			c.report(why)
		}()
	}
}

// report calls the user's function. If it panics, perhaps in a background goroutine, the breaker
// goes on, and the panic is reported as an error.
func (c *Client) report(why error) {
	defer func() {
		if p := recover(); p != nil {
			c.failed(context.Background(), "ping", fmt.Errorf("reporting that the breaker is open (%t) panicked: %s", why != nil, foreign.Text(p)))
		}
	}()
	c.changed(why)
}
