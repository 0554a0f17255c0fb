package client

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	firstPause = 2 * time.Millisecond
	maxPause   = 50 * time.Millisecond
)

// Retry repeats a command, ever more rarely, while again says of its error that it is worth it, until the time of
// one is over or ctx ends: a connection may have broken, or the server be about to come back. try gets what is left
// of that time; in its last tenth there is no other one, which would hardly be answered and leave more in doubt than
// is known by then.
func Retry[R any](ctx context.Context, within time.Duration, again func(err error) bool, try func(within time.Duration) (R, error)) (R, error) {
	least := max(within/10, time.Millisecond)
	for pause := firstPause; ; pause = min(2*pause, maxPause) {
		sent := time.Now()
		r, err := try(within)
		if err == nil || errors.Is(err, redis.ErrClosed) || !again(err) {
			return r, err
		}
		within -= time.Since(sent) + pause
		if within < least || !Sleep(ctx, pause) {
			return r, err
		}
	}
}

// Sleep reports whether ctx has not ended.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}
