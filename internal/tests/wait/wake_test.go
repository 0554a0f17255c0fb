package wait_test

import (
	"errors"
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

// A listening watch lets its processes listen. It counts the commands of the waiting process,
// and the subscriptions of both.
type listening struct {
	*watch
	sent, subscriptions, losses atomic.Int64
	lost                        atomic.Bool // messages are
}

func inListening(t *testing.T, lockTTL time.Duration, run func(t *testing.T, l *listening)) {
	inWatch(t, singlefill.Options[string]{LockTTL: lockTTL, RedisTimeout: time.Second}, func(t *testing.T, w *watch) {
		l := &listening{watch: w}
		w.m.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
			if strings.HasSuffix(cmd, "SUBSCRIBE") && cmd != "SSUBSCRIBE" { // which miniredis does not know
				l.subscriptions.Add(1)
			}
			if cmd == "PUBLISH" && l.lost.Load() {
				l.losses.Add(1)
				c.WriteInt(1)
				return true
			}
			return false
		})
		w.waits("warm", time.Millisecond) // the server knows the scripts
		w.rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			if cmd.Name() != "hello" { // of a new connection
				l.sent.Add(1)
			}
			return nil
		}))
		run(t, l)
	})
}

// channel returns the channel of a key.
func (l *listening) channel(key string) string { return l.ns + ":{" + key + "}:lock" }

// onPublish calls do in place of each message. It returns how often it has done so.
func (l *listening) onPublish(do func(channel, message string)) (times *atomic.Int64) {
	times = new(atomic.Int64)
	l.m.Server().SetPreHook(func(c *server.Peer, cmd string, args ...string) bool {
		if cmd != "PUBLISH" {
			return false
		}
		times.Add(1)
		go do(args[0], args[1])
		c.WriteInt(1)
		return true
	})
	return times
}

// A waiter that listens has the value in the instant in which it is stored. That costs few commands,
// however long the load takes and whether or not its length is known.
func TestWake_AtTheStore(t *testing.T) {
	for _, length := range []time.Duration{20 * time.Millisecond, 137 * time.Millisecond, 1370 * time.Millisecond, 10 * time.Second} {
		t.Run(length.String(), func(t *testing.T) {
			inListening(t, 5*time.Second, func(t *testing.T, l *listening) {
				for i := range 3 {
					l.sent.Store(0)
					l.subscriptions.Store(0)
					late, polls := l.waits("k", length)
					if late != 0 {
						t.Errorf("wait %d: the value comes %v after the load", i, late)
					}
					if n := l.sent.Load() + l.subscriptions.Load(); n > 8 {
						t.Errorf("wait %d: %d commands, %d of them polls; want 8 at most", i, n, polls)
					}
				}
			})
		})
	}
}

// Every end of a load in another process wakes its waiters.
func TestWake_WhateverEndsTheLoad(t *testing.T) {
	boom := errors.New("boom")
	for name, end := range map[string]func(t *testing.T, l *listening, load *cachetest.HeldLoad[string]){
		"value":     func(_ *testing.T, _ *listening, load *cachetest.HeldLoad[string]) { load.Give("v") },
		"failure":   func(_ *testing.T, _ *listening, load *cachetest.HeldLoad[string]) { load.Fail(boom) },
		"not found": func(_ *testing.T, _ *listening, load *cachetest.HeldLoad[string]) { load.Fail(singlefill.ErrNotFound) },
		"closed":    func(_ *testing.T, _ *listening, load *cachetest.HeldLoad[string]) { load.Fail(singlefill.ErrClosed) },
		"Set": func(t *testing.T, l *listening, _ *cachetest.HeldLoad[string]) {
			redistest.Must(t, l.there.Set(t.Context(), "k", "v"))
		},
		"Delete": func(t *testing.T, l *listening, _ *cachetest.HeldLoad[string]) {
			redistest.Must(t, l.there.Delete(t.Context(), "k"))
		},
		"Expire": func(t *testing.T, l *listening, _ *cachetest.HeldLoad[string]) {
			redistest.Must(t, l.there.Expire(t.Context(), "k"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			inListening(t, 5*time.Second, func(t *testing.T, l *listening) {
				src := cachetest.NewSource[string](t)
				loads, load := src.Begin(t.Context(), t, l.there, "k")
				waits := cachetest.GoGet(t.Context(), l.here, "k", cachetest.Gives("v"))
				time.Sleep(time.Second)
				begun := time.Now()
				end(t, l, load)
				waits.Result(t)
				if d := time.Since(begun); d != 0 {
					t.Errorf("the wait ends after %v", d)
				}
				if strings.Contains("Set Delete Expire", name) {
					load.Give("late")
				}
				loads.Result(t)
			})
		})
	}
}

// A deletion whose first reply is lost wakes the waiters too, although its second copy finds no lock.
//
//fault:lost-reply
func TestDelete_LostReply(t *testing.T) {
	for name, end := range map[string]func(l *listening) error{
		"Delete": func(l *listening) error { return l.there.Delete(l.t.Context(), "k") },
		"Clear":  func(l *listening) error { return l.there.Clear(l.t.Context()) },
	} {
		t.Run(name, func(t *testing.T) {
			inListening(t, 5*time.Second, func(t *testing.T, l *listening) {
				src := cachetest.NewSource[string](t)
				loads, load := src.Begin(t.Context(), t, l.there, "k")
				waits := cachetest.GoGet(t.Context(), l.here, "k", cachetest.Gives("v"))
				time.Sleep(time.Second)
				var lost atomic.Bool
				l.m.Server().SetPreHook(func(c *server.Peer, cmd string, keys ...string) bool {
					if cmd != "DEL" || lost.Swap(true) {
						return false
					}
					for _, key := range keys {
						l.m.Del(key)
					}
					c.Close()
					return true
				})
				begun := time.Now()
				redistest.Must(t, end(l))
				waits.Result(t)
				if d := time.Since(begun); d > longest || !lost.Load() {
					t.Errorf("the wait ends after %v, want %v at most; a reply was lost: %t", d, longest, lost.Load())
				}
				load.Give("late")
				loads.Result(t)
			})
		})
	}
}

// A lost wake-up costs the rest of LockTTL or listeningPause, and no more than the shorter of them. Then waiters poll
// as without wake-ups, for a minute.
//
//fault:lost-wake-ups
//fault:frozen-listener
func TestWake_Lost(t *testing.T) {
	for lockTTL, most := range map[time.Duration]time.Duration{
		5 * time.Second:  5 * time.Second,
		25 * time.Second: 7 * time.Second * 5 / 4,
	} {
		t.Run(lockTTL.String(), func(t *testing.T) {
			inListening(t, lockTTL, func(t *testing.T, l *listening) {
				l.lost.Store(true)
				for i, length := range []time.Duration{200 * time.Millisecond, time.Second, 5 * time.Second, 2 * time.Second} {
					time.Sleep(2 * time.Minute) // until it listens again
					late, _ := l.waits(fmt.Sprint("k", i), length)
					if late > most || i == 0 && late < longest || l.losses.Load() != int64(i+1) {
						t.Errorf("wait %d: late by %v after %d lost messages, want %v at most", i, late, l.losses.Load(), most)
					}
				}
				time.Sleep(time.Second) // until it is sure that none comes
				before := l.subscriptions.Load()
				for i := range 10 {
					if late, polls := l.waits(fmt.Sprint("unknown", i), 2*time.Second); late > longest {
						t.Errorf("a value comes %v after the load, with %d polls, want %v at most", late, polls, longest)
					}
				}
				if n := l.subscriptions.Load() - before; n > 0 {
					t.Errorf("%d subscriptions after one whose message was lost", n)
				}
				l.lost.Store(false)
				time.Sleep(time.Minute)
				if late, _ := l.waits("later", 2*time.Second); late != 0 {
					t.Errorf("a minute later the value comes %v after the load", late)
				}
			})
		})
	}
}

// What is published before a waiter is subscribed is not lost: it asks once it is.
//
//fault:strange-wake-ups
func TestWake_PublishedBeforeSubscribed(t *testing.T) {
	const length, later = 2 * time.Second, time.Millisecond
	inListening(t, 5*time.Second, func(t *testing.T, l *listening) {
		confirm := make(chan struct{})
		l.m.Server().SetPreHook(func(_ *server.Peer, cmd string, _ ...string) bool {
			if cmd == "SUBSCRIBE" {
				<-confirm
			}
			return false
		})
		go func() {
			time.Sleep(length + later)
			close(confirm)
		}()
		if late, _ := l.waits("k", length); late > later {
			t.Errorf("the value comes %v after the load, want %v at most", late, later)
		}
	})
}

// Callers that join a wait that listens cause no polls.
//
//fault:long-waits
func TestWake_JoinersSendNothing(t *testing.T) {
	inListening(t, 5*time.Second, func(t *testing.T, l *listening) {
		src := cachetest.NewSource[string](t)
		loads, load := src.Begin(t.Context(), t, l.there, "k")
		calls := []*cachetest.Call[string]{cachetest.GoGet(t.Context(), l.here, "k", cachetest.MustNotLoad[string](t))}
		time.Sleep(time.Second)
		l.sent.Store(0)
		for range 100 {
			calls = append(calls, cachetest.GoGet(t.Context(), l.here, "k", cachetest.MustNotLoad[string](t)))
			time.Sleep(10 * time.Millisecond)
		}
		if n := l.sent.Load(); n != 0 {
			t.Errorf("100 callers caused %d commands", n)
		}
		load.Give("v")
		for _, c := range calls {
			c.Want(t, "v")
		}
		loads.Want(t, "v")
	})
}

// A waiter whose holder dies takes over at the end of the lock, though nothing wakes it.
//
//fault:killed-holder
func TestWake_HolderDies(t *testing.T) {
	inListening(t, 5*time.Second, func(t *testing.T, l *listening) {
		const life = 10 * time.Second
		dead := "H" + strings.Repeat("T", 26) + strings.Repeat("0", 16)
		redistest.Must(t, l.rdb.Set(t.Context(), l.channel("k"), dead, life).Err())
		begun := time.Now()
		cachetest.GoGet(t.Context(), l.here, "k", cachetest.Gives("v")).Want(t, "v")
		if d := time.Since(begun); d > life+6*time.Millisecond {
			t.Errorf("it takes over after %v, want %v", d, life)
		}
		if n := l.sent.Load(); n > 12 {
			t.Errorf("%d commands", n)
		}
	})
}

// A late wake-up makes its waiter late by as much. The process listens on unless the message comes
// half a second later than the value.
//
//fault:strange-wake-ups
func TestWake_Late(t *testing.T) {
	const length = 2 * time.Second
	for _, delay := range []time.Duration{100 * time.Millisecond, 400 * time.Millisecond, 3 * time.Second} {
		t.Run(delay.String(), func(t *testing.T) {
			inListening(t, 5*time.Second, func(t *testing.T, l *listening) {
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

// Wake-ups that end no wait, as many as there may be, cause no more polls than waiting without any.
//
//fault:forged-wake-ups
func TestWake_Flood(t *testing.T) {
	const length = 10 * time.Second
	inListening(t, 5*time.Second, func(t *testing.T, l *listening) {
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
