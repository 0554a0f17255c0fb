package histories

import "golang.org/x/sys/windows"

// now is as on Unix, in steps of some milliseconds: operations may seem to overlap that did not,
// but no order of operations is invented.
func now() int64 { return windows.DurationSinceBoot().Nanoseconds() }
