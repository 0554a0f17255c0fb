package singlefill

import (
	"context"
	"errors"
	"reflect"
	"time"

	"github.com/singlefill/singlefill/internal/clone"
	"github.com/singlefill/singlefill/internal/codec"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/foreign"
)

// A Codec turns values into bytes and back. It must be safe for concurrent use.
type Codec interface {
	// Marshal encodes v, a value of the T of the cache, and must not change it. The result may
	// share memory with v: the cache copies it before another caller gets v. An error fails Set,
	// but not a load.
	Marshal(v any) ([]byte, error)

	// Unmarshal decodes data into v, a pointer to a zero T. It must neither change data nor keep a
	// part of it. It must accept any bytes, since everybody with access to Redis can write them. If
	// it fails, the read is a miss.
	Unmarshal(data []byte, v any) error
}

// The codecs of this package. A panic in a marshalling method of a user's type becomes an error.
//
// MsgPack and JSON refuse bytes that could take more than
//
//	64 MiB + 64 × the length of the bytes
//
// of memory as a T, since a byte or two can stand for a whole element: a megabyte of nils decodes
// into a million structs. The bound is the number of array items times the largest slice element
// within T, and likewise for map entries and maps (see internal/msgcheck), counted for each level of
// nesting by itself. It is an over-estimate, so a T of many small numbers beside a few huge structs
// at the same level may be refused without need. Marshal applies the same limit: a value that could
// not be read back is an error when it is written. For a T that is an interface, Marshal judges the
// value in it.
//
// [New] refuses a T of which MsgPack or JSON keeps nothing, or with a part that can hold nothing but
// nil: a func, a channel, a complex number, an interface with methods, an embedded pointer to an
// unexported struct, a pointer type that points to itself. It does not judge types with marshalling
// methods, nor fields with the tag "-", nor fields that omitempty leaves out. MsgPack stores an error
// as its text, and decodes a time.Time, and types given to msgpack.RegisterExt, into any interface.
var (
	// MsgPack is the default: fast, compact, and it distinguishes nil from empty.
	//
	//   - Fields are named by the tag `msgpack:"name"` or by their Go name. It ignores json tags: a
	//     field with `json:"-"` is stored. Use JSON for types that rely on them.
	//   - It drops unexported fields; singlefilltest.Codec finds fields that are lost. It does not
	//     support the option intern of its tag.
	//   - It ignores a field that T does not have, and leaves a missing field zero: entries of an
	//     older T decode without an error. Change the namespace with the schema.
	//   - Integers wrap silently: 300 read into an int8 is 44. Widen fields, do not narrow them.
	//   - A time.Time comes back as the same instant in Local: compare with Equal.
	//   - In an any, numbers come back as the narrowest type, slices as []any, structs as
	//     map[string]any.
	//   - It refuses more than 512 levels of nesting. A value that contains itself is a fatal stack
	//     overflow.
	MsgPack Codec = codec.MsgPack

	// JSON is encoding/json: readable by other programs and stricter, at about twice the cost of
	// MsgPack. In an any, numbers come back as float64. It replaces invalid UTF-8 in strings.
	JSON Codec = codec.JSON

	// Raw stores []byte and string, and types derived from them, unchanged. It cannot distinguish
	// nil from empty: a nil slice comes back empty.
	Raw Codec = codec.Raw
)

// values is all that knows T. The engine holds a value as a pointer to a T; nil stands for none.
type values struct {
	// encode and decode return a panic of the codec as an error: the codec may be the user's, and the
	// bytes hostile.
	encode func(value any) (payload []byte, err error)
	decode func(payload []byte) (value any, err error)

	// clone returns a pointer to a T that shares no mutable memory with value once it is copied. It is
	// nil if T is not plain, or if the codec is the user's and may share parts of values.
	clone func(value any) any

	// life is TTLFunc, or nil.
	life func(key string, value any) time.Duration
}

// valueOf returns the T of a value of the engine, or the zero T for nil.
func valueOf[T any](value any) (v T) {
	if p, ok := value.(*T); ok {
		v = *p
	}
	return v
}

func newValues[T any](by Codec, ttlFunc func(key string, v T) time.Duration) (v values, err error) {
	typ := reflect.TypeFor[T]()
	if err := codec.Takes(by, typ); err != nil {
		return v, err
	}
	v.encode = func(value any) (payload []byte, err error) {
		defer recovered(&err)
		if payload, err = by.Marshal(*value.(*T)); err == nil && payload == nil {
			payload = []byte{}
		}
		return payload, err
	}
	v.decode = func(payload []byte) (value any, err error) {
		defer recovered(&err)
		p := new(T)
		if err = by.Unmarshal(payload, p); err == nil {
			value = p
		}
		return value, err
	}
	if codec.Own(by) {
		v.clone = clone.Func(typ)
	}
	if ttlFunc != nil {
		v.life = func(key string, value any) time.Duration { return ttlFunc(key, *value.(*T)) }
	}
	return v, nil
}

func recovered(err *error) {
	if p := recover(); p != nil {
		*err = errors.New("codec panicked: " + foreign.Text(p))
	}
}

// decode reads an entry and judges its freshness. Bytes that are not an entry, or not of a T, are a
// miss; they are counted.
func (c *engine) decode(ctx context.Context, key string, data []byte, l *lookup) {
	l.data, l.at = data, time.Now()
	var err error
	if l.entry, err = entry.Parse(data); err == nil {
		if use := c.freshnessOf(&l.entry, l.at); use > expired {
			if l.entry.NotFound {
				l.err = ErrNotFound
			} else {
				l.value, err = c.values.decode(l.entry.Payload)
			}
			if err == nil {
				l.freshness = use
			}
		}
	}
	if err != nil {
		c.badValue(ctx, key, err)
	}
}

// encode returns the entry to store for an outcome, or nil and the note with which to release the
// lock.
func (c *engine) encode(o *outcome) (data []byte, note filllock.ReleaseNote) {
	switch {
	case o.Err == nil:
		o.entry.Payload, o.StoreErr = c.values.encode(o.value)
	case o.notFound:
		o.life, note.Failure = c.shorten(c.opts.notFoundTTL), filllock.NotFoundRecord
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
