package lock_test

import (
	"context"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// documentedRights returns the rights that the documentation of the package lists: those that a lock
// needs, and those with which waiters are woken, too.
func documentedRights(t *testing.T) (needed, wakes []string) {
	t.Helper()
	text, err := os.ReadFile("doc.go")
	redistest.Must(t, err)
	_, section, _ := strings.Cut(string(text), "# Rights")
	section, _, _ = strings.Cut(section, "# Keys")
	blocks := regexp.MustCompile(`(?m)(?:^//\t.*\n)+`).FindAllString(section, -1)
	if len(blocks) != 2 {
		t.Fatalf("doc.go has %d lists of rights: %q", len(blocks), blocks)
	}
	rights := func(block string) []string { return regexp.MustCompile(`\S*[~&+]\S+`).FindAllString(block, -1) }
	return rights(blocks[0]), rights(blocks[1])
}

// userOf returns a client whose user of the server has only these rights. They name the lock n.
func userOf(t *testing.T, s *redistest.Server, name string, rights ...string) *redis.Client {
	t.Helper()
	all := strings.ReplaceAll(strings.Join(rights, " "), "{n}", "{"+name+"}")
	return s.Client(t, s.User(t, strings.Fields(all)...))
}

// With exactly the documented rights each kind of lock works, and no command is refused, not even a
// command that a script could do without. Without the rights to wake waiters, only the wake-ups are
// refused. Commands that reach foreign keys are refused.
func TestRights_Documented(t *testing.T) {
	needed, wakes := documentedRights(t)
	for _, test := range []struct {
		what    string
		rights  []string
		refused []string
	}{
		{"waiters poll", needed, []string{"ssubscribe", "spublish"}},
		{"waiters are woken", append(slices.Clone(needed), wakes...), nil},
	} {
		t.Run(test.what, func(t *testing.T) {
			eachKind(t, func(t *testing.T, kind string) {
				s, name := redistest.Start(t), redistest.Namespace(t)
				rdb := userOf(t, s, name, test.rights...)
				useAll(t, s, rdb, kind, name, test.refused == nil)
				for _, refused := range s.Refused(t, rdb) {
					if !slices.Contains(test.refused, refused) {
						t.Errorf("%s was refused", refused)
					}
				}
				for _, foreign := range [][]any{{"flushall"}, {"flushdb"}, {"keys", "*"}, {"scan", "0"}, {"randomkey"}, {"swapdb", "0", "1"}} {
					if err := rdb.Do(t.Context(), foreign...).Err(); !redis.IsPermissionError(err) {
						t.Errorf("%v: %v, want a refusal", foreign, err)
					}
				}
			})
		})
	}
}

// useAll takes, renews, waits for, gives up and releases a lock.
func useAll(t *testing.T, s *redistest.Server, rdb *redis.Client, kind, name string, wakes bool) {
	t.Helper()
	first, second := newLocker(t, kind, rdb, name, patient(lock.Options{})), newLocker(t, kind, rdb, name, patient(lock.Options{WaiterTTL: 2 * time.Minute}))
	if err := first.Check(t.Context()); err != nil { // runs each script
		t.Errorf("Check: %v", err)
	}
	lease := mustAcquire(t, first)
	left, give := context.WithCancel(t.Context())
	gone, next := make(chan error), make(chan *lock.Lease)
	go func() {
		_, err := first.Acquire(left)
		gone <- err
	}()
	go func() {
		lease, err := second.Acquire(t.Context())
		if err != nil {
			t.Errorf("a waiter: %v", err)
		}
		next <- lease
	}()
	if wakes {
		redistest.Await(t, "both listen", func() bool {
			channels, err := s.Admin().PubSubShardChannels(t.Context(), "*").Result()
			return err == nil && len(channels) == 2
		})
	} else {
		redistest.Await(t, "both were refused", func() bool { return len(s.Refused(t, rdb)) > 0 })
	}
	give()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("a waiter that leaves: %v", err)
	}
	mustRelease(t, lease)
	mustRelease(t, <-next)
}

// Check finds nothing with exactly the documented rights, names a lock for which one is missing and
// what to allow, and leaves no key.
func TestLocker_Check(t *testing.T) {
	t.Parallel()
	needed, _ := documentedRights(t)
	s := redistest.Shared(t)
	check := func(t *testing.T, rights []string) (errs []error) {
		for _, kind := range kinds {
			name := redistest.Namespace(t)
			err := newLocker(t, kind, userOf(t, s, name, rights...), name, patient(lock.Options{})).Check(t.Context())
			if err != nil && !strings.Contains(err.Error(), name) {
				t.Errorf("%v does not name the lock", err)
			}
			if keys := s.Admin().Keys(t.Context(), "{"+name+"}:lock*").Val(); err == nil && len(keys) > 0 {
				t.Errorf("Check left %q", keys)
			}
			errs = append(errs, err)
		}
		return errs
	}
	if err := errors.Join(check(t, needed)...); err != nil {
		t.Errorf("with all rights: %v", err)
	}
	for i, right := range needed {
		if slices.Contains([]string{"+zpopmin", "+zremrangebyrank", "+ping"}, right) {
			continue // of which Check has no need: it wakes no waiter, has few marks, and leaves no command
		}
		t.Run(right, func(t *testing.T) {
			t.Parallel()
			says := "allow the Redis user what the scripts use (" + strings.Join(needed[1:], " ") + ", and the keys {name}:lock*)"
			if strings.HasPrefix(right, "+eval") {
				says = needsScripts
			}
			err := errors.Join(check(t, slices.Delete(slices.Clone(needed), i, i+1))...)
			if err == nil || !strings.Contains(err.Error(), says) || right == "+del" && strings.Contains(err.Error(), needsScripts) {
				t.Errorf("got %v, want it to say %q", err, says)
			}
		})
	}
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
