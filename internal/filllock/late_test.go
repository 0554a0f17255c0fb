package filllock

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

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
				_, err := b.Store(t.Context(), slowTimeout, []byte(entryB), time.Minute)
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
				rdb, connect := s.Unconnected(t, false, user)
				b := backend{rdb, s.Admin()}.fixture(t)
				b.client = client.New(rdb, slowTimeout, func(context.Context, string, error) {}, nil, nil)
				b.set(b.key, c.lock)
				if err := c.do(b); !client.Unreachable(err) {
					t.Errorf("%s = %v, want no answer", what, err)
				}
				connect()
				b.want(b.value, state{}, 0)
				if got, _ := b.get(b.key); what == "GetOrLock" && got != (state{}) {
					t.Errorf("the lock is %+v, want it free", got)
				}
			})
		}
	}
}

const slowTimeout = 50 * time.Millisecond
