package fill

import (
	"context"
	"errors"
	"time"
)

// A User calls what the user has given to the cache, which may panic or call runtime.Goexit.
type User interface {
	// Load calls a Loader.
	Load(ctx context.Context, keys []string, load Loader) Outcomes

	// Returned is the outcome of a key for which a Loader has returned value and err.
	Returned(key string, value any, err error) Outcome

	// Panicked is the outcome of a panic with the argument p, or of runtime.Goexit, for which p is nil, in a load or
	// elsewhere. It is called by a deferred function: the stack is the stack of the panic.
	Panicked(p any, load bool) Outcome

	// IsNotFound reports whether the source has no such value.
	IsNotFound(err error) bool

	// NameOf returns the name of an error in Options.Errors, or "".
	NameOf(err error) string

	// RemoteError is the error that the failure record of another process stands for.
	RemoteError(key, record string) error
}

// A Loader is a Loader or ManyLoader of the user, without its type. A Loader is called with one key.
type Loader interface {
	Load(ctx context.Context, keys []string) (Outcomes, error)
}

// Outcomes returns the value of a key, or why there is none.
type Outcomes func(key string) (value any, err error)

// An Outcome is what a Loader has brought for a key.
type Outcome struct {
	Value    any
	Life     time.Duration // of Value
	Err      error
	Text     string // of Err
	NotFound bool   // Err is ErrNotFound or wraps it
	NoStale  bool   // Err is ErrNoStale or wraps it
	Passing  bool   // Err says nothing about the next load: it is a panic, or of a context
}

// ErrNoStale is the public error of this name.
var ErrNoStale = errors.New("singlefill: no stale value may be served")
