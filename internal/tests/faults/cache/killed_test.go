package cache_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Connections break, and Redis answers.

// users are the clients of users: the one of README.md, and the one that go-redis makes by default.
var users = map[string]func(*redis.Options){
	"README": func(o *redis.Options) {
		o.ContextTimeoutEnabled, o.DialTimeout, o.MaxRetries, o.DialerRetries = true, 500*time.Millisecond, 1, 1
	},
	"default": func(*redis.Options) {},
}

// While all connections are killed all the time, no call fails.
//
//fault:killed-connections
func TestCache_KilledConnections(t *testing.T) {
	for user, configure := range users {
		t.Run(user, func(t *testing.T) {
			s, _ := start(t)
			tagged := func(o *singlefill.Options[string]) {
				o.Tags = func(key, _ string) []string { return []string{"tag " + key[:1]} }
			}
			c := cachetest.New(t, s.Client(t, configure), redistest.Namespace(t), cachetest.Patient, tagged)
			load := func(_ context.Context, key string) (string, error) { return "value of " + key, nil }
			kills, stop := s.KillConnections()
			var callers sync.WaitGroup
			for caller := range 8 {
				callers.Go(func() {
					ctx := t.Context()
					for i := 0; kills.Load() < 400 && !t.Failed(); i++ {
						key := fmt.Sprint((caller+i)%4, " key")
						for op, call := range map[string]func() error{
							"Get": func() error {
								if _, err := c.Get(ctx, key); !errors.Is(err, singlefill.ErrMiss) {
									return err
								}
								return nil
							},
							"GetOrLoad": func() error { _, err := c.GetOrLoad(ctx, key, load); return err },
							"GetMany":   func() error { _, err := c.GetMany(ctx, []string{key, "4 other"}); return err },
							"Refresh":   func() error { return c.Refresh(ctx, key, load) },
							"Delete":    func() error { return c.Delete(ctx, key, "4 other") },
							"Expire":    func() error { return c.Expire(ctx, key) },
							"DeleteTag": func() error { return c.DeleteTag(ctx, "tag "+key[:1]) },
							"ExpireTag": func() error { return c.ExpireTag(ctx, "tag "+key[:1]) },
							"Clear": func() error {
								if i%16 > 0 {
									return nil
								}
								return c.Clear(ctx)
							},
						} {
							if err := call(); err != nil {
								t.Errorf("%s = %v", op, err)
							}
						}
					}
				})
			}
			callers.Wait()
			stop()
			if info := c.LastLoad(); info.Unlocked {
				t.Errorf("the last load ran without its lock: %+v", info)
			}
		})
	}
}

// A Set whose reply is lost is not sent again: another process may have seen its value, and have deleted it. If the
// value is still there, the Set is done. Otherwise the key is deleted, and the error says so.
//
//fault:lost-reply
func TestSet_LostReply(t *testing.T) {
	for user, configure := range users {
		for _, call := range []string{"Set", "SetMany", "SetMany without scripts"} {
			for _, deleted := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s of client %s, deleted %t", call, user, deleted), func(t *testing.T) {
					s, p := newWarm(t)
					change := []func(*redis.Options){configure}
					if call == "SetMany without scripts" {
						change = append(change, cachetest.NoScripts(t, s))
					}
					a, b := newPair(t, p.Client(t, change...), s.Client(t), cachetest.Patient)
					b.MustLoad("other") // the server knows the script that stores
					stores := []string{"EXEC"}
					if call == "SetMany" {
						stores = []string{"EVAL", "EVALSHA"}
					}
					held := p.On(func(cmd []string) bool {
						return redistest.Command(stores...)(cmd) && (cmd[0] == "exec" || slices.Contains(cmd, a.ValueKey("k")))
					}, redistest.HoldReply).Times(1)
					ended := make(chan error)
					go func() {
						var err error
						if call == "Set" {
							err = a.Set(t.Context(), "k", "value of k")
						} else {
							err = a.SetMany(t.Context(), map[string]string{"k": "value of k"})
						}
						ended <- err
					}()
					awaitHit(t, held)
					b.WantHit("k")
					if deleted {
						redistest.Must(t, b.Delete(t.Context(), "k"))
					}
					p.Cut()
					held.Release()
					if err := <-ended; (err != nil) != deleted {
						t.Errorf("%s = %v", call, err)
					}
					if deleted {
						b.WantMiss("k")
					} else {
						b.WantHit("k")
					}
				})
			}
		}
	}
}
