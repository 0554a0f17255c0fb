package redistest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// setup returns a proxy to the shared server, a client through it that reports the first failure,
// and a client that connects directly.
func setup(t *testing.T) (p *Proxy, c, direct *redis.Client) {
	t.Helper()
	s := Shared(t)
	p = NewProxy(t, s.Addr)
	c = p.Client(t, impatient)
	// So that the client of hasty needs no handshake.
	Must(t, c.Ping(t.Context()).Err())
	direct = s.Client(t, impatient)
	direct.Del(t.Context(), t.Name()) // from an earlier run under -count
	return p, c, direct
}

// hasty bounds a command that is expected to get no answer. The bound begins when the command is
// sent, so that the proxy sees the command on a slow machine, too.
func hasty(c *redis.Client) *redis.Client { return c.WithTimeout(500 * time.Millisecond) }

func assertFired(t *testing.T, r *Rule, want int) {
	t.Helper()
	Await(t, "the fault comes about", func() bool { return r.Fired() >= want })
	if n := r.Fired(); n != want {
		t.Errorf("the fault came about %d times, not %d", n, want)
	}
}

func assertValue(t *testing.T, c *redis.Client, want string) {
	t.Helper()
	if v := c.Get(t.Context(), t.Name()).Val(); v != want {
		t.Errorf("the server has %q, not %q", v, want)
	}
}

func set(ctx context.Context, t *testing.T, c redis.Cmdable, value string) error {
	return c.Set(ctx, t.Name(), value, time.Minute).Err()
}

// A proxy without matching rules forwards everything.
func TestProxy_Forwards(t *testing.T) {
	t.Parallel()
	for _, protocol := range []int{2, 3} {
		t.Run(fmt.Sprint("resp", protocol), func(t *testing.T) {
			t.Parallel()
			s := Shared(t)
			p := NewProxy(t, s.Addr)
			c := p.Client(t, impatient, func(o *redis.Options) { o.Protocol = protocol })
			sets := p.On(Command("SET"), Pass)
			ctx := t.Context()
			large := strings.Repeat("x\r\n", 1<<20)
			Must(t, set(ctx, t, c, large))
			assertValue(t, c, large)
			var group sync.WaitGroup
			for range 8 {
				group.Go(func() {
					for i := range 50 {
						echoes(t, c, i)
					}
				})
			}
			group.Wait()
			assertFired(t, sets, 1)
			if n := p.Commands(); n < 8*50*20 {
				t.Errorf("saw %d commands", n)
			}
		})
	}
}

// echoes runs a pipeline with several kinds of replies.
func echoes(t *testing.T, c *redis.Client, n int) {
	var echoed []*redis.StringCmd
	_, err := c.Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
		for i := range 10 {
			echoed = append(echoed, pipe.Echo(t.Context(), fmt.Sprint(n, i)))
			pipe.Eval(t.Context(), `return {1, {'a', false}, redis.status_reply('OK')}`, []string{t.Name()})
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	for i, cmd := range echoed {
		if want := fmt.Sprint(n, i); cmd.Val() != want {
			t.Errorf("echo %q, not %q", cmd.Val(), want)
		}
	}
}

// A proxy forwards the messages of subscriptions.
func TestProxy_Subscriptions(t *testing.T) {
	t.Parallel()
	for _, protocol := range []int{2, 3} {
		t.Run(fmt.Sprint("resp", protocol), func(t *testing.T) {
			t.Parallel()
			p, _, direct := setup(t)
			sub := p.Client(t, func(o *redis.Options) { o.Protocol = protocol }).Subscribe(t.Context(), t.Name(), t.Name()+"2")
			defer sub.Close()
			for range 2 {
				if _, err := sub.Receive(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			for i := range 10 {
				direct.Publish(t.Context(), t.Name(), i)
				if m, err := sub.ReceiveMessage(t.Context()); err != nil || m.Payload != fmt.Sprint(i) {
					t.Fatalf("message %d: %v, %v", i, m, err)
				}
			}
		})
	}
}

// Messages are lost, repeated, late, or cut short, and the client goes on.
func TestProxy_Messages(t *testing.T) {
	t.Parallel()
	for action, want := range map[Action][]string{
		DropMessage: {"2"},
		Twice:       {"1", "1", "2"},
		HoldReply:   {"1", "2"},
		ResetReply:  {"2"}, // on the next connection
		DropReply:   {"2"},
	} {
		for _, protocol := range []int{2, 3} {
			t.Run(fmt.Sprintf("%d resp%d", action, protocol), func(t *testing.T) {
				t.Parallel()
				p, _, direct := setup(t)
				other := t.Name() + "other"
				sub := p.Client(t, func(o *redis.Options) { o.Protocol = protocol }).Subscribe(t.Context(), t.Name(), other)
				defer sub.Close()
				messages := sub.Channel()
				subscribers := func(n int64) {
					Await(t, "it is subscribed", func() bool {
						return direct.PubSubNumSub(t.Context(), t.Name()).Val()[t.Name()] == n
					})
				}
				subscribers(1)
				rule := p.OnMessage(t.Name(), action).Times(1)
				direct.Publish(t.Context(), other, "before")
				if m := <-messages; m.Payload != "before" {
					t.Errorf("got %q from the other channel", m.Payload)
				}
				direct.Publish(t.Context(), t.Name(), "1")
				assertFired(t, rule, 1)
				if action == DropReply || action == ResetReply {
					Await(t, "it connects again", func() bool {
						direct.Publish(t.Context(), other, "again")
						select {
						case m := <-messages:
							return m.Payload == "again"
						default:
							return false
						}
					})
				}
				rule.Release()
				direct.Publish(t.Context(), t.Name(), "2")
				for _, payload := range want {
					m := <-messages
					for m.Payload == "again" {
						m = <-messages
					}
					if m.Payload != payload {
						t.Fatalf("got %q, want %q", m.Payload, payload)
					}
				}
			})
		}
	}
}

// DropRequest swallows one command and kills its connection.
func TestProxy_DropRequest(t *testing.T) {
	t.Parallel()
	p, c, direct := setup(t)
	rule := p.On(Command("set"), DropRequest).Times(1)
	if err := set(t.Context(), t, hasty(c), "1"); !isTimeout(err) {
		t.Errorf("the client saw %v", err)
	}
	assertFired(t, rule, 1)
	assertValue(t, direct, "")
	if err := set(t.Context(), t, c, "2"); err != nil {
		t.Errorf("after the fault: %v", err)
	}
	assertFired(t, rule, 1)
}

// DropRequest within a pipeline swallows the rest of the pipeline.
func TestProxy_DropRequestInPipeline(t *testing.T) {
	t.Parallel()
	p, c, direct := setup(t)
	rule := p.On(Command("set"), DropRequest).After(1)
	var first, second *redis.StatusCmd
	_, err := hasty(c).Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
		first = pipe.Set(t.Context(), t.Name(), "1", time.Minute)
		second = pipe.Set(t.Context(), t.Name(), "2", time.Minute)
		pipe.Append(t.Context(), t.Name(), "3")
		return nil
	})
	if !isTimeout(err) || first.Val() != "OK" || second.Val() != "" {
		t.Errorf("the client saw %q, %q, %v", first.Val(), second.Val(), err)
	}
	assertFired(t, rule, 1)
	assertValue(t, direct, "1")
}

// DropReply executes the command and closes the connection instead of replying.
func TestProxy_DropReply(t *testing.T) {
	t.Parallel()
	p, c, direct := setup(t)
	rule := p.On(Command("SET"), DropReply).Times(1)
	if err := set(t.Context(), t, c, "1"); !isClosed(err) {
		t.Errorf("the client saw %v", err)
	}
	assertFired(t, rule, 1)
	assertValue(t, direct, "1")
}

// isClosed reports whether the other side closed the connection. The error depends on whether data
// was in transit.
func isClosed(err error) bool {
	var op *net.OpError
	return errors.Is(err, io.EOF) || errors.As(err, &op) && !op.Timeout()
}

// DropReply makes a client with retries execute a command twice.
func TestProxy_DropReplyWithRetries(t *testing.T) {
	t.Parallel()
	p, _, _ := setup(t)
	c := p.Client(t) // with the default retries
	rule := p.On(Command("EVAL"), DropReply).Times(1)
	n, err := c.Eval(t.Context(), `return redis.call('INCR', KEYS[1])`, []string{t.Name()}).Int()
	if n != 2 || err != nil {
		t.Errorf("the client saw %d, %v", n, err)
	}
	assertFired(t, rule, 1)
}

// MuteReply swallows the reply and all later replies of the connection, while commands are
// executed.
func TestProxy_MuteReply(t *testing.T) {
	t.Parallel()
	p, c, direct := setup(t)
	rule := p.On(Command("SET"), MuteReply).Times(1)
	var before *redis.StatusCmd
	_, err := hasty(c).Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
		before = pipe.Ping(t.Context())
		pipe.Set(t.Context(), t.Name(), "1", time.Minute)
		pipe.Append(t.Context(), t.Name(), "2")
		return nil
	})
	if !isTimeout(err) || before.Val() != "PONG" {
		t.Errorf("the client saw %v and %v", before, err)
	}
	assertFired(t, rule, 1)
	Await(t, "the server executes all", func() bool {
		return direct.Get(t.Context(), t.Name()).Val() == "12"
	})
}

// HoldRequest delivers a command on Release, even if its client has left.
func TestProxy_HoldRequestClientLeft(t *testing.T) {
	t.Parallel()
	p, c, direct := setup(t)
	rule := p.On(Command("SET"), HoldRequest).Times(1)
	if err := set(t.Context(), t, hasty(c), "late"); !isTimeout(err) {
		t.Errorf("the client saw %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	assertFired(t, rule, 1)
	assertValue(t, direct, "")
	rule.Release()
	Await(t, "the server has the late request", func() bool {
		return direct.Get(t.Context(), t.Name()).Val() == "late"
	})
	rule.Release()
}

// HoldRequest keeps one connection waiting until Release.
func TestProxy_HoldRequest(t *testing.T) {
	t.Parallel()
	p, c, direct := setup(t)
	rule := p.On(Command("SET"), HoldRequest)
	done := make(chan error)
	go func() { done <- set(t.Context(), t, c, "1") }()
	<-rule.Hit()
	assertValue(t, direct, "")
	if err := c.Ping(t.Context()).Err(); err != nil {
		t.Errorf("another connection: %v", err)
	}
	rule.Release()
	if err := <-done; err != nil {
		t.Errorf("the client saw %v", err)
	}
	if err := set(t.Context(), t, c, "2"); err != nil {
		t.Errorf("after the release: %v", err)
	}
	assertFired(t, rule, 1)
}

// HoldReply executes the command and keeps its reply until Release.
func TestProxy_HoldReply(t *testing.T) {
	t.Parallel()
	p, c, direct := setup(t)
	rule := p.On(Command("SET"), HoldReply)
	done := make(chan error, 1)
	go func() { done <- set(t.Context(), t, c, "1") }()
	<-rule.Hit()
	assertValue(t, direct, "1")
	select {
	case err := <-done:
		t.Errorf("the client saw %v before the release", err)
	default:
	}
	rule.Release()
	if err := <-done; err != nil {
		t.Errorf("the client saw %v", err)
	}
	assertFired(t, rule, 1)
}

// CloseBefore closes the connection instead of forwarding the command.
func TestProxy_CloseBefore(t *testing.T) {
	t.Parallel()
	p, c, direct := setup(t)
	rule := p.On(Command("SET"), CloseBefore).Times(2)
	for range 2 {
		if err := set(t.Context(), t, c, "1"); !isClosed(err) {
			t.Errorf("the client saw %v", err)
		}
	}
	assertFired(t, rule, 2)
	assertValue(t, direct, "")
}

// A rule sees every argument of a command.
func TestProxy_RuleArguments(t *testing.T) {
	t.Parallel()
	p, c, _ := setup(t)
	rule := p.On(func(cmd []string) bool {
		return strings.EqualFold(cmd[0], "EVAL") && cmd[len(cmd)-1] == "victim"
	}, CloseBefore)
	for _, arg := range []string{"other", "victim"} {
		err := c.Eval(t.Context(), "return ARGV[1]", []string{t.Name()}, arg).Err()
		if isClosed(err) != (arg == "victim") {
			t.Errorf("%s: the client saw %v", arg, err)
		}
	}
	assertFired(t, rule, 1)
}

// BlackHole swallows commands on existing and new connections.
func TestProxy_BlackHole(t *testing.T) {
	t.Parallel()
	p, c, direct := setup(t)
	Must(t, set(t.Context(), t, c, "1"))
	p.BlackHole(true)
	for _, connection := range []string{"existing", "new"} {
		if err := set(t.Context(), t, hasty(c), "2"); !isTimeout(err) {
			t.Errorf("%s connection: the client saw %v", connection, err)
		}
	}
	assertValue(t, direct, "1")
	if n := p.Counts().Swallowed; n == 0 {
		t.Error("no swallowed command was counted")
	}
	p.BlackHole(false)
	if err := set(t.Context(), t, c, "3"); err != nil {
		t.Errorf("after the fault: %v", err)
	}
}

// Cut closes connections, and Refuse refuses new ones.
func TestProxy_CutAndRefuse(t *testing.T) {
	t.Parallel()
	p, c, _ := setup(t)
	held := p.On(Command("SET"), HoldRequest)
	done := make(chan error)
	go func() { done <- set(t.Context(), t, c, "1") }()
	<-held.Hit()
	p.Refuse(true)
	if n := p.Cut(); n == 0 {
		t.Error("no connection was cut")
	}
	if err := <-done; !isClosed(err) {
		t.Errorf("cut: the client saw %v", err)
	}
	if err := c.Ping(t.Context()).Err(); !isClosed(err) {
		t.Errorf("refused: the client saw %v", err)
	}
	p.Refuse(false)
	if err := c.Ping(t.Context()).Err(); err != nil {
		t.Errorf("after the fault: %v", err)
	}
}

// Delay delays the replies of a pipeline together.
func TestProxy_Delay(t *testing.T) {
	t.Parallel()
	p, c, _ := setup(t)
	c.Ping(t.Context())
	const delay = 100 * time.Millisecond
	p.Delay(delay)
	start := time.Now()
	if _, err := c.Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
		for range 100 {
			pipe.Ping(t.Context())
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	if took := time.Since(start); took < delay || took > 50*delay {
		t.Errorf("100 replies took %v, not about %v", took, delay)
	}
	if n := p.Counts().Delayed; n == 0 {
		t.Error("no delay was counted")
	}
}

// Twice executes a command twice and returns the second reply.
func TestProxy_Twice(t *testing.T) {
	t.Parallel()
	p, c, direct := setup(t)
	rule := p.On(Command("INCR"), Twice).Times(1)
	var before, after *redis.StatusCmd
	var n *redis.IntCmd
	_, err := c.Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
		before = pipe.Ping(t.Context())
		n = pipe.Incr(t.Context(), t.Name())
		after = pipe.Set(t.Context(), t.Name()+" after", "1", time.Minute)
		return nil
	})
	if err != nil || before.Val() != "PONG" || n.Val() != 2 || after.Val() != "OK" {
		t.Errorf("the client saw %v, %v, %v, %v", before, n, after, err)
	}
	assertFired(t, rule, 1)
	assertValue(t, direct, "2")
	if err := c.Incr(t.Context(), t.Name()).Err(); err != nil {
		t.Errorf("after the fault: %v", err)
	}
	assertValue(t, direct, "3")
}

// ResetReply resets the connection in the middle of a reply.
func TestProxy_ResetReply(t *testing.T) {
	t.Parallel()
	p, c, direct := setup(t)
	Must(t, set(t.Context(), t, c, strings.Repeat("x", 1000)))
	rule := p.On(Command("GET"), ResetReply).Times(1)
	conn, err := net.Dial("tcp", p.Addr)
	Must(t, err)
	defer conn.Close()
	fmt.Fprintf(conn, "GET %s\r\n", t.Name())
	_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
	if got, err := io.ReadAll(conn); !errors.Is(err, syscall.ECONNRESET) || len(got) > 600 {
		t.Errorf("the client read %d bytes, %v", len(got), err)
	}
	assertFired(t, rule, 1)
	if v := c.Get(t.Context(), t.Name()).Val(); len(v) != 1000 {
		t.Errorf("after the fault: %d bytes", len(v))
	}
	assertValue(t, direct, strings.Repeat("x", 1000))
}

// Trickle delivers a reply in slices.
func TestProxy_Trickle(t *testing.T) {
	t.Parallel()
	p, c, _ := setup(t)
	Must(t, set(t.Context(), t, c, "0123456789"))
	const pause = 2 * time.Millisecond
	p.Trickle(1, pause)
	start := time.Now()
	assertValue(t, c, "0123456789") // 17 bytes: a length, the digits, and two line ends
	if took := time.Since(start); took < 16*pause {
		t.Errorf("a reply of 17 bytes took %v", took)
	}
	if n := p.Counts().Sliced; n != 1 {
		t.Errorf("%d sliced replies were counted, not 1", n)
	}
	p.Trickle(0, 0)
	assertValue(t, c, "0123456789")
	if n := p.Counts().Sliced; n != 1 {
		t.Errorf("after the fault %d sliced replies were counted, not 1", n)
	}
}

// A server that dies behind the proxy is dead for clients of the proxy.
func TestProxy_DeadServer(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := NewProxy(t, s.Addr)
	c := p.Client(t, impatient)
	rule := p.On(Command("PING"), HoldReply)
	Must(t, set(t.Context(), t, c, "1"))
	s.Kill()
	for range 2 {
		if err := set(t.Context(), t, c, "2"); !isClosed(err) {
			t.Errorf("the client saw %v", err)
		}
	}
	s.Restart()
	if err := set(t.Context(), t, c, "3"); err != nil {
		t.Errorf("after the restart: %v", err)
	}
	assertFired(t, rule, 0)
}

// Redirect connects new connections to another server.
func TestProxy_Redirect(t *testing.T) {
	t.Parallel()
	second := Start(t) // started first, so that it is stopped after the clients are closed
	p, c, first := setup(t)
	Must(t, set(t.Context(), t, c, "1"))
	p.Redirect(second.Addr)
	assertValue(t, c, "1") // on the existing connection
	p.Cut()
	Await(t, "the client is with the second server", func() bool { return set(t.Context(), t, c, "2") == nil })
	assertValue(t, second.Admin(), "2")
	assertValue(t, first, "1")
}
