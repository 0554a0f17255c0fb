package client

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// What one user of a client learns of its server protects all, and each is told of the breaker. An answer
// to any of them closes it.
func TestBreaker_Shared(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		a, b := watch(t, rdb, timeout), watch(t, rdb, timeout)
		locker := New(rdb, timeout, a.Client.failed, nil, nil)
		m.SetError("LOADING Redis is loading the dataset in memory")
		a.openBreaker()
		synctest.Wait()
		late := watch(t, rdb, timeout) // it comes when the breaker is open
		synctest.Wait()
		for who, w := range map[string]*watcher{"a": a, "b": b, "late": late} {
			if !w.Away("k") || !w.AnyAway() || w.Refusal("k") == nil {
				t.Errorf("%s: away %t, any %t, refusal %v", who, w.Away("k"), w.AnyAway(), w.Refusal("k"))
			}
		}
		if err := locker.Refused("k"); err == nil || !Unsent(err) {
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
		if err := locker.Refused("k"); err != nil {
			t.Errorf("a lock is refused with %v after an answer", err)
		}
	})
}

// A cache that waits for a short time only does not tell one that is patient that a slow server is dead. If
// the server stays silent, the patient one learns it when its own time is over.
func TestBreaker_SharedByHastyAndPatient(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		rdb := mute(t)
		hasty, patient := watch(t, rdb, timeout/10), watch(t, rdb, timeout)
		hasty.node.limit.half, patient.node.limit.half = nil, nil // a ping would show that the answer below is none
		begun := time.Now()
		var wg sync.WaitGroup
		for range Limit {
			wg.Go(func() { _ = hasty.get(t.Context()) })
		}
		wg.Wait()
		synctest.Wait()
		if !hasty.Away("k") || patient.Away("k") || patient.AnyAway() || patient.Refusal("k") != nil {
			t.Errorf("after %v: hasty %t, patient %t", time.Since(begun), hasty.Away("k"), patient.Away("k"))
		}
		time.Sleep(timeout - time.Since(begun))
		synctest.Wait()
		if !patient.Away("k") || !patient.AnyAway() || len(patient.reported()) != 1 {
			t.Errorf("after %v: patient %t, told %v", time.Since(begun), patient.Away("k"), patient.reported())
		}
		time.Sleep(3 * timeout)
		_ = patient.do(nil)
		if hasty.Away("k") || patient.Away("k") {
			t.Error("open after an answer")
		}
		time.Sleep(2 * timeout) // a probe is on its way
		if hasty.AnyAway() || patient.AnyAway() {
			t.Error("told of no end")
		}
	})
}

// Callers that joined before a ping was sent that was not answered need no other one.
func TestReachable_SharedByThoseBefore(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := watch(t, mute(t), timeout)
		joined := time.Now()
		time.Sleep(time.Millisecond)
		var wg sync.WaitGroup
		begun := time.Now()
		for i := range 50 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * timeout / 100)
				if w.Reachable(t.Context(), "k", joined) || time.Since(begun) > timeout {
					t.Errorf("caller %d has its answer after %v", i, time.Since(begun))
				}
			})
		}
		wg.Wait()
		if n := w.failures("ping"); n != 1 {
			t.Errorf("%d pings, want 1", n)
		}
		if w.Reachable(t.Context(), "k", joined) || time.Since(begun) > timeout {
			t.Errorf("it asks again")
		}
		time.Sleep(time.Minute)
	})
}

// A caller that asks alone waits for a silent server once: its first command and an unanswered ping open the
// breaker. A ping that is answered keeps it closed, however slow the command is.
func TestBreaker_OneCaller(t *testing.T) {
	t.Parallel()
	for kind, open := range muteKinds() {
		if kind == "wrapped" { // by a value: two caches on it share nothing
			continue
		}
		runInBubble(t, kind, func(t *testing.T) {
			rdb := open(t)
			a, b := watch(t, rdb, timeout), watch(t, rdb, timeout)
			begun := time.Now()
			for _, w := range []*watcher{a, b, a, b} {
				if _, _, err := w.Get(t.Context(), time.Now(), "k"); err == nil {
					t.Fatal("answered")
				}
			}
			if took := time.Since(begun); took > timeout {
				t.Errorf("four commands of two caches have waited for %v", took)
			}
		})
	}
	runInBubble(t, "answers pings", func(t *testing.T) {
		_, rdb := redistest.StartMini(t)
		rdb.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if cmd.Name() == "get" {
				<-ctx.Done()
				return ctx.Err()
			}
			return next(ctx, cmd)
		}))
		w := watch(t, rdb, timeout)
		for range 2 * Limit {
			_ = w.get(t.Context())
			if w.AnyAway() {
				t.Fatal("open, although the server answers pings")
			}
		}
	})
}
