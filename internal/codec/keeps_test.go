package codec

import (
	"math/big"
	"reflect"
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
	partly     struct {
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
	for typ, lost := range map[reflect.Type]bool{
		reflect.TypeFor[hidden]():            true,
		reflect.TypeFor[*hidden]():           true,
		reflect.TypeFor[[]hidden]():          true,
		reflect.TypeFor[map[string]hidden](): true,
		reflect.TypeFor[dashed]():            true,
		reflect.TypeFor[nested]():            true,
		reflect.TypeFor[embedding]():         true,
		reflect.TypeFor[marshalled]():        false,
		reflect.TypeFor[jsonObject]():        false,
		reflect.TypeFor[promoted]():          false,
		reflect.TypeFor[partly]():            false,
		reflect.TypeFor[omitting]():          false,
		reflect.TypeFor[recursive]():         false,
		reflect.TypeFor[empty]():             false,
		reflect.TypeFor[time.Time]():         false,
		reflect.TypeFor[*big.Int]():          false,
		reflect.TypeFor[any]():               false,
		reflect.TypeFor[int]():               false,
		reflect.TypeFor[map[string]string](): false,
	} {
		for name, c := range map[string]any{"MsgPack": MsgPack, "JSON": JSON} {
			t.Run(name+" "+typ.String(), func(t *testing.T) {
				err := Takes(c, typ)
				if (err != nil) != lost {
					t.Fatalf("Takes returned %v, want an error: %t", err, lost)
				}
				if lost && (!strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), typ.String())) {
					t.Errorf("the error names neither codec nor type: %v", err)
				}
			})
		}
	}
	_ = partly{amount: 1}
	_ = embedding{hidden{amount: 1}}.hidden.amount
	_ = jsonObject{amount: 1}
	_ = marshalled{amount: 1}
}
