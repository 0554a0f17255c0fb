package codec

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/singlefill/singlefill/internal/foreign"
)

// A method is one by which a type encodes or decodes itself.
type method struct {
	of   reflect.Type // the interface that has the method
	call func(v any, data []byte) ([]byte, error)
}

func encodesBy[M any](f func(v M) ([]byte, error)) method {
	return method{reflect.TypeFor[M](), func(v any, _ []byte) ([]byte, error) { return f(v.(M)) }}
}

func decodesBy[M any](f func(v M, data []byte) error) method {
	return method{reflect.TypeFor[M](), func(v any, data []byte) ([]byte, error) { return nil, f(v.(M), data) }}
}

// The methods that a codec calls. It calls the first of them that a type has.
var (
	msgPackEncodes = []method{
		encodesBy(func(v msgpack.CustomEncoder) ([]byte, error) {
			var b bytes.Buffer
			err := v.EncodeMsgpack(msgpack.NewEncoder(&b))
			return b.Bytes(), err
		}),
		encodesBy(msgpack.Marshaler.MarshalMsgpack),
		encodesBy(encoding.BinaryMarshaler.MarshalBinary),
		encodesBy(encoding.TextMarshaler.MarshalText),
	}
	msgPackDecodes = []method{
		decodesBy(func(v msgpack.CustomDecoder, data []byte) error {
			return v.DecodeMsgpack(msgpack.NewDecoder(bytes.NewReader(data)))
		}),
		decodesBy(msgpack.Unmarshaler.UnmarshalMsgpack),
		decodesBy(encoding.BinaryUnmarshaler.UnmarshalBinary),
		decodesBy(encoding.TextUnmarshaler.UnmarshalText),
	}
	jsonEncodes = []method{
		encodesBy(json.Marshaler.MarshalJSON),
		encodesBy(encoding.TextMarshaler.MarshalText),
	}
	jsonDecodes = []method{
		decodesBy(json.Unmarshaler.UnmarshalJSON),
		decodesBy(encoding.TextUnmarshaler.UnmarshalText),
	}
)

// methodOf returns the first of methods that typ has, with its own receiver or a pointer.
func methodOf(typ reflect.Type, methods []method) (method, bool) {
	for _, recv := range []reflect.Type{typ, reflect.PointerTo(typ)} {
		for _, m := range methods {
			if recv.Implements(m.of) {
				return m, true
			}
		}
	}
	return method{}, false
}

// hasMethods reports whether a type encodes or decodes itself.
func (j *judge) hasMethods(typ reflect.Type) bool {
	_, encodes := methodOf(typ, j.encodes)
	_, decodes := methodOf(typ, j.decodes)
	return encodes || decodes
}

// unfitMethods judges a type with methods: a struct may have them from an embedded field, which is then
// all that they encode and decode.
func (j *judge) unfitMethods(typ reflect.Type, path string) *misfit {
	kind := typ.Kind()
	switch {
	case kind == reflect.Pointer:
		return j.unfit(typ.Elem(), path)
	case j.onlyEncodes(typ):
		return &misfit{path, typ, "it has a method that encodes it, and none that decodes it again"}
	case j.readsText(typ) && !(j.tag == "json" && strings.HasSuffix(path, keyPath)): // JSON makes text of a key
		return &misfit{path, typ, "it has a method that decodes it from text or bytes, and none that encodes it so"}
	case kind != reflect.Struct:
		return nil
	}
	for f := range j.fields(typ) {
		at := path + "." + f.Name
		switch {
		case !f.Anonymous:
			continue
		case j.decodesNil(typ, f):
			return &misfit{at, f.Type, fmt.Sprintf("%v has the decoding methods of this field, which is nil when they are called", typ)}
		case !j.storesOnly(typ, f):
			continue
		}
		for beside := range j.fields(typ) {
			if beside.Name != f.Name {
				why := fmt.Sprintf("%v has the encoding methods of its embedded %v, which store nothing else", typ, f.Type)
				return &misfit{path + "." + beside.Name, beside.Type, why}
			}
		}
		return j.unfit(f.Type, at)
	}
	return nil
}

// onlyEncodes reports whether a type has a method to encode but none to decode, and is not encoded as it
// would be without that method.
func (j *judge) onlyEncodes(typ reflect.Type) bool {
	if _, decodes := methodOf(typ, j.decodes); decodes {
		return false
	}
	filled := reflect.New(typ)
	fill(filled.Elem(), fillDepth)
	for _, v := range []reflect.Value{reflect.New(typ), filled} {
		if encoded, decoded := j.recode(v); decoded || !encoded {
			return false
		}
	}
	return true
}

// readsText reports whether a type has no method to encode, and its method to decode is called for text or bytes
// only, as which the codec does not encode it. A value that cannot be decoded proves nothing, since the method may
// refuse all but a few names. A value that can be decoded proves the opposite: the program has registered a decoder,
// which is called instead.
func (j *judge) readsText(typ reflect.Type) bool {
	_, encodes := methodOf(typ, j.encodes)
	m, _ := methodOf(typ, j.decodes)
	if encodes || m.of == nil || m.of.PkgPath() != "encoding" {
		return false
	}
	data, err := j.zero(typ)
	_, decoded := j.recode(reflect.New(typ))
	return err == nil && !j.isText(data) && !decoded
}

// storesOnly reports whether the codec encodes a struct by a method of its embedded field f. A method
// that the struct itself has would encode other fields, too, or encode f otherwise.
func (j *judge) storesOnly(typ reflect.Type, f reflect.StructField) bool {
	m, ok := methodOf(typ, j.encodes)
	if !ok {
		return false
	}
	outer, embedded := reflect.New(typ), reflect.New(f.Type)
	fill(outer.Elem(), fillDepth)
	if f.IsExported() || f.Type.Kind() == reflect.Struct { // else fill cannot set it
		fill(embedded.Elem(), fillDepth)
	}
	data, err := m.try(outer, nil)
	only, onlyErr := m.try(embedded, nil)
	return err == nil && onlyErr == nil && bytes.Equal(data, only)
}

// decodesNil reports whether the codec decodes a struct by a method of its embedded field f, a pointer,
// which is nil in a new struct. A method that the struct itself has would set f first.
func (j *judge) decodesNil(typ reflect.Type, f reflect.StructField) bool {
	if f.Type.Kind() != reflect.Pointer {
		return false
	}
	encode, encodes := methodOf(f.Type, j.encodes)
	decode, decodes := methodOf(typ, j.decodes)
	if !encodes || !decodes {
		return false
	}
	data, err := encode.try(reflect.New(f.Type.Elem()), nil)
	if err != nil {
		return false
	}
	_, err = decode.try(reflect.New(typ), data)
	_, nilErr := decode.try(reflect.New(f.Type), data)
	return err != nil && nilErr != nil && err.Error() == nilErr.Error()
}

// fillDepth is how many pointers and slices fill follows: a type may contain itself.
const fillDepth = 2

// fill sets what can be set in v to something else than zero.
func fill(v reflect.Value, depth int) {
	switch kind := v.Kind(); {
	case kind == reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), depth)
		}
	case kind == reflect.Array && v.Len() > 0:
		fill(v.Index(0), depth)
	case !v.CanSet():
	case kind == reflect.Bool:
		v.SetBool(true)
	case v.CanInt():
		v.SetInt(1)
	case v.CanUint():
		v.SetUint(1)
	case v.CanFloat():
		v.SetFloat(1)
	case kind == reflect.String:
		v.SetString("x")
	case kind == reflect.Interface && v.NumMethod() == 0:
		v.Set(reflect.ValueOf("x"))
	case kind == reflect.Pointer && depth > 0:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), depth-1)
	case kind == reflect.Slice && depth > 0:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), depth-1)
	}
}

// unfitMap judges what is peculiar to maps: their keys, and that methods with pointer receivers are not
// called for what is in them.
func (j *judge) unfitMap(typ reflect.Type, path string) *misfit {
	key := typ.Key()
	switch {
	case j.tag == "json" && !isJSONKey(key):
		return &misfit{path, typ, "JSON has no encoding for its keys, or cannot decode them"}
	case j.tag == "msgpack" && j.changes(key):
		return &misfit{path + keyPath, key, "a key in an interface is decoded as another type, or not at all"}
	}
	if bad := j.unaddressed(key, path+keyPath); bad != nil {
		return bad
	}
	return j.unaddressed(typ.Elem(), path+"[]")
}

// isJSONKey reports whether JSON can encode and decode the keys of a map. It looks at the type alone:
// releases of Go differ in what they encode as a key and cannot decode again.
func isJSONKey(key reflect.Type) bool {
	texts := key.Implements(reflect.TypeFor[encoding.TextMarshaler]())
	reads := reflect.PointerTo(key).Implements(reflect.TypeFor[encoding.TextUnmarshaler]())
	v := reflect.Zero(key)
	return key.Kind() == reflect.String || texts && reads || !texts && (v.CanInt() || v.CanUint())
}

// changes reports whether a key of a map of this type is, or holds, an interface.
func (j *judge) changes(key reflect.Type) bool {
	switch {
	case j.hasMethods(key):
	case key.Kind() == reflect.Interface:
		return key.NumMethod() == 0 || !extended()
	case key.Kind() == reflect.Array:
		return j.changes(key.Elem())
	case key.Kind() == reflect.Struct:
		for f := range j.fields(key) {
			if j.changes(f.Type) {
				return true
			}
		}
	}
	return false
}

// unaddressed returns the first part of typ, of which a map has values, whose zero could be stored by itself,
// but not in a map: a value in a map has no address, so that no method with a pointer receiver is called.
func (j *judge) unaddressed(typ reflect.Type, path string) *misfit {
	switch {
	case j.hasMethods(typ):
		inMap := reflect.MakeMap(reflect.MapOf(reflect.TypeFor[string](), typ))
		inMap.SetMapIndex(reflect.ValueOf(""), reflect.Zero(typ))
		_, alone := j.recode(reflect.New(typ))
		if _, within := j.recode(inMap); alone && !within {
			return &misfit{path, typ, "its methods have pointer receivers, and are not called for what is in a map; use a pointer to it"}
		}
	case typ.Kind() == reflect.Array:
		return j.unaddressed(typ.Elem(), path+"[]")
	case typ.Kind() == reflect.Struct:
		for f := range j.fields(typ) {
			if bad := j.unaddressed(f.Type, path+"."+f.Name); bad != nil {
				return bad
			}
		}
	}
	return nil
}

// recode reports whether what v, a pointer or a map, holds can be encoded, and then decoded.
func (j *judge) recode(v reflect.Value) (encoded, decoded bool) {
	var err error
	defer recoverTo(&err, j.name) // code of the program
	data, err := j.marshal(v.Interface())
	encoded = err == nil
	decoded = encoded && j.decode(data, reflect.New(v.Type()).Interface()) == nil
	return encoded, decoded
}

// try calls the method of the value that p points to. It returns a panic as an error: the method is the
// program's.
func (m method) try(p reflect.Value, data []byte) (out []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = errors.New(foreign.Text(r))
		}
	}()
	for _, v := range []reflect.Value{p, p.Elem()} {
		if v.Type().Implements(m.of) {
			return m.call(v.Interface(), data)
		}
	}
	return nil, errors.New("no such method")
}
