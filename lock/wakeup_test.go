package lock_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// listening is how long a waiter takes at most until it listens.
const listening = 500 * time.Millisecond

// waiters starts n waiters, each with another client and Locker, and waits until they are subscribed.
// Each sends the lease that it gets.
func startWaiters(ctx context.Context, t *testing.T, m *miniredis.Miniredis, kind string, n int) <-chan *lock.Lease {
	leases := make(chan *lock.Lease, n)
	for range n {
		l := newLocker(t, kind, redistest.NewMiniClient(t, m), "n", nil)
		go func() {
			if lease, err := l.Acquire(ctx); err == nil {
				leases <- lease
			}
		}()
		time.Sleep(listening)
	}
	return leases
}

// waitingKey returns the key that has the tokens of waiters that listen.
func waitingKey(kind string) string {
	if kind == "fair" {
		return queueKey
	}
	return "{n}:lock:waiting"
}

// A released lock is held again at that very instant, however many wait, and one of them asks.
func TestWakeUp_AtTheRelease(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb)
		c := record(m)
		lease := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
		const n = 20
		leases := startWaiters(t.Context(), t, m, kind, n)
		for i := range n {
			time.Sleep(time.Second)
			c.reset()
			released := time.Now()
			mustRelease(t, lease)
			lease = <-leases
			wantElapsed(t, fmt.Sprintf("waiter %d has it", i), released, 0)
			synctest.Wait()
			if scripts := len(c.all()); scripts != 2 {
				t.Errorf("%d scripts for a release", scripts)
			}
		}
		mustRelease(t, lease)
	})
}

// As many waiters of a semaphore are woken as there are free places.
func TestWakeUp_OnePerFreePlace(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		const size = 3
		var held []*lock.Lease
		for range size {
			held = append(held, mustAcquire(t, semaphore(t, rdb, "n", size, nil)))
		}
		leases := make(chan *lock.Lease)
		for range 2 * size {
			l := semaphore(t, redistest.NewMiniClient(t, m), "n", size, nil)
			go func() { leases <- mustAcquire(t, l) }()
			time.Sleep(listening)
		}
		for range 2 {
			time.Sleep(time.Second)
			released := time.Now()
			for _, lease := range held {
				mustRelease(t, lease)
			}
			for i := range held {
				held[i] = <-leases
			}
			wantElapsed(t, "all places are taken", released, 0)
		}
		for _, lease := range held {
			mustRelease(t, lease)
		}
	})
}

// A waiter that is woken and does nothing costs the others what it costs without wake-ups; one whose
// connection is gone costs nothing.
//
//fault:woken-waiter
func TestWakeUp_DeadWaiter(t *testing.T) {
	for what, limit := range map[string]time.Duration{"killed": 0, "frozen": longestPause} {
		for _, kind := range []string{"mutex", "semaphore"} { // a fair mutex waits for WaiterTTL
			runInBubble(t, what+" "+kind, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				lease := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
				leases := startWaiters(t.Context(), t, m, kind, 2)
				dead := strings.Repeat("D", 26)
				if what == "frozen" {
					ear := rdb.Subscribe(t.Context(), "{n}:lock:"+dead[:12])
					defer ear.Close()
					if _, err := ear.Receive(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := m.ZAdd(waitingKey(kind), 1, dead); err != nil {
					t.Fatal(err)
				}
				released := time.Now()
				mustRelease(t, lease)
				lease = <-leases
				if took := time.Since(released); took > limit {
					t.Errorf("the next one has it after %v, want %v at most", took, limit)
				}
				if members, _ := m.ZMembers(waitingKey(kind)); len(members) > 1 {
					t.Errorf("%d are left among the waiting", len(members))
				}
				mustRelease(t, lease)
				mustRelease(t, <-leases)
			})
		}
	}
}

// A release wakes the waiter with the reservation, not the waiter that has waited longest. If that
// waiter is dead, the free lock is kept for RedisTimeout and 200 ms, as without wake-ups.
//
//fault:killed-reservation
func TestWakeUp_Reservation(t *testing.T) {
	for _, dead := range []bool{false, true} {
		for _, kind := range []string{"mutex", "semaphore"} {
			what := fmt.Sprintf("%s, dead %v", kind, dead)
			runInBubble(t, what, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				lease := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
				first := startWaiters(t.Context(), t, m, kind, 1)
				second := startWaiters(t.Context(), t, m, kind, 1)
				tokens, err := m.ZMembers(waitingKey(kind))
				if err != nil || len(tokens) != 2 {
					t.Fatal(tokens, err)
				}
				limit, reserved := time.Duration(0), tokens[1]
				if dead {
					limit, reserved = 700*time.Millisecond+longestPause, token("D")
				}
				since, _ := m.ZScore(waitingKey(kind), tokens[1])
				redistest.Must(t, m.Set("{n}:lock:next", fmt.Sprintf("%020.0f", since)+reserved))
				m.SetTTL("{n}:lock:next", time.Minute)
				released := time.Now()
				mustRelease(t, lease)
				other := first
				select {
				case lease = <-first:
					if other = second; !dead {
						t.Error("the reservation was passed over")
					}
				case lease = <-second:
				}
				if took := time.Since(released); took > limit {
					t.Errorf("handed over after %v, want %v at most", took, limit)
				}
				mustRelease(t, lease)
				mustRelease(t, <-other)
			})
		}
	}
}

// A waiter that gives up after it was woken passes the wake-up on.
//
//fault:given-up
func TestWakeUp_PassedOn(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		client, f := withFaults(t, m)
		lease := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := make(chan error)
		go func() {
			_, err := newLocker(t, kind, client, "n", nil).Acquire(ctx)
			gaveUp <- err
		}()
		time.Sleep(time.Second)
		leases := startWaiters(t.Context(), t, m, kind, 2)
		f.set(noConnection, "acquire") // the woken waiter does not get it
		mustRelease(t, lease)
		synctest.Wait()
		begun := time.Now()
		f.set(nil)
		cancel()
		<-gaveUp
		lease = <-leases
		wantElapsed(t, "the next one has it", begun, 0)
		mustRelease(t, lease)
		mustRelease(t, <-leases)
	})
}

// Where subscriptions are refused, or messages get lost, a waiter gets the lock as if there were no wake-ups,
// except for a message that was lost before.
//
//fault:lost-wake-ups
func TestWakeUp_NobodyHears(t *testing.T) {
	for _, refused := range []string{"SSUBSCRIBE", "SUBSCRIBE", "PUBLISH"} {
		runEachKind(t, refused, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
			met := 0
			m.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
				if cmd != refused {
					return false
				}
				met++
				c.WriteError("NOPERM this user has no permissions")
				return true
			})
			lease := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
			l := newLocker(t, kind, redistest.NewMiniClient(t, m), "n", nil)
			for i := range 5 {
				leases := make(chan *lock.Lease)
				go func() { leases <- mustAcquire(t, l) }()
				time.Sleep(time.Second)
				released := time.Now()
				mustRelease(t, lease)
				lease = <-leases
				limit := longestPause
				if i == 0 && refused == "PUBLISH" {
					limit = 5 * time.Second
				}
				if took := time.Since(released); took > limit {
					t.Errorf("hand-over %d took %v", i, took)
				}
				time.Sleep(time.Second)
				mustRelease(t, lease)
				lease = mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
			}
			mustRelease(t, lease)
			if met == 0 {
				t.Error("nothing was refused")
			}
		})
	}
}

// However many processes wait, each goes on to listen, also one for which there is no room among those that a release
// wakes; and it is woken once there is.
func TestWakeUp_Crowd(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		if kind == "fair" {
			return // its queue has room for all
		}
		learn(t, rdb)
		holder := mustAcquire(t, newLocker(t, kind, rdb, "n", &lock.Options{TTL: time.Hour}))
		var crowd []redis.Z
		for i := range 500 {
			crowd = append(crowd, redis.Z{Score: float64(i), Member: fmt.Sprintf("%026d", i)})
		}
		key := waitingKey(kind)
		redistest.Must(t, rdb.ZAdd(t.Context(), key, crowd...).Err())
		redistest.Must(t, rdb.Expire(t.Context(), key, time.Hour).Err())
		leases := startWaiters(t.Context(), t, m, kind, 1)
		for _, left := range []int{500, 500, 400, 400} {
			redistest.Must(t, rdb.ZRemRangeByScore(t.Context(), key, fmt.Sprint(left), "500").Err())
			time.Sleep(10 * time.Second) // it asks
			if channels := m.PubSubChannels("*"); len(channels) != 1 {
				t.Fatalf("beside %d others the waiter listens to %q", left, channels)
			}
		}
		released := time.Now()
		mustRelease(t, holder)
		mustRelease(t, <-leases)
		wantElapsed(t, "the waiter has it", released, 0)
	})
}

// A foreign key in the place of the waiters is left alone: it gets no TTL.
//
//fault:foreign-key
func TestWakeUp_ForeignKey(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		if kind == "fair" {
			return // see TestErrConflict_ForeignKey
		}
		holder := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
		key := waitingKey(kind)
		redistest.Planted(t, key)
		redistest.Must(t, m.Set(key, "foreign"))
		leases := startWaiters(t.Context(), t, m, kind, 1)
		time.Sleep(10 * time.Second)
		mustRelease(t, holder)
		mustRelease(t, <-leases)
		if s, err := m.Get(key); s != "foreign" || err != nil || m.TTL(key) != 0 {
			t.Errorf("it holds %q for %v, %v", s, m.TTL(key), err)
		}
		m.Del(key)
	})
}

// Messages that lead to nothing cost few commands, and the waiter gets the lock as if there were none.
//
//fault:forged-wake-ups
func TestWakeUp_Forged(t *testing.T) {
	for _, what := range []string{"its own token", "another token", "no token"} {
		runEachKind(t, what, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
			lease := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
			leases := startWaiters(t.Context(), t, m, kind, 1)
			tokens, err := m.ZMembers(waitingKey(kind))
			if err != nil || len(tokens) != 1 {
				t.Fatal(tokens, err)
			}
			message := map[string]string{"its own token": tokens[0], "another token": token("X")}[what]
			c := record(m)
			heard := 0
			for range 3000 {
				heard += m.Publish("{n}:lock:"+tokens[0][:12], message)
				time.Sleep(time.Millisecond)
			}
			if n := len(c.all()); heard != 3000 || n > 45 {
				t.Errorf("%d messages received, %d commands in 3 s", heard, n)
			}
			released := time.Now()
			mustRelease(t, lease)
			lease = <-leases
			if took := time.Since(released); took > longestPause {
				t.Errorf("handed over after %v", took)
			}
			mustRelease(t, lease)
		})
	}
}

// When no caller waits any more, no subscription and no waiter is left.
func TestWakeUp_NothingIsLeft(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		lease := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
		ctx, cancel := context.WithCancel(t.Context())
		startWaiters(ctx, t, m, kind, 3)
		if n := len(m.PubSubChannels("{n}:lock:*")); n != 3 {
			t.Errorf("%d channels for 3 waiters", n)
		}
		if ttl := m.TTL(waitingKey(kind)); ttl <= 0 {
			t.Errorf("the waiting live for %v", ttl)
		}
		cancel()
		time.Sleep(3 * time.Second)
		if channels := m.PubSubChannels("*"); len(channels) > 0 {
			t.Errorf("channels that are left: %q", channels)
		}
		mustRelease(t, lease)
		wantKeys(t, rdb, "n", ":fence")
	})
}
