package singlefilltest

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
)

// A walker compares values with what came back of them. What has been decoded from bytes does not contain
// itself, so a walk ends. Each reflect.Value that the walker handles is addressable and was not obtained
// through a field that is not exported, so that it may copy the value and call its methods.
type walker struct{ codec *checkedCodec }

// A loss is the first part of a value that did not come back.
type loss struct{ path, from, to string }

func (l *loss) String() string { return fmt.Sprintf("%s is lost: %s became %s", l.path, l.from, l.to) }

// within returns l with the path that it has in a larger value.
func (l *loss) within(format string, args ...any) *loss {
	l.path = fmt.Sprintf(format, args...) + l.path
	return l
}

// compare returns the first part of a that is not in b, a value of the same type.
func (w *walker) compare(a, b reflect.Value) *loss {
	if a.Type() == reflect.TypeFor[json.RawMessage]() && sameJSON(a, b) {
		return nil
	}
	if a.Kind() != reflect.Pointer && w.encodesItself(a.Type()) {
		if equal, known := byMethod(a, b); known {
			return lostUnless(equal, a, b)
		}
	}
	switch a.Kind() {
	case reflect.Func, reflect.Chan, reflect.UnsafePointer:
		return lostUnless(a.IsNil() == b.IsNil(), a, b)
	case reflect.Float32, reflect.Float64:
		x, y := a.Float(), b.Float()
		return lostUnless(x == y || x != x && y != y, a, b) // NaN differs from itself
	case reflect.Pointer:
		if a.IsNil() || b.IsNil() {
			return lostUnless(a.IsNil() == b.IsNil(), a, b)
		}
		return w.compare(a.Elem(), b.Elem())
	case reflect.Slice, reflect.Map:
		switch {
		case a.Len() != b.Len():
			return lostUnless(false, a, b)
		case a.Kind() == reflect.Map:
			return w.maps(a, b)
		case a.Type().Elem().Kind() == reflect.Uint8 && bytes.Equal(a.Bytes(), b.Bytes()):
			return nil
		}
		return w.lists(a, b)
	case reflect.Array:
		return w.lists(a, b)
	case reflect.Struct:
		return w.structs(a, b)
	case reflect.Interface:
		return w.interfaces(a, b)
	}
	return lostUnless(a.Equal(b), a, b)
}

func (w *walker) lists(a, b reflect.Value) *loss {
	for i := range a.Len() {
		if l := w.compare(a.Index(i), b.Index(i)); l != nil {
			return l.within("[%d]", i)
		}
	}
	return nil
}

func (w *walker) maps(a, b reflect.Value) *loss {
	keys := a.MapKeys()
	slices.SortFunc(keys, func(x, y reflect.Value) int { return cmp.Compare(fmt.Sprint(x), fmt.Sprint(y)) })
	for _, key := range keys {
		x, y := a.MapIndex(key), b.MapIndex(key)
		if !x.IsValid() {
			continue // NaN, which no map finds
		}
		verb := "[%v]"
		if key.Kind() == reflect.String {
			verb = "[%q]"
		}
		if !y.IsValid() {
			return lostUnless(false, x, y).within(verb, key)
		}
		if l := w.compare(copyOf(x), copyOf(y)); l != nil {
			return l.within(verb, key)
		}
	}
	return nil
}

func (w *walker) structs(a, b reflect.Value) *loss {
	for i := range a.NumField() {
		name := a.Type().Field(i).Name
		if name == "_" {
			continue
		}
		if l := w.compare(field(a, i), field(b, i)); l != nil {
			return l.within(".%s", name)
		}
	}
	return nil
}

// interfaces compares what a holds, an int or a struct for example, with what b holds: the type that
// the codec has for such data, an int8 or a map. Read into the type of a, that has to be the same.
func (w *walker) interfaces(a, b reflect.Value) *loss {
	x, y := a.Elem(), b.Elem()
	switch {
	case !x.IsValid() || !y.IsValid():
		return lostUnless(isNil(x) && isNil(y), x, y)
	case x.Type() == y.Type():
		return w.compare(copyOf(x), copyOf(y))
	case classOf(x) != classOf(y):
		return lostUnless(false, x, y)
	}
	data, err := w.codec.Codec.Marshal(y.Interface())
	again := reflect.New(x.Type())
	if err != nil || w.codec.unmarshal(data, again) != nil {
		return lostUnless(false, x, y)
	}
	return w.compare(copyOf(x), again.Elem())
}

// encodesItself reports whether the codec encodes a typ by one of its methods, which may drop what
// does not matter.
func (w *walker) encodesItself(typ reflect.Type) bool {
	return slices.ContainsFunc(w.codec.methods, func(name string) bool {
		_, has := reflect.PointerTo(typ).MethodByName(name)
		return has
	})
}

// byMethod returns what the method Equal or Cmp says; known is false if there is none.
func byMethod(a, b reflect.Value) (equal, known bool) {
	for _, name := range []string{"Equal", "Cmp"} {
		method := a.Addr().MethodByName(name)
		if !method.IsValid() || method.Type().NumIn() != 1 || method.Type().NumOut() != 1 {
			continue
		}
		other := b
		if method.Type().In(0) == b.Addr().Type() {
			other = b.Addr()
		} else if method.Type().In(0) != b.Type() {
			continue
		}
		switch result := method.Call([]reflect.Value{other})[0]; result.Kind() {
		case reflect.Bool:
			return result.Bool(), true
		case reflect.Int:
			return result.Int() == 0, true
		}
	}
	return false, false
}

func sameJSON(a, b reflect.Value) bool {
	x, err := json.Marshal(a.Interface()) // without spaces
	y, err2 := json.Marshal(b.Interface())
	return err == nil && err2 == nil && bytes.Equal(x, y)
}

// field returns a field of a struct as if it were exported.
func field(v reflect.Value, i int) reflect.Value {
	f := v.Field(i)
	return reflect.NewAt(f.Type(), f.Addr().UnsafePointer()).Elem()
}

func copyOf(v reflect.Value) reflect.Value {
	p := reflect.New(v.Type())
	p.Elem().Set(v)
	return p.Elem()
}

// isNil reports whether v is nil, or a nil pointer, map or slice in an interface.
func isNil(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Invalid:
		return true
	case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Func, reflect.Chan, reflect.Interface, reflect.UnsafePointer:
		return v.IsNil()
	}
	return false
}

// classOf returns what every codec distinguishes in an interface.
func classOf(v reflect.Value) string {
	for v.Kind() == reflect.Pointer && !v.IsNil() {
		v = v.Elem()
	}
	switch {
	case v.CanInt() || v.CanUint() || v.CanFloat():
		return "number"
	case v.Kind() == reflect.Slice || v.Kind() == reflect.Array:
		return "list"
	case v.Kind() == reflect.Map || v.Kind() == reflect.Struct:
		return "map"
	}
	return v.Kind().String()
}

// lostUnless returns a loss unless a came back. b is what came back.
func lostUnless(same bool, a, b reflect.Value) *loss {
	if same {
		return nil
	}
	withType := a.IsValid() && b.IsValid() && a.Type() != b.Type()
	return &loss{"", show(a, withType), show(b, withType)}
}

// show returns a short text for v.
func show(v reflect.Value, withType bool) string {
	if isNil(v) {
		return "nil"
	}
	if v.Kind() == reflect.Interface {
		return show(v.Elem(), withType)
	}
	text := ""
	stringer, ok := copyOf(v).Addr().Interface().(fmt.Stringer)
	switch {
	case ok:
		text = fmt.Sprintf("%.80v", stringer)
	case v.Kind() == reflect.String:
		text = fmt.Sprintf("%.80q", v)
	case v.Kind() == reflect.Slice || v.Kind() == reflect.Map:
		if text = "empty"; v.Len() > 0 {
			text = fmt.Sprint("length ", v.Len())
		}
	case v.Kind() == reflect.Bool || v.CanInt() || v.CanUint() || v.CanFloat() || v.CanComplex():
		text = fmt.Sprint(v)
	default:
		return v.Type().String()
	}
	if withType {
		return v.Type().String() + " " + text
	}
	return text
}
