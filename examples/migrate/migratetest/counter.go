package migratetest

import (
	"context"
	"errors"
	"sync"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"
)

// count counts the commands of rdb that the server answers, apart from refusals, by name. Under the
// name "" it counts all of them.
func count(rdb *redis.Client) func(name string) int64 {
	var mu sync.Mutex
	calls := make(map[string]int64) // protected by mu
	onAnswer(rdb, func(name string) {
		mu.Lock()
		defer mu.Unlock()
		calls[name]++
		calls[""]++
	})
	return func(name string) int64 {
		mu.Lock()
		defer mu.Unlock()
		return calls[name]
	}
}

// onAnswer calls then after each command of rdb that the server has answered, but not refused.
func onAnswer(rdb *redis.Client, then func(name string)) {
	rdb.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		err := next(ctx, cmd)
		if err == nil || errors.Is(err, redis.Nil) {
			then(cmd.Name())
		}
		return err
	}))
}
