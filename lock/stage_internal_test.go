package lock

import (
	"context"
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

// A stage is one name on a server, and players that send single commands for it. A line of a play
// is an act and, behind an arrow, its outcome:
//
//	A waits -> busy 2     a player asks for the lock, and queues if it is busy; 2 waiters are ahead
//	A tries, A renews, A releases, A abandons
//	A takes 3 -> held     of a semaphore of size 3
//	A shares 3 -> held    of one whose largest size counts
//	queue -> A B          what there is: queue, alive, holder, holders, details, keys, mark A
//	lives A -> 60         the seconds for which a waiter, or a holder of a semaphore, counts as alive
//	ttl queue -> 120      the life of a key; up to 15 s less will do
//	dead A, del queue     the life of a waiter or holder is over; a key is lost
//	future fence          the last fence is from the future
//	past size             no process has used the size for the life of a lease
//	place A               a player gets a place at the head of the queue
//	list queue, immortal lock, text fence     a key holds foreign data
//
// A grant is held, with a fence above all before, or same, with the fence that the player has
// already. Players with small letters have short lives.
type stage struct {
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

func newStage(t testing.TB, rdb redis.UniversalClient, fair bool) *stage {
	name := redistest.Namespace(t)
	return &stage{rdb: rdb, name: name, fair: fair, keys: keysOf(name), fences: make(map[string]int64)}
}

func stageToken(who string) string { return strings.Repeat(who, 26) }

func (s *stage) locker(who string, size int) *Locker {
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

func (s *stage) key(name string) string {
	return map[string]string{
		"lock": s.keys.lock, "fence": s.keys.fence, "queue": s.keys.queue, "alive": s.keys.alive, "details": s.keys.details,
	}[name]
}

// do runs a command in a script, since one kind of client caches what it reads.
func (s *stage) do(ctx context.Context, cmd, key string, args ...any) *redis.Cmd {
	return s.rdb.Eval(ctx, `return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))`, []string{key}, append([]any{cmd}, args...)...)
}

// members returns the players in a sorted set, in order.
func (s *stage) members(ctx context.Context, key string) (string, error) {
	tokens, err := s.do(ctx, "ZRANGE", key, 0, -1).StringSlice()
	for i := range tokens {
		tokens[i] = tokens[i][:1]
	}
	return strings.Join(tokens, " "), err
}

// act carries out one act, and returns its outcome.
func (s *stage) act(ctx context.Context, act string) (string, error) {
	f := append(strings.Fields(act), "")
	verb, what := f[0], f[1]
	if outcome, ok, err := s.look(ctx, verb, what); ok {
		return outcome, err
	}
	if ok, err := s.change(ctx, verb, what); ok {
		return "", err
	}
	return s.play(ctx, verb, what, f[2:])
}

// look returns what there is.
func (s *stage) look(ctx context.Context, verb, what string) (outcome string, ok bool, err error) {
	switch verb {
	case "queue":
		outcome, err = s.members(ctx, s.keys.queue)
	case "alive", "holders":
		key := map[string]string{"alive": s.keys.alive, "holders": s.keys.lock}[verb]
		var members string
		members, err = s.members(ctx, key)
		outcome = sorted(strings.Fields(members))
	case "details":
		var fields, names []string
		fields, err = s.do(ctx, "HKEYS", s.keys.details).StringSlice()
		for _, f := range fields {
			if f != "size" && f != "sizeUntil" {
				names = append(names, f[:1])
			}
		}
		outcome = sorted(names)
	case "holder":
		if outcome, err = s.do(ctx, "GET", s.keys.lock).Text(); err == nil {
			outcome = outcome[:1]
		} else if errors.Is(err, redis.Nil) {
			err = nil
		}
	case "mark":
		outcome = "there"
		if err = s.do(ctx, "ZSCORE", s.keys.ended, stageToken(what)).Err(); errors.Is(err, redis.Nil) {
			outcome, err = "none", nil
		}
	case "keys":
		outcome, err = s.existing(ctx)
	case "lives":
		var score float64
		score, err = s.do(ctx, "ZSCORE", s.livesKey(), stageToken(what)).Float64()
		micros, timeErr := s.serverMicros(ctx)
		outcome, err = about(int64(score)-micros/1000), errors.Join(err, timeErr)
	case "ttl":
		var ms int64
		ms, err = s.do(ctx, "PTTL", s.key(what)).Int64()
		outcome = about(ms)
	default:
		return "", false, nil
	}
	return outcome, true, err
}

func sorted(names []string) string {
	slices.Sort(names)
	return strings.Join(names, " ")
}

// existing returns the names of the keys that exist.
func (s *stage) existing(ctx context.Context) (string, error) {
	var names []string
	for _, name := range []string{"lock", "queue", "alive", "details"} {
		n, err := s.do(ctx, "EXISTS", s.key(name)).Int()
		if err != nil {
			return "", err
		}
		if n == 1 {
			names = append(names, name)
		}
	}
	return strings.Join(names, " "), nil
}

// livesKey returns the key that has the lives of waiters, or of the holders of a semaphore.
func (s *stage) livesKey() string {
	if s.fair {
		return s.keys.alive
	}
	return s.keys.lock
}

// change changes what there is.
func (s *stage) change(ctx context.Context, verb, what string) (ok bool, err error) {
	key, life := s.key(what), stageLife.Milliseconds()
	switch verb {
	case "dead":
		err = s.do(ctx, "ZADD", s.livesKey(), "XX", 1, stageToken(what)).Err()
	case "place":
		err = errors.Join(s.do(ctx, "ZADD", s.keys.queue, 0, stageToken(what)).Err(), s.do(ctx, "ZADD", s.keys.alive, 1e15, stageToken(what)).Err())
	case "future":
		var micros int64
		micros, err = s.serverMicros(ctx)
		s.top = micros + 1_000_000_000
		err = errors.Join(err, s.do(ctx, "SET", key, s.top, "PX", life).Err())
	case "past":
		err = s.do(ctx, "HSET", s.keys.details, "sizeUntil", 1).Err()
	case "del":
		err = s.do(ctx, "DEL", key).Err()
	case "list":
		err = errors.Join(s.do(ctx, "DEL", key).Err(), s.do(ctx, "RPUSH", key, "x").Err(), s.do(ctx, "PEXPIRE", key, life).Err())
	case "immortal":
		err = errors.Join(s.do(ctx, "DEL", key).Err(), s.do(ctx, "SET", key, strings.Repeat("foreign data", 3)).Err())
	case "text":
		err = errors.Join(s.do(ctx, "DEL", key).Err(), s.do(ctx, "SET", key, "foreign data", "PX", life).Err())
	default:
		return false, nil
	}
	return true, err
}

func (s *stage) serverMicros(ctx context.Context) (int64, error) {
	now, err := s.rdb.Eval(ctx, `return redis.call('TIME')`, []string{s.keys.lock}).StringSlice()
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(now[0]+fmt.Sprintf("%06s", now[1]), 10, 64)
}

// about rounds up to a multiple of 15 s, and returns it in seconds.
func about(ms int64) string {
	return fmt.Sprint((ms + 14_999) / 15_000 * 15)
}

// play has a player send a command.
func (s *stage) play(ctx context.Context, who, verb string, args []string) (string, error) {
	size := 0
	if len(args) > 0 {
		size, _ = strconv.Atoi(args[0])
	}
	l := s.locker(who, size)
	token := stageToken(who)
	within := l.opts.RedisTimeout
	switch verb {
	case "waits", "tries", "takes", "shares":
		if verb == "shares" {
			l.kind = semaphore{size: size, largest: true}
		}
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

func (s *stage) yes(op string, ok bool, err error) (string, error) {
	if err != nil {
		return s.conflict(op, err)
	}
	return map[bool]string{true: "yes", false: "no"}[ok], nil
}

// conflict turns an error about a foreign key into an outcome.
func (s *stage) conflict(op string, err error) (string, error) {
	if err := explain(op, s.name, err); strings.Contains(err.Error(), "its key holds something else") && !errors.Is(err, ErrUnavailable) {
		return "conflict", nil
	}
	return "", err
}

// run runs a play.
func (s *stage) run(t *testing.T, play string) {
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

// runPlays runs plays on every kind of client.
func runPlays(t *testing.T, fair bool, plays map[string]string) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for name, play := range plays {
			t.Run(name, func(t *testing.T) { newStage(t, rdb, fair).run(t, play) })
		}
	})
}
