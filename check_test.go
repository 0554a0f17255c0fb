package singlefill_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// rights are those that the package documentation lists, for the namespace shop.
var rights = []string{
	"~shop:*", "+get", "+getrange", "+set", "+setrange", "+del", "+pexpire", "+pttl", "+time",
	"+eval", "+evalsha", "+multi", "+exec", "+ping", "+scan", "+unlink", "+info",
}

// A cache with exactly the documented rights does everything, and nothing is refused.
func TestCheck_DocumentedRights(t *testing.T) {
	t.Parallel()
	s := redistest.Shared(t)
	ns := "shop:" + redistest.Namespace(t)
	c, err := singlefill.New(s.Client(t, s.User(t, rights...)), ns, time.Minute,
		&singlefill.Options[string]{StaleIfError: time.Minute, LockTTL: 6 * time.Second})
	redistest.Must(t, err)
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
		{"a load that fails", func() error { _, err := c.GetOrLoad(ctx, "k", cachetest.Fails[string](boom)); return err }, boom},
		{"a load that is renewed", func() error {
			_, err := c.GetOrLoad(ctx, "k", func(context.Context, string) (string, error) {
				left := func() time.Duration { return s.Admin().PTTL(ctx, ns+":{k}:lock").Val() }
				last := left()
				redistest.Await(t, "the lock is renewed", func() bool {
					before := last
					last = left()
					return last > before
				})
				return "v", nil
			})
			return err
		}, nil},
		{"a hit", func() error { _, err := c.GetOrLoad(ctx, "k", cachetest.MustNotLoad[string](t)); return err }, nil},
		{"Expire", func() error { return c.Expire(ctx, "k") }, nil},
		{"a refresh that fails", func() error { _, err := c.GetOrLoad(ctx, "k", cachetest.Fails[string](boom)); return err }, nil},
		{"Set", func() error { return c.Set(ctx, "k", "v") }, nil},
		{"Delete", func() error { return c.Delete(ctx, "k") }, nil},
		{"Clear", func() error { return c.Clear(ctx) }, nil},
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

// With Near the documented rights are those and some more; without these Check fails, and memory
// serves nothing.
func TestCheck_Near(t *testing.T) {
	t.Parallel()
	s := redistest.Shared(t)
	nearRights := []string{"+xadd", "+xrange", "+xrevrange"}
	for _, missing := range append(nearRights, "") {
		t.Run("without "+missing, func(t *testing.T) {
			t.Parallel()
			allowed := slices.DeleteFunc(append(slices.Clone(rights), nearRights...), func(right string) bool { return right == missing })
			rdb := s.Client(t, s.User(t, allowed...))
			ns := "shop:" + redistest.Namespace(t)
			c := cachetest.NewCacheIn(t, s.Admin(), ns, near(singlefill.Near{}))
			limited, err := singlefill.New(rdb, ns, time.Minute, near(singlefill.Near{}))
			redistest.Must(t, err)
			defer limited.Close()
			err = limited.Check(t.Context())
			if missing == "" {
				if err != nil {
					t.Errorf("Check: %v", err)
				}
				// Each process with Near would read what Check writes to the log of the namespace.
				if n, err := rdb.XRange(t.Context(), ns+":log", "-", "+").Result(); len(n) > 1 || err != nil {
					t.Errorf("the log has %d records after Check, %v; want the one that its reader writes", len(n), err)
				}
				awaitNear(t, limited, "k", cachetest.Gives("old"))
				if err := limited.Delete(t.Context(), "k"); err != nil || limited.Stats().RedisErrors != 0 {
					t.Errorf("Delete: %v; %+v", err, limited.Stats())
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), missing[1:]) {
				t.Errorf("Check: %v; want an error that names %s", err, missing[1:])
			}
			awaitNear(t, c, "k", cachetest.Gives("old"))
			if v, err := limited.GetOrLoad(t.Context(), "k", cachetest.Gives("old")); v != "old" || err != nil {
				t.Errorf("GetOrLoad: %q, %v", v, err)
			}
			if err := limited.Delete(t.Context(), "k"); err != nil {
				t.Errorf("Delete: %v", err)
			}
			awaitValue(t, c, "k", "new", cachetest.Gives("new"))
		})
	}
}

// On a Cluster, too, Check tries what Near needs, and leaves the log alone.
func TestCheck_NearOnACluster(t *testing.T) {
	t.Parallel()
	rdb := redistest.SharedCluster(t).Client(t)
	c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Near: &singlefill.Near{}})
	if err := c.Check(t.Context()); err != nil || c.Stats().RedisErrors > 0 {
		t.Errorf("Check: %v; %+v", err, c.Stats())
	}
	if n, err := rdb.Exists(t.Context(), c.Namespace()+":log").Result(); n > 0 || err != nil {
		t.Errorf("Check has written to the log: %v", err)
	}
}

// fleetRights are those that MaxFleetLoads needs besides.
var fleetRights = []string{
	"+exists", "+pexpireat", "+zadd", "+zrem", "+zscore", "+zcard", "+zcount", "+zrange", "+zrangebyscore",
	"+zremrangebyscore", "+zremrangebyrank", "+zpopmin", "+hget", "+hset", "+hdel", "+hlen",
}

// With MaxFleetLoads the documented rights are those and some more; without these Check fails, and
// Stats tells that the limit was off.
func TestCheck_MaxFleetLoads(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		rights []string
		off    int64 // loads without the limit
	}{
		"all":  {append(slices.Clone(rights), fleetRights...), 0},
		"some": {rights, 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := redistest.Shared(t)
			rdb := s.Client(t, s.User(t, test.rights...))
			c, err := singlefill.New(rdb, "shop:"+redistest.Namespace(t), time.Minute, &singlefill.Options[string]{MaxFleetLoads: 1})
			redistest.Must(t, err)
			defer c.Close()
			if err := c.Check(t.Context()); (err != nil) != (test.off > 0) {
				t.Errorf("Check: %v", err)
			}
			if v, err := c.GetOrLoad(t.Context(), "k", cachetest.Gives("v")); v != "v" || err != nil {
				t.Errorf("GetOrLoad: %q, %v", v, err)
			}
			if s := c.Stats(); s.LoadsUnlimited != test.off || s.Stored != 1 {
				t.Errorf("%+v, want %d loads without the limit", s, test.off)
			}
			_ = c.Close() // it waits for the release of the slot
			refused := slices.DeleteFunc(s.Refused(t, rdb), func(what string) bool {
				return what == "spublish" || what == "ssubscribe" // wake-ups need separate rights
			})
			if test.off == 0 && len(refused) > 0 {
				t.Errorf("%q were refused", refused)
			}
		})
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
			s := redistest.Shared(t)
			c, err := singlefill.New(s.Client(t, s.User(t, fewer...)), "shop:"+redistest.Namespace(t), time.Minute, &singlefill.Options[string]{})
			redistest.Must(t, err)
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
	c := cachetest.NewCache[string](t, rdb, nil)
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
