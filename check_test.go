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
var rights = strings.Fields("~shop:* +get +getrange +set +setrange +del +pexpire +pttl +time +eval +evalsha +multi +exec +ping +scan +unlink +info")

// features are options that need further rights.
var features = map[string]struct {
	rights string
	set    func(o *singlefill.Options[string])
}{
	"":     {"", func(*singlefill.Options[string]) {}},
	"Near": {"+xadd +xrange +xrevrange", func(o *singlefill.Options[string]) { o.Near = new(singlefill.Near) }},
	"MaxFleetLoads": {
		"+exists +pexpireat +zadd +zrem +zscore +zcard +zcount +zrange +zrangebyscore +zremrangebyscore +zremrangebyrank +zpopmin +hget +hset +hdel +hlen",
		func(o *singlefill.Options[string]) { o.MaxFleetLoads = 1 },
	},
	"Tags": {
		"+hget +hmget +hset +hsetnx +hdel +hrandfield +zadd +zscan +zrem +zrangebyscore +zremrangebyscore +exists",
		func(o *singlefill.Options[string]) {
			o.Tags = func(string, string) []string { return []string{"tag"} }
		},
	},
}

// A cache with exactly the documented rights does everything, and nothing is refused.
func TestCheck_DocumentedRights(t *testing.T) {
	t.Parallel()
	for name, feature := range features {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, ctx := redistest.Shared(t), t.Context()
			ns := "shop:" + redistest.Namespace(t)
			opts := &singlefill.Options[string]{StaleIfError: time.Minute, LockTTL: 6 * time.Second}
			feature.set(opts)
			rdb := s.Client(t, s.User(t, append(strings.Fields(feature.rights), rights...)...))
			c, err := singlefill.New(rdb, ns, time.Minute, opts)
			redistest.Must(t, err)
			defer c.Close()
			if err := c.Check(ctx); err != nil {
				t.Errorf("Check: %v", err)
			}
			// Each process with Near would read what Check writes to the log of the namespace.
			if n := s.Admin().XLen(ctx, ns+":log").Val(); n > 1 {
				t.Errorf("the log has %d records after Check; want the one that its reader writes", n)
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
				{"DeleteTag", func() error {
					if opts.Tags == nil {
						return nil
					}
					return c.DeleteTag(ctx, "tag")
				}, nil},
				{"Delete", func() error { return c.Delete(ctx, "k") }, nil},
				{"Clear", func() error { return c.Clear(ctx) }, nil},
			} {
				if err := test.do(); err != test.want {
					t.Errorf("%s: %v, want %v", test.what, err, test.want)
				}
			}
			_ = c.Close() // it waits for the release of a slot of the fleet
			if s := c.Stats(); s.RedisErrors != 0 || s.Refused != 0 || s.LoadsUnlocked != 0 || s.LoadsUnlimited != 0 || s.Stored != 1 {
				t.Errorf("%+v, want no errors and one stored value", s)
			}
			channels := []string{"spublish", "ssubscribe"} // wake-ups need separate rights, and are done without
			if refused := slices.DeleteFunc(s.Refused(t, rdb), func(what string) bool { return slices.Contains(channels, what) }); len(refused) > 0 {
				t.Errorf("%q were refused", refused)
			}
		})
	}
}

// For each documented right but PING, whose refusal is an answer too, Check names what is missing,
// and Stats.Refused counts it. Without the right to run scripts, WATCH and UNWATCH replace them. Without the
// rights that MaxFleetLoads needs, loads are not limited.
func TestCheck_MissingRight(t *testing.T) {
	t.Parallel()
	for name, feature := range features {
		more := strings.Fields(feature.rights)
		missing := more
		switch name {
		case "":
			missing = slices.DeleteFunc(slices.Clone(rights), func(right string) bool { return right == "+ping" })
		case "MaxFleetLoads":
			missing = []string{"+zadd"}
		case "Tags":
			missing = append(missing, "+pexpire", "+pttl")
		}
		for _, right := range missing {
			t.Run(name+right, func(t *testing.T) {
				s := redistest.Shared(t)
				fewer := slices.DeleteFunc(append(slices.Clone(more), rights...), func(other string) bool { return other == right })
				opts := cachetest.PatientOptions[string](nil)
				feature.set(opts)
				c, err := singlefill.New(s.Client(t, s.User(t, fewer...)), "shop:"+redistest.Namespace(t), time.Minute, opts)
				redistest.Must(t, err)
				defer c.Close()
				if err := c.Check(t.Context()); err == nil {
					t.Errorf("Check found nothing")
				} else if word := strings.ToLower(strings.Trim(right, "+~:*")); word != "shop" && !strings.Contains(strings.ToLower(err.Error()), word) {
					t.Errorf("Check does not name %s: %v", right, err)
				}
				if c.Stats().Refused == 0 {
					t.Errorf("nothing was refused: %+v", c.Stats())
				}
				if name == "" {
					return
				}
				cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")).Want(t, "v")
				_ = c.Set(t.Context(), "k", "v") // may be refused
				_ = c.DeleteTag(t.Context(), "other tag")
				if n := c.Stats().LoadsUnlimited; name == "MaxFleetLoads" && n != 1 {
					t.Errorf("%d loads without the limit, want 1", n)
				}
				for _, key := range s.Admin().Keys(t.Context(), c.Namespace()+":*").Val() {
					if ttl := s.Admin().PTTL(t.Context(), key).Val(); ttl == -1 {
						t.Errorf("%s stays for ever", key)
					}
				}
			})
		}
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

// Check returns an error soon when Redis does not answer, and ErrClosed when the cache is closed.
func TestCheck_Unreachable(t *testing.T) {
	t.Parallel()
	l, rdb := redistest.StartMiniLink(t)
	c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{RedisTimeout: cachetest.Impatient})
	if err := c.Check(t.Context()); err != nil {
		t.Errorf("Check: %v", err)
	}
	if keys := l.Mini.Keys(); len(keys) > 1 { // a mark of the attempt that was abandoned
		t.Errorf("Check left %q", keys)
	}
	l.BlackHole(true)
	if err := c.Check(t.Context()); err == nil || c.Stats().Refused != 0 {
		t.Errorf("Check of a server that is down: %v, %d refused", err, c.Stats().Refused)
	}
	_ = c.Close()
	if err := c.Check(t.Context()); err != singlefill.ErrClosed {
		t.Errorf("Check after Close: %v", err)
	}
}
