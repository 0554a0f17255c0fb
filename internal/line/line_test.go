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

// A fake is a server.
type fake struct {
	begun  time.Time
	pinged atomic.Int64

	mu              sync.Mutex
	commands, pings latency // protected by mu
}

// set changes what the server does; nil changes nothing.
func (f *fake) set(commands, pings latency) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if commands != nil {
		f.commands = commands
	}
	if pings != nil {
		f.pings = pings
	}
}

func (f *fake) command(ctx context.Context) error {
	f.mu.Lock()
	l := f.commands
	f.mu.Unlock()
	return f.wait(ctx, l)
}

func (f *fake) wait(ctx context.Context, l latency) error {
	after, err := l(time.Since(f.begun))
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

func (f *fake) Ping(ctx context.Context, _ string, _ bool) error {
	f.pinged.Add(1)
	f.mu.Lock()
	l := f.pings
	f.mu.Unlock()
	return f.wait(ctx, l)
}

func (f *fake) Explain(err error, within time.Duration) error {
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("no answer within %v", within)
}

// A user records when the line is away for it.
type user struct {
	User
	line *Line
	fake *fake

	mu   sync.Mutex
	away []span // protected by mu
}

type span struct{ from, to time.Duration }

func newUser(l *Line, f *fake, timeout time.Duration) *user {
	u := &user{line: l, fake: f}
	u.User = User{timeout, func(o *Outage) {
		go func() {
			from := time.Since(f.begun)
			<-o.Over
			u.mu.Lock()
			defer u.mu.Unlock()
			u.away = append(u.away, span{from, time.Since(f.begun)})
		}()
	}}
	l.Join(&u.User)
	return u
}

// outages returns the times of the outages that are over.
func (u *user) outages() []span {
	synctest.Wait()
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.away)
}

// call sends a command, for at most the user's Timeout, and returns how long that took.
func (u *user) call() time.Duration {
	begun := time.Now()
	if u.line.Away(u.Timeout) != nil {
		return 0
	}
	opened := u.line.Opened()
	u.line.Send("k", begun)
	replied := make(chan struct{})
	go func() {
		defer close(replied)
		ctx, cancel := context.WithTimeout(context.Background(), u.Timeout)
		defer cancel()
		u.line.Done("k", u.fake.command(ctx))
	}()
	for {
		select {
		case <-replied:
			return time.Since(begun)
		case <-opened:
			if u.line.Away(u.Timeout) != nil {
				return time.Since(begun)
			}
			opened = u.line.Opened()
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
			for time.Since(u.fake.begun) < until {
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
	const end = 12 * time.Second
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
		"frozen":              {latency: between(2*time.Second, 8*time.Second, frozen(8*time.Second)), slowest: T, away: []span{{2*time.Second + T, 8 * time.Second}}, back: T / 4},
		"killed":              {latency: between(2*time.Second, 8*time.Second, refused), slowest: ms, away: []span{{2*time.Second + T, 8 * time.Second}}, back: late},
		"a black hole":        {latency: between(2*time.Second, 8*time.Second, lost), slowest: T, away: []span{{2*time.Second + T, 8 * time.Second}}, back: late},
		"restarted":           {latency: between(2*time.Second, 2*time.Second+300*ms, refused), slowest: ms},
		"slow":                {latency: always(T * 9 / 10), slowest: T * 9 / 10},
		"too slow":            {latency: always(T * 7 / 5), slowest: T, away: []span{{T, end}}, back: end},
		"loses one of 50":     {latency: lossy(50), pings: healthy, slowest: T},
		"loses one of two":    {latency: lossy(2), pings: healthy, slowest: T},
		"answers only pings":  {latency: always(4 * T), pings: healthy, slowest: T},
		"answers pings late":  {latency: always(4 * T), pings: always(T * 9 / 20), slowest: T},
		"frozen every second": {latency: comesAndGoes(time.Second, frozen), slowest: T, regular: true},
		"killed every 500 ms": {latency: comesAndGoes(T, func(time.Duration) latency { return refused }), slowest: ms},
	} {
		for _, callers := range []int{1, 16, 1000} {
			for _, pause := range []time.Duration{5 * ms, 300 * ms} {
				if callers == 1000 {
					if pause *= 4; pause < T {
						continue
					}
				}
				t.Run(fmt.Sprint(name, ", ", callers, " every ", pause), func(t *testing.T) {
					t.Parallel()
					synctest.Test(t, func(t *testing.T) {
						f := &fake{commands: c.latency, pings: c.latency, begun: time.Now()}
						f.set(nil, c.pings)
						l := New(f)
						u := newUser(l, f, T)
						if slowest := u.calls(callers, pause, end); slowest > c.slowest {
							t.Errorf("the slowest call took %v, want at most %v", slowest, c.slowest)
						}
						l.Leave(&u.User)
						time.Sleep(2 * T) // the last ping
						if l.Away(T) != nil || isWatched(l) {
							t.Errorf("away: %v, watched: %t, though no user is left", l.Away(T) != nil, isWatched(l))
						}
						if c.regular {
							for _, a := range u.outages()[:max(len(u.outages())-1, 0)] {
								if a.to%time.Second > T/4 {
									t.Errorf("back at %v, want that at each thaw", a.to)
								}
							}
							if n := len(u.outages()); n < 8 {
								t.Errorf("away %d times in %v", n, end)
							}
							return
						}
						ok := len(u.outages()) == len(c.away)
						for i, w := range c.away {
							ok = ok && in(u.outages()[i], w, pause, c.back)
						}
						if !ok {
							t.Errorf("away %v, want %v", u.outages(), c.away)
						}
					})
				})
			}
		}
	}
}

// in reports whether an outage has begun and ended as wanted, or a little later.
func in(a, want span, late, back time.Duration) bool {
	return a.from >= want.from && a.from <= want.from+late+2*ms && a.to >= want.to && a.to <= want.to+back+2*ms
}

// inBubble runs a test with a server that answers nothing from the beginning, unless the test changes that.
func inBubble(t *testing.T, run func(t *testing.T, l *Line, f *fake)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{commands: lost, pings: lost, begun: time.Now()}
		run(t, New(f), f)
		time.Sleep(time.Minute) // the last pings
		if n := f.pinged.Load(); n > 0 {
			if time.Sleep(time.Minute); f.pinged.Load() != n {
				t.Error("it pings for ever")
			}
		}
	})
}

// The watch goes on while one user is left, and the outage ends with the last one. A user that joins during an outage
// hears of it.
func TestLine_UsersComeAndGo(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Line, f *fake) {
		users := []*user{newUser(l, f, T), newUser(l, f, T), newUser(l, f, T)}
		go users[0].call()
		time.Sleep(T / 4)
		l.Leave(&users[0].User)
		time.Sleep(T)
		l.Leave(&users[1].User)
		users = append(users, newUser(l, f, T))
		time.Sleep(5 * T)
		for range 3 { // with at least one of them at any time
			u := newUser(l, f, T)
			l.Leave(&users[len(users)-1].User)
			users = append(users, u)
			time.Sleep(T / 3)
		}
		if l.Away(T) == nil || f.pinged.Load() < 5 {
			t.Errorf("away: %t, after %d pings", l.Away(T) != nil, f.pinged.Load())
		}
		l.Leave(&users[2].User)
		l.Leave(&users[len(users)-1].User)
		if l.Away(T) != nil {
			t.Error("away, though no user is left")
		}
		u := newUser(l, f, T)
		begun := time.Now()
		if took := u.call(); took != T || !isAway(l) {
			t.Errorf("a new user waits for %v; away: %t", time.Since(begun), l.Away(T) != nil)
		}
		l.Leave(&u.User)
		synctest.Wait()
		for i, u := range users {
			if n := len(u.outages()); n != min(i, 1) { // the first one has left before
				t.Errorf("user %d was told of %d outages", i, n)
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
			inBubble(t, func(t *testing.T, l *Line, f *fake) {
				f.set(c.latency, c.latency)
				hasty, patient, other := newUser(l, f, T/10), newUser(l, f, T), newUser(l, f, T)
				var all sync.WaitGroup
				for _, u := range []*user{hasty, patient} {
					all.Go(func() {
						if slowest := u.calls(3, ms, 10*T); slowest > u.Timeout {
							t.Errorf("one with %v has waited for %v", u.Timeout, slowest)
						}
					})
				}
				time.Sleep(T / 2)
				if l.Away(T/10) == nil || l.Away(T) != nil {
					t.Errorf("away for the hasty one: %t, for the patient ones: %t", l.Away(T/10) != nil, l.Away(T) != nil)
				}
				all.Wait()
				time.Sleep(c.back + ms)
				for _, u := range []*user{hasty, patient, other} {
					if a := u.outages(); len(a) != 1 || a[0].from != u.Timeout || a[0].to < 10*T || a[0].to > 10*T+c.back {
						t.Errorf("with %v it is away %v, want from then to %v", u.Timeout, a, 10*T)
					}
					l.Leave(&u.User)
				}
			})
		})
	}
}

// A server that is too slow for a hasty user is there for a patient one, whether the patient one asks or not.
func TestLine_TooSlowForOne(t *testing.T) {
	for _, asks := range []bool{false, true} {
		t.Run(fmt.Sprint("asks: ", asks), func(t *testing.T) {
			inBubble(t, func(t *testing.T, l *Line, f *fake) {
				f.set(always(T/5), always(T/5))
				hasty, patient := newUser(l, f, T/10), newUser(l, f, T)
				var all sync.WaitGroup
				if asks {
					all.Go(func() { patient.calls(2, T/3, 20*T) })
				}
				hasty.calls(3, ms, 20*T)
				all.Wait()
				time.Sleep(T)
				l.Leave(&hasty.User)
				l.Leave(&patient.User)
				synctest.Wait()
				if len(hasty.outages()) == 0 || len(patient.outages()) > 0 {
					t.Errorf("away %v for the hasty one, %v for the patient one", hasty.outages(), patient.outages())
				}
			})
		})
	}
}

// A process that was held up does not take that for a silence of the server.
func TestLine_HeldUp(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Line, f *fake) {
		f.set(always(5*T), nil) // arrives when the process goes on
		f.set(nil, healthy)
		u := newUser(l, f, 100*T)
		u.Timeout = T
		l.watcher = newWatcher(5*T-ms, l.look) // too late
		go u.call()
		time.Sleep(5*T - ms)
		time.Sleep(T / 4)
		if l.Away(T) != nil || f.pinged.Load() > 0 {
			t.Errorf("away: %t, after %d pings", l.Away(T) != nil, f.pinged.Load())
		}
		f.set(healthy, nil)
		u.call()
		f.set(lost, lost)
		if took := u.call(); took != T || !isAway(l) {
			t.Errorf("later it waits for %v, away: %t", took, l.Away(T) != nil)
		}
		l.Leave(&u.User)
	})
}

// A watcher that was held up while the line is away pings, and finds the server there.
func TestLine_HeldUpWhileAway(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Line, f *fake) {
		f.set(nil, between(0, 3*T, lost))
		u := newUser(l, f, T)
		tell := u.Away
		u.Away = func(o *Outage) { tell(o); time.Sleep(5 * T) } // the watcher calls it
		u.call()
		time.Sleep(6 * T)
		if l.Away(T) != nil || len(u.outages()) != 1 {
			t.Errorf("away: %t; it was away %v", l.Away(T) != nil, u.outages())
		}
		l.Leave(&u.User)
	})
}

// Pings are not regular. Otherwise they would never meet a server that comes and goes regularly.
func TestLine_ComesAndGoes(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Line, f *fake) {
		comes := comesAndGoes(2*T, func(time.Duration) latency { return refused })
		f.set(comes, comes)
		u := newUser(l, f, T)
		u.calls(1, T/10, 2*time.Minute)
		if n := len(u.outages()); n < 3 {
			t.Errorf("back %d times in two minutes", n)
		}
		l.Leave(&u.User)
	})
}

// An idle line sends nothing, whatever was lost before. A ping that is lost shows nothing of the next silence.
func TestLine_Idle(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Line, f *fake) {
		f.set(healthy, healthy)
		u := newUser(l, f, T)
		for range 10 {
			u.call()
			time.Sleep(T)
		}
		if n := f.pinged.Load(); n > 0 || isWatched(l) {
			t.Errorf("%d pings; watched: %t", n, isWatched(l))
		}
		f.set(nil, lost)
		f.set(always(T*3/4), nil) // the ping at half of the time is lost
		u.call()
		f.set(always(T*9/10), nil)
		if took := u.call(); took != T*9/10 || l.Away(T) != nil {
			t.Errorf("the next command took %v; away: %t", took, l.Away(T) != nil)
		}
		l.Leave(&u.User)
	})
}

// A second silence that begins right after an outage is noticed as soon as the first.
func TestLine_SilentAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Line, f *fake) {
		f.set(frozen(5*T), frozen(5*T))
		u := newUser(l, f, T)
		u.calls(1, ms, 5*T)
		if o := l.Away(T); o != nil { // the last ping has failed just before
			<-o.Over
		}
		f.set(lost, lost)
		if took := u.call(); took != T || !isAway(l) {
			t.Errorf("%v; away: %t", took, l.Away(T) != nil)
		}
		l.Leave(&u.User)
	})
}

// What the client has in memory shows nothing of the server: a silence goes on, and none begins.
func TestLine_Unknown(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Line, f *fake) {
		u := newUser(l, f, T)
		hot := func(until time.Duration) {
			for time.Since(f.begun) < until {
				l.Send("k", time.Now())
				l.Done("k", ErrUnknown)
				time.Sleep(ms)
			}
		}
		if hot(10 * T); l.Away(T) != nil || f.pinged.Load() > 0 {
			t.Errorf("away: %t, after %d pings", l.Away(T) != nil, f.pinged.Load())
		}
		go hot(13 * T)
		if took := u.call(); took != T || !isAway(l) {
			t.Errorf("a command waits for %v; away: %t", took, l.Away(T) != nil)
		}
		time.Sleep(2 * T)
		l.Leave(&u.User)
	})
}

// Users, commands and outages may come and go at the same time.
func TestLine_Crowd(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Line, f *fake) {
		f.set(lossy(3), lossy(2))
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				for range 200 {
					u := newUser(l, f, T/time.Duration(i+1))
					for range 5 {
						u.call()
						l.Look()
					}
					l.Leave(&u.User)
				}
			})
		}
		all.Wait()
		time.Sleep(2 * T) // commands that their callers have left
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.flying != 0 || l.Away(0) != nil {
			t.Errorf("%d commands are on their way; away: %t", l.flying, l.Away(0) != nil)
		}
	})
}

// The error of an outage is the last one of a command, if one has failed.
func TestLine_Err(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Line, f *fake) {
		u := newUser(l, f, T)
		l.Send("k", time.Now())
		time.Sleep(T + ms)
		if err := l.Away(T).Err; err.Error() != "no answer within 500ms" {
			t.Error(err)
		}
		f.set(nil, healthy)
		time.Sleep(2 * T)
		f.set(refused, lost)
		u.calls(1, ms, 6*T)
		if err := l.Away(T).Err; !errors.Is(err, errRefused) {
			t.Error(err)
		}
		l.Leave(&u.User)
	})
}

// isAway reports whether the line is away when the watcher has done what is due.
func isAway(l *Line) bool {
	synctest.Wait()
	return l.Away(T) != nil
}

// isWatched reports whether a goroutine watches the line.
func isWatched(l *Line) bool {
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.watcher != nil
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
