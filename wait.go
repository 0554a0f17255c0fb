package singlefill

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
)

// A wait is one flight's waiting for another process.
type wait struct {
	begun time.Time
	polls int
}

const (
	firstPause = 5 * time.Millisecond
	maxPause   = 250 * time.Millisecond
	firstNudge = 10 * time.Millisecond
	maxNudge   = 50 * time.Millisecond
)

// pause returns how long to sleep before asking again: 5 ms and half of the time waited so far, up to 250 ms,
// a quarter shorter or longer at random; but not past the end of the holder's lock.
func (w *wait) pause(reply fill.Reply) time.Duration {
	d := min(firstPause+time.Since(w.begun)/2, maxPause)
	d = time.Duration(float64(d) * (0.75 + rand.Float64()/2))
	if reply.Status == fill.Busy {
		d = min(d, reply.Left+time.Millisecond+rand.N(4*time.Millisecond))
	}
	return d
}

// nudge returns how long to sleep when somebody new has come, for whom the value may be there already: 10 to
// 50 ms, growing with the time waited, so that a crowd of newcomers does not make a crowd of commands.
func (w *wait) nudge() time.Duration {
	return min(firstNudge+time.Since(w.begun)/32, maxNudge)
}

// What can end a rest.
type event int

const (
	rested  event = iota
	granted       // a place to load
	closing
)

// rest sleeps for d, less if nudged, or until there is a place to load.
func (c *Cache[T]) rest(f *flight.Flight[result[T]], w *wait, d time.Duration, queue <-chan bool) event {
	timer := time.NewTimer(d)
	defer timer.Stop()
	end, nudge := time.Now().Add(d), f.Nudge
	for {
		select {
		case <-timer.C:
			return rested
		case <-queue:
			return granted
		case <-c.closing:
			return closing
		case <-nudge:
			nudge = nil
			timer.Reset(min(time.Until(end), w.nudge()))
		}
	}
}

func (c *Cache[T]) waited(ctx context.Context, key string, w wait) {
	if w.polls == 0 {
		return
	}
	c.counters.waits.Add(1)
	if c.opts.trace.WaitDone != nil {
		c.opts.trace.WaitDone(ctx, WaitInfo{Key: key, Duration: time.Since(w.begun), Polls: w.polls})
	}
}

// insist repeats a command that is not answered, ever more rarely, until the time of one is over: a
// connection may have broken, or the server be about to come back.
func insist[R any](within time.Duration, try func(within time.Duration) (R, error)) (R, error) {
	for pause := firstPause; ; pause *= 2 {
		sent := time.Now()
		r, err := try(within)
		within -= time.Since(sent) + pause
		if !client.Unreachable(err) || errors.Is(err, redis.ErrClosed) || within < time.Millisecond {
			return r, err
		}
		time.Sleep(pause)
	}
}
