//go:build !linux

package bench

import "time"

// An alarm sleeps as precisely as the runtime does.
type alarm struct{}

func newAlarm() *alarm { return new(alarm) }

func (*alarm) sleep(d time.Duration) { time.Sleep(d) }

func (*alarm) close() {}

func stayAwake() {}
