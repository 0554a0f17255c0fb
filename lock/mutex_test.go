package lock_test

import (
	"context"
	"embed"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

//go:embed lua/*.lua
var lua embed.FS

const (
	scriptTTL      = 10_000 // ms
	scriptReleased = 2_000
)

// steps runs the scripts of one kind as a Locker does, but for tokens that the test chooses, and in any order: as
// they would arrive when commands are lost, repeated and held up. Of a fair mutex's it does what TryAcquire does.
type steps struct {
	t    testing.TB
	rdb  redis.UniversalClient
	kind string
	name string
	lock string
}

func newSteps(t testing.TB, rdb redis.UniversalClient, kind, name string) *steps {
	return &steps{t, rdb, kind, name, "{" + name + "}:lock"}
}

// token is as long as those of attempts.
func token(who string) string { return (who + strings.Repeat("A", 26))[:26] }

// do returns what the script has answered: acquire's state and number, or the number of the others.
func (s *steps) do(op, who string) (state string, number int64) {
	s.t.Helper()
	state, number, err := s.try(op, who)
	if err != nil {
		s.t.Fatalf("%s by %s: %v", op, who, err)
	}
	return state, number
}

func (s *steps) try(op, who string) (state string, number int64, err error) {
	ended, next := s.lock+":ended", s.lock+":next"
	var keys []string
	args := []any{token(who)}
	file := s.kind
	switch op {
	case "acquire":
		keys = []string{s.lock, s.lock + ":fence", ended}
		args = append(args, scriptTTL, 24*time.Hour.Milliseconds())
	case "renew":
		keys, args = []string{s.lock, ended}, append(args, scriptTTL)
	case "release":
		keys, args = []string{s.lock, ended}, append(args, scriptReleased, 100)
	case "abandon":
		keys, args = []string{s.lock, ended}, append(args, scriptTTL, 100)
	}
	if s.kind != "fair" && (op == "acquire" || op == "abandon") {
		keys = append(keys, next)
	}
	if s.kind != "fair" && op == "acquire" {
		args = append(args, 0, "")
	}
	switch {
	case s.kind == "mutex" && op == "acquire":
		keys = append(keys, s.lock+":queue")
	case s.kind == "semaphore":
		keys = append(keys, s.lock+":details")
		if op == "acquire" {
			args = append(args, 1)
		}
	case s.kind == "fair" && (op == "acquire" || op == "abandon"):
		keys = append(keys, s.lock+":queue", s.lock+":alive")
		if op == "acquire" {
			args = append(args, 5000, 0)
		}
	case s.kind == "fair":
		file = "mutex"
	}
	text, err := lua.ReadFile("lua/" + file + "_" + op + ".lua")
	if err != nil {
		return "", 0, err
	}
	reply, err := redis.NewScript(string(text)).Run(s.t.Context(), s.rdb, keys, args...).Result()
	switch r := reply.(type) {
	case []any:
		return r[0].(string), r[1].(int64), err
	case int64:
		if op == "acquire" {
			return "held", r, err
		}
		return "", r, err
	}
	return "", 0, err
}

func eachScript(t *testing.T, run func(t *testing.T, s *steps)) {
	eachKind(t, func(t *testing.T, kind string) {
		for where, open := range map[string]func(t *testing.T) redis.UniversalClient{
			"mini": func(t *testing.T) redis.UniversalClient { _, c := redistest.StartMini(t); return c },
			"real": func(t *testing.T) redis.UniversalClient { return redistest.Shared(t).Client(t) },
		} {
			t.Run(where, func(t *testing.T) { run(t, newSteps(t, open(t), kind, redistest.Namespace(t))) })
		}
	})
}

//fault:any-order
func TestEveryStepMayBeRepeatedAndMayArriveLate(t *testing.T) {
	for name, script := range map[string]string{ // who, op, answer; "<" after a fence: larger than the last, "=": the same
		"taken twice":                         "A acquire held<, A acquire held=, A acquire held=, B acquire busy",
		"released twice, and by others":       "A acquire held<, B release 0, B renew 0, A release 1, A release 1, A renew 0, B release 0",
		"taken again after a release":         "A acquire held<, A release 1, A acquire refused, B acquire held<, A acquire refused, A release 1, A renew 0, B renew 1",
		"a release that is not the holder's":  "A acquire held<, A release 1, B acquire held<, A release 1, C acquire busy, B release 1, C acquire held<",
		"abandoned before it arrived":         "A abandon 0, A acquire refused, A renew 0, B acquire held<, A acquire refused, A abandon 0, B renew 1",
		"abandoned after it arrived":          "A acquire held<, A abandon 1, A abandon 0, A acquire refused, A renew 0, B acquire held<",
		"abandoned after a release":           "A acquire held<, A release 1, A abandon 0, A acquire refused, B acquire held<, A abandon 0, B renew 1",
		"abandoned by one who has lost":       "A acquire held<, B abandon 0, B acquire refused, A renew 1, A release 1, B acquire refused, C acquire held<",
		"renewed and never brought back":      "A renew 0, B acquire held<, A renew 0, B release 1, B renew 0, A acquire held<, A renew 1, A renew 1",
		"a release that never took it":        "A release 0, A acquire held<, B release 0, A acquire held=",
		"a fence for each grant, and no more": "A acquire held<, B acquire busy, B acquire busy, A renew 1, A acquire held=, A release 1, B acquire held<, B acquire held=",
	} {
		t.Run(name, func(t *testing.T) {
			eachScript(t, func(t *testing.T, s *steps) {
				var fence int64
				for i, step := range strings.Split(script, ", ") {
					word := strings.Fields(step)
					state, number := s.do(word[1], word[0])
					got := state
					if word[1] != "acquire" {
						got = fmt.Sprint(number)
					}
					switch {
					case state == "held" && number > fence:
						got, fence = "held<", number
					case state == "held" && number == fence:
						got = "held="
					case state == "busy" && (number <= 0 || number > scriptTTL):
						t.Errorf("step %d, %s: ask again in %d ms", i, step, number)
					}
					if got != word[2] {
						t.Errorf("step %d, %s: got %s %s, %d", i, step, got, state, number)
					}
					for key, left := range keysOf(t, s.rdb, s.name) {
						if left == -1 {
							t.Errorf("step %d, %s: %q has no TTL", i, step, key)
						}
					}
				}
			})
		})
	}
}

// A server that is short of memory may forget the fence of one who holds the lock, whose reply has been lost.
func TestWhoAsksAgainWhenItsFenceIsLostHoldsTheLockStill(t *testing.T) {
	eachScript(t, func(t *testing.T, s *steps) {
		_, first := s.do("acquire", "A")
		if n := s.rdb.Del(t.Context(), s.lock+":fence").Val(); n != 1 {
			t.Fatalf("%d keys of fences", n)
		}
		state, again := s.do("acquire", "A")
		if state != "held" || again < first {
			t.Errorf("asking again: %s, fence %d after %d", state, again, first)
		}
		if _, same := s.do("acquire", "A"); same != again {
			t.Errorf("and then the fence is %d, after %d", same, again)
		}
		if state, _ := s.do("acquire", "B"); state != "busy" {
			t.Errorf("another one: %s", state)
		}
		if _, released := s.do("release", "A"); released != 1 {
			t.Error("it cannot be released")
		}
		if _, next := s.do("acquire", "C"); next <= again {
			t.Errorf("the next fence is %d, after %d", next, again)
		}
	})
}

// A model of what any of the kinds is, for one holder at a time.
type model struct {
	holder string
	end    time.Time
	fence  int64
	ended  map[string]time.Time // until when it is known to have ended
}

func (m *model) do(op, who string) (state string, number int64) {
	now := time.Now()
	held, ours := now.Before(m.end), now.Before(m.end) && m.holder == who
	tombstone := now.Before(m.ended[who])
	switch op {
	case "acquire":
		switch {
		case tombstone:
			return "refused", 0
		case held && !ours:
			return "busy", m.end.Sub(now).Milliseconds()
		case !held:
			m.holder, m.fence = who, max(m.fence+1, now.UnixMicro())
		}
		m.end = now.Add(scriptTTL * time.Millisecond)
		return "held", m.fence
	case "renew":
		if ours {
			m.end = now.Add(scriptTTL * time.Millisecond)
			return "", 1
		}
		return "", 0
	}
	if ours {
		m.end = now
	}
	if op == "abandon" {
		m.ended[who] = now.Add(scriptTTL * time.Millisecond)
	} else if ours {
		m.ended[who] = now.Add(scriptReleased * time.Millisecond)
	}
	if ours || op == "release" && tombstone {
		return "", 1
	}
	return "", 0
}

// Whatever arrives in whatever order and however late, nobody touches the lease of another: a check and what
// follows from it are one step.
//
//fault:any-order
func TestNoOrderOfStepsStealsOrOutlivesALease(t *testing.T) {
	seed := rand.Uint64()
	eachKindInBubble(t, func(t *testing.T, kind string, _ *miniredis.Miniredis, rdb *redis.Client) {
		s := newSteps(t, rdb, kind, "n")
		m := &model{ended: make(map[string]time.Time)}
		rnd := rand.New(rand.NewPCG(seed, 0))
		seen := make(map[string]int)
		for i := range 1500 {
			who := string(rune('A' + rnd.IntN(3)))
			op := []string{"acquire", "acquire", "renew", "release", "abandon"}[rnd.IntN(5)]
			if rnd.IntN(4) == 0 {
				time.Sleep(time.Duration(rnd.IntN(scriptTTL)) * time.Millisecond)
			}
			if left := time.Until(m.end); left > 0 && rnd.IntN(40) == 0 { // to the very end of the lease, or just before
				time.Sleep(left - time.Duration(rnd.IntN(2))*time.Millisecond)
			}
			state, number := s.do(op, who)
			wantState, want := m.do(op, who)
			if op == "abandon" { // its answer is for nobody: a semaphore's says 1 of a lease that has just ended
				number = want
			}
			if state != wantState || number != want {
				t.Fatalf("seed %d, step %d, %s by %s: %q, %d; want %q, %d", seed, i, op, who, state, number, wantState, want)
			}
			seen[op+state]++
			left := max(0, time.Until(m.end))
			if kind == "semaphore" {
				score, _ := rdb.ZScore(t.Context(), s.lock, token(m.holder)).Result()
				if end := time.UnixMilli(int64(score)); left > 0 && !end.Equal(m.end) {
					t.Fatalf("seed %d, step %d, %s by %s: the lease ends at %v, want %v", seed, i, op, who, end, m.end)
				}
			} else if ttl, _ := rdb.PTTL(t.Context(), s.lock).Result(); max(0, ttl) != left {
				t.Fatalf("seed %d, step %d, %s by %s: the lease ends in %v, want %v", seed, i, op, who, ttl, left)
			}
		}
		for key, left := range keysOf(t, rdb, "n") {
			if left == -1 {
				t.Errorf("seed %d: %q has no TTL", seed, key)
			}
		}
		for _, want := range []string{"acquireheld", "acquirebusy", "acquirerefused"} {
			if seen[want] < 30 {
				t.Errorf("seed %d: %s only %d times", seed, want, seen[want])
			}
		}
	})
}

// takeFor takes the lock as a process would that dies at once.
func takeFor(t testing.TB, rdb redis.UniversalClient, kind, name string) {
	t.Helper()
	if state, _ := newSteps(t, rdb, kind, name).do("acquire", "DEAD"); state != "held" {
		t.Fatal(state)
	}
}

// commands records when the server gets scripts, and with what. Call before the server is asked anything.
type commands struct {
	mu   sync.Mutex
	at   []time.Time // protected by mu
	args [][]string  // protected by mu
	slow time.Duration
}

func record(m *miniredis.Miniredis) *commands {
	c := new(commands)
	m.Server().SetPreHook(func(p *server.Peer, cmd string, args ...string) bool {
		if cmd != "EVALSHA" && cmd != "EVAL" {
			return false
		}
		c.mu.Lock()
		slow := c.slow
		c.at, c.args = append(c.at, time.Now()), append(c.args, append([]string{cmd}, args...))
		c.mu.Unlock()
		time.Sleep(slow)
		return false
	})
	return c
}

func (c *commands) delay(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.slow = d
}

// reset forgets what was sent.
func (c *commands) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at, c.args = nil, nil
}

func (c *commands) times() []time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.at)
}

func (c *commands) all() [][]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.args)
}

// learn makes the server know all scripts, so that each step is one command from here on.
func learn(t testing.TB, rdb redis.UniversalClient, kind string) {
	t.Helper()
	s := newSteps(t, rdb, kind, "learn")
	for _, op := range []string{"acquire", "renew", "release", "abandon"} {
		s.do(op, "A")
	}
}

func TestAWaiterAsksLessAndLessOftenAndTakesOverFromADeadHolderAtItsEnd(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		const life = scriptTTL * time.Millisecond
		c := record(m)
		for i := range 4 {
			name := fmt.Sprint("n", i)
			learn(t, rdb, kind)
			begun := time.Now()
			takeFor(t, rdb, kind, name)
			c.reset()
			lease := mustAcquire(t, newLocker(t, kind, rdb, name, nil))
			// A semaphore's leases end with a millisecond of the server's clock, and so does what is left of them.
			if took := time.Since(begun); took < life-time.Millisecond || took > life+6*time.Millisecond {
				t.Errorf("taken over after %v, want %v and 6ms more at most", took, life)
			}
			at := c.times()
			backoff := 2 * time.Millisecond
			for i := range len(at) - 2 { // the last pause ends with the lease
				if kind == "fair" { // the first in the queue goes by the age of the lease
					backoff = min(max(2*time.Millisecond, at[i].Sub(begun)/8), 100*time.Millisecond)
				}
				if pause := at[i+1].Sub(at[i]); pause < backoff/2 || pause > backoff*3/2 {
					t.Errorf("pause %d is %v, want %v give or take half", i, pause, backoff)
				}
				backoff = min(2*backoff, 100*time.Millisecond)
			}
			if n := len(at); n < 70 || n > 200 {
				t.Errorf("it has asked %d times in %v", n, life)
			}
			mustRelease(t, lease)
		}
	})
}

func TestWaitersDoNotAskInStep(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		takeFor(t, rdb, kind, "n")
		c := record(m)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for range 10 {
			l := newLocker(t, kind, rdb, "n", nil)
			wg.Go(func() {
				_, err := l.Acquire(ctx)
				wantIs(t, "Acquire", err, lock.ErrBusy, context.DeadlineExceeded)
			})
		}
		wg.Wait()
		synctest.Wait()
		together := make(map[time.Time]int)
		for _, at := range c.times() {
			together[at]++
		}
		n := len(c.times())
		if len(together) < n-30 { // all begin together, and all leave together
			t.Errorf("%d commands at %d times", n, len(together))
		}
	})
}

// However long it takes: the end of a wait is that of ctx, no number of tries, and no life of a lease.
func TestAcquireWaitsForAsLongAsItsContextLasts(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, _ *miniredis.Miniredis, rdb *redis.Client) {
		holder := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
		begun := time.Now()
		time.AfterFunc(30*time.Second, func() {
			if err := holder.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
		lease := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
		if took := time.Since(begun); took < 30*time.Second || took > 30*time.Second+150*time.Millisecond {
			t.Errorf("taken over after %v, want 30s and a pause", took)
		}
		mustRelease(t, lease)
	})
}

//fault:cancelled
func TestACallReturnsAtTheInstantAtWhichItsContextEnds(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb, kind)
		holder := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
		var e events
		l := newLocker(t, kind, rdb, "n", &lock.Options{Trace: e.trace()})
		c := record(m)
		for name, slow := range map[string]time.Duration{"in a pause": 0, "in the middle of a command": 400 * time.Millisecond} {
			want := []error{lock.ErrBusy}
			if slow > 0 {
				want[0] = lock.ErrAmbiguous
			}
			for _, d := range []time.Duration{1234567, 50*time.Millisecond + 1, 3*time.Second + 7} {
				if slow > 0 {
					d = slow/4 + d%slow/2
				}
				c.delay(slow)
				begun := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), d)
				_, err := l.Acquire(ctx)
				cancel()
				wantElapsed(t, name+", at the deadline", begun, d)
				wantIs(t, name, err, append(want, context.DeadlineExceeded)...)

				begun = time.Now()
				ctx, cancel = context.WithCancel(t.Context())
				time.AfterFunc(d, cancel)
				_, err = l.Acquire(ctx)
				wantElapsed(t, name+", when cancelled", begun, d)
				wantIs(t, name, err, append(want, context.Canceled)...)
				c.delay(0)
				time.Sleep(time.Minute) // it is cleaned up behind
			}
		}
		if kind == "fair" {
			wantKeys(t, rdb, "n", "", ":fence")
		}
		c.reset()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for what, call := range map[string]func(context.Context) (*lock.Lease, error){"Acquire": l.Acquire, "TryAcquire": l.TryAcquire} {
			if lease, err := call(ctx); lease != nil || err != context.Canceled {
				t.Errorf("%s with a context that has ended: %v, %v", what, lease, err)
			}
		}
		err := l.Do(ctx, func(context.Context) error { t.Error("Do has called"); return nil })
		if n := len(c.all()); n != 0 || err != context.Canceled {
			t.Errorf("with a context that has ended: %d commands, Do says %v", n, err)
		}
		mustRelease(t, holder)
		if s := e.transitions(); s != "" {
			t.Errorf("told %q without a lease", s)
		}
	})
}

func TestAFirstAnswerEndsACallAtItsInstant(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		const slow = 7654321 * time.Nanosecond
		learn(t, rdb, kind)
		holder := newLocker(t, kind, rdb, "held", nil)
		lease := mustAcquire(t, holder)
		foreign := "{foreign}:lock"
		redistest.Planted(t, foreign)
		if err := rdb.RPush(t.Context(), foreign, "x").Err(); err != nil {
			t.Fatal(err)
		}
		c := record(m)
		c.delay(slow)
		for name, call := range map[string]func() error{
			"free": func() error {
				lease, err := newLocker(t, kind, rdb, "free", &lock.Options{TTL: time.Hour}).Acquire(t.Context())
				defer lease.Release(t.Context())
				if n, took := len(c.all()), time.Since(c.times()[0]); n != 1 || took != slow {
					t.Errorf("granted by %d commands, after %v", n, took)
				}
				return err
			},
			"busy": func() error {
				_, err := newLocker(t, kind, rdb, "held", nil).TryAcquire(t.Context())
				if n, took := len(c.all()), time.Since(c.times()[0]); n != 1 || took != slow {
					t.Errorf("ErrBusy by %d commands, after %v", n, took)
				}
				if err != lock.ErrBusy {
					t.Errorf("TryAcquire: %v, want ErrBusy itself", err)
				}
				return nil
			},
			"an error": func() error {
				_, err := newLocker(t, kind, rdb, "foreign", nil).Acquire(t.Context())
				want := 1
				if kind == "fair" {
					want = 2 // it leaves the queue
				}
				if n, took := len(c.all()), time.Since(c.times()[0]); n != want || took != time.Duration(want)*slow || err == nil {
					t.Errorf("%v by %d commands, after %v", err, n, took)
				}
				return nil
			},
		} {
			c.reset()
			if err := call(); err != nil {
				t.Error(name, err)
			}
			time.Sleep(time.Second) // what is done behind the call
		}
		c.delay(0)
		mustRelease(t, lease)
	})
}

//fault:waiting-callers
func TestNoConnectionIsHeldBetweenTwoAsks(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		takeFor(t, rdb, kind, "n")
		waits := redistest.NewMiniClient(t, m)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = newLocker(t, kind, waits, "n", nil).Acquire(ctx)
		}()
		for range 50 {
			time.Sleep(97 * time.Millisecond)
			synctest.Wait()
			if s := waits.PoolStats(); s.IdleConns != s.TotalConns || s.TotalConns == 0 {
				t.Errorf("%d connections, %d idle", s.TotalConns, s.IdleConns)
			}
		}
		<-done
	})
}

//fault:server-clock
func TestAServerWhoseClockIsAnHourOffGrantsAsAnyOther(t *testing.T) {
	eachKind(t, func(t *testing.T, kind string) {
		for _, off := range []time.Duration{-time.Hour, time.Hour} {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				var e events
				l := newLocker(t, kind, rdb, "n", &lock.Options{Trace: e.trace()})
				// miniredis' clock stands still once it is set.
				tick := func() { m.SetTime(time.Now().Add(off)) }
				tick()
				lease := mustAcquire(t, l)
				for range 60 {
					wantBusy(t, l)
					time.Sleep(time.Second)
					tick()
				}
				if err := context.Cause(lease.Context()); err != nil {
					t.Error(err)
				}
				mustRelease(t, lease)
				mustRelease(t, mustAcquire(t, l))
				if s := e.transitions(); s != "acquired released acquired released" {
					t.Error(s)
				}
			})
		}
	})
}

// A cache keeps its keys in a namespace, and so nothing of a lock's is ever taken for a value.
//
//fault:two-names
func TestACacheAndALockOfOneNameDoNotMeet(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	for _, namespace := range []string{"n", ":lock", "lock", "%7D"} {
		cache, err := singlefill.New[string](rdb, namespace, time.Hour, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer cache.Close()
		for _, name := range []string{"n", "n}:lock", ":lock", "lock"} {
			l, err := lock.NewMutex(rdb, name, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := cache.Set(t.Context(), name, "v"); err != nil {
				t.Fatal(err)
			}
			err = l.Do(t.Context(), func(ctx context.Context) error {
				v, err := cache.Get(ctx, name)
				if err == nil && v != "v" {
					err = fmt.Errorf("the value is %q", v)
				}
				if err == nil {
					err = cache.Delete(ctx, name)
				}
				return err
			})
			if err != nil {
				t.Errorf("%s, %s: %v", namespace, name, err)
			}
		}
	}
}
