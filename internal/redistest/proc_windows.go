package redistest

import "os"

// suspend has no counterpart here. A test that went on as if the process had stopped would prove nothing.
func suspend(*os.Process) { panic("redistest: a process cannot be frozen on Windows") }

func resume(*os.Process) {}
