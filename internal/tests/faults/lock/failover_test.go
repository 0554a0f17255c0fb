package lock_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// Failovers.

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
