package codec

import (
	"errors"
	"io"
	"log"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

type (
	EmbA struct{ A int }
	EmbB struct {
		A string
		B int `msgpack:"b" json:"b"`
	}
	EmbC struct {
		EmbA
		C int
	}
	EmbD struct {
		*EmbB
		EmbC
		D int `msgpack:"d,alias:A" json:"A"`
	}
	EmbE struct {
		EmbE int
		A    int `msgpack:",omitempty" json:",omitempty"`
	}
)

// randomStruct returns a struct whose fields may have each other's names.
func randomStruct(rng *rand.Rand) reflect.Type {
	pick := func(n int) int { return rng.IntN(n) }
	embedded := []reflect.Type{
		reflect.TypeFor[EmbA](), reflect.TypeFor[EmbB](), reflect.TypeFor[EmbC](), reflect.TypeFor[EmbD](), reflect.TypeFor[EmbE](),
	}
	plain := []reflect.Type{
		reflect.TypeFor[int](), reflect.TypeFor[string](), reflect.TypeFor[bool](), reflect.TypeFor[*int](),
		reflect.TypeFor[[]int](), reflect.TypeFor[EmbA](), reflect.TypeFor[*EmbB](),
	}
	names := []string{"A", "B", "C", "D", "EmbA", "EmbB"}
	tags := []string{"", "", "", "", "A", "b", "EmbA", "B", "-", ",omitempty", "A,omitempty", ",noinline", ",inline", "C,alias:A"}
	fields := []reflect.StructField{{Name: "Kept", Type: reflect.TypeFor[int]()}} // a struct without fields is refused
	used := make(map[string]bool)
	for range 1 + pick(4) {
		f := reflect.StructField{Name: names[pick(len(names))], Type: plain[pick(len(plain))]}
		if pick(2) == 0 {
			f.Type = embedded[pick(len(embedded))]
			f.Name, f.Anonymous = f.Type.Name(), true
			if pick(3) == 0 {
				f.Type = reflect.PointerTo(f.Type)
			}
		}
		tag := tags[pick(len(tags))]
		if f.Type.Kind() == reflect.Pointer && strings.HasSuffix(tag, "omitempty") {
			tag = "" // Takes does not look at what may be left out
		}
		if tag != "" {
			f.Tag = reflect.StructTag(`msgpack:"` + tag + `" json:"` + tag + `"`)
		}
		if !used[f.Name] {
			fields = append(fields, f)
		}
		used[f.Name] = true
	}
	return reflect.StructOf(fields)
}

// fillUnique sets each field that a codec does not drop to another value.
func fillUnique(v reflect.Value, n *int) {
	*n++
	switch v.Kind() {
	case reflect.Int:
		v.SetInt(int64(*n))
	case reflect.String:
		v.SetString(strings.Repeat("x", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fillUnique(v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fillUnique(v.Index(0), n)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).Tag.Get("json") != "-" {
				fillUnique(v.Field(i), n)
			}
		}
	}
}

// copyHidden copies to out the fields of in that the struct outer hides: a field of it has their Go name.
func copyHidden(outer reflect.Type, in, out reflect.Value, depth int) {
	for i := range in.NumField() {
		f, from, to := in.Type().Field(i), in.Field(i), out.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && name == "" {
			if f.Type.Kind() == reflect.Pointer && !from.IsNil() && to.IsNil() {
				to.Set(reflect.New(f.Type.Elem())) // JSON has stored none of its fields
			}
			if from = reflect.Indirect(from); from.IsValid() {
				copyHidden(outer, from, reflect.Indirect(to), depth+1)
			}
			continue
		}
		if seen, ok := outer.FieldByName(f.Name); ok && len(seen.Index) <= depth {
			to.Set(from)
		}
		if from, to = reflect.Indirect(from), reflect.Indirect(to); from.Kind() == reflect.Struct && to.Kind() == reflect.Struct {
			copyHidden(from.Type(), from, to, 0)
		}
	}
}

// Takes refuses a struct if the names of its fields let the codec lose one of them, or decode it into another
// one, and no other.
func TestTakes_NamesOfFields(t *testing.T) {
	defer log.SetOutput(log.Writer())
	log.SetOutput(io.Discard) // msgpack logs these names
	rounds := 20_000
	if testing.Short() {
		rounds = 2_000
	}
	rng := rand.New(rand.NewPCG(1, 2))
	counts := make(map[string]int)
	for range rounds {
		typ := randomStruct(rng)
		for name, c := range own {
			in, out, n := reflect.New(typ), reflect.New(typ), 0
			fillUnique(in.Elem(), &n)
			taken := Takes(c, typ)
			data, err := c.Marshal(in.Interface())
			if err == nil {
				err = c.Unmarshal(data, out.Interface())
			}
			if err == nil && name == "JSON" {
				copyHidden(typ, in.Elem(), out.Elem(), 0)
			}
			if err == nil && !reflect.DeepEqual(in.Interface(), out.Interface()) {
				err = errors.New("another value comes back")
			}
			if (taken == nil) != (err == nil) {
				t.Fatalf("%s of %v: Takes returned %v, and the codec %v: %q", name, typ, taken, err, data)
			}
			if taken != nil {
				name += " refused"
			}
			counts[name]++
		}
	}
	for _, name := range []string{"MsgPack", "MsgPack refused", "JSON", "JSON refused"} {
		if counts[name] < rounds/10 {
			t.Errorf("%v of %d", counts, rounds)
		}
	}
}
