package stale_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A clockHook gives a cache a clock that is ahead of Redis', or behind it. A cache trusts the times
// in an entry's header, which are its writer's. The hook shifts the times in all that the cache
// writes, and shifts them back in all that it reads.
type clockHook struct {
	ahead                  time.Duration
	store, lookup, expires func(cmd []string) bool
}

// clockCache makes a cache whose process has a clock that is ahead.
func clockCache(t testing.TB, m *miniredis.Miniredis, ns string, opts *singlefill.Options[string],
	ahead time.Duration) *singlefill.Cache[string] {
	t.Helper()
	rdb := redistest.NewMiniClient(t, m)
	rdb.AddHook(&clockHook{ahead, cachetest.Script(t, "store"), cachetest.Script(t, "get_or_lock"),
		cachetest.Script(t, "expire")})
	return cachetest.NewCacheIn(t, rdb, ns, opts)
}

// clockShift moves the times of an entry, or of its header, by d.
func clockShift(data string, d time.Duration) string {
	const fresh, end = 3, 19 // FreshUntil, WrittenAt
	if len(data) < 35 || data[0] != 0xC1 {
		return data
	}
	return data[:fresh] + clockShiftTimes(data[fresh:end], d) + data[end:]
}

func clockShiftTimes(times string, d time.Duration) string {
	b := []byte(times)
	for ; len(times) > 0; times = times[8:] {
		at := b[len(b)-len(times):]
		binary.BigEndian.PutUint64(at, binary.BigEndian.Uint64(at)+uint64(d.Milliseconds()))
	}
	return string(b)
}

func (h *clockHook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *clockHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.write(cmd)
		err := next(ctx, cmd)
		switch cmd := cmd.(type) {
		case *redis.StringCmd:
			if cmd.Name() == "get" && err == nil {
				cmd.SetVal(clockShift(cmd.Val(), -h.ahead))
			}
		case *redis.Cmd:
			if reply, ok := cmd.Val().([]any); ok && len(reply) == 4 && reply[0] == "hit" {
				reply[1] = clockShift(reply[1].(string), -h.ahead)
			}
		}
		return err
	}
}

func (h *clockHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			h.write(cmd)
		}
		return next(ctx, cmds)
	}
}

// write shifts the times in what a command writes, or shows as known.
func (h *clockHook) write(cmd redis.Cmder) {
	args := cmd.Args()
	switch cmd.Name() {
	case "set":
		args[2] = clockShift(fmt.Sprintf("%s", args[2]), h.ahead)
	case "eval", "evalsha":
		script := []string{cmd.Name(), args[1].(string)}
		argv := args[3+args[2].(int):]
		switch {
		case h.store(script), h.lookup(script):
			argv[2] = clockShift(fmt.Sprintf("%s", argv[2]), h.ahead)
		case h.expires(script):
			argv[0] = clockShiftTimes(argv[0].(string), h.ahead)
		}
	}
}

// eachClock runs a test in a bubble with a cache whose clock is right and one whose clock is not.
func eachClock(t *testing.T, opts func() *singlefill.Options[string], run func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration)) {
	for _, ahead := range []time.Duration{clockSkew, -clockSkew} {
		name := fmt.Sprintf("ahead by %v", ahead)
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			ns := redistest.Namespace(t)
			right, wrong := cachetest.NewCacheIn(t, rdb, ns, opts()), clockCache(t, m, ns, opts(), ahead)
			redistest.Must(t, wrong.Set(t.Context(), "probe", "v"))
			if _, e := cachetest.GetEntry(t, rdb, ns, "probe"); !e.WrittenAt.Equal(time.Now().Add(ahead)) {
				t.Fatalf("written at %v, want %v ahead of now", e.WrittenAt, ahead)
			}
			run(t, right, wrong, ahead)
		})
	}
}

func clockOptions(life, swr, sie, retryAfter time.Duration) func() *singlefill.Options[string] {
	return func() *singlefill.Options[string] {
		opts := cachetest.StaleOptions(swr, sie)
		opts.RetryAfter, opts.TTLFunc = retryAfter, func(string, string) time.Duration { return life }
		return opts
	}
}

// A wrong clock shifts life and windows by its error, but Redis ends the entry at its own time.
//
//fault:process-clock
func TestClocks_Freshness(t *testing.T) {
	const life, swr, sie, step = 10 * time.Minute, 3 * time.Minute, 5 * time.Minute, 5 * time.Second
	boom := errors.New("boom")
	opts := clockOptions(life, swr, sie, time.Millisecond)
	eachClock(t, opts, func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration) {
		for key, test := range map[string]struct {
			writer, reader *singlefill.Cache[string]
			ahead          time.Duration // reader of writer
		}{
			"wrong reader": {right, wrong, ahead}, "wrong writer": {wrong, right, -ahead}, "both wrong": {wrong, wrong, 0}, "both right": {right, right, 0},
		} {
			cachetest.GoGet(t.Context(), test.writer, key, cachetest.Gives("v")).Want(t, "v")
			begun := time.Now()
			fresh, served, got := time.Duration(0), time.Duration(0), time.Duration(0) // until when
			for ; time.Since(begun) < life+sie+3*time.Minute; time.Sleep(step) {
				at := time.Since(begun)
				if _, err := test.reader.Get(t.Context(), key); err == nil {
					got = at
				}
				v, info, err := test.reader.GetOrLoadInfo(t.Context(), key, cachetest.Fails[string](boom))
				switch {
				case err == nil && v == "v":
					served = at
					if !info.Stale {
						fresh = at
					}
				case err != boom:
					t.Fatalf("%s after %v: %v", key, at, err)
				}
				if info.Age < 0 {
					t.Errorf("%s: the age is %v", key, info.Age)
				}
			}
			end := life + sie
			for what, until := range map[string][2]time.Duration{
				"fresh":           {fresh, life - test.ahead},
				"found by Get":    {got, life + swr - test.ahead},
				"served at worst": {served, min(end, end-test.ahead)},
			} {
				if until[0] != until[1]-step {
					t.Errorf("%s: %s until %v, want until %v", key, what, until[0]+step, until[1])
				}
			}
		}
	})
}

// A wrong clock serves nothing that Redis has ended, even if the load began before that and fails
// after.
func TestClocks_EntryThatRedisHasEnded(t *testing.T) {
	const life, sie = 10 * time.Minute, 5 * time.Minute
	boom := errors.New("boom")
	eachClock(t, clockOptions(life, 0, sie, time.Millisecond), func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration) {
		cachetest.GoGet(t.Context(), right, "k", cachetest.Gives("v")).Want(t, "v")
		time.Sleep(life + sie - max(0, ahead) - time.Second)
		cachetest.GoGet(t.Context(), wrong, "k", cachetest.Fails[string](boom)).Want(t, "v")
		time.Sleep(max(0, ahead) + time.Second)
		cachetest.GoGet(t.Context(), wrong, "k", cachetest.Fails[string](boom)).WantErr(t, boom)
	})
}

// Expire is seen at once, whatever the clocks.
//
//fault:process-clock
func TestClocks_Expire(t *testing.T) {
	const life = 10 * time.Minute
	for name, opts := range map[string]func() *singlefill.Options[string]{
		"no windows": clockOptions(life, 0, 0, time.Second), "refreshed": clockOptions(life, 5*time.Minute, 0, time.Second),
		"kept for errors": clockOptions(life, 0, 5*time.Minute, time.Second),
	} {
		t.Run(name, func(t *testing.T) {
			eachClock(t, opts, func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration) {
				caches := map[string]*singlefill.Cache[string]{"right": right, "wrong": wrong}
				for writerName, writer := range caches {
					for expirerName, expirer := range caches {
						for readerName, reader := range caches {
							key := fmt.Sprint(writerName, expirerName, readerName)
							redistest.Must(t, writer.Set(t.Context(), key, "old"))
							time.Sleep(time.Second)
							redistest.Must(t, expirer.Expire(t.Context(), key))
							v, info, err := reader.GetOrLoadInfo(t.Context(), key, cachetest.Gives("new"))
							if name == "refreshed" {
								if err != nil || v != "old" || !info.Stale {
									t.Errorf("%s: %q, %+v, %v; want the old value, stale", key, v, info, err)
								}
							} else if err != nil || v != "new" {
								t.Errorf("%s: %q, %+v, %v; want the new value", key, v, info, err)
							}
							synctest.Wait()
							cachetest.GoGet(t.Context(), reader, key, cachetest.Gives("newer")).Want(t, "new")
						}
					}
				}
			})
		})
	}
}

// RetryAfter goes by the server's clock.
//
//fault:server-clock
func TestClocks_RetryAfter(t *testing.T) {
	const life, retryAfter = 10 * time.Minute, 10 * time.Second // less than LockTTL
	for name, opts := range map[string]func() *singlefill.Options[string]{
		"refreshed": clockOptions(life, time.Hour, 0, retryAfter), "kept for errors": clockOptions(life, 0, time.Hour, retryAfter),
	} {
		t.Run(name, func(t *testing.T) {
			eachClock(t, opts, func(t *testing.T, right, wrong *singlefill.Cache[string], _ time.Duration) {
				for key, caches := range map[string][2]*singlefill.Cache[string]{"wrong fails": {wrong, right}, "right fails": {right, wrong}} {
					cachetest.GoGet(t.Context(), right, key, cachetest.Gives("old")).Want(t, "old")
					time.Sleep(life + clockSkew)
					var loads []time.Duration
					begun := time.Now()
					load := func(context.Context, string) (string, error) {
						loads = append(loads, time.Since(begun))
						return "", errors.New("boom")
					}
					for ; time.Since(begun) < 2*retryAfter; time.Sleep(time.Second) {
						for _, c := range caches {
							cachetest.GoGet(t.Context(), c, key, load).Want(t, "old")
							synctest.Wait()
						}
					}
					// Another process asks again each second, and may have done so just before.
					if len(loads) != 2 || loads[0] != 0 || loads[1] < retryAfter || loads[1] > retryAfter+2*time.Second {
						t.Errorf("%s: the source is asked at %v, want now and after %v", key, loads, retryAfter)
					}
				}
			})
		})
	}
}
