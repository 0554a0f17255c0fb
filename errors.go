package singlefill

import (
	"errors"
	"fmt"

	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
)

var (
	// ErrMiss is Get's answer for a key the cache does not know.
	// It says nothing about the source: ErrNotFound does.
	ErrMiss = errors.New("singlefill: miss")

	// ErrNotFound is what a Loader returns, bare or wrapped, when the source has no such thing.
	// The cache remembers it for Options.NotFoundTTL; Get and GetOrLoad then answer with it.
	ErrNotFound = errors.New("singlefill: not found")

	// ErrRecursive is returned by GetOrLoad when waiting could never end: a Loader asks for the key it is
	// loading, or two loads of this process ask for each other's keys. It is found by the context that
	// the Loader was given, so pass that one on. Only calls in the Loader's own goroutine count, since a
	// Loader need not wait for the others. A circle by way of other goroutines or processes is not
	// detected; it ends with LoadTimeout.
	ErrRecursive = flight.ErrRecursive

	// ErrClosed is the answer of every method but Stats after Close.
	ErrClosed = flight.ErrClosed
)

// PanicError is what [Cache.GetOrLoad] returns when the Loader panicked or called runtime.Goexit.
// Everyone who waited for that load gets it; the process lives and the key can be loaded at once.
type PanicError struct {
	Value any    // what was passed to panic; for runtime.Goexit a text that says so
	Stack []byte // of the Loader's goroutine, as debug.Stack formats it
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("singlefill: Loader panicked: %v", e.Value)
}

// Unwrap gives the panic's value if it was an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// RemoteError is what [Cache.GetOrLoad] returns when it waited for another process to load the key and that load
// failed. [Cache.GetOrLoadInfo] also tells by it why a stale value is served: that load, or one before the call, here or
// there, within [Options.RetryAfter]. The text is all that travels, at most 1 KiB of it, through Redis.
type RemoteError struct{ Key, Message string }

func (e *RemoteError) Error() string {
	return fmt.Sprintf("singlefill: another load of %.100q failed: %s", e.Key, e.Message)
}

// remoteError is what a load in another process has left instead of a value.
func remoteError(key, word string) error {
	if word == fill.NotFoundRecord {
		return ErrNotFound
	}
	if word == "" {
		return &RemoteError{Key: key, Message: "its value could not be stored"}
	}
	return &RemoteError{Key: key, Message: fill.FailureText(word)}
}
