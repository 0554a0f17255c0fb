package singlefill

import (
	"errors"
	"reflect"
	"time"

	"github.com/singlefill/singlefill/internal/clone"
	"github.com/singlefill/singlefill/internal/codec"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/value"
)

// A Codec turns values into bytes and back, for many goroutines at once. It may have two more methods:
//
//   - Unwrap() Codec, if it only changes the bytes of another codec, returns that one: by it [New] judges T
//     and [Near] copies values.
//   - Formats() []string returns names of formats: first of what Marshal writes, then of what Unmarshal reads
//     besides. An entry in another format is a bad value, so that a miss stands where wrong values could. A name
//     must never change. Without this method the format is the same for all codecs without it.
//
// The formats of this package are msgpack, json and raw.
type Codec interface {
	// Marshal encodes v, a value of the T of the cache, and must not change it. The result may
	// share memory with v. An error fails Set, but not a load.
	Marshal(v any) ([]byte, error)

	// Unmarshal decodes data into v, a pointer to a zero T. It must neither change data nor keep a
	// part of it, and must accept any bytes. If it fails, the read is a miss.
	Unmarshal(data []byte, v any) error
}

// inner returns the codec that c wraps, or c.
func inner(c Codec) Codec {
	for {
		wrapper, ok := c.(interface{ Unwrap() Codec })
		if !ok {
			return c
		}
		c = wrapper.Unwrap()
	}
}

// The codecs of this package. docs/values.md lists what each changes or drops.
//
// MsgPack and JSON refuse bytes that could take more than 64 MiB + 64 × their length of memory as a T,
// and Marshal refuses a value that would become them. [New] refuses a T of which MsgPack or JSON keeps nothing, or
// loses a part of every value, such as a func, an interface with methods, or what stands beside an embedded
// time.Time. A panic in a marshalling method of a user's type becomes an error.
var (
	// MsgPack is the default: fast, compact, and it distinguishes nil from empty. It ignores json tags:
	// a field with `json:"-"` is stored. It drops unexported fields, ignores a field that T does not
	// have, and leaves a missing one zero: change the namespace with the schema. A time.Time comes back
	// in Local: compare with Equal.
	MsgPack Codec = codec.MsgPack

	// JSON is encoding/json: readable by other programs and stricter, at about twice the cost.
	JSON Codec = codec.JSON

	// Raw stores []byte and string, and types derived from them, unchanged. A nil slice comes back
	// empty.
	Raw Codec = codec.Raw
)

// valueOf returns the T of a value of the engine, or the zero T for nil.
func valueOf[T any](v any) (t T) {
	if p, ok := v.(*T); ok {
		t = *p
	}
	return t
}

// newValues returns what knows T.
func newValues[T any](s settings, opts *Options[T]) (v *value.Type, err error) {
	by, typ := s.codec, reflect.TypeFor[T]()
	if err := codec.Takes(inner(by), typ); err != nil {
		return nil, err
	}
	v = &value.Type{Formats: codec.FormatsOf(by), Policy: s.Policy}
	v.Encode = func(v any) (payload []byte, err error) {
		defer recovered(&err)
		if payload, err = by.Marshal(*v.(*T)); err == nil && payload == nil {
			payload = []byte{}
		}
		return payload, err
	}
	v.Decode = func(payload []byte) (v any, err error) {
		defer recovered(&err)
		p := new(T)
		if err = by.Unmarshal(payload, p); err == nil {
			v = p
		}
		return v, err
	}
	v.Boxed = func(v any) *value.Copy { return value.Box(*v.(*T)) }
	if codec.Own(inner(by)) {
		v.Clone = clone.Func(typ)
	}
	if life := opts.TTLFunc; life != nil {
		v.Life = func(key string, v any) time.Duration { return life(key, *v.(*T)) }
	}
	if tags := opts.Tags; tags != nil {
		v.Tags = func(key string, v any) ([]string, error) {
			return callTags(key, func() []string { return tags(key, valueOf[T](v)) })
		}
	}
	return v, nil
}

func recovered(err *error) {
	if p := recover(); p != nil {
		*err = errors.New("codec panicked: " + foreign.Text(p))
	}
}

// encode returns the entry to store for an outcome, or nil and the note with which to release the
// lock.
func (c *engine) encode(o *outcome) (data []byte, note filllock.ReleaseNote) {
	switch {
	case o.Err == nil:
		o.entry.Payload, o.StoreErr = c.values.Encode(o.value)
		o.entry.Format = c.values.Formats.Written
	case o.notFound:
		o.life, note.Failure = c.store.LifeOfNotFound(), filllock.NotFoundRecord
	case foreign.Is(o.Err, ErrClosed):
		return nil, note // this process is closing; other processes can still load
	default:
		note.Failure = filllock.FailureRecord(c.opts.errors.nameOf(o.Err), o.text)
		return nil, note
	}
	o.entry.NotFound, o.entry.LoadTime, o.entry.WrittenAt = o.notFound, o.Duration, time.Now()
	if o.StoreErr == nil {
		o.entry.FreshUntil = o.entry.WrittenAt.Add(o.life)
		data, o.StoreErr = o.entry.Encode()
	}
	if o.StoreErr != nil {
		o.entry.Payload = nil
		return nil, note
	}
	o.entry.Payload = data[entry.HeaderLen:] // the codec may have returned memory of the value itself
	if o.life < time.Millisecond {
		note.Drop = true // remove the old entry, too
		return nil, note
	}
	return data, note
}
