// Package near keeps values in the memory of a process, and finds out from a log in Redis which of
// them have been invalidated.
//
// The bound. An invalidation that has returned is in the log. A value is served from memory only if
// the last answered read of the log was sent less than MaxLag ago. So MaxLag after an invalidation
// has returned, no process serves the old value: it has read the record, or it does not serve from
// memory. Whatever happens to the log, to the server or to the process, this needs no message and
// no timer to arrive.
//
// These rules keep it:
//
//  1. A record is appended after the invalidation has been executed. In the other order a process
//     could read the record, and then the old value.
//  2. The log is read from the last known record on, inclusively. If that record is missing, the log
//     has lost records, and everything in memory is dropped.
//  3. Each value has the generation that its stripe had before the command was sent that read it.
//     An invalidation changes the generation. So a value that was in transit is never served.
//  4. The age of a proof counts from when its command was sent, by the monotonic clock. The
//     generations change before the proof is noted.
//  5. The process that invalidates changes its generations before the call returns.
//  6. A value is kept for no longer than Redis told that it keeps it, counted from when the generation
//     was taken.
//
// docs/near.md has a model of the protocol.
package near

import (
	"context"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/maypok86/otter/v2"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/local"
	"github.com/singlefill/singlefill/internal/wake"
)

// A Tier holds values in memory. A value that cannot be served any more is freed within sweepEvery.
//
// It is not generic: the code of otter would be in a program, and compiled, once for each type of
// values.
type Tier struct {
	Log
	values  *otter.Cache[string, *Copy]
	most    local.Limits
	stripes atomic.Pointer[[]atomic.Uint64] // generations of keys, by hash; nil until the first is asked for
	maxLag  time.Duration
	begun   time.Time

	changes   atomic.Uint64 // of generations, together
	proof     atomic.Int64  // when the last answered read of the log was sent, in ns since begun
	used      atomic.Bool   // a value was asked for a moment ago
	following atomic.Bool   // a goroutine reads the log

	putting atomic.Int64 // calls of Put that run

	sweeping atomic.Bool // values will be freed
	sweeper  atomic.Pointer[time.Timer]

	at position // in the log; only the goroutine that reads it uses it

	// Dropped is called when the Tier has dropped everything because the log had lost records before its end. It is
	// set before the first value is put.
	Dropped func()
}

// A Generation is the generation of a key's stripe at some time.
type Generation struct {
	stripe uint32
	number uint64

	// Taken is when it was taken, by the clock of the Tier.
	Taken time.Duration
}

// never is the proof before the first read.
const never = math.MinInt64

// New returns an empty Tier. key is the key of the log. background runs a function
// until closing is closed.
func New(c *client.Client, key string, most local.Limits, maxLag time.Duration,
	background func(run func(closing <-chan struct{}))) *Tier {
	t := new(Tier)
	*t = Tier{
		Log:    Log{client: c, key: key, life: max(minLife, 4*maxLag), background: background},
		values: otter.Must(limited(&otter.Options[string, *Copy]{Executor: t.maintain}, most)),
		most:   most, maxLag: maxLag, begun: time.Now(),
	}
	t.proof.Store(never)
	return t
}

// limited limits what otter keeps. It counts either values or bytes: with both limits a value counts for so many bytes
// that there is no room for more values than allowed.
func limited(o *otter.Options[string, *Copy], most local.Limits) *otter.Options[string, *Copy] {
	if most.Bytes == 0 {
		o.MaximumSize = most.Keys
		return o
	}
	least := most.Bytes / int64(most.Keys)
	o.MaximumWeight = uint64(most.Bytes)
	o.Weigher = func(key string, c *Copy) uint32 {
		return uint32(min(max(least, int64(len(key))+int64(c.Bytes)+local.Overhead), math.MaxUint32))
	}
	return o
}

// Alone makes a new Tier the only one of its values: it knows all invalidations, which are its own. So each
// value is proven, and there is no log.
func (t *Tier) Alone() {
	t.alone = true
	t.proof.Store(math.MaxInt64)
	t.following.Store(true)
}

// Get returns the copy of key, or nil if there is none that may be current. It is proven if no
// invalidation that returned longer than MaxLag before now is unknown here.
func (t *Tier) Get(key string) (c *Copy, now time.Duration, proven bool) {
	now = time.Since(t.begun)
	if !t.used.Load() {
		t.used.Store(true)
	}
	proof := t.proof.Load() // before the generation, which is changed before it
	proven = proof != never && now-time.Duration(proof) < t.maxLag
	if !t.following.Load() {
		t.follow()
	}
	c, ok := t.values.GetIfPresent(key)
	if !ok || !t.current(c) {
		return nil, now, proven
	}
	return c, now, proven
}

// Generation must be called before the command is sent that reads or writes the value.
func (t *Tier) Generation(valueKey string) Generation {
	if t.stripes.Load() == nil {
		n := 1024
		for n < t.most.Keys && n < 1<<20 {
			n *= 2
		}
		stripes := make([]atomic.Uint64, n)
		t.stripes.CompareAndSwap(nil, &stripes)
	}
	s := t.stripeOf(Hash(valueKey))
	return Generation{s, t.stripe(s).Load(), time.Since(t.begun)}
}

// Put keeps a copy, unless the key has been invalidated since g.
func (t *Tier) Put(key string, g Generation, c *Copy) {
	c.stripe, c.number = g.stripe, g.number
	c.checked.Store(t.changes.Load() - 1)
	if t.current(c) {
		t.putting.Add(1)
		defer t.putting.Add(-1)
		t.values.Set(key, c)
		t.sweep()
	}
}

// sweepEvery is how often values that cannot be served any more are freed.
const sweepEvery = time.Minute

// sweep frees such values until there is none left of any kind. No goroutine waits: it would keep a bubble of
// testing/synctest from ending. Otter could do that by an expiry of its own, but then each hit would read another
// clock.
func (t *Tier) sweep() {
	if t.sweeping.Load() || !t.sweeping.CompareAndSwap(false, true) {
		return
	}
	t.sweeper.Store(time.AfterFunc(sweepEvery, func() {
		t.background(func(closing <-chan struct{}) {
			t.free(closing)
			t.sweeping.Store(false)
			if t.values.EstimatedSize() > 0 {
				t.sweep()
			}
		})
	}))
}

// free looks at each value. A million take about a second, for which Close does not wait.
func (t *Tier) free(closing <-chan struct{}) {
	now := time.Since(t.begun)
	dead := func(c *Copy) bool { return !t.current(c) || c.End <= now }
	for key, c := range t.values.All() {
		select {
		case <-closing:
			return
		default:
		}
		if !dead(c) {
			continue
		}
		t.values.ComputeIfPresent(key, func(c *Copy) (*Copy, otter.ComputeOp) {
			if dead(c) { // it may have been replaced
				return nil, otter.InvalidateOp
			}
			return c, otter.CancelOp
		})
	}
}

// Close ends a Tier. Nothing may run in the background any more. It frees the values if it is their only Tier: others
// go with the Cache, and many take their time.
func (t *Tier) Close() {
	if timer := t.sweeper.Load(); timer != nil {
		timer.Stop()
	}
	if t.alone {
		t.putting.Add(1) // so that no goroutine is started
		defer t.putting.Add(-1)
		t.values.InvalidateAll()
	}
}

// maintain runs the bookkeeping of otter. What a Put causes takes less time than to start a goroutine
// for it. What hits cause is the bookkeeping of many of them: no hit has to wait for that.
func (t *Tier) maintain(run func()) {
	if t.putting.Load() > 0 {
		run()
	} else {
		go run()
	}
}

// Forget makes what has been kept of a key useless.
func (t *Tier) Forget(valueKey string) { t.forget(Hash(valueKey)) }

// forget has nothing to do before the first generation is asked for: what is read then is read later.
func (t *Tier) forget(hash uint64) {
	if t.stripes.Load() != nil {
		t.stripe(t.stripeOf(hash)).Add(1)
		t.changes.Add(1)
	}
}

// ForgetAll is Forget for all keys.
func (t *Tier) ForgetAll() {
	if stripes := t.stripes.Load(); stripes != nil {
		for i := range *stripes {
			(*stripes)[i].Add(1)
		}
		t.changes.Add(1)
	}
	t.values.InvalidateAll()
}

func (t *Tier) stripeOf(hash uint64) uint32 { return uint32(hash & uint64(len(*t.stripes.Load())-1)) }

func (t *Tier) stripe(i uint32) *atomic.Uint64 { return &(*t.stripes.Load())[i] }

// Age returns the age of the proof, or -1 if there is none.
func (t *Tier) Age() time.Duration {
	if proof := t.proof.Load(); proof != never {
		return max(0, time.Since(t.begun)-time.Duration(proof))
	}
	return -1
}

// At converts a time to the clock of Get.
func (t *Tier) At(at time.Time) time.Duration { return at.Sub(t.begun) }

// follow reads the log until no value is asked for.
func (t *Tier) follow() {
	if !t.following.CompareAndSwap(false, true) {
		return
	}
	t.background(func(closing <-chan struct{}) {
		defer t.following.Store(false)
		wakeUps := make(chan struct{}, 1)
		var sub *wake.Subscription
		listen := func() {
			next := t.client.Listen(t.key, func(string, bool) {
				select {
				case wakeUps <- struct{}{}:
				default:
				}
			})
			if sub != nil {
				sub.Close()
			}
			sub = next // nil while the client does not know the node
		}
		defer func() {
			if sub != nil {
				sub.Close()
			}
		}()
		for lastUsed := time.Now(); ; {
			listen()
			due := time.Now().Add(t.maxLag*7/16 + rand.N(t.maxLag/16)) // processes that were woken together drift apart
			if err := t.catchUp(); client.Unreachable(err) {
				due = time.Now().Add(time.Until(due) / 4)
			}
			_, open := pause(min(rest, t.maxLag/4), nil, closing)
			for woken := false; open && !woken && time.Until(due) > 0; {
				listen()
				woken, open = pause(min(listenEvery, time.Until(due)), wakeUps, closing)
			}
			if !open {
				return
			}
			if t.used.Swap(false) {
				lastUsed = time.Now()
			} else if time.Since(lastUsed) >= t.maxLag/2 {
				return
			}
		}
	})
}

const (
	// rest is the least time between two reads of the log, unless a quarter of MaxLag is shorter,
	// whatever wakes the process: other programs may send messages, too. A wake-up that arrives in
	// the meantime is heard afterwards.
	rest = 20 * time.Millisecond

	// listenEvery is how often the process listens again. That costs nothing while it hears. But the
	// server may have refused it, and the log may have moved to another node.
	listenEvery = time.Second
)

// pause returns after d, or earlier if something arrives in wakeUps. It returns at once if closing is
// closed.
func pause(d time.Duration, wakeUps, closing <-chan struct{}) (woken, open bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return false, true
	case <-wakeUps:
		return true, true
	case <-closing:
		return false, false
	}
}

// catchUp reads the log to its end.
func (t *Tier) catchUp() error {
	if t.client.Away(t.key) {
		return t.client.Refusal(t.key)
	}
	for more := true; more; {
		news, last, err := t.read(context.Background(), t.at)
		if err != nil {
			return err
		}
		if news.lost {
			t.drop()
		}
		for _, hash := range news.hashes {
			t.forget(hash)
		}
		t.at = last
		if more = news.more; !more {
			t.proof.Store(int64(t.At(news.sent)))
		}
	}
	return nil
}

// drop empties the tier. It calls dropped, unless this process has not read the log for so long
// that the log may simply have expired.
func (t *Tier) drop() {
	t.ForgetAll()
	if t.at != (position{}) && t.Age() < t.life {
		t.Dropped()
	}
}
