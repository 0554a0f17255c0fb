package redistest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// dieWithParent has the kernel kill the child when the test binary is killed
// and no Cleanup can run.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// stopped reports whether every thread of the process has stopped.
func stopped(pid int) bool {
	stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, stat := range stats {
		// "pid (name) state ...", and the name may itself hold parentheses.
		text, err := os.ReadFile(stat)
		if err != nil {
			continue // the thread ended meanwhile
		}
		if i := bytes.LastIndexByte(text, ')'); i < 0 || !bytes.HasPrefix(text[i:], []byte(") T")) {
			return false
		}
	}
	return true
}
