package fill

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"
)

// Without scripts each act reads, judges and writes. What another client does in between makes it judge anew.
func TestWithoutScriptsNobodyComesBetween(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	noScripts(t, s)
	type step struct {
		name        string
		lock        state // before
		act         func(b *bench) (string, error)
		value, then state // what another client makes of value and lock, between the reads and EXEC
		want        string
		becomes     state // the lock key; the value key stays as the other client made it
	}
	getOrLock := func(b *bench) (string, error) {
		r, err := b.GetOrLock(t.Context(), 5*time.Second, Query{Take: true})
		return r.Status + " " + r.Text, err
	}
	store := func(b *bench) (string, error) {
		ok, err := b.Store(t.Context(), opTimeout, []byte(entryA), time.Minute)
		return fmt.Sprint(ok), err
	}
	release := func(word string) func(b *bench) (string, error) {
		return func(b *bench) (string, error) {
			ok, err := b.Release(t.Context(), opTimeout, Leave{Word: word})
			return fmt.Sprint(ok), err
		}
	}
	abandon := func(b *bench) (string, error) { ok, err := b.Abandon(t.Context()); return fmt.Sprint(ok), err }
	renew := func(b *bench) (string, error) { ok, err := b.Renew(t.Context()); return fmt.Sprint(ok), err }
	for _, c := range []step{
		{"lock, taken by another", state{}, getOrLock, state{}, held(other), Busy + " " + other, held(other)},
		{"lock, value stored by another", state{}, getOrLock, state{text: entryB}, state{}, Hit + " " + entryB, state{}},
		{"lock again, taken by another", held(me), getOrLock, state{}, held(other), Busy + " " + other, held(other)},
		{"lock, abandoned meanwhile", state{}, getOrLock, state{}, abandoned(me), Refused + " ", abandoned(me)},
		{"store, deleted", held(me), store, state{}, state{}, "false", state{}},
		{"store, deleted and taken by another", held(me), store, state{}, held(other), "false", held(other)},
		{"store, set by another", held(me), store, state{text: entryB}, state{}, "false", state{}},
		{"release, taken by another", held(me), release(""), state{}, held(other), "false", held(other)},
		{"release, gone", held(me), release(""), state{}, state{}, "false", state{}},
		{"release with a word, taken by another", held(me), release("word"), state{}, held(other), "false", held(other)},
		{"release with a word, gone", held(me), release("word"), state{}, state{}, "false", state{}},
		{"abandon, taken by another", held(me), abandon, state{}, held(other), "false", held(other)},
		{"abandon of nothing, taken by another", state{}, abandon, state{}, held(other), "false", held(other)},
		{"renew, taken by another", held(me), renew, state{}, held(other), "false", held(other)},
		{"renew, gone", held(me), renew, state{}, state{}, "false", state{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := redistest.NewProxy(t, s.Addr)
			b := form{p.Client(t, asNoScripts), s.Admin()}.bench(t)
			b.set(b.key, c.lock)
			rule := p.On(redistest.Command("multi"), redistest.HoldRequest).Times(1)
			type answer struct {
				text string
				err  error
			}
			answers := make(chan answer, 1)
			go func() {
				text, err := c.act(b)
				answers <- answer{text, err}
			}()
			select {
			case <-rule.Hit():
			case a := <-answers:
				t.Fatalf("answered %+v before it wrote", a)
			}
			// A key is changed even by a write that leaves it as it was.
			b.set(b.value, state{text: "x"})
			b.set(b.key, state{text: "x"})
			b.set(b.value, c.value)
			b.set(b.key, c.then)
			rule.Release()
			if a := <-answers; a.text != c.want || a.err != nil {
				t.Errorf("answered %+v, want %s", a, c.want)
			}
			b.want(b.key, c.becomes, 0)
			b.want(b.value, c.value, 0)
		})
	}
}

// Both forms, and both servers, answer the same and leave the same behind, whatever is there.
func TestScriptsAndTransactionsAgree(t *testing.T) {
	t.Parallel()
	forms := []form{openReal(t), openRealWatch(t), openMini(t), openMiniWatch(t)}
	names := []string{"real", "real without scripts", "mini", "mini without scripts"}
	const rounds = 150
	seed := uint64(time.Now().UnixNano())
	rnd := rand.New(rand.NewPCG(seed, 0))
	for round := range rounds {
		c := randomCase(rnd)
		var first string
		for i, f := range forms {
			b := f.bench(t)
			b.set(b.value, c.value)
			b.set(b.key, c.lock)
			got := c.run(b)
			if i == 0 {
				first = got
			} else if got != first {
				t.Fatalf("seed %d, round %d: %+v\n%s: %s\n%s: %s", seed, round, c, names[0], first, names[i], got)
			}
		}
	}
}

// A parityCase is a pair of keys and a few acts, by several attempts.
type parityCase struct {
	value, lock state
	acts        []parityAct
}

type parityAct struct {
	op                  string
	token               string
	seen, awaited, text string
	take                bool
}

func randomCase(rnd *rand.Rand) parityCase {
	pick := func(from ...string) string { return from[rnd.IntN(len(from))] }
	tokens := []string{me, other, third}
	c := parityCase{}
	switch rnd.IntN(6) {
	case 0:
		c.value = state{text: pick(entryA, entryB)}
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
			c.lock.text += pick(stamp, stamp, stamp, "another stamp!!!")
		}
		c.lock.text += pick("", "", "word", "E", "\x00\xff word")
	case 2:
		c.lock = state{text: pick("garbage", "F", "X"+me[:25], "h"+me+stamp, "\x00", "H", "Hello", "H"+strings.Repeat("z", 26), "Z"+me+"word", "Free", "Fx")}
		if rnd.IntN(3) == 0 {
			c.lock = [...]state{{empty: true}, {list: true}}[rnd.IntN(2)]
		}
	}
	if c.lock != (state{}) && rnd.IntN(4) == 0 {
		c.lock.forever = true
	}
	for range 1 + rnd.IntN(5) {
		c.acts = append(c.acts, parityAct{
			op: pick("lock", "lock", "lock", "store", "release", "abandon", "renew"), token: pick(tokens...),
			seen: pick("", "", entryA[:35], entryB[:35], "garbage", "g"), awaited: pick("", "", me, other, third),
			text: pick("", "word", "\xff\x00"), take: rnd.IntN(3) > 0,
		})
	}
	return c
}

// run carries out the acts and tells what was answered and what is there after each of them.
func (c parityCase) run(b *bench) (told string) {
	ctx := context.Background()
	stamps := map[string]string{me: stamp, other: stamp, third: stamp}
	for _, a := range c.acts {
		b.token, b.stamp = a.token, stamps[a.token]
		var answer any
		var err error
		switch a.op {
		case "lock":
			var r Reply
			r, err = b.GetOrLock(ctx, 5*time.Second, Query{Known: a.seen, Awaited: a.awaited, Take: a.take})
			r.Left = r.Left.Round(20 * time.Second) // 20 s or 40 s
			if r.Status == Locked {
				r.Text, stamps[a.token] = "", b.stamp
			}
			answer = r
		case "store":
			answer, err = b.Store(ctx, opTimeout, []byte(entryA), life)
		case "release":
			answer, err = b.Release(ctx, opTimeout, Leave{Word: a.text})
		case "abandon":
			answer, err = b.Abandon(ctx)
		case "renew":
			answer, err = b.Renew(ctx)
		}
		value, valueTTL := b.get(b.value)
		lock, lockTTL := b.get(b.key)
		told += fmt.Sprintf("\n  %s by %.2s: %v, %v; value %+v for %v, lock %+v for %v", a.op, a.token, answer, err,
			value, valueTTL.Round(20*time.Second), lock, lockTTL.Round(20*time.Second))
	}
	return told
}

func TestWithoutScriptsACommandEndsWithItsTime(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	noScripts(t, s)
	p := redistest.NewProxy(t, s.Addr)
	rule := p.On(redistest.Command("exec"), redistest.DropRequest)
	b := form{p.Client(t, asNoScripts, func(o *redis.Options) { o.MaxRetries = -1 }), s.Admin()}.bench(t)
	begun := time.Now()
	_, err := b.GetOrLock(t.Context(), 200*time.Millisecond, Query{Take: true})
	if took := time.Since(begun); err == nil || took > 2*time.Second || rule.Fired() == 0 {
		t.Errorf("GetOrLock = %v after %v, the fault fired %d times", err, took, rule.Fired())
	}
	if !b.InDoubt {
		t.Error("an attempt that was not answered is not in doubt")
	}
	b.want(b.key, state{}, 0)
}
