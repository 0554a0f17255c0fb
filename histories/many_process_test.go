package histories

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/singlefill/singlefill"
)

// The calls for many keys of the cache threads. The outcome of each key is a separate op, with the
// begin and the end of the call.

// beginMany reports the ops of a call.
func (x *process) beginMany(p plan, name string, keys []int) (ops calls, names []string) {
	ops = make(calls)
	for _, key := range keys {
		p := p.at(key)
		ops[p.Name] = x.begin(p, name, 0, 0)
		names = append(names, p.Name)
	}
	return ops, names
}

func (x *process) getOrLoadMany(ctx context.Context, p plan, cache *singlefill.Cache[int64], keys []int) {
	ops, names := x.beginMany(p, opGetOrLoadMany, keys)
	values, err := cache.GetOrLoadMany(ops.inside(ctx), names, x.manyLoader(p))
	x.endMany(ops, values, err, singlefill.ErrNotFound)
}

func (x *process) getMany(p plan, cache *singlefill.Cache[int64], keys []int) {
	ops, names := x.beginMany(p, opGetMany, keys)
	values, err := cache.GetMany(ops.inside(context.Background()), names)
	x.endMany(ops, values, err, singlefill.ErrMiss)
}

// endMany reports the outcome of each key. none is the outcome of a key that has neither a value
// nor an error.
func (x *process) endMany(ops calls, values map[string]int64, err error, none error) {
	for name, c := range ops {
		v, ok := values[name]
		err := errorOf(err, name)
		if err == nil && !ok {
			err = none
		}
		x.endRead(c, v, singlefill.ValueInfo{}, err)
	}
}

// errorOf returns what the error of a call says of one key.
func errorOf(err error, name string) error {
	var many *singlefill.ManyError
	if errors.As(err, &many) {
		return many.Errs[name]
	}
	return err
}

// manyLoader returns the ManyLoader of a history: the versions of the source, after a while.
func (x *process) manyLoader(p plan) singlefill.ManyLoader[int64] {
	return func(ctx context.Context, names []string) (map[string]int64, error) {
		loads, versions := make(map[string]*call), make(map[string]int64)
		for _, name := range names {
			loads[name] = x.beginLoad(p, callsOf(ctx)[name])
		}
		for _, name := range names {
			versions[name] = x.version(name)
		}
		time.Sleep(rand.N(p.LoadTime + 1)) // the values become older on their way
		failed := profiles[p.Of].failing && rand.IntN(4) == 0
		for name, l := range loads {
			v := versions[name]
			switch {
			case failed:
				l.end(op{Result: resultFailed})
			case isAbsent(v):
				l.end(op{Result: resultAbsent, Value: v})
				delete(versions, name)
			default:
				l.end(op{Result: resultOK, Value: v})
			}
		}
		if failed {
			return nil, errSource
		}
		return versions, nil
	}
}
