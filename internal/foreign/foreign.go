// Package foreign asks the errors and the panics of the user, whose methods may panic themselves. It is
// for goroutines of the library, where a panic would end the process.
package foreign

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
)

// ErrGoexit is the error of what has not returned.
var ErrGoexit = errors.New("a Codec, Options.Tags or Options.Trace has called runtime.Goexit")

// Each calls do with each of n numbers at the same time, and returns the errors. An errgroup would return one of them,
// and take a call that ends by runtime.Goexit for a success.
func Each(n int, do func(i int) error) []error {
	errs := slices.Repeat([]error{ErrGoexit}, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = do(i) })
	}
	all.Wait()
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
