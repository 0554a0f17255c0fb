package tags

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// Each calls do with each tag that has an index, and with the number of its keys: values that have ended may
// still count. A tag may come twice.
func (x *Index) Each(ctx context.Context, do func(tag string, keys int64)) error {
	if x.client.Local != nil {
		x.client.Local.EachTag(x.namespace, do)
		return nil
	}
	for number := range bookCount {
		for cursor := uint64(0); ; {
			next, err := x.eachOf(ctx, number, cursor, do)
			if err != nil {
				return err
			}
			if cursor = next; cursor == 0 {
				break
			}
		}
	}
	return nil
}

func (x *Index) eachOf(ctx context.Context, number int, cursor uint64, do func(tag string, keys int64)) (next uint64, err error) {
	type step struct {
		fields []string
		cursor uint64
	}
	book := x.book(number)
	s, err := client.Do(ctx, x.client, op, book, func(ctx context.Context) (s step, err error) {
		s.fields, s.cursor, err = x.client.Redis.HScan(ctx, book, cursor, "t*", 500).Result()
		return s, err
	})
	if err != nil || len(s.fields) == 0 {
		return s.cursor, err
	}
	sizes, err := client.Do(ctx, x.client, op, book, func(ctx context.Context) ([]redis.Cmder, error) {
		return client.Pipelined(ctx, x.client.Redis, func(p redis.Pipeliner) {
			for i := 0; i < len(s.fields); i += 2 {
				p.ZCard(ctx, x.index(s.fields[i][1:]))
			}
		})
	})
	if err != nil {
		return 0, err
	}
	for i, size := range sizes {
		if keys := size.(*redis.IntCmd).Val(); keys > 0 {
			do(s.fields[2*i][1:], keys)
		}
	}
	return s.cursor, nil
}
