package client

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// What one user of a client learns of its server protects all users, and each reports the breaker. An
// answer to any of them closes it.
func TestBreaker_Shared(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		a, b := watch(t, rdb, timeout), watch(t, rdb, timeout)
		locker := New(rdb, timeout, a.Client.failed, nil, nil)
		m.SetError(loading)
		a.openBreaker()
		synctest.Wait()
		late := watch(t, rdb, timeout) // it comes when the breaker is open
		synctest.Wait()
		for who, w := range map[string]*watcher{"a": a, "b": b, "late": late} {
			if !w.Away("k") || !w.AnyAway() || w.Refusal("k") == nil {
				t.Errorf("%s: away %t, any %t, refusal %v", who, w.Away("k"), w.AnyAway(), w.Refusal("k"))
			}
		}
		if err := locker.Refusal("k"); err == nil {
			t.Errorf("a lock is refused with %v", err)
		}
		m.SetError("")
		_ = b.do(nil) // a command that is sent nevertheless, such as a Delete
		synctest.Wait()
		for who, w := range map[string]*watcher{"a": a, "b": b, "late": late} {
			if got := w.reported(); w.Away("k") || w.AnyAway() || len(got) != 2 || !got[0] || got[1] {
				t.Errorf("%s: away %t, any %t, told %v", who, w.Away("k"), w.AnyAway(), got)
			}
		}
		if err := locker.Refusal("k"); err != nil {
			t.Errorf("a lock is refused with %v after an answer", err)
		}
	})
}

// A lock tries by itself when no cache probes the server any more, also if its command has to wait at the gate.
func TestBreaker_LockAfterTheLastCache(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		w := watch(t, rdb, timeout)
		locker := New(rdb, timeout, w.Client.failed, nil, nil)
		locker.node.alone.size = 1
		m.SetError(loading)
		w.openBreaker()
		if locker.Refusal("k") == nil {
			t.Error("it tries while a cache probes")
		}
		w.close()
		if err := locker.Refusal("k"); err != nil {
			t.Error(err)
		}
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				_, err := Do(t.Context(), locker, "lock", "k", func(context.Context) (int, error) { time.Sleep(timeout / 2); return 1, nil })
				redistest.Must(t, err)
			})
		}
		wg.Wait()
		if w.node.line.Away(0) != nil {
			t.Error("open after an answer")
		}
	})
}

// A caller that asks alone waits for a silent server once, whatever its first command was: that and an unanswered ping
// open the breaker.
func TestBreaker_OneCaller(t *testing.T) {
	t.Parallel()
	type get = func(ctx context.Context) (string, error)
	for name, first := range map[string]func(ctx context.Context, w *watcher, get get) error{
		"a command that overtakes": func(ctx context.Context, w *watcher, get get) error {
			_, err := doNow(ctx, w.Client, "now", "k", get)
			return err
		},
		"a command with less time": func(ctx context.Context, w *watcher, get get) error {
			const within = timeout * 19 / 20
			begun := time.Now()
			_, err := DoWithin(ctx, w.Client, Command{Op: "within", Key: "k", Within: within}, get)
			if took := time.Since(begun); took != within {
				t.Errorf("it took %v, want %v", took, within)
			}
			return err
		},
		"a script that takes": func(ctx context.Context, w *watcher, _ get) error {
			s := NewTaking("return 1")
			return Run(ctx, w.Client, Command{Op: "script", Key: "k", Within: timeout}, ScriptCall{s, append(s.Call(0, 1), "")}, (*redis.Cmd).Int).Err
		},
	} {
		runInBubble(t, name, func(t *testing.T) {
			w := watch(t, mute(t), timeout)
			begun := time.Now()
			if err := first(t.Context(), w, func(ctx context.Context) (string, error) { return w.Redis.Get(ctx, "k").Result() }); err == nil {
				t.Error("answered")
			}
			_, _, _ = w.Get(t.Context(), nil, "k")
			if took := time.Since(begun); took > timeout {
				t.Errorf("it and a GET have waited for %v", took)
			}
		})
	}
}

// When the breaker opens, commands that are on their way keep no caller waiting, whichever cache or lock has sent them.
// Callers are released before the outage is reported.
func TestBreaker_OpensForThoseThatWait(t *testing.T) {
	t.Parallel()
	for kind, open := range muteKinds() {
		if kind == "wrapped" { // by a value: two caches on it share nothing
			continue
		}
		for way, get := range gets {
			runInBubble(t, kind+"/"+way, func(t *testing.T) {
				rdb := open(t)
				a, b := watch(t, rdb, timeout), watch(t, rdb, timeout)
				locker := &watcher{Client: New(rdb, timeout, b.Client.failed, nil, nil)}
				a.changes.changed = func(error) { time.Sleep(time.Minute) } // the user's function, which may take long
				b.changes.changed = a.changes.changed
				begun := time.Now()
				go func() { _ = get(a, t.Context()) }()
				for range 10 {
					time.Sleep(timeout / 12)
					for name, w := range map[string]*watcher{"a cache": b, "the one that notices": a, "a lock": locker} {
						go func() {
							err := get(w, t.Context())
							if took := time.Since(begun); took > timeout || !errors.Is(err, ErrAway) && took < timeout*15/16 {
								t.Errorf("%s: %v after %v", name, err, took)
							}
						}()
					}
				}
				time.Sleep(2 * time.Minute)
				if got := b.failures("get"); got < 20 {
					t.Errorf("%d of 20 commands have failed", got)
				}
			})
		}
	}
}

// What a caller waits for is not sent again while the breaker is open.
func TestAgain(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := watch(t, mute(t), timeout)
		go w.openBreaker()
		time.Sleep(timeout / 2)
		begun := time.Now()
		var tries atomic.Int64 // by commands that their caller has left
		_, err := Do(t.Context(), w.Client, "op", "k", func(ctx context.Context) (any, error) {
			tries.Add(1)
			time.Sleep(timeout)
			return nil, io.EOF
		})
		if !errors.Is(err, ErrAway) || tries.Load() != 1 || time.Since(begun) != timeout/2 {
			t.Errorf("%v after %d tries and %v", err, tries.Load(), time.Since(begun))
		}
	})
}
