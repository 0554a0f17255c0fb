package fill

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
)

// maxRest is how long this process does not refresh an entry after a refresh that could not
// load: another process held the lock, RetryAfter was not over, no slot was free, or Redis did
// not answer.
const maxRest = time.Second

// A set is fills that are in the same phase, and go together. One goroutine runs it at a time.
type set struct {
	*Filler
	ctx   context.Context // never ends
	from  Source
	fills []*filling // that have not ended
	load  *flight.Load
	slot  *flight.Slot
	call  *running // of the Loader; nil before it
}

// A phase is what a set does, with what it needs for that.
type phase interface {
	// run takes a turn. It returns the next phase, or nil if the goroutine is done with the set: it has ended, or goes
	// on in another goroutine.
	run() phase
}

// A filling is the fill of one key in a set.
type filling struct {
	*flight.Fill[Result]
	lock  *filllock.Lock
	holds bool      // the lock, unless Redis has been told
	ear   *wait.Ear // nil: it has not waited
	polls int       // of the wait that has not been told

	old      *value.Lookup // what the key holds, as last seen; at first, the call that began the fill may read it, too
	oldSince flight.Stamp  // old is known to be true as of this stamp
	newSince flight.Stamp  // old was stored after this stamp; 0: it may have been there before the fill
}

// A Result is how a fill ended.
type Result struct {
	value.Found
	Failed     bool         // Err is the failure of a load
	NoStale    bool         // and no old value may be served in its place
	Unverified bool         // Redis did not tell whether the value was invalidated while it was loaded
	Old        *value.Found // fallback in place of Err; nil: there is none
	OldSince   flight.Stamp // the key is known to have held Old as of this stamp
	NewSince   flight.Stamp // the load that brought it ended after this stamp; 0: that is not known
	Resting    bool         // Err is the failure of an earlier load, and it is too early for another load
	StoreErr   error        // why the value has not been stored, or may not have been

	decode   sync.Once
	pristine any
}

// Pristine returns a value without an owner, for the callers that do not own Value to clone. A clone takes less than
// half of the time of decoding a map, a sixth for a slice of structs, and almost none for a flat struct. Pristine
// returns nil if the entry cannot be decoded.
func (r *Result) Pristine(t *value.Type, key string) any {
	r.decode.Do(func() {
		if r.Err == nil && r.Entry.Payload != nil {
			r.pristine, _ = t.DecodeEntry(key, &r.Entry)
		}
	})
	return r.pristine
}

// newSet returns a set of fills that begin. found returns what the call has found for each of them.
func (f *Filler) newSet(ctx context.Context, from Source, fills []*flight.Fill[Result], found func(k int) *value.Lookup) *set {
	x := &set{Filler: f, ctx: ctx, from: from, fills: make([]*filling, len(fills))}
	all := make([]filling, len(fills))
	for k, of := range fills {
		all[k].Fill, all[k].old = of, found(k)
		x.fills[k] = &all[k]
	}
	return x
}

// start runs a set from its first command to its end.
func (x *set) start(l *flight.Load, first phase) {
	x.load, x.slot = l, x.Slots.NewSlot(l)
	x.lockAnew(x.fills)
	x.run(first)
}

// lockAnew gives fills new attempts to lock.
func (x *set) lockAnew(fills []*filling) {
	pairs := make([]filllock.Pair, len(fills))
	for i, f := range fills {
		pairs[i] = filllock.PairOf(x.Store.Key(f.Key))
	}
	for i, l := range filllock.NewMany(x.Client, pairs, x.LockTTL) {
		fills[i].lock, fills[i].holds = l, false
	}
}

// run takes the turns of a set. If one has not returned, a function of the user has panicked or called runtime.Goexit.
// In a load that is the outcome of the Loader. In another phase it ends the fills: only a Loader and TTLFunc may do so.
func (x *set) run(p phase) {
	defer func() {
		if p == nil {
			return
		}
		l, loads := p.(loading)
		if o := x.User.Panicked(recover(), loads); loads {
			l.failed(o)
		} else {
			x.fail(o.Err)
		}
	}()
	for p != nil {
		p = p.run()
	}
}

// goOn runs a set in another goroutine.
func (x *set) goOn(p phase) { x.Fills.Run(x.load, func(*flight.Load) { x.run(p) }) }

// split makes another set of some of the fills, which has no slot.
func (x *set) split(some []*filling) *set {
	fills := make([]*flight.Fill[Result], len(some))
	moved := make(map[*filling]bool, len(some))
	for i, f := range some {
		fills[i], moved[f] = f.Fill, true
	}
	x.fills = slices.DeleteFunc(slices.Clone(x.fills), func(f *filling) bool { return moved[f] })
	y := &set{Filler: x.Filler, ctx: x.ctx, from: x.from, fills: some, call: x.call}
	if y.call != nil {
		y.call.sets.Add(1)
	}
	y.load = x.Fills.Split(x.load, fills)
	y.slot = x.Slots.NewSlot(y.load)
	return y
}

// end hands the result to the callers. The result is known to be true as of validFrom. No other refresh of the same
// entry is started for the time of rest.
func (x *set) end(f *filling, r *Result, validFrom flight.Stamp, rest time.Duration) {
	if r.Failed {
		r.OldSince = f.oldSince
		if x.Store.Servable(&f.old.Found, time.Now()) {
			old := f.old.Found
			r.Old = &old
		}
	}
	x.Fills.End(f.Fill, r, validFrom, rest)
}

// fail ends the fills with an error. It calls no function of the user, which might not return again.
func (x *set) fail(err error) {
	for _, f := range x.fills {
		if f.ear != nil {
			f.ear.Close()
		}
		f.lock.InDoubt = f.lock.InDoubt || x.call == nil
		x.end(f, &Result{Found: value.Found{Err: err}, Failed: true, NoStale: true}, flight.Always, 0)
	}
	x.over()
}

// over is the last turn of a set.
func (x *set) over() phase {
	for _, f := range x.fills {
		x.Fills.End(f.Fill, nil, 0, 0) // does nothing if the fill has ended
		x.release(f)
	}
	if x.call != nil {
		x.call.setEnded()
	}
	x.slot.Release()
	x.Fills.Over()
	return nil
}

// release gives up the lock of a fill that has ended, unless Redis has been told.
func (x *set) release(f *filling) {
	if f.lock.InDoubt || f.holds {
		x.giveUp(f)
	}
}

// giveUp abandons the attempt of a fill in the background.
func (x *set) giveUp(f *filling) {
	lock := *f.lock
	f.lock.InDoubt, f.holds = false, false
	x.Fills.Behind(func() { x.abandon(x.ctx, lock) })
}

// inParts returns what a command is sent for, in parts that a pipeline carries to one server.
func inParts[E interface{ valueLock() string }](x *set, all []E) [][]E {
	return client.InParts(x.Client, all, E.valueLock)
}

func (f *filling) valueLock() string { return f.lock.Keys.Lock }

// fillsOf returns the fills of questions or items.
func fillsOf[E interface{ itself() *filling }](all []E) []*filling {
	fills := make([]*filling, len(all))
	for i, e := range all {
		fills[i] = e.itself()
	}
	return fills
}

func (f *filling) itself() *filling { return f }
