package singlefill

import (
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/singlefill/singlefill/internal/clone"
	"github.com/singlefill/singlefill/internal/codec"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
)

// A Codec turns values into bytes and back, for many goroutines at once. Its methods must return: a panic is an error
// of the codec, and after runtime.Goexit the calls that wait for the value return a [*PanicError]. It may have three
// more methods:
//
//   - Unwrap() Codec, if it only changes the bytes of another codec, returns the inner codec, by which [New]
//     judges T and [Near] copies values.
//   - Formats() []string returns names of formats: first of what Marshal writes, then of what Unmarshal reads
//     besides. An entry in another format is a bad value, so that a miss stands where wrong values could. A name
//     must never change. Without this method the format is the same for all codecs without it.
//   - ForKey(namespace, key string) Codec returns the codec for the values of one key. With it an encrypting codec
//     binds their bytes to the key: an entry that was copied to another key is then a bad value. The cache calls
//     ForKey before each Marshal and Unmarshal, and calls the methods of the result only, so let the codec's own
//     Marshal fail. [New] refuses a wrapper without ForKey whose Unwrap returns a codec with it. See the
//     example "ForKey".
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

// A keyed codec binds what it encodes to a key.
type keyed interface {
	ForKey(namespace, key string) Codec
}

// inner returns the codec that c wraps, or c. It returns an error if a wrapper loses the method ForKey of the codec
// that it wraps.
func inner(c Codec) (Codec, error) {
	for {
		wrapper, ok := c.(interface{ Unwrap() Codec })
		if !ok {
			return c, nil
		}
		wrapped := wrapper.Unwrap()
		_, keeps := c.(keyed)
		if _, has := wrapped.(keyed); has && !keeps {
			return nil, fmt.Errorf("singlefill: Options.Codec %T has no method ForKey and wraps %T, which has it: give the wrapper ForKey, too", c, wrapped)
		}
		c = wrapped
	}
}

// The codecs of this package. docs/values.md lists what each changes or drops.
//
// MsgPack and JSON refuse bytes that could take more than 64 MiB + 64 × their length of memory as a T,
// and Marshal refuses a value that would become them. [New] refuses a T of which MsgPack or JSON keeps nothing, or
// loses a part of every value, such as a func, an interface with methods, a struct without exported fields, or
// what stands beside an embedded time.Time. A panic in a marshalling method of a user's type becomes an error.
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

// valueOf returns the T of a value of the rooms, or the zero T for nil.
func valueOf[T any](v any) (t T) {
	if p, ok := v.(*T); ok {
		t = *p
	}
	return t
}

// newType returns what knows T. Its functions are compiled for each T, so what they share is in typeOf.
func newType[T any](namespace string, s settings, opts *Options[T]) (*value.Type, error) {
	v, err := typeOf(namespace, s, reflect.TypeFor[T](), func() any { return new(T) }, func(p any) any { return *p.(*T) })
	if err != nil {
		return nil, err
	}
	v.Policy.Version = opts.Version
	v.Boxed = value.Box[T]
	if life := opts.TTLFunc; life != nil {
		v.Life = func(key string, v any) time.Duration { return life(key, *v.(*T)) }
	}
	if of := opts.Tags; of != nil {
		v.Tags = func(key string, v any) ([]string, error) {
			return callTags(key, func() []string { return of(key, valueOf[T](v)) })
		}
	}
	return v, nil
}

// typeOf returns what is known of a type of values without naming it. zero returns a pointer to a new value, and get
// the value behind a pointer.
func typeOf(namespace string, s settings, typ reflect.Type, zero func() any, get func(p any) any) (*value.Type, error) {
	by := s.codec
	in, err := inner(by)
	if err == nil {
		err = codec.Takes(in, typ)
	}
	if err != nil {
		return nil, err
	}
	binds, isKeyed := by.(keyed)
	of := func(key string) Codec {
		if isKeyed {
			return binds.ForKey(namespace, key)
		}
		return by
	}
	tries := typ.Kind() == reflect.Interface && codec.Own(in) // Marshal gets what T holds, and does not know T
	v := &value.Type{Formats: codec.FormatsOf(by), Policy: s.Policy}
	v.Encode = func(key string, v any) (payload []byte, err error) {
		defer recovered(&err)
		if payload, err = of(key).Marshal(get(v)); err == nil && payload == nil {
			payload = []byte{}
		}
		if err == nil && tries {
			if err = of(key).Unmarshal(payload, zero()); err != nil {
				err = fmt.Errorf("singlefill: what %T becomes cannot be read as %v: %w", get(v), typ, err)
			}
		}
		return payload, err
	}
	v.Decode = func(key string, payload []byte) (v any, err error) {
		defer recovered(&err)
		p := zero()
		if err = of(key).Unmarshal(payload, p); err == nil {
			v = p
		}
		return v, err
	}
	if codec.Own(in) {
		v.Clone = clone.Func(typ)
	}
	return v, nil
}

func recovered(err *error) {
	if p := recover(); p != nil {
		*err = errors.New("codec panicked: " + foreign.Text(p))
	}
}

const maxTags = 32 // of a value

// callTags calls Options.Tags for the value of a key.
func callTags(key string, call func() []string) (names []string, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = errors.New("singlefill: Options.Tags panicked: " + foreign.Text(p))
		}
	}()
	names, err = tags.Names(call())
	if err == nil && len(names) > maxTags {
		err = fmt.Errorf("singlefill: Options.Tags returned %d tags for the key %.100q: at most %d are allowed", len(names), key, maxTags)
	}
	return names, err
}
