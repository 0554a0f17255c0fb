package client

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/local"
)

// A Tx reads keys of one slot in a transaction, or in a step of a [local.Store]. A key of a foreign type has no text.
type Tx interface {
	Get(key string) (string, error)
	GetRange(key string, from, to int64) (string, error)
	PTTL(key string) (time.Duration, error)
	Time() (time.Time, error)
}

// A Writer writes what a transaction has decided to write.
type Writer interface {
	Set(key, text string, life time.Duration)
	SetNX(key, text string, life time.Duration)
	SetRange(key string, at int64, part string)
	PExpire(key string, life time.Duration)
	Del(key string)
}

// A Judge reads keys, and decides what to write, nil if nothing, and the command's answer.
type Judge func(tx Tx) (write func(w Writer), done bool, err error)

// InOneStep has a command of keys in one slot judged in one step: on a server in a transaction.
func InOneStep(ctx context.Context, c *Client, keys []string, judge Judge) (done bool, err error) {
	if c.Local != nil {
		return InMemory(c.Local, keys[0], judge)
	}
	return Watch(ctx, c.Redis, keys, func(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
		write, done, err := judge(transaction{ctx, tx})
		if write == nil {
			return nil, done, err
		}
		return func(p redis.Pipeliner) { write(writer{ctx, p}) }, done, err
	})
}

// InMemory is InOneStep without a server.
func InMemory(memory *local.Store, key string, judge Judge) (done bool, err error) {
	step := memory.Begin(key)
	defer step.End()
	write, done, err := judge(step)
	if write != nil && err == nil {
		write(step)
	}
	return done, err
}

type transaction struct {
	ctx context.Context
	tx  *redis.Tx
}

func (t transaction) Get(key string) (string, error) { return textOf(t.tx.Get(t.ctx, key)) }

func (t transaction) GetRange(key string, from, to int64) (string, error) {
	return textOf(t.tx.GetRange(t.ctx, key, from, to))
}

func (t transaction) PTTL(key string) (time.Duration, error) { return t.tx.PTTL(t.ctx, key).Result() }

func (t transaction) Time() (time.Time, error) { return t.tx.Time(t.ctx).Result() }

func textOf(cmd *redis.StringCmd) (string, error) {
	s, err := cmd.Result()
	if errors.Is(err, redis.Nil) || WrongType(err) {
		return "", nil
	}
	return s, err
}

type writer struct {
	ctx context.Context
	p   redis.Pipeliner
}

func (w writer) Set(key, text string, life time.Duration)   { w.p.Set(w.ctx, key, text, life) }
func (w writer) SetNX(key, text string, life time.Duration) { w.p.SetNX(w.ctx, key, text, life) }
func (w writer) SetRange(key string, at int64, part string) { w.p.SetRange(w.ctx, key, at, part) }
func (w writer) PExpire(key string, life time.Duration)     { w.p.PExpire(w.ctx, key, life) }
func (w writer) Del(key string)                             { w.p.Del(w.ctx, key) }
