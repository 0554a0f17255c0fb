package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// costs are the times that the server and the network need.
type costs struct {
	script time.Duration // of the server, for a script
	plain  time.Duration // of the server, for any other command
	trip   time.Duration // of the network, for the way there and back
}

func (c costs) of(cmd redis.Cmder) time.Duration {
	if strings.HasPrefix(cmd.Name(), "eval") {
		return c.script
	}
	return c.plain
}

// usual are the costs that measure found on a common machine, for tests that do not measure.
var usual = costs{script: 12 * time.Microsecond, plain: 4 * time.Microsecond, trip: 200 * time.Microsecond}

// measure measures the costs of a real server: its main thread's time to read, execute and answer
// one command. It does not measure the network.
func measure(t *testing.T, commands int) costs {
	const conns = 50
	s := redistest.Start(t)
	rdb := s.Client(t, func(o *redis.Options) { o.PoolSize = conns })
	c := client.New(rdb, time.Minute, func(_ context.Context, op string, err error) { t.Errorf("%s: %v", op, err) },
		nil, nil)
	ask := func() *fill.Lock {
		return fill.New(c, fill.Pair{Value: "fleet:{k}", Lock: "fleet:{k}:lock"}, time.Hour)
	}
	get := func(l *fill.Lock, want string) {
		if r, err := l.GetOrLock(t.Context(), time.Minute, fill.Query{Take: true}); err != nil || r.Status != want {
			t.Errorf("answered %+v, %v, want %s", r, err, want)
		}
	}
	get(ask(), fill.Locked)
	each := func(do func()) time.Duration {
		before := mainThread(t, s)
		var wg sync.WaitGroup
		for range conns {
			wg.Go(func() {
				for range commands / conns {
					do()
				}
			})
		}
		wg.Wait()
		return (mainThread(t, s) - before) / time.Duration(commands)
	}
	found := usual
	found.script = each(func() { get(ask(), fill.Busy) })
	found.plain = each(func() { rdb.Get(t.Context(), "fleet:{k}") })
	return found
}

// mainThread returns how long the thread that executes commands has run.
func mainThread(t *testing.T, s *redistest.Server) (ran time.Duration) {
	for line := range strings.Lines(s.Admin().Info(t.Context(), "cpu").Val()) {
		name, seconds, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_sys_main_thread" || name == "used_cpu_user_main_thread" {
			d, err := time.ParseDuration(seconds + "s")
			if err != nil {
				t.Fatal(err)
			}
			ran += d
		}
	}
	if ran == 0 {
		t.Fatal("this server does not tell its main thread's time")
	}
	return ran
}

// A server executes one command after the other, in the order of their arrival. A miniredis
// computes the replies; the server decides when they are sent.
type server struct {
	costs
	redis *redis.Client // of the miniredis

	mu   sync.Mutex
	free time.Time // when all commands that have arrived will have been executed
	load           // since the last take
}

// A load is the work that a server was given.
type load struct {
	commands int
	arrivals map[int64]int // by the number of the window
	queued   time.Duration // by the command that queued for longest
}

const window = 100 * time.Millisecond

// take returns the load since the last take.
func (s *server) take() load {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.load
	s.load = load{arrivals: make(map[int64]int)}
	return l
}

// do sends a command and returns with its reply, or when ctx ends. A command that was sent is
// executed in any case.
func (s *server) do(ctx context.Context, cmd redis.Cmder) error {
	done := s.enqueue(s.of(cmd))
	if !sleep(ctx, time.Until(done)) {
		late := redis.NewCmd(context.Background(), cmd.Args()...)
		time.AfterFunc(time.Until(done), func() { _ = s.redis.Process(context.Background(), late) })
		return ctx.Err()
	}
	err := s.redis.Process(context.Background(), cmd)
	if !sleep(ctx, s.trip/2) {
		return ctx.Err()
	}
	return err
}

// enqueue returns when a command that is sent now will have been executed.
func (s *server) enqueue(cost time.Duration) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	arrival := time.Now().Add(s.trip / 2)
	s.commands++
	s.arrivals[arrival.UnixNano()/int64(window)]++
	if s.free.Before(arrival) {
		s.free = arrival
	}
	s.queued = max(s.queued, s.free.Sub(arrival))
	s.free = s.free.Add(cost)
	return s.free
}

func sleep(ctx context.Context, d time.Duration) (whole bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// A link is one process' way to the server: everything that its client does. The commands of a dead
// process are lost.
type link struct {
	*server
	dead atomic.Bool
}

func (l *link) client() *redis.Client {
	c := redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:6379", PoolSize: 1, ContextTimeoutEnabled: true, MaxRetries: -1, DisableIdentity: true,
		Dialer:                   func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("nobody listens") },
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	c.AddHook(l)
	return c
}

func (l *link) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		var err error
		if l.dead.Load() {
			<-ctx.Done()
			err = ctx.Err()
		} else {
			err = l.do(ctx, cmd)
		}
		cmd.SetErr(err)
		return err
	}
}

func (l *link) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(_ context.Context, cmds []redis.Cmder) error {
		return fmt.Errorf("%d commands in a pipeline", len(cmds))
	}
}

func (l *link) DialHook(next redis.DialHook) redis.DialHook { return next }
