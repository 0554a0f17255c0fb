package filllock

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

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
	act := func(of func(l *Lock) Act) func(b *fixture) (string, error) {
		return func(b *fixture) (string, error) {
			ok, err := of(b.Lock).Do(t.Context(), opTimeout)
			return fmt.Sprint(ok), err
		}
	}
	refresh := func(b *fixture) (string, error) {
		b.set(b.Keys.Value, state{text: entryA})
		r, err := b.GetOrLock(t.Context(), opTimeout, Query{Known: entryA[:35], Take: true, For: Served})
		return r.Status + " " + r.Text, err
	}
	release := func(v ReleaseNote) func(b *fixture) (string, error) {
		return act(func(l *Lock) Act { return l.Release(v) })
	}
	store, releaseWithAll, abandon, renew := act(storeA), act(releaseAll), act((*Lock).Abandon), act((*Lock).Renew)
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
		{"release with all, taken by another", held(me), releaseWithAll, state{text: entryB}, held(other), "false", held(other)},
		{"release with all, set by another", held(me), releaseWithAll, state{text: entryB}, state{}, "false", state{}},
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
					b.does(b.Abandon(), false)
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
