package versions

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// This file is compiled in the tree of the old version, too: it must do with what both have.

func TestMain(m *testing.M) { redistest.Ring(m) }

// The role "peer" is a process of a service. Its arguments are the address of Redis and a namespace;
// with a third one it has Near. Loads go on until a line says how they end.
func init() {
	redistest.Role("peer", func(p *redistest.Child) {
		if err := peer(p); err != nil {
			p.Say("broken %v", err)
		}
	})
}

const maxLag = time.Second

func peer(p *redistest.Child) error {
	ctx := context.Background()
	rdb := redis.NewClient(&redis.Options{Addr: p.Args[0], ContextTimeoutEnabled: true})
	defer rdb.Close()
	opts := &singlefill.Options[string]{EarlyRefresh: -1}
	if len(p.Args) > 2 {
		opts.Near = &singlefill.Near{MaxLag: maxLag}
	}
	c, err := singlefill.New(rdb, p.Args[1], time.Hour, opts)
	if err != nil {
		return err
	}
	defer c.Close()
	lockers := make(map[string]*lock.Locker)
	for kind, of := range map[string]func() (*lock.Locker, error){
		"mutex":      func() (*lock.Locker, error) { return lock.NewMutex(rdb, p.Args[1]+" mutex", nil) },
		"fair mutex": func() (*lock.Locker, error) { return lock.NewFairMutex(rdb, p.Args[1]+" fair", nil) },
		"semaphore":  func() (*lock.Locker, error) { return lock.NewSemaphore(rdb, p.Args[1]+" semaphore", 1, nil) },
	} {
		if lockers[kind], err = of(); err != nil {
			return err
		}
	}
	leases := make(map[string]*lock.Lease)
	ends := make(chan func() (string, error))
	load := func(ctx context.Context, key string) (string, error) {
		p.Say("loads %s", key)
		select {
		case end := <-ends:
			return end()
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
	answer := func(err error) {
		if err != nil {
			p.Say("error %v", err)
		} else {
			p.Say("done")
		}
	}
	p.Say("ready")
	for {
		line, ok := p.Next()
		if !ok {
			return nil
		}
		command, rest, _ := strings.Cut(line, " ")
		switch key, value, _ := strings.Cut(rest, " "); command {
		case "get":
			go func() {
				if v, err := c.GetOrLoad(ctx, key, load); err != nil {
					p.Say("failed %s: %v", key, err)
				} else {
					p.Say("got %s: %s", key, v)
				}
			}()
		case "give":
			ends <- func() (string, error) { return rest, nil }
		case "fail":
			ends <- func() (string, error) { return "", errors.New(rest) }
		case "set":
			answer(c.Set(ctx, key, value))
		case "delete":
			answer(c.Delete(ctx, rest))
		case "expire":
			answer(c.Expire(ctx, rest))
		case "clear":
			answer(c.Clear(ctx))
		case "try":
			lease, err := lockers[rest].TryAcquire(ctx)
			if err != nil {
				p.Say("error %v", err)
				break
			}
			leases[rest] = lease
			p.Say("fence %d", lease.Fence())
		case "release":
			answer(leases[rest].Release(ctx))
		}
	}
}
