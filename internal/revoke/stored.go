package revoke

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
)

// tagging is the purpose of the commands for tags.
const tagging = "tag"

// A storedValue is a value as Redis has it.
type storedValue struct {
	key, valueKey string
	data          []byte
	size          int64         // of all data
	life          time.Duration // that is left
	err           error         // why its tags are not known
}

// rebuildBatch is how many values are read, noted and removed at a time: fewer than elsewhere, since the scripts that
// note them keep a server busy, and commands of other clients wait for them.
const rebuildBatch = 32

const (
	smallValue = 1 << 10 // bytes: values up to this size come with the first command
	readBytes  = 1 << 18 // bytes of larger values in one pipeline; a value that is larger than this has its own
)

// readValues reads the values that are still there.
func (r *rebuild) readValues(ctx context.Context, valueKeys []string) (values []*storedValue, err error) {
	all := make([]*storedValue, len(valueKeys))
	for i, valueKey := range valueKeys {
		all[i] = &storedValue{valueKey: valueKey}
	}
	type head struct {
		data []byte
		life time.Duration
	}
	heads, err := readFrom(ctx, r, all, func(p redis.Pipeliner, valueKey string) func() (head, error) {
		data, life := p.GetRange(ctx, valueKey, 0, smallValue-1), p.PTTL(ctx, valueKey)
		return func() (head, error) {
			return head{[]byte(data.Val()), life.Val()}, cmp.Or(data.Err(), life.Err())
		}
	})
	if err != nil {
		return nil, err
	}
	var large []*storedValue
	for i, v := range all {
		v.data, v.life, v.err = heads[i].Value.data, heads[i].Value.life, heads[i].Err
		var ours bool
		v.key, ours = r.keyOf(v.valueKey)
		switch {
		case !ours || v.err == nil && len(v.data) == 0 || v.life == -2: // ns, as go-redis has it: it is gone, or was
			continue
		case v.err == nil && len(v.data) == smallValue:
			if v.size = entry.Size(v.data); v.size > smallValue {
				large = append(large, v)
			}
		}
		values = append(values, v)
	}
	err = r.readLarge(ctx, large)
	return slices.DeleteFunc(values, func(v *storedValue) bool { return v.err == redis.Nil }), err // gone in between
}

// readLarge reads whole values, a few at a time.
func (r *rebuild) readLarge(ctx context.Context, values []*storedValue) error {
	for len(values) > 0 {
		n, size := 1, values[0].size
		for n < len(values) && size+values[n].size <= readBytes {
			size += values[n].size
			n++
		}
		some := values[:n]
		values = values[n:]
		whole, err := readFrom(ctx, r, some, func(p redis.Pipeliner, valueKey string) func() ([]byte, error) {
			return p.Get(ctx, valueKey).Bytes
		})
		if err != nil {
			return err
		}
		for i, v := range some {
			v.data, v.err = whole[i].Value, whole[i].Err
		}
	}
	return nil
}

// readFrom sends commands for values in one pipeline, and returns their replies. A value that is no string has an
// error.
func readFrom[R any](ctx context.Context, r *rebuild, values []*storedValue,
	send func(p redis.Pipeliner, valueKey string) (take func() (R, error))) ([]client.Reply[R], error) {
	return client.Do(ctx, r.keys.client, tagging, values[0].valueKey, func(ctx context.Context) (replies []client.Reply[R], failed error) {
		takes := make([]func() (R, error), len(values))
		_, _ = client.Pipelined(ctx, r.keys.client.Redis, func(p redis.Pipeliner) { // each reply has its error
			for i, v := range values {
				takes[i] = send(p, v.valueKey)
			}
			p.Del(ctx, values[0].valueKey+":none") // a write of nothing, so that no replica answers: it may be behind
		})
		replies = make([]client.Reply[R], len(values))
		for i := range values {
			one := &replies[i]
			if one.Value, one.Err = takes[i](); one.Err != nil && !client.WrongType(one.Err) && !errors.Is(one.Err, redis.Nil) {
				failed = cmp.Or(failed, one.Err)
			}
		}
		return replies, failed
	})
}

// keyOf returns the key of a caller to which a value key belongs.
func (t *Tags) keyOf(valueKey string) (key string, ok bool) {
	tag := strings.TrimSuffix(strings.TrimPrefix(valueKey, t.space.namespace+":{"), "}")
	if key = client.Untag(tag); key == "" {
		return "", false
	}
	return key, t.keys.store.Key(key) == valueKey
}

// tagsOfStored returns the tags of an entry.
func (t *Tags) tagsOfStored(key string, data []byte) ([]string, error) {
	e, err := entry.Parse(data)
	var value any
	if err == nil && !e.NotFound {
		value, err = t.keys.store.Type.DecodeEntry(key, &e)
	}
	if err != nil {
		return nil, err
	}
	return t.keys.store.TagsOf(key, value)
}
