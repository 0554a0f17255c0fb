package line

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

const (
	ms = time.Millisecond
	T  = 500 * ms
)

var errRefused = errors.New("connection refused")

// never is the latency of what is never answered.
const never = time.Duration(-1)

// A latency says when a command that is sent at a time is answered, or fails.
type latency func(at time.Duration) (after time.Duration, err error)

func healthy(time.Duration) (time.Duration, error) { return ms, nil }

func always(after time.Duration) latency {
	return func(time.Duration) (time.Duration, error) { return after, nil }
}

// between is another latency for a part of the time.
func between(from, to time.Duration, in latency) latency {
	return func(at time.Duration) (time.Duration, error) {
		if from <= at && at < to {
			return in(at)
		}
		return healthy(at)
	}
}

func refused(time.Duration) (time.Duration, error) { return 0, errRefused }

func lost(time.Duration) (time.Duration, error) { return never, nil }

// frozen answers everything when it goes on.
func frozen(to time.Duration) latency {
	return func(at time.Duration) (time.Duration, error) { return to - at, nil }
}

// comesAndGoes answers for 100 ms, is down until the end of a period, and so on.
func comesAndGoes(period time.Duration, down func(to time.Duration) latency) latency {
	return func(at time.Duration) (time.Duration, error) {
		if at%period < 100*ms {
			return healthy(at)
		}
		return down(at - at%period + period)(at)
	}
}

// lossy loses each n-th command.
func lossy(n int64) latency {
	var count atomic.Int64
	return func(at time.Duration) (time.Duration, error) {
		if count.Add(1)%n == 0 {
			return never, nil
		}
		return healthy(at)
	}
}

// A road is a line to a server that answers as a test wants.
type road struct {
	*Line
	begun time.Time
	asked atomic.Int64 // pings

	commands, pings atomic.Pointer[latency]

	usersMu sync.Mutex
	joined  []*user // protected by usersMu
}

func newRoad(commands, pings latency) *road {
	r := &road{begun: time.Now()}
	r.Line = New(r)
	r.set(commands, pings)
	return r
}

// set changes what the server does; nil changes nothing.
func (r *road) set(commands, pings latency) {
	if commands != nil {
		r.commands.Store(&commands)
	}
	if pings != nil {
		r.pings.Store(&pings)
	}
}

// wait waits for the answer to what is sent now.
func (r *road) wait(ctx context.Context, is *latency) error {
	after, err := (*is)(time.Since(r.begun))
	if after == never {
		after = time.Hour
	}
	select {
	case <-time.After(after):
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *road) Ping(ctx context.Context, _ string, _ bool) error {
	r.asked.Add(1)
	return r.wait(ctx, r.pings.Load())
}

func (r *road) Explain(err error, within time.Duration) error {
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("no answer within %v", within)
}

// isAway reports whether the line is away for a user with T when the watcher has done what is due.
func (r *road) isAway() bool {
	synctest.Wait()
	return r.Away(T) != nil
}

func (r *road) isWatched() bool {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.watcher != nil
}

// A user records when the line is away for it.
type user struct {
	User
	road *road

	mu   sync.Mutex
	away []span // protected by mu
}

type span struct{ from, to time.Duration }

func (r *road) join(timeout time.Duration) *user {
	u := &user{road: r}
	r.usersMu.Lock()
	r.joined = append(r.joined, u)
	r.usersMu.Unlock()
	u.User = User{timeout, func(o *Outage) {
		go func() {
			from := time.Since(r.begun)
			<-o.Over
			u.mu.Lock()
			defer u.mu.Unlock()
			u.away = append(u.away, span{from, time.Since(r.begun)})
		}()
	}}
	r.Join(&u.User)
	return u
}

func (u *user) leave() { u.road.Leave(&u.User) }

// outages returns the times of the outages that are over.
func (u *user) outages() []span {
	synctest.Wait()
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.away)
}

// call sends a command, for at most the user's Timeout, and returns how long that took.
func (u *user) call() time.Duration {
	r, begun := u.road, time.Now()
	opened := r.Opened()
	if r.Away(u.Timeout) != nil {
		return 0
	}
	r.Send("k", begun)
	replied := make(chan struct{})
	go func() {
		defer close(replied)
		ctx, cancel := context.WithTimeout(context.Background(), u.Timeout)
		defer cancel()
		r.Done("k", r.wait(ctx, r.commands.Load()))
	}()
	for {
		select {
		case <-replied:
			return time.Since(begun)
		case <-opened:
			opened = r.Opened()
		}
		if r.Away(u.Timeout) != nil {
			return time.Since(begun)
		}
	}
}

// calls has callers call again and again until an end, and returns how long the slowest call took.
func (u *user) calls(callers int, pause, until time.Duration) (slowest time.Duration) {
	var all sync.WaitGroup
	var mu sync.Mutex
	for i := range callers {
		all.Go(func() {
			time.Sleep(pause * time.Duration(i) / time.Duration(callers))
			for time.Since(u.road.begun) < until {
				took := u.call()
				mu.Lock()
				slowest = max(slowest, took)
				mu.Unlock()
				time.Sleep(pause)
			}
		})
	}
	all.Wait()
	return slowest
}

// No call takes longer than its Timeout. The line goes away one Timeout after the first command that is not answered,
// if no ping is answered either, and is back as soon as a ping is: at a thaw, or by the next one, if the last has
// failed just before.
func TestLine(t *testing.T) {
	const from, to, end = 2 * time.Second, 8 * time.Second, 12 * time.Second // of an outage, and of the test
	outage := []span{{from + T, to}}
	late := T * 5 / 4 // between two pings
	for name, c := range map[string]struct {
		latency
		pings   latency // nil: as of commands
		slowest time.Duration
		away    []span        // the earliest times; both may be later, by a pause of a lone caller
		back    time.Duration // how much later the end may be in addition
		regular bool          // there is an outage in each second, and nothing else is known of the times
	}{
		"healthy":             {latency: healthy, slowest: ms},
		"frozen":              {latency: between(from, to, frozen(to)), slowest: T, away: outage, back: T / 4},
		"killed":              {latency: between(from, to, refused), slowest: ms, away: outage, back: late},
		"a black hole":        {latency: between(from, to, lost), slowest: T, away: outage, back: late},
		"restarted":           {latency: between(from, from+300*ms, refused), slowest: ms},
		"slow":                {latency: always(T * 9 / 10), slowest: T * 9 / 10},
		"too slow":            {latency: always(T * 7 / 5), slowest: T, away: []span{{T, end}}, back: end},
		"loses one of 50":     {latency: lossy(50), pings: healthy, slowest: T},
		"loses one of two":    {latency: lossy(2), pings: healthy, slowest: T},
		"answers only pings":  {latency: always(4 * T), pings: healthy, slowest: T},
		"answers pings late":  {latency: always(4 * T), pings: always(T * 9 / 20), slowest: T},
		"frozen every second": {latency: comesAndGoes(time.Second, frozen), slowest: T, regular: true},
		"killed every 500 ms": {latency: comesAndGoes(T, func(time.Duration) latency { return refused }), slowest: ms},
	} {
		for _, load := range []struct {
			callers int
			pause   time.Duration
		}{{1, 5 * ms}, {1, 300 * ms}, {16, 5 * ms}, {16, 300 * ms}, {1000, 1200 * ms}} {
			run(t, fmt.Sprintf("%s, %d every %v", name, load.callers, load.pause), func(t *testing.T) {
				r := newRoad(c.latency, c.latency)
				r.set(nil, c.pings)
				u := r.join(T)
				if slowest := u.calls(load.callers, load.pause, end); slowest > c.slowest {
					t.Errorf("the slowest call took %v, want at most %v", slowest, c.slowest)
				}
				u.leave()
				time.Sleep(2 * T) // the last ping
				if r.isAway() || r.isWatched() {
					t.Errorf("away: %t, watched: %t, though no user is left", r.isAway(), r.isWatched())
				}
				away := u.outages()
				if c.regular {
					for _, a := range away[:max(len(away)-1, 0)] {
						if a.to%time.Second > T/4 {
							t.Errorf("back at %v, want that at each thaw", a.to)
						}
					}
					if len(away) < 8 {
						t.Errorf("away %d times in %v", len(away), end)
					}
				} else if !slices.EqualFunc(away, c.away, func(a, want span) bool { return isIn(a, want, load.pause, c.back) }) {
					t.Errorf("away %v, want %v", away, c.away)
				}
			})
		}
	}
}

// isIn reports whether an outage has begun and ended as wanted, or a little later.
func isIn(a, want span, late, back time.Duration) bool {
	return a.from >= want.from && a.from <= want.from+late+2*ms && a.to >= want.to && a.to <= want.to+back+2*ms
}

// run runs a subtest in a bubble, in parallel with others.
func run(t *testing.T, name string, run func(t *testing.T)) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, run)
	})
}

// inBubble runs a test with a server that answers nothing from the beginning, unless the test changes that.
func inBubble(t *testing.T, run func(t *testing.T, r *road)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRoad(lost, lost)
		run(t, r)
		for _, u := range r.joined {
			u.leave()
		}
		time.Sleep(time.Minute) // the last pings
		if n := r.asked.Load(); n > 0 {
			if time.Sleep(time.Minute); r.asked.Load() != n {
				t.Error("it pings for ever")
			}
		}
	})
}

// The watch goes on while one user is left, and the outage ends with the last one. A user that joins during an outage
// hears of it.
func TestLine_UsersComeAndGo(t *testing.T) {
	inBubble(t, func(t *testing.T, r *road) {
		first, second, last := r.join(T), r.join(T), r.join(T)
		go first.call()
		time.Sleep(T / 4)
		first.leave()
		time.Sleep(T)
		second.leave()
		time.Sleep(5 * T)
		told := []*user{second, last}
		for range 4 { // one of them is there at any time
			u := r.join(T)
			last.leave()
			last, told = u, append(told, u)
			time.Sleep(T / 3)
		}
		if r.Away(T) == nil || r.asked.Load() < 5 {
			t.Errorf("away: %t, after %d pings", r.Away(T) != nil, r.asked.Load())
		}
		last.leave()
		if r.Away(T) != nil {
			t.Error("away, though no user is left")
		}
		if took := r.join(T).call(); took != T || !r.isAway() {
			t.Errorf("a new user waits for %v; away: %t", took, r.isAway())
		}
		if n := len(first.outages()); n != 0 {
			t.Errorf("the first user, which had left before, was told of %d outages", n)
		}
		for i, u := range told {
			if n := len(u.outages()); n != 1 {
				t.Errorf("user %d was told of %d outages, want 1", i, n)
			}
		}
	})
}

// The line is away for users that have waited for their own Timeout, and for more patient users when theirs is over,
// too. An answer ends it for all.
func TestLine_TimeoutsDiffer(t *testing.T) {
	for name, c := range map[string]struct {
		latency
		back time.Duration // how much later the end may be
	}{"frozen": {frozen(10 * T), T / 4}, "killed": {between(0, 10*T, refused), T * 5 / 4}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, r *road) {
				r.set(c.latency, c.latency)
				hasty, patient, other := r.join(T/10), r.join(T), r.join(T)
				var all sync.WaitGroup
				for _, u := range []*user{hasty, patient} {
					all.Go(func() {
						if slowest := u.calls(3, ms, 10*T); slowest > u.Timeout {
							t.Errorf("one with %v has waited for %v", u.Timeout, slowest)
						}
					})
				}
				time.Sleep(T / 2)
				if r.Away(T/10) == nil || r.Away(T) != nil {
					t.Errorf("away for the hasty one: %t, for the patient ones: %t", r.Away(T/10) != nil, r.Away(T) != nil)
				}
				all.Wait()
				time.Sleep(c.back + ms)
				for _, u := range []*user{hasty, patient, other} {
					if a := u.outages(); len(a) != 1 || a[0].from != u.Timeout || a[0].to < 10*T || a[0].to > 10*T+c.back {
						t.Errorf("with %v it is away %v, want from then to %v", u.Timeout, a, 10*T)
					}
				}
			})
		})
	}
}

// A server that is too slow for a hasty user is there for a patient one, whether the patient one asks or not.
func TestLine_TooSlowForOne(t *testing.T) {
	for _, asks := range []bool{false, true} {
		t.Run(fmt.Sprint("asks: ", asks), func(t *testing.T) {
			inBubble(t, func(t *testing.T, r *road) {
				r.set(always(T/5), always(T/5))
				hasty, patient := r.join(T/10), r.join(T)
				if asks {
					go patient.calls(2, T/3, 20*T)
				}
				hasty.calls(3, ms, 20*T)
				time.Sleep(2 * T)
				hasty.leave()
				if len(hasty.outages()) == 0 || len(patient.outages()) > 0 {
					t.Errorf("away %v for the hasty one, %v for the patient one", hasty.outages(), patient.outages())
				}
			})
		})
	}
}

// A process that was held up does not take that for a silence of the server.
func TestLine_HeldUp(t *testing.T) {
	inBubble(t, func(t *testing.T, r *road) {
		r.set(always(5*T), healthy) // arrives when the process goes on
		u := r.join(100 * T)
		u.Timeout = T
		r.watcher = newWatcher(5*T-ms, r.look) // too late
		go u.call()
		time.Sleep(5*T - ms + T/4)
		if r.Away(T) != nil || r.asked.Load() > 0 {
			t.Errorf("away: %t, after %d pings", r.Away(T) != nil, r.asked.Load())
		}
		r.set(healthy, nil)
		u.call()
		r.set(lost, lost)
		if took := u.call(); took != T || !r.isAway() {
			t.Errorf("later it waits for %v, away: %t", took, r.isAway())
		}
	})
}

// A watcher that was held up while the line is away pings, and finds the server there.
func TestLine_HeldUpWhileAway(t *testing.T) {
	inBubble(t, func(t *testing.T, r *road) {
		r.set(nil, between(0, 3*T, lost))
		u := r.join(T)
		tell := u.Away
		u.Away = func(o *Outage) { tell(o); time.Sleep(5 * T) } // the watcher calls it
		u.call()
		time.Sleep(6 * T)
		if r.Away(T) != nil || len(u.outages()) != 1 {
			t.Errorf("away: %t; it was away %v", r.Away(T) != nil, u.outages())
		}
	})
}

// Pings are not regular. Otherwise they would never meet a server that comes and goes regularly.
func TestLine_ComesAndGoes(t *testing.T) {
	inBubble(t, func(t *testing.T, r *road) {
		comes := comesAndGoes(2*T, func(time.Duration) latency { return refused })
		r.set(comes, comes)
		u := r.join(T)
		u.calls(1, T/10, 2*time.Minute)
		if n := len(u.outages()); n < 3 {
			t.Errorf("back %d times in two minutes", n)
		}
	})
}

// An idle line sends nothing, whatever was lost before. A ping that is lost shows nothing of the next silence.
func TestLine_Idle(t *testing.T) {
	inBubble(t, func(t *testing.T, r *road) {
		r.set(healthy, healthy)
		u := r.join(T)
		for range 10 {
			u.call()
			time.Sleep(T)
		}
		if n := r.asked.Load(); n > 0 || r.isWatched() {
			t.Errorf("%d pings; watched: %t", n, r.isWatched())
		}
		r.set(always(T*3/4), lost) // the ping at half of the time is lost
		u.call()
		r.set(always(T*9/10), nil)
		if took := u.call(); took != T*9/10 || r.Away(T) != nil {
			t.Errorf("the next command took %v; away: %t", took, r.Away(T) != nil)
		}
	})
}

// A second silence that begins right after an outage is noticed as soon as the first.
func TestLine_SilentAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, r *road) {
		r.set(frozen(5*T), frozen(5*T))
		u := r.join(T)
		u.calls(1, ms, 5*T)
		if o := r.Away(T); o != nil { // the last ping has failed just before
			<-o.Over
		}
		r.set(lost, lost)
		if took := u.call(); took != T || !r.isAway() {
			t.Errorf("%v; away: %t", took, r.isAway())
		}
	})
}

// What the client has in memory shows nothing of the server: a silence goes on, and none begins.
func TestLine_Unknown(t *testing.T) {
	inBubble(t, func(t *testing.T, r *road) {
		u := r.join(T)
		hot := func(until time.Duration) {
			for time.Since(r.begun) < until {
				r.Send("k", time.Now())
				r.Done("k", ErrUnknown)
				time.Sleep(ms)
			}
		}
		if hot(10 * T); r.Away(T) != nil || r.asked.Load() > 0 {
			t.Errorf("away: %t, after %d pings", r.Away(T) != nil, r.asked.Load())
		}
		go hot(13 * T)
		if took := u.call(); took != T || !r.isAway() {
			t.Errorf("a command waits for %v; away: %t", took, r.isAway())
		}
		time.Sleep(2 * T)
	})
}

// Users, commands and outages may come and go at the same time.
func TestLine_Crowd(t *testing.T) {
	inBubble(t, func(t *testing.T, r *road) {
		r.set(lossy(3), lossy(2))
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				for range 200 {
					u := r.join(T / time.Duration(i+1))
					for range 5 {
						u.call()
						r.Look()
					}
					u.leave()
				}
			})
		}
		all.Wait()
		time.Sleep(2 * T) // commands that their callers have left
		if r.mu.Lock(); r.flying != 0 || r.Away(0) != nil {
			t.Errorf("%d commands are on their way; away: %t", r.flying, r.Away(0) != nil)
		}
		r.mu.Unlock()
	})
}

// The error of an outage is the last one of a command, if one has failed.
func TestLine_Err(t *testing.T) {
	inBubble(t, func(t *testing.T, r *road) {
		u := r.join(T)
		r.Send("k", time.Now())
		time.Sleep(T + ms)
		if err := r.Away(T).Err; err.Error() != "no answer within 500ms" {
			t.Error(err)
		}
		r.set(nil, healthy)
		time.Sleep(2 * T)
		r.set(refused, lost)
		u.calls(1, ms, 6*T)
		if err := r.Away(T).Err; !errors.Is(err, errRefused) {
			t.Error(err)
		}
	})
}
