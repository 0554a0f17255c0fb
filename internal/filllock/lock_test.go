package filllock

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

func TestMain(m *testing.M) { redistest.Main(m) }

const (
	me      = "MEMEMEMEMEMEMEMEMEMEMEMEME"
	other   = "OTHEROTHEROTHEROTHEROTHERO"
	third   = "THIRDTHIRDTHIRDTHIRDTHIRDT"
	stamp   = "0123456789012345"
	noRetry = "0000000000000000"

	opTimeout = 5 * time.Second

	// TTLs of the lock under test, and of whatever the keys held before.
	life = 40 * time.Second
	left = 20 * time.Second

	storedLife = 30 * time.Second // of a value

	entryA = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAApayload of A"
	entryB = "BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBpayload of B"
)

// A backend is a way in which commands reach a server.
type backend struct {
	rdb   redis.UniversalClient // of the lock
	admin *redis.Client         // reads and writes keys; may run every command
}

// eachBackend runs a test with scripts, and with WATCH for a user without the right to run scripts,
// on miniredis and on a real server.
func eachBackend(t *testing.T, run func(t *testing.T, f backend)) {
	for _, c := range []struct {
		name string
		open func(t testing.TB) backend
	}{
		{"mini", openMini}, {"mini without scripts", openMiniWatch}, {"real", openReal}, {"real without scripts", openRealWatch},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			run(t, c.open(t))
		})
	}
}

func openMini(t testing.TB) backend {
	m, rdb := redistest.StartMini(t)
	return backend{rdb, redistest.NewMiniClient(t, m)}
}

func openMiniWatch(t testing.TB) backend {
	m, rdb := redistest.StartMini(t)
	refuseScripts(m)
	return backend{rdb, redistest.NewMiniClient(t, m)}
}

func refuseScripts(m *miniredis.Miniredis) {
	m.Server().SetPreHook(func(p *server.Peer, cmd string, _ ...string) bool {
		if strings.HasPrefix(cmd, "EVAL") {
			p.WriteError("NOPERM this user has no permissions to run the '" + strings.ToLower(cmd) + "' command")
			return true
		}
		return false
	})
}

func openReal(t testing.TB) backend {
	s := redistest.Shared(t)
	return backend{s.Client(t), s.Admin()}
}

func openRealWatch(t testing.TB) backend {
	s := redistest.Shared(t)
	noScripts(t, s)
	return backend{s.Client(t, asNoScripts), s.Admin()}
}

func noScripts(t testing.TB, s *redistest.Server) {
	t.Helper()
	redistest.Must(t, s.Admin().Do(context.Background(), "acl", "setuser", "noscripts", "on", ">pw", "~*", "&*", "+@all", "-@scripting").Err())
}

func asNoScripts(o *redis.Options) { o.Username, o.Password = "noscripts", "pw" }

var pairs atomic.Int64

// A fixture is one pair of keys and a lock on them whose token is me.
type fixture struct {
	backend
	*Lock
	failed []error
	t      testing.TB
	held   string // by the keys at first
}

// use gives the attempt a token.
func (b *fixture) use(token string) { b.token, b.args.token = token, token }

func (f backend) fixture(t testing.TB) *fixture {
	t.Helper()
	b := &fixture{backend: f, t: t}
	value := fmt.Sprintf("fill:{%d}", pairs.Add(1))
	redistest.Planted(t, value) // the test itself writes the keys
	b.Lock = New(newClient(t, f.rdb, func(op string, err error) { b.failed = append(b.failed, fmt.Errorf("%s: %w", op, err)) }),
		Pair{value, value + ":lock"}, life)
	b.stamp = stamp
	b.use(me)
	return b
}

func newClient(t testing.TB, rdb redis.UniversalClient, failed func(op string, err error)) *client.Client {
	closing := make(chan struct{})
	var wg sync.WaitGroup
	t.Cleanup(func() { close(closing); wg.Wait() })
	return client.New(rdb, 5*time.Second, func(_ context.Context, op string, err error) { failed(op, err) },
		func(error) {}, func(run func(<-chan struct{})) { wg.Go(func() { run(closing) }) })
}

// holding returns a fixture whose keys hold what is given.
func (f backend) holding(t testing.TB, value, lock state) *fixture {
	t.Helper()
	b := f.fixture(t)
	b.set(b.Keys.Value, value)
	b.set(b.Keys.Lock, lock)
	b.held = fmt.Sprintf("value %+v, lock %+v", value, lock)
	return b
}

// answers fails the test unless GetOrLock has the status.
func answers(t testing.TB, l *Lock, status string) {
	t.Helper()
	if r, err := l.GetOrLock(t.Context(), opTimeout, Query{Take: true}); err != nil || r.Status != status {
		t.Fatalf("answered %+v, %v, want %s", r, err, status)
	}
}

// storeA and releaseAll are what a load can do with its lock, as renewing and abandoning.
func storeA(l *Lock) Act { return l.Store([]byte(entryA), storedLife) }

func releaseAll(l *Lock) Act {
	return l.Release(ReleaseNote{Failure: "failure", RetryAfter: life, Drop: true})
}

// does carries out an act, and checks whether it reports that this attempt held the lock.
func (b *fixture) does(act Act, want bool) {
	b.t.Helper()
	if ok, err := act.Do(b.t.Context(), opTimeout); ok != want || err != nil {
		b.t.Errorf("%s = %t, %v, want %t; at first %s", act.op, ok, err, want, b.held)
	}
}

// A state is what a key holds. The zero state is a missing key.
type state struct {
	text    string
	empty   bool // the empty string, which is not a missing key
	list    bool
	forever bool // without a TTL, as only foreign keys are
}

func (b *fixture) set(key string, s state) {
	b.t.Helper()
	ctx := context.Background()
	var err error
	switch {
	case s.list:
		err = errors.Join(b.admin.Del(ctx, key).Err(), b.admin.RPush(ctx, key, "item").Err(), b.admin.PExpire(ctx, key, left).Err())
	case s == state{}:
		err = b.admin.Del(ctx, key).Err()
	default:
		err = b.admin.Set(ctx, key, s.text, left).Err()
	}
	if s.forever {
		err = errors.Join(err, b.admin.Persist(ctx, key).Err())
	}
	redistest.Must(b.t, err)
}

// get returns what a key holds and its TTL.
func (b *fixture) get(key string) (s state, ttl time.Duration) {
	b.t.Helper()
	ctx := context.Background()
	kind, err := b.admin.Type(ctx, key).Result()
	redistest.Must(b.t, err)
	if kind == "none" {
		return state{}, 0
	}
	ttl, err = b.admin.PTTL(ctx, key).Result()
	redistest.Must(b.t, err)
	s.forever = ttl == -1
	if kind != "string" {
		s.list = true
		return s, ttl
	}
	s.text, err = b.admin.Get(ctx, key).Result()
	redistest.Must(b.t, err)
	s.empty = s.text == ""
	// Other tests check the stamp.
	if p := splitRecord(s.text); p.state == "H" {
		s.text = p.state + p.token + stamp + p.failure
	}
	return s, ttl
}

// want checks that key holds a state with a TTL of about ttl; 0 means the TTL that set gave it.
func (b *fixture) want(key string, want state, ttl time.Duration) {
	b.t.Helper()
	got, rest := b.get(key)
	if got != want {
		b.t.Errorf("%s holds %+v, want %+v", key, got, want)
	}
	if ttl == 0 {
		ttl = left
	}
	if (want != state{}) && !want.forever && (rest > ttl || rest < ttl-10*time.Second) {
		b.t.Errorf("%s lives for %v, want %v", key, rest, ttl)
	}
}

// wantBoth checks what both keys hold, with the TTLs that set gave them.
func (b *fixture) wantBoth(value, lock state) {
	b.t.Helper()
	b.want(b.Keys.Value, value, 0)
	b.want(b.Keys.Lock, lock, 0)
}

func held(token string, failure ...string) state {
	return state{text: "H" + token + stamp + strings.Join(failure, "")}
}

func failed(token string, failure ...string) state {
	return state{text: "F" + token + noRetry + strings.Join(failure, "")}
}
func abandoned(token string) state { return state{text: "X" + token} }

// failedUntil is the record of a load that failed, after which refreshes back off for d.
func failedUntil(d time.Duration, token string, failure ...string) state {
	return state{text: fmt.Sprintf("F%s%016d%s", token, time.Now().Add(d).UnixMicro(), strings.Join(failure, ""))}
}

// GetOrLock decides by what value and lock hold.
func TestGetOrLock_States(t *testing.T) {
	t.Parallel()
	unchanged := state{text: "as before"}
	cases := []struct {
		name           string
		value, lock    state
		retry          time.Duration // how long lock, a failure, backs off
		known, awaited string
		purpose        string // Query.For
		lookOnly       bool   // Take is false
		want           string
		text           string
		remember       time.Duration // lock is the record of a failure that is remembered for so long
		// left is how long to back off, with Failed.
		left    time.Duration
		becomes state // the lock key
	}{
		{name: "an entry", value: state{text: entryA}, want: Hit, text: entryA, becomes: unchanged},
		{name: "an entry after a failure", value: state{text: entryA}, lock: failed(other, "boom"), awaited: other, want: Hit, text: entryA, becomes: unchanged},
		{name: "another entry than the known one", value: state{text: entryA}, known: entryB[:35], want: Hit, text: entryA, becomes: unchanged},
		{name: "the known entry", value: state{text: entryA}, known: entryA[:35], want: Locked, becomes: held(me)},
		{name: "short garbage", value: state{text: "garbage"}, want: Hit, text: "garbage", becomes: unchanged},
		{name: "a part of the known garbage", value: state{text: "garb"}, known: "garbage", want: Hit, text: "garb", becomes: unchanged},
		{name: "an empty value", value: state{empty: true}, want: Locked, becomes: held(me)},
		{name: "an empty value while another holder loads", value: state{empty: true}, lock: held(other), want: Busy, text: other, becomes: unchanged},
		{name: "a list at the value", value: state{list: true}, want: Locked, becomes: held(me)},
		{name: "the known entry, only looking", value: state{text: entryA}, known: entryA[:35], lookOnly: true, want: Free, becomes: unchanged},

		{name: "nothing", want: Locked, becomes: held(me)},
		{name: "nothing, only looking", lookOnly: true, want: Free, becomes: unchanged},
		{name: "held", lock: held(other), want: Busy, text: other, becomes: unchanged},
		{name: "held by this attempt", lock: held(me), want: Locked, becomes: held(me)},
		{name: "held by this attempt with a failure", lock: held(me, "boom"), awaited: other, want: Locked, becomes: held(me, "boom")},
		{name: "abandoned by this attempt", lock: abandoned(me), want: Refused, becomes: unchanged},
		{name: "abandoned by another", lock: abandoned(other), want: Locked, becomes: held(me)},

		{name: "failed, awaited", lock: failed(other, "boom"), awaited: other, want: Failed, text: "boom", becomes: unchanged},
		{name: "failed, after waiting for another", lock: failed(third, "boom"), awaited: other, want: Failed, text: "boom", becomes: unchanged},
		{name: "failed before the call", lock: failed(other, "boom"), want: Locked, becomes: held(me, "boom")},
		{name: "failed by this attempt before", lock: failed(me, "boom"), want: Refused, becomes: unchanged},
		{name: "held again after the failure awaited", lock: held(third, "boom"), awaited: other, want: Failed, text: "boom", becomes: unchanged},
		{name: "held with a failure from before", lock: held(other, "boom"), want: Busy, text: other, becomes: unchanged},
		{name: "held with a failure from before, awaited", lock: held(other, "boom"), awaited: other, want: Busy, text: other, becomes: unchanged},

		{name: "remembered", remember: life / 4, want: Failed, text: "boom", left: life / 4, becomes: unchanged},
		{name: "remembered, with an entry to serve", value: state{text: entryA}, known: entryA[:35], purpose: Fallback, remember: life / 4, want: Locked, becomes: held(me, "boom")},
		{name: "remembered, with an entry that cannot be served", value: state{text: entryA}, known: entryA[:35], remember: life / 4, want: Failed, text: "boom", left: life / 4, becomes: unchanged},
		{name: "remembered until a moment ago", remember: -time.Minute, want: Locked, becomes: held(me, "boom")},
		{name: "remembered, awaited", remember: -time.Minute, awaited: other, want: Failed, text: "boom", becomes: unchanged},
		{name: "remembered before it was held again", lock: state{text: held(third).text + "T" + noRetry + "boom"}, awaited: other, want: Failed, text: "boom", becomes: unchanged},

		{name: "a foreign holder without a TTL", lock: state{text: "H" + other + stamp, forever: true}, want: Locked, becomes: held(me)},
		{name: "a foreign holder without a TTL, only looking", lock: state{text: "H" + other + stamp, forever: true}, lookOnly: true, want: Free, becomes: unchanged},
		{name: "a foreign text after a wait", lock: state{text: "a text that is longer than any token of ours"}, awaited: other, want: Locked, becomes: held(me)},
		{name: "a short foreign text", lock: state{text: "garbage"}, want: Locked, becomes: held(me)},
		{name: "a short foreign text like a holder", lock: state{text: "Hello"}, want: Locked, becomes: held(me)},
		{name: "an empty lock", lock: state{empty: true}, want: Locked, becomes: held(me)},
		{name: "a list at the lock", lock: state{list: true, forever: true}, want: Locked, becomes: held(me)},

		{name: "nothing left to serve", purpose: Served, want: Gone, becomes: unchanged},
		{name: "nothing left of the entry served", known: entryA[:35], purpose: Served, want: Gone, becomes: unchanged},
		{name: "nothing left of the fallback", known: entryA[:35], purpose: Fallback, want: Locked, becomes: held(me)},
		{name: "another entry than the one served", value: state{text: entryB}, known: entryA[:35], purpose: Served, want: Hit, text: entryB, becomes: unchanged},
		{name: "the entry served", value: state{text: entryA}, known: entryA[:35], purpose: Served, want: Locked, becomes: held(me)},
		{name: "the fallback while another holder loads after a failure", value: state{text: entryA}, lock: held(other, "boom"), known: entryA[:35], purpose: Fallback, want: Busy, text: other, becomes: unchanged},
		{name: "nothing left to serve while another holder loads", lock: held(other), purpose: Served, want: Gone, becomes: unchanged},
		{name: "nothing left to serve, loaded by this attempt", lock: held(me), purpose: Served, want: Locked, becomes: held(me)},
		{name: "nothing left to serve, abandoned by this attempt", lock: abandoned(me), purpose: Served, want: Refused, becomes: unchanged},

		{name: "failed, backing off, with the fallback", value: state{text: entryA}, lock: failed(other, "boom"), retry: left / 2, known: entryA[:35], purpose: Fallback, want: Failed, text: "boom", left: left / 2, becomes: unchanged},
		{name: "failed, backing off, without a failure, awaited", value: state{text: entryA}, lock: failed(other), retry: left / 2, known: entryA[:35], awaited: other, purpose: Fallback, want: Failed, left: left / 2, becomes: unchanged},
		{name: "failed, backing off, awaited", value: state{text: entryA}, lock: failed(other, "boom"), retry: left / 2, known: entryA[:35], awaited: other, purpose: Fallback, want: Failed, text: "boom", becomes: unchanged},
		{name: "failed, backing off for longer than the mark lives", value: state{text: entryA}, lock: failed(other, "boom"), retry: 1000 * time.Hour, known: entryA[:35], purpose: Fallback, want: Failed, text: "boom", left: left, becomes: unchanged},
		{name: "failed, backing off until a moment ago", value: state{text: entryA}, lock: failed(other, "boom"), retry: -time.Millisecond, known: entryA[:35], purpose: Fallback, want: Locked, becomes: held(me, "boom")},
		{name: "failed, not backing off", value: state{text: entryA}, lock: failed(other, "boom"), known: entryA[:35], purpose: Served, want: Locked, becomes: held(me, "boom")},
		{name: "failed, backing off until no time at all", value: state{text: entryA}, lock: state{text: "F" + other + "another stamp!!!boom"}, known: entryA[:35], purpose: Fallback, want: Locked, becomes: held(me, "boom")},
		{name: "failed, backing off, but without a TTL", value: state{text: entryA}, lock: state{text: "F" + other + "9000000000000000boom", forever: true}, known: entryA[:35], purpose: Fallback, want: Locked, becomes: held(me)},
		{name: "failed, backing off, with nothing to serve", value: state{text: entryA}, lock: failed(other, "boom"), retry: left / 2, known: entryA[:35], want: Locked, becomes: held(me, "boom")},
		{name: "failed, backing off, with nothing left as fallback", lock: failed(other, "boom"), retry: left / 2, known: entryA[:35], purpose: Fallback, want: Locked, becomes: held(me, "boom")},
		{name: "failed, backing off, with nothing left to serve", lock: failed(other, "boom"), retry: left / 2, known: entryA[:35], purpose: Served, want: Gone, becomes: unchanged},
	}
	eachBackend(t, func(t *testing.T, f backend) {
		for _, c := range cases {
			t.Run(c.name, func(t *testing.T) {
				if c.retry != 0 {
					c.lock = failedUntil(c.retry, c.lock.text[1:1+tokenLen], c.lock.text[1+tokenLen+stampLen:])
				}
				if c.remember != 0 {
					c.lock = remembered(other, c.remember)
				}
				b := f.holding(t, c.value, c.lock)
				r, err := b.GetOrLock(t.Context(), opTimeout, Query{Known: c.known, Awaited: c.awaited, Take: !c.lookOnly, For: c.purpose})
				if c.want == Locked {
					c.text = b.stamp
				}
				if err != nil || r.Status != c.want || r.Text != c.text || len(b.stamp) != stampLen {
					t.Errorf("answered %+v, %v, want %s %q", r, err, c.want, c.text)
				}
				if c.want == Busy {
					c.left = left
				}
				if r.Left > c.left || c.left > 0 && r.Left <= max(0, c.left-10*time.Second) {
					t.Errorf("left is %v, want %v", r.Left, c.left)
				}
				if there := c.want != Hit && c.value.text != ""; r.Known != there {
					t.Errorf("known is %t, want %t", r.Known, there)
				}
				if c.becomes == unchanged {
					b.want(b.Keys.Lock, c.lock, 0)
				} else {
					b.want(b.Keys.Lock, c.becomes, life)
				}
				b.want(b.Keys.Value, c.value, 0)
				if b.InDoubt || len(b.failed) > 0 {
					t.Errorf("InDoubt is %t, failures %v", b.InDoubt, b.failed)
				}
			})
		}
	})
}

// GetOrLock counts the age of a lock by the server's clock.
func TestGetOrLock_Age(t *testing.T) {
	t.Parallel()
	eachBackend(t, func(t *testing.T, f backend) {
		b := f.fixture(t)
		busy := func() time.Duration {
			t.Helper()
			b.use(third)
			r, err := b.GetOrLock(t.Context(), opTimeout, Query{Take: true})
			if err != nil || r.Status != Busy {
				t.Fatalf("answered %+v, %v", r, err)
			}
			return r.Age
		}
		begun := time.Now()
		answers(t, b.Lock, Locked)
		first, second := busy(), busy()
		if most := time.Since(begun); first < 0 || second < first || second > most {
			t.Errorf("a lock taken just now is %v and then %v old, after %v", first, second, most)
		}
		for _, age := range []time.Duration{5 * time.Second, time.Hour, -time.Hour} {
			begun := time.Now()
			b.set(b.Keys.Lock, state{text: fmt.Sprintf("H%s%016d", other, begun.Add(-age).UnixMicro())})
			if got, most := busy(), age+time.Since(begun)+time.Microsecond; got < age || got > most {
				t.Errorf("a lock is %v old, want %v to %v", got, age, most)
			}
		}
		b.set(b.Keys.Lock, state{text: "H" + other + "no time at all!!"})
		if got := busy(); got < 24*time.Hour {
			t.Errorf("a lock whose stamp is no time is %v old", got)
		}
	})
}

// foreign are lock keys that me does not hold.
var foreign = []state{
	{}, held(other), held(other, "boom"), failed(me, "boom"), failed(other, "boom"), abandoned(me), abandoned(other),
	{text: "H"}, {text: "garbage"}, {text: "H" + me[:25]}, {text: "h" + me + stamp}, {empty: true}, {list: true},
	{text: "H" + other + stamp, forever: true},
}

// Store writes only for the holder, and can be repeated.
//
//fault:late-command
func TestStore_HolderOnly(t *testing.T) {
	t.Parallel()
	stored := state{text: entryA}
	eachBackend(t, func(t *testing.T, f backend) {
		for _, before := range []state{
			{}, {text: entryB}, {text: "garbage"}, {empty: true}, {list: true}, {text: entryB, forever: true}, stored,
		} {
			for _, lock := range []state{held(me), held(me, "boom")} {
				b := f.holding(t, before, lock)
				for range 2 { // the reply was lost, and the client sends it again
					b.does(storeA(b.Lock), true)
					b.want(b.Keys.Value, stored, storedLife)
					b.want(b.Keys.Lock, state{}, 0)
				}
				// And again when another attempt holds the lock.
				b.set(b.Keys.Lock, held(other))
				b.does(storeA(b.Lock), true)
				b.want(b.Keys.Lock, held(other), 0)
				// And again after a Delete.
				b.set(b.Keys.Value, state{})
				b.set(b.Keys.Lock, state{})
				b.does(storeA(b.Lock), false)
				b.want(b.Keys.Value, state{}, 0)
			}
			for _, lock := range foreign {
				b := f.holding(t, before, lock)
				b.does(storeA(b.Lock), before == stored)
				b.wantBoth(before, lock)
			}
		}
	})
}

// remembered is the record of a failure that is remembered for d.
func remembered(token string, d time.Duration) state {
	return failed(token, "T"+failedUntil(d, token).text[1+tokenLen:]+"boom")
}

// notes are all notes that a load can leave.
func notes() (all []ReleaseNote) {
	for _, failure := range []string{"", "failure"} {
		for _, retry := range []time.Duration{0, time.Millisecond, life / 4, 2 * life, math.MaxInt64} {
			for _, drop := range []bool{false, true} {
				all = append(all, ReleaseNote{Failure: failure, RetryAfter: retry, Drop: drop})
			}
		}
	}
	for _, remember := range []time.Duration{time.Millisecond, life / 4, 2 * life, math.MaxInt64} {
		all = append(all, ReleaseNote{Failure: "failure", Remember: remember})
	}
	all = append(all, ReleaseNote{Failure: "failure", Remember: life / 4, RetryAfter: 2 * life})
	return all
}

// wantNote checks that the lock key holds the note of a load by me that has just ended.
func (b *fixture) wantNote(v ReleaseNote) {
	b.t.Helper()
	if v.Failure == "" && v.RetryAfter == 0 {
		b.want(b.Keys.Lock, state{}, 0)
		return
	}
	got, _ := b.get(b.Keys.Lock)
	record := splitRecord(got.text)
	retry, failure := record.stamp, record.failure
	after := func(digits string, d time.Duration) string {
		at, err := strconv.ParseInt(digits, 10, 64)
		switch soon := time.Until(time.UnixMicro(at)); {
		case len(digits) != stampLen || err != nil:
			b.t.Errorf("%+v: left %q", v, got.text)
		case d == 0:
			return noRetry
		case d == math.MaxInt64:
			return "9000000000000000" // the limit of 16 digits
		case soon > d || soon < d-10*time.Second:
			b.t.Errorf("%+v: the source is to be left alone for %v", v, soon)
		}
		return digits
	}
	want := "F" + me + after(retry, v.RetryAfter)
	if v.Remember > 0 {
		want += "T" + after(failure[min(1, len(failure)):min(1+stampLen, len(failure))], v.Remember)
	}
	b.want(b.Keys.Lock, state{text: want + v.Failure}, max(life, v.RetryAfter, v.Remember))
}

// Release leaves the note it is given, and can be repeated.
func TestRelease_Note(t *testing.T) {
	t.Parallel()
	eachBackend(t, func(t *testing.T, f backend) {
		for _, lock := range []state{held(me), held(me, "boom")} {
			for _, v := range notes() {
				b := f.holding(t, state{text: entryA}, lock)
				b.does(b.Release(v), true)
				b.wantNote(v)
				if v.Drop {
					b.want(b.Keys.Value, state{}, 0)
				} else {
					b.want(b.Keys.Value, state{text: entryA}, 0)
				}
				// The reply was lost, and the client sends it again: after a Set, nothing is
				// dropped.
				b.set(b.Keys.Value, state{text: entryB})
				before, _ := b.get(b.Keys.Lock)
				b.does(b.Release(v), false)
				b.want(b.Keys.Value, state{text: entryB}, 0)
				if after, _ := b.get(b.Keys.Lock); after != before {
					t.Errorf("Release with %+v again has made %+v of %+v", v, after, before)
				}
			}
		}
	})
}

// Release touches no lock and no value of another attempt.
//
//fault:late-command
func TestRelease_ForeignLock(t *testing.T) {
	t.Parallel()
	eachBackend(t, func(t *testing.T, f backend) {
		for _, lock := range append(foreign, failedUntil(life, me, "boom"), failedUntil(life, other)) {
			for _, v := range []ReleaseNote{{}, {Failure: "failure"}, {Drop: true}, {Failure: "failure", RetryAfter: time.Minute, Drop: true}} {
				b := f.holding(t, state{text: entryA}, lock)
				b.does(b.Release(v), false)
				b.wantBoth(state{text: entryA}, lock)
			}
		}
	})
}

// Abandon makes the server refuse the attempt, whether its command has arrived or arrives later.
func TestAbandon_RefusesAttempt(t *testing.T) {
	t.Parallel()
	eachBackend(t, func(t *testing.T, f backend) {
		for _, lock := range []state{held(me), held(me, "boom")} { // it has arrived
			b := f.holding(t, state{}, lock)
			b.does(b.Abandon(), true)
			b.want(b.Keys.Lock, state{}, 0)
		}
		b := f.fixture(t) // it has not
		for range 2 {
			b.does(b.Abandon(), false)
			b.want(b.Keys.Lock, abandoned(me), life)
		}
		answers(t, b.Lock, Refused) // the late attempt
		b.want(b.Keys.Lock, abandoned(me), life)
		answers(t, New(b.client, Pair{b.Keys.Value, b.Keys.Lock}, life), Locked)
		for _, lock := range foreign[1:] {
			b := f.holding(t, state{}, lock)
			b.does(b.Abandon(), false)
			b.want(b.Keys.Lock, lock, 0)
		}
	})
}

// Renew prolongs a held lock, and never brings back a lost one.
//
//fault:late-command
func TestRenew_LostLock(t *testing.T) {
	t.Parallel()
	eachBackend(t, func(t *testing.T, f backend) {
		for _, lock := range []state{held(me), held(me, "boom")} {
			b := f.holding(t, state{}, lock)
			b.does(b.Renew(), true)
			b.want(b.Keys.Lock, lock, life)
		}
		for _, lock := range foreign {
			b := f.holding(t, state{}, lock)
			b.does(b.Renew(), false)
			b.want(b.Keys.Lock, lock, 0)
		}
	})
}

// Each attempt has its own token, so that nothing done under an earlier one affects a later one.
func TestNew_Token(t *testing.T) {
	t.Parallel()
	b := openMini(t).fixture(t)
	old, now := New(b.client, Pair{b.Keys.Value, b.Keys.Lock}, life), New(b.client, Pair{b.Keys.Value, b.Keys.Lock}, life)
	for _, l := range []*Lock{old, now} {
		b.set(b.Keys.Lock, state{}) // the previous attempt's lock has expired
		answers(t, l, Locked)
	}
	b.does(old.Release(ReleaseNote{}), false)
	b.want(b.Keys.Lock, held(now.token), life)
}

func setMemory(t testing.TB, admin *redis.Client, limit string) {
	t.Helper()
	redistest.Must(t, admin.ConfigSet(context.Background(), "maxmemory", limit).Err())
}

// An attempt with an unanswered command stays in doubt, whatever later commands answer.
func TestGetOrLock_StaysInDoubt(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	noScripts(t, s)
	for takes, user := range map[string]func(*redis.Options){"evalsha eval": func(*redis.Options) {}, "exec": asNoScripts} {
		p := redistest.NewProxy(t, s.Addr)
		rule := p.On(redistest.Command(strings.Fields(takes)...), redistest.HoldRequest).Times(1)
		b := backend{p.Client(t, redistest.NoRetry, user), s.Admin()}.fixture(t)
		if _, err := b.GetOrLock(t.Context(), 2*time.Second, Query{Take: true}); err == nil || !b.InDoubt || rule.Fired() != 1 {
			t.Fatalf("%s: %v, in doubt %t, the fault has fired %d times", takes, err, b.InDoubt, rule.Fired())
		}
		setMemory(t, s.Admin(), "1")
		if _, err := b.GetOrLock(t.Context(), time.Second, Query{Take: true}); !redis.IsOOMError(err) {
			t.Errorf("%s: %v, want an OOM", takes, err)
		}
		setMemory(t, s.Admin(), "0")
		if !b.InDoubt {
			t.Errorf("%s: the command that is still under way is forgotten", takes)
		}
	}
}

// A script that lacks a right in its middle returns an error, and leaves no key without a TTL, nor an entry
// that is partly patched and looks fresh.
func TestLock_MissingRight(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	lock := func(b *fixture) error { _, err := b.GetOrLock(t.Context(), time.Second, Query{Take: true}); return err }
	act := func(of func(l *Lock) Act) func(b *fixture) error {
		return func(b *fixture) error { _, err := of(b.Lock).Do(t.Context(), opTimeout); return err }
	}
	release := func(l *Lock) Act { return l.Release(ReleaseNote{}) }
	data := entryUntil(time.Now().Add(time.Hour), 0, "payload")
	expire := func(b *fixture) error {
		b.set(b.Keys.Value, state{text: data})
		return b.expire()
	}
	for _, c := range []struct {
		rule   string
		before state
		act    func(b *fixture) error
	}{
		{"-get", state{}, lock},
		{"-set", state{}, lock},
		{"-pttl", held(other), lock},
		{"-time", state{}, lock},
		{"-set", held(me), act(storeA)},
		{"-del", held(me), act(storeA)},
		{"-del", held(me), act(release)},
		{"-time", held(me), act(releaseAll)},
		{"-pexpire", held(me), act((*Lock).Renew)},
		{"-getrange", held(other), expire},
		{"-setrange", held(other), expire},
		{"-del", held(other), expire},
	} {
		redistest.Must(t, s.Admin().Do(t.Context(), "acl", "setuser", "app", "reset", "on", ">pw", "~*", "&*", "+@all", c.rule).Err())
		b := backend{s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" }), s.Admin()}.fixture(t)
		b.set(b.Keys.Lock, c.before)
		if err := c.act(b); err == nil || client.Unreachable(err) || len(b.failed) != 1 {
			t.Errorf("%s: %v, told %v", c.rule, err, b.failed)
		}
		b.want(b.Keys.Lock, c.before, 0)
		got, _ := b.get(b.Keys.Value)
		if got.forever {
			t.Errorf("%s: the value has no end", c.rule)
		}
		if e, err := entry.Parse([]byte(got.text)); err == nil && !e.Expired && got.text != data {
			t.Errorf("%s: %x has become %x", c.rule, data, got.text)
		}
	}
}

// A command that takes the lock may arrive twice: if a Delete removed the first grant, nothing done
// under it counts for the second.
func TestLock_LateGrant(t *testing.T) {
	t.Parallel()
	eachBackend(t, func(t *testing.T, f backend) {
		for _, act := range []func(l *Lock) Act{storeA, releaseAll, (*Lock).Renew} {
			b := f.fixture(t)
			answers(t, b.Lock, Locked)
			b.set(b.Keys.Lock, state{}) // Delete
			late := *b.Lock             // with the same token
			answers(t, &late, Locked)
			if late.stamp == b.Lock.stamp {
				t.Fatalf("two grants have the stamp %q", late.stamp)
			}
			b.set(b.Keys.Value, state{text: entryB})
			under := act(b.Lock) // the grant before
			b.does(under, false)
			b.want(b.Keys.Value, state{text: entryB}, 0)
			if under.op != "renew" {
				b.want(b.Keys.Lock, state{}, 0) // no load runs under the late grant
			}
		}
	})
}

// What a caller has given up before its client had a connection takes no lock and stores nothing,
// although the client would send it then: after a Delete it would bring back what was deleted.
//
//fault:slow-connection
func TestSlowConnection(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	noScripts(t, s)
	for _, text := range []string{wake.Lua + getOrLockLua, wake.Lua + storeLua} {
		redistest.Must(t, s.Admin().ScriptLoad(t.Context(), text).Err())
	}
	for rights, user := range map[string]func(*redis.Options){"scripts": func(*redis.Options) {}, "no scripts": asNoScripts} {
		for what, c := range map[string]struct {
			lock state // before
			do   func(b *fixture) error
		}{
			"GetOrLock": {state{}, func(b *fixture) error {
				_, err := b.GetOrLock(t.Context(), slowTimeout, Query{Take: true})
				return err
			}},
			"Store": {held(me), func(b *fixture) error {
				_, err := b.Store([]byte(entryB), time.Minute).Do(t.Context(), slowTimeout)
				return err
			}},
			"Set": {held(other), func(b *fixture) error {
				_, err := setsOf([]*fixture{b})[0].Do(t.Context(), b.client)
				return err
			}},
			"SetMany": {held(other), func(b *fixture) error {
				_, err := SetMany(t.Context(), b.client, setsOf([]*fixture{b}))
				return err
			}},
		} {
			t.Run(what+" "+rights, func(t *testing.T) {
				t.Parallel()
				rdb, connect := s.Unconnected(t, user)
				b := backend{rdb, s.Admin()}.fixture(t)
				b.client = client.New(rdb, slowTimeout, func(context.Context, string, error) {}, nil, nil)
				b.set(b.Keys.Lock, c.lock)
				if err := c.do(b); !client.Unreachable(err) {
					t.Errorf("%s = %v, want no answer", what, err)
				}
				connect()
				b.want(b.Keys.Value, state{}, 0)
				if got, _ := b.get(b.Keys.Lock); what == "GetOrLock" && got != (state{}) {
					t.Errorf("the lock is %+v, want it free", got)
				}
			})
		}
	}
}

const slowTimeout = 50 * time.Millisecond
