package lock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// Commands that arrive late, or twice.

// What a caller has given up before its client had a connection is never executed, although the
// client would write it then.
//
//fault:slow-connection
func TestAcquire_SlowConnection(t *testing.T) {
	for what, frozen := range map[string]bool{"OnConnect": false, "handshake": true} {
		t.Run(what, func(t *testing.T) {
			locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
				s := redistest.Start(t)
				for _, act := range []string{"acquire", "release", "abandon"} {
					k.Command(t, s, act)
				}
				rdb, connect := s.Unconnected(t, frozen)
				l, err := k.Open(rdb, "n", &lock.Options{RedisTimeout: 50 * time.Millisecond, TTL: locktest.Long})
				redistest.Must(t, err)
				if _, err := l.TryAcquire(t.Context()); !errors.Is(err, lock.ErrUnavailable) {
					t.Errorf("TryAcquire = %v, want ErrUnavailable", err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
				defer cancel()
				_, err = l.Acquire(ctx)
				if !errors.Is(err, lock.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Acquire = %v, want ErrUnavailable and the error of its context", err)
				}
				connect()
				if n := s.Calls("evalsha"); n != 0 {
					t.Fatalf("%d commands were executed late", n)
				}
				k.WantFree(t, s, "n")
			})
		})
	}
}

// An acquire that arrives after its caller has given up takes nothing.
//
//fault:late-command
func TestAcquire_ArrivesAfterGivingUp(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		for _, what := range []string{"after RedisTimeout", "with its context"} {
			t.Run(what, func(t *testing.T) {
				p := behindProxy(t, k, redistest.Start(t))
				late := p.on("acquire", redistest.HoldRequest).Times(1)
				p.Command(t, p.s, "abandon")
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				timeout := hasty
				if what == "with its context" {
					timeout = locktest.Patient
					go func() { <-late.Hit(); cancel() }()
				}
				lease, err := p.through(timeout, noRetries).Acquire(ctx)
				if lease != nil || !errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, context.Canceled) != (ctx.Err() != nil) {
					t.Fatalf("Acquire = %v, %v, want ErrAmbiguous", lease, err)
				}
				redistest.Await(t, "the attempt is marked as abandoned", func() bool {
					_, marks := p.left()
					return len(marks) == 1
				})
				p.deliver(late)
				p.wantNothing()
				p.wantFree()
			})
		}
	})
}

// An acquire that arrives after the lease of its second try was released takes nothing.
//
//fault:late-command
func TestAcquire_ArrivesAfterRelease(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		p := behindProxy(t, k, redistest.Start(t))
		late := p.on("acquire", redistest.HoldRequest).Times(1)
		p.Command(t, p.s, "release")
		got := k.Wait(t, p.through(locktest.Patient, noRetries))
		awaitFault(t, late)
		p.proxy.Cut() // the second try is on another connection
		locktest.Release(t, got())
		p.deliver(late)
		p.wantNothing()
		p.wantFree()
	})
}

// A late renewal brings no lease back, and does not affect the next holder.
//
//fault:late-command
func TestRenewal_ArrivesLate(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		for what, taken := range map[string]bool{"while the lock is free": false, "while others hold it": true} {
			t.Run(what, func(t *testing.T) {
				p := behindProxy(t, k, redistest.Start(t))
				admin, key := p.s.Admin(), locktest.Key(p.name)
				late := p.on("renew", redistest.HoldRequest).Times(1)
				l := k.Locker(t, p.proxy.Client(t, noRetries), p.name, hasty, 1800*time.Millisecond)
				lease := locktest.Take(t, l)
				awaitFault(t, late)
				p.proxy.Refuse(true) // no other renewal
				l.WantLost(t, lease, notRenewed)
				redistest.Await(t, "the lease has ended", func() bool { return k.Holders(t, admin, p.name) == 0 })
				if taken {
					k.Fill(t, p.direct())
				}
				before, left := p.state(), admin.PTTL(t.Context(), key).Val()
				p.deliver(late)
				if now := p.state(); now != before {
					t.Errorf("the lock had %s, and has %s", before, now)
				}
				if now := admin.PTTL(t.Context(), key).Val(); now > left || left > 0 && now < left/2 {
					t.Errorf("the lock had %v to live, and has %v", left, now)
				}
			})
		}
	})
}

// A late release does not affect the next holder.
//
//fault:late-command
func TestRelease_ArrivesLate(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		p := behindProxy(t, k, redistest.Start(t))
		l := p.through(hasty, noRetries)
		lease := locktest.Take(t, l)
		late := p.on("release", redistest.HoldRequest).Times(1)
		if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("Release = %v, want ErrAmbiguous", err)
		}
		awaitFault(t, late)
		redistest.Await(t, "another try has released it", func() bool { return l.Count("released") == 1 })
		k.Fill(t, p.direct())
		before := p.state()
		p.deliver(late)
		if now := p.state(); now != before || before == "" {
			t.Errorf("the lock had %s, and has %s", before, now)
		}
	})
}

// deliver delivers a late command, and waits until the server has executed it.
func (p proxied) deliver(late *redistest.Rule) {
	p.t.Helper()
	before := p.s.Calls("evalsha")
	late.Release()
	redistest.Await(p.t, "the late command is executed", func() bool { return p.s.Calls("evalsha") > before })
}
