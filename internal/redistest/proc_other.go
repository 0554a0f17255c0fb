//go:build !linux

package redistest

import "syscall"

// dieWithParent does nothing on this system: a killed test binary may leave its servers behind.
// Children started by Spawn still end when their input closes.
func dieWithParent() *syscall.SysProcAttr { return nil }

func stopped(int) bool { return true }
