// Package lock_test shows promises between processes of the operating system. The holders count in
// Redis what must not happen at the same time.
package lock_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
)

func TestMain(m *testing.M) { redistest.Ring(m) }

const (
	// A process that has to be replaced has the times of hasty. It is the only kind that a stalled
	// machine could keep from renewing in time. The other processes are patient.
	hasty, hastyTTL     = 700 * time.Millisecond, 2500 * time.Millisecond
	patient, patientTTL = 9 * time.Second, 30 * time.Second
)

// A fleet is processes that share one lock.
type fleet struct {
	locktest.Kind
	t *testing.T
	s *redistest.Server
}

func newFleet(t *testing.T, k locktest.Kind) fleet { return fleet{k, t, redistest.Start(t)} }

// eachFleet runs a test with a fleet for each kind of lock. At its end, when all leases have been
// released, only fences and marks are left, each with a TTL.
func eachFleet(t *testing.T, run func(t *testing.T, f fleet)) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		f := newFleet(t, k)
		run(t, f)
		t.Run("nothing is left", func(t *testing.T) { f.WantFree(t, f.s, f.Name) })
	})
}

// spawn starts n processes.
func (f fleet) spawn(n int, redisTimeout, ttl time.Duration) (all []*redistest.Process) {
	f.t.Helper()
	for range n {
		all = append(all, redistest.Spawn(f.t, userRole, f.s.Addr, f.Name, ttl.String(), redisTimeout.String()))
	}
	for _, p := range all {
		p.Expect("ready")
	}
	return all
}

// take has a process take all places, and returns the tags of its leases, and the last fence.
func (f fleet) take(p *redistest.Process, as string) (tags []string, fence int64) {
	f.t.Helper()
	for i := range f.Size {
		tag := fmt.Sprint(as, i)
		tags = append(tags, tag)
		p.Send("acquire " + tag)
		fence = max(fence, acquired(f.t, p, tag))
	}
	return tags, fence
}

// awaitQueue waits until the queue of a fair mutex has n waiters.
func (f fleet) awaitQueue(n int64) {
	f.t.Helper()
	redistest.Await(f.t, fmt.Sprint(n, " wait"), func() bool {
		return f.s.Admin().ZCard(context.Background(), locktest.Key(f.Name)+":queue").Val() == n
	})
}

// acquired waits until a process says that it has the lease, and returns the fence.
func acquired(t testing.TB, p *redistest.Process, tag string) (fence int64) {
	t.Helper()
	if _, err := fmt.Sscan(p.Expect(tag+": acquired "), &fence); err != nil {
		t.Fatal(err)
	}
	return fence
}

// order has a process do something, and checks the result.
func order(t testing.TB, p *redistest.Process, verb, tag, says, want string) {
	t.Helper()
	p.Send(verb + " " + tag)
	if got := p.Expect(tag + ": " + says + " "); got != want {
		t.Errorf("%s %s: %s %s, want %s", verb, tag, says, got, want)
	}
}

// sayings returns the next n lines of a process, by their tags.
func sayings(p *redistest.Process, n int) map[string]string {
	said := make(map[string]string)
	for range n {
		tag, what, _ := strings.Cut(p.Line(), ": ")
		said[tag] += what + ", "
	}
	return said
}
