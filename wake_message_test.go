package singlefill_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A late wake-up makes its waiter late by as much. The process listens on unless the message comes
// half a second later than the value.
//
//fault:strange-wake-ups
func TestWake_Late(t *testing.T) {
	const length = 2 * time.Second
	for _, delay := range []time.Duration{100 * time.Millisecond, 400 * time.Millisecond, 3 * time.Second} {
		t.Run(delay.String(), func(t *testing.T) {
			inListening(t, func(t *testing.T, l *listening) {
				delayed := l.onPublish(func(channel, message string) {
					time.Sleep(delay)
					l.m.Publish(channel, message)
				})
				for i := range 3 { // a message of the first load may come during the second one
					if late, _ := l.waits("k", length); late > delay {
						t.Errorf("wait %d: the value comes %v after the load, want %v at most", i, late, delay)
					}
				}
				if delayed.Load() == 0 {
					t.Error("no message was late")
				}
				time.Sleep(delay)
				l.m.Server().SetPreHook(nil)
				if late, _ := l.waits("k", length); delay < 500*time.Millisecond && late != 0 {
					t.Errorf("the value comes %v after the load: it does not listen any more", late)
				}
			})
		})
	}
}

// A wake-up that is repeated causes few polls, also in the next load of the key.
//
//fault:strange-wake-ups
func TestWake_Repeated(t *testing.T) {
	const length, times = time.Second, 100
	inListening(t, func(t *testing.T, l *listening) {
		repeated := l.onPublish(func(channel, message string) {
			for range times {
				l.m.Publish(channel, message)
				time.Sleep(length / times)
			}
		})
		for i := range 3 {
			if late, polls := l.waits("k", length); late > longest || polls > 25 {
				t.Errorf("wait %d: late by %v after %d polls, want %v and 25 at most", i, late, polls, longest)
			}
		}
		if repeated.Load() == 0 {
			t.Error("no message was repeated")
		}
		time.Sleep(length)
	})
}

// A forged message makes the waiter of its key ask once, and no other waiter. No waiter takes a value
// from it.
//
//fault:forged-wake-ups
func TestWake_Forged(t *testing.T) {
	inListening(t, func(t *testing.T, l *listening) {
		here := cachetest.NewCacheIn(t, l.rdb, l.ns, &singlefill.Options[string]{LockTTL: 5 * time.Second, RedisTimeout: time.Second})
		keys := []string{"k1", "k2"}
		var loads, waits []*cachetest.Call[string]
		var sent [2]atomic.Int64
		for _, key := range keys {
			loads = append(loads, cachetest.GoGet(t.Context(), l.there, key, cachetest.Takes(3*time.Second, "v", nil)))
			synctest.Wait()
			waits = append(waits, cachetest.GoGet(t.Context(), here, key, cachetest.MustNotLoad[string](t)))
		}
		time.Sleep(time.Second) // until both listen
		l.rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			for i, key := range keys {
				if strings.Contains(fmt.Sprint(cmd.Args()...), "{"+key+"}") {
					sent[i].Add(1)
				}
			}
			return nil
		}))
		if n := l.m.Publish(l.channel("k1"), "forged"); n != 1 {
			t.Errorf("%d processes got the forged message, want 1", n)
		}
		time.Sleep(time.Second)
		if sent[0].Load() != 1 || sent[1].Load() != 0 {
			t.Errorf("%d commands for the key of the message, %d for the other one; want 1 and 0", sent[0].Load(), sent[1].Load())
		}
		for i := range keys {
			waits[i].Want(t, "v")
			loads[i].Want(t, "v")
		}
	})
}

// While the server does not answer a subscription, waiters poll. They hear over the next connection.
//
//fault:frozen-listener
func TestWake_Unanswered(t *testing.T) {
	const length = 2 * time.Second
	inListening(t, func(t *testing.T, l *listening) {
		var swallowed atomic.Int64
		l.m.Server().SetPreHook(func(_ *server.Peer, cmd string, _ ...string) bool {
			return cmd == "SUBSCRIBE" && swallowed.Add(1) == 1
		})
		for i := range 4 {
			if late, polls := l.waits(fmt.Sprint("unknown", i), length); late > longest {
				t.Errorf("a value comes %v after the load, with %d polls, want %v at most", late, polls, longest)
			}
		}
		if late, _ := l.waits("later", length); late != 0 || swallowed.Load() < 2 {
			t.Errorf("later the value comes %v after the load, after %d tries to listen", late, swallowed.Load())
		}
	})
}

// Wake-ups that end no wait, as many as there may be, cause no more polls than waiting without any.
//
//fault:forged-wake-ups
func TestWake_Flood(t *testing.T) {
	const length = 10 * time.Second
	inListening(t, func(t *testing.T, l *listening) {
		flood := time.NewTicker(time.Millisecond)
		defer flood.Stop()
		over := make(chan struct{})
		forger := redistest.NewMiniClient(t, l.m)
		go func() {
			for {
				select {
				case <-flood.C:
					forger.Publish(t.Context(), l.channel("k"), "forged")
				case <-over:
					return
				}
			}
		}()
		late, polls := l.waits("k", length)
		close(over)
		if most := 12 + int(length/(250*time.Millisecond)); late > longest || polls > most {
			t.Errorf("late by %v after %d polls, want %v and %d at most", late, polls, longest, most)
		}
		synctest.Wait()
	})
}
