package histories

import "golang.org/x/sys/unix"

// now returns the time of the clock that all processes of a machine share, in nanoseconds since the
// machine started. Wall clocks may be set back, and Go's monotonic time differs between processes.
func now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err)
	}
	return t.Nano()
}
