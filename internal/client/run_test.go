package client

import (
	"context"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

func runAll(ctx context.Context, w *watcher, again Again, read func(*redis.Cmd) (int64, error), calls ...ScriptCall) []Reply[int64] {
	return RunAll(ctx, w.Client, Command{Op: "op", Key: "k", Within: timeout, Again: again}, calls, read)
}

// callOf returns a call of a script without arguments.
func callOf(s Script, keys ...any) ScriptCall {
	return ScriptCall{s, append(s.Call(len(keys), 0), keys...)}
}

// The calls of scripts go in one pipeline, and each has its own reply. Calls of scripts that the server does not know
// go again, by their text. A hook that changes the arguments of a command, for example its keys, changes no other one.
func TestRunAll(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		var sent []string
		noteTrips(rdb, func(cmds []redis.Cmder) {
			sent = append(sent, fmt.Sprint(len(cmds), cmds[0].Name()))
			for _, cmd := range cmds {
				cmd.Args()[3] = "tenant:" + cmd.Args()[3].(string)
			}
		})
		w := watch(t, rdb, timeout)
		incr, fails := NewScript("return redis.call('INCR', KEYS[1])"), NewScript("return redis.error_reply('ERR refused')")
		if r := runAll(t.Context(), w, Never, (*redis.Cmd).Int64, callOf(incr, "a")); r[0] != (Reply[int64]{Value: 1}) {
			t.Errorf("one call: %v", r)
		}
		r := runAll(t.Context(), w, Never, (*redis.Cmd).Int64, callOf(incr, "a"), callOf(fails, "a"), callOf(incr, "b"))
		if r[0].Value != 2 || r[1].Err == nil || r[1].Err.Error() != "ERR refused" || r[2] != (Reply[int64]{Value: 1}) {
			t.Errorf("three calls: %v", r)
		}
		if want := []string{"1evalsha", "1eval", "3evalsha", "1eval"}; !slices.Equal(sent, want) {
			t.Errorf("sent %q, want %q", sent, want)
		}
		if keys := m.Keys(); !slices.Equal(keys, []string{"tenant:a", "tenant:b"}) || w.failures("op") != 1 {
			t.Errorf("keys %q, and %d failures, want 1", keys, w.failures("op"))
		}
	})
}

// If a part of a pipeline is not answered, its commands have errors, and those before it their replies. A server that
// has refused a command has answered.
func TestRunAll_PartNotAnswered(t *testing.T) {
	t.Parallel()
	for what, first := range map[string]error{
		"after a reply":   nil,
		"after a refusal": replyError("ERR no"),
		"not sent":        io.ErrUnexpectedEOF,
	} {
		runInBubble(t, what, func(t *testing.T) {
			_, rdb := redistest.StartMini(t)
			unsent := what == "not sent"
			rdb.AddHook(redistest.Pipelines(func(_ context.Context, cmds []redis.Cmder, _ redis.ProcessPipelineHook) error {
				for _, cmd := range cmds {
					if !unsent {
						cmd.Args() // as the writer does
					}
					cmd.SetErr(io.ErrUnexpectedEOF)
				}
				cmds[0].SetErr(first)
				return io.ErrUnexpectedEOF
			}))
			s := NewScript("return 1")
			read := func(cmd *redis.Cmd) (int64, error) { return 7, cmd.Err() }
			r := runAll(t.Context(), watch(t, rdb, timeout), Never, read, callOf(s), callOf(s))
			if (r[0].Err == nil) != (first == nil) || !Unreachable(r[1].Err) || Unsent(r[0].Err) != unsent || Unsent(r[1].Err) != unsent {
				t.Error(r)
			}
		})
	}
}

// RunAll repeats the calls that are not answered, and no other ones. A call that may have been executed is repeated
// only if it may be executed twice.
func TestRunAll_Repeats(t *testing.T) {
	t.Parallel()
	for again, want := range map[Again][]string{
		Always:   {"[0 1 2 3]", "[1 3]", "[3]"},
		IfUnsent: {"[0 1 2 3]"},
		Never:    {"[0 1 2 3]"},
	} {
		runInBubble(t, fmt.Sprint(again), func(t *testing.T) {
			var tries []string
			answer := func(cmds ...redis.Cmder) error {
				var some []int
				for _, cmd := range cmds {
					i := cmd.Args()[3].(int)
					some = append(some, i)
					switch {
					case i == 1 && len(tries) == 0, i == 3 && len(tries) < 2:
						cmd.SetErr(io.ErrUnexpectedEOF)
					case i == 2:
						cmd.SetErr(replyError("ERR no"))
					}
				}
				tries = append(tries, fmt.Sprint(some))
				return nil
			}
			_, rdb := redistest.StartMini(t)
			rdb.AddHook(redistest.Pipelines(func(_ context.Context, cmds []redis.Cmder, _ redis.ProcessPipelineHook) error { return answer(cmds...) }))
			rdb.AddHook(redistest.Commands(func(_ context.Context, cmd redis.Cmder, _ redis.ProcessHook) error { return answer(cmd) }))
			s := NewScript("return 1")
			read := func(cmd *redis.Cmd) (int64, error) { return int64(cmd.Args()[3].(int)), cmd.Err() }
			replies := runAll(t.Context(), watch(t, rdb, timeout), again, read, callOf(s, 0), callOf(s, 1), callOf(s, 2), callOf(s, 3))
			if !slices.Equal(tries, want) {
				t.Errorf("tries of %q, want %q", tries, want)
			}
			for i, r := range replies {
				failed := i == 2 || again != Always && i%2 == 1
				if r.Value != int64(i) || (r.Err != nil) != failed || r.Lost != (i%2 == 1) {
					t.Errorf("%d: %v", i, r)
				}
			}
		})
	}
}

// The bound of a command includes the time in which the server is asked for its clock. So a try without an answer is
// not followed by another one that ends later.
func TestRun_AsksForTimeFirst(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		_, rdb := redistest.StartMini(t)
		tries := 0
		rdb.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			switch cmd.Name() {
			case "time":
				time.Sleep(timeout * 3 / 4)
			case "evalsha":
				if tries++; tries == 1 {
					cmd.Args() // as the writer does
					<-ctx.Done()
					cmd.SetErr(ctx.Err())
					return ctx.Err()
				}
			}
			return next(ctx, cmd)
		}))
		w := watch(t, rdb, timeout)
		begun := time.Now()
		call := ScriptCall{takes, append(takes.Call(1, 1), "k", 0)}
		r := runAll(t.Context(), w, Always, (*redis.Cmd).Int64, call)[0]
		if took := time.Since(begun); r.Err == nil || !r.Lost || tries != 1 || took != timeout {
			t.Errorf("%v after %v and %d tries", r, took, tries)
		}
	})
}
