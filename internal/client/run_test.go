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

func runAll(ctx context.Context, w *watcher, calls ...ScriptCall) []Reply[int64] {
	return RunAll(ctx, w.Client, Command{Op: "op", Key: "k", Within: timeout}, calls, func(cmd *redis.Cmd) (int64, error) { return cmd.Int64() })
}

// The calls of scripts go in one pipeline, and each has its own reply. Calls of scripts that the server does not know
// go again, by their text.
func TestRunAll(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		_, rdb := redistest.StartMini(t)
		var sent []string
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			if name := cmds[0].Name(); name != "hello" {
				sent = append(sent, fmt.Sprint(len(cmds), name))
			}
			return nil
		}))
		w := watch(t, rdb, timeout)
		incr, fails := NewScript("return redis.call('INCR', KEYS[1])"), NewScript("return redis.error_reply('ERR refused')")
		call := func(s Script, key string) ScriptCall { return ScriptCall{s, append(s.Call(1, 0), key)} }
		if r := runAll(t.Context(), w, call(incr, "a")); r[0] != (Reply[int64]{Value: 1}) {
			t.Errorf("one call: %v", r)
		}
		r := runAll(t.Context(), w, call(incr, "a"), call(fails, "a"), call(incr, "b"))
		if r[0].Value != 2 || r[1].Err == nil || r[1].Err.Error() != "ERR refused" || r[2] != (Reply[int64]{Value: 1}) {
			t.Errorf("three calls: %v", r)
		}
		if want := []string{"1evalsha", "1eval", "3evalsha", "1eval"}; !slices.Equal(sent, want) {
			t.Errorf("sent %q, want %q", sent, want)
		}
		if n := w.failures("op"); n != 1 {
			t.Errorf("%d failures, want 1", n)
		}
	})
}

// If a part of a pipeline is not answered, its commands have errors, and those before it their replies. A server that
// has refused a command has answered.
func TestRunAll_PartNotAnswered(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		for what, c := range map[string]struct {
			first  error
			unsent bool
		}{
			"after a reply":   {},
			"after a refusal": {first: replyError("ERR no")},
			"not sent":        {unsent: true},
		} {
			_, rdb := redistest.StartMini(t)
			rdb.AddHook(redistest.Pipelines(func(_ context.Context, cmds []redis.Cmder, _ redis.ProcessPipelineHook) error {
				for i, cmd := range cmds {
					if !c.unsent {
						cmd.Args() // as the writer does
					}
					if cmd.SetErr(io.ErrUnexpectedEOF); i == 0 && !c.unsent {
						cmd.SetErr(c.first)
					}
				}
				return io.ErrUnexpectedEOF
			}))
			w := watch(t, rdb, timeout)
			s := NewScript("return 1")
			r := RunAll(t.Context(), w.Client, Command{Op: "op", Key: "k", Within: timeout},
				[]ScriptCall{{s, s.Call(0, 0)}, {s, s.Call(0, 0)}}, func(cmd *redis.Cmd) (int, error) { return 7, cmd.Err() })
			if (r[0].Err == nil) != (what == "after a reply") || !Unreachable(r[1].Err) || Unsent(r[0].Err) != c.unsent || Unsent(r[1].Err) != c.unsent {
				t.Errorf("%s: %v", what, r)
			}
		}
	})
}

// RunAll repeats the calls that are not answered, and no other ones. A call that may have been executed is repeated
// only if it may be executed twice.
func TestRunAll_Repeats(t *testing.T) {
	for again, want := range map[Again][]string{
		Always:   {"[0 1 2 3]", "[1 3]", "[3]"},
		IfUnsent: {"[0 1 2 3]"},
		Never:    {"[0 1 2 3]"},
	} {
		runInBubble(t, fmt.Sprint(again), func(t *testing.T) {
			_, rdb := redistest.StartMini(t)
			var tries []string
			rdb.AddHook(redistest.Pipelines(func(_ context.Context, cmds []redis.Cmder, _ redis.ProcessPipelineHook) error {
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
			}))
			rdb.AddHook(redistest.Commands(func(_ context.Context, cmd redis.Cmder, _ redis.ProcessHook) error {
				tries = append(tries, fmt.Sprint([]any{cmd.Args()[3]}))
				return nil
			}))
			w := watch(t, rdb, timeout)
			s := NewScript("return 1")
			var calls []ScriptCall
			for i := range 4 {
				calls = append(calls, ScriptCall{s, append(s.Call(0, 1), i)})
			}
			what := Command{Op: "op", Key: "k", Within: timeout, Again: again}
			replies := RunAll(t.Context(), w.Client, what, calls, func(cmd *redis.Cmd) (int, error) { return cmd.Args()[3].(int), cmd.Err() })
			if !slices.Equal(tries, want) {
				t.Errorf("tries of %q, want %q", tries, want)
			}
			for i, r := range replies {
				failed := i == 2 || again != Always && i%2 == 1
				if r.Value != i || (r.Err != nil) != failed || r.Lost != (i%2 == 1) {
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
		begun, s := time.Now(), NewTaking("return 1")
		r := Run(t.Context(), w.Client, Command{Op: "op", Key: "k", Within: timeout, Again: Always},
			ScriptCall{s, append(s.Call(0, 1), 0)}, func(cmd *redis.Cmd) (int64, error) { return cmd.Int64() })
		if took := time.Since(begun); r.Err == nil || !r.Lost || tries != 1 || took != timeout {
			t.Errorf("%v after %v and %d tries", r, took, tries)
		}
	})
}

// The question for the time is no try of the command: whose caller leaves meanwhile has sent nothing.
func TestRun_LeavesUnsent(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := watch(t, mute(t), timeout)
		ctx, cancel := context.WithTimeout(t.Context(), timeout/4)
		defer cancel()
		var sent time.Time
		s := NewTaking("return 1")
		r := Run(ctx, w.Client, Command{Op: "op", Key: "k", Within: timeout, Again: Always, Sent: &sent},
			ScriptCall{s, append(s.Call(0, 1), 0)}, func(cmd *redis.Cmd) (int64, error) { return cmd.Int64() })
		if !Unsent(r.Err) || r.Lost || !sent.IsZero() {
			t.Errorf("%v, sent at %v", r, sent)
		}
	})
}
