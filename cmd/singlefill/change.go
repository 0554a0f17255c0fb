package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/value"
)

// cache returns a cache of the namespace, by which entries are changed as processes change them.
func (x *execution) cache(namespace string, trace *singlefill.Trace) (*singlefill.Cache[any], error) {
	return singlefill.New[any](x.rdb, namespace, time.Hour, &singlefill.Options[any]{
		RedisTimeout: x.timeout, LockTTL: 4 * x.timeout, LoadTimeout: 5 * x.timeout, Trace: trace, // nothing is loaded
		// The records that tell processes with Near of a change are appended in any case. The log lives
		// four times as long as this, which is not shorter than processes with a longer MaxLag need.
		Near: &singlefill.Near{Size: 1, MaxLag: time.Hour},
	})
}

func prepareDelete(x *execution, _ *flag.FlagSet) func(ctx context.Context, args []string) error {
	return func(ctx context.Context, args []string) error {
		return x.change(ctx, args[0], args[1:], "deleted", (*singlefill.Cache[any]).Delete)
	}
}

func prepareExpire(x *execution, _ *flag.FlagSet) func(ctx context.Context, args []string) error {
	return func(ctx context.Context, args []string) error {
		return x.change(ctx, args[0], args[1:], "made stale", (*singlefill.Cache[any]).Expire)
	}
}

// change changes keys, and says which of them had an entry before. It changes the others, too, since
// loads of them may be running.
func (x *execution) change(ctx context.Context, namespace string, keys []string, done string,
	do func(c *singlefill.Cache[any], ctx context.Context, keys ...string) error) error {
	c, err := x.cache(namespace, nil)
	if err != nil {
		return err
	}
	lives := make([]*redis.DurationCmd, len(keys))
	_, err = x.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, key := range keys {
			lives[i] = p.PTTL(ctx, value.Key(namespace, key))
		}
		return nil
	})
	if err != nil {
		return errors.Join(err, c.Close())
	}
	absent := []string{}
	for i, key := range keys {
		if lives[i].Val() == -2 { // ns, as go-redis has it
			absent = append(absent, key)
		}
	}
	if err := errors.Join(do(c, ctx, keys...), c.Close()); err != nil {
		return err
	}
	if x.json {
		return x.printJSON(map[string]any{"namespace": namespace, "keys": keys, "absent": absent})
	}
	for _, key := range keys {
		if slices.Contains(absent, key) {
			fmt.Fprintf(x.stdout, "%s: no entry was there; loads of it that run now are not stored\n", printable(key))
			continue
		}
		fmt.Fprintf(x.stdout, "%s: %s\n", printable(key), done)
	}
	return nil
}

func prepareClear(x *execution, flags *flag.FlagSet) func(ctx context.Context, args []string) error {
	yes := flags.Bool("yes", false, "do not ask")
	var tags []string
	flags.Func("tag", "delete only the values that have `TAG`; more than once: those that have one of them", func(tag string) error {
		tags = append(tags, tag)
		return nil
	})
	return func(ctx context.Context, args []string) error {
		if !*yes {
			what := "This deletes every key of the namespace %s."
			if len(tags) > 0 {
				what = "This deletes the values of the namespace %s that have one of the tags."
			}
			if err := x.confirm(ctx, what, args[0]); err != nil {
				return err
			}
		}
		if len(tags) > 0 {
			return x.clearTags(ctx, args[0], tags)
		}
		return x.clear(ctx, args[0])
	}
}

// confirm asks whether to clear a namespace.
func (x *execution) confirm(ctx context.Context, what, namespace string) error {
	if !x.ask {
		return errors.New("clear asks before it deletes everything, and stdin is no terminal: use -yes")
	}
	fmt.Fprintf(x.stderr, what+" Its name, to go on: ", printable(namespace))
	answers := make(chan string, 1)
	go func() { // an interrupt does not end the read
		answer, _ := bufio.NewReader(x.stdin).ReadString('\n')
		answers <- strings.TrimSpace(answer)
	}()
	select {
	case answer := <-answers:
		if answer != namespace {
			return errors.New("nothing was deleted: the answer was not the name of the namespace")
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (x *execution) clear(ctx context.Context, namespace string) error {
	var mu sync.Mutex
	var removed int64 // protected by mu, as the terminal
	c, err := x.cache(namespace, &singlefill.Trace{Clearing: func(_ context.Context, info singlefill.ClearInfo) {
		mu.Lock()
		defer mu.Unlock()
		removed = max(removed, info.Removed)
		x.showProgress("pass %d of 2: %d of %d keys looked at, %d values deleted", info.Pass, info.Scanned, info.Keys, info.Removed)
	}})
	if err == nil {
		err = errors.Join(c.Clear(ctx), c.Close())
	}
	x.clearProgress()
	if err != nil {
		return err
	}
	if x.json {
		return x.printJSON(map[string]any{"namespace": namespace, "removed": removed})
	}
	fmt.Fprintf(x.stdout, "%d values deleted\n", removed)
	return nil
}
