package lock_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// In these tests a server stalls, is restarted, moves its keys or is replaced, while leases are held and waited for.

// faultWaiting is a lock that is held, and somebody who waits for it.
type faultWaiting struct {
	faultHeld
	got func() *lock.Lease
}

func faultWaitFor(t testing.TB, rdb redis.UniversalClient, all []faultHeld) (waiting []faultWaiting) {
	t.Helper()
	for _, h := range all {
		waiting = append(waiting, faultWaiting{h, h.wait(t, h.locker(t, rdb, h.name, faultPatient, faultLong))})
	}
	return waiting
}

// handOver checks that what was held is held still, and that the waiter has it as soon as it is given back.
func (w faultWaiting) handOver(t testing.TB) {
	t.Helper()
	w.renewed(t)
	w.release(t)
	faultRelease(t, w.got())
}

//fault:restart-aof
func TestARestartThatForgetsNothingLosesNothing(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, "--appendonly", "yes", "--appendfsync", "always")
	all := faultWaitFor(t, s.Client(t), faultHold(t, s, time.Second, 6*time.Second))
	pid := s.Pid()
	begun := time.Now()
	s.Restart()
	t.Logf("the restart took %v; TTL is 6 s", time.Since(begun).Round(time.Millisecond))
	if s.Pid() == pid {
		t.Error("the server was not restarted")
	}
	for _, w := range all {
		w.handOver(t)
		w.free(t, s, w.name)
	}
}

//fault:short-freeze
func TestAServerThatIsAsleepIsNotBusyAndLosesNothing(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	all := faultHold(t, s, faultHasty, 9*time.Second)
	var others []*faultLocker
	for _, h := range all {
		others = append(others, h.locker(t, s.Client(t, faultOnce), h.name, faultHasty, faultLong))
	}
	slept := make(chan struct{})
	once := s.Client(t, faultPatientOnce)
	go func() {
		defer close(slept)
		once.Do(context.Background(), "debug", "sleep", "1.5")
	}()
	asks := s.Client(t, faultOnce).WithTimeout(50 * time.Millisecond)
	redistest.Await(t, "the server is asleep", func() bool { return asks.Ping(context.Background()).Err() != nil })
	var group sync.WaitGroup
	for i, h := range all {
		group.Go(func() {
			lease, err := others[i].TryAcquire(t.Context())
			if lease != nil || !errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, lock.ErrBusy) {
				t.Errorf("%s: TryAcquire = %v, %v, want ErrAmbiguous", h.name, lease, err)
			}
		})
	}
	group.Wait()
	<-slept
	for _, h := range all {
		h.renewed(t)
		h.release(t)
		h.free(t, s, h.name)
	}
}

// A server that cannot save takes no writes; what is held is held for as long as it may, and given back when it can.
//
//fault:refused-writes
func TestAServerThatCannotSaveIsUnavailableAndNotBusy(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	all := faultHold(t, s, time.Second, 9*time.Second)
	do, ctx := faultDo(t, s), context.Background()
	inTheWay := filepath.Join(s.Admin().ConfigGet(ctx, "dir").Val()["dir"], "dump.rdb", "not empty")
	if err := os.MkdirAll(inTheWay, 0o700); err != nil { // the file cannot take the place of a directory
		t.Fatal(err)
	}
	do("config", "set", "save", "3600 1")
	do("bgsave")
	asks := s.Client(t, faultOnce)
	redistest.Await(t, "writes are refused", func() bool {
		return redis.HasErrorPrefix(asks.Set(ctx, "x", "y", time.Minute).Err(), "MISCONF")
	})
	for _, h := range all {
		redistest.Await(t, "each renewal is refused", func() bool { return len(h.holder.errors()["renew"]) >= h.size })
		lease, err := h.locker(t, s.Client(t), h.name+" too", time.Second, faultLong).Acquire(ctx)
		if lease != nil || !errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrBusy) ||
			!strings.Contains(err.Error(), "MISCONF") {
			t.Errorf("%s: Acquire = %v, %v, want ErrUnavailable and MISCONF", h.name, lease, err)
		}
	}
	do("config", "set", "save", "")
	for _, h := range all {
		h.renewed(t)
		h.release(t)
		h.free(t, s, h.name)
	}
}

// The keys of a lock that is held and waited for go to another node, one by one. While they are in two places Redis
// runs no script on them, and says to try again.
//
//fault:moved-slot
func TestASlotThatMovesLosesNothing(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	var all []faultHeld
	for _, k := range faultKinds {
		h := faultHeld{faultKind: k, holder: k.locker(t, cluster.Client(t), k.name, time.Second, 6*time.Second)}
		h.leases = k.fill(t, h.holder)
		all = append(all, h)
	}
	waiting := faultWaitFor(t, cluster.Client(t), all)
	for _, w := range waiting {
		from := cluster.Owner(t, faultKey(w.name))
		if w.name == "fair" {
			redistest.Await(t, "the waiter is in the queue", func() bool {
				return from.Admin().ZCard(context.Background(), faultKey(w.name)+":queue").Val() == 1
			})
		}
		before := faultTold(t, cluster)
		move := cluster.Move(t, faultKey(w.name))
		move.Take(faultKey(w.name))
		if len(move.Rest()) == 0 {
			t.Fatalf("%s: nothing is left to be moved", w.name)
		}
		redistest.Await(t, "somebody has been told to try again", func() bool { return faultTold(t, cluster) > before })
		move.End()
		if left, marks := faultLeft(t, from.Admin(), w.name); len(left)+len(marks) > 0 {
			t.Errorf("%s: on the old node: %q %q", w.name, left, marks)
		}
	}
	for _, w := range waiting {
		renewed := w.holder.told("renewed")
		redistest.Await(t, "each is renewed on its new node",
			func() bool { return w.holder.told("renewed") >= renewed+w.size })
		w.handOver(t)
		owner := cluster.Owner(t, faultKey(w.name))
		redistest.Await(t, "nothing is left of the lock", func() bool {
			left, _ := faultLeft(t, owner.Admin(), w.name)
			return len(left) == 0
		})
	}
}

// faultTold returns how often the nodes of a cluster have said to try again.
func faultTold(t testing.TB, cluster *redistest.Cluster) (all int) {
	t.Helper()
	for _, node := range cluster.Nodes {
		info, err := node.Admin().Info(context.Background(), "errorstats").Result()
		if err != nil {
			t.Fatal(err)
		}
		var n int
		_, count, _ := strings.Cut(info, "errorstat_TRYAGAIN:count=")
		fmt.Sscan(count, &n)
		all += n
	}
	return all
}

// Three masters with a replica each. The one that has the lock dies, and its replica, which knows of it, takes over
// well within TTL: the holder keeps its lease, and others have it afterwards.
//
//fault:dead-master
func TestAMasterOfAClusterThatDiesLosesNothingThatItsReplicaKnows(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartReplicatedCluster(t)
	often := func(o *redis.ClusterOptions) { o.ClusterStateReloadInterval, o.DialerRetries = 500*time.Millisecond, 1 }
	var all []faultHeld
	for _, k := range faultKinds {
		name := "{name}" + k.name // all on one node
		h := faultHeld{faultKind: k, holder: k.locker(t, cluster.Client(t, often), name, time.Second, 12*time.Second)}
		h.leases = k.fill(t, h.holder)
		all = append(all, h)
	}
	victim := cluster.Owner(t, faultKey("{name}"))
	conn := victim.Admin().Conn()
	if n, err := conn.Wait(t.Context(), 1, 10*time.Second).Result(); n < 1 || err != nil {
		t.Fatalf("%d replicas know of it, %v", n, err)
	}
	_ = conn.Close()
	victim.Kill()
	begun := time.Now()
	for i, h := range all {
		h.renewed(t)
		if i == 0 {
			t.Logf("the first renewal by the new master came %v after the death of the old one; TTL is 12 s",
				time.Since(begun).Round(time.Millisecond))
		}
	}
	if owner := cluster.Owner(t, faultKey("{name}")); owner == victim {
		t.Error("the dead master serves the keys")
	}
	for _, h := range all {
		other := h.locker(t, cluster.Client(t, often), "{name}"+h.name, time.Second, faultLong)
		if _, err := other.TryAcquire(t.Context()); !errors.Is(err, lock.ErrBusy) {
			t.Errorf("%s: TryAcquire of another = %v, want ErrBusy", h.name, err)
		}
		h.release(t)
		for _, l := range h.fill(t, other) {
			faultRelease(t, l)
		}
	}
}

// The replica that takes over has never heard of the leases. Others have them at once; those who have lost them are
// told by their next renewal, and their release touches nothing. The fences go on growing.
//
//fault:failover-lost-lock
func TestAFailoverThatLosesLeasesIsToldAtTheNextRenewal(t *testing.T) {
	t.Parallel()
	master := redistest.Start(t)
	replica := redistest.StartReplica(t, master)
	host, _, _ := strings.Cut(replica.Addr, ":")
	faultDo(t, replica)("replicaof", host, 1) // cut off: nobody is there
	p := redistest.NewProxy(t, master.Addr)
	const ttl = 6 * time.Second
	var all []faultHeld
	for _, k := range faultKinds {
		h := faultHeld{faultKind: k, holder: k.locker(t, p.Client(t), k.name, time.Second, ttl)}
		h.leases = k.fill(t, h.holder)
		if n := k.holders(t, replica.Admin(), k.name); n != 0 {
			t.Errorf("the replica knows of %d holders", n)
		}
		all = append(all, h)
	}
	master.Kill()
	faultDo(t, replica)("replicaof", "no", "one")
	p.Redirect(replica.Addr)
	p.Cut()
	begun := time.Now()
	for _, h := range all {
		next := h.fill(t, h.locker(t, p.Client(t), h.name, faultPatient, faultLong))
		before := h.holding(t, replica.Admin(), h.name)
		for _, l := range h.leases {
			if next[0].Fence() <= l.Fence() {
				t.Errorf("%s: fence %d after %d", h.name, next[0].Fence(), l.Fence())
			}
			h.holder.lost(t, l, faultGone) // by a renewal, not by the want of one
		}
		if now := h.holding(t, replica.Admin(), h.name); now != before || before == "" {
			t.Errorf("%s: the lock had %s, and has %s", h.name, before, now)
		}
		for _, l := range next {
			faultRelease(t, l)
		}
	}
	t.Logf("all were told within %v of the failover; TTL is %v, and they are renewed at a third of it",
		time.Since(begun).Round(time.Millisecond), ttl)
	for _, h := range all {
		h.free(t, replica, h.name)
	}
}

//fault:last-redirection
func TestAReleaseThatIsRedirectedTooOftenIsTriedAgain(t *testing.T) {
	for _, says := range []string{"TRYAGAIN x", "MOVED 1 127.0.0.1:1", "ASK 1 127.0.0.1:1"} {
		t.Run(says, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, rdb := redistest.StartMini(t)
				k := faultKinds[0]
				l := k.locker(t, rdb, "name", time.Second, time.Minute)
				lease := faultTake(t, l)
				var said atomic.Int64
				m.Server().SetPreHook(func(p *server.Peer, cmd string, args ...string) bool {
					if cmd == "EVALSHA" && said.Add(1) == 1 {
						p.WriteError(says)
						return true
					}
					return false
				})
				if err := lease.Release(t.Context()); err != nil {
					t.Errorf("Release = %v", err)
				}
				time.Sleep(10 * time.Second)
				if m.Exists("{name}:lock") {
					t.Error("10 s later it is still held")
				}
			})
		})
	}
}
