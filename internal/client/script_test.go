package client

import (
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A hook that changes the arguments of a command changes those of that command only, also when the
// server does not know the script, so that it is sent twice.
func TestScript_HookChangesArguments(t *testing.T) {
	t.Parallel()
	rdb := redis.NewClient(&redis.Options{Addr: miniredis.RunT(t).Addr()})
	defer rdb.Close()
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			if strings.HasPrefix(cmd.Name(), "eval") {
				cmd.Args()[3] = "tenant:" + cmd.Args()[3].(string)
			}
		}
		return nil
	}))
	w := watch(t, rdb, time.Minute)
	script := NewScript("return {KEYS[1], ARGV[1]}")
	for _, when := range []string{"unknown", "known"} {
		got, err := Run(t.Context(), w.Client, nil, w.Timeout, "op", "key", script, append(script.Call(1, 1), "key", "arg"),
			func(cmd *redis.Cmd) ([]string, error) { return cmd.StringSlice() })
		if err != nil || strings.Join(got, " ") != "tenant:key arg" {
			t.Errorf("a script that is %s: %q, %v", when, got, err)
		}
	}
	if n := w.failures("op"); n != 0 {
		t.Errorf("%d failures", n)
	}
}
