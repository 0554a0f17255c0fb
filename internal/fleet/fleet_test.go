package fleet

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

const (
	ttl     = time.Hour
	lockTTL = 5 * time.Second // the default
	hotKeys = 2
	within  = 10 * time.Millisecond // every process asks for every key within this time

	// Listeners close their connections within this time after a stampede.
	hangUp = 15 * time.Second
)

// A fleet is a number of processes that use one namespace on one server.
type fleet struct {
	t         *testing.T
	server    *server
	processes []*process
}

type process struct {
	link  *link
	cache *singlefill.Cache[string]

	mu    sync.Mutex
	polls map[string]int // protected by mu: polls of the last wait, by key
}

// inFleet runs a test with a fleet of n processes, in fake time. Without wakeUps the server
// refuses subscriptions.
func inFleet(t *testing.T, n int, c costs, wakeUps bool, run func(f *fleet)) {
	t.Helper()
	inNearFleet(t, n, c, wakeUps, nil, run)
}

// inNearFleet is inFleet of processes with Options.Near.
func inNearFleet(t *testing.T, n int, c costs, wakeUps bool, near *singlefill.Near, run func(f *fleet)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		f := &fleet{t: t, server: newServer(c, m, rdb)}
		f.server.refuse = !wakeUps
		t.Cleanup(func() { close(f.server.stopped) })
		for range n {
			p := &process{link: &link{server: f.server}, polls: make(map[string]int)}
			client := p.link.client()
			// Jitter and early refreshes, which prevent stampedes, are off.
			opts := &singlefill.Options[string]{Jitter: -1, EarlyRefresh: -1, LockTTL: lockTTL, Near: near}
			opts.Trace = &singlefill.Trace{WaitDone: p.waited}
			var err error
			if p.cache, err = singlefill.New(client, "fleet", ttl, opts); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.cache.Close(); _ = client.Close() })
			f.processes = append(f.processes, p)
		}
		run(f)
	})
}

func (p *process) waited(_ context.Context, w singlefill.WaitInfo) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.polls[w.Key] = w.Polls
}

// A stampede happens when a few hot keys expire and every process asks for them at once.
type stampede struct {
	keys   string               // prefix of their names
	length func() time.Duration // of a load
	dies   bool                 // the first process that loads a key dies in the middle of the load
}

// A result describes one or more stampedes.
type result struct {
	load
	lasted  time.Duration   // one window at least
	loads   []int           // of each key
	taken   []time.Duration // from each holder's death to the beginning of the next load
	late    []time.Duration // how long each waiter waited after the end of the load
	polls   []int           // of each waiting process, for each key
	windows []int           // commands in each window
}

// run makes every process ask for every key. The entries expire before the next run.
func (f *fleet) run(s stampede) (r result) {
	time.Sleep(2 * ttl)
	f.server.take()
	begun := time.Now()
	keys := make([]*hotKey, hotKeys)
	var wg sync.WaitGroup
	for i := range keys {
		k := &hotKey{stampede: s, name: fmt.Sprint(s.keys, i)}
		keys[i] = k
		for _, p := range f.processes {
			wg.Go(func() { k.ask(f.t, p) })
		}
	}
	wg.Wait()
	over := time.Now()
	time.Sleep(hangUp)
	r.load, r.lasted = f.server.take(), max(over.Sub(begun), window)
	for _, k := range keys {
		r.loads = append(r.loads, k.loads)
		if s.dies {
			r.taken = append(r.taken, k.begun.Sub(k.died))
		}
		for _, c := range k.calls {
			if c.waited && !c.process.link.dead.Load() {
				r.late = append(r.late, c.returned.Sub(k.ended))
				r.polls = append(r.polls, c.polls)
			}
		}
	}
	for _, p := range f.processes {
		p.link.dead.Store(false) // another process takes its place
	}
	first, last := begun.UnixNano()/int64(window), over.UnixNano()/int64(window)
	for w := first; w <= last; w++ {
		r.windows = append(r.windows, r.arrivals[w])
	}
	return r
}

// A hotKey is one key in a stampede.
type hotKey struct {
	stampede
	name string

	mu    sync.Mutex // protects all below
	loads int
	begun time.Time // of the last load
	died  time.Time // the previous holder, if it died
	ended time.Time
	calls []call
}

type call struct {
	process  *process
	returned time.Time
	waited   bool // for another process
	polls    int
}

func (k *hotKey) ask(t *testing.T, p *process) {
	time.Sleep(rand.N(within))
	c := call{process: p, waited: true}
	v, err := p.cache.GetOrLoad(context.Background(), k.name, func(ctx context.Context, _ string) (string, error) {
		c.waited = false
		return k.load(ctx, p)
	})
	if c.returned = time.Now(); !p.link.dead.Load() && (v == "" || err != nil) {
		t.Errorf("GetOrLoad = %q, %v", v, err)
	}
	p.mu.Lock()
	c.polls = p.polls[k.name]
	p.mu.Unlock()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls = append(k.calls, c)
}

func (k *hotKey) load(_ context.Context, p *process) (string, error) {
	if p.link.dead.Load() {
		return "", errors.New("a dead process loads nothing")
	}
	length := k.length()
	k.mu.Lock()
	k.loads++
	k.begun = time.Now()
	dies := k.dies && k.loads == 1
	k.mu.Unlock()
	time.Sleep(length / 2)
	if dies {
		p.link.dead.Store(true)
		k.mu.Lock()
		k.died = time.Now()
		k.mu.Unlock()
	}
	time.Sleep(length - length/2)
	if p.link.dead.Load() {
		return "", errors.New("dead")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ended = time.Now()
	return "v", nil
}

// add adds the result of another stampede.
func (r *result) add(more result) {
	r.commands += more.commands
	r.messages += more.messages
	r.queued = max(r.queued, more.queued)
	r.lasted += more.lasted
	r.loads = append(r.loads, more.loads...)
	r.taken = append(r.taken, more.taken...)
	r.late = append(r.late, more.late...)
	r.polls = append(r.polls, more.polls...)
	r.windows = append(r.windows, more.windows...)
}

// quantile returns the value that a share q of the values does not exceed.
func quantile[V int | time.Duration](values []V, q float64) V {
	if len(values) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(values))
	return s[min(len(s)-1, int(q*float64(len(s))))]
}
