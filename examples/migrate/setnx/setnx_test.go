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
		DeleteInLoad:    "Ada",
		CallerCancelled: 2,
		FailedLoad:      2,
		NotFound:        2,
		Panic:           true,
	}, func(s *redistest.Server, _ func(string) int64) bool { return s.Calls("set") >= 2 })
}

// A lock by hand ends while its holder still loads, and the late holder overwrites a newer value.
// The lock of singlefill is renewed: a second process waits.
func TestLoadLongerThanLock(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	short := func() users.Cache { return NewBefore(rdb, db, 50*time.Millisecond) }
	held, release := db.HoldNext()
	defer release()
	late := migratetest.Go(ctx, short())
	<-held
	other := short()
	redistest.Must(t, users.Rename(ctx, db, "42", "Grace", other))
	migratetest.WantName(t, other, "Grace") // once the lock has ended
	release()
	_, err := late.Wait(t)
	redistest.Must(t, err)
	migratetest.WantName(t, other, "Ada")
}

// singlefill renews its lock while the load runs.
func TestLockRenewed(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	held, release := db.HoldNext()
	defer release()
	call := migratetest.Go(ctx, openAfter(t, rdb, db))
	<-held
	migratetest.AwaitRenewal(t, rdb, "users:{42}:lock")
	release()
	_, err := call.Wait(t)
	redistest.Must(t, err)
}

// If both used one key, singlefill would take the JSON for a miss and replace it. What it stores is
// no JSON, although its codec is: an entry begins with a header.
func TestSharedKey(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	redistest.Must(t, rdb.Set(ctx, "users:{42}", `{"ID":"42","Name":"Ada"}`, time.Minute).Err())
	migratetest.WantName(t, openAfter(t, rdb, db), "Ada")
	migratetest.WantReads(t, db, 1)
	var user users.User
	var syntax *json.SyntaxError
	data, err := rdb.Get(ctx, "users:{42}").Bytes()
	redistest.Must(t, err)
	if err := json.Unmarshal(data, &user); !errors.As(err, &syntax) {
		t.Errorf("Unmarshal = %v, want a syntax error", err)
	}
}
