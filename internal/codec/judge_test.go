package codec

import (
	"errors"
	"fmt"
	"io"
	"math/big"
	"os"
	"os/exec"
	"reflect"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

type (
	hidden struct{ amount int64 }
	dashed struct {
		Amount int64 `msgpack:"-" json:"-"`
	}
	marshalled struct{ amount int64 }
	embedding  struct{ hidden }
	promoted   struct{ inner }
	inner      struct{ Amount int64 }
	nested     struct{ Price hidden }
	// hiddenTwice loses its second field like the first.
	hiddenTwice struct{ Price, Discount hidden }
	partly      struct {
		Name   string
		amount int64
	}
	omitting struct {
		Name string `msgpack:",omitempty" json:",omitempty"`
	}
	recursive struct {
		Next *recursive
		Name string
	}
	empty struct{}

	// jsonObject looks like a struct in JSON, but encodes itself.
	jsonObject struct{ amount int64 }
)

func (jsonObject) MarshalJSON() ([]byte, error) { return []byte(`{"amount":0}`), nil }
func (jsonObject) EncodeMsgpack(e *msgpack.Encoder) error {
	return e.EncodeMap(map[string]any{"amount": 0})
}

func (marshalled) MarshalBinary() ([]byte, error)   { return []byte{1}, nil }
func (*marshalled) UnmarshalBinary([]byte) error    { return nil }
func (marshalled) MarshalText() ([]byte, error)     { return []byte("1"), nil }
func (*marshalled) UnmarshalText(text []byte) error { return nil }

// A type of which the codec keeps nothing is refused; one of which it keeps something is not.
func TestTakes_TypeThatIsLost(t *testing.T) {
	for lost, values := range map[bool][]any{
		true: {hidden{}, &hidden{}, []hidden{}, map[string]hidden{}, dashed{}, nested{}, embedding{}, hiddenTwice{}},
		false: {
			marshalled{}, jsonObject{}, promoted{}, partly{}, omitting{}, recursive{}, empty{}, time.Time{}, new(big.Int),
			0, map[string]string{},
		},
	} {
		for _, v := range values {
			typ := reflect.TypeOf(v)
			for name, c := range own {
				err := Takes(c, typ)
				if (err != nil) != lost {
					t.Errorf("%s takes %v: %v, want an error: %t", name, typ, err, lost)
				} else if lost && (!strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), typ.String())) {
					t.Errorf("the error names neither %s nor %v: %v", name, typ, err)
				}
			}
		}
	}
	_ = partly{amount: 1}
	_ = embedding{hidden{amount: 1}}.hidden.amount
	_ = jsonObject{amount: 1}
	_ = marshalled{amount: 1}
}

type (
	tree     map[string]tree
	list     []list
	boxes    []*boxes
	byName   map[string][]byName
	pair     [2]*pair
	selves   *selves
	toOther  *toSelves
	toSelves *toOther
	chained  struct {
		Next *chained
		Kids map[string][]chained
		All  []tree
	}
	embedsItself struct {
		*embedsItself
		N int
	}
	Left struct {
		*Right
		N int
	}
	Right struct {
		*Left
		M int
	}
	ownLoop struct{ *ownLoop }
)

func (*ownLoop) MarshalJSON() ([]byte, error)            { return []byte("null"), nil }
func (*ownLoop) MarshalBinary() (data []byte, err error) { return nil, nil }

// Takes returns for each recursive type, and refuses those that the codec itself cannot look at. It
// runs in a child, since a stack overflow ends the process.
func TestTakes_RecursiveType(t *testing.T) {
	const child = "SINGLEFILL_RECURSIVE_TYPES"
	if os.Getenv(child) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestTakes_RecursiveType$", "-test.v")
		cmd.Env = append(os.Environ(), child+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%.4000s", err, out)
		}
		return
	}
	_ = embedsItself{}.embedsItself
	debug.SetMaxStack(16 << 20)
	for refusedBy, values := range map[string][]any{
		"": {tree{}, new(tree), list{}, boxes{}, byName{}, pair{}, chained{}, ownLoop{}, struct {
			N    int
			Self *selves `msgpack:"-" json:"-"`
		}{}},
		"MsgPack JSON": {selves(nil), []selves{}, map[string]selves{}, struct{ Self selves }{}, toOther(nil)},
		"MsgPack":      {embedsItself{}, new(Left), []struct{ F Right }{}},
	} {
		for _, v := range values {
			for name, c := range own {
				err := Takes(c, reflect.TypeOf(v))
				endless := err != nil && strings.Contains(err.Error(), "refers to itself")
				if want := strings.Contains(refusedBy, name); endless != want {
					t.Errorf("%s takes %T: %v, want endless: %t", name, v, err, want)
				}
			}
		}
	}
}

// own are the codecs that Takes judges.
var own = map[string]interface {
	Marshal(v any) ([]byte, error)
	Unmarshal(data []byte, v any) error
}{"MsgPack": MsgPack, "JSON": JSON}

type (
	base   struct{ N int }
	secret struct{ n int }
	words  []string

	withReader  struct{ Body io.Reader }
	withErr     struct{ Err error }
	withTime    struct{ At fmt.Stringer }
	withFunc    struct{ Done func() }
	withChan    struct{ Events []chan int }
	withComplex struct{ Z [2]complex64 }
	deep        struct {
		Name  string
		Lines map[string]*withReader
	}
	embedsPointer struct {
		*base
		Z int
	}
	embedsDeeply struct{ embedsPointer }
	embedsValue  struct {
		base
		Z int
	}
	embedsSecret struct {
		*secret
		Z int
	}
	embedsWords struct {
		words
		Z int
	}
	omitsReader struct {
		N    int
		Body io.Reader       `msgpack:",omitempty" json:",omitempty"`
		More []chan int      `msgpack:"more,omitempty" json:"more,omitempty"`
		Any  map[string]any  `msgpack:"any" json:"any"`
		None [0]func()       // has no element
		Ext  *big.Float      // encodes itself
		P    *json5          // encodes itself
		skip func(io.Reader) // is not exported
	}
	dropsReader struct {
		N    int
		Body io.Reader  `msgpack:"-" json:"-"`
		Done chan int   `msgpack:"-" json:"-"`
		F    func()     `msgpack:"-" json:"-"`
		Z    complex128 `msgpack:"-" json:"-"`
	}
	// positive refuses to encode a zero.
	positive int

	json5 struct{ F func() }
	shape interface{ Area() float64 }
)

func (p positive) MarshalText() ([]byte, error) {
	if p <= 0 {
		return nil, errors.New("not positive")
	}
	return []byte(strconv.Itoa(int(p))), nil
}
func (p *positive) UnmarshalText(text []byte) (err error) {
	n, err := strconv.Atoi(string(text))
	*p = positive(n)
	return err
}

func (json5) MarshalText() ([]byte, error)  { return []byte("5"), nil }
func (*json5) UnmarshalText(_ []byte) error { return nil }

// A type is refused if a part of it can hold nothing but nil, and not otherwise. The error names T, the
// way to the part, and its type. Then the codec cannot store a value in which nothing is nil; what Takes takes
// comes back.
func TestTakes_TypeThatCannotBeStored(t *testing.T) {
	_ = omitsReader{skip: nil}
	_ = embedsSecret{secret: &secret{n: 1}}
	_ = embedsWords{words: nil}
	const both, fits = "MsgPack JSON", ""
	n, ch := 1, make(chan int)
	for _, test := range []struct {
		v               any // or a reflect.Type
		refusedBy, part string
	}{
		{withReader{strings.NewReader("x")}, both, "T.Body, of type io.Reader"},
		{withFunc{func() {}}, both, "T.Done, of type func()"},
		{withChan{[]chan int{ch}}, both, "T.Events[], of type chan int"},
		{withComplex{}, both, "T.Z[], of type complex64"},
		{deep{Lines: map[string]*withReader{"x": {strings.NewReader("x")}}}, both, "T.Lines[].Body, of type io.Reader"},
		{embedsPointer{&base{1}, 1}, both, "T.base, of type *codec.base"},
		{embedsDeeply{embedsPointer{&base{1}, 1}}, both, "T.embedsPointer.base, of type *codec.base"},
		{withErr{errors.New("x")}, "JSON", "T.Err, of type error"}, // MsgPack stores its text
		{withTime{time.Now()}, "JSON", "T.At, of type fmt.Stringer"},
		{struct{ U uintptr }{1}, "MsgPack", "T.U, of type uintptr"},
		{map[bool]int{true: 1}, "JSON", "it: "},
		{[2]positive{1, 2}, fits, ""},
		{embedsValue{base{1}, 1}, fits, ""},
		{embedsSecret{&secret{}, 1}, fits, ""},
		{omitsReader{N: 1, P: new(json5)}, fits, ""},
		{dropsReader{N: 1, F: func() {}}, fits, ""},
		{struct{ P **int }{new(*int)}, fits, ""},
		{&n, fits, ""},
		{reflect.TypeFor[io.Reader](), both, "it: "},
		{reflect.TypeFor[error](), both, "it: "},
		{reflect.TypeFor[[]shape](), both, "T[], of type codec.shape"},
		{reflect.TypeFor[func()](), both, "it: "},
		{reflect.TypeFor[*chan int](), both, "it: "},
		{reflect.TypeFor[map[string]complex128](), both, "T[], of type complex128"},
		{reflect.TypeFor[map[any]int](), both, "interface"},
		{reflect.TypeFor[map[float64]int](), "JSON", "it: "}, // with Go 1.27 it could be stored
		{reflect.TypeFor[struct{ M map[bool]int }](), "JSON", "T.M, of type map[bool]int"},
		{reflect.TypeFor[embedsWords](), "MsgPack", "T.words, of type codec.words"},
		{reflect.TypeFor[json5](), fits, ""},
		{reflect.TypeFor[map[string]any](), fits, ""},
		{reflect.TypeFor[map[int]json5](), fits, ""},
	} {
		testTakes(t, test.v, test.refusedBy, test.part, func(_, _ reflect.Value) bool { return true })
	}
}

// testTakes checks that Takes refuses v, or a type, for some codecs, with an error that names a part of it; and that a
// codec has an error for v, or returns something else, if and only if it is refused.
func testTakes(t *testing.T, v any, refusedBy, part string, same func(in, out reflect.Value) bool) {
	typ, isType := v.(reflect.Type)
	if !isType {
		typ = reflect.TypeOf(v)
	}
	for name, c := range own {
		t.Run(name+" "+typ.String(), func(t *testing.T) {
			taken := Takes(c, typ)
			refused := strings.Contains(refusedBy, name)
			switch {
			case (taken != nil) != refused:
				t.Fatalf("Takes returned %v, want an error: %t", taken, refused)
			case !refused:
			case !strings.Contains(taken.Error(), part), !strings.Contains(taken.Error(), "T is "+typ.String()):
				t.Errorf("the error does not name %q of %v: %v", part, typ, taken)
			}
			if isType {
				return
			}
			out := reflect.New(typ)
			data, err := c.Marshal(v)
			if err == nil {
				err = c.Unmarshal(data, out.Interface())
			}
			if returned := err == nil && same(reflect.ValueOf(v), out.Elem()); returned == refused {
				t.Errorf("Takes returned %v, and the codec %v, %+v for %+v: %q", taken, err, out.Elem(), v, data)
			}
		})
	}
}

// MsgPack decodes extensions into interfaces, so with one of the program's own no interface is refused.
func TestTakes_RegisteredExtension(t *testing.T) {
	registerExt(t)
	if err := Takes(MsgPack, reflect.TypeFor[withReader]()); err != nil {
		t.Error(err)
	}
	if err := Takes(MsgPack, reflect.TypeFor[withFunc]()); err == nil {
		t.Error("a func is taken")
	}
}
