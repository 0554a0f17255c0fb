package histories

import "golang.org/x/sys/windows"

// now is as on Unix, in steps of some milliseconds: more seems to have been at the same time than was, and no order of
// two operations is invented.
func now() int64 { return windows.DurationSinceBoot().Nanoseconds() }
