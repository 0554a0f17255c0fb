// Package foreign asks the errors and the panics of the user, whose methods may panic themselves. It is
// for goroutines of the library, where a panic would end the process.
package foreign

import (
	"errors"
	"fmt"
	"reflect"
	"runtime/debug"
	"slices"
)

// ErrGoexit is the error of what has not returned.
var ErrGoexit = errors.New("a Codec, Options.Tags or Options.Trace has called runtime.Goexit")

// A Failure is why a function has not returned, in another goroutine: a function of the user has panicked, or has
// called runtime.Goexit. The goroutine that waits for it panics with the Failure.
type Failure struct {
	Value any // the argument of panic; nil: runtime.Goexit
	Stack []byte
}

func (f *Failure) Error() string { return "panicked: " + Text(f.Value) }

// Recovered returns the failure of a panic with the argument p, or nil if that is nil. It is called by a deferred
// function.
func Recovered(p any) *Failure {
	if f, ok := p.(*Failure); ok || p == nil {
		return f
	}
	return &Failure{p, debug.Stack()}
}

// Go calls do in another goroutine, and then done: with nil if do has returned.
func Go(do func(), done func(*Failure)) {
	go func() {
		returned := false
		defer func() {
			f := Recovered(recover())
			if f == nil && !returned {
				f = &Failure{Stack: debug.Stack()}
			}
			done(f)
		}()
		do()
		returned = true
	}()
}

// Each calls do with each of n numbers at the same time, and returns the errors. A call that ends by runtime.Goexit has
// ErrGoexit. If one panics, Each does. An errgroup would return one of the errors, and take runtime.Goexit for a
// success.
func Each(n int, do func(i int) error) []error {
	errs := slices.Repeat([]error{ErrGoexit}, n)
	failures := make(chan *Failure)
	for i := range n {
		Go(func() { errs[i] = do(i) }, func(f *Failure) { failures <- f })
	}
	var panicked *Failure
	for range n {
		if f := <-failures; f != nil && f.Value != nil {
			panicked = f
		}
	}
	if panicked != nil {
		panic(panicked)
	}
	return errs
}

// Is is errors.Is. It returns false if a method of err or the comparison panics.
func Is(err, target error) (is bool) {
	defer func() { _ = recover() }()
	return errors.Is(err, target)
}

// Text returns the text of an error, or of the argument of a panic. Like the runtime, it shows of other
// values than basic ones only their type: fmt overflows the stack with a map that contains itself. That
// is also the text of a value whose method panics.
func Text(v any) (text string) {
	text = fmt.Sprintf("(%T)", v)
	defer func() { _ = recover() }()
	switch v := v.(type) {
	case error:
		return v.Error()
	case fmt.Stringer:
		return v.String()
	}
	switch kind := reflect.ValueOf(v).Kind(); {
	case kind >= reflect.Bool && kind <= reflect.Complex128, kind == reflect.String:
		return fmt.Sprint(v)
	}
	return text
}
