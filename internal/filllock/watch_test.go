package filllock

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

// Without scripts, what another client writes between the reads and the write makes a command
// decide again.
func TestWatch_Interference(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	noScripts(t, s)
	aloneForEver := state{text: "F" + other + "9000000000000000boom"}
	type step struct {
		name        string
		lock        state // before the command
		act         func(b *fixture) (string, error)
		value, then state // written by another client between the reads and EXEC
		want        string
		becomes     state // the lock key; the value key stays as the other client wrote it
	}
	getOrLock := func(b *fixture) (string, error) {
		r, err := b.GetOrLock(t.Context(), 5*time.Second, Query{Take: true})
		return r.Status + " " + r.Text, err
	}
	act := func(name string) func(b *fixture) (string, error) {
		return func(b *fixture) (string, error) {
			ok, err := acts[name](t.Context(), b.Lock)
			return fmt.Sprint(ok), err
		}
	}
	refresh := func(b *fixture) (string, error) {
		b.set(b.Keys.Value, state{text: entryA})
		r, err := b.GetOrLock(t.Context(), opTimeout, Query{Known: entryA[:35], Take: true, For: Served})
		return r.Status + " " + r.Text, err
	}
	release := func(v ReleaseNote) func(b *fixture) (string, error) {
		return func(b *fixture) (string, error) {
			ok, err := b.Release(v).Do(t.Context(), opTimeout)
			return fmt.Sprint(ok), err
		}
	}
	store, releaseAll, abandon, renew := act("store"), act("release"), act("abandon"), act("renew")
	releaseFailed := release(ReleaseNote{Failure: "failure"})
	for _, c := range []step{
		{"lock, taken by another", state{}, getOrLock, state{}, held(other), Busy + " " + other, held(other)},
		{"lock, value stored by another", state{}, getOrLock, state{text: entryB}, state{}, Hit + " " + entryB, state{}},
		{"lock again, taken by another", held(me), getOrLock, state{}, held(other), Busy + " " + other, held(other)},
		{"lock, abandoned meanwhile", state{}, getOrLock, state{}, abandoned(me), Refused + " ", abandoned(me)},
		{"store, deleted", held(me), store, state{}, state{}, "false", state{}},
		{"store, deleted and taken by another", held(me), store, state{}, held(other), "false", held(other)},
		{"store, set by another", held(me), store, state{text: entryB}, state{}, "false", state{}},
		{"release, taken by another", held(me), release(ReleaseNote{}), state{}, held(other), "false", held(other)},
		{"release, gone", held(me), release(ReleaseNote{}), state{}, state{}, "false", state{}},
		{"release with a failure, taken by another", held(me), releaseFailed, state{}, held(other), "false", held(other)},
		{"release with a failure, gone", held(me), releaseFailed, state{}, state{}, "false", state{}},
		{"release with all, taken by another", held(me), releaseAll, state{text: entryB}, held(other), "false", held(other)},
		{"release with all, set by another", held(me), releaseAll, state{text: entryB}, state{}, "false", state{}},
		{"refresh, deleted by another", state{}, refresh, state{}, state{}, Gone + " ", state{}},
		{"refresh, set by another", state{}, refresh, state{text: entryB}, state{}, Hit + " " + entryB, state{}},
		{"refresh, taken by another", state{}, refresh, state{text: entryA}, held(other), Busy + " " + other, held(other)},
		{"refresh, failed by another", state{}, refresh, state{text: entryA}, aloneForEver, Failed + " boom", aloneForEver},
		{"abandon, taken by another", held(me), abandon, state{}, held(other), "false", held(other)},
		{"abandon of nothing, taken by another", state{}, abandon, state{}, held(other), "false", held(other)},
		{"renew, taken by another", held(me), renew, state{}, held(other), "false", held(other)},
		{"renew, gone", held(me), renew, state{}, state{}, "false", state{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b, text, err := meddle(t, s, func(b *fixture) { b.set(b.Keys.Lock, c.lock) }, c.act, c.value, c.then)
			if text != c.want || err != nil {
				t.Errorf("answered %s, %v, want %s", text, err, c.want)
			}
			b.want(b.Keys.Lock, c.becomes, 0)
			b.want(b.Keys.Value, c.value, 0)
		})
	}
}

// meddle runs a command without scripts, while another client changes value and lock between its
// reads and its EXEC.
func meddle(t *testing.T, s *redistest.Server, before func(b *fixture),
	act func(b *fixture) (string, error), value, lock state) (b *fixture, text string, err error) {
	p := redistest.NewProxy(t, s.Addr)
	b = backend{p.Client(t, asNoScripts), s.Admin()}.fixture(t)
	before(b)
	rule := p.On(redistest.Command("multi"), redistest.HoldRequest).Times(1)
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		text, err = act(b)
	}()
	select {
	case <-rule.Hit():
	case <-answered:
		t.Fatalf("answered %s, %v before it wrote", text, err)
	}
	// A key that already is as wanted is not touched, to show that the other key is watched, too.
	hadValue, _ := b.get(b.Keys.Value)
	hadLock, _ := b.get(b.Keys.Lock)
	same := hadValue == value && hadLock == lock
	for key, to := range map[string]state{b.Keys.Value: value, b.Keys.Lock: lock} {
		// Even a write that changes nothing counts as a change.
		if had, _ := b.get(key); had != to || same {
			b.set(key, state{text: "x"})
			b.set(key, to)
		}
	}
	rule.Release()
	<-answered
	return b, text, err
}

// Without scripts, Expire writes no bytes of an entry to a key that was deleted since it was read,
// and does not remove an entry that has replaced garbage.
func TestWatch_ExpireInterference(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	noScripts(t, s)
	data, newer := entryUntil(time.Now().Add(time.Hour), 0, "payload"), entryUntil(time.Now().Add(time.Hour), 0, "newer")
	for _, before := range []state{{text: data}, {text: "garbage"}, {}, {list: true}} {
		for _, value := range []state{{text: newer}, {}, {text: "garbage"}, {list: true}} {
			for _, lock := range []state{{}, held(other)} {
				begun := time.Now()
				b, _, err := meddle(t, s, func(b *fixture) { b.set(b.Keys.Value, before) },
					func(b *fixture) (string, error) { return "", b.expire() }, value, lock)
				if err != nil {
					t.Errorf("Expire: %v", err)
				}
				if value.text == newer {
					b.wantExpired(newer, begun, time.Now())
				} else {
					b.want(b.Keys.Value, state{}, 0)
				}
				b.want(b.Keys.Lock, state{}, 0)
			}
		}
	}
}

// Scripts and transactions, on both servers, give the same answers and leave the same state,
// whatever the keys hold.
func TestWatch_AgreesWithScripts(t *testing.T) {
	t.Parallel()
	backends := []backend{openReal(t), openRealWatch(t), openMini(t), openMiniWatch(t)}
	names := []string{"real", "real without scripts", "mini", "mini without scripts"}
	rounds := 300
	if testing.Short() {
		rounds = 100
	}
	seed := uint64(time.Now().UnixNano())
	rnd := rand.New(rand.NewPCG(seed, 0))
	for round := range rounds {
		c := randomCase(rnd)
		var first string
		for i, f := range backends {
			b := f.holding(t, c.value, c.lock)
			got := c.run(b)
			if i == 0 {
				first = got
			} else if got != first {
				t.Fatalf("seed %d, round %d: %+v\n%s: %s\n%s: %s", seed, round, c, names[0], first, names[i], got)
			}
		}
	}
}

// A parityCase is a pair of keys and several commands of several attempts.
type parityCase struct {
	value, lock state
	acts        []parityAct
}

type parityAct struct {
	op                   string
	token                string
	known, awaited, text string // known "*" is the header of the value
	purpose              string
	retry, remember      time.Duration
	take, drop           bool
}

func randomCase(rnd *rand.Rand) parityCase {
	pick := func(from ...string) string { return from[rnd.IntN(len(from))] }
	tokens := []string{me, other, third}
	c := parityCase{}
	switch rnd.IntN(8) {
	case 0:
		c.value = state{text: pick(entryA, entryB)}
	case 4, 5:
		c.value = state{text: pick(entryPast, entryFuture, entryPast[:34], entryFuture[:35])}
	case 1:
		c.value = state{text: pick("g", "garbage", entryA[:34], entryA[:35], "\x00\xff\r\n")}
	case 2:
		c.value = state{empty: true}
	case 3:
		c.value = state{list: true}
	}
	switch rnd.IntN(4) {
	case 0, 1:
		c.lock = state{text: pick("H", "H", "F", "X") + pick(tokens...)}
		if c.lock.text[0] != 'X' {
			c.lock.text += pick(stamp, stamp, "another stamp!!!", noRetry, failedUntil(left, me).text[27:], failedUntil(life, me).text[27:], failedUntil(-time.Minute, me).text[27:])
		}
		c.lock.text += pick("", "", "T"+failedUntil(left, me).text[27:], "T"+failedUntil(-time.Minute, me).text[27:], "T12", "Tanother stamp!!!")
		c.lock.text += pick("", "", "failure", "E", "\x00\xff failure")
	case 2:
		c.lock = state{text: pick("garbage", "F", "X"+me[:25], "h"+me+stamp, "\x00", "H", "Hello", "H"+strings.Repeat("z", 26), "Z"+me+"failure", "Free", "Fx")}
		if rnd.IntN(3) == 0 {
			c.lock = [...]state{{empty: true}, {list: true}}[rnd.IntN(2)]
		}
	}
	if c.lock != (state{}) && rnd.IntN(4) == 0 {
		c.lock.forever = true
	}
	for range 1 + rnd.IntN(5) {
		c.acts = append(c.acts, parityAct{
			op: pick("lock", "lock", "lock", "store", "release", "release", "abandon", "renew", "expire"), token: pick(tokens...),
			known: pick("", "", entryA[:35], "garbage", "g", "*", "*", "*"), awaited: pick("", "", me, other, third),
			purpose: pick(Unusable, Fallback, Served), text: pick("", "failure", "\xff\x00"),
			retry:    [...]time.Duration{0, 0, left, 2 * life, math.MaxInt64}[rnd.IntN(5)],
			remember: [...]time.Duration{0, 0, left, 2 * life, math.MaxInt64}[rnd.IntN(5)],
			take:     rnd.IntN(3) > 0, drop: rnd.IntN(4) == 0,
		})
	}
	return c
}

// run runs the commands, and describes each answer and the state after it.
func (c parityCase) run(b *fixture) (told string) {
	ctx := context.Background()
	stamps := map[string]string{me: stamp, other: stamp, third: stamp}
	for _, a := range c.acts {
		b.use(a.token)
		b.stamp = stamps[a.token]
		var answer any
		var err error
		switch a.op {
		case "lock":
			if a.known == "*" {
				s, _ := b.get(b.Keys.Value)
				a.known = entry.Header(s.text)
			}
			var r Reply
			r, err = b.GetOrLock(ctx, 5*time.Second, Query{Known: a.known, Awaited: a.awaited, Take: a.take, For: a.purpose})
			r.Left, r.Age = about(r.Left), about(min(r.Age, time.Hour)) // an unknown age differs
			r.Text, r.Kept = sameEntry(r.Text), 0                       // which only scripts tell
			if r.Status == Locked {
				r.Text, stamps[a.token] = "", b.stamp
			}
			answer = r
		case "release":
			note := ReleaseNote{Failure: a.text, RetryAfter: a.retry, Drop: a.drop}
			if a.text != "" {
				note.Remember = a.remember
			}
			answer, err = b.Release(note).Do(ctx, opTimeout)
		case "expire":
			err = b.expire()
		default:
			answer, err = acts[a.op](ctx, b.Lock)
		}
		value, valueTTL := b.get(b.Keys.Value)
		value.text = sameEntry(value.text)
		lock, lockTTL := b.get(b.Keys.Lock)
		lock.text = sameMark(lock.text)
		told += fmt.Sprintf("\n  %s by %.2s: %v, %v; value %+v for %v, lock %+v for %v", a.op, a.token, answer, err,
			value, about(valueTTL), lock, about(lockTTL))
	}
	return told
}

// Entries that were fresh until long ago, and will be until much later.
var (
	entryPast   = entryUntil(time.UnixMilli(1e12), 0, "payload")
	entryFuture = entryUntil(time.UnixMilli(9e12), 1, "")
)

// about rounds a time so that it is equal in each run.
func about(d time.Duration) time.Duration { return (d - 1).Round(20 * time.Second) }

// sameEntry removes from an entry what differs between two calls of Expire.
func sameEntry(s string) string {
	if e, err := entry.Parse([]byte(s)); err != nil || !e.Expired {
		return s
	} else if time.Since(e.FreshUntil) < time.Hour {
		s = s[:3] + "just now" + s[11:]
	}
	return s[:27] + s[35:]
}

// sameMark removes from a failure record what differs between runs.
func sameMark(s string) string {
	state, token, retry, failure := splitRecord(s)
	if until := rememberedUntil(&failure); !until.IsZero() {
		s = strings.TrimSuffix(s, failure)[:1+tokenLen+stampLen] + "T" + aboutTime(fmt.Sprint(until.UnixMicro())) + failure
	}
	if state != "F" {
		return s
	}
	return state + token + aboutTime(retry) + s[1+tokenLen+stampLen:]
}

// aboutTime rounds a time near to now so that it is equal in each run.
func aboutTime(micros string) string {
	at, err := strconv.ParseInt(micros, 10, 64)
	if rest := time.Until(time.UnixMicro(at)); err == nil && rest > -24*time.Hour && rest < 24*time.Hour {
		return fmt.Sprint(about(rest))
	}
	return micros
}

// A transaction of an attempt that has been abandoned takes nothing, whatever it has found under the lock.
//
//fault:late-command
func TestWatch_Abandoned(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t testing.TB) backend{"mini": openMiniWatch, "real": openRealWatch} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := open(t)
			for _, lock := range []state{{}, failed(other, "boom"), abandoned(other)} {
				b := f.holding(t, state{}, lock)
				err := f.admin.Watch(t.Context(), func(tx *redis.Tx) error {
					b.does("abandon", false)
					_, err := tx.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
						return p.Set(t.Context(), b.Keys.Lock, held(me).text, life).Err()
					})
					return err
				}, b.Keys.Lock)
				if !errors.Is(err, redis.TxFailedErr) {
					t.Errorf("%q: the transaction has ended with %v", lock.text, err)
				}
				if got, _ := b.get(b.Keys.Lock); got.text == held(me).text || got.forever {
					t.Errorf("%q has become %+v", lock.text, got)
				}
			}
		})
	}
}
