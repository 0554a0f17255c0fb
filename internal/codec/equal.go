package codec

import (
	"maps"
	"math"
	"reflect"
	"slices"
	"unsafe"
)

// Equal reports whether two values that a codec has decoded are the same. It is [reflect.DeepEqual], except
// that NaN equals NaN, and that keys of maps are compared like other values: pointers by what they point to.
func Equal(a, b any) bool {
	return reflect.DeepEqual(a, b) || make(comparison).equal(reflect.ValueOf(a), reflect.ValueOf(b))
}

// A comparison has the pairs of references that are compared, or have been. It ends circles.
type comparison map[visit]bool

type visit struct {
	a, b unsafe.Pointer
	len  int // of slices
	typ  reflect.Type
}

func (c comparison) equal(a, b reflect.Value) bool {
	if !a.IsValid() || !b.IsValid() {
		return a.IsValid() == b.IsValid()
	}
	if a.Type() != b.Type() {
		return false
	}
	switch a.Kind() {
	case reflect.Float32, reflect.Float64:
		return sameFloat(a.Float(), b.Float())
	case reflect.Complex64, reflect.Complex128:
		x, y := a.Complex(), b.Complex()
		return sameFloat(real(x), real(y)) && sameFloat(imag(x), imag(y))
	case reflect.Struct:
		for i := range a.NumField() {
			if !c.equal(a.Field(i), b.Field(i)) {
				return false
			}
		}
		return true
	case reflect.Array:
		return c.elements(a, b)
	case reflect.Interface:
		return c.equal(a.Elem(), b.Elem())
	case reflect.Func:
		return a.IsNil() && b.IsNil()
	case reflect.Slice, reflect.Map, reflect.Pointer:
		return c.references(a, b)
	}
	return a.Equal(b)
}

func sameFloat(a, b float64) bool { return a == b || math.IsNaN(a) && math.IsNaN(b) }

func (c comparison) elements(a, b reflect.Value) bool {
	for i := range a.Len() {
		if !c.equal(a.Index(i), b.Index(i)) {
			return false
		}
	}
	return true
}

func (c comparison) references(a, b reflect.Value) bool {
	if a.IsNil() || b.IsNil() {
		return a.IsNil() == b.IsNil()
	}
	p := visit{a: a.UnsafePointer(), b: b.UnsafePointer(), typ: a.Type()}
	if a.Kind() != reflect.Pointer {
		if p.len = a.Len(); p.len != b.Len() {
			return false
		}
	}
	if c[p] {
		return true
	}
	c[p] = true
	switch a.Kind() {
	case reflect.Pointer:
		return c.equal(a.Elem(), b.Elem())
	case reflect.Slice:
		return c.elements(a, b)
	}
	return c.maps(a, b)
}

// maps compares maps of one length. A key that the other map does not find, such as NaN, is paired with an
// equal one.
func (c comparison) maps(a, b reflect.Value) bool {
	var unpaired [][2]reflect.Value // of b
	for e := b.MapRange(); e.Next(); {
		if !a.MapIndex(e.Key()).IsValid() {
			unpaired = append(unpaired, [2]reflect.Value{e.Key(), e.Value()})
		}
	}
	for e := a.MapRange(); e.Next(); {
		if other := b.MapIndex(e.Key()); other.IsValid() {
			if !c.equal(e.Value(), other) {
				return false
			}
			continue
		}
		i := slices.IndexFunc(unpaired, func(other [2]reflect.Value) bool {
			trial := maps.Clone(c) // its findings are void if it fails
			return trial.equal(e.Key(), other[0]) && trial.equal(e.Value(), other[1])
		})
		if i < 0 {
			return false
		}
		unpaired = slices.Delete(unpaired, i, i+1)
	}
	return true
}
