package fill

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/revoke"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
)

// Parts are what a Filler is made of.
type Parts struct {
	Client  *client.Client
	Store   *value.Store
	Tags    *tags.Index // nil: no value has tags
	Fills   *flight.Fills[Result]
	Slots   *flight.Slots
	User    User
	Events  *event.Sink
	Keys    *revoke.Keys
	Closing <-chan struct{}

	LockTTL     time.Duration
	LoadTimeout time.Duration
	RetryAfter  time.Duration // 0: off
	FailureTTL  time.Duration // 0: off
	LoadMany    Loader        // of refreshes; nil: the Loader of the call
	MaxBatch    int
}

// refreshes gathers what calls find due within a moment, for Options.LoadMany.
type refreshes struct {
	mu  sync.Mutex // before Fills.mu
	ctx context.Context
	due []*value.Lookup // empty: no goroutine is about to refresh
}

// A filling is the fill of one key in a set.
type filling struct {
	key  string
	fill *flight.Fill[Result]
	lock *filllock.Lock
	ear  *wait.Ear // nil: it has not waited
	attempt

	old      *value.Lookup // what the key holds, as last seen; at first, the call that began the fill may read it, too
	holds    bool          // the lock, unless Redis has been told
	replaces bool          // the key held old when this fill took the lock
	oldSince flight.Stamp  // old is known to be true as of this stamp
	newSince flight.Stamp  // old was stored after this stamp; 0: it may have been there before the fill
	rest     time.Duration // how long no other refresh of the same entry is started
	polls    int           // of the wait that has not been told

	unlocked   bool         // Redis does not answer: the load has no lock, and its value is not stored
	began      flight.Stamp // the load
	superseded atomic.Bool  // no caller may have the value of the load any more
	outcome    outcome      // of the load
}

// A state is what a set does. It is a variable of the goroutine that runs the set, so no other one changes it.
type state int

const (
	beginning state = iota
	asking          // asks Redis for the values, or for the locks
	answered        // has the replies
	paused          // waits for another process, which holds the locks
	queueing        // waits for a slot; the set has no goroutine then
	dequeued        // has waited for a slot, and may have it
	loading         // the Loader runs
	storing         // hands the outcomes of the load to Redis and to the callers
	ended           // the goroutine is done with the set, which has ended or goes on in another one
)

// An attempt is what a fill knows between two commands.
type attempt struct {
	within     time.Duration // bound on the next command
	wanted     bool          // a caller waits for this fill
	awaited    string        // token of the holder that the fill waits for
	asksFor    string        // Query.For of the last command
	lastAsked  flight.Stamp  // the lock was seen held, or free, as of this stamp
	unanswered int           // commands without an answer
	reply      filllock.Answer
	stamp      flight.Stamp // from before the command: what the reply says of the key is true as of then
	away       error        // why Redis was not asked, or did not answer
	queue      bool         // wait for a slot before the next command

	way
}

// A way is where a fill goes after a reply. Fills of a set with the same way stay together.
type way struct {
	next   state
	holder string // of the lock, whom a fill waits for: its locks end at one time
	apart  int    // fills with different numbers do not go together
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

// An outcome is how a load ended, and what happened to its value.
type outcome struct {
	Outcome
	info       event.LoadInfo
	entry      entry.Entry  // of Value, or of ErrNotFound
	tags       []string     // of Value
	untagged   bool         // its tags are not known, or cannot be proved
	superseded bool         // the load was cancelled because no caller could have had its value
	call       *flight.Call // of the Loader; nil: there was none

	// To be told to Redis.
	data   []byte // of entry; nil: the lock is released with note
	note   filllock.ReleaseNote
	ours   bool // the fill still held the lock, and no tag had been invalidated
	result *Result
	err    error // Redis has not been told
}

func (o *outcome) failed() bool { return o.Err != nil && !o.NotFound }

func (o *outcome) newResult() *Result {
	found := value.Found{Value: o.Value, Entry: o.entry, At: o.entry.WrittenAt, Freshness: value.Fresh, Err: o.Err}
	return &Result{Found: found, Failed: o.failed(), NoStale: o.NoStale}
}
