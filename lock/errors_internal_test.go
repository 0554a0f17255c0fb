package lock

import (
	"fmt"
	"net"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// A command that was on its way when the breaker opened may still take the lock, whatever has opened the breaker.
func TestMayHaveArrived_BreakerOpens(t *testing.T) {
	for _, opener := range []error{&net.OpError{Op: "dial"}, redis.ErrPoolTimeout} {
		if mayHaveArrived(opener) {
			t.Errorf("%v: a command without a connection has arrived", opener)
		}
		if err := fmt.Errorf("%w: %w", client.ErrAway, opener); !mayHaveArrived(err) {
			t.Errorf("%v: the command has not arrived", err)
		}
	}
}

// An Acquire whose process was held up until its command was late has lost nothing, and goes on.
func TestIsTemporary_Late(t *testing.T) {
	if !isTemporary(lateReply{}) {
		t.Error("a late command ends an Acquire that still waits")
	}
}

type lateReply struct{}

func (lateReply) Error() string { return "LATE 1" }
func (lateReply) RedisError()   {}
