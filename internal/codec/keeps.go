package codec

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	"github.com/vmihailenco/msgpack/v5"
)

// checkKeeps returns an error if c stores nothing of a typ: if all the data of typ is in struct fields
// that c drops. An empty struct has nothing to lose.
func checkKeeps(c any, typ reflect.Type) error {
	k := keeper{seen: make(map[reflect.Type]bool)}
	switch c.(type) {
	case msgPackCodec:
		k.name, k.tag, k.marshal = "MsgPack", "msgpack", msgpack.Marshal
		k.methods = []reflect.Type{reflect.TypeFor[msgpack.CustomEncoder](), reflect.TypeFor[msgpack.Marshaler](),
			reflect.TypeFor[encoding.BinaryMarshaler](), reflect.TypeFor[encoding.TextMarshaler]()}
		k.isStruct = func(data []byte) bool { return data[0]&0xe0 == 0x80 || data[0] >= 0xdc && data[0] <= 0xdf } // map or array
	case jsonCodec:
		k.name, k.tag, k.marshal = "JSON", "json", json.Marshal
		k.methods = []reflect.Type{reflect.TypeFor[json.Marshaler](), reflect.TypeFor[encoding.TextMarshaler]()}
		k.isStruct = func(data []byte) bool { return data[0] == '{' }
	default:
		return nil
	}
	if lost := k.lost(typ); lost != nil {
		return fmt.Errorf("singlefill: T is %v: %s keeps nothing of %v, since it drops fields that are not exported or have the tag `%s:\"-\"`; export a field, give the type marshalling methods, or set Options.Codec",
			typ, k.name, lost, k.tag)
	}
	return nil
}

// A keeper knows what one codec keeps.
type keeper struct {
	name     string // of the codec
	tag      string // of its options for a field
	methods  []reflect.Type
	marshal  func(v any) ([]byte, error)
	isStruct func(data []byte) bool
	seen     map[reflect.Type]bool
}

// lost returns the struct within typ because of which nothing of typ is kept, or nil.
func (k *keeper) lost(typ reflect.Type) reflect.Type {
	switch typ.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array:
		return k.lost(typ.Elem())
	case reflect.Map:
		return k.lost(typ.Elem())
	case reflect.Struct:
	default:
		return nil
	}
	if typ.NumField() == 0 || k.seen[typ] || k.encodesItself(typ) {
		return nil
	}
	k.seen[typ] = true
	lost := typ
	for i := range typ.NumField() {
		f := typ.Field(i)
		if name, _, _ := strings.Cut(f.Tag.Get(k.tag), ","); name == "-" || !f.IsExported() && !f.Anonymous {
			continue
		}
		if lost = k.lost(f.Type); lost == nil {
			return nil // this field is kept
		}
	}
	return lost
}

// encodesItself reports whether the codec encodes a typ by a method of typ, or by an encoder that is
// registered for typ: otherwise than as a struct.
func (k *keeper) encodesItself(typ reflect.Type) (itself bool) {
	for _, method := range k.methods {
		if reflect.PointerTo(typ).Implements(method) {
			return true
		}
	}
	defer func() {
		if recover() != nil { // code of the user
			itself = true
		}
	}()
	data, err := k.marshal(reflect.New(typ).Interface())
	return err != nil || !k.isStruct(data)
}
