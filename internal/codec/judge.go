package codec

import (
	"cmp"
	"encoding/json"
	"fmt"
	"iter"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

// A judge knows what one codec can store of a type. It judges types before there is a value, so that
// a program learns of a mistake when it starts, and not from loads that are never stored.
type judge struct {
	name     string   // of the codec
	tag      string   // of its options for a field
	encodes  []method // in the order in which the codec looks for them
	decodes  []method
	marshal  func(v any) ([]byte, error)
	decode   func(data []byte, v any) error
	isStruct func(data []byte) bool
	isText   func(data []byte) bool // or bytes

	fits  map[reflect.Type]bool // types that unfit has seen
	flat  map[reflect.Type]bool // embedded structs that unfitParts has seen
	loses map[reflect.Type]bool // results of lost; false while it runs
}

// judgeOf returns the judge of a codec of this package, or nil.
func judgeOf(c any) *judge {
	j := &judge{fits: make(map[reflect.Type]bool), flat: make(map[reflect.Type]bool), loses: make(map[reflect.Type]bool)}
	switch c := c.(type) {
	case msgPackCodec:
		j.name, j.tag, j.marshal, j.decode = "MsgPack", "msgpack", msgpack.Marshal, c.Unmarshal
		j.encodes, j.decodes = msgPackEncodes, msgPackDecodes
		j.isStruct = func(data []byte) bool { // a map or an array
			return data[0]&0xe0 == 0x80 || data[0] >= 0xdc && data[0] <= 0xdf
		}
		j.isText = func(data []byte) bool {
			return data[0]&0xe0 == 0xa0 || data[0] >= 0xd9 && data[0] <= 0xdb || data[0] >= 0xc4 && data[0] <= 0xc6
		}
	case jsonCodec:
		j.name, j.tag, j.marshal, j.decode = "JSON", "json", json.Marshal, c.Unmarshal
		j.encodes, j.decodes = jsonEncodes, jsonDecodes
		j.isStruct = func(data []byte) bool { return data[0] == '{' }
		j.isText = func(data []byte) bool { return data[0] == '"' }
	default:
		return nil
	}
	return j
}

// check returns an error if values of typ cannot be stored, or lose a part whatever it holds.
func (j *judge) check(typ reflect.Type) error {
	// Endless types come first: the codec overflows the stack when it only looks at one.
	bad := j.endless(typ, "", make(map[reflect.Type]bool))
	if bad == nil {
		bad = j.unfit(typ, "")
	}
	if bad == nil {
		return nil
	}
	drop := fmt.Sprintf("give the field the tag `%s:\"-\"`, ", j.tag)
	if bad.path == "" { // T is no field
		drop = ""
	}
	return fmt.Errorf("singlefill: T is %v: %s cannot store %v: %s; %sgive the type marshalling methods, or set Options.Codec",
		typ, j.name, bad, bad.why, drop)
}

// keyPath is the end of the path of the keys of a map.
const keyPath = "[key]"

// A misfit is a part of T that the codec cannot store.
type misfit struct {
	path string // from T, such as ".Lines[].Done"; "" is T itself
	typ  reflect.Type
	why  string
}

func (m *misfit) String() string {
	if m.path == "" {
		return "it"
	}
	return fmt.Sprintf("T%s, of type %v", m.path, m.typ)
}

// endless returns the first part of typ that is a pointer to itself, as in type P *P, or that MsgPack
// would flatten into itself, as in type S struct{ *S }. done has the types that it has visited.
func (j *judge) endless(typ reflect.Type, path string, done map[reflect.Type]bool) *misfit {
	if done[typ] || j.hasMethods(typ) {
		return nil
	}
	done[typ] = true
	if j.circles(typ, nil) {
		return &misfit{path, typ, "it refers to itself without end"}
	}
	for at, part := range j.parts(typ) {
		if bad := j.endless(part, path+at, done); bad != nil {
			return bad
		}
	}
	return nil
}

// circles reports whether pointers, and for MsgPack embedded fields, lead from typ to a type that is on
// the way already.
func (j *judge) circles(typ reflect.Type, way []reflect.Type) bool {
	if slices.Contains(way, typ) {
		return true
	}
	way = append(way, typ)
	switch {
	case j.hasMethods(typ):
	case typ.Kind() == reflect.Pointer:
		return j.circles(typ.Elem(), way)
	case typ.Kind() == reflect.Struct && j.tag == "msgpack":
		for f := range j.fields(typ) {
			if f.Anonymous && j.circles(f.Type, way) {
				return true
			}
		}
	}
	return false
}

// unfit returns the first part of typ that can hold nothing but nil, or not even that: the codec cannot
// encode its values, cannot decode them again, or keeps nothing of them. Of types that have methods it
// judges only what they inherit.
func (j *judge) unfit(typ reflect.Type, path string) *misfit {
	if j.fits[typ] {
		return nil
	}
	j.fits[typ] = !strings.HasSuffix(path, keyPath) // until the first misfit ends all
	kind := typ.Kind()
	switch {
	case j.hasMethods(typ):
		return cmp.Or(j.unfitMethods(typ, path), j.losing(typ, path))
	case kind == reflect.Interface && typ.NumMethod() > 0 && !j.decodesInto(typ):
		return &misfit{path, typ, "nothing can be decoded into an interface with methods"}
	case path == "" && typ == reflect.TypeFor[error]() && !extended():
		return &misfit{path, typ, "an error is stored as its text only within another type"}
	case kind == reflect.Struct:
		return cmp.Or(j.unfitFields(typ, path), j.losing(typ, path))
	case kind == reflect.Map:
		if bad := j.unfitMap(typ, path); bad != nil {
			return bad
		}
	}
	for at, part := range j.parts(typ) {
		if bad := j.unfit(part, path+at); bad != nil {
			return bad
		}
	}
	// The zero of an array has items, whose methods may refuse to encode a zero.
	if _, err := j.zero(typ); err != nil && kind != reflect.Array {
		return &misfit{path, typ, "the type has no encoding"}
	}
	return nil
}

func (j *judge) unfitFields(typ reflect.Type, path string) *misfit {
	if j.registered(typ) {
		return nil
	}
	stored, bad := j.namesOf(typ, path)
	if bad != nil {
		return bad
	}
	return j.unfitParts(typ, path, stored)
}

// unfitParts judges the types of the fields of a struct. stored are the fields that are stored under a
// name, also the fields of embedded structs, which have no name themselves.
func (j *judge) unfitParts(typ reflect.Type, path string, stored []named) (bad *misfit) {
	for f := range j.fields(typ) {
		at := path + "." + f.Name
		embedded, isPointer := structOf(f.Type), f.Type.Kind() == reflect.Pointer
		flat := f.Anonymous && embedded != nil && !slices.ContainsFunc(stored, func(n named) bool { return n.path == at })
		switch {
		case j.omits(f), typ == reflect.TypeFor[url.URL]() && f.Name == "User": // both may be nil in all values
		case !f.IsExported() && isPointer && embedded != nil:
			for range j.fields(embedded) { // without a field nothing is decoded
				bad = &misfit{at, f.Type, "an embedded pointer to a type that is not exported cannot be decoded"}
			}
		case flat && !j.flat[embedded]:
			j.flat[embedded] = true
			if bad = j.unfitParts(embedded, at, stored); f.IsExported() {
				bad = cmp.Or(bad, j.losing(f.Type, at))
			}
		case flat:
		case j.interns(f):
			bad = &misfit{at, f.Type, "the option intern is not supported"}
		case f.IsExported():
			bad = j.unfit(f.Type, at)
		case embedded != nil && !j.hasMethods(embedded):
			bad = j.unfitFields(embedded, at)
		case j.tag == "msgpack": // JSON drops it
			bad = &misfit{at, f.Type, "an embedded field that is not exported cannot be decoded"}
		}
		if bad != nil {
			return bad
		}
	}
	return nil
}

// parts yields the types that values of typ consist of, and how to get from typ to them.
func (j *judge) parts(typ reflect.Type) iter.Seq2[string, reflect.Type] {
	return func(yield func(string, reflect.Type) bool) {
		switch typ.Kind() {
		case reflect.Pointer:
			yield("", typ.Elem())
		case reflect.Slice:
			yield("[]", typ.Elem())
		case reflect.Array:
			if typ.Len() > 0 {
				yield("[]", typ.Elem())
			}
		case reflect.Map:
			if yield("[]", typ.Elem()) {
				yield(keyPath, typ.Key())
			}
		case reflect.Struct:
			for f := range j.fields(typ) {
				if !yield("."+f.Name, f.Type) {
					return
				}
			}
		}
	}
}

// fields yields the fields of a struct that the codec does not drop.
func (j *judge) fields(typ reflect.Type) iter.Seq[reflect.StructField] {
	return func(yield func(reflect.StructField) bool) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			tag := f.Tag.Get(j.tag)
			dropped := tag == "-" || j.tag == "msgpack" && strings.HasPrefix(tag, "-,")
			if !dropped && (f.IsExported() || f.Anonymous) && !yield(f) {
				return
			}
		}
	}
}

// omits reports whether the codec leaves out a field that is nil. If it does, the field may be nil in
// all values.
func (j *judge) omits(f reflect.StructField) bool {
	_, options := j.tagOf(f)
	switch f.Type.Kind() {
	case reflect.Interface, reflect.Pointer, reflect.Slice, reflect.Map:
		if slices.Contains(options, "omitempty") {
			return true
		}
	}
	return j.tag == "json" && slices.Contains(options, "omitzero")
}

func (j *judge) interns(f reflect.StructField) bool {
	_, options := j.tagOf(f)
	return j.tag == "msgpack" && slices.Contains(options, "intern")
}

// decodesInto reports whether MsgPack may decode something into an interface with methods: an error, a
// time, or a type that the program has registered as an extension.
func (j *judge) decodesInto(typ reflect.Type) bool {
	return j.tag == "msgpack" &&
		(typ == reflect.TypeFor[error]() || reflect.TypeFor[time.Time]().Implements(typ) || extended())
}

// extended reports whether the program has registered an extension of MsgPack.
func extended() bool {
	const interned, times = -128, -1 // which the msgpack package registers
	for id := interned + 1; id < 128; id++ {
		if id != times && registeredExt(byte(id)) {
			return true
		}
	}
	return false
}

func registeredExt(id byte) bool {
	var v any
	err := func() (err error) {
		defer recoverTo(&err, "msgpack.Unmarshal") // code of the program
		return msgpack.Unmarshal([]byte{0xc7, 0, id}, &v)
	}()
	return err == nil || !strings.Contains(err.Error(), "unknown ext id")
}

// registered reports whether the program has registered an encoder for a struct, which encodes it
// otherwise than as a struct.
func (j *judge) registered(typ reflect.Type) bool {
	data, err := j.zero(typ)
	return err == nil && !j.isStruct(data)
}

// zero encodes the zero value of a type.
func (j *judge) zero(typ reflect.Type) (data []byte, err error) {
	defer recoverTo(&err, j.name) // code of the program
	return j.marshal(reflect.New(typ).Interface())
}

// losing returns typ if the codec keeps nothing of its values.
func (j *judge) losing(typ reflect.Type, path string) *misfit {
	if !j.lost(typ) {
		return nil
	}
	return &misfit{path, typ, fmt.Sprintf("the fields that hold its data are not exported or have the tag `%s:\"-\"`", j.tag)}
}

// lost reports whether the values of typ have data, and all of it is in fields that the codec drops. A type
// that contains itself keeps its shape.
func (j *judge) lost(typ reflect.Type) bool {
	lost, seen := j.loses[typ]
	if seen {
		return lost
	}
	j.loses[typ] = false
	switch kind := typ.Kind(); {
	case holdsNothing(typ), j.encodesItself(typ):
	case kind == reflect.Struct:
		lost = true
		for f := range j.fields(typ) {
			lost = lost && (holdsNothing(f.Type) || j.lost(f.Type))
		}
	case kind == reflect.Pointer, kind == reflect.Slice, kind == reflect.Array, kind == reflect.Map:
		lost = j.lost(typ.Elem())
	}
	j.loses[typ] = lost
	return lost
}

// holdsNothing reports whether the values of typ have no data, so that the zero value is as good as each of them.
func holdsNothing(typ reflect.Type) bool {
	switch typ {
	case reflect.TypeFor[sync.Mutex](), reflect.TypeFor[sync.RWMutex](), reflect.TypeFor[sync.Once](), reflect.TypeFor[sync.WaitGroup]():
		return true
	}
	switch typ.Kind() {
	case reflect.Array:
		return typ.Len() == 0 || holdsNothing(typ.Elem())
	case reflect.Struct:
		for i := range typ.NumField() {
			if f := typ.Field(i); f.Name != "_" && !holdsNothing(f.Type) {
				return false
			}
		}
		return true
	}
	return false
}

// encodesItself reports whether the codec encodes typ by a method, or a struct by an encoder that is
// registered for it.
func (j *judge) encodesItself(typ reflect.Type) bool {
	if _, ok := methodOf(typ, j.encodes); ok || typ.Kind() != reflect.Struct {
		return ok
	}
	data, err := j.zero(typ)
	return err != nil || !j.isStruct(data)
}
