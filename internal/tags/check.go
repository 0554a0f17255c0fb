package tags

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// Check returns an error if the server refuses a command for tags. It sends them for a book that no process
// reads, and removes it.
func (x *Index) Check(ctx context.Context) error {
	if x.client.Local != nil {
		return nil
	}
	other := New(x.client, x.namespace+":check:"+rand.Text(), time.Second, 0)
	note := []Note{{Key: "k", Tags: []string{"t"}, Life: time.Second}}
	book, index := other.book(bookOf("t")), other.index("t")
	_, server := x.server(ctx, bookOf("t"))
	_, err := other.prove(ctx, bookOf("t"))
	if err == nil {
		_, err = other.Note(ctx, note)
	}
	if err == nil {
		_, err = other.Mark(ctx, note[0].Tags)
	}
	if err == nil {
		err = other.Keys(ctx, "t", func([]string) error { return nil })
	}
	if err == nil || !client.Unreachable(err) { // a script does not name the command that is refused
		err = errors.Join(err, other.checkCommands(ctx, book, index))
	}
	_, removed := client.Do(ctx, x.client, op, book, func(ctx context.Context) (int64, error) {
		return x.client.Redis.Unlink(ctx, book, index).Result()
	})
	return errors.Join(server, err, removed)
}

func (x *Index) checkCommands(ctx context.Context, book, index string) error {
	var errs []error
	for _, args := range [][]any{
		{"hset", book, "", ""}, {"pexpire", book, 1000}, {"hget", book, ""}, {"hmget", book, ""}, {"hsetnx", book, "", ""},
		{"unlink", book + ":none"}, {"hdel", book, ""}, {"hrandfield", book, 1}, {"pttl", book}, {"exists", index}, {"zadd", index, "gt", 1, "k"},
		{"pexpire", index, 1000}, {"zrangebyscore", index, 0, 1}, {"zscan", index, 0}, {"zremrangebyscore", index, 0, 0},
		{"zrem", index, "k"}, {"time"},
	} {
		_, err := client.Do(ctx, x.client, op, book, func(ctx context.Context) (any, error) {
			return x.client.Redis.Do(ctx, args...).Result()
		})
		if err != nil && !errors.Is(err, redis.Nil) {
			errs = append(errs, fmt.Errorf("command %v: %w", args[0], err))
		}
	}
	return errors.Join(errs...)
}
