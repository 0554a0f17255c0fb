package fleet

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/redistest"
)

// costs are the times that the server and the network need.
type costs struct {
	script time.Duration // of the server, for a script
	plain  time.Duration // of the server, for any other command
	// Of the server, for a command for the log of Near, together with the PEXPIRE that follows it: to
	// read the last record, and to append one.
	logRead, logAppend time.Duration
	logRecord          time.Duration // of the server, for each further record that is read
	// Of the server, to bring a published message to one of its listeners.
	message time.Duration
	// Of the server, to accept a connection, for the client's usual commands there, and to close it.
	connection time.Duration
	trip       time.Duration // of the network, for the way there and back
}

func (c costs) of(cmd redis.Cmder) time.Duration {
	switch name := cmd.Name(); {
	case strings.HasPrefix(name, "eval"):
		return c.script
	case name == "xrange" || name == "xrevrange":
		return c.logRead
	case name == "xadd":
		return c.logAppend
	case name == "pexpire":
		return 0
	}
	return c.plain
}

// usual are the costs that measure found on a common machine, for tests that do not measure.
var usual = costs{
	script: 12 * time.Microsecond, plain: 4 * time.Microsecond,
	message: 3 * time.Microsecond, connection: 45 * time.Microsecond,
	logRead: 8 * time.Microsecond, logAppend: 8 * time.Microsecond, logRecord: 500 * time.Nanosecond,
	trip: 200 * time.Microsecond,
}

// measure measures the costs of a real server: its main thread's time to read, execute and answer
// one command. It does not measure the network. It takes the least of several rounds, since every
// cost is higher while the machine is busy.
func measure(t *testing.T, commands int) costs {
	found := measureOnce(t, commands)
	for range 4 {
		more := measureOnce(t, commands)
		found.script, found.plain = min(found.script, more.script), min(found.plain, more.plain)
		found.message, found.connection = min(found.message, more.message), min(found.connection, more.connection)
		found.logRead, found.logAppend = min(found.logRead, more.logRead), min(found.logAppend, more.logAppend)
		found.logRecord = min(found.logRecord, more.logRecord)
	}
	return found
}

func measureOnce(t *testing.T, commands int) costs {
	const conns = 50
	s := redistest.Start(t)
	// A quarter of the connections carry scripts: with as many as that, no script joins a pipeline.
	rdb := s.Client(t, func(o *redis.Options) { o.PoolSize = 4 * conns })
	c := client.New(rdb, time.Minute, func(_ context.Context, op string, err error) { t.Errorf("%s: %v", op, err) },
		nil, nil)
	ask := func() *filllock.Lock {
		return filllock.New(c, filllock.Pair{Value: "fleet:{k}", Lock: "fleet:{k}:lock"}, time.Hour)
	}
	get := func(l *filllock.Lock, want string) {
		if r, err := l.GetOrLock(t.Context(), time.Minute, filllock.Query{Take: true}); err != nil || r.Status != want {
			t.Errorf("answered %+v, %v, want %s", r, err, want)
		}
	}
	get(ask(), filllock.Locked)
	each := func(n int, do func()) time.Duration {
		before := mainThread(t, s)
		var wg sync.WaitGroup
		for range conns {
			wg.Go(func() {
				for range n / conns {
					do()
				}
			})
		}
		wg.Wait()
		return (mainThread(t, s) - before) / time.Duration(n)
	}
	found := usual
	found.script = each(commands, func() { get(ask(), filllock.Busy) })
	found.plain = each(commands, func() { rdb.Get(t.Context(), "fleet:{k}") })
	measureLog(t, rdb, &found, func(do func()) time.Duration { return each(commands, do) })
	found.connection = each(commands/20, func() { connect(t, rdb) }) - 2*found.plain // HELLO and PING
	found.message = messages(t, s, rdb, commands/20) - found.plain/listeners
	return found
}

// measureLog measures the commands for the log of Near. Records are as internal/near writes them: of
// one key.
func measureLog(t *testing.T, rdb *redis.Client, found *costs, each func(do func()) time.Duration) {
	const log = "fleet:log"
	pipelined := func(do func(p redis.Pipeliner)) {
		_, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			do(p)
			p.PExpire(t.Context(), log, time.Minute)
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	add := &redis.XAddArgs{Stream: log, MaxLen: 4096, Approx: true, Values: []string{rand.Text(), "8 bytes."}}
	found.logAppend = each(func() { pipelined(func(p redis.Pipeliner) { p.XAdd(t.Context(), add) }) })
	const more = 50
	last := rdb.XRevRangeN(t.Context(), log, "+", "-", 1+more).Val()
	if len(last) != 1+more {
		t.Fatalf("the log has %d records", len(last))
	}
	read := func(from redis.XMessage) time.Duration {
		return each(func() { pipelined(func(p redis.Pipeliner) { p.XRangeN(t.Context(), log, from.ID, "+", 256) }) })
	}
	found.logRead = read(last[0])
	found.logRecord = max(0, read(last[more])-found.logRead) / more
}

// connect sends a PING on a new connection.
func connect(t *testing.T, rdb *redis.Client) {
	o := *rdb.Options()
	o.PoolSize = 1
	c := redis.NewClient(&o)
	if err := c.Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
	_ = c.Close()
}

const listeners = 100

// messages returns the time for each of so many messages to each of the listeners.
func messages(t *testing.T, s *redistest.Server, rdb *redis.Client, count int) time.Duration {
	var heard sync.WaitGroup
	for range listeners {
		p := rdb.SSubscribe(t.Context(), "fleet:{k}:lock")
		defer p.Close()
		if _, err := p.Receive(t.Context()); err != nil {
			t.Fatal(err)
		}
		heard.Go(func() {
			for range count / listeners {
				if _, err := p.ReceiveMessage(t.Context()); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	before := mainThread(t, s)
	for range count / listeners {
		redistest.Must(t, rdb.SPublish(t.Context(), "fleet:{k}:lock", "").Err())
	}
	heard.Wait()
	return (mainThread(t, s) - before) / time.Duration(count)
}

// mainThread returns how long the thread that executes commands has run.
func mainThread(t *testing.T, s *redistest.Server) (ran time.Duration) {
	for line := range strings.Lines(s.Admin().Info(t.Context(), "cpu").Val()) {
		name, seconds, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_sys_main_thread" || name == "used_cpu_user_main_thread" {
			d, err := time.ParseDuration(seconds + "s")
			redistest.Must(t, err)
			ran += d
		}
	}
	if ran == 0 {
		t.Fatal("this server does not tell its main thread's time")
	}
	return ran
}
