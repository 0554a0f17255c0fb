package lock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// Tests of promises that hold between processes. Every process is a process, and Redis is Redis; what must not
// happen at once is counted there, by those who hold the lock.

const procRole = "lock user"

func init() { redistest.Role(procRole, runProc) }

// procEnter tells the server that somebody who holds the lock begins: it keeps the largest number that have been
// in at once, and how often a fence was not larger than the one before.
var procEnter = redis.NewScript(`
local n = redis.call('INCR', 'running')
if n > tonumber(redis.call('GET', 'most') or 0) then redis.call('SET', 'most', n) end
if tonumber(ARGV[1]) <= tonumber(redis.call('GET', 'entered') or 0) then redis.call('INCR', 'backwards') end
redis.call('SET', 'entered', ARGV[1])
return n`)

// procWrite is a resource that refuses whoever comes with a smaller fence than the largest it has seen.
var procWrite = redis.NewScript(`
if tonumber(ARGV[1]) < tonumber(redis.call('GET', 'seen') or 0) then return 0 end
redis.call('SET', 'seen', ARGV[1])
return 1`)

// A procUser is a child: it obeys orders of the form "verb tag", each in a goroutine of its own, and says what
// has come of it as "tag: what".
type procUser struct {
	*redistest.Child
	*lock.Locker
	rdb *redis.Client

	mu     sync.Mutex
	leases map[string]*lock.Lease   // protected by mu, by tag
	finish map[string]chan struct{} // protected by mu, by tag
}

// runProc is the role. Its arguments are the address of Redis, a kind, which is also the lock's name, the TTL and
// the RedisTimeout.
func runProc(p *redistest.Child) {
	u := &procUser{Child: p, leases: make(map[string]*lock.Lease), finish: make(map[string]chan struct{})}
	u.rdb = redis.NewClient(&redis.Options{
		Addr: p.Args[0], DisableIdentity: true, PoolSize: 50, ReadTimeout: time.Minute,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	ttl, err := time.ParseDuration(p.Args[2])
	procMust(err)
	timeout, err := time.ParseDuration(p.Args[3])
	procMust(err)
	procMust(u.rdb.Ping(context.Background()).Err())
	k := procKind(p.Args[1])
	u.Locker, err = k.open(u.rdb, k.name, &lock.Options{TTL: ttl, RedisTimeout: timeout, WaiterTTL: 4 * timeout})
	procMust(err)
	p.Say("ready")
	for line, ok := p.Next(); ok; line, ok = p.Next() {
		verb, tag, _ := strings.Cut(line, " ")
		u.mu.Lock()
		lease := u.leases[tag]
		if verb == "do" {
			u.finish[tag] = make(chan struct{})
		}
		finish := u.finish[tag]
		u.mu.Unlock()
		go func() {
			switch verb {
			case "acquire":
				u.acquire(tag)
			case "release":
				u.Say("%s: released %s", tag, procVerdict(lease.Release(context.Background())))
			case "write":
				u.Say("%s: wrote %d", tag, u.write(lease))
			case "turn": // waits for the lock, writes down its name, and goes
				lease := u.acquire(tag)
				procMust(u.rdb.RPush(context.Background(), "order", tag).Err())
				u.Say("%s: released %s", tag, procVerdict(lease.Release(context.Background())))
			case "do":
				u.do(tag, finish)
			case "finish":
				close(finish)
			case "contend":
				u.contend(tag)
			default:
				panic("unknown order " + line)
			}
		}()
	}
}

func procKind(name string) faultKind {
	for _, k := range faultKinds {
		if k.name == name {
			return k
		}
	}
	panic("no kind is named " + name)
}

func procMust(err error) {
	if err != nil {
		panic(err)
	}
}

func procVerdict(err error) string {
	switch {
	case err == nil:
		return "nil"
	case errors.Is(err, lock.ErrLost):
		return "lost"
	}
	return err.Error()
}

func (u *procUser) acquire(tag string) *lock.Lease {
	waits := &faultAsked{Context: context.Background(), asked: make(chan struct{})}
	go func() { <-waits.asked; u.Say("%s: asks", tag) }()
	lease, err := u.Acquire(waits)
	procMust(err)
	u.mu.Lock()
	u.leases[tag] = lease
	u.mu.Unlock()
	context.AfterFunc(lease.Context(), func() {
		if err := context.Cause(lease.Context()); errors.Is(err, lock.ErrLost) {
			u.Say("%s: told", tag)
		}
	})
	u.Say("%s: acquired %d", tag, lease.Fence())
	return lease
}

func (u *procUser) write(lease *lock.Lease) int {
	n, err := procWrite.Run(context.Background(), u.rdb, nil, lease.Fence()).Int()
	procMust(err)
	return n
}

func (u *procUser) do(tag string, finish chan struct{}) {
	err := u.Do(context.Background(), func(ctx context.Context) error {
		u.Say("%s: doing", tag)
		select {
		case <-ctx.Done():
			u.Say("%s: told %s", tag, procVerdict(context.Cause(ctx)))
		case <-finish:
		}
		return nil
	})
	u.Say("%s: done %s", tag, procVerdict(err))
}

// contend has goroutines compete, each a few times: what they do with the lock held is only right if nobody else
// does. tag says how many of them, and how many times, as "goroutines*times".
func (u *procUser) contend(tag string) {
	var goroutines, times int
	_, err := fmt.Sscanf(tag, "%d*%d", &goroutines, &times)
	procMust(err)
	ctx := context.Background()
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for range times {
				lease, err := u.Acquire(ctx)
				procMust(err)
				procMust(procEnter.Run(ctx, u.rdb, nil, lease.Fence()).Err())
				n, err := u.rdb.Get(ctx, "counter").Int()
				if err != nil && !errors.Is(err, redis.Nil) {
					panic(err)
				}
				procMust(u.rdb.Set(ctx, "counter", n+1, 0).Err())
				procMust(u.rdb.Decr(ctx, "running").Err())
				procMust(lease.Release(ctx))
			}
		})
	}
	wg.Wait()
	u.Say("%s: done", tag)
}

// A procFleet is processes that share one lock.
type procFleet struct {
	faultKind
	t *testing.T
	s *redistest.Server
}

// procEach runs a test with a fleet for each kind of lock. At its end, all having been released, nothing is left
// but fences and marks, each with a TTL.
func procEach(t *testing.T, run func(t *testing.T, f procFleet)) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		f := procFleet{faultKind: k, t: t, s: redistest.Start(t)}
		run(t, f)
		t.Run("and only fences and marks are left, each with a TTL", func(t *testing.T) { k.free(t, f.s, k.name) })
	})
}

// spawn starts n processes.
func (f procFleet) spawn(n int, redisTimeout, ttl time.Duration) (all []*redistest.Process) {
	f.t.Helper()
	for range n {
		all = append(all, redistest.Spawn(f.t, procRole, f.s.Addr, f.name, ttl.String(), redisTimeout.String()))
	}
	for _, p := range all {
		p.Expect("ready")
	}
	return all
}

// take has a process take all places, and returns the tags of its leases, and the last fence.
func (f procFleet) take(p *redistest.Process, as string) (tags []string, fence int64) {
	f.t.Helper()
	for i := range f.size {
		tag := fmt.Sprint(as, i)
		tags = append(tags, tag)
		p.Send("acquire " + tag)
		fence = max(fence, procFence(f.t, p, tag))
	}
	return tags, fence
}

func procFence(t testing.TB, p *redistest.Process, tag string) (fence int64) {
	t.Helper()
	if _, err := fmt.Sscan(p.Expect(tag+": acquired "), &fence); err != nil {
		t.Fatal(err)
	}
	return fence
}

// procWants orders something and checks what comes of it.
func procWants(t testing.TB, p *redistest.Process, order, tag, says, want string) {
	t.Helper()
	p.Send(order + " " + tag)
	if got := p.Expect(tag + ": " + says + " "); got != want {
		t.Errorf("%s %s: %s %s, want %s", order, tag, says, got, want)
	}
}

// procSays returns the next n lines that a process says, by their tags.
func procSays(p *redistest.Process, n int) map[string]string {
	said := make(map[string]string)
	for range n {
		tag, what, _ := strings.Cut(p.Line(), ": ")
		said[tag] += what + ", "
	}
	return said
}

func (f procFleet) number(key string) int {
	f.t.Helper()
	n, err := f.s.Admin().Get(f.t.Context(), key).Int()
	if err != nil && !errors.Is(err, redis.Nil) {
		f.t.Fatal(err)
	}
	return n
}

const (
	// A process that is to be replaced has the times of procHasty; it is the only kind that a stalled machine could
	// keep from renewing in time. The others are patient.
	procHasty, procHastyTTL     = 700 * time.Millisecond, 2500 * time.Millisecond
	procPatient, procPatientTTL = 9 * time.Second, 30 * time.Second
)

//fault:very-many
func TestNoMoreThanAllowedHoldItInTheFleetAndNoUpdateIsLost(t *testing.T) {
	procEach(t, func(t *testing.T, f procFleet) {
		const processes, goroutines, times = 5, 10, 8
		all := f.spawn(processes, procPatient, procPatientTTL)
		order := fmt.Sprintf("%d*%d", goroutines, times)
		for _, p := range all {
			p.Send("contend " + order)
		}
		for _, p := range all {
			p.Expect(order + ": done")
		}
		if n := f.number("most"); n != f.size {
			t.Errorf("%d held it at once, want %d", n, f.size)
		}
		if f.size > 1 {
			return
		}
		if n := f.number("counter"); n != processes*goroutines*times {
			t.Errorf("%d updates, want %d", n, processes*goroutines*times)
		}
		if n := f.number("backwards"); n != 0 {
			t.Errorf("%d fences were not larger than the one before", n)
		}
	})
}

// A process is told to queue only when the one before is seen in the queue.
func TestAFairMutexIsGrantedInTheOrderOfComingAcrossProcesses(t *testing.T) {
	t.Parallel()
	f := procFleet{faultKind: procKind("fair"), t: t, s: redistest.Start(t)}
	all := f.spawn(5, procPatient, procPatientTTL)
	held, _ := f.take(all[0], "holder")
	var want []string
	for i := range 15 {
		tag := fmt.Sprint("turn", i)
		want = append(want, tag)
		all[(i*3+1)%5].Send("turn " + tag)
		redistest.Await(t, "it is in the queue", func() bool {
			return f.s.Admin().ZCard(context.Background(), faultKey(f.name)+":queue").Val() == int64(i+1)
		})
	}
	procWants(t, all[0], "release", held[0], "released", "nil")
	redistest.Await(t, "all have had their turn", func() bool {
		return f.s.Admin().LLen(context.Background(), "order").Val() == int64(len(want))
	})
	if got := f.s.Admin().LRange(t.Context(), "order", 0, -1).Val(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("granted to %v, want %v", got, want)
	}
	f.free(t, f.s, f.name)
}

//fault:killed-holder
func TestAKilledHolderIsReplaced(t *testing.T) {
	procEach(t, func(t *testing.T, f procFleet) {
		holder, next := f.spawn(1, procHasty, procHastyTTL)[0], f.spawn(1, procPatient, procPatientTTL)[0]
		_, before := f.take(holder, "holder")
		next.Send("acquire next")
		next.Expect("next: asks")
		holder.Kill()
		if n := f.holders(t, f.s.Admin(), f.name); n != f.size {
			t.Errorf("%d hold it, want %d until their leases end", n, f.size)
		}
		if fence := procFence(t, next, "next"); fence <= before {
			t.Errorf("fence %d after %d", fence, before)
		}
		procWants(t, next, "release", "next", "released", "nil")
	})
}

//fault:killed-waiters
func TestKilledWaitersArePassedOver(t *testing.T) {
	procEach(t, func(t *testing.T, f procFleet) {
		dying := f.spawn(2, procHasty, procHastyTTL)
		all := f.spawn(2, procPatient, procPatientTTL)
		held, _ := f.take(all[0], "holder")
		for i := range 10 {
			tag := fmt.Sprint("dies", i)
			dying[i%2].Send("acquire " + tag)
			dying[i%2].Expect(tag + ": asks")
		}
		if f.name == "fair" {
			redistest.Await(t, "they are in the queue", func() bool {
				return f.s.Admin().ZCard(context.Background(), faultKey(f.name)+":queue").Val() == 10
			})
		}
		all[1].Send("acquire next")
		all[1].Expect("next: asks")
		for _, p := range dying {
			p.Kill()
		}
		for _, tag := range held {
			procWants(t, all[0], "release", tag, "released", "nil")
		}
		procFence(t, all[1], "next")
		procWants(t, all[1], "release", "next", "released", "nil")
	})
}

//fault:frozen-holder
func TestAFrozenHolderIsReplacedAndToldAndHarmsNobody(t *testing.T) {
	procEach(t, func(t *testing.T, f procFleet) {
		holder, next := f.spawn(1, procHasty, procHastyTTL)[0], f.spawn(1, procPatient, procPatientTTL)[0]
		held, before := f.take(holder, "holder")
		for _, tag := range held {
			procWants(t, holder, "write", tag, "wrote", "1")
		}
		holder.Freeze()
		frozen := time.Now()
		tags, fence := f.take(next, "next")
		if fence <= before {
			t.Errorf("fence %d after %d", fence, before)
		}
		procWants(t, next, "write", tags[0], "wrote", "1")
		state := f.holding(t, f.s.Admin(), f.name)
		redistest.Await(t, "two TTLs are over", func() bool { return time.Since(frozen) > 2*procHastyTTL })
		for _, tag := range held { // whatever it does when it wakes, it may do that first
			holder.Send("write " + tag)
		}
		holder.Thaw()
		for tag, got := range procSays(holder, 2*f.size) {
			if !strings.Contains(got, "told") || !strings.Contains(got, "wrote 0") {
				t.Errorf("%s: %s, want it told of the loss and its write refused", tag, got)
			}
		}
		for _, tag := range held {
			procWants(t, holder, "release", tag, "released", "lost")
		}
		if now := f.holding(t, f.s.Admin(), f.name); now != state || state == "" {
			t.Errorf("the lock had %s, and has %s", state, now)
		}
		for _, tag := range tags {
			procWants(t, next, "release", tag, "released", "nil")
		}
	})
}

//fault:frozen-holder
func TestDoInAFrozenProcessIsToldAndReturnsErrLost(t *testing.T) {
	procEach(t, func(t *testing.T, f procFleet) {
		holder, next := f.spawn(1, procHasty, procHastyTTL)[0], f.spawn(1, procPatient, procPatientTTL)[0]
		for i := range f.size {
			holder.Send(fmt.Sprint("do work", i))
			holder.Expect(fmt.Sprintf("work%d: doing", i))
		}
		holder.Freeze()
		tags, _ := f.take(next, "next")
		holder.Thaw()
		said := procSays(holder, 2*f.size)
		for i := range f.size {
			if got := said[fmt.Sprint("work", i)]; got != "told lost, done lost, " {
				t.Errorf("work %d: %s, want it told of the loss, and Do to return ErrLost", i, got)
			}
		}
		// A work that nobody disturbs is not told of anything.
		for _, tag := range tags {
			procWants(t, next, "release", tag, "released", "nil")
		}
		next.Send("do more")
		next.Expect("more: doing")
		procWants(t, next, "finish", "more", "done", "nil")
	})
}

// procSlots returns the slots of all keys of a cluster, and the node that has the last of them.
func procSlots(t testing.TB, cluster *redistest.Cluster) (slots map[int64][]string, node int) {
	t.Helper()
	slots = make(map[int64][]string)
	for i, n := range cluster.Nodes {
		keys, err := n.Admin().Keys(context.Background(), "*").Result()
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range keys {
			slot := n.Admin().ClusterKeySlot(context.Background(), key).Val()
			slots[slot] = append(slots[slot], key)
			node = i
		}
	}
	return slots, node
}

//fault:dead-node
func TestInAClusterALockIsInOneSlotAndHeldByOneProcess(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	clients := []redis.UniversalClient{cluster.Client(t), cluster.Client(t), cluster.Client(t)}
	contend := func(k faultKind, name string) {
		t.Helper()
		var running, most atomic.Int64
		var wg sync.WaitGroup
		for _, rdb := range clients {
			l := k.locker(t, rdb, name, faultPatient, faultLong)
			for range 4 {
				wg.Go(func() {
					for range 4 {
						lease, err := l.Acquire(context.Background())
						if err != nil {
							t.Errorf("%s %q: Acquire = %v", k.name, name, err)
							return
						}
						n := running.Add(1)
						for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
						}
						running.Add(-1)
						faultRelease(t, lease)
					}
				})
			}
		}
		wg.Wait()
		if n := most.Load(); n > int64(k.size) {
			t.Errorf("%s %q: %d held it at once", k.name, name, n)
		}
	}
	for _, name := range []string{"plain", "a{b}c", "{x}y", "a{}b", "}{x}", "%7D", "{", "a}b{c"} {
		for _, k := range faultKinds {
			if strings.HasPrefix(name, "}") {
				contend(k, name)
			}
			leases := k.fill(t, k.locker(t, clients[0], name, faultPatient, faultLong))
			got := k.wait(t, k.locker(t, clients[1], name, faultPatient, faultLong))
			if slots, _ := procSlots(t, cluster); len(slots) != 1 {
				t.Errorf("%s %q: its keys are in %d slots: %v", k.name, name, len(slots), slots)
			}
			for _, l := range leases {
				faultRelease(t, l)
			}
			faultRelease(t, got())
			for _, n := range cluster.Nodes {
				faultDo(t, n)("flushall")
			}
		}
	}

	for _, n := range cluster.Nodes {
		faultDo(t, n)("config", "set", "cluster-require-full-coverage", "no")
	}
	var all []faultHeld
	for _, k := range faultKinds {
		h := faultHeld{faultKind: k, holder: k.locker(t, clients[0], "{name}"+k.name, time.Second, 9*time.Second)}
		h.leases = k.fill(t, h.holder)
		all = append(all, h)
	}
	_, node := procSlots(t, cluster)
	cluster.Nodes[(node+1)%len(cluster.Nodes)].Kill()
	for _, h := range all {
		h.renewed(t)
		h.release(t)
		contend(h.faultKind, "{name}"+h.name)
	}
}
