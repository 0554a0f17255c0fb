package lock_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A network that is bad all the time, for many callers. What is measured is logged.

// Clients whose connections are killed all the time never hold a lock together.
//
//fault:killed-connections
func TestAcquire_KilledConnections(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	for _, k := range locktest.Kinds {
		for _, act := range []string{"acquire", "renew", "release", "abandon"} {
			k.Command(t, s, act)
		}
	}
	var kills atomic.Int64
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				n, _ := s.Admin().ClientKillByFilter(context.Background(), "type", "normal", "skipme", "yes").Result()
				kills.Add(n)
			}
		}
	}()
	var all sync.WaitGroup
	for _, k := range locktest.Kinds {
		all.Go(func() {
			c := &locktest.Crowd{Kind: k, Lockers: []*locktest.Locker{
				k.Locker(t, s.Client(t), k.Name, time.Second, locktest.Long),
				k.Locker(t, s.Client(t, redistest.NoRetry), k.Name, time.Second, locktest.Long),
			}}
			c.Run(t, 3, func(int) bool { return kills.Load() < 150 })
		})
	}
	all.Wait()
	close(stop)
	<-stopped
	t.Logf("%d connections were killed", kills.Load())
	for _, k := range locktest.Kinds {
		k.WantFree(t, s, k.Name)
	}
}

// A Redis that executes everything and is not heard grants nothing for good: callers get
// ErrAmbiguous, grants are given back, and a holder learns in time that its lease could not be
// renewed.
//
//fault:one-way
func TestLease_RedisIsNotHeard(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		const ttl = 1800 * time.Millisecond
		p := behindProxy(t, k, redistest.Start(t))
		for _, act := range []string{"acquire", "renew", "release", "abandon"} {
			k.Command(t, p.s, act)
		}
		holder := k.Locker(t, p.proxy.Client(t, redistest.NoRetry), "held", hasty, ttl)
		lease := locktest.Take(t, holder)
		taken := time.Now()
		asks := k.Locker(t, p.proxy.Client(t, redistest.NoRetry), "asked", hasty, locktest.Long)
		// Except HELLO: without its reply no connection would be made, and nothing sent.
		rule := p.proxy.On(func(cmd []string) bool { return !strings.EqualFold(cmd[0], "HELLO") }, redistest.MuteReply)
		p.s.ResetCalls()
		if got, err := asks.Acquire(t.Context()); got != nil || !errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("Acquire = %v, %v, want ErrAmbiguous", got, err)
		}
		if p.s.Calls("zscore") == 0 {
			t.Error("no acquire was executed")
		}
		holder.WantLost(t, lease, notRenewed)
		t.Logf("%s: the holder learnt it %v after its grant; TTL is %v", k.Name,
			time.Since(taken).Round(time.Millisecond), ttl)
		if rule.Fired() == 0 {
			t.Error("no reply was lost")
		}
		k.WantFree(t, p.s, "asked")
		k.WantFree(t, p.s, "held")
	})
}
