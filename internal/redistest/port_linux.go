package redistest

import (
	"fmt"
	"net"
	"sync"
)

// reserved holds the listeners of all ports that this process keeps. The garbage collector would
// close a listener without a reference.
var reserved sync.Map

// reserve keeps a port for this process. It returns false if this or another process already keeps
// it. The reservation is a socket in Linux' abstract namespace, which ends with the process, even
// if it is killed.
func reserve(port int) bool {
	sign, err := net.Listen("unix", fmt.Sprintf("@singlefill-redistest-%d", port))
	if err == nil {
		reserved.Store(port, sign)
	}
	return err == nil
}
