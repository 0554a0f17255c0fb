package lock

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A stage is one name on a server, and players that send single commands for it. A play is acts with
// their outcomes behind arrows, between semicolons:
//
//	A takes -> held       a player tries once
//	A waits -> busy 2     a player asks for a fair mutex, and queues if it is busy; 2 waiters are ahead
//	A tries -> busy 2     the same without a place in the queue
//	A brings B -> busy 1  a player takes places for itself and for B, whose life stays as it is
//	A takes 3 -> held     of a semaphore of size 3; it is 1 if there is no number
//	A renews, A releases, A abandons; of a semaphore with a size behind it
//	queue -> A B          what there is: queue, alive, holder, holders, details, keys, mark A
//	lives A -> 60         the seconds for which the process of a waiter, or a holder of a semaphore, counts as alive
//	ttl queue -> 120      the life of a key; up to 15 s less will do
//	size -> 60            the seconds for which the size of a semaphore counts
//	dead A, del queue     the life of a waiter or holder is over; a key is lost
//	future fence          the last fence is from the future
//	past size             no process has used the size for the life of a lease
//	place A               a player gets a place at the head of the queue
//	list queue, text fence     a key holds foreign data
//
// A grant is held, with a fence above all before, or same, with the fence that the player has
// already. Players with small letters have short lives.
type stage struct {
	t      testing.TB
	rdb    redis.UniversalClient
	name   string
	kind   string // as its scripts are named
	keys   keys
	fences map[string]int64
	top    int64
	again  int64 // ms after which to ask again, by the last busy answer
}

const (
	stageLife  = 60 * time.Second // far longer than any play
	stageShort = 30 * time.Second

	stageTimeout = 9 * time.Second
)

func newStage(t testing.TB, rdb redis.UniversalClient, kind string) *stage {
	name := redistest.Namespace(t)
	return &stage{t: t, rdb: rdb, name: name, kind: kind, keys: keysOf(name), fences: make(map[string]int64)}
}

func stageToken(who string) string { return strings.Repeat(who, 26) }

// owner returns the player as the scripts know it.
func (s *stage) owner(who string, size int) *owner {
	opts := &Options{TTL: stageLife, WaiterTTL: stageLife, RedisTimeout: stageTimeout}
	if who == strings.ToLower(who) {
		opts.TTL, opts.WaiterTTL = stageShort, stageShort
	}
	var l *Locker
	var err error
	switch s.kind {
	case "mutex":
		l, err = NewMutex(s.rdb, s.name, opts)
	case "fair":
		l, err = NewFairMutex(s.rdb, s.name, opts)
	case "semaphore":
		l, err = NewSemaphore(s.rdb, s.name, max(size, 1), opts)
	}
	redistest.Must(s.t, err)
	return &owner{target: &l.target, token: stageToken(who)}
}

// key returns the key that has a name in plays.
func (s *stage) key(name string) string {
	return map[string]string{
		"lock": s.keys.lock, "fence": s.keys.fence, "queue": s.keys.queue, "alive": s.keys.alive,
		"details": s.keys.details,
	}[name]
}

// livesKey returns the key that has the lives of waiters, or of the holders of a semaphore.
func (s *stage) livesKey() string {
	if s.kind == "fair" {
		return s.keys.alive
	}
	return s.keys.lock
}

// livesAs returns the name of a player in that key. Each player is the only waiter of its process.
func (s *stage) livesAs(who string) string {
	if s.kind == "fair" {
		return stageToken(who)[:idLen]
	}
	return stageToken(who)
}

// do runs a command in a script, since one kind of client caches what it reads. There may be no reply.
func (s *stage) do(cmd, key string, args ...any) *redis.Cmd {
	s.t.Helper()
	reply := s.rdb.Eval(s.t.Context(), `return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))`, []string{key},
		append([]any{cmd}, args...)...)
	if err := reply.Err(); !errors.Is(err, redis.Nil) {
		redistest.Must(s.t, err)
	}
	return reply
}

// act carries out one act, and returns its outcome.
func (s *stage) act(act string) string {
	s.t.Helper()
	f := append(strings.Fields(act), "")
	if outcome, ok := s.look(f[0], f[1]); ok {
		return outcome
	}
	if s.change(f[0], f[1]) {
		return ""
	}
	if f[1] == "brings" {
		return s.play(f[0], f[1], 0, stageToken(f[2]))
	}
	size, _ := strconv.Atoi(f[2])
	return s.play(f[0], f[1], size)
}

// look returns what there is.
func (s *stage) look(verb, what string) (outcome string, ok bool) {
	s.t.Helper()
	switch verb {
	case "queue":
		return strings.Join(s.players("ZRANGE", s.keys.queue, 0, -1), " "), true
	case "alive", "holders":
		return sorted(s.players("ZRANGE", s.livesKey(), 0, -1)), true
	case "details":
		return sorted(s.players("HKEYS", s.keys.details)), true
	case "holder":
		token, _ := s.do("GET", s.keys.lock).Text()
		return token[:min(1, len(token))], true
	case "mark":
		if errors.Is(s.do("ZSCORE", s.keys.ended, stageToken(what)).Err(), redis.Nil) {
			return "none", true
		}
		return "there", true
	case "keys":
		var names []string
		for _, name := range []string{"lock", "queue", "alive", "details"} {
			if n, _ := s.do("EXISTS", s.key(name)).Int(); n == 1 {
				names = append(names, name)
			}
		}
		return strings.Join(names, " "), true
	case "lives":
		end, _ := s.do("ZSCORE", s.livesKey(), s.livesAs(what)).Float64()
		return about(int64(end) - s.serverMicros()/1000), true
	case "size":
		end, _ := s.do("HGET", s.keys.details, "sizeUntil").Int64()
		return about(end - s.serverMicros()/1000), true
	case "ttl":
		ms, _ := s.do("PTTL", s.key(what)).Int64()
		return about(ms), true
	}
	return "", false
}

// players returns the players whose tokens a command returns.
func (s *stage) players(cmd, key string, args ...any) (names []string) {
	tokens, _ := s.do(cmd, key, args...).StringSlice()
	for _, token := range tokens {
		if token != "size" && token != "sizeUntil" { // of details
			names = append(names, token[:1])
		}
	}
	return names
}

func sorted(names []string) string {
	slices.Sort(names)
	return strings.Join(names, " ")
}

func (s *stage) serverMicros() int64 {
	now, err := s.rdb.Eval(s.t.Context(), `return redis.call('TIME')`, []string{s.keys.lock}).StringSlice()
	redistest.Must(s.t, err)
	micros, err := strconv.ParseInt(now[0]+fmt.Sprintf("%06s", now[1]), 10, 64)
	redistest.Must(s.t, err)
	return micros
}

// about rounds up to a multiple of 15 s, and returns it in seconds.
func about(ms int64) string { return fmt.Sprint((ms + 14_999) / 15_000 * 15) }

// change changes what there is.
func (s *stage) change(verb, what string) (ok bool) {
	s.t.Helper()
	key, life := s.key(what), stageLife.Milliseconds()
	switch verb {
	case "dead":
		s.do("ZADD", s.livesKey(), "XX", 1, s.livesAs(what))
	case "place":
		s.do("ZADD", s.keys.queue, 0, stageToken(what))
		s.do("ZADD", s.keys.alive, 1e15, s.livesAs(what))
	case "future":
		s.top = s.serverMicros() + 1_000_000_000
		s.do("SET", key, s.top, "PX", life)
	case "past":
		s.do("HSET", s.keys.details, "sizeUntil", 1)
	case "del":
		s.do("DEL", key)
	case "list":
		s.do("DEL", key)
		s.do("RPUSH", key, "x")
		s.do("PEXPIRE", key, life)
	case "text":
		s.do("SET", key, "foreign data", "PX", life)
	default:
		return false
	}
	return true
}

// play has a player send a command.
func (s *stage) play(who, verb string, size int, others ...string) string {
	o := s.owner(who, size)
	ctx, within := s.t.Context(), o.opts.RedisTimeout
	var ok bool
	var err error
	switch verb {
	case "waits", "tries", "takes", "brings":
		r, err := o.kind.acquire(ctx, o, within, request{enqueue: verb == "waits" || verb == "brings", others: others})
		s.again = r.number
		switch {
		case err != nil:
			return s.failed("acquire", err)
		case r.state == busy && (verb == "waits" || verb == "tries" || verb == "brings"):
			return fmt.Sprint("busy ", r.ahead)
		case r.state == busy && (r.number <= 0 || r.number > stageLife.Milliseconds()):
			return fmt.Sprintf("busy, to be asked again in %d ms", r.number)
		case r.state != held:
			return r.state
		case r.number == s.fences[who]:
			return "same"
		case r.number <= s.top:
			return fmt.Sprintf("held, with fence %d, after %d", r.number, s.top)
		}
		s.fences[who], s.top = r.number, r.number
		return held
	case "renews":
		ok, err = o.kind.renew(ctx, o, nil)
	case "releases":
		released := o.kind.release(ctx, o, within)
		ok, err = released.Value, released.Err
	case "abandons":
		ok, err = true, o.kind.abandon(ctx, o)
	default:
		panic(verb)
	}
	if err != nil {
		return s.failed(verb, err)
	}
	return map[bool]string{true: "yes", false: "no"}[ok]
}

// failed returns the outcome of a command that failed.
func (s *stage) failed(op string, err error) string {
	if err := explain(op, s.name, err); errors.Is(err, ErrConflict) {
		return "conflict"
	}
	return err.Error()
}

// run runs a play. Throughout, each key has a TTL.
func (s *stage) run(play string) {
	s.t.Helper()
	for line := range strings.SplitSeq(play, ";") {
		act, want, _ := strings.Cut(line, "->")
		if got := s.act(act); !slices.Contains(strings.Split(strings.TrimSpace(want), " or "), got) {
			s.t.Fatalf("%s: %s\nin%s", strings.TrimSpace(line), cmp.Or(got, "nothing"), play)
		}
		if key := immortal.Run(s.t.Context(), s.rdb, s.keys.names()).Val(); key != nil {
			s.t.Fatalf("%s: %q has no TTL", strings.TrimSpace(line), key)
		}
	}
}

// immortal returns a key without a TTL.
var immortal = redis.NewScript(`for _, key in ipairs(KEYS) do if redis.call('PTTL', key) == -1 then return key end end`)

// runPlays runs plays on every kind of client.
func runPlays(t *testing.T, kind string, plays map[string]string) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for name, play := range plays {
			t.Run(name, func(t *testing.T) { newStage(t, rdb, kind).run(play) })
		}
	})
}

// Every step of every kind may be repeated, may arrive late, and may find what others have left.
//
//fault:any-order
//fault:repeated-command
func TestScripts_RepeatedAndLate(t *testing.T) {
	t.Parallel()
	for name, play := range sharedPlays {
		t.Run(name, func(t *testing.T) {
			for _, kind := range []string{"mutex", "fair", "semaphore"} {
				t.Run(kind, func(t *testing.T) {
					_, mini := redistest.StartMini(t)
					for _, rdb := range []redis.UniversalClient{mini, redistest.Shared(t).Client(t)} {
						newStage(t, rdb, kind).run(play)
					}
				})
			}
		})
	}
}

var sharedPlays = map[string]string{
	"taken twice": `
		A takes -> held; A takes -> same; A takes -> same; B takes -> busy`,
	"released twice, and by others": `
		A takes -> held; B releases -> no; B renews -> no; A releases -> yes; A releases -> yes; A renews -> no;
		B releases -> no`,
	"taken again after a release": `
		A takes -> held; A releases -> yes; A takes -> refused; B takes -> held; A takes -> refused;
		A releases -> yes; A renews -> no; B renews -> yes`,
	"abandoned before it arrived": `
		A abandons -> yes; A takes -> refused; A renews -> no; B takes -> held; A takes -> refused;
		A abandons -> yes; B renews -> yes`,
	"renewed and never brought back": `
		A renews -> no; B takes -> held; A renews -> no; B releases -> yes; B renews -> no; A takes -> held;
		A renews -> yes; A renews -> yes; del lock; A renews -> no; A releases -> no; C takes -> held`,
	"a fence for each grant, and no more": `
		A takes -> held; ttl fence -> 86400; B takes -> busy; B takes -> busy; A renews -> yes; A takes -> same;
		A releases -> yes; B takes -> held; B takes -> same`,
	"the fence is lost, and its holder still holds the lock": `
		A takes -> held; del fence; A takes -> held or same; A takes -> same; B takes -> busy; A releases -> yes;
		del fence; C takes -> held`,
	"the server's clock was put back": `
		future fence; A takes -> held; A releases -> yes; B takes -> held; ttl fence -> 86400`,
	"a foreign text for a fence": `text fence; A takes -> conflict; keys ->`,
}

// The scripts of a fair mutex do what they should, whatever they find.
func TestFairScripts(t *testing.T) { runPlays(t, "fair", fairPlays) }

var fairPlays = map[string]string{
	"a free lock is granted once": `
		A waits -> held; A waits -> same; queue ->; B tries -> busy 0; keys -> lock; ttl lock -> 60`,
	"the order is that of arrival": `
		Z waits -> held; M waits -> busy 0; C waits -> busy 1; X waits -> busy 2; A waits -> busy 3;
		X waits -> busy 2; C waits -> busy 1; queue -> M C X A; alive -> A C M X; Z releases -> yes;
		A waits -> busy 3; X tries -> busy 2; M waits -> held; queue -> C X A; M releases -> yes;
		C waits -> held; C releases -> yes; X waits -> held; X releases -> yes; A waits -> held;
		A releases -> yes; keys ->`,
	"a try does not queue, and overtakes no waiter": `
		A waits -> held; B tries -> busy 0; C waits -> busy 0; B tries -> busy 1; queue -> C; A releases -> yes;
		B tries -> busy 1; B waits -> busy 1; C waits -> held; queue -> B`,
	"a place that is left over from the holder goes": `
		A waits -> held; B waits -> busy 0; place A; queue -> A B; A waits -> same; queue -> B; alive -> A B;
		A releases -> yes; B waits -> held`,
	"dead waiters are skipped together": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; D waits -> busy 2; E waits -> busy 3; dead B;
		dead C; dead D; A releases -> yes; E waits -> held; keys -> lock`,
	"each process has its own life": `
		A waits -> held; B waits -> busy 0; c waits -> busy 1; lives B -> 60; lives c -> 30; B waits -> busy 0;
		c waits -> busy 1; lives B -> 60; lives c -> 30`,
	"a short life does not shorten those of the keys": `
		A waits -> held; B waits -> busy 0; ttl queue -> 120; ttl alive -> 120; c waits -> busy 1;
		c waits -> busy 1; d waits -> busy 2; ttl queue -> 120; ttl alive -> 120`,
	"the keys live for twice the life of a process": `
		A waits -> held; b waits -> busy 0; ttl queue -> 60; ttl alive -> 60; B waits -> busy 1;
		ttl queue -> 120; ttl alive -> 120`,
	"a waiter that asks prolongs the life of its process only": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; dead C; B waits -> busy 0; queue -> B;
		B tries -> busy 0; lives B -> 60`,
	"an abandoned attempt leaves the queue for good": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; B abandons -> yes; mark B -> there; queue -> C;
		alive -> B C; B waits -> refused; B tries -> refused; queue -> C; A releases -> yes; C waits -> held;
		C releases -> yes; keys ->`,
	"an attempt takes places for others": `
		A waits -> held; B brings C -> busy 0; C waits -> busy 1; B brings C -> busy 0; queue -> B C;
		B brings D -> busy 0; queue -> B C D`,
	"an attempt that gets the lock takes places for others": `
		A brings B -> held; queue -> B; keys -> lock queue alive; B waits -> busy 0; A releases -> yes;
		C brings D -> busy 1; D waits -> busy 2; queue -> B C D; B waits -> held; B releases -> yes; C brings E -> held; queue -> D E`,
	"an abandoned attempt gets no place from another one": `
		A waits -> held; B abandons -> yes; C brings B -> busy 0; queue -> C; A releases -> yes; D abandons -> yes;
		C brings D -> held; queue ->`,
	"an abandoned attempt gives back its grant": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; A releases -> yes; B waits -> held;
		B abandons -> yes; holder ->; queue -> C; B waits -> refused; C waits -> held`,
	"waiters without a life queue again": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; D waits -> busy 2; del alive; C waits -> busy 0;
		queue -> C; B waits -> busy 1; D waits -> busy 2; queue -> C B D; alive -> B C D; ttl alive -> 120;
		A releases -> yes; C waits -> held; C releases -> yes; B waits -> held; B releases -> yes;
		D waits -> held; keys -> lock`,

	"a lock that is a list is a conflict, and changes nothing": `
		A waits -> held; B waits -> busy 0; list lock; B waits -> conflict; C waits -> conflict;
		C tries -> conflict; A renews -> conflict; A releases -> conflict; queue -> B`,
	"a foreign text with a TTL is waited for": `text lock; A tries -> busy 0; A waits -> busy 0`,
	"an abandon leaves the queue though the lock is a list": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; list lock; B waits -> conflict; B abandons -> yes;
		queue -> C; alive -> B C; C abandons -> yes; keys -> lock`,
	"an abandon gives back a grant though the queue is a list": `
		A waits -> held; list queue; A abandons -> yes; holder ->`,
}

// The scripts of a semaphore do what they should, whatever they find.
//
//fault:disagreement
func TestSemaphoreScripts(t *testing.T) { runPlays(t, "semaphore", semaphorePlays) }

var semaphorePlays = map[string]string{
	"as many as the size, and no more": `
		A takes 3 -> held; B takes 3 -> held; C takes 3 -> held; D takes 3 -> busy; holders -> A B C;
		B releases -> yes; D takes 3 -> held; holders -> A C D; details -> A C D; B releases -> yes;
		holders -> A C D`,
	"dead holders are replaced together": `
		A takes 2 -> held; B takes 2 -> held; dead A; dead B; C takes 2 -> held; D takes 2 -> held;
		E takes 2 -> busy; holders -> C D; details -> C D; A renews -> no; B renews -> no; A releases -> no;
		holders -> C D`,
	"nothing is left of a dead holder beside living ones": `
		A takes 2 -> held; B takes 2 -> held; dead A; C takes 2 -> held; holders -> B C; details -> B C`,
	"each holder has its own life": `
		A takes 3 -> held; b takes 3 -> held; lives A -> 60; lives b -> 30; b renews -> yes; A renews -> yes;
		lives A -> 60; lives b -> 30`,
	"a short life does not shorten that of the keys": `
		A takes 3 -> held; ttl lock -> 120; b takes 3 -> held; b renews -> yes; ttl lock -> 120; ttl details -> 120;
		A releases -> yes; b renews -> yes; ttl lock -> 90; ttl details -> 90`,
	"keys are gone with the last holder": `
		A takes 2 -> held; B takes 2 -> held; A releases -> yes; keys -> lock details; C takes 2 -> held;
		C abandons -> yes; details -> B; B abandons -> yes; keys ->`,
	"the largest size counts, whichever came first": `
		A takes 2 -> held; B takes 3 -> held; C takes 2 -> held; D takes 2 -> busy; D takes 3 -> busy;
		holders -> A B C; details -> A B C; A takes 2 -> same; A releases -> yes; D takes 2 -> held;
		holders -> B C D`,
	"the largest size counts for as long as a process uses it": `
		A takes 3 -> held; B takes 2 -> held; C takes 2 -> held; past size; C releases -> yes;
		D takes 2 -> busy; A releases -> yes; D takes 2 -> held; E takes 2 -> busy; E takes 3 -> held;
		F takes 2 -> busy; holders -> B D E`,
	"a process that renews a lease uses its size": `
		A takes 3 -> held; B takes 2 -> held; size -> 60; past size; B renews 2 -> yes; C takes 2 -> busy;
		A renews 3 -> yes; size -> 60; C takes 2 -> held; D takes 2 -> busy; holders -> A B C`,
	"a renewal brings back a size that a smaller one has replaced": `
		A takes 3 -> held; past size; B takes 2 -> held; C takes 2 -> busy; A renews 3 -> yes; C takes 2 -> held;
		past size; A releases -> yes; B renews 2 -> yes; D takes 2 -> busy; C releases -> yes; D takes 2 -> held`,
	"a lease that has ended brings back no size": `
		A takes 3 -> held; B takes 2 -> held; past size; dead A; A renews 3 -> no; C takes 2 -> held;
		D takes 2 -> busy; holders -> B C`,
	"a size is gone with the last holder": `
		A takes 3 -> held; A releases -> yes; B takes 2 -> held; C takes 2 -> held; D takes 2 -> busy`,
	"lost details cost no place, and give none": `
		A takes 2 -> held; B takes 2 -> held; del details; C takes 2 -> busy; A renews -> yes; A releases -> yes;
		C takes 2 -> held; D takes 2 -> busy; holders -> B C`,
	"without details a holder gets a larger fence": `
		A takes 2 -> held; B takes 2 -> held; del details; A takes 2 -> held; A takes 2 -> same; holders -> A B`,
	"an abandoned attempt gives back its place for good": `
		A takes 1 -> held; A abandons -> yes; mark A -> there; keys ->; A takes 1 -> refused; B abandons -> yes;
		B takes 1 -> refused; C takes 1 -> held; A abandons -> yes; holders -> C`,

	"holders that are a list are a conflict, and change nothing": `
		list lock; A takes 2 -> conflict; A renews -> conflict; A releases -> conflict; A abandons -> conflict;
		keys -> lock`,
	"a mutex of the same name is a conflict": `
		text lock; A takes 2 -> conflict; A renews -> conflict; A releases -> conflict`,
	"details that are a list are a conflict with holders": `
		A takes 2 -> held; list details; B takes 2 -> conflict; A renews -> yes; holders -> A`,
	"an abandon gives back its place though the details are a list": `
		A takes 1 -> held; list details; A abandons -> conflict; holders ->`,
	"foreign details are not deleted": `list details; A takes 2 -> conflict; keys -> details`,
}
