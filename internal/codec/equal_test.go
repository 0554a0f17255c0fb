package codec

import (
	"math"
	"reflect"
	"testing"
	"time"
)

// Values are equal as by reflect.DeepEqual, NaN equals NaN, also as a key, and circles end.
func TestEqual(t *testing.T) {
	t.Parallel()
	type node struct {
		next *node
		n    float64
	}
	circle := func(n float64) *node {
		x := &node{n: math.NaN()}
		x.next = &node{x, n}
		return x
	}
	nan, now := math.NaN(), time.Now()
	one, two := func() *int { return new(int) }, func() *int { n := 2; return &n }
	for name, test := range map[string]struct {
		a, b any
		want bool
	}{
		"nothing":               {nil, nil, true},
		"nothing and something": {nil, 1, false},
		"types":                 {1, int8(1), false},
		"NaN":                   {nan, nan, true},
		"NaN and a number":      {nan, 1.0, false},
		"float32":               {float32(nan), float32(nan), true},
		"complex":               {complex(1, nan), complex(1, nan), true},
		"complex differs":       {complex(1, nan), complex(2, nan), false},
		"slice":                 {[]any{nan, "a"}, []any{nan, "a"}, true},
		"slice differs":         {[]any{nan, "a"}, []any{nan, "b"}, false},
		"lengths":               {[]float64{nan}, []float64{nan, nan}, false},
		"nil and empty":         {[]float64(nil), []float64{}, false},
		"array":                 {[2]float64{nan, 1}, [2]float64{nan, 1}, true},
		"array differs":         {[2]float64{nan, 1}, [2]float64{nan, 2}, false},
		"map":                   {map[string]float64{"a": nan, "b": 1}, map[string]float64{"b": 1, "a": nan}, true},
		"map differs":           {map[string]float64{"a": nan, "b": 1}, map[string]float64{"b": 2, "a": nan}, false},
		"keys differ":           {map[string]float64{"a": nan, "b": 1}, map[string]float64{"a": nan, "c": 1}, false},
		"NaN as keys":           {map[float64]int{nan: 1, nan: 2}, map[float64]int{nan: 2, nan: 1}, true},
		"NaN as keys, differs":  {map[float64]int{nan: 1, nan: 2}, map[float64]int{nan: 2, nan: 2}, false},
		"NaN in keys":           {map[[2]float64]int{{nan, 1}: 1}, map[[2]float64]int{{nan, 1}: 1}, true},
		"pointers as keys":      {map[*int]int{one(): 1, two(): 2}, map[*int]int{two(): 2, one(): 1}, true},
		"pointers, differs":     {map[*int]int{one(): 1, two(): 2}, map[*int]int{two(): 1, one(): 2}, false},
		"circle":                {circle(1), circle(1), true},
		"circle differs":        {circle(1), circle(2), false},
		"unexported":            {struct{ m map[any]float64 }{map[any]float64{now: nan}}, struct{ m map[any]float64 }{map[any]float64{now: nan}}, true},
		"func":                  {struct{ f func() }{func() {}}, struct{ f func() }{func() {}}, false},
	} {
		if got := Equal(test.a, test.b); got != test.want {
			t.Errorf("%s: Equal = %t, want %t", name, got, test.want)
		}
		if got := Equal(test.b, test.a); got != test.want {
			t.Errorf("%s, the other way: Equal = %t, want %t", name, got, test.want)
		}
		if reflect.DeepEqual(test.a, test.b) && !test.want {
			t.Errorf("%s: DeepEqual says that they are equal", name)
		}
	}
}
