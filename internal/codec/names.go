package codec

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// A named is a field as a codec stores it. Both codecs store the fields of an embedded struct as fields of the
// outer struct.
type named struct {
	name string
	path string // from T, such as ".Base.ID"
	typ  reflect.Type

	tagged bool // a tag names it
	hidden bool // the compiler hides it, too: an outer struct has a field of this name in Go
}

// namesOf returns the fields of a struct that have a name, or the first field that loses its name because
// another field has it.
func (j *judge) namesOf(typ reflect.Type, path string) ([]named, *misfit) {
	if j.tag == "json" {
		return j.jsonNames(typ, path)
	}
	list, into, bad := j.msgPackNames(typ, path)
	if bad != nil || isMsgPackArray(typ) {
		return list, bad
	}
	for _, n := range list {
		if other := into[n.name]; other != n.path {
			return nil, n.taken(other)
		}
	}
	return list, nil
}

func (n named) taken(other string) *misfit {
	return &misfit{n.path, n.typ, fmt.Sprintf("its name %q is also that of T%s", n.name, other)}
}

// msgPackNames returns the fields that MsgPack encodes, and the path of the field into which it decodes
// each name. Unlike JSON it does not ask which of two fields is embedded deeper: the later one has the name.
func (j *judge) msgPackNames(typ reflect.Type, path string) (list []named, into map[string]string, bad *misfit) {
	into = make(map[string]string)
	for f := range j.fields(typ) {
		name, options := j.tagOf(f)
		n := named{name: cmp.Or(name, f.Name), path: path + "." + f.Name, typ: f.Type}
		inline := slices.Contains(options, "inline")
		inner, flat, bad := j.flattened(f, n, options)
		if bad != nil {
			return nil, nil, bad
		}
		for _, in := range inner {
			other, hidden := into[in.name]
			if hidden && inline {
				return nil, nil, in.taken(other) // it is left out
			}
			flat = flat && !hidden
		}
		if !flat {
			inner = []named{n}
		}
		list = append(list, inner...)
		for _, in := range inner {
			into[in.name] = in.path
		}
		into[n.name] = n.path // also if it is flattened: what an older type has nested is read
		for _, option := range options {
			if alias, ok := strings.CutPrefix(option, "alias:"); ok && !flat {
				into[strings.Trim(alias, "'")] = n.path
			}
		}
	}
	return list, into, nil
}

// flattened returns the fields of an embedded struct, if MsgPack may store them in place of f.
func (j *judge) flattened(f reflect.StructField, n named, options []string) (inner []named, flat bool, bad *misfit) {
	if !f.Anonymous || slices.Contains(options, "noinline") {
		return nil, false, nil
	}
	typ := structOf(f.Type)
	switch {
	case slices.Contains(options, "inline"):
		if typ != f.Type {
			return nil, false, &misfit{n.path, f.Type, "the option inline is for structs"}
		}
	case typ == nil, j.hasMethods(typ), j.registered(typ):
		return nil, false, nil
	}
	inner, _, bad = j.msgPackNames(typ, n.path)
	return inner, true, bad
}

// isMsgPackArray reports whether MsgPack stores the fields of a struct without their names.
func isMsgPackArray(typ reflect.Type) bool {
	for i := range typ.NumField() {
		if f := typ.Field(i); f.Name == "_msgpack" {
			options := strings.Split(f.Tag.Get("msgpack"), ",")[1:]
			return slices.Contains(options, "as_array") || slices.Contains(options, "asArray")
		}
	}
	return false
}

// jsonNames returns the fields that JSON encodes, or the first field that it leaves out because another
// field has its name. It lets fields pass that the compiler hides in the same way.
func (j *judge) jsonNames(typ reflect.Type, path string) (stored []named, bad *misfit) {
	type level struct {
		typ    reflect.Type
		path   string
		within []reflect.Type // the structs that embed it
	}
	outer := make(map[string]string) // the path of each name
	for now, next := []level{{typ: typ, path: path}}, []level(nil); len(now) > 0; now, next = next, nil {
		var here []named
		for _, l := range now {
			within := append(slices.Clip(l.within), l.typ)
			for f := range j.fields(l.typ) {
				n, embedded := j.jsonName(f, l.path)
				seen, ok := typ.FieldByName(f.Name)
				n.hidden = ok && len(seen.Index) < len(within)
				switch {
				case embedded != nil && j.keepsNothing(embedded):
					return nil, &misfit{n.path, n.typ, "JSON stores the fields of an embedded struct, and this one has none"}
				case embedded != nil && slices.Contains(within, embedded): // all that it has is hidden
				case embedded != nil:
					next = append(next, level{embedded, n.path, within})
				case f.IsExported() || structOf(f.Type) != nil: // JSON drops the rest
					here = append(here, n)
				}
			}
		}
		for i, n := range here {
			other := outer[n.name]
			for k, same := range here {
				if k != i && same.name == n.name && (same.tagged || !n.tagged) {
					other = cmp.Or(other, same.path)
				}
			}
			switch {
			case other == "":
				stored = append(stored, n)
			case !n.hidden:
				return nil, n.taken(other)
			}
		}
		for _, n := range here {
			outer[n.name] = cmp.Or(outer[n.name], n.path)
		}
	}
	return stored, nil
}

// keepsNothing reports whether a struct has methods because none of its fields could be stored.
func (j *judge) keepsNothing(typ reflect.Type) bool {
	for range j.fields(typ) {
		return false
	}
	return j.hasMethods(typ)
}

// jsonName returns a field as JSON stores it, or the type of the struct whose fields it stores in its place.
func (j *judge) jsonName(f reflect.StructField, path string) (n named, embedded reflect.Type) {
	name, _ := j.tagOf(f)
	n = named{name: cmp.Or(name, f.Name), path: path + "." + f.Name, typ: f.Type, tagged: name != ""}
	if f.Anonymous && name == "" {
		embedded = structOf(f.Type)
	}
	return n, embedded
}

// structOf returns the struct that an embedded field is or points to, or nil.
func structOf(typ reflect.Type) reflect.Type {
	if typ.Kind() == reflect.Pointer {
		typ = typ.Elem()
	}
	if typ.Kind() != reflect.Struct {
		return nil
	}
	return typ
}

// tagOf returns the name and the options that the codec finds in the tag of a field.
func (j *judge) tagOf(f reflect.StructField) (name string, options []string) {
	options = strings.Split(f.Tag.Get(j.tag), ",")
	if j.tag == "msgpack" && strings.Contains(options[0], ":") {
		return "", options // an option stands where the name would
	}
	return options[0], options[1:]
}
