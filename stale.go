package singlefill

import (
	"context"
	"time"

	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
)

// ValueInfo describes a value, or a remembered ErrNotFound, that [Cache.GetOrLoadInfo] returned. It
// is zero with any other error.
type ValueInfo struct {
	// Stale reports whether the value has expired, or was made stale by Expire.
	Stale bool

	// Age is the time since the value was loaded or set, by the clocks of its writer and of this
	// process, never negative.
	Age time.Duration

	// Expires is when the value ceases to be fresh: the end of its life, to which the stale windows do
	// not count. It is in the past for a stale value. A value that could not be stored has the life that
	// it would have had.
	Expires time.Time

	// Err is why a value within StaleIfError was returned: the error of the load; a *RemoteError if
	// it failed in another process, or before this call within RetryAfter; context.DeadlineExceeded
	// if the deadline of this call, or StaleAfter, came first.
	Err error

	entry uint64 // for DeleteIf; 0: it describes no entry
}

func infoOf(i event.ValueInfo) ValueInfo {
	return ValueInfo{Stale: i.Stale, Age: i.Age, Expires: i.Expires, Err: i.Err, entry: i.Entry}
}

// Previous returns the value that the running load of key is to replace: a value that is stale or
// about to expire. A Loader or ManyLoader calls it with its ctx, asks the source by an ETag or a
// version whether the value has changed, and if not returns it for one more life. The caller owns
// it; info.Err is nil.
//
// ok is false
//   - if the cache holds no value for key, or remembers ErrNotFound;
//   - if Redis does not answer;
//   - if ctx does not come from a running load of key;
//   - if T is not the type of the cache;
//   - if the key was deleted before the load took its lock, or in this process since then.
//
// If the key is deleted later, or by another process, the value of the load is not stored: a Delete
// is never undone.
//
// Without stale windows a load seldom has a previous value: only after [Cache.Expire], and by
// [Options.EarlyRefresh].
func Previous[T any](ctx context.Context, key string) (v T, info ValueInfo, ok bool) {
	old, of := fill.Previous(ctx, key)
	if p, isT := old.(*T); isT {
		return *p, infoOf(of), true
	}
	return v, ValueInfo{}, false
}
