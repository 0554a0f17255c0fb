package value

import (
	"math"
	"math/rand/v2"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
)

// A Freshness is how an entry may be served at one time.
type Freshness int

const (
	Expired    Freshness = iota
	IfError              // to be served if a load fails: StaleIfError
	Revalidate           // to be served, and refreshed behind: StaleWhileRevalidate
	Fresh
)

// A Policy says how long values live, and how they are served afterwards. Off is zero.
type Policy struct {
	TTL          time.Duration
	NotFoundTTL  time.Duration // 0: not remembered
	Jitter       float64
	EarlyRefresh float64
	SecondHalf   bool // an early refresh begins in the second half of a life

	StaleWhileRevalidate time.Duration
	StaleIfError         time.Duration

	Version uint32 // entries of a lower one are expired
}

// shorten subtracts the jitter from a life.
func (p *Policy) shorten(life time.Duration) time.Duration {
	if life < time.Millisecond {
		return 0
	}
	life -= time.Duration(rand.Float64() * p.Jitter * float64(life))
	return max(life, time.Millisecond).Truncate(time.Millisecond)
}

// window returns how long an expired entry may be served.
func (p *Policy) window() time.Duration { return max(p.StaleWhileRevalidate, p.StaleIfError) }

// KeptFor returns how long Redis keeps an entry that is fresh for life.
func (p *Policy) KeptFor(life time.Duration) time.Duration {
	if w := p.window(); life <= math.MaxInt64-w {
		return life + w
	}
	return math.MaxInt64
}

// freshnessOf returns how fresh an entry is at a time.
//
// The clocks of writer and reader decide whether an entry is fresh. With the clock of the server
// every hit would be two commands, or a script, which neither a replica nor client-side caching
// could answer. The TTL in Redis bounds every error. Expire sets a flag, since a time alone would
// leave the entry fresh in a process whose clock is behind. See TestClocks_Freshness and
// TestClocks_Expire.
func (p *Policy) freshnessOf(e *entry.Entry, now time.Time) Freshness {
	if e.Version < p.Version {
		return Expired
	}
	late := now.Sub(e.FreshUntil)
	if late < 0 && !e.Expired {
		return Fresh
	}
	switch late = max(late, 0); {
	case late < p.StaleWhileRevalidate:
		return Revalidate
	case late < p.StaleIfError:
		return IfError
	}
	return Expired
}

// EarlyBy draws how long before it expires an entry is refreshed: β·δ on average, where δ is the duration
// of its load. So a hit refreshes with the probability exp(-left/(β·δ)): processes choose a reader
// without talking to each other, and the longer a load takes, the sooner. The lock lets one of the
// chosen readers load.
//
// Each hit draws, so the probabilities add up: with n reads a second the first reader is chosen about
// β·δ·ln(n·β·δ) before the end. For slow loads of hot values that is the whole life, and they would load
// without pause. So by default no draw is longer than half of the life.
//
// An entry of a higher version is not refreshed early: a process that has that version would load it again. Once it is
// stale any process replaces it, also after a rollback.
//
// This is XFetch: Vattani, Chierichetti, Lowenstein, Optimal Probabilistic Cache Stampede
// Prevention, VLDB 2015.
func (p *Policy) EarlyBy(e *entry.Entry, draw func() float64) time.Duration {
	mean := p.EarlyRefresh * float64(e.LoadTime)
	if mean == 0 || e.Version > p.Version {
		return 0
	}
	by := time.Duration(min(draw()*mean, float64(forever)))
	if p.SecondHalf {
		by = min(by, e.FreshUntil.Sub(e.WrittenAt)/2)
	}
	return max(by, 0)
}

// forever is as long as a Duration can be without a sum of several exceeding it.
const forever time.Duration = math.MaxInt64 / 8

func bounded(d time.Duration) time.Duration { return max(-forever, min(d, forever)) }
