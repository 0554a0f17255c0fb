package lock

import (
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// What [Locker.Acquire], [Locker.Do] and [Lease.Release] return is told apart by errors.Is.
var (
	// ErrBusy: somebody else holds it, or waits before us.
	ErrBusy = errors.New("lock: busy")

	// ErrLost: the lease is no longer ours, or was not any more when it was released.
	ErrLost = errors.New("lock: lost")

	// ErrUnavailable: Redis cannot say, or cannot do it now: no connection, loading, out of memory, a replica.
	// Nothing was granted or released by this call.
	ErrUnavailable = errors.New("lock: redis is unavailable")

	// ErrAmbiguous: a command was sent and not answered. What it may have done is being found out, or undone,
	// behind the call.
	ErrAmbiguous = errors.New("lock: redis has not answered")

	// ErrNotReleased, from Do only: the function has run and returned nil, but the lease could not be given back. That is
	// tried again behind the call; else the lease ends with TTL.
	ErrNotReleased = errors.New("lock: not released")

	// ErrConflict: what is in Redis under this name is used in another way: by a lock of another kind, by a semaphore
	// of another size, or by another program. Nothing was granted.
	ErrConflict = errors.New("lock: conflict")
)

// explain says what a reply other than an answer means to the caller.
func explain(op, name string, err error) error {
	text := err.Error()
	switch {
	case client.ScriptsRefused(err) && !(strings.Contains(text, "NOPERM") && strings.Contains(text, "key")):
		return fmt.Errorf("lock: %s %.100q: locks need scripts: allow the Redis user +eval and +evalsha: %w", op, name, err)
	case strings.Contains(text, "NOPERM") || strings.Contains(text, "ACL failure in script") || // from inside a script
		strings.Contains(text, "executing the script can't"): // the same, by Redis 7.0
		return fmt.Errorf("lock: %s %.100q: allow the Redis user what the scripts use (+@string +@sortedset +@hash +@keyspace +time, and the keys {name}:lock*): %w", op, name, err)
	case strings.Contains(text, "WRONGTYPE") || strings.Contains(text, "FOREIGN"):
		return fmt.Errorf("%w: %s %.100q: its key holds something else: a lock of another kind, or no lock; choose another name: %w", ErrConflict, op, name, err)
	}
	return fmt.Errorf("%w: %s %.100q: %w", ErrUnavailable, op, name, err)
}

// mayPass reports whether what was refused is worth another try: a server that cannot be reached, or that
// cannot write now.
func mayPass(err error) bool {
	return !errors.Is(err, redis.ErrClosed) && (client.Unreachable(err) ||
		redis.IsReadOnlyError(err) || redis.IsOOMError(err) ||
		redis.HasErrorPrefix(err, "NOREPLICAS") || redis.HasErrorPrefix(err, "MISCONF"))
}
