package lock

import (
	"runtime"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// The defaults are as documented. A negative MaxHold is none.
func TestOptions_Defaults(t *testing.T) {
	t.Parallel()
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	want := Options{TTL: 10 * time.Second, WaiterTTL: 5 * time.Second, RedisTimeout: 500 * time.Millisecond, Holder: thisProcess()}
	for _, opts := range []*Options{nil, {}, {MaxHold: -1}} {
		l, err := NewMutex(rdb, "n", opts)
		redistest.Must(t, err)
		if l.opts != want {
			t.Errorf("the options are %+v, want %+v", l.opts, want)
		}
	}
}

// Lockers share their waiters if one waiter can ask for all of them, and only then.
func TestShared_SameLock(t *testing.T) {
	t.Parallel()
	clients := []*redis.Client{redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}), redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})}
	for _, c := range clients {
		defer c.Close()
	}
	must := func(l *Locker, err error) *shared {
		redistest.Must(t, err)
		return l.shared
	}
	one := must(NewSemaphore(clients[0], "n", 2, nil))
	for what, same := range map[string]*shared{
		"the defaults": must(NewSemaphore(clients[0], "n", 2, &Options{TTL: 10 * time.Second, RedisTimeout: 500 * time.Millisecond})),
		"MaxHold":      must(NewSemaphore(clients[0], "n", 2, &Options{MaxHold: time.Minute})),
		"Holder":       must(NewSemaphore(clients[0], "n", 2, &Options{Holder: "web-1"})),
		"Trace":        must(NewSemaphore(clients[0], "n", 2, &Options{Trace: new(Trace)})),
	} {
		if same != one {
			t.Errorf("%s: not shared", what)
		}
	}
	// A wrapper that is not a pointer cannot be recognized.
	type wrapper struct{ redis.UniversalClient }
	for what, other := range map[string]*shared{
		"another client":  must(NewSemaphore(clients[1], "n", 2, nil)),
		"a wrapper":       must(NewSemaphore(wrapper{clients[0]}, "n", 2, nil)),
		"another name":    must(NewSemaphore(clients[0], "m", 2, nil)),
		"another size":    must(NewSemaphore(clients[0], "n", 3, nil)),
		"another kind":    must(NewMutex(clients[0], "n", nil)),
		"a fair mutex":    must(NewFairMutex(clients[0], "n", nil)),
		"another TTL":     must(NewSemaphore(clients[0], "n", 2, &Options{TTL: time.Minute})),
		"another timeout": must(NewSemaphore(clients[0], "n", 2, &Options{RedisTimeout: time.Second})),
	} {
		if other == one {
			t.Errorf("%s: shared", what)
		}
	}
}

// What Lockers share is forgotten with the last of them, also if their client refers to them.
func TestShared_Forgotten(t *testing.T) {
	t.Parallel()
	type client struct {
		redis.UniversalClient
		locker *Locker
	}
	known := func() (n int) {
		sharedBy.mu.Lock()
		defer sharedBy.mu.Unlock()
		for key := range sharedBy.of {
			if key.lock == keysOf("a name of this test").lock {
				n++
			}
		}
		return n
	}
	rdb := new(client)
	locker, err := NewMutex(rdb, "a name of this test", nil)
	redistest.Must(t, err)
	rdb.locker = locker
	if n := known(); n != 1 {
		t.Errorf("%d are known", n)
	}
	runtime.KeepAlive(rdb)
	redistest.Await(t, "it is forgotten", func() bool { runtime.GC(); return known() == 0 })
}
