package filllock

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/redistest"
)

// whileLooking is the query of a poll that expects other to hold the lock.
var whileLooking = Query{Awaited: other, Take: true, Look: true}

// wait lets an attempt find that other holds the lock.
func (b *fixture) wait() {
	b.t.Helper()
	b.set(b.key, held(other))
	if r, err := b.GetOrLock(b.t.Context(), opTimeout, Query{Take: true, Look: true}); err != nil || r.Status != Busy || r.Looked {
		b.t.Fatalf("the first answer is %+v, %v", r, err)
	}
}

// counted counts the commands of a name in the client of a fixture.
func (b *fixture) counted(name string) *atomic.Int64 {
	n := new(atomic.Int64)
	b.rdb.(*redis.Client).AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if cmd.Name() == name {
			n.Add(1)
		}
		return next(ctx, cmd)
	}))
	return n
}

// A look finds the awaited holder, and changes nothing. Whatever else the keys hold, the answer is that without a look.
func TestLook_States(t *testing.T) {
	t.Parallel()
	unchanged := state{text: "as before"}
	eachBackend(t, func(t *testing.T, f backend) {
		for _, c := range []struct {
			name        string
			value, lock state
			looked      bool
			want, text  string
			becomes     state // the lock key
		}{
			{name: "held", lock: held(other), looked: true, want: Busy, text: other, becomes: unchanged},
			{name: "held, with a failure from before", lock: held(other, "boom"), looked: true, want: Busy, text: other, becomes: unchanged},
			{name: "held by another one", lock: held(third), want: Busy, text: third, becomes: unchanged},
			{name: "held by another one after a failure", lock: held(third, "boom"), want: Failed, text: "boom", becomes: unchanged},
			{name: "held by this attempt", lock: held(me), want: Locked, becomes: held(me)},
			{name: "failed", lock: failed(other, "boom"), want: Failed, text: "boom", becomes: unchanged},
			{name: "abandoned by the holder", lock: abandoned(other), want: Locked, becomes: held(me)},
			{name: "abandoned by this attempt", lock: abandoned(me), want: Refused, becomes: unchanged},
			{name: "free", want: Locked, becomes: held(me)},
			{name: "free, and there is an entry", value: state{text: entryA}, want: Hit, text: entryA, becomes: unchanged},
			{name: "no record", lock: state{text: "H" + other}, want: Locked, becomes: held(me)},
			{name: "empty", lock: state{empty: true}, want: Locked, becomes: held(me)},
			{name: "a list", lock: state{list: true}, want: Locked, becomes: held(me)},
		} {
			b := f.fixture(t)
			b.wait()
			b.set(b.key, c.lock)
			b.set(b.value, c.value)
			r, err := b.GetOrLock(t.Context(), opTimeout, whileLooking)
			if err != nil || r.Status != c.want || r.Text != c.text && r.Status != Locked || r.Looked != c.looked {
				t.Errorf("%s: %+v, %v", c.name, r, err)
			}
			if c.becomes == unchanged {
				c.becomes = c.lock
			}
			if c.becomes == held(me) {
				if got, _ := b.get(b.key); !strings.HasPrefix(got.text, "H"+me) {
					t.Errorf("%s: the lock holds %+v", c.name, got)
				}
			} else {
				b.want(b.key, c.becomes, 0)
			}
			if len(b.failed) > 0 || b.InDoubt {
				t.Errorf("%s: failed %v, in doubt %t", c.name, b.failed, b.InDoubt)
			}
		}
	})
}

// A look tells how old the lock is and how much is left of it, as last seen. Once nothing is left, only the script
// tells more.
func TestLook_LeftAndAge(t *testing.T) {
	t.Parallel()
	eachBackend(t, func(t *testing.T, f backend) {
		b := f.fixture(t)
		begun := time.Now()
		b.wait()
		last := b.busy
		r, err := b.GetOrLock(t.Context(), opTimeout, whileLooking)
		elapsed := last.Left - r.Left
		if err != nil || !r.Looked || elapsed <= 0 || elapsed > time.Since(begun) || r.Age-last.Age != elapsed {
			t.Errorf("%+v and then %+v, %v, within %v", last, r, err, time.Since(begun))
		}
		for what, change := range map[string]func(){
			"nothing seems to be left":     func() { b.busy.Left = 0 },
			"the last script was long ago": func() { b.busyAt = b.busyAt.Add(-lookFor) },
		} {
			change()
			if r, err = b.GetOrLock(t.Context(), opTimeout, whileLooking); err != nil || r.Status != Busy || r.Looked || r.Left < left/2 {
				t.Errorf("when %s: %+v, %v", what, r, err)
			}
		}
	})
}

// Only a poll that expects the holder last seen looks for it.
func TestLook_OnlyForTheHolderLastSeen(t *testing.T) {
	t.Parallel()
	b := openMini(t).fixture(t)
	looks := b.counted("getex")
	for name, q := range map[string]Query{
		"a poll after a wake-up":      {Awaited: other, Take: true},
		"a caller that awaits no one": {Take: true, Look: true},
		"a caller of another holder":  {Awaited: third, Take: true, Look: true},
	} {
		b.wait()
		if r, err := b.GetOrLock(t.Context(), opTimeout, q); err != nil || r.Status != Busy || r.Looked {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
	if n := looks.Load(); n != 0 {
		t.Errorf("%d looks", n)
	}
}

// Where looks are refused, the script answers each poll. A wait pays for one look, and no error is reported.
func TestLook_Refused(t *testing.T) {
	t.Parallel()
	for _, refusal := range []string{
		"NOPERM this user has no permissions to run the 'getex' command",
		"ERR unknown command 'getex', with args beginning with: ",
		"READONLY You can't write against a read only replica.",
		"NOREPLICAS Not enough good replicas to write.",
	} {
		t.Run(refusal, func(t *testing.T) {
			t.Parallel()
			m, rdb := redistest.StartMini(t)
			m.Server().SetPreHook(func(p *server.Peer, cmd string, _ ...string) bool {
				if cmd == "GETEX" {
					p.WriteError(refusal)
				}
				return cmd == "GETEX"
			})
			b := backend{rdb, redistest.NewMiniClient(t, m)}.fixture(t)
			looks := b.counted("getex")
			b.wait()
			for range 5 {
				if r, err := b.GetOrLock(t.Context(), opTimeout, whileLooking); err != nil || r.Status != Busy || r.Text != other || r.Looked {
					t.Errorf("%+v, %v", r, err)
				}
			}
			if n := looks.Load(); n != 1 {
				t.Errorf("%d looks in 5 polls, want 1", n)
			}
			b.set(b.key, failed(other, "boom"))
			if r, err := b.GetOrLock(t.Context(), opTimeout, whileLooking); err != nil || r.Status != Failed || r.Text != "boom" {
				t.Errorf("after the load: %+v, %v", r, err)
			}
			if len(b.failed) > 0 {
				t.Errorf("reported %v", b.failed)
			}
		})
	}
}

// A look without an answer is a poll without an answer. Nothing is in doubt: it cannot take the lock.
func TestLook_Unanswered(t *testing.T) {
	t.Parallel()
	m, rdb := redistest.StartMini(t)
	m.Server().SetPreHook(func(p *server.Peer, cmd string, _ ...string) bool {
		if cmd == "GETEX" {
			p.WriteError("LOADING Redis is loading the dataset in memory")
		}
		return cmd == "GETEX"
	})
	b := backend{rdb, redistest.NewMiniClient(t, m)}.fixture(t)
	b.wait()
	scripts := b.counted("evalsha")
	if r, err := b.GetOrLock(t.Context(), opTimeout, whileLooking); !client.Unreachable(err) || r != (Reply{}) || scripts.Load() != 0 {
		t.Errorf("%+v, %v after %d scripts", r, err, scripts.Load())
	}
	if len(b.failed) != 1 || b.InDoubt {
		t.Errorf("failed %v, in doubt %t", b.failed, b.InDoubt)
	}
}
