package lock

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

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
	switch {
	case m.size != 0 && m.size != size:
		return fmt.Sprint("size ", m.size)
	case m.holds[who]:
		return "same"
	case len(m.holds) >= size:
		return busy
	}
	m.holds[who], m.size = true, size
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
var stageActs = map[bool][]string{
	true: {"? waits", "? waits", "? waits", "? waits", "? tries", "? renews", "? releases", "? releases", "? releases", "? abandons",
		"dead ?", "del lock", "del queue", "del alive"},
	false: {"? takes 3", "? takes 3", "? takes 3", "? takes 3", "? takes 2", "? renews", "? releases", "? abandons", "dead ?", "del lock"},
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
	for name, fair := range map[string]bool{"fair": true, "semaphore": false} {
		t.Run(name, func(t *testing.T) {
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
				seed := rand.Uint64()
				rnd := rand.New(rand.NewPCG(seed, 0))
				for range rounds {
					compareWithModel(t, rdb, fair, rnd, seed)
				}
			})
		})
	}
}

// compareWithModel runs a play of random acts.
func compareWithModel(t *testing.T, rdb redis.UniversalClient, fair bool, rnd *rand.Rand, seed uint64) {
	const players = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	s := newStage(t, rdb, fair)
	m := &stageModel{fair: fair, alive: map[string]bool{}, dead: map[string]bool{}, holds: map[string]bool{}, ended: map[string]string{}}
	var play strings.Builder
	fmt.Fprintf(&play, "seed %d\n", seed)
	for step := range 60 {
		// Players leave, and new ones join.
		who := string(players[min(step/4+rnd.IntN(4), len(players)-1)])
		act := strings.ReplaceAll(stageActs[fair][rnd.IntN(len(stageActs[fair]))], "?", who)
		want := m.act(act)
		got, err := s.act(t.Context(), act)
		fmt.Fprintf(&play, "%s -> %s\n", act, got)
		if got != want || err != nil {
			t.Fatalf("%s\nwant %s, %v", play.String(), want, err)
		}
		look, want := "queue", strings.Join(m.queue, " ")
		if !fair {
			look, want = "holders", strings.Join(slices.Sorted(maps.Keys(m.holds)), " ")
		}
		if got, err := s.act(t.Context(), look); got != want || err != nil {
			t.Fatalf("%s\n%s are %s, want %s, %v", play.String(), look, got, want, err)
		}
	}
}
