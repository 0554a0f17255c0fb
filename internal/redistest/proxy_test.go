package redistest

import (
	"errors"
	"io"
	"net"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// setup returns a proxy to the shared server, a client through it that reports the first failure,
// and a client that connects directly.
func setup(t *testing.T) (p *Proxy, c, direct *redis.Client) {
	t.Helper()
	impatient := func(o *redis.Options) {
		o.MaxRetries, o.DialerRetries = -1, 1
		o.DialTimeout, o.ReadTimeout = time.Minute, time.Minute // but not a slow machine
	}
	s := Shared(t)
	p = NewProxy(t, s.Addr)
	c = p.Client(t, impatient)
	Must(t, c.Ping(t.Context()).Err()) // so that no later command needs a handshake
	direct = s.Client(t, impatient)
	direct.Del(t.Context(), t.Name()) // from an earlier run under -count
	return p, c, direct
}

func assertFired(t *testing.T, r *Rule, want int) {
	t.Helper()
	Await(t, "the fault comes about", func() bool { return r.Fired() >= want })
	if n := r.Fired(); n != want {
		t.Errorf("the fault came about %d times, not %d", n, want)
	}
}

// ending says how a command has ended for its client.
func ending(err error) string {
	var op net.Error
	switch {
	case err == nil:
		return "replied"
	case errors.As(err, &op) && op.Timeout():
		return "timeout"
	case errors.Is(err, io.EOF), errors.As(err, &op): // it depends on whether data was in transit
		return "closed"
	}
	return err.Error()
}

// Each action does what its comment says to one command in a pipeline, and to those behind it. Afterwards
// the client goes on.
func TestProxy_Actions(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		action   Action
		ends     string
		executed string // a pattern: a is the command, b the one behind it
	}{
		"Pass":        {Pass, "replied", "^ab$"},
		"DropRequest": {DropRequest, "timeout", "^$"},
		"DropReply":   {DropReply, "closed", "^ab?$"},
		"MuteReply":   {MuteReply, "timeout", "^ab$"},
		"HoldRequest": {HoldRequest, "replied", "^ab$"},
		"HoldReply":   {HoldReply, "replied", "^ab$"},
		"CloseBefore": {CloseBefore, "closed", "^$"},
		"Twice":       {Twice, "replied", "^aab$"},
		"ResetReply":  {ResetReply, "closed", "^ab?$"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, c, direct := setup(t)
			key := t.Name()
			value := func() string { return direct.Get(t.Context(), key).Val() }
			rule := p.On(func(cmd []string) bool { return strings.EqualFold(cmd[0], "append") && cmd[2] == "a" }, test.action)
			limited := c
			if test.ends == "timeout" {
				limited = c.WithTimeout(500 * time.Millisecond)
			}
			var before *redis.StatusCmd
			done := make(chan error, 1)
			go func() {
				_, err := limited.Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
					before = pipe.Ping(t.Context())
					pipe.Append(t.Context(), key, "a")
					pipe.Append(t.Context(), key, "b")
					return nil
				})
				done <- err
			}()
			<-rule.Hit()
			if test.action == HoldRequest || test.action == HoldReply {
				if v := value(); (v == "") != (test.action == HoldRequest) {
					t.Errorf("while it is held, the server has %q", v)
				}
				if len(done) > 0 {
					t.Error("the client has its reply while it is held")
				}
				rule.Release()
			}
			if err := <-done; ending(err) != test.ends || test.ends != "closed" && before.Val() != "PONG" {
				t.Errorf("the client saw %v, after %v; want that it is %s", err, before, test.ends)
			}
			executed := regexp.MustCompile(test.executed)
			Await(t, "the server has executed "+test.executed, func() bool { return executed.MatchString(value()) })
			assertFired(t, rule, 1)
			if err := c.Ping(t.Context()).Err(); err != nil {
				t.Errorf("after the fault: %v", err)
			}
		})
	}
}
