// Package migratetest has what the tests of the programs share.
package migratetest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/examples/migrate/users"
	"github.com/singlefill/singlefill/internal/redistest"
)

// Context returns a context that ends after 15 s: a test that hangs fails.
func Context(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// NewDB returns a database with the user 42, Ada.
func NewDB(t *testing.T) *users.DB {
	db := new(users.DB)
	redistest.Must(t, db.Rename(t.Context(), "42", "Ada"))
	return db
}

// New returns what a test of one process needs, and lets it run beside others.
func New(t *testing.T) (ctx context.Context, rdb *redis.Client, db *users.DB) {
	t.Helper()
	t.Parallel()
	return Context(t), redistest.Start(t).Client(t), NewDB(t)
}

// SideBySide checks the rules of a rollout that hold for every pair of caches. Neither sees the
// values of the other. A write that deletes in one only leaves the old value in the other; one that
// deletes in both does not.
func SideBySide(t *testing.T, openBefore, openAfter Open) {
	t.Helper()
	ctx, rdb, db := New(t)
	before, after := openBefore(t, rdb, db), openAfter(t, rdb, db)
	for range 2 {
		WantName(t, before, "Ada")
		WantName(t, after, "Ada")
	}
	WantReads(t, db, 2) // one of each

	redistest.Must(t, users.Rename(ctx, db, "42", "Grace", before))
	AwaitName(t, before, "Grace")
	WantName(t, after, "Ada")

	redistest.Must(t, users.Rename(ctx, db, "42", "Hedy", after))
	WantName(t, before, "Grace")
	WantName(t, after, "Hedy")

	redistest.Must(t, users.Rename(ctx, db, "42", "Joan", before, after))
	AwaitName(t, before, "Joan")
	WantName(t, after, "Joan")
	WantKeys(t, rdb, "user:42", "users:{42}")
}

// AwaitName waits until a cache returns user 42 with the name. With client-side caching
// (rueidisaside) the server tells the client of a deletion after it has answered the DEL.
func AwaitName(t testing.TB, c users.Cache, name string) {
	t.Helper()
	redistest.Await(t, "the new name", func() bool {
		user, err := c.User(t.Context(), "42")
		redistest.Must(t, err)
		return user.Name == name
	})
}

// WantName fails the test unless c returns user 42 with the name.
func WantName(t testing.TB, c users.Cache, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	user, err := c.User(ctx, "42")
	if err != nil || user.ID != "42" || user.Name != name {
		t.Errorf("%T.User = %v, %v, want %s", c, user, err, name)
	}
}

// A Call is a call of User that runs in the background.
type Call struct {
	user users.User
	err  error
	done chan struct{}
}

// Go asks c for user 42 in the background.
func Go(ctx context.Context, c users.Cache) *Call {
	call := &Call{done: make(chan struct{})}
	go func() {
		defer close(call.done)
		defer func() {
			if r := recover(); r != nil {
				call.err = &Panicked{r}
			}
		}()
		call.user, call.err = c.User(ctx, "42")
	}()
	return call
}

// Wait returns the result of the call.
func (c *Call) Wait(t testing.TB) (users.User, error) {
	t.Helper()
	select {
	case <-c.done:
	case <-time.After(15 * time.Second):
		t.Fatal("the call has not returned for 15 s")
	}
	return c.user, c.err
}

// Panicked is the error of a call that panicked.
type Panicked struct{ Value any }

func (p *Panicked) Error() string { return fmt.Sprint("panicked: ", p.Value) }

// WantKeys fails the test unless Redis has the keys, each with a TTL.
func WantKeys(t testing.TB, rdb redis.UniversalClient, keys ...string) {
	t.Helper()
	for _, key := range keys {
		if ttl := rdb.PTTL(context.Background(), key).Val(); ttl <= 0 {
			t.Errorf("PTTL of %s is %v, want a TTL", key, ttl)
		}
	}
}

// WantReads fails the test unless the source has been read so often.
func WantReads(t testing.TB, db *users.DB, want int) {
	t.Helper()
	if n := db.Reads(); n != want {
		t.Errorf("the source was read %d times, want %d", n, want)
	}
}

// AwaitRenewal waits until the TTL of a lock grows.
func AwaitRenewal(t testing.TB, rdb *redis.Client, key string) {
	t.Helper()
	left := rdb.PTTL(t.Context(), key).Val()
	redistest.Await(t, "a renewal of the lock", func() bool {
		was := left
		left = rdb.PTTL(t.Context(), key).Val()
		return left > was
	})
}

// Codec checks that a cache leaves out of Redis what json tags leave out.
func Codec(t *testing.T, open Open) {
	t.Helper()
	ctx, rdb, db := New(t)
	WantName(t, open(t, rdb, db), "Ada")
	data, err := rdb.Get(ctx, "users:{42}").Result()
	redistest.Must(t, err)
	if !strings.Contains(data, "Ada") || strings.Contains(data, "secret") {
		t.Errorf("Redis has %q, want the name and no password", data)
	}
}
