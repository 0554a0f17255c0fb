package histories

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// The names of the faults.
const (
	faultRequest  = "request lost"
	faultReply    = "reply lost, connection closed"
	faultMute     = "reply lost, connection mute"
	faultClose    = "connection closed before a request"
	faultLateAsk  = "request held back"
	faultLateSay  = "reply held back"
	faultDelay    = "all replies late"
	faultCut      = "all connections of a process cut"
	faultAway     = "server out of reach for a while"
	faultKillConn = "CLIENT KILL"
	faultKillSubs = "CLIENT KILL of connections for wake-ups"
	faultFlush    = "SCRIPT FLUSH"
	faultFreeze   = "SIGSTOP"
	faultDeath    = "SIGKILL"
	faultLogLost  = "DEL of a near log"
	faultLogCut   = "XTRIM of a near log"
)

var (
	networkFaults = []string{
		faultRequest, faultReply, faultMute, faultClose, faultLateAsk, faultLateSay,
		faultDelay, faultCut, faultAway, faultKillConn, faultKillSubs, faultFlush,
	}
	logFaults     = []string{faultLogLost, faultLogCut}
	processFaults = []string{faultFreeze, faultFreeze, faultDeath}

	actions = map[string]redistest.Action{
		faultRequest: redistest.DropRequest, faultReply: redistest.DropReply, faultMute: redistest.MuteReply,
		faultClose: redistest.CloseBefore, faultLateAsk: redistest.HoldRequest, faultLateSay: redistest.HoldReply,
	}
)

// An injector injects faults into a fleet, and counts those that happen.
type injector struct {
	*fleet
	stop    chan struct{}
	running sync.WaitGroup

	mu   sync.Mutex
	hits map[string]int // protected by mu
}

// injectFaults injects faults until it is stopped: each list at the same time, in random order.
func (f *fleet) injectFaults(seed uint64, lists [][]string) *injector {
	g := &injector{fleet: f, stop: make(chan struct{}), hits: make(map[string]int)}
	for i, faults := range lists {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		g.running.Go(func() {
			for {
				for _, i := range rng.Perm(len(faults)) {
					if !g.rest(upTo(rng, 40*time.Millisecond)) {
						return
					}
					g.make(faults[i], rng)
				}
			}
		})
	}
	return g
}

// faultsOf returns the faults of the network, of processes and, with caches, of their logs.
func faultsOf(caches bool) [][]string {
	faults := [][]string{networkFaults, processFaults}
	if caches {
		faults = append(faults, logFaults)
	}
	return faults
}

// stopped stops the faults and returns how often each of them happened.
func (g *injector) stopped() map[string]int {
	close(g.stop)
	g.running.Wait()
	return g.hits
}

// rest waits for d. It returns false if the injector is stopped.
func (g *injector) rest(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-g.stop:
		return false
	}
}

func (g *injector) hit(fault string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hits[fault]++
}

// make injects a fault, with details chosen by rng, and counts it if it is seen to happen.
func (g *injector) make(fault string, rng *rand.Rand) {
	place := rng.IntN(processes)
	proxy, lease := g.proxies[place], g.timeouts.TTL
	during := func(d time.Duration) { // counts if a command was sent
		before := proxy.Commands()
		g.rest(d)
		if proxy.Commands() > before {
			g.hit(fault)
		}
	}
	switch fault {
	case faultDelay:
		proxy.Delay(upTo(rng, 30*time.Millisecond))
		during(60 * time.Millisecond)
		proxy.Delay(0)
	case faultAway:
		proxy.BlackHole(true)
		during(upTo(rng, lease))
		proxy.BlackHole(false)
	case faultCut:
		again := proxy.On(redistest.Command("hello"), redistest.Pass).Times(1)
		proxy.Cut()
		g.await(fault, again)
	case faultKillConn, faultKillSubs:
		kind := "normal"
		if fault == faultKillSubs {
			kind = "pubsub"
		}
		killed, err := g.server.Admin().ClientKillByFilter(context.Background(), "TYPE", kind, "SKIPME", "yes").Result()
		if err == nil && killed > 0 {
			g.hit(fault)
		}
	case faultFlush:
		again := proxy.On(redistest.Command("eval"), redistest.Pass).Times(1)
		if g.server.Admin().ScriptFlush(context.Background()).Err() == nil {
			g.await(fault, again)
		}
	case faultLogLost, faultLogCut:
		key := pick(rng, nearProfiles...) + ":log"
		lost := int64(0)
		if fault == faultLogLost {
			lost = g.server.Admin().Del(context.Background(), key).Val()
		} else { // all but the newest records
			lost = g.server.Admin().XTrimMaxLen(context.Background(), key, rng.Int64N(3)).Val()
		}
		if lost > 0 {
			g.hit(fault)
		}
		g.rest(upTo(rng, 4*g.timeouts.MaxLag))
	case faultFreeze:
		m := g.member(place)
		m.Freeze()
		if m.busy() > 0 {
			g.hit(fault)
		}
		g.rest(lease/8 + upTo(rng, 2*lease))
		m.Thaw()
	case faultDeath:
		if g.replace(place) > 0 {
			g.hit(fault)
		}
	default:
		rule := proxy.On(data, actions[fault]).Times(1)
		g.await(fault, rule)
		held := upTo(rng, lease)
		g.running.Go(func() {
			g.rest(held)
			rule.Release()
		})
	}
}

// await waits a while for a rule to fire.
func (g *injector) await(fault string, rule *redistest.Rule) {
	select {
	case <-rule.Hit():
		g.hit(fault)
	case <-time.After(300 * time.Millisecond):
		rule.Times(0)
	case <-g.stop:
	}
}

// data matches the commands that caches and locks send.
func data(cmd []string) bool {
	switch strings.ToLower(cmd[0]) {
	case "get", "del", "eval", "evalsha", "multi", "set", "exec", "xadd", "xrange":
		return true
	}
	return false
}
