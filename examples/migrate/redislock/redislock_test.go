package redislock

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/bsm/redislock"
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

// redislock tries once by default and returns ErrNotObtained; so does TryAcquire, with ErrBusy.
// With a RetryStrategy it returns the error of the context, as Acquire does.
func TestBusy(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	rdb := server.Client(t)
	ctx := migratetest.Context(t)
	held, err := redislock.Obtain(ctx, rdb, "jobs", time.Minute, nil)
	redistest.Must(t, err)
	defer held.Release(ctx)
	if _, err := redislock.Obtain(ctx, rdb, "jobs", time.Minute, nil); !errors.Is(err, redislock.ErrNotObtained) {
		t.Errorf("Obtain = %v, want ErrNotObtained", err)
	}
	jobs, err := lock.NewMutex(rdb, "jobs", nil)
	redistest.Must(t, err)
	lease, err := jobs.Acquire(ctx)
	redistest.Must(t, err)
	defer lease.Release(ctx)
	if _, err := jobs.TryAcquire(ctx); !errors.Is(err, lock.ErrBusy) {
		t.Errorf("TryAcquire = %v, want ErrBusy", err)
	}

	never := func(context.Context) error { t.Error("fn runs beside the holder"); return nil }
	waiter := server.Client(t)
	err = Before(migratetest.UntilAnswered(t, waiter), waiter, never)
	if !errors.Is(err, context.Canceled) || errors.Is(err, redislock.ErrNotObtained) {
		t.Errorf("Before = %v, want the error of the context alone", err)
	}
	waiter = server.Client(t)
	err = After(migratetest.UntilAnswered(t, waiter), waiter, never)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("After = %v, want the error of the context", err)
	}
}

// A lock of redislock ends at its ttl, whatever its holder does. A lease is renewed, and its fence
// grows with each grant.
func TestRenewal(t *testing.T) {
	ctx, rdb, _ := migratetest.New(t)
	late, err := redislock.Obtain(ctx, rdb, "jobs", 50*time.Millisecond, nil)
	redistest.Must(t, err)
	second, err := redislock.Obtain(ctx, rdb, "jobs", time.Minute, &redislock.Options{
		RetryStrategy: redislock.LinearBackoff(10 * time.Millisecond),
	})
	redistest.Must(t, err) // while the first one works
	if err := late.Release(ctx); !errors.Is(err, redislock.ErrLockNotHeld) {
		t.Errorf("Release = %v, want ErrLockNotHeld", err)
	}
	redistest.Must(t, second.Release(ctx))

	jobs, err := lock.NewMutex(rdb, "jobs", &lock.Options{TTL: 5 * time.Second})
	redistest.Must(t, err)
	lease, err := jobs.Acquire(ctx)
	redistest.Must(t, err)
	migratetest.AwaitRenewal(t, rdb, "{jobs}:lock")
	redistest.Must(t, lease.Release(ctx))
	next, err := jobs.Acquire(ctx)
	redistest.Must(t, err)
	defer next.Release(ctx)
	if next.Fence() <= lease.Fence() {
		t.Errorf("the fence of the next grant is %d, that of the first was %d", next.Fence(), lease.Fence())
	}
}

// Release of redislock does nothing with a context that has ended. That of a lease does.
func TestReleaseAfterCancel(t *testing.T) {
	ctx, rdb, _ := migratetest.New(t)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	held, err := redislock.Obtain(ctx, rdb, "jobs", time.Minute, nil)
	redistest.Must(t, err)
	if err := held.Release(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("Release = %v, want context.Canceled", err)
	}
	if !redistest.Exists(t, rdb, "jobs") {
		t.Error("redislock has released the lock")
	}
	jobs, err := lock.NewMutex(rdb, "jobs", nil)
	redistest.Must(t, err)
	lease, err := jobs.Acquire(ctx)
	redistest.Must(t, err)
	redistest.Must(t, lease.Release(ended))
	if redistest.Exists(t, rdb, "{jobs}:lock") {
		t.Error("the lease is still held")
	}
}

// A panic of fn continues, and the lock is released.
func TestPanic(t *testing.T) {
	ctx, rdb, _ := migratetest.New(t)
	for name, do := range map[string]migratetest.Do{"jobs": Before, "{jobs}:lock": After} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic does not continue")
				}
			}()
			_ = do(ctx, rdb, func(context.Context) error { panic("a bug") })
		}()
		if redistest.Exists(t, rdb, name) {
			t.Errorf("after the panic the lock %s is held", name)
		}
	}
}

// If redislock uses the key of a mutex, each takes the other for a holder.
func TestSharedKey(t *testing.T) {
	ctx, rdb, _ := migratetest.New(t)
	held, err := redislock.Obtain(ctx, rdb, "{jobs}:lock", time.Minute, nil)
	redistest.Must(t, err)
	jobs, err := lock.NewMutex(rdb, "jobs", nil)
	redistest.Must(t, err)
	if _, err := jobs.TryAcquire(ctx); !errors.Is(err, lock.ErrBusy) {
		t.Errorf("TryAcquire = %v, want ErrBusy", err)
	}
	redistest.Must(t, held.Release(ctx))
	lease, err := jobs.TryAcquire(ctx)
	redistest.Must(t, err)
	defer lease.Release(ctx)
	if _, err := redislock.Obtain(ctx, rdb, "{jobs}:lock", time.Minute, nil); !errors.Is(err, redislock.ErrNotObtained) {
		t.Errorf("Obtain = %v, want ErrNotObtained", err)
	}
}
