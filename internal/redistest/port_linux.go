package redistest

import (
	"fmt"
	"net"
	"sync"
)

// reserved are the signs of all ports that this process keeps: one that nobody refers to would be closed.
var reserved sync.Map

// reserve keeps a port for this process; false: another one has it, or this one. The sign is a socket in Linux' abstract
// namespace, which ends with the process, however that ends.
func reserve(port int) bool {
	sign, err := net.Listen("unix", fmt.Sprintf("@singlefill-redistest-%d", port))
	if err == nil {
		reserved.Store(port, sign)
	}
	return err == nil
}
