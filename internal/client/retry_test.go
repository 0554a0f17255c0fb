package client

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
)

// Retry tries again after growing pauses, until the time of one command has passed.
func TestRetry(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	broken, refused := errors.New("broken"), errors.New("refused")
	for what, c := range map[string]struct {
		takes time.Duration   // of each try
		errs  []error         // of the tries; the last one is repeated
		ends  time.Duration   // when ctx ends; 0: never
		at    []time.Duration // when the tries begin
		want  error
		after time.Duration
	}{
		"an answer":         {takes: 3 * ms, errs: []error{nil}, at: []time.Duration{0}, after: 3 * ms},
		"one that comes":    {takes: 3 * ms, errs: []error{broken, broken, nil}, at: []time.Duration{0, 5 * ms, 12 * ms}, after: 15 * ms},
		"a refusal":         {errs: []error{broken, refused}, at: []time.Duration{0, 2 * ms}, want: refused, after: 2 * ms},
		"a client closed":   {errs: []error{redis.ErrClosed}, at: []time.Duration{0}, want: redis.ErrClosed},
		"none":              {errs: []error{broken}, at: []time.Duration{0, 2 * ms, 6 * ms, 14 * ms, 30 * ms, 62 * ms}, want: broken, after: 62 * ms},
		"all the time":      {takes: 100 * ms, errs: []error{broken}, at: []time.Duration{0}, want: broken, after: 100 * ms},
		"most of it":        {takes: 88 * ms, errs: []error{broken}, at: []time.Duration{0, 90 * ms}, want: broken, after: 100 * ms},
		"nearly all of it":  {takes: 89 * ms, errs: []error{broken}, at: []time.Duration{0}, want: broken, after: 89 * ms},
		"a caller who ends": {errs: []error{broken}, ends: 10 * ms, at: []time.Duration{0, 2 * ms, 6 * ms}, want: broken, after: 10 * ms},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if c.ends > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.ends)
					defer cancel()
				}
				begun := time.Now()
				var at []time.Duration
				again := func(err error) bool { return err != refused }
				n, err := Retry(ctx, 100*ms, again, func(within time.Duration) (int, error) {
					at = append(at, time.Since(begun))
					if left := 100*ms - time.Since(begun); within != left {
						t.Errorf("after %v there are %v left, not %v", time.Since(begun), left, within)
					}
					time.Sleep(min(c.takes, within))
					return len(at), c.errs[min(len(at), len(c.errs))-1]
				})
				if n != len(at) || err != c.want || time.Since(begun) != c.after || !slices.Equal(at, c.at) {
					t.Errorf("got the reply of try %d, %v, after %v and tries at %v; want %v after %v and tries at %v",
						n, err, time.Since(begun), at, c.want, c.after, c.at)
				}
			})
		})
	}
}
