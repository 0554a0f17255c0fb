package singlefilltest

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/singlefill/singlefill"
)

// Codec returns c, or MsgPack if c is nil, for the [singlefill.Options] of a test. It decodes again
// each value that it encodes, and reports by t.Errorf the first field that did not come back, or why
// the value cannot be encoded or decoded. Close the cache before the test ends: a background refresh
// may still encode a value.
//
// Fields are compared one by one. A field that is dropped on purpose must be zero in the test. These
// differences are not reported:
//
//   - A time.Time is the same instant in another location. The same applies to each type that the
//     codec encodes by one of its methods, and that has a method Equal or Cmp.
//   - nil came back for an empty slice or map, or the reverse. MsgPack and JSON distinguish them,
//     except in fields with the option omitempty.
//   - An interface holds another type of the same kind, such as int8 for int, []any for []string, or
//     a map for a struct, and nothing in it is lost.
//   - A value under the key NaN of a map is another one.
//   - A function or channel is another one, and not nil. A json.RawMessage has other spaces.
//
// T must not be an interface: Codec would decode into the type of what is in it, and not into T. Codec
// does not suit types that keep the state of their encoding in fields, such as protobuf's.
func Codec(t testing.TB, c singlefill.Codec) singlefill.Codec {
	if c == nil {
		c = singlefill.MsgPack
	}
	checked := &checkedCodec{Codec: c, t: t, methods: []string{"MarshalBinary", "MarshalText", "MarshalJSON", "GobEncode"}}
	innermost := c
	for w, ok := c.(wrapper); ok; w, ok = innermost.(wrapper) {
		innermost = w.Unwrap()
	}
	switch innermost {
	case singlefill.MsgPack:
		checked.methods = []string{"EncodeMsgpack", "MarshalMsgpack", "MarshalBinary", "MarshalText"}
	case singlefill.JSON:
		checked.methods = []string{"MarshalJSON", "MarshalText"}
	}
	if _, ok := c.(keyed); ok {
		return keyedCodec{checked}
	}
	return checked
}

// A keyed codec binds what it encodes to a key.
type keyed interface {
	ForKey(namespace, key string) singlefill.Codec
}

// A keyedCodec checks a keyed codec.
type keyedCodec struct{ *checkedCodec }

func (k keyedCodec) ForKey(namespace, key string) singlefill.Codec {
	c := *k.checkedCodec
	c.Codec = c.Codec.(keyed).ForKey(namespace, key)
	return &c
}

// A wrapper changes only the bytes of another codec.
type wrapper interface{ Unwrap() singlefill.Codec }

type checkedCodec struct {
	singlefill.Codec
	t       testing.TB
	methods []string // by which it encodes values that have them
}

// Unwrap returns the checked codec, by which singlefill.New judges the type of a cache.
func (c *checkedCodec) Unwrap() singlefill.Codec { return c.Codec }

// Formats returns the formats of the checked codec, whose bytes it writes and reads.
func (c *checkedCodec) Formats() []string {
	if f, ok := c.Codec.(interface{ Formats() []string }); ok {
		return f.Formats()
	}
	return nil
}

func (c *checkedCodec) Marshal(v any) ([]byte, error) {
	data, err := c.Codec.Marshal(v)
	if err != nil {
		c.t.Errorf("singlefilltest: %s cannot be encoded: %v", nameOf(reflect.TypeOf(v)), err)
		return data, err
	}
	c.check(v, data)
	return data, nil
}

// check reports what of v is not in data.
func (c *checkedCodec) check(v any, data []byte) {
	typ := reflect.TypeOf(v)
	if typ == nil {
		typ = reflect.TypeFor[any]()
	}
	original := reflect.New(typ)
	if v != nil {
		original.Elem().Set(reflect.ValueOf(v))
	}
	decoded := reflect.New(typ)
	if err := c.unmarshal(data, decoded); err != nil {
		c.t.Errorf("singlefilltest: %s cannot be decoded again: %v", nameOf(typ), err)
		return
	}
	w := walker{codec: c}
	if l := w.compare(original.Elem(), decoded.Elem()); l != nil {
		c.t.Errorf("singlefilltest: %v", l.within("%s", nameOf(typ)))
	}
}

func (c *checkedCodec) unmarshal(data []byte, p reflect.Value) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("codec panicked: %v", r)
		}
	}()
	return c.Codec.Unmarshal(data, p.Interface())
}

// nameOf returns the beginning of a path.
func nameOf(typ reflect.Type) string {
	for typ != nil && typ.Kind() == reflect.Pointer && typ.Name() == "" {
		typ = typ.Elem()
	}
	switch {
	case typ == nil:
		return "nil"
	case typ.Name() != "":
		return typ.Name()
	}
	return "(" + typ.String() + ")"
}
