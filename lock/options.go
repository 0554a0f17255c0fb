package lock

import (
	"cmp"
	"fmt"
	"os"
	"sync"
	"time"
)

// maxHolder bounds [Options.Holder]: the sets of waiters and of ended attempts have it, too.
const maxHolder = 64

// Options configure a [Locker]. A nil *Options, like the zero value, means the defaults. In every
// field zero means the default; negative means off, where off has a meaning. The constructors copy
// what they are given. All processes that share a name should use the same options. Like all structs
// of this package, Options may get fields: write literals with the names of the fields.
type Options struct {
	// TTL is the life of a lease that is not renewed: the time after which a dead holder is
	// replaced. A held lease is renewed at a third of it. More than 3 × RedisTimeout.
	// Default: 10 s.
	TTL time.Duration

	// MaxHold is how long after its grant a lease is renewed. After that it is lost, at most TTL
	// later. At least 1 ms. Default: off.
	MaxHold time.Duration

	// WaiterTTL is how long the waiters of a process keep their places in the queue after the process
	// was last heard of. It asks at least three times as often. More than 3 × RedisTimeout. Default: 5 s.
	//
	// Only [NewFairMutex] uses it. The other kinds have no queue in Redis and ignore it, but they
	// too return an error for a value that is not allowed.
	WaiterTTL time.Duration

	// RedisTimeout bounds each Redis command of this Locker, whatever the client's own settings,
	// from the moment at which it can be sent: while all connections of the client's pool are in
	// use, commands wait in order. At least 1 ms. Default: 500 ms.
	RedisTimeout time.Duration

	// Holder names the caller to people: the command `singlefill locks`, the text of [ErrBusy] and
	// [Trace] of other processes show it while it holds the lock. Redis stores it with each lease, so it
	// costs no command. At most 64 bytes. Default: the name of the host and the number of the process, such as
	// "web-7:4711".
	Holder string

	// Trace is called when leases and waits begin and end. Default: none.
	Trace *Trace
}

// withDefaults returns a copy of o with the defaults filled in, or an error if o is incoherent.
// queues tells that waiters have places in a queue.
func (o Options) withDefaults(queues bool) (Options, error) {
	checkWaiters := queues || o.WaiterTTL != 0
	o.TTL = cmp.Or(o.TTL, 10*time.Second)
	o.MaxHold = max(0, o.MaxHold)
	o.WaiterTTL = cmp.Or(o.WaiterTTL, 5*time.Second)
	o.RedisTimeout = cmp.Or(o.RedisTimeout, 500*time.Millisecond)
	if err := o.check(checkWaiters); err != nil {
		return o, err
	}
	if o.Holder == "" {
		o.Holder = thisProcess()
	}
	o.TTL = o.TTL.Truncate(time.Millisecond) // as the server counts
	return o, nil
}

// thisProcess names this process.
var thisProcess = sync.OnceValue(func() string {
	host, _ := os.Hostname() // without a name, the number has to do
	pid := fmt.Sprint(":", os.Getpid())
	return host[:min(len(host), maxHolder-len(pid))] + pid
})

func (o Options) check(waiters bool) error {
	switch {
	case o.RedisTimeout < time.Millisecond:
		return fmt.Errorf("lock: Options.RedisTimeout is %v: at least 1ms is allowed", o.RedisTimeout)
	case o.TTL/3 <= o.RedisTimeout:
		return fmt.Errorf("lock: Options.TTL is %v: more than three times RedisTimeout (%v) is allowed, so that a renewal can fail and be tried again", o.TTL, o.RedisTimeout)
	case waiters && o.WaiterTTL/3 <= o.RedisTimeout:
		return fmt.Errorf("lock: Options.WaiterTTL is %v: more than three times RedisTimeout (%v) is allowed, so that a waiter can miss a reply and keep its place", o.WaiterTTL, o.RedisTimeout)
	case len(o.Holder) > maxHolder:
		return fmt.Errorf("lock: Options.Holder is %.100q: at most %d bytes are allowed", o.Holder, maxHolder)
	case o.MaxHold > 0 && o.MaxHold < time.Millisecond:
		return fmt.Errorf("lock: Options.MaxHold is %v: at least 1ms is allowed, or 0 for no end", o.MaxHold)
	}
	return nil
}
