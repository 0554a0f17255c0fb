//go:build !linux

package redistest

import "syscall"

// dieWithParent has no counterpart here: a killed test binary may leave its
// servers behind. Children started by Spawn still end, as their input closes.
func dieWithParent() *syscall.SysProcAttr { return nil }

func stopped(int) bool { return true }
