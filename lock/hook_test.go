package lock_test

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
)

// faults is a hook of a client. A test decides with it what happens to the commands of its Lockers.
type faults struct {
	mu  sync.Mutex
	on  func(op string) fault // protected by mu; nil: none
	ops []string              // protected by mu: the scripts that were called, in order
}

// A fault happens in place of a command, which execute executes.
type fault func(ctx context.Context, execute func() error) error

func requestLost(context.Context, func() error) error { return io.ErrUnexpectedEOF }

func replyLost(_ context.Context, execute func() error) error {
	_ = execute()
	return io.ErrUnexpectedEOF
}

func silence(ctx context.Context, _ func() error) error { <-ctx.Done(); return ctx.Err() }

// slow delays the reply.
func slow(d time.Duration) fault {
	return func(_ context.Context, execute func() error) error {
		err := execute()
		time.Sleep(d)
		return err
	}
}

func refusal(text string) fault {
	return func(context.Context, func() error) error { return replyError(text) }
}

func noConnection(context.Context, func() error) error {
	return &net.OpError{Op: "dial", Err: errors.New("refused")}
}

func lostSilently(ctx context.Context, execute func() error) error {
	_ = execute()
	<-ctx.Done()
	return ctx.Err()
}

// A replyError is the answer of a server.
type replyError string

func (e replyError) Error() string { return string(e) }

func (e replyError) RedisError() {}

// withFaults returns another client, as another process would have.
func withFaults(t testing.TB, m *miniredis.Miniredis) (*redis.Client, *faults) {
	rdb, f := redistest.NewMiniClient(t, m), new(faults)
	rdb.AddHook(f)
	return rdb, f
}

// ringWithFaults returns another client of a server, through which each command goes alone.
func ringWithFaults(t testing.TB, rdb *redis.Client, connections int) (*redis.Ring, *faults) {
	ring := redis.NewRing(&redis.RingOptions{
		Addrs: map[string]string{"a": rdb.Options().Addr}, Dialer: rdb.Options().Dialer, PoolSize: connections,
		DisableIdentity: true, HeartbeatFrequency: time.Hour, NewClient: func(o *redis.Options) *redis.Client {
			o.MaintNotificationsConfig = rdb.Options().MaintNotificationsConfig
			return redis.NewClient(o)
		},
	})
	t.Cleanup(func() { _ = ring.Close() })
	f := new(faults)
	ring.AddHook(f)
	return ring, f
}

// set makes the commands of the ops, or all commands, meet a fault until the next set. nil is none.
func (f *faults) set(what fault, ops ...string) {
	f.decide(func(op string) fault {
		if len(ops) > 0 && !slices.Contains(ops, op) {
			return nil
		}
		return what
	})
}

// decide makes the commands of each op meet the fault that on returns. nil is none.
func (f *faults) decide(on func(op string) fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.on = on
}

// take returns the ops since the last take.
func (f *faults) take() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer func() { f.ops = nil }()
	return strings.Join(f.ops, " ")
}

// opOfText and opOfHash have the op of each script, by its text and by its hash.
var opOfText, opOfHash = func() (byText, byHash map[string]string) {
	byText, byHash = make(map[string]string), make(map[string]string)
	for file, text := range locktest.Scripts() {
		_, op, _ := strings.Cut(strings.TrimSuffix(file, ".lua"), "_")
		byText[text], byHash[redis.NewScript(text).Hash()] = op, op
	}
	return byText, byHash
}()

func (f *faults) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessPipelineHook treats commands that are sent together like commands that are sent at the same
// moment.
func (f *faults) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	alone := f.ProcessHook(func(ctx context.Context, cmd redis.Cmder) error { return next(ctx, []redis.Cmder{cmd}) })
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if name := cmds[0].Name(); name != "evalsha" && name != "eval" {
			return next(ctx, cmds)
		}
		var wg sync.WaitGroup
		for _, cmd := range cmds {
			wg.Go(func() { _ = alone(ctx, cmd) }) // cmd has the error
		}
		wg.Wait()
		return nil
	}
}

func (f *faults) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		op := cmd.Name()
		switch op {
		case "evalsha":
			op = opOfHash[cmd.Args()[1].(string)]
		case "eval":
			op = opOfText[cmd.Args()[1].(string)]
		}
		f.mu.Lock()
		var what fault
		if f.on != nil {
			what = f.on(op)
		}
		if op != "hello" && cmd.Name() != "eval" {
			f.ops = append(f.ops, op)
		}
		f.mu.Unlock()
		if what == nil {
			return next(ctx, cmd)
		}
		err := what(ctx, func() error { return next(ctx, cmd) })
		cmd.SetErr(err)
		return err
	}
}

// A command is a call of a script that a server has got.
type command struct {
	at   time.Time
	args []string // without the keys
}

// commands records the scripts that a server gets.
type commands struct {
	mu   sync.Mutex
	list []command     // protected by mu
	slow time.Duration // protected by mu

	muted bool // subscriptions are refused
}

// recordMuted is record, and refuses subscriptions, so that waiters only poll.
func recordMuted(m *miniredis.Miniredis) *commands {
	c := record(m)
	c.muted = true
	return c
}

// record begins to record. Call it before the server gets any command.
func record(m *miniredis.Miniredis) *commands {
	c := new(commands)
	m.Server().SetPreHook(func(p *server.Peer, cmd string, args ...string) bool {
		if cmd != "EVALSHA" && cmd != "EVAL" {
			return c.muted && redistest.Muted(p, cmd)
		}
		c.mu.Lock()
		slow := c.slow
		keys, _ := strconv.Atoi(args[1])
		c.list = append(c.list, command{time.Now(), slices.Clone(args[2+keys:])})
		c.mu.Unlock()
		time.Sleep(slow)
		return false
	})
	return c
}

func (c *commands) delay(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.slow = d
}

// reset forgets the scripts so far.
func (c *commands) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = nil
}

func (c *commands) all() []command {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.list)
}

// token returns a token as long as the token of an attempt.
func token(who string) string { return strings.Repeat(who, 26) }

// takeFor takes the lock for a process that dies at once.
func takeFor(t testing.TB, rdb *redis.Client, kind, name string) {
	t.Helper()
	mortal := redis.NewClient(rdb.Options())
	mustAcquire(t, newLocker(t, kind, mortal, name, nil))
	_ = mortal.Close()
}

// learn makes the server know all scripts, so that each later step is one command.
func learn(t testing.TB, rdb *redis.Client) {
	t.Helper()
	for text := range opOfText {
		redistest.Must(t, rdb.ScriptLoad(t.Context(), text).Err())
	}
}
