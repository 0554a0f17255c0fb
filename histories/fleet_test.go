package histories

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

const (
	// processes is the number of processes in each history.
	processes = 3

	// historyLimit is for how long no process may report anything of a history: then its calls are taken to wait for
	// ever. How long a history takes shows nothing: on a busy machine that may be minutes.
	historyLimit = 90 * time.Second

	// noScripts is a Redis user without the right to run scripts.
	noScripts = "noscripts"
)

// A fleet is several processes, the server that they share, and the source of truth.
type fleet struct {
	t        *testing.T
	server   *redistest.Server
	source   *redistest.Server
	control  *net.UnixListener // not TCP, which may lose the last report of a killed process
	timeouts timeouts
	user     string             // the Redis user of the last process; empty: the default user
	proxies  []*redistest.Proxy // of each process, if there are faults

	mu       sync.Mutex
	members  []*member // protected by mu
	trouble  string    // protected by mu: the first that was reported
	nearHits int64     // protected by mu: the most that a process has served from memory
}

// A member is one process of a fleet, until it dies.
type member struct {
	*redistest.Process
	place int // index in the fleet
	conn  net.Conn

	mu        sync.Mutex
	histories map[int]*history // protected by mu: those with work for the process
	dead      bool             // protected by mu
}

func newFleet(t *testing.T, faults bool, user string) *fleet {
	f := &fleet{t: t, server: redistest.Start(t), source: redistest.Start(t), timeouts: calm, user: user}
	if faults {
		f.timeouts = hasty
	}
	redistest.Do(t, f.server.Admin(), "ACL", "SETUSER", noScripts, "on", ">"+noScripts, "~*", "&*", "+@all", "-@scripting")
	dir, err := os.MkdirTemp("", "histories")
	redistest.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	f.control, err = net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "control")})
	redistest.Must(t, err)
	t.Cleanup(func() { _ = f.control.Close() })
	for i := range processes {
		if faults {
			f.proxies = append(f.proxies, redistest.NewProxy(t, f.server.Addr))
		}
		f.members = append(f.members, f.spawn(i))
	}
	return f
}

// spawn starts the process with this index. Processes differ in the retries of their clients.
func (f *fleet) spawn(place int) *member {
	s := setup{
		Control: f.control.Addr().String(), Redis: f.server.Addr, Source: f.source.Addr,
		Retries: []int{3, 1, -1}[place], Timeouts: f.timeouts,
	}
	if place == processes-1 {
		s.User = f.user
	}
	if f.proxies != nil {
		s.Redis = f.proxies[place].Addr
	}
	text, err := json.Marshal(s)
	redistest.Must(f.t, err)
	m := &member{place: place, histories: make(map[int]*history)}
	m.Process = redistest.Spawn(f.t, processRole, string(text))
	err = f.control.SetDeadline(time.Now().Add(historyLimit))
	if err == nil {
		m.conn, err = f.control.Accept()
	}
	redistest.Must(f.t, err)
	go f.listen(m)
	return m
}

// listen records the reports of a process until it ends.
func (f *fleet) listen(m *member) {
	reports := json.NewDecoder(bufio.NewReader(m.conn))
	for {
		var r report
		if err := reports.Decode(&r); err != nil {
			break
		}
		f.mu.Lock()
		f.nearHits = max(f.nearHits, r.NearHits)
		if r.Event == "trouble" {
			f.trouble = cmp.Or(f.trouble, r.Error)
		}
		f.mu.Unlock()
		m.mu.Lock()
		h := m.histories[r.History]
		if r.Event == "done" {
			delete(m.histories, r.History)
		}
		m.mu.Unlock()
		if h != nil {
			h.note(m.place, r)
		}
	}
	_ = m.conn.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dead = true
	for _, h := range m.histories {
		h.gone(m.place)
	}
}

// heard returns what processes have reported: the first trouble, and the most hits in memory.
func (f *fleet) heard() (trouble string, nearHits int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.trouble, f.nearHits
}

// run makes the processes run a history.
func (f *fleet) run(p plan) ([]op, error) {
	h := newHistory(p, processes)
	p.Start = now() + int64(2*time.Millisecond)
	for i := range processes {
		p.Process = i
		if !f.member(i).takePart(p, h) {
			h.gone(i)
		}
	}
	select {
	case <-h.over:
		return h.all(), nil
	case <-h.silence.C:
		return h.all(), fmt.Errorf("nothing has happened for %v: somebody waits for ever", historyLimit)
	}
}

func (m *member) takePart(p plan, h *history) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return false
	}
	m.histories[p.History] = h
	text, err := json.Marshal(p)
	if err == nil {
		_, err = m.conn.Write(text)
	}
	if err != nil {
		delete(m.histories, p.History)
	}
	return err == nil
}

// busy returns the number of histories that a process works on.
func (m *member) busy() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.histories)
}

func (f *fleet) member(place int) *member {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.members[place]
}

// replace kills a process and starts another one. It returns the number of histories that the
// killed process worked on.
func (f *fleet) replace(place int) (torn int) {
	m := f.member(place)
	torn = m.busy()
	m.Kill()
	next := f.spawn(place)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.members[place] = next
	return torn
}

// log returns the versions of the changes of a key, by process and ID, from the source.
func (f *fleet) log(key string) (map[[2]int]int64, error) {
	lines, err := f.source.Admin().LRange(context.Background(), key, 0, -1).Result()
	log := make(map[[2]int]int64)
	for i, line := range lines {
		var who [2]int
		if _, err := fmt.Sscan(line, &who[0], &who[1]); err != nil {
			return nil, err
		}
		log[who] = int64(i + 1)
	}
	return log, err
}
