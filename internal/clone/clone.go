// Package clone copies values, so that a caller may change its value without changing the value of
// another caller.
package clone

import (
	"encoding"
	"encoding/json"
	"reflect"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

// Func returns a function that copies what a pointer to a T points to, or nil if T is not plain. It
// returns a pointer to a T that shares no mutable memory with the original, which for a T without
// references is the argument: the caller copies a T when it takes it out of the pointer.
//
// Numbers, strings and times are plain, and so are structs, arrays, slices, maps and pointers of
// plain types. Types that may hide something are not plain: interfaces, channels, functions,
// references in unexported fields, and references in types that decode themselves.
//
// A value is copied as a tree: what two references share is copied twice, as a decoder would have
// created it.
func Func(typ reflect.Type) func(p any) any {
	own, plain := make(plans).of(typ)
	switch {
	case !plain:
		return nil
	case own == nil:
		return func(p any) any { return p }
	}
	return func(p any) any {
		c := reflect.New(typ)
		c.Elem().Set(reflect.ValueOf(p).Elem())
		own.replace(c.Elem())
		return c.Interface()
	}
}

// A plan replaces every reference in v, which is a shallow copy, by a reference to a copy. A type
// without references has a nil plan.
type plan struct{ replace func(v reflect.Value) }

// plans are the plans of types seen so far. A type that refers to itself finds its own plan.
type plans map[reflect.Type]*plan

// of returns the plan of a type. plain is false if the type is not plain.
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
			return nil, true // it refers only to immutable values
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
	var renew func(v reflect.Value) // copies what v refers to; v is not nil
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
			return nil, false // reflect cannot set it
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

// decodesItself reports whether a type has a decoding method, since it may then share memory on
// purpose.
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
