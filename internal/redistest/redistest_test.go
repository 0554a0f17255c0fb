package redistest

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) { Main(m) }

// record replaces a test that is expected to end early.
type record struct {
	testing.TB
	verb, text string
}

func (r *record) Helper()                           {}
func (r *record) Fatalf(format string, args ...any) { r.end("fatal", format, args) }
func (r *record) Skipf(format string, args ...any)  { r.end("skip", format, args) }

func (r *record) end(verb, format string, args []any) {
	r.verb, r.text = verb, fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// run runs f in a goroutine, which Fatalf or Skipf of r may end.
func (r *record) run(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	<-done
}

// Each runs on clients that all work.
func TestEach_ClientsWork(t *testing.T) {
	Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		ns := Namespace(t)
		for i := range 20 {
			key := fmt.Sprint(ns, i)
			Must(t, rdb.Set(ctx, key, i, time.Minute).Err())
			if n, err := rdb.Get(ctx, key).Int(); n != i || err != nil {
				t.Fatalf("read %d, %v, not %d", n, err, i)
			}
		}
		script := redis.NewScript(`return redis.call('GET', KEYS[1])`)
		if got, err := script.Run(ctx, rdb, []string{ns + "2"}).Text(); got != "2" || err != nil {
			t.Fatalf("the script read %q, %v", got, err)
		}
	})
}

// A miniredis in a bubble follows the bubble's clock.
func TestStartMini_BubbleTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, first := StartMini(t)
		second := NewMiniClient(t, m)
		ctx := context.Background()
		Must(t, first.Set(ctx, "k", "v", time.Hour).Err())
		time.Sleep(time.Hour - time.Second)
		if v, err := second.Get(ctx, "k").Result(); v != "v" || err != nil {
			t.Fatalf("read %q, %v before the TTL", v, err)
		}
		time.Sleep(2 * time.Second)
		if v, err := second.Get(ctx, "k").Result(); err != redis.Nil {
			t.Fatalf("read %q, %v after the TTL", v, err)
		}
		if m.Server() == nil {
			t.Error("no server to set a hook on")
		}
	})
}

// Await fails the test after its limit.
func TestAwait_Limit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // without 15 real seconds
		r := &record{TB: t}
		r.run(func() { Await(r, "pigs fly", func() bool { return false }) })
		if r.verb != "fatal" || !strings.Contains(r.text, "pigs fly") {
			t.Errorf("%s %q", r.verb, r.text)
		}
	})
}

// strays finds a goroutine that is left behind.
func TestStrays_Leak(t *testing.T) {
	t.Parallel()
	end := make(chan struct{})
	go leak(end)
	Await(t, "the leak is seen", func() bool { return strings.Contains(strays(), "redistest.leak") })
	close(end)
	Await(t, "the leak is gone", func() bool { return !strings.Contains(strays(), "redistest.leak") })
}

func leak(end chan struct{}) { <-end }
