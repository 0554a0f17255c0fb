package histories

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

var (
	calmFlag   = flag.Int("histories", 70, "how many histories without faults, of the cache and of the locks each")
	faultyFlag = flag.Int("faulty", 20, "how many histories under faults, of the cache and of the locks each")
	seedFlag   = flag.Uint64("seed", 0, "seed of the plans and of the faults; 0: a new one")
)

const (
	// checkLimit bounds the search for an order of one history. If it is exceeded, the test fails.
	checkLimit = time.Minute

	calmBatch   = 1000 // histories per fleet
	faultyBatch = 250
	allFaults   = 400 // with as many histories every fault has to come about; with few there may be no time for each
	atOnce      = 12  // histories at once
	faultyOnce  = 20
)

func TestMain(m *testing.M) { redistest.Main(m) }

// calm has timeouts so long that no stall of the machine exceeds them.
var calm = timeouts{
	RedisTimeout: 20 * time.Second, LockTTL: 2 * time.Minute, LoadTimeout: 5 * time.Minute,
	MaxLag: 30 * time.Millisecond, // kept however stalled the machine is
	TTL:    5 * time.Minute,
}

// hasty has timeouts so short that faults have effects.
var hasty = timeouts{
	RedisTimeout: 100 * time.Millisecond, LockTTL: 350 * time.Millisecond, LoadTimeout: 10 * time.Second,
	MaxLag: 120 * time.Millisecond,
	TTL:    350 * time.Millisecond,
}

// Histories of the cache agree with the models.
func TestHistories_Cache(t *testing.T) {
	s := &suite{t: t, plan: cachePlan, judge: judgeCache, caches: true}
	s.run(*calmFlag, calmBatch, atOnce)
}

// Histories of the cache under faults agree with the models.
func TestHistories_CacheFaults(t *testing.T) {
	s := &suite{t: t, plan: cachePlan, judge: judgeCache, caches: true, faults: true}
	s.run(*faultyFlag, faultyBatch, faultyOnce)
}

// Histories of the locks agree with the models.
func TestHistories_Lock(t *testing.T) {
	s := &suite{t: t, plan: lockPlan, judge: judgeLock}
	s.run(*calmFlag, calmBatch, atOnce)
}

// Histories of the locks under faults agree with the models.
func TestHistories_LockFaults(t *testing.T) {
	s := &suite{t: t, plan: lockPlan, judge: judgeLock, faults: true}
	s.run(*faultyFlag, faultyBatch, faultyOnce)
}

func cachePlan(rng *rand.Rand, faults bool) plan {
	p := plan{
		Of:       pick(rng, "plain", "plain", "short", "narrow", "stale", "near", "near stale"),
		Threads:  1 + rng.IntN(2),
		Ops:      longer(faults, 5+rng.IntN(8)),
		Sole:     rng.IntN(3) == 0,
		Keys:     pick(rng, 1, 1, 2, 3),
		LoadTime: loadTime(rng),
		Pause:    pause(faults, rng.IntN(4)),
	}
	if p.Keys > 1 { // each key has a part of them
		p.Ops = p.Ops * 3 / 2
	}
	if profiles[p.Of].near { // longer than MaxLag
		p.Ops *= 2
		p.Pause = max(p.Pause, 8*time.Millisecond)
	}
	return p
}

// loadTime returns the longest time of a load. Waiters listen for wake-ups of the longer ones.
func loadTime(rng *rand.Rand) time.Duration {
	if rng.IntN(3) == 0 {
		return 100 * time.Millisecond
	}
	return time.Duration(1+rng.IntN(4)) * time.Millisecond
}

func lockPlan(rng *rand.Rand, faults bool) plan {
	return plan{
		Of:        pick(rng, "mutex", "fair", "semaphore 2", "semaphore 3"),
		Threads:   1 + rng.IntN(2),
		Ops:       longer(faults, 4+rng.IntN(6)),
		Pause:     pause(faults, 1+rng.IntN(4)),
		LongHolds: faults,
	}
}

// longer and pause stretch a history so that faults happen during it.
func longer(faults bool, ops int) int {
	if faults {
		return 2 * ops
	}
	return ops
}

func pause(faults bool, ms int) time.Duration {
	if faults {
		ms *= 8
	}
	return time.Duration(ms) * time.Millisecond
}

func pick[V any](rng *rand.Rand, of ...V) V { return of[rng.IntN(len(of))] }

func judgeCache(f *fleet, p plan, ops []op, faults bool) (claims []claim, err error) {
	for key := range p.Keys {
		log, err := f.log(p.at(key).Name)
		if err != nil {
			return nil, err
		}
		of := ofKey(ops, key)
		some, err := claimsOf(f, p, of, log, faults)
		if err == nil && !faults {
			err = loadsAlone(of)
		}
		if err != nil {
			return nil, fmt.Errorf("key %d: %w", key, err)
		}
		claims = append(claims, some...)
	}
	return claims, nil
}

// claimsOf checks what must be true of the ops of one key. It returns what only a search can check.
func claimsOf(f *fleet, p plan, ops []op, log map[[2]int]int64, faults bool) (claims []claim, err error) {
	windows := profiles[p.Of].windows()
	if profiles[p.Of].near {
		for process := range processes {
			if err := checkFloors(asNear(ops, process, f.timeouts.MaxLag, windows, faults, log)); err != nil {
				return nil, fmt.Errorf("floors after MaxLag of process %d: %w", process, err)
			}
		}
		return nil, nil
	}
	if err := checkFloors(asFloors(ops, windows, log)); err != nil {
		return nil, fmt.Errorf("floors: %w", err)
	}
	if !faults && !windows {
		claims = append(claims, claim{"register", register, asRegister(ops)})
	}
	return claims, nil
}

func judgeLock(f *fleet, p plan, ops []op, _ bool) ([]claim, error) {
	return []claim{{p.Of, lockModel(kinds[p.Of]), asSteps(ops, f.timeouts.TTL)}}, nil
}
