package lock

import (
	"testing"
)

// An Acquire whose process was held up until its command was late has lost nothing, and goes on.
func TestIsTemporary_Late(t *testing.T) {
	if !isTemporary(lateReply{}) {
		t.Error("a late command ends an Acquire that still waits")
	}
}

type lateReply struct{}

func (lateReply) Error() string { return "LATE 1" }
func (lateReply) RedisError()   {}
