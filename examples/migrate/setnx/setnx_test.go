package setnx

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"

	"github.com/singlefill/singlefill/examples/migrate/migratetest"
	"github.com/singlefill/singlefill/examples/migrate/users"
)

func TestMain(m *testing.M) { redistest.Main(m) }

const lockTTL = 5 * time.Second

func openBefore(_ *testing.T, rdb *redis.Client, db *users.DB) users.Cache {
	return NewBefore(rdb, db, lockTTL)
}

func openAfter(t *testing.T, rdb *redis.Client, db *users.DB) users.Cache {
	t.Helper()
	a, err := NewAfter(rdb, db, lockTTL)
	migratetest.OK(t, err)
	t.Cleanup(func() { a.Close() })
	return a
}

// The cache keeps the password out of Redis, as the old one did.
func TestCodec(t *testing.T) {
	t.Parallel()
	rdb := redistest.Start(t).Client(t)
	migratetest.Codec(t, rdb, openAfter(t, rdb, migratetest.NewDB(t)), "users:{42}")
}

// Old and new processes share a Redis: their keys differ, and a write deletes in both.
func TestSideBySide(t *testing.T) {
	t.Parallel()
	rdb := redistest.Start(t).Client(t)
	db := migratetest.NewDB(t)
	migratetest.SideBySide(t, db, openBefore(t, rdb, db), openAfter(t, rdb, db))
	migratetest.WantKeys(t, rdb, "user:42", "users:{42}")
}

func TestBehaviour(t *testing.T) {
	t.Run("before", func(t *testing.T) {
		migratetest.Want(t, openBefore, migratetest.Behaviour{
			TwoProcesses:    1,
			DeleteInLoad:    "Ada",
			CallerCancelled: 2,
			FailedLoad:      2,
			NotFound:        2,
			Panic:           true,
		}, func(s *redistest.Server, _ func(string) int64) bool { return s.Calls("set") >= 2 })
	})
	t.Run("after", func(t *testing.T) {
		migratetest.Want(t, openAfter, migratetest.After, migratetest.AfterWaits)
	})
}

// A lock by hand ends while its holder still loads, and the late holder overwrites a newer value.
// The lock of singlefill is renewed: a second process waits.
func TestLoadLongerThanLock(t *testing.T) {
	t.Parallel()
	ctx := migratetest.Context(t)
	rdb := redistest.Start(t).Client(t)
	db := migratetest.NewDB(t)
	short := func() users.Cache { return NewBefore(rdb, db, 50*time.Millisecond) }
	held, release := db.HoldNext()
	defer release()
	late := migratetest.Go(ctx, short())
	<-held
	other := short()
	migratetest.OK(t, users.Rename(ctx, db, "42", "Grace", other))
	migratetest.WantName(t, other, "Grace") // once the lock has ended
	release()
	_, err := late.Wait(t)
	migratetest.OK(t, err)
	migratetest.WantName(t, other, "Ada")
}

// singlefill renews its lock while the load runs.
func TestLockRenewed(t *testing.T) {
	t.Parallel()
	ctx := migratetest.Context(t)
	rdb := redistest.Start(t).Client(t)
	db := migratetest.NewDB(t)
	after, err := NewAfter(rdb, db, lockTTL)
	migratetest.OK(t, err)
	defer after.Close()
	held, release := db.HoldNext()
	defer release()
	call := migratetest.Go(ctx, after)
	<-held
	left := rdb.PTTL(ctx, "users:{42}:lock").Val()
	redistest.Await(t, "a renewal of the lock", func() bool {
		was := left
		left = rdb.PTTL(ctx, "users:{42}:lock").Val()
		return left > was
	})
	release()
	_, err = call.Wait(t)
	migratetest.OK(t, err)
}

// If both used one key, singlefill would take the JSON for a miss and replace it. What it stores is
// no JSON, although its codec is: an entry begins with a header.
func TestSharedKey(t *testing.T) {
	t.Parallel()
	ctx := migratetest.Context(t)
	rdb := redistest.Start(t).Client(t)
	db := migratetest.NewDB(t)
	migratetest.OK(t, rdb.Set(ctx, "users:{42}", `{"ID":"42","Name":"Ada"}`, time.Minute).Err())
	migratetest.WantName(t, openAfter(t, rdb, db), "Ada")
	if n := db.Reads(); n != 1 {
		t.Errorf("the source was read %d times, want once", n)
	}
	var user users.User
	var syntax *json.SyntaxError
	data, err := rdb.Get(ctx, "users:{42}").Bytes()
	migratetest.OK(t, err)
	if err := json.Unmarshal(data, &user); !errors.As(err, &syntax) {
		t.Errorf("Unmarshal = %v, want a syntax error", err)
	}
}
