package redsync

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"

	"github.com/singlefill/singlefill/examples/migrate/migratetest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// During a rollout: processes of Before and After do not exclude each other; those of Both exclude
// the processes of all three kinds.
func TestSideBySide(t *testing.T) {
	t.Parallel()
	migratetest.Exclusion(t, Before, After, Both)
}

// redsync returns ErrTaken after its last try, and ErrFailed, without the error of the context, if
// the context ends between two tries. Acquire returns the error of the context.
func TestBusy(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	rdb := server.Client(t)
	ctx := migratetest.Context(t)
	rs := redsync.New(goredis.NewPool(rdb))
	held := rs.NewMutex("jobs")
	redistest.Must(t, held.LockContext(ctx))
	var taken *redsync.ErrTaken
	if err := rs.NewMutex("jobs").TryLockContext(ctx); !errors.As(err, &taken) {
		t.Errorf("TryLockContext = %v, want ErrTaken", err)
	}
	waiter := server.Client(t)
	ended := migratetest.UntilAnswered(t, waiter)
	err := redsync.New(goredis.NewPool(waiter)).NewMutex("jobs").LockContext(ended)
	if !errors.Is(err, redsync.ErrFailed) || errors.Is(err, context.Canceled) {
		t.Errorf("LockContext = %v, want ErrFailed alone", err)
	}

	jobs, err := lock.NewMutex(rdb, "jobs", nil)
	redistest.Must(t, err)
	lease, err := jobs.Acquire(ctx)
	redistest.Must(t, err)
	defer lease.Release(ctx)
	waiter = server.Client(t)
	jobs, err = lock.NewMutex(waiter, "jobs", nil)
	redistest.Must(t, err)
	_, err = jobs.Acquire(migratetest.UntilAnswered(t, waiter))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Acquire = %v, want the error of the context", err)
	}
}

// A lock of redsync ends at its expiry unless its holder extends it, and a late Unlock says so.
func TestExpiry(t *testing.T) {
	ctx, rdb, _ := migratetest.New(t)
	rs := redsync.New(goredis.NewPool(rdb))
	late := rs.NewMutex("jobs", redsync.WithExpiry(time.Second))
	redistest.Must(t, late.LockContext(ctx))
	redistest.Await(t, "the end of the lock", func() bool { return !redistest.Exists(t, rdb, "jobs") })
	ok, err := late.UnlockContext(ctx)
	if ok || !errors.Is(err, redsync.ErrLockAlreadyExpired) {
		t.Errorf("UnlockContext = %v, %v, want false and ErrLockAlreadyExpired", ok, err)
	}
	second := rs.NewMutex("jobs")
	redistest.Must(t, second.LockContext(ctx))
	if ok, err := late.UnlockContext(ctx); ok || err == nil {
		t.Errorf("UnlockContext = %v, %v, want false and an error", ok, err)
	}
	if !redistest.Exists(t, rdb, "jobs") {
		t.Error("the late holder has released the lock of another one")
	}

	jobs, err := lock.NewMutex(rdb, "jobs", nil)
	redistest.Must(t, err)
	lease, err := jobs.Acquire(ctx)
	redistest.Must(t, err)
	redistest.Must(t, rdb.Del(ctx, "{jobs}:lock").Err())
	if err := lease.Release(ctx); !errors.Is(err, lock.ErrLost) {
		t.Errorf("Release = %v, want ErrLost", err)
	}
}

// With redsync a majority of three servers grants the lock, also while one of them is down. Package
// lock uses one server.
func TestQuorum(t *testing.T) {
	t.Parallel()
	ctx := migratetest.Context(t)
	a, b, c := redistest.Start(t), redistest.Start(t), redistest.Start(t)
	rs := redsync.New(goredis.NewPool(a.Client(t)), goredis.NewPool(b.Client(t)), goredis.NewPool(c.Client(t, redistest.NoRetry)))
	c.Kill()
	redistest.Must(t, rs.NewMutex("jobs").LockContext(ctx))
	if err := rs.NewMutex("jobs").TryLockContext(ctx); err == nil {
		t.Error("the lock was granted twice")
	}

	rdb := c.Client(t, redistest.NoRetry)
	jobs, err := lock.NewMutex(rdb, "jobs", nil)
	redistest.Must(t, err)
	if _, err := jobs.TryAcquire(ctx); !errors.Is(err, lock.ErrUnavailable) {
		t.Errorf("TryAcquire = %v, want ErrUnavailable", err)
	}
}
