package singlefill

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/read"
	"github.com/singlefill/singlefill/internal/value"
)

var (
	// ErrMiss is returned by Get if the cache has nothing under the key. The source may have it.
	ErrMiss = read.ErrMiss

	// ErrNotFound is returned by a [Loader], bare or wrapped, if the source has no such value. Get
	// and GetOrLoad return it for [Options.NotFoundTTL], and then within the stale windows, as a value.
	ErrNotFound = value.ErrNotFound

	// ErrNoStale marks an error of a [Loader] that all callers must see: an error that is or wraps
	// ErrNoStale is returned to every caller, here and in other processes, where no old value takes its
	// place whatever the stale windows are. The old value is removed as by Delete, also if the load was
	// a refresh. If Redis does not answer then, it stays there, and LoadInfo.StoreErr has the reason, or
	// LoadInfo.Unlocked is set. In a panic it means nothing. docs/stale.md says which errors to mark.
	ErrNoStale = fill.ErrNoStale

	// ErrEmptyKey is returned by every method that takes keys, for the empty one, before it sends a
	// command.
	ErrEmptyKey = errors.New("singlefill: key is empty")

	// ErrRecursive is returned by GetOrLoad if the wait could never end: a Loader asks for the key
	// that it loads, or two loads of this process for each other's keys. It is detected by the
	// context of the Loader, in the goroutine of the Loader; another circle ends at LoadTimeout.
	// All keys of one GetOrLoadMany count as one load.
	ErrRecursive = flight.ErrRecursive

	// ErrClosed is returned after Close by each method that reads, loads, stores, invalidates or checks. A
	// Loader that still runs may load other keys.
	ErrClosed = flight.ErrClosed
)

// PanicError is returned by [Cache.GetOrLoad] to all callers of this process that waited for a load whose
// Loader panicked or called runtime.Goexit. Callers in other processes get a [*RemoteError]. The process
// goes on, and the next call loads again. Of the other functions only TTLFunc may do so: a Codec, Options.Tags and the
// functions of a [Trace] must return. If one does not, the calls for which it worked return a PanicError, too.
type PanicError struct {
	// Value is the argument of panic, or a text for runtime.Goexit. Error shows errors, Stringers
	// and values of basic types, and of all others only their type.
	Value any
	Stack []byte // of the goroutine, as debug.Stack formats it
	load  bool   // the function was called for a load
}

// panicked returns the error of a panic whose argument is p, or of runtime.Goexit.
func panicked(p any, load bool) *PanicError {
	f, ok := p.(*foreign.Failure) // in another goroutine
	if !ok {
		f = &foreign.Failure{Value: p, Stack: debug.Stack()}
	}
	return &PanicError{Value: cmp.Or[any](f.Value, "runtime.Goexit was called"), Stack: f.Stack, load: load}
}

// failed is deferred by calls: a function of the user that panics in the goroutine of a call, or did not return in
// another one, fails the call.
func failed(err *error) {
	if p := recover(); p != nil {
		*err = panicked(p, false)
	}
}

func (e *PanicError) Error() string {
	who := "a Codec, Options.Tags or Options.Trace"
	if e.load {
		who = "Loader"
	}
	return "singlefill: " + who + " panicked: " + foreign.Text(e.Value)
}

// Unwrap returns the argument of panic if it was an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// RemoteError is returned by [Cache.GetOrLoad] if a load in another process, for which it waited,
// failed, and for [Options.FailureTTL] after a load of any process failed; in a [ValueInfo] also if the
// load failed before the call, within [Options.RetryAfter].
// Only the text of the error travels through Redis, at most 1 KiB of it, and the name that
// [Options.Errors] gives it.
type RemoteError struct {
	Namespace, Key string
	Message        string // the text of the error
	sentinel       error
	noStale        bool
}

// Error returns Message, as the load in this process would have failed with it: without the key, which may be
// secret and would make each text of a log another one.
func (e *RemoteError) Error() string { return e.Message }

// Unwrap returns the error of Options.Errors that the load failed with, or nil.
func (e *RemoteError) Unwrap() error { return e.sentinel }

// Is reports whether target is [ErrNoStale] and the error of the load was or wrapped it.
func (e *RemoteError) Is(target error) bool { return e.noStale && target == ErrNoStale }

// sentinels are Options.Errors, ordered by name.
type sentinels []sentinel

type sentinel struct {
	name string
	err  error
}

// nameOf returns the first name, in alphabetical order, whose error err matches; "" if there is
// none.
func (s sentinels) nameOf(err error) string {
	for _, known := range s {
		if foreign.Is(err, known.err) {
			return known.name
		}
	}
	return ""
}

// remoteError returns the error that a failure record of another process stands for.
func (s sentinels) remoteError(namespace, key, record string) error {
	switch record {
	case filllock.NotFoundRecord:
		return ErrNotFound
	case "":
		return &RemoteError{Namespace: namespace, Key: key, Message: "singlefill: the value of another load could not be stored"}
	}
	f := filllock.ParseFailure(record)
	remote := &RemoteError{Namespace: namespace, Key: key, Message: f.Text, noStale: f.NoStale}
	for _, known := range s {
		if f.Name == known.name {
			remote.sentinel = known.err
		}
	}
	return remote
}

// ManyError is returned by [Cache.GetOrLoadMany], [Cache.RefreshMany], [Cache.GetMany] and
// [Cache.SetMany] if some keys have errors. errors.Is and errors.As look at each of them. A [ManyLoader] returns it,
// not wrapped, if some of its keys have failed. An [ErrNotFound] in it is of another key: as the error of one key,
// also wrapped, a ManyError is a failure.
type ManyError struct {
	Errs map[string]error // by key
}

// Error tells how many keys have errors, and the texts of at most three of the errors, the most frequent first.
// It names no key: keys may be secret, and would make each text of a log another one.
func (e *ManyError) Error() string {
	keys := make(map[string]int) // by text
	for _, err := range e.Errs {
		keys[foreign.Text(err)]++
	}
	if len(keys) == 0 {
		return "singlefill: no key has an error"
	}
	texts := slices.SortedFunc(maps.Keys(keys), func(a, b string) int {
		return cmp.Or(cmp.Compare(keys[b], keys[a]), cmp.Compare(a, b))
	})
	const most = 3
	more := len(texts) - most
	texts = texts[:min(len(texts), most)]
	if len(keys) > 1 {
		for i, text := range texts {
			texts[i] = fmt.Sprintf("%d × %s", keys[text], text)
		}
	}
	if more > 0 {
		texts = append(texts, fmt.Sprintf("and %d other errors", more))
	}
	all := "1 key has an error"
	if n := len(e.Errs); n > 1 {
		all = fmt.Sprintf("%d keys have errors", n)
	}
	return "singlefill: " + all + ": " + strings.Join(texts, "; ")
}

// Unwrap returns the errors in the order of their keys.
func (e *ManyError) Unwrap() []error {
	errs := make([]error, 0, len(e.Errs))
	for _, key := range slices.Sorted(maps.Keys(e.Errs)) {
		errs = append(errs, e.Errs[key])
	}
	return errs
}
