package client

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

var takes = NewTaking(`
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if now > tonumber(ARGV[1]) then return redis.error_reply('LATE ' .. string.format('%.0f', now)) end
return redis.call('INCR', KEYS[1])`)

// take takes something. sent may be nil: see [Command.Sent].
func (w *watcher) take(ctx context.Context, sent *time.Time) Reply[int64] {
	what := Command{Op: "take", Key: "k", Within: w.Timeout, Again: Always, Sent: sent}
	return Run(ctx, w.Client, what, ScriptCall{takes, append(takes.Call(1, 1), "k", 0)}, (*redis.Cmd).Int64)
}

// A command that takes something does so whatever the clock of the server shows: after the clock has been
// changed it is sent a second time.
//
//fault:server-clock
func TestTaking_ClockJumps(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		w := watch(t, rdb, timeout)
		taken := int64(0)
		for _, jump := range []time.Duration{0, time.Hour, 0, -time.Hour, timeout / 2, 2 * timeout, 0} {
			for range 3 {
				m.SetTime(time.Now().Add(jump))
				taken++
				if r := w.take(t.Context(), nil); r.Value != taken || r.Err != nil {
					t.Errorf("jump of %v: %v, want %d", jump, r, taken)
				}
				time.Sleep(time.Millisecond)
			}
		}
		var wg sync.WaitGroup
		var sent atomic.Int64
		noteTrips(rdb, func(cmds []redis.Cmder) {
			for _, cmd := range cmds {
				if cmd.Name() == "evalsha" {
					sent.Add(1)
				}
			}
		})
		m.SetTime(time.Now().Add(24 * time.Hour))
		for range 100 {
			wg.Go(func() {
				if err := w.take(t.Context(), nil).Err; err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if n := sent.Load(); w.failures("take") != 0 || n > 2*100 {
			t.Errorf("%d failures, %d commands", w.failures("take"), n)
		}
	})
}

// So is a command that has waited for its place for longer than its time.
func TestTaking_ClockJumpsLate(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		w := watch(t, rdb, timeout)
		redistest.Must(t, w.take(t.Context(), nil).Err) // the server knows the script
		var sent atomic.Int64
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			if cmds[0].Name() == "evalsha" {
				switch sent.Add(1) {
				case 1, 2:
					time.Sleep(timeout * 3 / 4)
				case 3:
					m.SetTime(time.Now().Add(time.Hour))
				}
			}
			return nil
		}))
		w.node.together.size, w.node.together.most = 1, 1
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if err := w.take(t.Context(), nil).Err; err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if n := sent.Load(); w.failures("take") != 0 || n != 3+1 {
			t.Errorf("%d failures, %d commands, want %d", w.failures("take"), n, 3+1)
		}
	})
}

// A command that takes something is given the time at which its caller leaves, by the clock of the server
// and never later.
//
//fault:late-command
func TestTaking_Until(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		w := watch(t, rdb, timeout)
		const ahead = 1000 * time.Hour
		m.SetTime(time.Now().Add(ahead))
		var until time.Time
		var sent []string
		noteTrips(rdb, func(cmds []redis.Cmder) {
			sent = append(sent, cmds[0].Name())
			if args := cmds[0].Args(); len(args) == 5 {
				until = time.UnixMicro(args[4].(int64)).Add(-ahead)
			}
		})
		for _, deadline := range []time.Duration{time.Hour, timeout / 2} {
			ctx, cancel := context.WithTimeout(t.Context(), deadline)
			begun := time.Now()
			redistest.Must(t, w.take(ctx, nil).Err)
			if stays := until.Sub(begun); stays > min(deadline, timeout) || stays < min(deadline, timeout*15/16)-time.Millisecond {
				t.Errorf("deadline %v, timeout %v: it may be executed for %v", deadline, timeout, stays)
			}
			cancel()
		}
		sent = nil
		time.Sleep(lookAgain)
		m.SetTime(time.Now().Add(ahead))
		if err := w.take(t.Context(), nil).Err; err != nil || !slices.Equal(sent, []string{"time", "evalsha"}) {
			t.Errorf("%v, after %q", err, sent)
		}
	})
}

// A hasty caller that waits for the time which a patient one has asked for is released by its own breaker.
func TestTaking_HastyAndPatient(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		rdb := mute(t)
		hasty, patient := watch(t, rdb, timeout/10), watch(t, rdb, timeout)
		begun := time.Now()
		go patient.take(t.Context(), nil)
		go func() { _ = hasty.get(t.Context()) }()
		time.Sleep(timeout / 20)
		err := hasty.take(t.Context(), nil).Err
		if took := time.Since(begun); !errors.Is(err, ErrAway) || !Unsent(err) || took > timeout/10 {
			t.Errorf("%v after %v", err, took)
		}
	})
}

// Commands that need the time of a silent server ask for it once. None of them is sent, and none waits for longer than
// it may.
func TestTaking_SilentServer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := watch(t, mute(t), timeout)
		var wg sync.WaitGroup
		begun := time.Now()
		for i := range 100 {
			wg.Go(func() {
				var sent time.Time
				ctx, cancel := context.WithTimeout(t.Context(), timeout/4+time.Duration(i%2)*timeout)
				defer cancel()
				r := w.take(ctx, &sent)
				if end, _ := ctx.Deadline(); time.Now().After(end) || time.Since(begun) > timeout {
					t.Errorf("it has waited for %v", time.Since(begun))
				}
				if !Unreachable(r.Err) || !Unsent(r.Err) || r.Lost || !sent.IsZero() {
					t.Errorf("%v, sent at %v; want an unsent command", r, sent)
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		if n := w.failures("take"); n != 1 {
			t.Errorf("%d commands have failed, want 1", n)
		}
	})
}

// What takes something is given no more time if it goes with others, over a connection that comes late.
func TestTaking_Together(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		w := watch(t, rdb, timeout)
		m.SetTime(time.Now())
		redistest.Must(t, w.take(t.Context(), nil).Err)
		until := make(chan time.Time, 1)
		rdb.AddHook(redistest.Pipelines(func(ctx context.Context, cmds []redis.Cmder, _ redis.ProcessPipelineHook) error {
			time.Sleep(timeout / 2)
			until <- time.UnixMicro(cmds[0].Args()[4].(int64)) // as the client writes it
			time.Sleep(time.Hour)
			return ctx.Err()
		}))
		take := func() { w.take(t.Context(), nil) }
		goTogether(w.Client, take, take).Wait()
		if u := <-until; u.After(time.Now()) || u.Before(time.Now().Add(-timeout/8)) {
			t.Errorf("it may be executed until %v after its caller has left", time.Until(u))
		}
		time.Sleep(2 * time.Hour)
	})
}

// All tries have the time of one, also if a later one has to ask for the time of the server, in vain.
func TestTaking_AsksBetweenTries(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		_, rdb := redistest.StartMini(t)
		w := watch(t, rdb, timeout)
		redistest.Must(t, w.take(t.Context(), nil).Err)
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			if cmds[0].Name() == "time" {
				time.Sleep(timeout * 2 / 3)
				return nil
			}
			cmds[0].Args() // it is sent
			return io.ErrUnexpectedEOF
		}))
		time.Sleep(lookAgain - timeout/2) // the clock is not known any more after some tries
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		begun := time.Now()
		if err := w.take(ctx, nil).Err; err == nil || time.Since(begun) > timeout {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
		time.Sleep(timeout) // the question ends
	})
}

// A LATE for a caller that has left is no failure that Trace is told of.
func TestTaking_LateForNobody(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		w := watch(t, rdb, timeout)
		redistest.Must(t, w.take(t.Context(), nil).Err)
		rdb.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			cmd = redis.NewCmd(ctx, cmd.Args()...) // it is sent
			time.Sleep(timeout * 3 / 4)            // and executed later
			return next(ctx, cmd)
		}))
		ctx, cancel := context.WithTimeout(t.Context(), timeout/2)
		defer cancel()
		m.SetTime(time.Now().Add(timeout))
		if err := w.take(ctx, nil).Err; !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		time.Sleep(timeout)
		if n := w.failures("take"); n != 0 {
			t.Errorf("%d failures", n)
		}
	})
}

// A caller leaves by the monotonic clock, as that of the server is known: a deadline by the wall clock, which may have
// been set since, is converted.
func TestCaller_WallDeadline(t *testing.T) {
	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Round(0).Add(time.Minute))
	defer cancel()
	command, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	c := Caller{takes: []redis.Cmder{redis.NewCmd(ctx, "evalsha", 0)}, clock: new(clock)}
	if c.begin(ctx, command); !strings.Contains(c.end.String(), " m=") || time.Until(c.end) > time.Minute {
		t.Errorf("the caller leaves at %v", c.end)
	}
}
