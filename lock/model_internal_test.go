package lock

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/singlefill/singlefill/internal/redistest"
)

// Steps in any order, however late, never affect the lease of another owner: a check and what
// follows from it are one step.
//
//fault:any-order
//fault:late-command
func TestScripts_RandomSteps(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"mutex", "fair", "semaphore"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				m, rdb := redistest.StartMini(t)
				takeRandomSteps(newStage(t, rdb, kind), m)
			})
		})
	}
}

func takeRandomSteps(s *stage, server *miniredis.Miniredis) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	m := &leaseModel{ended: make(map[string]time.Time)}
	seen := make(map[string]int)
	for i := range 1500 {
		who := string(rune('A' + rnd.IntN(3)))
		verb := []string{"takes", "takes", "renews", "releases", "abandons"}[rnd.IntN(5)]
		if rnd.IntN(4) == 0 {
			time.Sleep(rand.N(stageLife).Truncate(time.Millisecond))
		}
		// To the end of the lease, or 1 ms before.
		if left := time.Until(m.end); left > 0 && rnd.IntN(40) == 0 {
			time.Sleep(left - time.Duration(rnd.IntN(2))*time.Millisecond)
		}
		want, got := m.act(who, verb), s.play(who, verb, 0)
		seen[want]++
		left := server.TTL(s.keys.lock)
		if s.kind == "semaphore" {
			end, _ := server.ZScore(s.keys.lock, stageToken(m.holder))
			left = max(0, time.Until(time.UnixMilli(int64(end))))
		}
		wantLeft := max(0, time.Until(m.end))
		if got != want || left != wantLeft || m.fence != s.top || got == busy && s.again != wantLeft.Milliseconds() {
			s.t.Fatalf("seed %d, step %d, %s %s: %s, want %s; the lease ends in %v, want %v; the fence is %d, want %d; "+
				"ask again in %d", seed, i, who, verb, got, want, left, wantLeft, s.top, m.fence, s.again)
		}
		for _, key := range server.Keys() {
			if server.TTL(key) <= 0 {
				s.t.Fatalf("seed %d, step %d, %s %s: %q has no TTL", seed, i, who, verb, key)
			}
		}
	}
	for _, want := range []string{held, busy, "refused"} {
		if seen[want] < 30 {
			s.t.Errorf("seed %d: %s only %d times", seed, want, seen[want])
		}
	}
}

// A leaseModel is what each kind of lock is, with one holder at a time.
type leaseModel struct {
	holder string
	end    time.Time
	fence  int64
	ended  map[string]time.Time // until when an attempt has a mark
}

func (m *leaseModel) act(who, verb string) string {
	now := time.Now()
	taken, marked := now.Before(m.end), now.Before(m.ended[who])
	ours := taken && m.holder == who
	switch {
	case verb == "takes" && marked:
		return "refused"
	case verb == "takes" && taken && !ours:
		return busy
	case verb == "takes" && !taken:
		m.holder, m.fence, m.end = who, max(m.fence+1, now.UnixMicro()), now.Add(stageLife)
		return held
	case ours && (verb == "takes" || verb == "renews"):
		m.end = now.Add(stageLife)
		return map[string]string{"takes": "same", "renews": "yes"}[verb]
	case verb == "renews":
		return "no"
	}
	if ours {
		m.end = now
	}
	if ours || verb == "abandons" {
		m.ended[who] = now.Add(stageLife + 2*stageTimeout)
		return "yes"
	}
	return map[bool]string{true: "yes", false: "no"}[marked]
}
