package filllock

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/local"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A side is one way to carry out the acts of the fill lock.
type side struct {
	name   string
	rdb    redis.UniversalClient
	client *client.Client
	pair   Pair
	locks  []*Lock
}

func newSide(t testing.TB, name string, rdb redis.UniversalClient) *side {
	return &side{name: name, rdb: rdb, client: newClient(t, rdb, func(op string, err error) { t.Errorf("%s: %s: %v", name, op, err) })}
}

// attempt gives a number another attempt.
func (s *side) attempt(i int, token string) {
	l := New(s.client, s.pair, 10*time.Hour)
	if l.token = token; s.client.Local == nil {
		l.args.token = token
	}
	s.locks[i] = l
}

// header returns what the value key begins with.
func (s *side) header(t testing.TB) string {
	h, err := s.rdb.GetRange(t.Context(), s.pair.Value, 0, entry.HeaderLen-1).Result()
	redistest.Must(t, err)
	return h
}

// shown returns a text without what is random, or of a clock that others may not have.
func shown(text string, sameClock bool) string {
	if len(text) >= entry.HeaderLen && text[0] == 0xc1 {
		text = text[:entry.RandomAt] + "random.." + text[entry.HeaderLen:]
		if !sameClock {
			text = text[:3] + "until..." + text[11:]
		}
	}
	if p := splitRecord(text); p.state != "" && !sameClock {
		state, token, stamp, failure := p.state, p.token, p.stamp, p.failure
		if strings.Trim(stamp, "0") != "" {
			stamp = "stamp"
		}
		if !rememberedUntil(&failure).IsZero() {
			failure = "T " + failure
		}
		text = state + token + stamp + failure
	}
	return text
}

// state returns what both keys hold, and for how long.
func (s *side) state(t testing.TB, sameClock bool) (text string) {
	for _, key := range []string{s.pair.Value, s.pair.Lock} {
		held, err := s.rdb.Get(t.Context(), key).Result()
		if err != redis.Nil {
			redistest.Must(t, err)
		}
		left, err := s.rdb.PTTL(t.Context(), key).Result()
		redistest.Must(t, err)
		text += fmt.Sprintf("%q for %v, ", shown(held, sameClock), left.Round(time.Minute))
	}
	return text
}

// A step is one act, or something else that happens to the keys. It returns the answer.
type step func(s *side) string

// randomStep returns a step. Times are multiples of ten hours, and the clock jumps by times that are none.
func randomStep(t testing.TB, r *rand.Rand, jump func(s *side, d time.Duration)) (name string, run step) {
	ctx := t.Context()
	i, hours := r.IntN(3), func() time.Duration { return time.Duration(1+r.IntN(3)) * 10 * time.Hour }
	data := []byte(entryUntil(time.Now().Add(hours()), 0, fmt.Sprint("payload ", r.IntN(100))))
	life := hours()
	said := func(v any, err error) string { return fmt.Sprint(v, err) }
	act := func(of func(l *Lock) Act) step {
		return func(s *side) string { return said(of(s.locks[i]).Do(ctx, opTimeout)) }
	}
	switch n := r.IntN(14); n {
	case 0, 1, 2:
		q := Query{Take: r.IntN(4) > 0, For: []string{Unusable, Fallback, Served}[r.IntN(3)]}
		knows, awaits := r.IntN(2) == 0, r.IntN(3)
		return fmt.Sprintf("%d asks %+v, knows %v, awaits %d", i, q, knows, awaits), func(s *side) string {
			q := q
			if knows {
				q.Known = s.header(t)
			}
			if awaits > 0 {
				q.Awaited = s.locks[awaits].token
			}
			a, err := s.locks[i].GetOrLock(ctx, opTimeout, q)
			if a.Kept = 0; a.Status == Locked {
				a.Text = ""
			}
			a.Text = shown(a.Text, false)
			a.Age, a.Left = a.Age.Round(time.Minute), a.Left.Round(time.Minute)
			return said(fmt.Sprintf("%+v", a), err)
		}
	case 3, 4:
		return fmt.Sprint(i, " stores"), act(func(l *Lock) Act { return l.Store(data, life) })
	case 5:
		v := ReleaseNote{Failure: []string{"", "Eboom"}[r.IntN(2)], Drop: r.IntN(4) == 0}
		if r.IntN(2) == 0 {
			v.RetryAfter = hours()
		}
		if v.Failure != "" && r.IntN(2) == 0 {
			v.Remember = hours()
		}
		return fmt.Sprintf("%d releases with %+v", i, v), act(func(l *Lock) Act { return l.Release(v) })
	case 6:
		return fmt.Sprint(i, " abandons"), act((*Lock).Abandon)
	case 7:
		return fmt.Sprint(i, " renews"), act((*Lock).Renew)
	case 8:
		return "set", func(s *side) string {
			_, err := Set{Pair: s.pair, Data: data, Life: life}.Do(ctx, s.client)
			return said("", err)
		}
	case 9:
		return "delete", func(s *side) string {
			if s.client.Local != nil {
				Delete(s.client.Local, []Pair{s.pair})
				return said("", nil)
			}
			return said("", s.rdb.Del(ctx, s.pair.Value, s.pair.Lock).Err())
		}
	case 10:
		return "expire", func(s *side) string { return said("", Expire(ctx, s.client, []Pair{s.pair})) }
	case 11:
		other := r.IntN(2) == 0
		return fmt.Sprint("delete if, another: ", other), func(s *side) string {
			id := uint64(1)
			if h := s.header(t); !other && len(h) == entry.HeaderLen {
				id = entry.IDOf([]byte(h))
			}
			deleted, _, err := DeleteIf(ctx, s.client, s.pair, id)
			return said(deleted, err)
		}
	case 12:
		token := fmt.Sprintf("%026d", r.Uint64())
		return fmt.Sprint(i, " begins again"), func(s *side) string {
			s.attempt(i, token)
			return ""
		}
	default:
		d := time.Duration(r.IntN(3))*10*time.Hour + 30*time.Minute
		return fmt.Sprint("the clock jumps by ", d), func(s *side) string {
			jump(s, d)
			return ""
		}
	}
}

// agree lets sides carry out the same random acts, from different states of the keys, in 500 sequences. jump lets time
// pass for one side. These are 10,000 sequences:
//
//	go test ./internal/filllock -run 'TestActs_Agree$' -count=20
func agree(t *testing.T, sides []*side, sameClock bool, jump func(s *side, d time.Duration)) {
	const n = 500
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	ns := redistest.Namespace(t)
	answers := make(map[string]int)
	for k := range n {
		tokens := []string{fmt.Sprintf("%026d", 3*k), fmt.Sprintf("%026d", 3*k+1), fmt.Sprintf("%026d", 3*k+2)}
		failed := "F" + tokens[1]
		text := []string{
			"", "", "", "garbage", "H" + tokens[1] + stamp, "X" + tokens[0],
			failed + noRetry + "Eboom", failed + "9000000000000000Eboom", failed + noRetry + "T9000000000000000Eboom",
		}
		value, lock := text[r.IntN(4)], text[r.IntN(len(text))]
		for _, s := range sides {
			s.pair, s.locks = PairOf(fmt.Sprintf("%s:{%s %d}", ns, s.name, k)), make([]*Lock, 3)
			for i, token := range tokens {
				s.attempt(i, token)
			}
			for key, text := range map[string]string{s.pair.Value: value, s.pair.Lock: lock} {
				if text != "" {
					redistest.Must(t, s.rdb.Set(t.Context(), key, text, 20*time.Hour).Err())
				}
			}
		}
		log := []string{fmt.Sprintf("value %q, lock %q", value, lock)}
		for range 3 + r.IntN(10) {
			name, run := randomStep(t, r, jump)
			log = append(log, name)
			var first string
			for i, s := range sides {
				got := run(s) + "; " + s.state(t, sameClock)
				if i == 0 {
					first = got
					answers[strings.Fields(name)[min(1, len(strings.Fields(name))-1)]+" "+strings.SplitN(got, ";", 2)[0]]++
				} else if got != first {
					t.Fatalf("seed %d, after\n%s\n%s: %s\n%s: %s", seed, strings.Join(log, "\n"), sides[0].name, first, s.name, got)
				}
			}
		}
		for _, s := range sides {
			redistest.Must(t, s.rdb.Del(t.Context(), s.pair.Value, s.pair.Lock).Err())
		}
	}
	for _, want := range []string{Hit, Locked, Busy, Failed, Free, Gone, Refused, "stores true", "stores false", "releases true", "renews true", "if, true"} {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(answers)), func(a string) bool { return strings.Contains(a, want) }) {
			t.Errorf("no act was answered %q", want)
		}
	}
}

// newMemory returns the side of a cache without Redis.
func newMemory(t *testing.T) *side {
	rdb, free := local.New("", local.Limits{Keys: 1000})
	t.Cleanup(free)
	return newSide(t, "memory", rdb)
}

// The script of each act, its transaction, and the act in memory do the same, whatever the keys hold, while the clock
// jumps.
func TestActs_Agree(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(time.Hour) }) // until those end who watch for a reply
		var sides []*side
		for _, name := range []string{"scripts", "transactions"} {
			m, rdb := redistest.StartMini(t)
			m.ClockTTL(true)
			if name == "transactions" {
				refuseScripts(m)
			}
			sides = append(sides, newSide(t, name, rdb))
		}
		sides = append(sides, newMemory(t))
		agree(t, sides, true, func(s *side, d time.Duration) {
			if s == sides[0] { // they share the clock
				time.Sleep(d)
			}
		})
	})
}

// They do the same on a real server, whose clock does not jump, but whose keys expire.
func TestActs_AgreeOnRedis(t *testing.T) {
	t.Parallel()
	sides := []*side{newSide(t, "scripts", openReal(t).rdb), newSide(t, "transactions", openRealWatch(t).rdb), newMemory(t)}
	agree(t, sides, false, func(s *side, d time.Duration) {
		for _, key := range []string{s.pair.Value, s.pair.Lock} {
			left, err := s.rdb.PTTL(t.Context(), key).Result()
			redistest.Must(t, err)
			switch {
			case left < 0:
			case left <= d:
				redistest.Must(t, s.rdb.Del(t.Context(), key).Err())
			default:
				redistest.Must(t, s.rdb.PExpire(t.Context(), key, left-d).Err())
			}
		}
	})
}
