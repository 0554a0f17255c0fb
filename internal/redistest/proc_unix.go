//go:build unix

package redistest

import (
	"os"
	"syscall"
)

// suspend asks the kernel to stop the process. It does nothing if the process has ended.
func suspend(p *os.Process) { _ = p.Signal(syscall.SIGSTOP) }

func resume(p *os.Process) { _ = p.Signal(syscall.SIGCONT) }
