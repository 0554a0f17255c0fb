package gorediscache

import (
	"context"
	"testing"
	"time"

	"github.com/go-redis/cache/v9"
	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"

	"github.com/singlefill/singlefill/examples/migrate/migratetest"
	"github.com/singlefill/singlefill/examples/migrate/users"
)

func TestMain(m *testing.M) { redistest.Main(m) }

func openBefore(_ *testing.T, rdb *redis.Client, db *users.DB) users.Cache { return NewBefore(rdb, db) }

func openAfter(t *testing.T, rdb *redis.Client, db *users.DB) users.Cache {
	t.Helper()
	a, err := NewAfter(rdb, db)
	redistest.Must(t, err)
	t.Cleanup(func() { a.Close() })
	return a
}

// Old and new processes share a Redis: their keys differ, and a write deletes in both.
func TestSideBySide(t *testing.T) {
	migratetest.SideBySide(t, openBefore, openAfter)
}

func TestBehaviour(t *testing.T) {
	migratetest.Want(t, openBefore, openAfter, migratetest.Behaviour{
		TwoProcesses:    2,
		DeleteInLoad:    "Ada",
		CallerCancelled: 2,
		FailedLoad:      2,
		NotFound:        2,
		RedisDown:       true,
		Panic:           true,
	}, nil)
}

// If both used one key, singlefill would take the bytes of the other for a miss and replace them.
// The other cannot decode an entry of singlefill: it deletes the entry and loads.
func TestSharedKey(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	after := openAfter(t, rdb, db)
	old := cache.New(&cache.Options{Redis: rdb})
	once := func() {
		var user users.User
		err := old.Once(&cache.Item{Ctx: ctx, Key: "users:{42}", Value: &user, Do: func(*cache.Item) (any, error) {
			return db.User(ctx, "42")
		}})
		if err != nil || user.Name != "Ada" {
			t.Errorf("Once = %v, %v, want Ada", user, err)
		}
	}
	for i, call := range []func(){once, func() { migratetest.WantName(t, after, "Ada") }, once} {
		call()
		migratetest.WantReads(t, db, i+1)
	}
}

// A process that has a value in memory learns of a Delete elsewhere with Near, not with TinyLFU.
func TestDeleteElsewhere(t *testing.T) {
	t.Parallel()
	ctx := migratetest.Context(t)
	s := redistest.Start(t)
	db := migratetest.NewDB(t)
	before, beforeElsewhere := openBefore(t, s.Client(t), db), openBefore(t, s.Client(t), db)
	after, afterElsewhere := openAfter(t, s.Client(t), db), openAfter(t, s.Client(t), db)
	migratetest.WantName(t, before, "Ada")
	redistest.Await(t, "a hit in memory", func() bool {
		migratetest.WantName(t, after, "Ada")
		return after.(*After).cache.Stats().NearHits > 0
	})
	redistest.Must(t, users.Rename(ctx, db, "42", "Grace", beforeElsewhere, afterElsewhere))
	migratetest.AwaitName(t, after, "Grace")
	migratetest.WantName(t, before, "Ada")
}

// A TTL of less than a second becomes an hour in go-redis/cache.
func TestShortTTL(t *testing.T) {
	ctx, rdb, _ := migratetest.New(t)
	c := cache.New(&cache.Options{Redis: rdb})
	redistest.Must(t, c.Set(&cache.Item{Ctx: ctx, Key: "k", Value: "v", TTL: 999 * time.Millisecond}))
	if ttl := rdb.PTTL(ctx, "k").Val(); ttl < 59*time.Minute {
		t.Errorf("the key lives for %v, want an hour", ttl)
	}
}

// Once looks into the memory of the process even if SkipLocalCache is set.
func TestSkipLocalCache(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	before := NewBefore(rdb, db)
	migratetest.WantName(t, before, "Ada")
	redistest.Must(t, db.Rename(ctx, "42", "Grace"))
	redistest.Must(t, rdb.Del(ctx, "user:42").Err())
	var user users.User
	redistest.Must(t, before.cache.Once(&cache.Item{
		Ctx: ctx, Key: "user:42", Value: &user, SkipLocalCache: true,
		Do: func(*cache.Item) (any, error) { return db.User(ctx, "42") },
	}))
	if user.Name != "Ada" {
		t.Errorf("Once = %v, want Ada from memory", user)
	}
}

// Set with SetNX changes the memory of the process also where Redis keeps the older value.
func TestSetNX(t *testing.T) {
	t.Parallel()
	ctx := migratetest.Context(t)
	c := NewBefore(redistest.Start(t).Client(t), nil).cache
	redistest.Must(t, c.Set(&cache.Item{Ctx: ctx, Key: "k", Value: "first"}))
	redistest.Must(t, c.Set(&cache.Item{Ctx: ctx, Key: "k", Value: "second", SetNX: true}))
	var memory, stored string
	redistest.Must(t, c.Get(ctx, "k", &memory))
	redistest.Must(t, c.GetSkippingLocalCache(ctx, "k", &stored))
	if memory != "second" || stored != "first" {
		t.Errorf("memory has %q and Redis %q, want second and first", memory, stored)
	}
}

// The error of Do comes back unchanged from Once, and so does one of a Loader from GetOrLoad.
func TestErrorUnchanged(t *testing.T) {
	_, rdb, db := migratetest.New(t)
	for _, c := range []users.Cache{openBefore(t, rdb, db), openAfter(t, rdb, db)} {
		db.OnNext(func(context.Context) error { return context.DeadlineExceeded })
		if _, err := c.User(migratetest.Context(t), "42"); err != context.DeadlineExceeded {
			t.Errorf("%T.User = %v, want the error of the source", c, err)
		}
	}
}
