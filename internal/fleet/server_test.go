package fleet

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/proto"
	miniserver "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
)

// A server executes one command after the other, in the order of their arrival. A miniredis
// computes the replies; the server decides when they are sent.
type server struct {
	costs
	redis  *redis.Client // of the miniredis
	refuse bool          // connections of listeners: there are no wake-ups
	lose   bool          // messages

	queue     chan job
	stopped   chan struct{}
	published []string      // channels: what the command that is executed has published
	reply     time.Duration // what its reply costs beyond its usual cost
	listeners map[string][]*conn

	mu   sync.Mutex
	load // since the last take
}

// A job is something to be done for one command.
type job struct {
	arrival time.Time
	cost    time.Duration
	do      func() // takes no time
}

// A load is the work that a server was given.
type load struct {
	commands int
	messages int           // that were brought to a listener
	arrivals map[int64]int // commands by the number of the window
	queued   time.Duration // by the command that queued for longest
	busy     time.Duration // with all of it
}

const window = 100 * time.Millisecond

// newServer returns a server that computes its replies by m. It works until stopped is closed.
func newServer(c costs, m *miniredis.Miniredis, rdb *redis.Client) *server {
	s := &server{
		costs: c, redis: rdb,
		// No sender waits for room.
		queue: make(chan job, 1<<17), stopped: make(chan struct{}), listeners: make(map[string][]*conn),
	}
	m.Server().SetPreHook(func(p *miniserver.Peer, cmd string, args ...string) bool {
		if cmd != "SPUBLISH" {
			return false
		}
		s.published = append(s.published, args[0])
		p.WriteInt(len(s.listeners[args[0]]))
		return true
	})
	go s.work()
	return s
}

// take returns the load since the last take.
func (s *server) take() load {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.load
	s.load = load{arrivals: make(map[int64]int)}
	return l
}

// send sends a command: do is called when the server has executed it.
func (s *server) send(cost time.Duration, do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	arrival := time.Now().Add(s.trip / 2)
	s.commands++
	s.arrivals[arrival.UnixNano()/int64(window)]++
	s.queue <- job{arrival, cost, do}
}

func (s *server) work() {
	for {
		select {
		case <-s.stopped:
			return
		case j := <-s.queue:
			time.Sleep(time.Until(j.arrival))
			s.mu.Lock()
			s.queued = max(s.queued, time.Since(j.arrival))
			s.busy += j.cost
			s.mu.Unlock()
			time.Sleep(j.cost)
			j.do()
			s.deliver()
			s.mu.Lock()
			s.busy += s.reply
			s.mu.Unlock()
			time.Sleep(s.reply)
			s.reply = 0
		}
	}
}

// deliver sends what a command has published to the listeners, one after the other.
func (s *server) deliver() {
	for _, channel := range s.published {
		if s.lose {
			break
		}
		listeners := slices.DeleteFunc(s.listeners[channel], (*conn).gone)
		s.listeners[channel] = listeners
		for _, c := range listeners {
			time.Sleep(s.message)
			c.push("smessage", channel, proto.String(""))
		}
		s.mu.Lock()
		s.messages += len(listeners)
		s.busy += time.Duration(len(listeners)) * s.message
		s.mu.Unlock()
	}
	s.published = nil
}

// execute sends commands and returns with their replies, or when ctx ends. A command that was sent
// is executed in any case.
func (s *server) execute(ctx context.Context, cmds ...redis.Cmder) error {
	cmds = slices.Clone(cmds) // the caller may leave
	var mu sync.Mutex         // protects cmds
	done := make(chan struct{})
	for i, cmd := range cmds {
		s.send(s.of(cmd), func() {
			mu.Lock()
			defer mu.Unlock()
			_ = s.redis.Process(context.Background(), cmds[i])
			if read, ok := cmds[i].(*redis.XMessageSliceCmd); ok {
				s.reply = time.Duration(max(0, len(read.Val())-1)) * s.logRecord
			}
			if i == len(cmds)-1 {
				close(done)
			}
		})
	}
	select {
	case <-done:
	case <-ctx.Done():
		mu.Lock()
		defer mu.Unlock()
		for i, cmd := range cmds {
			cmds[i] = redis.NewCmd(context.Background(), cmd.Args()...)
		}
		return ctx.Err()
	}
	if !sleep(ctx, s.trip/2) {
		return ctx.Err()
	}
	return nil
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
