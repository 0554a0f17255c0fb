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

// Retry repeats a command with growing pauses, until again returns false for its error, within has
// passed, or ctx ends: a connection may have broken, or the server may be about to return. try gets
// the rest of within. In the last tenth of it Retry stops, since another try would hardly be
// answered and only leave its outcome unknown.
func Retry[R any](ctx context.Context, within time.Duration, again func(err error) bool, try func(within time.Duration) (R, error)) (R, error) {
	least := max(within/10, time.Millisecond)
	for pause := firstPause; ; pause = min(2*pause, maxPause) {
		sent := time.Now()
		r, err := try(within)
		if err == nil || errors.Is(err, redis.ErrClosed) || !again(err) {
			return r, err
		}
		within -= time.Since(sent) + pause
		if within < least || !Sleep(ctx, pause) || !again(err) { // the breaker may have opened
			return r, err
		}
	}
}

// Sleep waits for d or until ctx ends. It reports whether ctx has not ended.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}
