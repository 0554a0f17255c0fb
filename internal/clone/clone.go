// Package clone copies plain values: a caller that may change what it is given must not change what another one has.
package clone

import (
	"encoding"
	"encoding/json"
	"reflect"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

// Func returns a function that makes copies of values of T which share no memory with them that could be changed; nil
// if T is not plain. Plain are numbers, strings and times, and structs, arrays, slices, maps and pointers of what is
// plain. Not plain is what may hide more than can be seen or set from here: interfaces, channels, functions, references
// in fields that are not exported, and references in types that decode themselves.
//
// A value is a tree: whatever two of its references have in common is copied twice, as a decoder would have made it.
func Func[T any]() func(v T) T {
	own, plain := make(plans).of(reflect.TypeFor[T]())
	switch {
	case !plain:
		return nil
	case own == nil:
		return func(v T) T { return v }
	}
	return func(v T) T {
		own.replace(reflect.ValueOf(&v).Elem())
		return v
	}
}

// A plan replaces all references in v, which is a copy of another value, by references to copies of their own. A nil
// plan is that of a type which has none.
type plan struct{ replace func(v reflect.Value) }

// plans are those of types that have been looked at, or are being looked at, since a type may refer to itself.
type plans map[reflect.Type]*plan

// of returns the plan for a type; plain is false if there can be none.
func (p plans) of(typ reflect.Type) (own *plan, plain bool) {
	if known, seen := p[typ]; seen {
		return known, true
	}
	switch typ.Kind() {
	case reflect.Interface, reflect.Chan, reflect.Func, reflect.UnsafePointer, reflect.Invalid:
		return nil, false
	case reflect.Pointer, reflect.Slice, reflect.Map:
		own = new(plan)
		p[typ] = own
		own.replace, plain = p.reference(typ)
		return own, plain && !decodesItself(typ)
	case reflect.Array:
		elem, plain := p.of(typ.Elem())
		if elem == nil || !plain {
			return nil, plain
		}
		return &plan{func(v reflect.Value) { each(v, elem) }}, !decodesItself(typ)
	case reflect.Struct:
		if typ == reflect.TypeFor[time.Time]() {
			return nil, true // what it refers to cannot be changed
		}
		replace, plain := p.fields(typ)
		if replace == nil || !plain {
			return nil, plain
		}
		return &plan{replace}, !decodesItself(typ)
	}
	return nil, true
}

func (p plans) reference(typ reflect.Type) (replace func(v reflect.Value), plain bool) {
	elem, plain := p.of(typ.Elem())
	if !plain {
		return nil, false
	}
	var renew func(v reflect.Value) // of what is not nil
	switch typ.Kind() {
	case reflect.Pointer:
		renew = func(v reflect.Value) {
			c := reflect.New(typ.Elem())
			c.Elem().Set(v.Elem())
			if elem != nil {
				elem.replace(c.Elem())
			}
			v.Set(c.Convert(typ))
		}
	case reflect.Slice:
		renew = func(v reflect.Value) {
			c := reflect.MakeSlice(typ, v.Len(), v.Len())
			reflect.Copy(c, v)
			if elem != nil {
				each(c, elem)
			}
			v.Set(c)
		}
	case reflect.Map:
		if key, plain := p.of(typ.Key()); key != nil || !plain {
			return nil, false
		}
		renew = func(v reflect.Value) {
			c := reflect.MakeMapWithSize(typ, v.Len())
			for of := v.MapRange(); of.Next(); {
				value := of.Value()
				if elem != nil {
					value = reflect.New(typ.Elem()).Elem()
					value.Set(of.Value())
					elem.replace(value)
				}
				c.SetMapIndex(of.Key(), value)
			}
			v.Set(c)
		}
	}
	return func(v reflect.Value) {
		if !v.IsNil() {
			renew(v)
		}
	}, true
}

func each(list reflect.Value, elem *plan) {
	for i := range list.Len() {
		elem.replace(list.Index(i))
	}
}

func (p plans) fields(typ reflect.Type) (replace func(v reflect.Value), plain bool) {
	type field struct {
		index int
		own   *plan
	}
	var fields []field
	for i := range typ.NumField() {
		f := typ.Field(i)
		own, plain := p.of(f.Type)
		if !plain {
			return nil, false
		}
		if own == nil {
			continue
		}
		if !f.IsExported() && !(f.Anonymous && f.Type.Kind() == reflect.Struct) {
			return nil, false // it could not be set
		}
		fields = append(fields, field{i, own})
	}
	if fields == nil {
		return nil, true
	}
	return func(v reflect.Value) {
		for _, f := range fields {
			f.own.replace(v.Field(f.index))
		}
	}, true
}

// decodesItself reports whether a type may be more than what it is made of: it may refer to what it shares on purpose.
func decodesItself(typ reflect.Type) bool {
	p := reflect.PointerTo(typ)
	for _, i := range []reflect.Type{
		reflect.TypeFor[msgpack.CustomDecoder](), reflect.TypeFor[msgpack.Unmarshaler](), reflect.TypeFor[json.Unmarshaler](),
		reflect.TypeFor[encoding.BinaryUnmarshaler](), reflect.TypeFor[encoding.TextUnmarshaler](),
	} {
		if p.Implements(i) || typ.Implements(i) {
			return true
		}
	}
	return false
}
