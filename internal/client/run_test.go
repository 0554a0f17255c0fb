package client

import (
	"context"
	"fmt"
	"slices"
	"testing"

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
