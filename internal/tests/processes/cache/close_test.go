package cache_test

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// Close during loads waits for their ends: a value is stored, and a failure reaches its waiters.
//
//fault:close
func TestClose_DuringLoad(t *testing.T) {
	t.Parallel()
	f, closer, waiter := newPair(t)
	for _, key := range []string{"good", "bad"} {
		load := plan{Block: true}
		if key == "bad" {
			load.Fail = "no such table"
		}
		closer.get(key, key, 1, load)
		closer.begun(key)
		waiter.wait(key, key)
	}
	closer.Order(order{Op: "close", Tag: "close"})
	redistest.Await(t, "new calls are refused", func() bool { return closer.peek("good").Kind == gotClosed })
	f.wantLoads("good", 1)

	closer.release("bad")
	closer.wantDone("bad", 1, gotOwn, "no such table")
	waiter.wantDone("bad", 10, gotRemote, "no such table")
	closer.release("good")
	closer.await("close", "close")
	if f.stored("good") == "" || f.locked("good") != "" {
		t.Errorf("after Close: value %q, lock %q", f.stored("good"), f.locked("good"))
	}
	closer.wantDone("good", 1, gotValue, closer.name+"/1")
	waiter.wantDone("good", 10, gotValue, closer.name+"/1")
	f.wantLoads("good", 1)
}

// A process gets the order to end during a load that takes a minute. It leaves the key to another process at the end
// of its grace, and not when its lock expires.
//
//fault:shutdown
func TestShutdown_Terminated(t *testing.T) {
	for _, ignores := range []bool{false, true} {
		t.Run(fmt.Sprintf("ignores its context %t", ignores), func(t *testing.T) {
			t.Parallel()
			f, ending, waiter := newPair(t)
			ending.do(order{Op: "serve", Every: 200 * time.Millisecond})
			ending.get("ends", "k", 1, plan{Block: true, IgnoreCtx: ignores})
			ending.begun("ends")
			lockEnd := f.lockEnd("k")
			waiter.wait("waits", "k")
			if err := ending.Signal(syscall.SIGTERM); err != nil {
				t.Skip(err) // not on Windows
			}
			if loads := waiter.begun("waits"); !loads.At.Before(lockEnd) {
				t.Errorf("the waiter loads %v after the lock of the ended process", loads.At.Sub(lockEnd))
			}
			waiter.wantDone("waits", 10, gotValue, waiter.name+"/1")
			redistest.Must(t, ending.Wait())
		})
	}
}
