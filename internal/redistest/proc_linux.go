package redistest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// dieWithParent makes the kernel kill the child when the test binary is killed and cannot run
// Cleanup.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// stopped reports whether every thread of the process has stopped.
func stopped(pid int) bool {
	stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, stat := range stats {
		// "pid (name) state ...", where name may contain parentheses.
		text, err := os.ReadFile(stat)
		if err != nil {
			continue // the thread has ended
		}
		if i := bytes.LastIndexByte(text, ')'); i < 0 || !bytes.HasPrefix(text[i:], []byte(") T")) {
			return false
		}
	}
	return true
}
