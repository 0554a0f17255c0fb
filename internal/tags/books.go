package tags

import (
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/masters"
)

//go:embed lua/book.lua
var bookLua string

// books are the books of one namespace, with the indexes of their tags.
type books struct {
	client    *client.Client
	masters   *masters.Finder
	namespace string
	markLife  time.Duration
	storing   time.Duration // a value is stored at most this long after its note, or noted again
}

// bookCount is how many books a namespace has. In a Cluster each may be on another master, with the indexes of
// its tags. All processes must agree on it.
const bookCount = 8

// bookLife is how long a book lives after the last command for it, at least. When it has ended, the
// next invalidation cannot know that no index was lost.
const bookLife = 24 * time.Hour

// op is the purpose of all commands for tags.
const op = "tag"

func bookOf(tag string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(tag))
	return int(h.Sum32() % bookCount)
}

// No key of a value, lock, log or semaphore of any namespace ends like these.

func (x *books) book(number int) string {
	return fmt.Sprintf("%s:tags:{%s:%d}:book", x.namespace, x.namespace, number)
}

func (x *books) index(tag string) string {
	return fmt.Sprintf("%s:tags:{%s:%d}:%s:index", x.namespace, x.namespace, bookOf(tag), tag)
}

// run runs a script on one book.
func (x *books) run(ctx context.Context, script client.Script, keys, args []any) (any, error) {
	call := append(append(script.Call(len(keys), len(args)), keys...), args...)
	what := client.Command{Op: op, Key: keys[0].(string), Within: x.client.Timeout, Again: client.Always}
	reply := client.Run(ctx, x.client, what, client.ScriptCall{Script: script, Args: call}, func(cmd *redis.Cmd) (any, error) {
		reply, err := cmd.Result()
		if client.ScriptsRefused(err) {
			return err, nil // not a failure: there is another way
		}
		return reply, err
	})
	if refused, is := reply.Value.(error); is && reply.Err == nil {
		reply.Err = refused
	}
	return reply.Value, reply.Err
}

// noted returns how long a key is noted whose value has a life.
func (x *books) noted(life time.Duration) time.Duration {
	return min(life, math.MaxInt64-x.storing) + x.storing
}

// A server is what is known of the server that has a book. Where several have the keys, it is the history, which names
// the data of the server, and of the replicas that have all of it. A server that takes over from another one has a new
// history: it may have lost what the old one has acknowledged last. The values are on other servers, which still have
// them. Where one server has everything, it then has lost the values, too, since they are stored after their keys are
// noted. There it is the process.
type server struct{ history, process string }

func (x *books) server(ctx context.Context, number int) (server, error) {
	key := x.book(number)
	return client.Do(ctx, x.client, op, key, func(ctx context.Context) (s server, err error) {
		master, several, err := x.masters.MasterOf(ctx, key)
		switch {
		case err != nil:
		case several:
			s.history, err = master.History(ctx)
		default:
			s.process, err = master.Process(ctx)
		}
		return s, err
	})
}

// change changes a book in one step. It then lives for bookLife, perhaps for less than before: until the
// next note. Each try has a name, and change returns the name of the last one.
func (x *books) change(ctx context.Context, book string, by func(p redis.Pipeliner, try string)) (string, error) {
	return client.Do(ctx, x.client, op, book, func(ctx context.Context) (string, error) {
		try := rand.Text()
		return try, client.Transaction(ctx, x.client.Redis, func(p redis.Pipeliner) {
			by(p, try)
			p.PExpire(ctx, book, bookLife)
		})
	})
}

// inParallel calls do with each of n numbers, for as many at a time as there are books. After an error it calls
// do no more. A call that ends by runtime.Goexit is an error, where an errgroup would take it for a success.
func inParallel(n int, do func(i int) error) error {
	var next, failed atomic.Int64
	errs := make([]error, min(n, bookCount))
	work := func(worker int) {
		for i := int(next.Add(1)) - 1; i < n && failed.Load() == 0; i = int(next.Add(1)) - 1 {
			errs[worker] = foreign.ErrGoexit
			if errs[worker] = do(i); errs[worker] != nil {
				failed.Add(1)
			}
		}
	}
	var all sync.WaitGroup
	for worker := 1; worker < len(errs); worker++ {
		all.Go(func() { work(worker) })
	}
	if n > 0 {
		work(0)
	}
	all.Wait()
	return errors.Join(errs...)
}
