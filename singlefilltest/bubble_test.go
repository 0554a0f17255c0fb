package singlefilltest_test

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/singlefilltest"
)

func seven(context.Context, string) (int, error) { return 7, nil }

// What is made outside of a bubble and used inside, or the reverse, is reported, with what to do.
func TestMisuse_OtherBubble(t *testing.T) {
	inBubble := func(f func()) { synctest.Test(t, func(*testing.T) { f() }) }
	const advice = "call it in the bubble in which the test uses it"
	for name, test := range map[string]struct {
		misuse func(t testing.TB)
		want   string
	}{
		"Redis outside": {func(t testing.TB) {
			rdb := singlefilltest.Redis(t)
			inBubble(func() { _ = rdb.Ping(context.Background()) })
		}, "Redis was called outside of a bubble"},
		"Hold outside": {func(t testing.TB) {
			source := singlefilltest.NewSource(t, seven)
			source.Hold()
			inBubble(func() { _, _ = source.Load(context.Background(), "k") })
		}, "Hold was called outside of a bubble"},
		"Hold inside": {func(t testing.TB) {
			source := singlefilltest.NewSource(t, seven)
			inBubble(source.Hold)
			_, _ = source.Load(context.Background(), "k")
		}, "Hold was called in synctest bubble"},
	} {
		t.Run(name, func(t *testing.T) {
			got := reported(test.misuse)
			if len(got) == 0 || !strings.Contains(got[0], test.want) || !strings.Contains(got[0], advice) {
				t.Errorf("reported %q, want %q and %q", got, test.want, advice)
			}
		})
	}
}

// A cache that is not closed in its bubble is reported before synctest ends the test, which ends the
// process. So the test runs in another one.
func TestMisuse_NotClosed(t *testing.T) {
	if os.Getenv("NOT_CLOSED") == "" {
		cmd := exec.Command(os.Args[0], "-test.run", "^TestMisuse_NotClosed$")
		cmd.Env = append(os.Environ(), "NOT_CLOSED=1")
		out, err := cmd.CombinedOutput()
		if want := "singlefilltest: the bubble ends, and a cache is not closed"; err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%v, want %q:\n%s", err, want, out)
		}
		return
	}
	synctest.Test(t, func(t *testing.T) {
		cache, err := singlefill.New(singlefilltest.Redis(t), "cache", time.Hour, &singlefill.Options[int]{Near: &singlefill.Near{}})
		redistest.Must(t, err)
		if v, err := cache.GetOrLoad(t.Context(), "k", seven); v != 7 || err != nil {
			t.Fatal(v, err)
		}
	})
}
