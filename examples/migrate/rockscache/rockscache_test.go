package rockscache

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"

	"github.com/singlefill/singlefill/examples/migrate/migratetest"
	"github.com/singlefill/singlefill/examples/migrate/users"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// Each test runs with strong consistency, unless it is about the other mode.
const strong = true

func openBefore(_ *testing.T, rdb *redis.Client, db *users.DB) users.Cache {
	return NewBefore(rdb, db, strong)
}

func openAfter(t *testing.T, rdb *redis.Client, db *users.DB) users.Cache {
	t.Helper()
	return newAfter(t, rdb, db, strong)
}

func newAfter(t *testing.T, rdb *redis.Client, db *users.DB, strong bool) *After {
	t.Helper()
	a, err := NewAfter(rdb, db, strong)
	redistest.Must(t, err)
	t.Cleanup(func() { a.Close() })
	return a
}

// The cache keeps the password out of Redis, as the old one did.
func TestCodec(t *testing.T) {
	migratetest.Codec(t, openAfter)
}

// Old and new processes share a Redis: their keys differ, and a write deletes in both.
func TestSideBySide(t *testing.T) {
	migratetest.SideBySide(t, openBefore, openAfter)
}

func TestBehaviour(t *testing.T) {
	migratetest.Want(t, openBefore, openAfter, migratetest.Behaviour{
		TwoProcesses:    1,
		DeleteInLoad:    "Grace",
		CallerCancelled: 2,
		FailedLoad:      2,
		NotFound:        1,
		Panic:           true,
	}, func(s *redistest.Server, _ func(string) int64) bool { return s.Calls("eval") >= 2 })
}

// Without strong consistency the first call after Forget gets the old value, in both, and a load in
// the background replaces it.
func TestOldValueServed(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	for _, c := range []users.Cache{NewBefore(rdb, db, false), newAfter(t, rdb, db, false)} {
		redistest.Must(t, db.Rename(ctx, "42", "Ada"))
		migratetest.WantName(t, c, "Ada")
		redistest.Must(t, users.Rename(ctx, db, "42", "Grace", c))
		migratetest.WantName(t, c, "Ada")
		migratetest.AwaitName(t, c, "Grace")
	}
}

// rockscache takes Delay and up to a tenth off the life that Fetch is given; singlefill only the
// tenth.
func TestTTL(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	migratetest.WantName(t, openBefore(t, rdb, db), "Ada")
	if ttl := rdb.PTTL(ctx, "user:42").Val(); ttl > 5*time.Minute-10*time.Second {
		t.Errorf("rockscache: the key lives for %v, want 10 s less than 5 minutes at most", ttl)
	}
	after := newAfter(t, rdb, db, strong)
	migratetest.WantName(t, after, "Ada")
	if ttl := rdb.PTTL(ctx, "users:{42}").Val(); ttl > 5*time.Minute+10*time.Second {
		t.Errorf("singlefill: the key lives for %v, want 5 minutes and the stale window at most", ttl)
	}
}

// While rockscache loads a key that Redis does not have, and after a panic of that load, the key has
// no TTL. The lock of singlefill has one.
func TestLockHasTTL(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	db.OnNext(func(context.Context) error {
		if ttl := rdb.PTTL(ctx, "user:42").Val(); ttl != -1 {
			t.Errorf("rockscache: PTTL during the load is %v, want none", ttl)
		}
		panic("a bug")
	})
	_, _ = migratetest.Go(ctx, openBefore(t, rdb, db)).Wait(t)
	if ttl := rdb.PTTL(ctx, "user:42").Val(); ttl != -1 {
		t.Errorf("rockscache: PTTL after the panic is %v, want none", ttl)
	}
	db.OnNext(func(context.Context) error {
		migratetest.WantKeys(t, rdb, "users:{42}:lock")
		panic("a bug")
	})
	_, _ = migratetest.Go(ctx, openAfter(t, rdb, db)).Wait(t)
}

// If both used one key, singlefill would replace the hash of the other, whose commands then fail.
func TestSharedKey(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	old := NewBefore(rdb, db, strong).cache
	load := func() (string, error) { return "Ada", nil }
	_, err := old.Fetch2(ctx, "users:{42}", time.Minute, load)
	redistest.Must(t, err)
	migratetest.WantName(t, openAfter(t, rdb, db), "Ada")
	if _, err := old.Fetch2(ctx, "users:{42}", time.Minute, load); !redis.HasErrorPrefix(err, "WRONGTYPE") {
		t.Errorf("Fetch2 = %v, want WRONGTYPE", err)
	}
}
