package renew

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

const (
	ttl    = 6 * time.Second
	third  = ttl / 3
	tenth  = ttl / 10
	margin = ttl / 20
)

var errTransient = errors.New("some error")

// A keptLease is a lease that is kept, in a bubble, on a server that answers as the test says.
type keptLease struct {
	Lease
	answer func(at time.Duration) (held bool, err error) // nil: held
	queues time.Duration                                 // before each command is sent

	tries []time.Duration // since Taken, each try to renew
	ended chan struct{}
	after time.Duration // read it, and why, after ended
	why   error
	stop  context.CancelFunc
}

// ways are the ways to keep a lease. Each returns as Keep does.
var ways = map[string]func(l Lease, ctx context.Context) error{
	"Keep": Lease.Keep,
	"Start": func(l Lease, ctx context.Context) error {
		lost, trying := make(chan error, 1), make(chan struct{}, 1)
		try := l.Renew
		l.Renew = func(ctx context.Context, sent *time.Time) (bool, error) {
			trying <- struct{}{}
			defer func() { <-trying }()
			return try(ctx, sent)
		}
		timer := l.Start(ctx, func(why error) { lost <- why })
		select {
		case why := <-lost:
			return why
		case <-ctx.Done():
			timer.Stop()
			trying <- struct{}{} // after a try in flight
			return nil
		}
	},
}

// inBubble makes change to the lease and keeps it, in each of the ways. After run the keeper is
// stopped.
func inBubble(t *testing.T, change func(k *keptLease), run func(t *testing.T, k *keptLease)) {
	t.Helper()
	for way, keep := range ways {
		t.Run(way, func(t *testing.T) { inBubbleBy(t, keep, change, run) })
	}
}

func inBubbleBy(t *testing.T, keep func(l Lease, ctx context.Context) error, change func(k *keptLease),
	run func(t *testing.T, k *keptLease)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		k := &keptLease{ended: make(chan struct{})}
		k.Lease = Lease{TTL: ttl, Taken: time.Now(), Margin: margin, Renew: func(_ context.Context, sent *time.Time) (bool, error) {
			if k.queues > 0 {
				time.Sleep(k.queues)
				*sent = time.Now()
			}
			at := time.Since(k.Taken)
			k.tries = append(k.tries, at)
			if k.answer == nil {
				return true, nil
			}
			return k.answer(at)
		}}
		if change != nil {
			change(k)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		k.stop = cancel
		go func() {
			defer close(k.ended)
			k.why = keep(k.Lease, ctx)
			k.after = time.Since(k.Taken)
		}()
		run(t, k)
		cancel()
		<-k.ended
	})
}

func (k *keptLease) want(t *testing.T, why error, after time.Duration, tries ...time.Duration) {
	t.Helper()
	<-k.ended
	if k.why != why || k.after != after {
		t.Errorf("ended by %v after %v, want %v after %v", k.why, k.after, why, after)
	}
	if !slices.Equal(k.tries, tries) {
		t.Errorf("tried at %v, want %v", k.tries, tries)
	}
}

// from makes an answer that begins at a time, and is "held" before.
func from(begin time.Duration, held bool, err error) func(time.Duration) (bool, error) {
	return func(at time.Duration) (bool, error) {
		if at < begin {
			return true, nil
		}
		return held, err
	}
}

// A life is counted from when the command was sent: a slow reply is part of the life that it
// prolonged.
func TestKeep_LifeBeginsWhenSent(t *testing.T) {
	t.Parallel()
	const slow = time.Second
	inBubble(t, func(k *keptLease) {
		k.Taken = k.Taken.Add(-slow) // it was granted a second ago
		k.answer = func(time.Duration) (bool, error) { time.Sleep(slow); return true, nil }
	}, func(t *testing.T, k *keptLease) {
		time.Sleep(2*third + slow + 1)
		k.stop()
		k.want(t, nil, 3*third+slow, third, 2*third, 3*third)
	})
	inBubble(t, func(k *keptLease) { k.queues = third }, func(t *testing.T, k *keptLease) {
		time.Sleep(4*third + 1)
		k.stop()
		k.want(t, nil, 4*third+1, 2*third, 4*third)
	})
}

// Keep returns ErrGone at the next renewal after a loss, or at a nudge.
func TestKeep_Gone(t *testing.T) {
	t.Parallel()
	inBubble(t, func(k *keptLease) { k.answer = from(time.Millisecond, false, nil) },
		func(t *testing.T, k *keptLease) { k.want(t, ErrGone, third, third) })
	nudge := func(k *keptLease) {
		k.answer = from(time.Millisecond, false, nil)
		c := make(chan struct{}, 1)
		k.Nudge = c
		time.AfterFunc(500*time.Millisecond, func() { c <- struct{}{} })
	}
	inBubbleBy(t, Lease.Keep, nudge, func(t *testing.T, k *keptLease) { k.want(t, ErrGone, 500*time.Millisecond, 500*time.Millisecond) })
	inBubbleBy(t, Lease.Keep, func(k *keptLease) { nudge(k); k.Margin = 0 },
		func(t *testing.T, k *keptLease) { k.want(t, ErrGone, 500*time.Millisecond, 500*time.Millisecond) })
}

// Keep retries after errors for as long as the lease may be held.
//
//fault:short-partition
func TestKeep_TransientErrors(t *testing.T) {
	t.Parallel()
	inBubble(t, func(k *keptLease) {
		k.answer = func(at time.Duration) (bool, error) {
			if at < ttl-margin-1 && at > 0 {
				return true, errTransient // whatever else it says, it is no renewal
			}
			return true, nil
		}
	}, func(t *testing.T, k *keptLease) { // tried every tenth of its life after the first failure
		k.want(t, ErrNotRenewed, ttl-margin, third, third+tenth, third+2*tenth, third+3*tenth, third+4*tenth, third+5*tenth, third+6*tenth)
	})
	inBubble(t, func(k *keptLease) {
		k.answer = func(at time.Duration) (bool, error) {
			if at < third+5*tenth {
				return false, errTransient
			}
			return true, nil
		}
	}, func(t *testing.T, k *keptLease) { // and goes on as if nothing had been
		time.Sleep(third + 5*tenth + 2*third + 1)
		k.stop()
		k.want(t, nil, third+5*tenth+2*third+1, third, third+tenth, third+2*tenth, third+3*tenth, third+4*tenth,
			third+5*tenth, third+5*tenth+third, third+5*tenth+2*third)
	})
}

// A lease whose Renew ends by runtime.Goexit, as t.FailNow does, is kept as after an error: its holder learns the end.
func TestStart_Goexit(t *testing.T) {
	t.Parallel()
	for _, all := range []bool{false, true} {
		inBubbleBy(t, ways["Start"], func(k *keptLease) {
			k.answer = func(at time.Duration) (bool, error) {
				if all || at == third {
					runtime.Goexit()
				}
				return at < 2*third, nil
			}
		}, func(t *testing.T, k *keptLease) {
			if all {
				k.want(t, ErrNotRenewed, ttl-margin, third, third+tenth, third+2*tenth, third+3*tenth, third+4*tenth, third+5*tenth, third+6*tenth)
				return
			}
			k.want(t, ErrGone, 2*third+tenth, third, third+tenth, 2*third+tenth)
		})
	}
}

// A process that slept through the end of its lease learns it without asking.
func TestKeep_SleptThroughTheEnd(t *testing.T) {
	t.Parallel()
	inBubble(t, func(k *keptLease) { k.Taken = k.Taken.Add(-2 * ttl) },
		func(t *testing.T, k *keptLease) { k.want(t, ErrNotRenewed, 2*ttl) })
}

// A lease that is released during its last renewal is not lost.
func TestKeep_StoppedDuringARenewal(t *testing.T) {
	t.Parallel()
	inBubble(t, func(k *keptLease) {
		// It is given back during the renewal.
		k.answer = func(time.Duration) (bool, error) { k.stop(); return false, nil }
	}, func(t *testing.T, k *keptLease) { k.want(t, nil, third, third) })
}

// Without a Margin a lease is kept until the server says that it is lost.
func TestKeep_WithoutMargin(t *testing.T) {
	t.Parallel()
	inBubble(t, func(k *keptLease) {
		k.Margin = 0
		k.answer = func(at time.Duration) (bool, error) {
			if at < 10*ttl {
				return false, errTransient
			}
			return false, nil
		}
	}, func(t *testing.T, k *keptLease) {
		<-k.ended
		if k.why != ErrGone || k.after < 10*ttl || k.after > 10*ttl+tenth {
			t.Errorf("ended by %v after %v", k.why, k.after)
		}
		if n := len(k.tries); n < 90 {
			t.Errorf("tried %d times", n)
		}
	})
	inBubble(t, func(k *keptLease) { k.Margin = 0; k.Taken = k.Taken.Add(-2 * ttl) }, func(t *testing.T, k *keptLease) {
		time.Sleep(time.Nanosecond)
		k.stop()
		k.want(t, nil, 2*ttl+1, 2*ttl)
	})
}
