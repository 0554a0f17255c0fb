package lock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A semStage is one name on a server, and players who send single commands in its regard. A line of a play is an
// act and, behind an arrow, what comes of it:
//
//	A waits -> busy 2     a player asks for the lock, and stands in the queue if it has to; 2 come first
//	A tries, A renews, A releases, A abandons
//	A takes 3 -> held     of a semaphore of size 3
//	queue -> A B          what there is: queue, alive, holder, holders, details, keys, tombstone A
//	lives A -> 60         for how many seconds a waiter, or a holder of a semaphore, is taken to be alive
//	ttl queue -> 120      and a key lives; up to 15 s less will do
//	dead A, del queue     the liveness of a waiter or holder has passed; a key is lost
//	future fence          the last fence is from a time to come
//	place A               a player has a place at the head of the queue, however that came
//	list queue, immortal lock, text fence     and a key is somebody else's
//
// What is granted is held, with a fence above all before, or same, with the fence that the player has already.
// Players with small letters have short lives.
type semStage struct {
	rdb    redis.UniversalClient
	name   string
	fair   bool
	keys   keys
	fences map[string]int64
	top    int64
}

const (
	stageLife  = 60 * time.Second // far longer than any play
	stageShort = 30 * time.Second
)

func newStage(t testing.TB, rdb redis.UniversalClient, fair bool) *semStage {
	name := redistest.Namespace(t)
	return &semStage{rdb: rdb, name: name, fair: fair, keys: keysOf(name), fences: make(map[string]int64)}
}

func stageToken(who string) string { return strings.Repeat(who, 26) }

func (s *semStage) locker(who string, size int) *Locker {
	opts := &Options{TTL: stageLife, WaiterTTL: stageLife, RedisTimeout: 9 * time.Second}
	if who == strings.ToLower(who) {
		opts.TTL, opts.WaiterTTL = stageShort, stageShort
	}
	l, err := NewFairMutex(s.rdb, s.name, opts)
	if !s.fair {
		l, err = NewSemaphore(s.rdb, s.name, max(size, 1), opts)
	}
	if err != nil {
		panic(err)
	}
	return l
}

func (s *semStage) key(name string) string {
	return map[string]string{
		"lock": s.keys.lock, "fence": s.keys.fence, "queue": s.keys.queue, "alive": s.keys.alive, "details": s.keys.details,
	}[name]
}

// do runs a command in a script, for the sake of the client that remembers what it has read.
func (s *semStage) do(ctx context.Context, cmd, key string, args ...any) *redis.Cmd {
	return s.rdb.Eval(ctx, `return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))`, []string{key}, append([]any{cmd}, args...)...)
}

// members returns the players in a sorted set, in its order.
func (s *semStage) members(ctx context.Context, key string) (string, error) {
	tokens, err := s.do(ctx, "ZRANGE", key, 0, -1).StringSlice()
	for i := range tokens {
		tokens[i] = tokens[i][:1]
	}
	return strings.Join(tokens, " "), err
}

// act carries out one act and says what came of it.
func (s *semStage) act(ctx context.Context, act string) (string, error) {
	f := strings.Fields(act + " ")
	what := ""
	if len(f) > 1 {
		what = f[1]
	}
	switch f[0] {
	case "queue":
		return s.members(ctx, s.keys.queue)
	case "alive", "holders":
		key := s.keys.alive
		if f[0] == "holders" {
			key = s.keys.lock
		}
		m, err := s.members(ctx, key)
		names := strings.Fields(m)
		slices.Sort(names)
		return strings.Join(names, " "), err
	case "details":
		fields, err := s.do(ctx, "HKEYS", s.keys.details).StringSlice()
		var names []string
		for _, f := range fields {
			if f != "size" {
				names = append(names, f[:1])
			}
		}
		slices.Sort(names)
		return strings.Join(names, " "), err
	case "holder":
		text, err := s.do(ctx, "GET", s.keys.lock).Text()
		if errors.Is(err, redis.Nil) {
			return "", nil
		}
		return text[:1], err
	case "tombstone":
		err := s.do(ctx, "ZSCORE", s.keys.ended, stageToken(what)).Err()
		if errors.Is(err, redis.Nil) {
			return "none", nil
		}
		return "ended", err
	case "keys":
		var there []string
		for _, name := range []string{"lock", "queue", "alive", "details"} {
			n, err := s.do(ctx, "EXISTS", s.key(name)).Int()
			if err != nil {
				return "", err
			}
			if n == 1 {
				there = append(there, name)
			}
		}
		return strings.Join(there, " "), nil
	case "lives":
		key := s.keys.alive
		if !s.fair {
			key = s.keys.lock
		}
		score, err := s.do(ctx, "ZSCORE", key, stageToken(what)).Float64()
		if err != nil {
			return "", err
		}
		micros, err := s.serverMicros(ctx)
		return about(int64(score) - micros/1000), err
	case "ttl":
		ms, err := s.do(ctx, "PTTL", s.key(what)).Int64()
		return about(ms), err
	case "dead":
		key := s.keys.alive
		if !s.fair {
			key = s.keys.lock
		}
		return "", s.do(ctx, "ZADD", key, "XX", 1, stageToken(what)).Err()
	case "place":
		return "", errors.Join(s.do(ctx, "ZADD", s.keys.queue, 0, stageToken(what)).Err(), s.do(ctx, "ZADD", s.keys.alive, 1e15, stageToken(what)).Err())
	case "future":
		micros, err := s.serverMicros(ctx)
		s.top = micros + 1_000_000_000
		return "", errors.Join(err, s.do(ctx, "SET", s.key(what), s.top, "PX", stageLife.Milliseconds()).Err())
	case "del":
		return "", s.do(ctx, "DEL", s.key(what)).Err()
	case "list":
		return "", errors.Join(s.do(ctx, "DEL", s.key(what)).Err(), s.do(ctx, "RPUSH", s.key(what), "x").Err(),
			s.do(ctx, "PEXPIRE", s.key(what), stageLife.Milliseconds()).Err())
	case "immortal":
		return "", errors.Join(s.do(ctx, "DEL", s.key(what)).Err(), s.do(ctx, "SET", s.key(what), strings.Repeat("somebody else's", 3)).Err())
	case "text":
		return "", errors.Join(s.do(ctx, "DEL", s.key(what)).Err(),
			s.do(ctx, "SET", s.key(what), "somebody else's", "PX", stageLife.Milliseconds()).Err())
	}
	return s.play(ctx, f[0], f[1], f[2:])
}

func (s *semStage) serverMicros(ctx context.Context) (int64, error) {
	now, err := s.rdb.Eval(ctx, `return redis.call('TIME')`, []string{s.keys.lock}).StringSlice()
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(now[0]+fmt.Sprintf("%06s", now[1]), 10, 64)
}

// about rounds up to what is usual in plays.
func about(ms int64) string {
	return fmt.Sprint((ms + 14_999) / 15_000 * 15)
}

func (s *semStage) play(ctx context.Context, who, verb string, args []string) (string, error) {
	size := 0
	if len(args) > 0 {
		size, _ = strconv.Atoi(args[0])
	}
	l := s.locker(who, size)
	token := stageToken(who)
	within := l.opts.RedisTimeout
	switch verb {
	case "waits", "tries", "takes":
		a := &owner{Locker: l, token: token}
		r, err := l.kind.acquire(ctx, a, within, request{enqueue: verb == "waits"})
		switch {
		case err != nil:
			return s.conflict("acquire", err)
		case r.state == busy && s.fair:
			return fmt.Sprint("busy ", r.ahead), nil
		case r.state == otherSize:
			return fmt.Sprint("size ", r.number), nil
		case r.state != held:
			return r.state, nil
		case r.number == s.fences[who]:
			return "same", nil
		case r.number <= s.top:
			return fmt.Sprintf("held, with fence %d, after %d", r.number, s.top), nil
		}
		s.fences[who], s.top = r.number, r.number
		return held, nil
	case "renews":
		ok, err := l.kind.renew(ctx, &owner{Locker: l, token: token})
		return s.yes(verb, ok, err)
	case "releases":
		ok, err := l.kind.release(ctx, &owner{Locker: l, token: token}, within)
		return s.yes(verb, ok, err)
	case "abandons":
		return s.yes(verb, true, l.kind.abandon(ctx, &owner{Locker: l, token: token}))
	}
	panic(verb)
}

func (s *semStage) yes(op string, ok bool, err error) (string, error) {
	if err != nil {
		return s.conflict(op, err)
	}
	return map[bool]string{true: "yes", false: "no"}[ok], nil
}

// conflict turns an error that tells the caller of a foreign key into an outcome.
func (s *semStage) conflict(op string, err error) (string, error) {
	if err := explain(op, s.name, err); strings.Contains(err.Error(), "its key holds something else") && !errors.Is(err, ErrUnavailable) {
		return "conflict", nil
	}
	return "", err
}

func (s *semStage) run(t *testing.T, play string) {
	t.Helper()
	for line := range strings.Lines(play) {
		act, want, _ := strings.Cut(strings.TrimSpace(line), "->")
		if act == "" {
			continue
		}
		got, err := s.act(t.Context(), act)
		if want = strings.TrimSpace(want); err != nil || got != want {
			t.Fatalf("%s: %s, %v\nin\n%s", strings.TrimSpace(line), got, err, play)
		}
	}
}

func runPlays(t *testing.T, fair bool, plays map[string]string) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for name, play := range plays {
			t.Run(name, func(t *testing.T) { newStage(t, rdb, fair).run(t, play) })
		}
	})
}

func TestFairScriptsByWhatIsThere(t *testing.T) {
	redistest.Planted(t, "a_lock_without_an_end_is_a_conflict")
	runPlays(t, true, map[string]string{
		"a free lock is granted, to one": `
			A waits -> held
			A waits -> same
			queue ->
			B tries -> busy 0
			keys -> lock
			ttl lock -> 60`,
		"the order is that of arrival, whatever the names and however often they ask": `
			Z waits -> held
			M waits -> busy 0
			C waits -> busy 1
			X waits -> busy 2
			A waits -> busy 3
			X waits -> busy 2
			C waits -> busy 1
			queue -> M C X A
			alive -> A C M X
			Z releases -> yes
			A waits -> busy 3
			X tries -> busy 2
			M waits -> held
			queue -> C X A
			M releases -> yes
			C waits -> held
			C releases -> yes
			X waits -> held
			X releases -> yes
			A waits -> held
			A releases -> yes
			keys ->`,
		"who only tries does not queue, nor overtake those who do": `
			A waits -> held
			B tries -> busy 0
			C waits -> busy 0
			B tries -> busy 1
			queue -> C
			A releases -> yes
			B tries -> busy 1
			B waits -> busy 1
			C waits -> held
			queue -> B`,
		"the holder is never behind others, though its reply was lost": `
			A waits -> held
			B waits -> busy 0
			A waits -> same
			A tries -> same
			queue -> B
			A releases -> yes
			B waits -> held`,
		"a place that is left over from the holder goes": `
			A waits -> held
			B waits -> busy 0
			place A
			queue -> A B
			A waits -> same
			queue -> B
			alive -> B
			A releases -> yes
			B waits -> held`,
		"the dead are passed over together": `
			A waits -> held
			B waits -> busy 0
			C waits -> busy 1
			D waits -> busy 2
			E waits -> busy 3
			dead B
			dead C
			dead D
			A releases -> yes
			E waits -> held
			keys -> lock`,
		"who only tries passes over the dead, too": `
			A waits -> held
			B waits -> busy 0
			dead B
			A releases -> yes
			C tries -> held`,
		"who comes back from the dead before others ask keeps its place": `
			A waits -> held
			B waits -> busy 0
			C waits -> busy 1
			dead B
			B waits -> busy 0
			lives B -> 60
			queue -> B C`,
		"who comes back after others have asked is the last, and once": `
			A waits -> held
			B waits -> busy 0
			C waits -> busy 1
			dead B
			C waits -> busy 0
			queue -> C
			B waits -> busy 1
			B waits -> busy 1
			queue -> C B`,
		"each waiter's life is its own": `
			A waits -> held
			B waits -> busy 0
			c waits -> busy 1
			lives B -> 60
			lives c -> 30
			B waits -> busy 0
			c waits -> busy 1
			lives B -> 60
			lives c -> 30`,
		"a waiter with a short life does not cut those of the keys": `
			A waits -> held
			B waits -> busy 0
			ttl queue -> 120
			ttl alive -> 120
			c waits -> busy 1
			c waits -> busy 1
			d waits -> busy 2
			ttl queue -> 120
			ttl alive -> 120`,
		"the keys live for twice the life of a waiter": `
			A waits -> held
			b waits -> busy 0
			ttl queue -> 60
			ttl alive -> 60
			B waits -> busy 1
			ttl queue -> 120
			ttl alive -> 120`,
		"who asks renews its own life only": `
			A waits -> held
			B waits -> busy 0
			C waits -> busy 1
			dead C
			B waits -> busy 0
			queue -> B
			B tries -> busy 0
			lives B -> 60`,
		"the fence lives for a day": `
			A waits -> held
			ttl fence -> 86400`,
		"an abandoned attempt leaves the queue, and comes to nothing late": `
			A waits -> held
			B waits -> busy 0
			C waits -> busy 1
			B abandons -> yes
			tombstone B -> ended
			queue -> C
			alive -> C
			B waits -> refused
			B tries -> refused
			queue -> C
			A releases -> yes
			C waits -> held
			C releases -> yes
			keys ->`,
		"an abandoned attempt gives back what was granted meanwhile": `
			A waits -> held
			B waits -> busy 0
			C waits -> busy 1
			A releases -> yes
			B waits -> held
			B abandons -> yes
			holder ->
			queue -> C
			B waits -> refused
			C waits -> held`,
		"what is abandoned before it arrives takes nothing": `
			A abandons -> yes
			A abandons -> yes
			A waits -> refused
			A tries -> refused
			keys ->`,
		"an abandoning attempt takes nothing from others": `
			A waits -> held
			B waits -> busy 0
			C abandons -> yes
			holder -> A
			queue -> B
			alive -> B`,
		"a late command of one who has released takes nothing": `
			A waits -> held
			B waits -> busy 0
			A releases -> yes
			A waits -> refused
			A tries -> refused
			queue -> B
			B waits -> held
			A waits -> refused
			A releases -> yes
			A renews -> no
			holder -> B`,
		"nobody releases or renews for another": `
			A waits -> held
			B releases -> no
			B renews -> no
			C waits -> busy 0
			C releases -> no
			C renews -> no
			holder -> A
			queue -> C
			ttl lock -> 60`,
		"a renewal with a short life does not cut a long one": `
			A waits -> held
			A renews -> yes
			ttl lock -> 60
			del lock
			A renews -> no
			holder ->`,
		"a lost lock goes to the next in line": `
			A waits -> held
			B waits -> busy 0
			C waits -> busy 1
			del lock
			C waits -> busy 1
			B waits -> held
			A releases -> no
			A renews -> no
			holder -> B`,
		"a lost queue is formed again": `
			A waits -> held
			B waits -> busy 0
			C waits -> busy 1
			del queue
			C waits -> busy 0
			B waits -> busy 1
			A releases -> yes
			B waits -> busy 1
			C waits -> held
			C releases -> yes
			B waits -> held
			keys -> lock`,
		"a lost queue keeps nobody from a free lock": `
			A waits -> held
			B waits -> busy 0
			A releases -> yes
			del queue
			C tries -> held
			B waits -> busy 0`,
		"without their liveness waiters stand in the queue again": `
			A waits -> held
			B waits -> busy 0
			C waits -> busy 1
			D waits -> busy 2
			del alive
			C waits -> busy 0
			queue -> C D
			B waits -> busy 2
			D waits -> busy 1
			queue -> C D B
			alive -> B C D
			ttl alive -> 120
			A releases -> yes
			C waits -> held
			C releases -> yes
			D waits -> held
			D releases -> yes
			B waits -> held
			keys -> lock`,
		"without liveness or lock the first to ask gets it": `
			A waits -> held
			B waits -> busy 0
			C waits -> busy 1
			del alive
			del lock
			C waits -> held
			keys -> lock`,
		"the fence grows though the server's clock was put back": `
			future fence
			A waits -> held
			A releases -> yes
			B waits -> held
			ttl fence -> 86400`,
		"the fence grows though its key is lost": `
			A waits -> held
			A releases -> yes
			del fence
			B waits -> held`,
		"without its fence one who asks again gets a larger one": `
			A waits -> held
			B waits -> busy 0
			del fence
			A tries -> held
			A waits -> same
			holder -> A
			queue -> B`,

		"a lock that is a list is a conflict, and changes nothing": `
			A waits -> held
			B waits -> busy 0
			list lock
			B waits -> conflict
			C waits -> conflict
			C tries -> conflict
			A renews -> conflict
			A releases -> conflict
			queue -> B`,
		"a lock without an end is a conflict": `
			immortal lock
			A waits -> conflict
			A tries -> conflict
			keys -> lock`,
		"somebody else's text with an end is waited for": `
			text lock
			A tries -> busy 0
			A waits -> busy 0`,
		"a queue that is a list is a conflict, and takes nothing": `
			list queue
			A waits -> conflict
			A tries -> conflict
			holder ->`,
		"an alive key that is a list is a conflict, and takes nothing": `
			list alive
			A waits -> conflict
			A tries -> conflict
			holder ->
			queue ->`,
		"a fence that is a list is a conflict, and takes nothing": `
			list fence
			A waits -> conflict
			holder ->`,
		"a fence that is somebody else's text is a conflict, and takes nothing": `
			text fence
			A waits -> conflict
			holder ->`,
		"who gives up leaves the queue though the lock is a list": `
			A waits -> held
			B waits -> busy 0
			C waits -> busy 1
			list lock
			B waits -> conflict
			B abandons -> yes
			queue -> C
			alive -> C`,
		"who gives up gives back a grant though the queue is a list": `
			A waits -> held
			list queue
			A abandons -> yes
			holder ->`,
	})
}

func TestSemaphoreScriptsByWhatIsThere(t *testing.T) {
	runPlays(t, false, map[string]string{
		"as many as the size, and no more": `
			A takes 3 -> held
			B takes 3 -> held
			C takes 3 -> held
			D takes 3 -> busy
			holders -> A B C
			B releases -> yes
			D takes 3 -> held
			holders -> A C D
			details -> A C D
			B releases -> yes
			holders -> A C D`,
		"a lost reply takes no second place": `
			A takes 2 -> held
			A takes 2 -> same
			A takes 2 -> same
			B takes 2 -> held
			A takes 2 -> same
			C takes 2 -> busy
			holders -> A B`,
		"one place is a mutex": `
			A takes 1 -> held
			B takes 1 -> busy
			A releases -> yes
			B takes 1 -> held
			A renews -> no
			A releases -> yes
			holders -> B`,
		"who has died is replaced, all at once": `
			A takes 2 -> held
			B takes 2 -> held
			dead A
			dead B
			C takes 2 -> held
			D takes 2 -> held
			E takes 2 -> busy
			holders -> C D
			details -> C D
			A renews -> no
			B renews -> no
			A releases -> no
			holders -> C D`,
		"nothing is left of the dead, though others live": `
			A takes 2 -> held
			B takes 2 -> held
			dead A
			C takes 2 -> held
			holders -> B C
			details -> B C`,
		"renewing brings nobody back, even before others have come": `
			A takes 1 -> held
			dead A
			A renews -> no
			A releases -> no
			keys ->
			B takes 1 -> held
			del lock
			B renews -> no
			keys -> details
			C takes 1 -> held`,
		"each holder's life is its own": `
			A takes 3 -> held
			b takes 3 -> held
			lives A -> 60
			lives b -> 30
			b renews -> yes
			A renews -> yes
			lives A -> 60
			lives b -> 30`,
		"a short life does not cut that of the keys": `
			A takes 3 -> held
			ttl lock -> 75
			b takes 3 -> held
			b renews -> yes
			ttl lock -> 75
			ttl details -> 75
			A releases -> yes
			b renews -> yes
			ttl lock -> 45
			ttl details -> 45`,
		"keys are gone with the last holder": `
			A takes 2 -> held
			B takes 2 -> held
			A releases -> yes
			keys -> lock details
			C takes 2 -> held
			C abandons -> yes
			details -> B
			B abandons -> yes
			keys ->`,
		"another size is refused while anybody holds one, and works afterwards": `
			A takes 2 -> held
			B takes 3 -> size 2
			B takes 1 -> size 2
			B takes 2 -> held
			A releases -> yes
			C takes 3 -> size 2
			B releases -> yes
			C takes 3 -> held
			A takes 2 -> refused
			D takes 2 -> size 3`,
		"another size works when the holders have died": `
			A takes 2 -> held
			dead A
			B takes 1 -> held
			C takes 2 -> size 1`,
		"another size works when the holders are lost": `
			A takes 2 -> held
			del lock
			B takes 1 -> held
			C takes 1 -> busy
			C takes 2 -> size 1`,
		"lost details make nobody lose its place, nor a place more": `
			A takes 2 -> held
			B takes 2 -> held
			del details
			C takes 2 -> busy
			A renews -> yes
			A releases -> yes
			C takes 2 -> held
			D takes 2 -> busy
			holders -> B C`,
		"without details one who asks again gets a larger fence": `
			A takes 2 -> held
			B takes 2 -> held
			del details
			A takes 2 -> held
			A takes 2 -> same
			holders -> A B`,
		"an abandoned attempt gives back its place, and comes to nothing late": `
			A takes 1 -> held
			A abandons -> yes
			tombstone A -> ended
			keys ->
			A takes 1 -> refused
			B abandons -> yes
			B takes 1 -> refused
			C takes 1 -> held
			A abandons -> yes
			holders -> C`,
		"a late command of one who has released takes nothing": `
			A takes 1 -> held
			A releases -> yes
			A takes 1 -> refused
			B takes 1 -> held
			A takes 1 -> refused
			A releases -> yes
			holders -> B`,
		"nobody releases or renews for another": `
			A takes 2 -> held
			B releases -> no
			B renews -> no
			holders -> A
			lives A -> 60`,
		"the fence grows though the server's clock was put back": `
			future fence
			A takes 2 -> held
			B takes 2 -> held
			ttl fence -> 86400`,
		"the fence lives for a day, and grows though it is lost": `
			A takes 2 -> held
			ttl fence -> 86400
			del fence
			B takes 2 -> held`,

		"holders that are a list are a conflict, and change nothing": `
			list lock
			A takes 2 -> conflict
			A renews -> conflict
			A releases -> conflict
			A abandons -> conflict
			keys -> lock`,
		"a mutex of the same name is a conflict": `
			text lock
			A takes 2 -> conflict
			A renews -> conflict
			A releases -> conflict`,
		"a fence that is a list is a conflict, and takes nothing": `
			list fence
			A takes 2 -> conflict
			keys ->`,
		"a fence that is somebody else's text is a conflict, and takes nothing": `
			text fence
			A takes 2 -> conflict
			keys ->`,
		"details that are a list are a conflict while anybody holds a place": `
			A takes 2 -> held
			list details
			B takes 2 -> conflict
			A renews -> yes
			holders -> A`,
		"who gives up gives back its place though the details are a list": `
			A takes 1 -> held
			list details
			A abandons -> conflict
			holders ->`,
		"details that are somebody else's are not deleted": `
			list details
			A takes 2 -> conflict
			keys -> details`,
	})
}

// A stageModel is what the scripts are to do, in Go.
type stageModel struct {
	fair  bool
	queue []string // players
	alive map[string]bool
	dead  map[string]bool // waiters or holders whose time has passed
	holds map[string]bool
	size  int
	ended map[string]string
}

func (m *stageModel) reap() {
	for who := range m.dead {
		m.forget(who)
		delete(m.holds, who)
	}
	clear(m.dead)
}

func (m *stageModel) forget(who string) {
	m.queue = slices.DeleteFunc(m.queue, func(w string) bool { return w == who })
	delete(m.alive, who)
}

func (m *stageModel) fairAcquire(who string, wait bool) string {
	switch {
	case m.ended[who] != "":
		return "refused"
	case m.holds[who]:
		return "same"
	}
	if slices.Contains(m.queue, who) {
		m.alive[who] = true
		delete(m.dead, who)
	}
	m.reap()
	for len(m.queue) > 0 && !m.alive[m.queue[0]] {
		m.queue = m.queue[1:]
	}
	if len(m.holds) == 0 && (len(m.queue) == 0 || m.queue[0] == who) {
		m.forget(who)
		m.holds[who] = true
		return held
	}
	at := slices.Index(m.queue, who)
	if at < 0 {
		at = len(m.queue)
		if wait {
			m.queue = append(m.queue, who)
			m.alive[who] = true
		}
	}
	return fmt.Sprint("busy ", at)
}

func (m *stageModel) take(who string, size int) string {
	if m.ended[who] != "" {
		return "refused"
	}
	m.reap()
	if len(m.holds) == 0 {
		m.size = 0
	}
	switch {
	case m.size != 0 && m.size != size:
		return fmt.Sprint("size ", m.size)
	case m.holds[who]:
		return "same"
	case len(m.holds) >= size:
		return busy
	}
	m.holds[who], m.size = true, size
	return held
}

func (m *stageModel) act(act string) string {
	f := strings.Fields(act)
	who, verb := f[0], f[1]
	switch {
	case who == "dead":
		if m.alive[verb] || m.holds[verb] && !m.fair {
			m.dead[verb] = true
		}
		return ""
	case act == "del lock":
		for who := range m.holds {
			delete(m.dead, who)
		}
		clear(m.holds)
		return ""
	case act == "del queue":
		m.queue = nil
		return ""
	case act == "del alive":
		clear(m.alive)
		clear(m.dead)
		return ""
	case verb == "takes":
		size, _ := strconv.Atoi(f[2])
		return m.take(who, size)
	case verb == "waits" || verb == "tries":
		return m.fairAcquire(who, verb == "waits")
	}
	has := m.holds[who] && !m.dead[who]
	switch verb {
	case "abandons":
		m.forget(who)
		delete(m.holds, who)
		delete(m.dead, who)
		m.ended[who] = "abandoned"
		return "yes"
	case "releases":
		if m.holds[who] {
			delete(m.holds, who)
			delete(m.dead, who)
			if has {
				m.ended[who] = "released"
			}
		}
		has = has || m.ended[who] != ""
	}
	return map[bool]string{true: "yes", false: "no"}[has]
}

// Whatever comes in whatever order, the scripts do what the model says; both servers do the same.
//
//fault:any-order
func TestScriptsDoWhatTheModelSaysInAnyOrder(t *testing.T) {
	t.Parallel()
	const players = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	for _, kind := range []struct {
		name string
		fair bool
		acts []string
	}{
		{"fair", true, []string{"? waits", "? waits", "? waits", "? waits", "? tries", "? renews", "? releases", "? releases", "? releases", "? abandons", "dead ?", "del lock", "del queue", "del alive"}},
		{"semaphore", false, []string{"? takes 3", "? takes 3", "? takes 3", "? takes 3", "? takes 2", "? renews", "? releases", "? abandons", "dead ?", "del lock"}},
	} {
		t.Run(kind.name, func(t *testing.T) {
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
				seed := rand.Uint64()
				rnd := rand.New(rand.NewPCG(seed, 0))
				var told strings.Builder
				for round := range 15 {
					told.Reset()
					fmt.Fprintf(&told, "seed %d, round %d\n", seed, round)
					s := newStage(t, rdb, kind.fair)
					m := &stageModel{fair: kind.fair, alive: map[string]bool{}, dead: map[string]bool{}, holds: map[string]bool{}, ended: map[string]string{}}
					for step := range 60 {
						// Players end, so that new ones come as it goes.
						who := string(players[min(step/4+rnd.IntN(4), len(players)-1)])
						act := strings.ReplaceAll(kind.acts[rnd.IntN(len(kind.acts))], "?", who)
						want := m.act(act)
						got, err := s.act(t.Context(), act)
						fmt.Fprintf(&told, "%s -> %s\n", act, got)
						if got != want || err != nil {
							t.Fatalf("%s\nwant %s, %v", told.String(), want, err)
						}
						var there, expected string
						if kind.fair {
							there, err = s.act(t.Context(), "queue")
							expected = strings.Join(m.queue, " ")
						} else {
							there, err = s.act(t.Context(), "holders")
							var holders []string
							for h := range m.holds {
								holders = append(holders, h)
							}
							slices.Sort(holders)
							expected = strings.Join(holders, " ")
						}
						if there != expected || err != nil {
							t.Fatalf("%s\nthere are %s, want %s, %v", told.String(), there, expected, err)
						}
					}
				}
			})
		})
	}
}
