package rueidisaside

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis/rueidisaside"
	"github.com/singlefill/singlefill/internal/redistest"

	"github.com/singlefill/singlefill/examples/migrate/migratetest"
	"github.com/singlefill/singlefill/examples/migrate/users"
)

func TestMain(m *testing.M) { redistest.Main(m) }

func openBefore(t *testing.T, rdb *redis.Client, db *users.DB) users.Cache {
	t.Helper()
	return newBefore(t, rdb, db)
}

func newBefore(t *testing.T, rdb *redis.Client, db *users.DB) *Before {
	t.Helper()
	b, err := NewBefore(rdb.Options().Addr, db)
	redistest.Must(t, err)
	t.Cleanup(b.Close)
	return b
}

func openAfter(t *testing.T, rdb *redis.Client, db *users.DB) users.Cache {
	t.Helper()
	a, err := NewAfter(rdb, db)
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
		NotFound:        2,
		Panic:           true,
	}, func(s *redistest.Server, _ func(string) int64) bool { return s.Calls("get") >= 3 })
}

// While rueidisaside loads, its key holds a placeholder, which names a key that has ClientTTL.
func TestPlaceholder(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	held, release := db.HoldNext()
	defer release()
	call := migratetest.Go(ctx, openBefore(t, rdb, db))
	<-held
	id := rdb.Get(ctx, "user:42").Val()
	if !strings.HasPrefix(id, rueidisaside.PlaceholderPrefix) {
		t.Errorf("the key holds %q, want a placeholder", id)
	}
	if ttl := rdb.PTTL(ctx, id).Val(); ttl <= 0 || ttl > 5*time.Second {
		t.Errorf("the key of the client lives for %v, want 5 s at most", ttl)
	}
	release()
	_, err := call.Wait(t)
	redistest.Must(t, err)
}

// The ttl of Get is also the deadline of its load. LoadTimeout is, whatever the ttl.
func TestLoadDeadline(t *testing.T) {
	ctx, rdb, _ := migratetest.New(t)
	b := newBefore(t, rdb, migratetest.NewDB(t))
	const ttl = 2 * time.Second
	_, err := b.cache.Get(ctx, ttl, "k", func(ctx context.Context, _ string) (string, error) {
		if end, ok := ctx.Deadline(); !ok || time.Until(end) > ttl {
			t.Errorf("the deadline of the load is %v, %v, want within the ttl", end, ok)
		}
		return "v", nil
	})
	redistest.Must(t, err)
	a := openAfter(t, rdb, nil).(*After)
	_, err = a.cache.GetOrLoad(ctx, "k", func(loadCtx context.Context, _ string) (users.User, error) {
		end, _ := loadCtx.Deadline()
		if mine, _ := ctx.Deadline(); !end.After(mine) {
			t.Errorf("the deadline of the load is %v, want LoadTimeout, after that of the caller, %v", end, mine)
		}
		return users.User{}, nil
	})
	redistest.Must(t, err)
}

// A process that has a value in memory learns of a Delete elsewhere, in both.
func TestDeleteElsewhere(t *testing.T) {
	t.Parallel()
	for _, open := range []migratetest.Open{openBefore, openAfter} {
		ctx := migratetest.Context(t)
		s := redistest.Start(t)
		db := migratetest.NewDB(t)
		here, elsewhere := open(t, s.Client(t), db), open(t, s.Client(t), db)
		redistest.Await(t, "a hit in memory", func() bool {
			reads := s.Calls("get")
			migratetest.WantName(t, here, "Ada")
			return db.Reads() == 1 && s.Calls("get") == reads
		})
		redistest.Must(t, users.Rename(ctx, db, "42", "Grace", elsewhere))
		migratetest.AwaitName(t, here, "Grace")
	}
}

// A process that has no rueidis client deletes for rueidisaside by a plain DEL: also a value in the
// memory of other processes, and the placeholder of a load.
func TestPlainDel(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	before := openBefore(t, rdb, db)
	held, release := db.HoldNext()
	defer release()
	late := migratetest.Go(ctx, before)
	<-held
	for _, name := range []string{"Grace", "Hedy"} {
		redistest.Must(t, db.Rename(ctx, "42", name))
		redistest.Must(t, rdb.Del(ctx, "user:42").Err())
		release()
		_, err := late.Wait(t)
		redistest.Must(t, err)
		migratetest.AwaitName(t, before, name)
	}
}

// If both used one key, rueidisaside would return an entry of singlefill as the value.
func TestSharedKey(t *testing.T) {
	ctx, rdb, db := migratetest.New(t)
	migratetest.WantName(t, openAfter(t, rdb, db), "Ada")
	b := newBefore(t, rdb, db)
	text, err := b.cache.Get(ctx, time.Minute, "users:{42}", func(context.Context, string) (string, error) {
		return "loaded", nil
	})
	if err != nil || !strings.HasPrefix(text, "\xC1") {
		t.Errorf("Get = %q, %v, want the bytes of the entry", text, err)
	}
}
