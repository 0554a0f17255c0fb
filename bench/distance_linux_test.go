package bench

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// An alarm sleeps for less than a millisecond, precisely: time.Sleep rounds up to a millisecond
// when no goroutine runs, as epoll_wait does, by which it waits.
type alarm struct{ timer *os.File }

func newAlarm() *alarm {
	fd := must(unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC))
	return &alarm{os.NewFile(uintptr(fd), "timer")}
}

func (a *alarm) sleep(d time.Duration) {
	if d <= 0 {
		return
	}
	raw := must(a.timer.SyscallConn())
	set := func(fd uintptr) {
		must(0, unix.TimerfdSettime(int(fd), 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(d.Nanoseconds())}, nil))
	}
	must(0, raw.Control(set))
	var expirations [8]byte
	must(a.timer.Read(expirations[:]))
}

func (a *alarm) close() { _ = a.timer.Close() }

// stayAwake keeps the processors from sleeping deeply until this process ends: to wake one can take
// a tenth of a millisecond. It takes root; without it distances vary more.
func stayAwake() {
	f, err := os.OpenFile("/dev/cpu_dma_latency", os.O_WRONLY, 0)
	if err == nil {
		_, _ = f.Write(make([]byte, 4)) // the latency allowed, until f is closed
		awake = f
	}
}

var awake *os.File
