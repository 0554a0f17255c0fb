package lock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

const userRole = "lock user"

func init() { redistest.Role(userRole, runUser) }

// enter notes in Redis that a holder begins. It keeps the largest number of holders at once, and
// how often a fence was not larger than the one before.
var enter = redis.NewScript(`
local n = redis.call('INCR', 'running')
if n > tonumber(redis.call('GET', 'most') or 0) then redis.call('SET', 'most', n) end
if tonumber(ARGV[1]) <= tonumber(redis.call('GET', 'entered') or 0) then redis.call('INCR', 'backwards') end
redis.call('SET', 'entered', ARGV[1])
return n`)

// write is a resource that rejects a fence smaller than the largest it has seen.
var write = redis.NewScript(`
if tonumber(ARGV[1]) < tonumber(redis.call('GET', 'seen') or 0) then return 0 end
redis.call('SET', 'seen', ARGV[1])
return 1`)

// A user is a child process. It obeys orders of the form "verb tag", each in a goroutine, and
// reports the results as "tag: result".
type user struct {
	*redistest.Child
	*lock.Locker
	rdb *redis.Client

	mu     sync.Mutex
	leases map[string]*lock.Lease // protected by mu, by tag
}

// runUser is the role. Its arguments are the address of Redis, the kind of the lock, which is also
// its name, the TTL and the RedisTimeout.
func runUser(p *redistest.Child) {
	u := &user{Child: p, leases: make(map[string]*lock.Lease)}
	u.rdb = redis.NewClient(&redis.Options{
		Addr: p.Args[0], DisableIdentity: true, PoolSize: 50, ReadTimeout: time.Minute,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	ttl, err := time.ParseDuration(p.Args[2])
	must(err)
	timeout, err := time.ParseDuration(p.Args[3])
	must(err)
	must(u.rdb.Ping(context.Background()).Err())
	k := locktest.KindOf(p.Args[1])
	u.Locker, err = k.Open(u.rdb, k.Name, &lock.Options{TTL: ttl, RedisTimeout: timeout, WaiterTTL: 4 * timeout})
	must(err)
	p.Say("ready")
	for line, ok := p.Next(); ok; line, ok = p.Next() {
		verb, tag, _ := strings.Cut(line, " ")
		u.mu.Lock()
		lease := u.leases[tag]
		u.mu.Unlock()
		go u.obey(verb, tag, lease)
	}
}

func (u *user) obey(verb, tag string, lease *lock.Lease) {
	switch verb {
	case "acquire":
		u.acquire(tag, false)
	case "reacquire": // retries when Redis seems silent: the process may be frozen before or after it sends a command
		u.acquire(tag, true)
	case "release":
		err := lease.Release(context.Background())
		if errors.Is(err, lock.ErrLost) {
			err = lock.ErrLost
		}
		u.Say("%s: released %v", tag, err)
	case "write":
		n, err := write.Run(context.Background(), u.rdb, nil, lease.Fence()).Int()
		must(err)
		u.Say("%s: wrote %d", tag, n)
	case "contend":
		u.contend(tag)
	default:
		panic("unknown order " + verb)
	}
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func (u *user) acquire(tag string, again bool) {
	ctx, asked := locktest.NotifyAsked()
	go func() { <-asked; u.Say("%s: asks", tag) }()
	lease, err := u.Acquire(ctx)
	for again && (errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, lock.ErrUnavailable)) {
		lease, err = u.Acquire(ctx)
	}
	must(err)
	u.mu.Lock()
	u.leases[tag] = lease
	u.mu.Unlock()
	context.AfterFunc(lease.Context(), func() {
		if err := context.Cause(lease.Context()); errors.Is(err, lock.ErrLost) {
			u.Say("%s: told", tag)
		}
	})
	u.Say("%s: acquired %d", tag, lease.Fence())
}

// contend has goroutines compete, each a few times. What they do with the lock held is only right
// if there is no other holder. tag has their number and the number of times, as "goroutines*times".
func (u *user) contend(tag string) {
	var goroutines, times int
	_, err := fmt.Sscanf(tag, "%d*%d", &goroutines, &times)
	must(err)
	ctx := context.Background()
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for range times {
				lease, err := u.Acquire(ctx)
				must(err)
				must(enter.Run(ctx, u.rdb, nil, lease.Fence()).Err())
				n, err := u.rdb.Get(ctx, "counter").Int()
				if err != nil && !errors.Is(err, redis.Nil) {
					panic(err)
				}
				must(u.rdb.Set(ctx, "counter", n+1, 0).Err())
				must(u.rdb.Decr(ctx, "running").Err())
				must(lease.Release(ctx))
			}
		})
	}
	wg.Wait()
	u.Say("%s: done", tag)
}
