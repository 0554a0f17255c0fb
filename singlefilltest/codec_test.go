package singlefilltest_test

import (
	"bytes"
	"cmp"
	"database/sql"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
	"github.com/singlefill/singlefill/singlefilltest"
)

type (
	order struct {
		ID    string
		Items []item
	}
	item struct {
		Name  string
		price int
	}
	dashed struct {
		Kept int
		Gone int `msgpack:"-" json:"-"`
	}
	deep struct {
		ByName map[string]*[2]item
	}
	event struct { // it has MarshalJSON from time.Time
		time.Time
		Name string
	}
	counted struct{ N atomic.Int64 }
	holder  struct{ V any }
	node    struct {
		Name   string
		Next   *node
		parent *node
	}
	listing struct {
		List []int
		Map  map[string]int
	}
	omitting struct {
		List []int          `msgpack:",omitempty" json:",omitempty"`
		Map  map[string]int `msgpack:",omitempty" json:",omitempty"`
	}
	dated struct {
		At     time.Time
		hidden time.Time
	}
	withFunc struct {
		Name string
		F    func()   `msgpack:"-" json:"-"`
		C    chan int `msgpack:"-" json:"-"`
	}
	colour   string
	recoding struct{ N int64 }
	// cached has EncodeMsgpack, and a field that does not matter.
	cached struct{ n, cache int }
	plain  struct {
		B    bool
		I    int8
		U    uint64
		F    float64
		S    string
		P    **int
		A    [2]string
		Data []byte
		At   time.Time
		Ptr  *time.Time
		Big  *big.Int
		Zero big.Int
		Rat  *big.Rat
		Addr netip.Addr
		Null sql.NullString
		M    map[int]colour
		Any  any
	}
)

// MarshalText keeps eight bits of N.
func (r recoding) MarshalText() ([]byte, error) { return fmt.Append(nil, int8(r.N)), nil }
func (r *recoding) UnmarshalText(text []byte) error {
	_, err := fmt.Sscan(string(text), &r.N)
	return err
}

func (c cached) EncodeMsgpack(e *msgpack.Encoder) error { return e.EncodeInt(int64(c.n)) }
func (c *cached) DecodeMsgpack(d *msgpack.Decoder) (err error) {
	c.n, err = d.DecodeInt()
	return err
}
func (c cached) Equal(o cached) bool { return c.n == o.n }

// gobCodec does not distinguish nil from empty.
type gobCodec struct{}

func (gobCodec) Marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	err := gob.NewEncoder(&b).Encode(v)
	return b.Bytes(), err
}

func (gobCodec) Unmarshal(data []byte, v any) error {
	return gob.NewDecoder(bytes.NewReader(data)).Decode(v)
}

// encode returns what Codec reports of one value.
func encode(t *testing.T, c singlefill.Codec, v any) []string {
	t.Helper()
	f := new(fakeTB)
	data, err := singlefilltest.Codec(f, c).Marshal(v)
	want, wantErr := cmp.Or(c, singlefill.MsgPack).Marshal(v)
	if len(data) != len(want) || (err != nil) != (wantErr != nil) { // maps have no order
		t.Errorf("Marshal returned %q, %v; the codec itself returns %q, %v", data, err, want, wantErr)
	}
	return f.errors
}

var self = &node{Name: "self"}

func init() { self.parent = self }

// The first part of a value that did not come back is reported, with its path and both values.
func TestCodec_Lost(t *testing.T) {
	t.Parallel()
	var counter counted
	counter.N.Store(3)
	at := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, test := range []struct {
		name  string
		codec singlefill.Codec
		value any
		want  string
	}{
		{"unexported", nil, order{ID: "1", Items: []item{{Name: "tea"}, {Name: "cup"}, {"pot", 42}}}, `order.Items[2].price is lost: 42 became 0`},
		{"pointer", nil, &order{Items: []item{{price: 1}}}, `order.Items[0].price is lost: 1 became 0`},
		{"unexported in JSON", singlefill.JSON, order{Items: []item{{price: 1}}}, `order.Items[0].price is lost: 1 became 0`},
		{"tag", nil, dashed{1, 2}, `dashed.Gone is lost: 2 became 0`},
		{"tag in JSON", singlefill.JSON, dashed{1, 2}, `dashed.Gone is lost: 2 became 0`},
		{"map, pointer and array", nil, deep{map[string]*[2]item{"a": {}, "b": {{}, {price: 7}}}}, `deep.ByName["b"][1].price is lost: 7 became 0`},
		{"unnamed type", nil, []item{{price: 7}}, `([]singlefilltest_test.item)[0].price is lost: 7 became 0`},
		{"promoted method", singlefill.JSON, event{at, "launch"}, `event.Name is lost: "launch" became ""`},
		{"own method", nil, recoding{300}, `recoding.N is lost: 300 became 44`},
		{"atomic", nil, &counter, `counted.N.v is lost: 3 became 0`},
		{"unexported time", nil, dated{at, at}, `dated.hidden is lost: 2030-01-02 03:04:05 +0000 UTC became 0001-01-01 00:00:00 +0000 UTC`},
		{"unexported pointer", nil, node{parent: &node{}}, `node.parent is lost: *singlefilltest_test.node became nil`},
		{"cycle", nil, node{parent: self}, `node.parent is lost: *singlefilltest_test.node became nil`},
		{"func", nil, withFunc{F: func() {}}, `withFunc.F is lost: func() became nil`},
		{"chan", singlefill.JSON, withFunc{C: make(chan int)}, `withFunc.C is lost: chan int became nil`},
		{"string in JSON", singlefill.JSON, "\xff", `string is lost: "\xff" became "�"`},
		{"number in an any", singlefill.JSON, holder{int64(1<<53 + 1)}, `holder.V is lost: 9007199254740993 became 9007199254740992`},
		{"struct in an any", nil, holder{item{"tea", 42}}, `holder.V.price is lost: 42 became 0`},
		{"time in an any", singlefill.JSON, holder{at}, `holder.V is lost: time.Time 2030-01-02 03:04:05 +0000 UTC became string "2030-01-02T03:04:05Z"`},
		{"bytes in an any", singlefill.JSON, holder{[]byte{1}}, `holder.V is lost: []uint8 length 1 became string "AQ=="`},
		{"map key in an any", nil, map[any]int{300: 1}, `(map[interface {}]int)[300] is lost: 1 became nil`},
		{"error in an any", nil, holder{fmt.Errorf("a %w", errors.New("b"))}, `holder.V.msg is lost: "a b" became ""`},
		{"length", wraps{singlefill.MsgPack, []byte{0x91, 1}}, []int{1, 2}, `([]int) is lost: length 2 became length 1`},
		{"integer", wraps{singlefill.MsgPack, []byte{0xcd, 1, 44}}, int8(1), `int8 is lost: 1 became 44`},
		{"not encoded", singlefill.JSON, math.NaN(), `float64 cannot be encoded: json: unsupported value: NaN`},
		{"not decoded", nil, holder{map[int]int{1: 2}}, `holder cannot be decoded again: `},
		{"panic", wraps{panics{}, nil}, 1, `int cannot be decoded again: codec panicked: ouch`},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			got := encode(t, test.codec, test.value)
			if len(got) != 1 || !strings.HasPrefix(got[0], "singlefilltest: "+test.want) {
				t.Errorf("reported\n%q, want\n%q", got, "singlefilltest: "+test.want)
			}
		})
	}
}

// wraps encodes everything as data.
type wraps struct {
	singlefill.Codec
	data []byte
}

func (w wraps) Marshal(any) ([]byte, error) { return w.data, nil }

type panics struct{ singlefill.Codec }

func (panics) Unmarshal([]byte, any) error { panic("ouch") }

// unwraps tells its inner codec.
type unwraps struct{ singlefill.Codec }

func (u unwraps) Unwrap() singlefill.Codec { return u.Codec }

// A value that comes back is not reported, even where the codec documents a difference.
func TestCodec_Kept(t *testing.T) {
	t.Parallel()
	one, at := 1, time.Now() // in Local, with a monotonic clock
	p, utc := &one, at.UTC()
	full := plain{B: true, I: -8, U: 1 << 63, F: math.Pi, S: "tea", P: &p, A: [2]string{"a", "b"}, Data: []byte{0, 255}, At: at, Ptr: &utc,
		Big: big.NewInt(-7), Rat: big.NewRat(1, 3), Addr: netip.MustParseAddr("fe80::1%eth0"), Null: sql.NullString{String: "x", Valid: true},
		M: map[int]colour{1: "red", 2: ""}, Any: []any{"a", nil, map[string]any{"x": true}}}
	for _, c := range []struct {
		name   string
		codec  singlefill.Codec
		values map[string]any
	}{
		{"MsgPack", nil, map[string]any{
			"NaN":             math.NaN(),
			"NaN as a key":    map[float64]int{math.NaN(): 1, 0: 3, math.Float64frombits(0x7ff8000000000002): 2},
			"narrower number": holder{300},
			"named type":      holder{colour("red")},
			"struct as a map": holder{item{Name: "tea"}},
			"pointer":         holder{&item{Name: "tea"}},
			"slice":           holder{[]string{"a"}},
			"nil slice":       holder{[]string(nil)},
			"nil pointer":     holder{(*item)(nil)},
			"bytes":           holder{[]byte{1}},
			"time":            holder{at},
			"raw JSON":        json.RawMessage(" {} "),
			"invalid UTF-8":   "\xff",
			"error":           struct{ Err error }{errors.New("b")},
		}},
		{"JSON", singlefill.JSON, map[string]any{
			"float64 for int": holder{300},
			"named type":      holder{colour("red")},
			"struct as a map": holder{dated{At: at}},
			"raw JSON":        map[string]json.RawMessage{"a": json.RawMessage(` {"x": "<"} `), "b": nil},
			"url":             url.URL{Scheme: "https", Host: "example.com", Path: "/a b"},
		}},
		{"Raw", singlefill.Raw, map[string]any{"nil": []byte(nil), "string": "a", "bytes": []byte("a")}},
		{"wrapped", unwraps{unwraps{singlefill.MsgPack}}, map[string]any{"own method": cached{1, 7}}},
		{"gob", gobCodec{}, map[string]any{
			"empty": listing{List: []int{}, Map: map[string]int{}},
		}},
	} {
		if c.name != "Raw" && c.name != "gob" {
			for name, v := range map[string]any{
				"full":      &full,
				"zero":      &plain{},
				"list":      listing{List: []int{}, Map: map[string]int{}},
				"nil list":  listing{},
				"omitempty": omitting{List: []int{}, Map: map[string]int{}},
				"nil":       nil,
				"no func":   withFunc{Name: "a"},
				"chain":     node{Name: "a", Next: &node{Name: "b"}},
			} {
				c.values[name] = v
			}
		}
		for name, v := range c.values {
			t.Run(c.name+" "+name, func(t *testing.T) {
				t.Parallel()
				if got := encode(t, c.codec, v); len(got) > 0 {
					t.Errorf("reported %q", got)
				}
			})
		}
	}
}

// New judges T by the codec that Codec checks.
func TestCodec_TellsItsInnerCodec(t *testing.T) {
	t.Parallel()
	for _, c := range []singlefill.Codec{nil, singlefill.JSON, unwraps{singlefill.MsgPack}} {
		if _, err := singlefill.NewLocal("ns", time.Hour, &singlefill.Options[struct{ F func() }]{Codec: singlefilltest.Codec(t, c)}); err == nil {
			t.Errorf("%T: New takes a func", c)
		}
	}
}

// Codec around a codec with ForKey passes the key on, and reports what is lost.
func TestCodec_ForKey(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	f := new(fakeTB)
	orders := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[order]{
		Codec: singlefilltest.Codec(f, cachetest.KeyedCodec{Codec: singlefill.MsgPack}),
	})
	redistest.Must(t, orders.Set(t.Context(), "1", order{ID: "1", Items: []item{{"tea", 42}}}))
	if o, err := orders.Get(t.Context(), "1"); err != nil || o.ID != "1" {
		t.Errorf("%v, %v", o, err)
	}
	if len(f.errors) != 1 || f.errors[0] != "singlefilltest: order.Items[0].price is lost: 42 became 0" {
		t.Errorf("reported %q", f.errors)
	}
	redistest.Must(t, rdb.Copy(t.Context(), "ns:{1}", "ns:{2}", 0, true).Err())
	if o, err := orders.Get(t.Context(), "2"); err != singlefill.ErrMiss {
		t.Errorf("the copy: %v, %v", o, err)
	}
}
