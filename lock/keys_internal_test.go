package lock

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// strangeNames returns names with which a mapping could go wrong.
func strangeNames() []string {
	return append([]string{
		"n", "user:42", "{", "}", "{}", "}{", "}}", "}a", "{a}", "a{b}c", "a}b", "a}", "a{", "{a", "{}a", "%", "%7D",
		"%7Da", "%25", "%257D", "%25a", "a%", "}:lock", "n:lock", "n}:lock", ":lock", "lock", "n}:lock}", "{n}:lock",
		"n}:lock:fence", "{n}:lock:fence", "n}:lock:ended:", "n:fence", "n}:lock:queue", "n}:lock:details", "n}:lock:alive",
		"\x00", "a\x00b", "\r\n", " ", "\xff\xfe", "a\xc3", "ключ", "鍵", "🔑", "*", "[a-z]", "\\", "?",
	}, strings.Repeat("k", 64<<10), strings.Repeat("}", 64<<10), strings.Repeat("{", 64<<10))
}

// The keys of a name are named as documented.
func TestKeys_Names(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"n": "{n}", "}": "{%7D}", "}a}": "{%7Da}}", "%": "{%25}", "%7D": "{%257D}", "a}b%": "{a}b%}", "{": "{{}",
	} {
		k := keysOf(name)
		if k.lock != want+":lock" {
			t.Errorf("the lock of %q is named %q, want %q", name, k.lock, want+":lock")
		}
		for i, suffix := range []string{"", ":fence", ":ended", ":next", ":waiting", ":queue", ":alive", ":details"} {
			if got := k.names()[i]; got != want+":lock"+suffix {
				t.Errorf("a key of %q is named %q, want %q", name, got, want+":lock"+suffix)
			}
		}
	}
}

// A strange name is a name, and its keys are in one slot: a cluster refuses scripts whose keys are in two.
//
//fault:strange-keys
func TestLocker_StrangeNames(t *testing.T) {
	if testing.Short() {
		t.Skip("a cluster takes seconds to start")
	}
	t.Parallel()
	rdb := redistest.SharedCluster(t).Client(t)
	opts := &Options{TTL: time.Minute, WaiterTTL: time.Minute, RedisTimeout: 5 * time.Second}
	for what, create := range map[string]func(name string) (*Locker, error){
		"mutex":     func(name string) (*Locker, error) { return NewMutex(rdb, name, opts) },
		"fair":      func(name string) (*Locker, error) { return NewFairMutex(rdb, name, opts) },
		"semaphore": func(name string) (*Locker, error) { return NewSemaphore(rdb, name, 1, opts) },
	} {
		var leases []*Lease
		names := slices.Compact(slices.Sorted(slices.Values(append(strangeNames(), redistest.RandomKeys()...))))
		for _, name := range names {
			l, err := create(name)
			redistest.Must(t, err)
			lease, err := l.TryAcquire(t.Context())
			if err != nil {
				t.Errorf("%s %.50q: %v", what, name, err)
			}
			if _, err := l.TryAcquire(t.Context()); !errors.Is(err, ErrBusy) {
				t.Errorf("%s %.50q: a second one: %v", what, name, err)
			}
			leases = append(leases, lease)
		}
		for i, lease := range leases {
			if held, err := lease.owner.kind.renew(t.Context(), lease.owner, nil); !held || err != nil {
				t.Errorf("%s %.50q: renewed %t, %v", what, names[i], held, err)
			}
			if err := lease.Release(t.Context()); err != nil {
				t.Errorf("%s %.50q: Release: %v", what, names[i], err)
			}
		}
	}
}
