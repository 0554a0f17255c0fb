//go:build unix

package histories

import "golang.org/x/sys/unix"

// now reads the clock that all processes of a machine share, in nanoseconds since it was started. Wall clocks may
// be put back, and Go's own monotonic time means nothing to another process.
func now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err)
	}
	return t.Nano()
}
