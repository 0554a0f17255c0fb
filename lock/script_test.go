package lock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

const (
	scriptTTL      = 10_000 // ms
	scriptReleased = 2_000  // ms
)

// steps runs the scripts of one kind as a Locker does, but with tokens that the test chooses, and
// in any order: as they arrive when commands are lost, repeated and delayed. With a fair mutex it
// does what TryAcquire does.
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

// token returns a token as long as those of attempts.
func token(who string) string { return (who + strings.Repeat("A", 26))[:26] }

// do returns the answer of the script: the state and the number of acquire, or the number of the
// others.
func (s *steps) do(op, who string) (state string, number int64) {
	s.t.Helper()
	state, number, err := s.try(op, who)
	if err != nil {
		s.t.Fatalf("%s by %s: %v", op, who, err)
	}
	return state, number
}

func (s *steps) try(op, who string) (state string, number int64, err error) {
	ended := s.lock + ":ended"
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
		keys, args = []string{s.lock, ended}, append(args, scriptReleased, 100, 700)
	case "abandon":
		keys, args = []string{s.lock, ended}, append(args, scriptTTL, 100, 700)
	}
	if s.kind != "fair" && op != "renew" {
		keys = append(keys, s.lock+":next", s.lock+":waiting")
	}
	if s.kind != "fair" && op == "acquire" {
		args = append(args, 0, "", 0)
	}
	switch {
	case s.kind == "mutex" && op == "acquire":
		keys = append(keys, s.lock+":queue")
	case s.kind == "semaphore":
		keys = append(keys, s.lock+":details")
		if op == "acquire" {
			args = append(args, 1)
		}
	case s.kind == "fair" && op == "release":
		keys = append(keys, s.lock+":queue")
	case s.kind == "fair" && op != "renew":
		keys = append(keys, s.lock+":queue", s.lock+":alive")
		if op == "acquire" {
			args = append(args, 5000, 0)
		}
	case s.kind == "fair":
		file = "mutex"
	}
	reply, err := redis.NewScript(locktest.Text(file+"_"+op+".lua")).Run(s.t.Context(), s.rdb, keys, args...).Result()
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

// takeFor takes the lock for a process that dies at once.
func takeFor(t testing.TB, rdb redis.UniversalClient, kind, name string) {
	t.Helper()
	if state, _ := newSteps(t, rdb, kind, name).do("acquire", "DEAD"); state != "held" {
		t.Fatal(state)
	}
}

// learn makes the server know all scripts, so that each later step is one command.
func learn(t testing.TB, rdb redis.UniversalClient, kind string) {
	t.Helper()
	s := newSteps(t, rdb, kind, "learn")
	for _, op := range []string{"acquire", "renew", "release", "abandon"} {
		s.do(op, "A")
	}
}

// Every step may be repeated, and may arrive late.
//
//fault:any-order
func TestScripts_RepeatedAndLate(t *testing.T) {
	// Each step is a player, an op and its answer. A fence is larger than the last (<), or the same
	// (=).
	for name, script := range map[string]string{
		"taken twice":                         "A acquire held<, A acquire held=, A acquire held=, B acquire busy",
		"released twice, and by others":       "A acquire held<, B release 0, B renew 0, A release 1, A release 1, A renew 0, B release 0",
		"taken again after a release":         "A acquire held<, A release 1, A acquire refused, B acquire held<, A acquire refused, A release 1, A renew 0, B renew 1",
		"a release that is not the holder's":  "A acquire held<, A release 1, B acquire held<, A release 1, C acquire busy, B release 1, C acquire held<",
		"abandoned before it arrived":         "A abandon 0, A acquire refused, A renew 0, B acquire held<, A acquire refused, A abandon 0, B renew 1",
		"abandoned after it arrived":          "A acquire held<, A abandon 1, A abandon 0, A acquire refused, A renew 0, B acquire held<",
		"abandoned after a release":           "A acquire held<, A release 1, A abandon 0, A acquire refused, B acquire held<, A abandon 0, B renew 1",
		"abandoned by a player without it":    "A acquire held<, B abandon 0, B acquire refused, A renew 1, A release 1, B acquire refused, C acquire held<",
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

// A holder whose reply was lost still holds the lock when a server that is short of memory has
// dropped the fence.
func TestScripts_LostFence(t *testing.T) {
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

// Steps in any order, however late, never affect the lease of another owner: a check and what
// follows from it are one step.
//
//fault:any-order
func TestScripts_RandomSteps(t *testing.T) {
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
			// To the end of the lease, or 1 ms before.
			if left := time.Until(m.end); left > 0 && rnd.IntN(40) == 0 {
				time.Sleep(left - time.Duration(rnd.IntN(2))*time.Millisecond)
			}
			state, number := s.do(op, who)
			wantState, want := m.do(op, who)
			if op == "abandon" { // not used: a semaphore answers 1 if the lease has just ended
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

// A model is what each kind of lock is, with one holder at a time.
type model struct {
	holder string
	end    time.Time
	fence  int64
	ended  map[string]time.Time // until when an attempt has a mark
}

func (m *model) do(op, who string) (state string, number int64) {
	now := time.Now()
	held, ours := now.Before(m.end), now.Before(m.end) && m.holder == who
	marked := now.Before(m.ended[who])
	switch op {
	case "acquire":
		switch {
		case marked:
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
	if ours || op == "release" && marked {
		return "", 1
	}
	return "", 0
}

// A script is sent in full only if the server does not know it, and no step takes a second command.
func TestScripts_SentInFull(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb, kind)
		l := newLocker(t, kind, rdb, "n", nil)
		c := record(m)
		verbs := func() string {
			synctest.Wait()
			defer c.reset()
			var verbs []string
			for _, args := range c.all() {
				verbs = append(verbs, args[0])
			}
			return strings.Join(verbs, " ")
		}
		lease := mustAcquire(t, l)
		mustRelease(t, lease)
		if s := verbs(); s != "EVALSHA EVALSHA" {
			t.Errorf("a known script: %s", s)
		}
		flush := func() {
			redistest.Must(t, rdb.ScriptFlush(t.Context()).Err())
		}
		flush()
		lease = mustAcquire(t, l)
		flush()
		time.Sleep(leaseTTL / 2)
		flush()
		mustRelease(t, lease)
		if s := verbs(); s != strings.TrimSpace(strings.Repeat("EVALSHA EVAL ", 3)) {
			t.Errorf("a forgotten script: %s", s)
		}
		for _, text := range []string{"ERR some error", "NOPERM this user has no permissions", "OOM command not allowed", "LOADING Redis is loading"} {
			lease = mustAcquire(t, l)
			c.reset()
			m.SetError(text)
			if err := lease.Release(t.Context()); err == nil {
				t.Errorf("%s: Release = nil", text)
			}
			m.SetError("")
			if s := verbs(); strings.Contains(s, "EVAL ") || strings.HasSuffix(s, "EVAL") {
				t.Errorf("%s: %s", text, s)
			}
			time.Sleep(2 * leaseTTL)
		}
	})
}

// No script gets a time of the client. With one, a client whose clock is wrong would be served
// before others, or take what others hold.
//
//fault:process-clock
func TestScripts_NoClientTime(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		var mu sync.Mutex
		got := make(map[string]bool)
		watchScripts(m, func(_ *server.Peer, op, _ string, args []string) bool {
			mu.Lock()
			defer mu.Unlock()
			got[op+" "+serverTime.ReplaceAllString(tokenPattern.ReplaceAllString(strings.Join(args, " "), "TOKEN"), "SINCE")] = true
			return false
		})
		rdb := redistest.NewMiniClient(t, m)
		session := func() []string {
			mu.Lock()
			clear(got)
			mu.Unlock()
			for _, kind := range kinds {
				l := newLocker(t, kind, rdb, kind, nil)
				lease := mustTry(t, l)
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // time for a renewal
				if _, err := l.Acquire(ctx); !errors.Is(err, lock.ErrBusy) {
					t.Error(kind, err)
				}
				cancel()
				mustRelease(t, lease)
				synctest.Wait()
			}
			mu.Lock()
			defer mu.Unlock()
			var all []string
			for s := range got {
				all = append(all, s)
			}
			slices.Sort(all)
			return all
		}
		before := session()
		time.Sleep(1000*time.Hour + 17*time.Millisecond)
		if after := session(); len(before) != 8+4+3 || !slices.Equal(before, after) {
			t.Errorf("at first they got\n%s\nlater\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
		}
	})
}

var tokenPattern = regexp.MustCompile(`[A-Z2-7]{26}`)

// serverTime matches a time that the server has told a waiter, and the waiter tells the server.
var serverTime = regexp.MustCompile(`\b0000\d{16}\b`)
