package lock_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// lockRights are those that the package documentation lists, beside the keys of the lock.
var lockRights = []string{"+@string", "+@sortedset", "+@hash", "+@keyspace", "+time", "+eval", "+evalsha"}

// Check finds nothing with exactly the documented rights, names a lock for which one is missing,
// and leaves no key.
func TestLocker_Check(t *testing.T) {
	eachKind(t, func(t *testing.T, kind string) {
		s, name := redistest.Shared(t), redistest.Namespace(t)
		check := func(t *testing.T, rights []string) error {
			rdb := s.Client(t, s.User(t, append([]string{"~{" + name + "}:lock*"}, rights...)...))
			return newLocker(t, kind, rdb, name, patient(lock.Options{})).Check(t.Context())
		}
		if err := check(t, lockRights); err != nil {
			t.Errorf("with all rights: %v", err)
		}
		if keys, err := redistest.Shared(t).Admin().Keys(t.Context(), "{"+name+"}:lock*").Result(); len(keys) > 0 || err != nil {
			t.Errorf("Check left %q, %v", keys, err)
		}
		for i, right := range lockRights {
			if right == "+@hash" && kind != "semaphore" {
				continue
			}
			t.Run(right, func(t *testing.T) {
				fewer := slices.Delete(slices.Clone(lockRights), i, i+1)
				err := check(t, fewer)
				if err == nil || !strings.Contains(err.Error(), "allow the Redis user") || !strings.Contains(err.Error(), name) {
					t.Errorf("got %v, want an error that says what to allow", err)
				}
			})
		}
	})
}

// Check of a server that does not answer returns ErrUnavailable, and the error of a context that
// has ended.
func TestLocker_CheckUnreachable(t *testing.T) {
	t.Parallel()
	m, rdb := redistest.StartMini(t)
	l, err := lock.NewMutex(rdb, "jobs", nil)
	redistest.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Check(ctx); err != context.Canceled {
		t.Errorf("with a cancelled context: %v", err)
	}
	m.SetError("LOADING the dataset")
	if err := l.Check(t.Context()); !errors.Is(err, lock.ErrUnavailable) {
		t.Errorf("without a server: %v, want ErrUnavailable", err)
	}
}
