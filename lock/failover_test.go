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
	"github.com/singlefill/singlefill/lock"
)

// After a failover behind one address, whose old master becomes a replica and keeps its
// connections, no call fails and no lease is lost.
//
//fault:failover-one-address
func TestFailover_OldMasterKeepsItsConnections(t *testing.T) {
	eachKind(t, func(t *testing.T, kind string) {
		const conns = 25
		old := redistest.Start(t)
		next := redistest.StartReplica(t, old)
		p := redistest.NewProxy(t, old.Addr)
		rdb := p.Client(t, func(o *redis.Options) { o.PoolSize, o.MinIdleConns = conns, conns })
		var e events
		opts := patient(lock.Options{TTL: 10 * time.Second, Trace: e.trace()})
		each := func(what string) {
			var wg sync.WaitGroup
			for i := range conns {
				l := newLocker(t, kind, rdb, fmt.Sprint(what, i), opts)
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					lease, err := l.Acquire(ctx)
					if err != nil {
						t.Errorf("%s: %v", what, err)
						return
					}
					mustRelease(t, lease)
				})
			}
			wg.Wait()
		}
		held := mustAcquire(t, newLocker(t, kind, rdb, "held", opts))
		each("before")
		redistest.Await(t, "the pool is full, and the replica knows all", func() bool {
			return rdb.PoolStats().TotalConns == conns && next.Admin().Exists(t.Context(), "{held}:lock").Val() == 1
		})

		do := func(s *redistest.Server, args ...any) {
			t.Helper()
			if err := s.Admin().Do(t.Context(), args...).Err(); err != nil {
				t.Fatal(err)
			}
		}
		host, port, _ := net.SplitHostPort(next.Addr)
		do(next, "replicaof", "no", "one")
		p.Redirect(next.Addr)
		do(old, "replicaof", host, port)
		lease, err := newLocker(t, kind, rdb, "taken", opts).TryAcquire(t.Context())
		if err != nil {
			t.Errorf("TryAcquire: %v", err)
		}
		taken := mustAcquire(t, newLocker(t, kind, next.Client(t), "other", opts))
		each("after")
		renewed := len(e.of("renewed"))
		redistest.Await(t, "leases are renewed", func() bool { return len(e.of("renewed")) >= renewed+2 })
		for _, lease := range []*lock.Lease{held, lease, taken} {
			mustRelease(t, lease)
		}
		if lost := e.of("lost"); len(lost) > 0 {
			t.Errorf("lost: %+v", lost)
		}
	})
}

// What an old master says of a lease of which it does not know is not believed.
//
//fault:failover-one-address
func TestFailover_LeaseThatTheOldMasterDoesNotKnow(t *testing.T) {
	eachKind(t, func(t *testing.T, kind string) {
		old, next := redistest.Start(t), redistest.Start(t)
		p := redistest.NewProxy(t, next.Addr)
		rdb := p.Client(t, func(o *redis.Options) { o.PoolSize, o.MinIdleConns = 1, 0 })
		l := newLocker(t, kind, rdb, "n", patient(lock.Options{TTL: 10 * time.Second}))
		lease := mustAcquire(t, l)
		p.Redirect(old.Addr)
		p.Cut()
		if err := rdb.Ping(t.Context()).Err(); err != nil { // the one connection is to the old master
			t.Fatal(err)
		}
		// It has been a replica since, of a master that it does not reach.
		if err := old.Admin().Do(t.Context(), "replicaof", "127.0.0.1", "1").Err(); err != nil {
			t.Fatal(err)
		}
		p.Redirect(next.Addr)
		mustRelease(t, lease)
	})
}
