package clone

import (
	"encoding/json"
	"math/big"
	"net/netip"
	"net/url"
	"reflect"
	"sync"
	"testing"
	"testing/quick"
	"time"
)

type (
	line struct {
		SKU   string
		Price *float64
		tags  [2]int
	}
	base  struct{ Notes []string }
	order struct {
		base
		ID     int64
		Lines  []line
		ByName map[string][]line
		Next   *order
		Raw    []byte
		Grid   [2][]int
		Deep   **[]map[int]*string
		At     time.Time
	}
	list   []list
	tree   map[string]tree
	ring   *ring
	pair   [2]*pair
	byName map[string][]byName
	id     string
	named  *order
	holder struct{ Named named }
)

// references returns the addresses of all memory that can be changed through v.
func references(v reflect.Value, all map[uintptr]bool) map[uintptr]bool {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			all[v.Pointer()] = true
			references(v.Elem(), all)
		}
	case reflect.Slice:
		if v.Cap() > 0 && v.Type().Elem().Size() > 0 {
			all[v.Pointer()] = true
		}
		for i := range v.Len() {
			references(v.Index(i), all)
		}
	case reflect.Array:
		for i := range v.Len() {
			references(v.Index(i), all)
		}
	case reflect.Map:
		if !v.IsNil() {
			all[v.Pointer()] = true
		}
		for of := v.MapRange(); of.Next(); {
			references(of.Value(), all)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type() != reflect.TypeFor[time.Time]() {
				references(v.Field(i), all)
			}
		}
	}
	return all
}

func wantCopy[T any](t *testing.T, v T) {
	t.Helper()
	copyOf := Func(reflect.TypeFor[T]())
	if copyOf == nil {
		t.Errorf("%T is not plain", v)
		return
	}
	c := *copyOf(&v).(*T)
	if !reflect.DeepEqual(c, v) {
		t.Errorf("%T: the copy of %+v is %+v", v, v, c)
	}
	theirs := references(reflect.ValueOf(c), make(map[uintptr]bool))
	for ours := range references(reflect.ValueOf(v), make(map[uintptr]bool)) {
		if theirs[ours] {
			t.Errorf("%T: %+v and its copy share memory", v, v)
			return
		}
	}
}

func quickly[T any](t *testing.T) {
	t.Helper()
	if err := quick.Check(func(v T) bool { wantCopy(t, v); return true }, nil); err != nil {
		t.Error(err)
	}
}

// A copy equals its original and shares no memory with it.
func TestFunc_Copies(t *testing.T) {
	t.Parallel()
	quickly[int](t)
	quickly[id](t)
	quickly[[]byte](t)
	quickly[*string](t)
	quickly[[3]*int](t)
	quickly[map[[2]string][]float64](t)
	quickly[map[id]struct{ A, B []int }](t)
	quickly[struct {
		Lines []struct{ SKU string }
		Deep  **[]map[int]*string
		Empty struct{}
	}](t)

	s, p := "s", 1.5
	m := []map[int]*string{{1: &s}, nil, {}}
	pm := &m
	o := order{
		base: base{Notes: []string{"a"}}, ID: 7, Lines: []line{{"x", &p, [2]int{1, 2}}, {}},
		ByName: map[string][]line{"x": {{Price: &p}}, "nil": nil, "empty": {}},
		Raw:    []byte{1, 2}, Grid: [2][]int{{1}, nil}, Deep: &pm, At: time.Now(),
	}
	o.Next = &order{Next: &order{Lines: []line{}}}
	wantCopy(t, o)
	wantCopy(t, &o)
	wantCopy(t, []*order{&o, nil})
	wantCopy(t, holder{&o})
	wantCopy(t, order{})
	wantCopy(t, list{{}, nil, {{}, {}}})
	wantCopy(t, tree{"a": {"b": nil, "c": {}}})
	wantCopy[ring](t, nil)
	wantCopy(t, pair{{}, {nil, {}}})
	wantCopy(t, byName{"a": {{"b": {}}, nil}})
	wantCopy(t, make([]int, 2, 10))
}

type (
	hidden    struct{ _ []int }
	embeds    struct{ *base }
	ownJSON   struct{ S []int }
	ownText   []int
	ownBinary map[string]int
)

func (*ownJSON) UnmarshalJSON([]byte) error    { return nil }
func (*ownText) UnmarshalText([]byte) error    { return nil }
func (ownBinary) UnmarshalBinary([]byte) error { return nil }

func wantNone[T any](t *testing.T) {
	t.Helper()
	if Func(reflect.TypeFor[T]()) != nil {
		t.Errorf("%v counts as plain", reflect.TypeFor[T]())
	}
}

// Func returns nil for types that may hide references, also if only a part of a recursive type may.
func TestFunc_NotPlain(t *testing.T) {
	t.Parallel()
	wantNone[any](t)
	wantNone[error](t)
	wantNone[map[string]any](t)
	wantNone[map[any]int](t)
	wantNone[map[*int]int](t)
	wantNone[[]func()](t)
	wantNone[chan int](t)
	wantNone[hidden](t)
	wantNone[*[]hidden](t)
	wantNone[embeds](t)
	wantNone[big.Int](t)
	wantNone[netip.Addr](t)
	wantNone[*url.URL](t)
	wantNone[json.RawMessage](t)
	wantNone[ownJSON](t)
	wantNone[struct{ F []ownText }](t)
	wantNone[ownBinary](t)
	wantNone[sync.Map](t)
	wantNone[struct {
		Next *struct{ Any any }
	}](t)
	wantNone[point](t)
	wantNone[[]*point](t)
}

type point struct {
	Next *point
	Any  any
}
