package singlefill_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// rights are those that the package documentation lists, for the namespace shop.
var rights = []string{
	"~shop:*", "+get", "+getrange", "+set", "+setrange", "+del", "+pexpire", "+pttl", "+time",
	"+eval", "+evalsha", "+multi", "+exec", "+ping",
}

// as returns a client of a new user with such rights on a shared server.
func as(t *testing.T, name string, rights []string) *redis.Client {
	t.Helper()
	s := redistest.Shared(t)
	args := []any{"acl", "setuser", name, "on", ">pw"}
	for _, right := range rights {
		args = append(args, right)
	}
	if err := s.Admin().Do(t.Context(), args...).Err(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Admin().Do(context.Background(), "acl", "deluser", name) })
	return s.Client(t, func(o *redis.Options) { o.Username, o.Password = name, "pw" })
}

// A cache with exactly the documented rights does everything, and nothing is refused.
func TestCheck_DocumentedRights(t *testing.T) {
	t.Parallel()
	c, err := singlefill.New(as(t, "all-rights", rights), "shop:"+t.Name(), time.Minute,
		&singlefill.Options[string]{StaleIfError: time.Minute, LockTTL: 1600 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := t.Context()
	if err := c.Check(ctx); err != nil {
		t.Errorf("Check: %v", err)
	}
	boom := errors.New("boom")
	for _, test := range []struct {
		what string
		do   func() error
		want error
	}{
		{"a load that fails", func() error { _, err := c.GetOrLoad(ctx, "k", fails[string](boom)); return err }, boom},
		{"a load that is renewed", func() error {
			_, err := c.GetOrLoad(ctx, "k", func(context.Context, string) (string, error) { time.Sleep(600 * time.Millisecond); return "v", nil })
			return err
		}, nil},
		{"a hit", func() error { _, err := c.GetOrLoad(ctx, "k", mustNotLoad[string](t)); return err }, nil},
		{"Expire", func() error { return c.Expire(ctx, "k") }, nil},
		{"a refresh that fails", func() error { _, err := c.GetOrLoad(ctx, "k", fails[string](boom)); return err }, nil},
		{"Set", func() error { return c.Set(ctx, "k", "v") }, nil},
		{"Delete", func() error { return c.Delete(ctx, "k") }, nil},
	} {
		if err := test.do(); err != test.want {
			t.Errorf("%s: %v, want %v", test.what, err, test.want)
		}
	}
	_ = c.Close()
	if s := c.Stats(); s.RedisErrors != 0 || s.Refused != 0 || s.LoadsUnlocked != 0 || s.Stored != 1 {
		t.Errorf("%+v, want no errors and one stored value", s)
	}
}

// For each documented right but PING, whose refusal is an answer too, Check names what is missing,
// and Stats.Refused counts it. Without the right to run scripts, WATCH and UNWATCH replace them.
func TestCheck_MissingRight(t *testing.T) {
	t.Parallel()
	for i, right := range rights {
		if right == "+ping" {
			continue
		}
		t.Run(right, func(t *testing.T) {
			fewer := append(append([]string{}, rights[:i]...), rights[i+1:]...)
			c, err := singlefill.New(as(t, strings.Trim(right, "+~:*")+"-missing", fewer), "shop:"+t.Name(), time.Minute, &singlefill.Options[string]{})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if err := c.Check(t.Context()); err == nil {
				t.Errorf("Check found nothing")
			} else if name := strings.ToLower(strings.Trim(right, "+~:*")); name != "shop" && !strings.Contains(strings.ToLower(err.Error()), name) {
				t.Errorf("Check does not name %s: %v", right, err)
			}
			if c.Stats().Refused == 0 {
				t.Errorf("nothing was refused: %+v", c.Stats())
			}
		})
	}
}

// Check returns an error soon when Redis does not answer, and ErrClosed when the cache is closed.
func TestCheck_Unreachable(t *testing.T) {
	t.Parallel()
	m, rdb := redistest.StartMini(t)
	c := newCache[string](t, rdb, nil)
	if err := c.Check(t.Context()); err != nil {
		t.Errorf("Check: %v", err)
	}
	if keys := m.Keys(); len(keys) > 1 { // a mark of the attempt that was abandoned
		t.Errorf("Check left %q", keys)
	}
	m.Close()
	if err := c.Check(t.Context()); err == nil || c.Stats().Refused != 0 {
		t.Errorf("Check of a server that is down: %v, %d refused", err, c.Stats().Refused)
	}
	_ = c.Close()
	if err := c.Check(t.Context()); err != singlefill.ErrClosed {
		t.Errorf("Check after Close: %v", err)
	}
}
