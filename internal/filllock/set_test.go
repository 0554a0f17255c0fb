package filllock

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/redistest"
)

// fixtures returns n fixtures of one client.
func (f backend) fixtures(t testing.TB, n int) []*fixture {
	first := f.fixture(t)
	all := []*fixture{first}
	for range n - 1 {
		b := f.fixture(t)
		b.client = first.client
		all = append(all, b)
	}
	return all
}

// setsOf returns a Set for each of the fixtures. Each has another value and another life.
func setsOf(all []*fixture) (sets []Set) {
	for i, b := range all {
		sets = append(sets, Set{Pair: b.Keys, Data: fmt.Appendf(nil, "entry %d", i), Life: lifeOf(i)})
	}
	return sets
}

func lifeOf(i int) time.Duration { return time.Duration(i+1) * time.Hour }

// wantSet checks that the set of number i has been done, or has not.
func (b *fixture) wantSet(i int, done bool) {
	b.t.Helper()
	if !done {
		b.want(b.Keys.Value, state{text: entryA}, 0)
		b.want(b.Keys.Lock, held(other), 0)
		return
	}
	b.want(b.Keys.Value, state{text: fmt.Sprint("entry ", i)}, lifeOf(i))
	b.want(b.Keys.Lock, state{}, 0)
}

// Sets that the server refuses have their errors, and the others are done, with scripts and without.
func TestSetMany_Refused(t *testing.T) {
	t.Parallel()
	for _, rules := range []string{"+@all", "+@all -@scripting"} {
		t.Run(rules, func(t *testing.T) {
			s := redistest.Start(t)
			f := backend{s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" }), s.Admin()}
			all := f.fixtures(t, 4)
			acl := []any{"acl", "setuser", "app", "on", ">pw", "&*"}
			for i, b := range all {
				b.set(b.Keys.Value, state{text: entryA})
				b.set(b.Keys.Lock, held(other))
				if i%2 == 0 {
					acl = append(acl, "~"+b.Keys.Value+"*")
				}
			}
			for _, rule := range strings.Fields(rules) {
				acl = append(acl, rule)
			}
			redistest.Must(t, s.Admin().Do(t.Context(), acl...).Err())
			errs, err := SetMany(t.Context(), all[0].client, setsOf(all))
			if client.Unreachable(err) || len(errs) != len(all) {
				t.Fatalf("SetMany = %v, %v", errs, err)
			}
			for i, b := range all {
				if allowed := i%2 == 0; (errs[i] == nil) != allowed {
					t.Errorf("set %d is allowed: %t, and its error is %v", i, allowed, errs[i])
				}
				b.wantSet(i, i%2 == 0)
			}
			if len(all[0].failed) == 0 {
				t.Error("no failure is traced")
			}
		})
	}
}

// A server that does not answer is an error of each set, and costs one timeout: without scripts
// nothing is sent after the first set that has no answer.
func TestSetMany_NoAnswer(t *testing.T) {
	t.Parallel()
	const bound = 2 * time.Second // one command is not answered, while the others must be on a busy machine
	for _, test := range []struct {
		name    string
		user    func(*redis.Options)
		command string
		done    int // sets that are answered before
		sent    int64
	}{
		{"scripts", func(*redis.Options) {}, "eval", 0, 0},
		{"without scripts, the first", asNoScripts, "multi", 0, 0},
		{"without scripts, the third", asNoScripts, "multi", 2, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			noScripts(t, s)
			p := redistest.NewProxy(t, s.Addr)
			rdb := p.Client(t, test.user, func(o *redis.Options) { o.MaxRetries = -1 })
			all := backend{rdb, s.Admin()}.fixtures(t, 5)
			var failures []error
			short := client.New(rdb, bound, func(_ context.Context, _ string, err error) { failures = append(failures, err) }, nil, nil)
			for _, b := range all {
				b.set(b.Keys.Value, state{text: entryA})
				b.set(b.Keys.Lock, held(other))
			}
			rule := p.On(redistest.Command(test.command), redistest.DropRequest).After(test.done)
			errs, err := SetMany(t.Context(), short, setsOf(all))
			if !client.Unreachable(err) || len(errs) != len(all) || rule.Fired() == 0 {
				t.Fatalf("SetMany = %v, %v; the fault has fired %d times", errs, err, rule.Fired())
			}
			for i, b := range all {
				if done := i < test.done; done != (errs[i] == nil) || !done && !client.Unreachable(errs[i]) {
					t.Errorf("set %d: %v", i, errs[i])
				}
				b.wantSet(i, i < test.done)
			}
			if len(failures) != 1 {
				t.Errorf("%d commands had no answer, want 1: %v", len(failures), failures)
			}
			if n := s.Calls("multi"); n != test.sent {
				t.Errorf("%d transactions have arrived, want %d", n, test.sent)
			}
		})
	}
}

// SetMany wakes the waiters of the locks that it has removed, and no others.
func TestSetMany_Wakes(t *testing.T) {
	t.Parallel()
	s := redistest.Shared(t)
	all := backend{s.Client(t), s.Admin()}.fixtures(t, 2)
	sub := s.Admin().SSubscribe(t.Context(), all[0].Keys.Lock, all[1].Keys.Lock)
	defer sub.Close()
	for range 2 {
		if _, err := sub.Receive(t.Context()); err != nil { // confirmations
			t.Fatal(err)
		}
	}
	all[1].set(all[1].Keys.Lock, held(other))
	for range 2 { // the second one removes no lock
		if _, err := SetMany(t.Context(), all[0].client, setsOf(all)); err != nil {
			t.Fatal(err)
		}
	}
	redistest.Must(t, s.Admin().SPublish(t.Context(), all[0].Keys.Lock, "the end").Err())
	var heard []string
	for !slices.Contains(heard, all[0].Keys.Lock+" the end") {
		m, err := sub.ReceiveMessage(t.Context())
		redistest.Must(t, err)
		heard = append(heard, m.Channel+" "+m.Payload)
	}
	if want := []string{all[1].Keys.Lock + " ", all[0].Keys.Lock + " the end"}; !slices.Equal(heard, want) {
		t.Errorf("heard %q, want %q", heard, want)
	}
}
