package lock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// Failovers and replicas.

// failoverTimeout and failoverTTL are options of Lockers that must not see an error during a
// failover.
const failoverTimeout, failoverTTL = 3 * time.Second, 10 * time.Second

// A failover behind one address, whose old master becomes a replica and keeps its connections,
// fails no call and costs no lease.
//
//fault:failover-one-address
func TestFailover_OldMasterKeepsItsConnections(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		const conns = 25
		old := redistest.Start(t)
		next := redistest.StartReplica(t, old)
		p := redistest.NewProxy(t, old.Addr)
		rdb := p.Client(t, func(o *redis.Options) { o.PoolSize, o.MinIdleConns = conns, conns })
		open := func(rdb *redis.Client, name string) *locktest.Locker {
			return k.Locker(t, rdb, name, failoverTimeout, failoverTTL)
		}
		useAllConnections := func(when string) {
			var callers sync.WaitGroup
			for i := range conns {
				l := open(rdb, fmt.Sprint(when, i))
				callers.Go(func() {
					if err := l.Do(t.Context(), func(context.Context) error { return nil }); err != nil {
						t.Error(err)
					}
				})
			}
			callers.Wait()
		}
		holder := open(rdb, "held")
		held := locktest.Take(t, holder)
		useAllConnections("before")
		redistest.Await(t, "the pool is full, and the replica knows all", func() bool {
			return rdb.PoolStats().TotalConns == conns && next.Admin().Exists(t.Context(), locktest.Key("held")).Val() == 1
		})

		host, port, _ := net.SplitHostPort(next.Addr)
		redistest.Do(t, next.Admin(), "replicaof", "no", "one")
		p.Redirect(next.Addr)
		redistest.Do(t, old.Admin(), "replicaof", host, port)
		trier := open(rdb, "taken")
		tried, err := trier.TryAcquire(t.Context())
		redistest.Must(t, err)
		taken := locktest.Take(t, open(next.Client(t), "other"))
		useAllConnections("after")
		for _, l := range []*locktest.Locker{holder, trier} {
			renewed := l.Count("renewed")
			redistest.Await(t, "the lease is renewed", func() bool { return l.Count("renewed") > renewed })
		}
		for _, lease := range []*lock.Lease{held, tried, taken} {
			locktest.Release(t, lease)
		}
	})
}

// An old master does not decide about a lease that it does not know.
//
//fault:failover-one-address
func TestFailover_LeaseThatTheOldMasterDoesNotKnow(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		old, next := redistest.Start(t), redistest.Start(t)
		p := redistest.NewProxy(t, next.Addr)
		rdb := p.Client(t, func(o *redis.Options) { o.PoolSize, o.MinIdleConns = 1, 0 })
		lease := locktest.Take(t, k.Locker(t, rdb, "n", failoverTimeout, failoverTTL))
		p.Redirect(old.Addr)
		p.Cut()
		// The one connection is to the old master.
		redistest.Must(t, rdb.Ping(t.Context()).Err())
		// It has been a replica since, of a master that it does not reach.
		redistest.Do(t, old.Admin(), "replicaof", "127.0.0.1", "1")
		p.Redirect(next.Addr)
		locktest.Release(t, lease)
	})
}

// A replica knows who holds a lock, but grants and releases nothing.
//
//fault:replica
func TestReplica_GrantsNothing(t *testing.T) {
	t.Parallel()
	master := redistest.Start(t)
	replica := redistest.StartReplica(t, master)
	all := holdAll(t, master.Client(t), time.Second, 5*time.Second)
	for _, h := range all {
		redistest.Await(t, "the replica has the lock", func() bool { return h.Holders(t, replica.Admin(), h.Name) == h.Size })
		lease, err := h.Locker(t, replica.Client(t), h.Name, hasty, locktest.Long).TryAcquire(t.Context())
		if lease != nil || !errors.Is(err, lock.ErrBusy) && !errors.Is(err, lock.ErrUnavailable) {
			t.Errorf("%s: TryAcquire on a replica = %v, %v, want ErrBusy or ErrUnavailable", h.Name, lease, err)
		}
	}

	// The two change places, and the clients do not know.
	redistest.Do(t, replica.Admin(), "replicaof", "no", "one")
	host, port, _ := strings.Cut(replica.Addr, ":")
	redistest.Do(t, master.Admin(), "replicaof", host, port)
	var releases sync.WaitGroup
	for _, h := range all {
		releases.Go(func() {
			if err := h.leases[0].Release(t.Context()); !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous) {
				t.Errorf("%s: Release on a replica = %v, want ErrUnavailable or ErrAmbiguous", h.Name, err)
			}
		})
	}
	releases.Wait()
	for _, h := range all {
		for _, l := range h.leases[1:] {
			h.holder.WantLost(t, l, "not be renewed")
		}
		h.WantFree(t, replica, h.Name)
	}
}
