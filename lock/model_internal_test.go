package lock

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A stageModel does in Go what the scripts should do.
type stageModel struct {
	fair  bool
	queue []string // players
	alive map[string]bool
	dead  map[string]bool // waiters or holders whose life is over
	holds map[string]bool
	size  int
	ended map[string]string
}

func (m *stageModel) reap() {
	for who := range m.dead {
		m.forget(who)
		delete(m.holds, who)
	}
	clear(m.dead)
}

func (m *stageModel) forget(who string) {
	m.queue = slices.DeleteFunc(m.queue, func(w string) bool { return w == who })
	delete(m.alive, who)
}

func (m *stageModel) fairAcquire(who string, wait bool) string {
	switch {
	case m.ended[who] != "":
		return "refused"
	case m.holds[who]:
		return "same"
	}
	if slices.Contains(m.queue, who) {
		m.alive[who] = true
		delete(m.dead, who)
	}
	m.reap()
	for len(m.queue) > 0 && !m.alive[m.queue[0]] {
		m.queue = m.queue[1:]
	}
	if len(m.holds) == 0 && (len(m.queue) == 0 || m.queue[0] == who) {
		m.forget(who)
		m.holds[who] = true
		return held
	}
	at := slices.Index(m.queue, who)
	if at < 0 {
		at = len(m.queue)
		if wait {
			m.queue = append(m.queue, who)
			m.alive[who] = true
		}
	}
	return fmt.Sprint("busy ", at)
}

func (m *stageModel) take(who string, size int) string {
	if m.ended[who] != "" {
		return "refused"
	}
	m.reap()
	if len(m.holds) == 0 {
		m.size = 0
	}
	largest := max(m.size, size)
	switch {
	case m.holds[who]:
		m.size = largest
		return "same"
	case len(m.holds) >= largest:
		return busy
	}
	m.holds[who], m.size = true, largest
	return held
}

func (m *stageModel) act(act string) string {
	f := strings.Fields(act)
	who, verb := f[0], f[1]
	switch {
	case who == "dead":
		if m.alive[verb] || m.holds[verb] && !m.fair {
			m.dead[verb] = true
		}
		return ""
	case act == "del lock":
		for who := range m.holds {
			delete(m.dead, who)
		}
		clear(m.holds)
		return ""
	case act == "del queue":
		m.queue = nil
		return ""
	case act == "del alive":
		clear(m.alive)
		clear(m.dead)
		return ""
	case verb == "takes":
		size, _ := strconv.Atoi(f[2])
		return m.take(who, size)
	case verb == "waits" || verb == "tries":
		return m.fairAcquire(who, verb == "waits")
	}
	has := m.holds[who] && !m.dead[who]
	switch verb {
	case "abandons":
		m.forget(who)
		delete(m.holds, who)
		delete(m.dead, who)
		m.ended[who] = "abandoned"
		return "yes"
	case "releases":
		if m.holds[who] {
			delete(m.holds, who)
			delete(m.dead, who)
			if has {
				m.ended[who] = "released"
			}
		}
		has = has || m.ended[who] != ""
	}
	return map[bool]string{true: "yes", false: "no"}[has]
}

// stageActs are the acts on a stage, by their frequency. ? is a player.
var stageActs = map[string][]string{
	"fair": {
		"? waits", "? waits", "? waits", "? waits", "? tries", "? renews", "? releases", "? releases", "? releases",
		"? abandons", "dead ?", "del lock", "del queue", "del alive",
	},
	"semaphore": {
		"? takes 3", "? takes 3", "? takes 3", "? takes 3", "? takes 2", "? renews", "? releases", "? abandons",
		"dead ?", "del lock",
	},
}

// The scripts do what the model does, in random orders, and both servers do the same.
//
//fault:any-order
func TestScripts_Model(t *testing.T) {
	t.Parallel()
	rounds := 8
	if testing.Short() {
		rounds = 3
	}
	for kind := range stageActs {
		t.Run(kind, func(t *testing.T) {
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
				seed := rand.Uint64()
				rnd := rand.New(rand.NewPCG(seed, 0))
				for range rounds {
					compareWithModel(newStage(t, rdb, kind), rnd, seed)
				}
			})
		})
	}
}

// compareWithModel runs a play of random acts.
func compareWithModel(s *stage, rnd *rand.Rand, seed uint64) {
	const players = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	m := &stageModel{
		fair: s.kind == "fair", alive: map[string]bool{}, dead: map[string]bool{}, holds: map[string]bool{},
		ended: map[string]string{},
	}
	acts := stageActs[s.kind]
	play := fmt.Sprintf("seed %d\n", seed)
	for step := range 60 {
		// Players leave, and new ones join.
		who := string(players[min(step/4+rnd.IntN(4), len(players)-1)])
		act := strings.ReplaceAll(acts[rnd.IntN(len(acts))], "?", who)
		want, got := m.act(act), s.act(act)
		play += fmt.Sprintf("%s -> %s\n", act, got)
		if got != want {
			s.t.Fatalf("%swant %s", play, want)
		}
		look, want := "queue", strings.Join(m.queue, " ")
		if !m.fair {
			look, want = "holders", strings.Join(slices.Sorted(maps.Keys(m.holds)), " ")
		}
		if got := s.act(look); got != want {
			s.t.Fatalf("%s%s are %s, want %s", play, look, got, want)
		}
	}
}

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
