package lock

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// Errors of [Locker.Acquire], [Locker.TryAcquire], [Locker.Do] and [Lease.Release]. Tell them apart
// with errors.Is.
var (
	// ErrBusy is returned when another caller holds the lock or is ahead in its queue.
	ErrBusy = errors.New("lock: busy")

	// ErrLost is returned when a lease ended before it was released, or has been released already.
	ErrLost = errors.New("lock: lost")

	// ErrUnavailable is returned when Redis cannot answer, or cannot write now: no connection,
	// loading, out of memory, a replica; and when ctx ended before Redis could be asked. This call
	// acquired or released nothing.
	ErrUnavailable = errors.New("lock: redis is unavailable")

	// ErrAmbiguous is returned when a command was sent and not answered. What it may have done is
	// found out, or undone, in the background.
	ErrAmbiguous = errors.New("lock: redis has not answered")

	// ErrNotReleased is returned by Do only: its function has run and returned nil, but the lease
	// could not be given back. That is retried in the background; otherwise the lease ends after
	// TTL.
	ErrNotReleased = errors.New("lock: not released")

	// ErrConflict is returned when the name is used in another way: by a lock of another kind, or by
	// another program. Nothing was granted.
	ErrConflict = errors.New("lock: conflict")
)

// errForgotten is the error of a release that finds nothing, after a release without an answer: the lease was given
// back, and so many others since that the server has forgotten it, or it was lost before.
var errForgotten = errors.New("it may have been released by a command whose reply was lost")

// checkContext returns an error if ctx is nil or has ended.
func checkContext(ctx context.Context, op, name string) error {
	if ctx == nil {
		return fmt.Errorf("lock: %s %.100q: ctx is nil: a context is needed", op, name)
	}
	return ctx.Err()
}

func errLost(name string, why error) error { return fmt.Errorf("%w: %.100q: %w", ErrLost, name, why) }

// A noAnswer is the error of an Acquire whose context ended before Redis had answered. Its text does not
// call Redis unavailable: the context may have been too short.
type noAnswer struct {
	name        string
	kind, ended error
}

func (e noAnswer) Error() string {
	return fmt.Sprintf("lock: acquire %.100q: no answer came before the context ended: %v", e.name, e.ended)
}

func (e noAnswer) Unwrap() []error { return []error{e.kind, e.ended} }

// rights are what the scripts need, as the documentation of the package lists it.
const rights = "+get +set +del +exists +pexpire +pexpireat +pttl +time +ping +eval +evalsha " +
	"+zadd +zrem +zscore +zrank +zcard +zcount +zrange +zrangebyscore +zremrangebyscore " +
	"+zremrangebyrank +zpopmin +hget +hset +hdel +hlen"

// explain returns the caller's error for a command that failed with err.
func explain(op, name string, err error) error {
	text := err.Error()
	switch {
	case client.ScriptsRefused(err) && strings.Contains(text, "eval"):
		return fmt.Errorf("lock: %s %.100q: locks need scripts: allow the Redis user +eval and +evalsha: %w", op, name, err)
	case strings.Contains(text, "NOPERM") ||
		strings.Contains(text, "ACL failure in script") || // from inside a script
		strings.Contains(text, "executing the script can't"): // the same, by Redis 7.0
		return fmt.Errorf("lock: %s %.100q: allow the Redis user what the scripts use (%s, and the keys {name}:lock*): %w", op, name, rights, err)
	case strings.Contains(text, "WRONGTYPE") || strings.Contains(text, "FOREIGN"):
		return fmt.Errorf("%w: %s %.100q: its key holds something else: a lock of another kind, or no lock; choose another name: %w", ErrConflict, op, name, err)
	}
	return fmt.Errorf("%w: %s %.100q: %w", ErrUnavailable, op, name, err)
}

// isTemporary reports whether a command that failed is worth a retry: the server cannot be reached,
// or cannot write now, or this process was held up until its command was late.
func isTemporary(err error) bool {
	return !errors.Is(err, redis.ErrClosed) && err != errForgotten && (client.Unreachable(err) || client.Late(err) ||
		redis.IsReadOnlyError(err) || redis.IsOOMError(err) ||
		redis.HasErrorPrefix(err, "NOREPLICAS") || redis.HasErrorPrefix(err, "MISCONF"))
}
