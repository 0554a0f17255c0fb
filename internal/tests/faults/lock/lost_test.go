package lock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// Requests and replies that are lost.

// retryingClients are clients that retry by themselves, and clients that do not.
var retryingClients = map[string]func(*redis.Options){"client retries": func(*redis.Options) {}, "client does not": redistest.NoRetry}

// ways are the ways to lose a command such that there is time for a retry.
var ways = []struct {
	name    string
	action  redistest.Action
	cut     bool // the connection, when the fault has come about
	clients map[string]func(*redis.Options)
}{
	{"request lost", redistest.CloseBefore, false, retryingClients},
	{"reply lost", redistest.HoldReply, true, retryingClients},
	{"reset in the middle of the reply", redistest.ResetReply, false, retryingClients},
	{"request lost in silence", redistest.DropRequest, false, map[string]func(*redis.Options){"client gives up": impatient}},
	{"reply lost in silence", redistest.MuteReply, false, map[string]func(*redis.Options){"client gives up": impatient}},
}

// eachWay runs a test with each kind, way and client. fault lets the first command of an act be
// lost.
func eachWay(t *testing.T, run func(t *testing.T, p proxied, client func(*redis.Options), fault func(act string) *redistest.Rule)) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		for _, way := range ways {
			for client, change := range way.clients {
				t.Run(way.name+", "+client, func(t *testing.T) {
					p := behindProxy(t, k, redistest.Shared(t))
					run(t, p, change, func(act string) *redistest.Rule {
						rule := p.on(act, way.action).Times(1)
						if way.cut {
							go func() {
								select {
								case <-rule.Hit():
									p.proxy.Cut()
								case <-t.Context().Done():
								}
							}()
						}
						return rule
					})
				})
			}
		}
	})
}

// Acquire and Release retry after a lost request or reply. The lock is taken once, and released once.
//
//fault:lost-request
//fault:lost-reply
//fault:reset
func TestLease_LostOnce(t *testing.T) {
	eachWay(t, func(t *testing.T, p proxied, client func(*redis.Options), fault func(string) *redistest.Rule) {
		last := locktest.Take(t, p.Locker(t, p.s.Client(t), p.name, locktest.Patient, locktest.Long))
		locktest.Release(t, last)
		for _, act := range []string{"acquire", "release"} {
			rule := fault(act)
			l := p.through(locktest.Patient, client)
			lease := locktest.Take(t, l)
			if n := p.Holders(t, p.s.Admin(), p.name); n != 1 {
				t.Errorf("%d hold it, want 1", n)
			}
			now, _, _ := strings.Cut(p.s.Admin().Get(t.Context(), locktest.Key(p.name)+":fence").Val(), " ")
			if fmt.Sprint(lease.Fence()) != now || lease.Fence() <= last.Fence() {
				t.Errorf("fence %d, in Redis %s, before %d", lease.Fence(), now, last.Fence())
			}
			last = lease
			locktest.Release(t, lease)
			awaitFault(t, rule)
			p.wantNothing()
			if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrLost) {
				t.Errorf("the second Release = %v, want ErrLost", err)
			}
			l.WantTransitions(t, "acquired released")
			p.wantFree()
		}
	})
}

// Acquire without any reply returns ErrAmbiguous, and is undone, also when the clean-up meets a
// fault.
//
//fault:no-reply
func TestAcquire_NeverAnswered(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		for what, abandon := range map[string]redistest.Action{
			"cleaned up at once":                redistest.Pass,
			"clean-up: request lost":            redistest.CloseBefore,
			"clean-up: request lost in silence": redistest.DropRequest,
			"clean-up: reply lost":              redistest.DropReply,
			"clean-up: reply lost in silence":   redistest.MuteReply,
		} {
			t.Run(what, func(t *testing.T) {
				p := behindProxy(t, k, redistest.Shared(t))
				rule := p.on("acquire", redistest.DropReply)
				cleanup := p.on("abandon", abandon).Times(1)
				lease, err := p.through(hasty, redistest.NoRetry).Acquire(t.Context())
				if lease != nil || !errors.Is(err, lock.ErrAmbiguous) {
					t.Fatalf("Acquire = %v, %v, want ErrAmbiguous", lease, err)
				}
				if rule.Fired() < 2 {
					t.Errorf("it was tried %d times, want more", rule.Fired())
				}
				awaitFault(t, cleanup)
				p.wantFree()
			})
		}
	})
}

// A refused connection after a lost reply does not make the error ErrUnavailable: the command was
// executed.
//
//fault:lost-reply-then-refused
func TestErrAmbiguous_LostReplyThenRefused(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		for client, change := range retryingClients {
			for _, act := range []string{"acquire", "release"} {
				t.Run(act+", "+client, func(t *testing.T) {
					p := behindProxy(t, k, redistest.Shared(t))
					rule := p.on(act, redistest.HoldReply).Times(1)
					l := p.through(time.Second, change, func(o *redis.Options) { o.DialerRetries = 1 })
					failed := make(chan error, 1)
					go func() {
						lease, err := l.Acquire(context.Background())
						if act == "release" && err == nil {
							err = lease.Release(context.Background())
						}
						failed <- err
					}()
					awaitFault(t, rule)
					p.proxy.Refuse(true)
					p.proxy.Cut()
					if err := <-failed; !errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, lock.ErrUnavailable) {
						t.Errorf("%v, want ErrAmbiguous", err)
					}
					p.proxy.Refuse(false)
					p.wantFree()
				})
			}
		}
	})
}

// Commands that arrive late.

// An acquire that arrives after its caller has given up takes nothing, also when nothing is known of its
// attempt any more.
//
//fault:late-command
//fault:silence
func TestAcquire_ArrivesAfterGivingUp(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		for _, what := range []string{"after RedisTimeout", "with its context", "after its mark"} {
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
				lease, err := p.through(timeout, redistest.NoRetry).Acquire(ctx)
				if lease != nil || !errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, context.Canceled) != (ctx.Err() != nil) {
					t.Fatalf("Acquire = %v, %v, want ErrAmbiguous", lease, err)
				}
				awaitFault(t, late)
				redistest.Await(t, "the attempt is marked as abandoned", func() bool {
					_, marks := p.left()
					return len(marks) > 0
				})
				if what == "after its mark" {
					redistest.Do(t, p.s.Admin(), "del", locktest.Key(p.name)+":ended")
				}
				before := p.s.Calls("evalsha")
				late.Release()
				redistest.Await(t, "the late command is executed", func() bool { return p.s.Calls("evalsha") > before })
				p.wantNothing()
				p.wantFree()
			})
		}
	})
}
