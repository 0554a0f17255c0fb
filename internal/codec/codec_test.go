package codec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/singlefill/singlefill/internal/redistest"
)

type (
	codecToken string
	codecBytes []byte

	codecBase struct {
		ID      int64
		Created time.Time
	}
	codecItem struct {
		codecBase
		Name   string `msgpack:"n" json:"n"`
		Token  codecToken
		Price  float64
		Tags   []string
		Attrs  map[string]string
		ByID   map[int]codecBase
		Parent *codecItem
		Blob   []byte
		Doc    json.RawMessage
		Grid   [2][3]uint8
		Wait   time.Duration
		Any    any
	}
)

func newCodecItem(id int) codecItem {
	created := time.Unix(1700000000, int64(id)<<22).Local()
	return codecItem{
		codecBase: codecBase{int64(id), created},
		Name:      "name of the item",
		Token:     "token",
		Price:     1.25,
		Tags:      []string{"a", "", "ü"},
		Attrs:     map[string]string{"color": "red", "": ""},
		ByID:      map[int]codecBase{-1: {1, created}, 1 << 30: {2, created}},
		Parent:    &codecItem{Name: "parent"},
		Blob:      []byte{0, 0xc1, 0xff},
		Doc:       json.RawMessage(`{"a":[1,2]}`),
		Grid:      [2][3]uint8{{1, 2, 3}, {4, 5, 255}},
		Wait:      time.Minute,
		Any:       "text",
	}
}

// Codec is singlefill.Codec.
type Codec interface {
	Marshal(v any) ([]byte, error)
	Unmarshal(data []byte, v any) error
}

func testRoundTrip[T any](t *testing.T, c Codec, in T) {
	t.Helper()
	data, err := c.Marshal(in)
	if err != nil {
		t.Errorf("%T, %T: %v", c, in, err)
		return
	}
	data = bytes.Clone(data) // as if stored and read: it may share memory with in
	before := bytes.Clone(data)
	out := new(T)
	if err := c.Unmarshal(data, out); err != nil {
		t.Errorf("%T, %T: %v", c, in, err)
		return
	}
	if !bytes.Equal(before, data) {
		t.Errorf("%T, %T: Unmarshal changed the data", c, in)
	}
	for i := range data {
		data[i] ^= 0xff // a value that aliases data differs now
	}
	if !equalValues(reflect.ValueOf(&in).Elem(), reflect.ValueOf(out).Elem()) {
		t.Errorf("%T: %#v came back as %#v", c, in, *out)
	}
}

// equalValues is reflect.DeepEqual, but compares times with Equal.
func equalValues(a, b reflect.Value) bool {
	if a.Type() == reflect.TypeFor[time.Time]() && a.CanInterface() {
		return a.Interface().(time.Time).Equal(b.Interface().(time.Time))
	}
	if a.Kind() == reflect.Struct {
		for i := range a.NumField() {
			if !equalValues(a.Field(i), b.Field(i)) {
				return false
			}
		}
		return true
	}
	if !a.CanInterface() {
		return true // an unexported type: the caller compares promoted fields
	}
	return reflect.DeepEqual(a.Interface(), b.Interface())
}

// MsgPack and JSON return each value that they have encoded.
func TestCodecs_RoundTrip(t *testing.T) {
	item := newCodecItem(7)
	for _, c := range []Codec{MsgPack, JSON} {
		testRoundTrip(t, c, item.Name)
		testRoundTrip(t, c, item.Token)
		testRoundTrip(t, c, "")
		testRoundTrip(t, c, strings.Repeat("long ", 1<<18))
		testRoundTrip(t, c, true)
		testRoundTrip(t, c, int64(-1<<40))
		testRoundTrip(t, c, uint64(1<<63))
		testRoundTrip(t, c, 1.5)
		testRoundTrip(t, c, time.Unix(1700000000, 0x80<<22))
		testRoundTrip(t, c, time.Time{})
		testRoundTrip(t, c, time.Hour)
		testRoundTrip(t, c, []byte("bytes"))
		testRoundTrip(t, c, codecBytes("bytes"))
		testRoundTrip(t, c, json.RawMessage(`[1,2]`))
		testRoundTrip(t, c, []string{"a", ""})
		testRoundTrip(t, c, map[string]string{"a": "b"})
		testRoundTrip(t, c, map[string]any{"a": "b", "n": nil, "l": []any{"x", true}})
		testRoundTrip(t, c, map[int][]string{1: {"a"}, 2: nil, 3: {}})
		testRoundTrip(t, c, [3]int{1, 2, 3})
		testRoundTrip(t, c, struct{}{})
		testRoundTrip(t, c, codecTree{"a": {"b": {}}, "c": {}})
		testRoundTrip(t, c, (*codecBase)(nil))
		testRoundTrip(t, c, &codecBase{ID: 1})
		testRoundTrip[any](t, c, "in an any")
		testRoundTrip[any](t, c, nil)
		testRoundTrip(t, c, *big.NewInt(1 << 40)) // its methods have pointer receivers
		testRoundTrip(t, c, struct{ N big.Int }{*big.NewInt(5)})

		data, err := c.Marshal(item)
		redistest.Must(t, err)
		var got codecItem
		redistest.Must(t, c.Unmarshal(data, &got))
		if !got.Created.Equal(item.Created) || !got.ByID[-1].Created.Equal(item.Created) {
			t.Errorf("%T: %v came back as %v", c, item.Created, got.Created)
		}
		got.Created, got.ByID = item.Created, item.ByID
		if got.Parent == nil || !got.Parent.Created.IsZero() {
			t.Fatalf("%T: parent came back as %+v", c, got.Parent)
		}
		got.Parent.Created = time.Time{}
		if c == JSON { // JSON writes a nil RawMessage as null, and reads it as that text
			got.Parent.Doc = nil
		}
		if !reflect.DeepEqual(got, item) {
			t.Errorf("%T: %+v came back as %+v", c, item, got)
		}
	}
}

// MsgPack keeps nil and empty values apart.
func TestMsgPack_NilAndEmpty(t *testing.T) {
	type all struct {
		Slice []int
		Map   map[string]string
		Bytes []byte
		Ptr   *[]int
		Strs  []string
		Ints  map[int]int
		Any   any
	}
	testRoundTrip(t, MsgPack, all{})
	testRoundTrip(t, MsgPack, all{[]int{}, map[string]string{}, []byte{}, &[]int{}, []string{}, map[int]int{}, []any{}})
	testRoundTrip(t, MsgPack, [][]int{nil, {}, {0}})
	testRoundTrip(t, MsgPack, []map[string]any{nil, {}, {"": nil}})
	testRoundTrip(t, MsgPack, [][]byte{nil, {}, {0}})
	testRoundTrip(t, MsgPack, []byte(nil))
	testRoundTrip(t, MsgPack, []byte{})
	testRoundTrip(t, MsgPack, map[string]string(nil))
	testRoundTrip(t, MsgPack, map[string]string{})
}

// MsgPack has the pitfalls that its documentation names.
func TestMsgPack_Pitfalls(t *testing.T) {
	to := func(in, out any) {
		t.Helper()
		data, err := MsgPack.Marshal(in)
		redistest.Must(t, err)
		redistest.Must(t, MsgPack.Unmarshal(data, out))
	}
	var m map[string]any
	to(struct {
		A int `msgpack:"a"`
		B int `json:"b"`
		c int
	}{1, 2, 3}, &m)
	if want := map[string]any{"a": int8(1), "B": int8(2)}; !reflect.DeepEqual(m, want) {
		t.Errorf("names: %v", m)
	}
	var other struct{ C string }
	if to(struct{ A, B int }{1, 2}, &other); other.C != "" {
		t.Errorf("unknown fields: %+v", other)
	}
	var narrow int8
	if to(300, &narrow); narrow != 44 {
		t.Errorf("300 in an int8: %d", narrow)
	}
	var when time.Time
	utc := time.Unix(1700000000, 0).UTC()
	if to(utc, &when); when.Location() != time.Local || !when.Equal(utc) {
		t.Errorf("%v came back as %v", utc, when)
	}
	var anys any
	to([]any{300, []string{"a"}, struct{ A int }{5}}, &anys)
	if want := []any{uint16(300), []any{"a"}, map[string]any{"A": int8(5)}}; !reflect.DeepEqual(anys, want) {
		t.Errorf("any: %#v", anys)
	}
}

type (
	codecBig  struct{ B [1024]byte }
	codecTree map[string]codecTree
	codecNode struct {
		Next *codecNode
		Kids []codecNode
		Any  any
	}
)

func codecTargets() []any {
	return []any{
		new(any), new([]int), new([]string), new([]byte), new(string), new([]codecBig), new([]*codecBig),
		new(map[string]any), new(map[string]string), new(map[int]codecBig), new([]map[string]codecBig),
		new(codecItem), new([]codecItem), new(codecTree), new(codecNode), new([][4096]byte),
		new(time.Time), new(struct{}), new([]any), new(int), new(json.RawMessage), new(msgpack.RawMessage),
	}
}

// codecMost is what decoding n bytes may allocate: the documented limit and temporary garbage. JSON
// makes more of that, since it grows a slice by a quarter at a time.
func codecMost(c Codec, n int) uint64 {
	limit := 64<<20 + 64*uint64(n)
	if c == JSON {
		return 6 * limit
	}
	return 2 * limit
}

// Unmarshal of hostile bytes allocates no more than documented. Lengths and depths that no document can have
// are refused before: see package msgcheck.
func TestUnmarshal_HostileBytes(t *testing.T) {
	if testing.Short() || redistest.Race {
		t.Skip("decodes some GB, in one goroutine")
	}
	many := func(prefix, unit string) []byte { return []byte(prefix + strings.Repeat(unit, 1<<15)) }
	const list = "\xdd\x00\x00\x80\x00"
	deep := func(unit, end string, n int) []byte { return []byte(strings.Repeat(unit, n) + end) }
	for name, data := range map[string][]byte{
		"time, or map of 4 G": []byte("\xd7\xff\xdf\xff\xff\xff\xff\x00\x00\x00"),
		"times in an array":   []byte("\x92\xd7\xff\xdf\xff\xff\xff\xff\x00\x00\x00\xc0"),
		"times in a map":      []byte("\x81\xa5Attrs\xd7\xff\xdf\xff\xff\xff\xff\x00\x00\x00"),
		"512 deep":            deep("\x91", "\xc0", 512),
		"nils":                many(list, "\xc0"),
		"a million nils":      []byte("\xdd\x00\x10\x00\x00" + strings.Repeat("\xc0", 1<<20)),
		"zeros":               many(list, "\x00"),
		"empty arrays":        many(list, "\x90"),
		"empty maps":          many(list, "\x80"),
		"small maps":          many(list, "\x81\xa0\xc0"),
		"small maps in maps":  many(list, "\x81\xa0\x81\xa0\x81\xa0\x81\xa0\xc0"),
		"small arrays":        many(list, "\x91\xc0"),
		"map of nils":         many("\xdf\x00\x00\x80\x00", "\xa0\xc0"),
		"map of maps":         many("\xdf\x00\x00\x80\x00", "\xa0\x80"),
		"field of nils":       append([]byte("\x81\xa4Kids"), many(list, "\xc0")...),
		"json nulls":          []byte("[null" + strings.Repeat(",null", 1<<15) + "]"),
		"json zeros":          []byte("[0" + strings.Repeat(",0", 1<<15) + "]"),
		"json objects":        []byte("[{}" + strings.Repeat(",{}", 1<<15) + "]"),
		"json arrays":         []byte("[[]" + strings.Repeat(",[]", 1<<15) + "]"),
		"json small objects":  []byte(`[{"":{}}` + strings.Repeat(`,{"":{}}`, 1<<15) + "]"),
		"json map":            []byte(`{"":null` + strings.Repeat(`,"":null`, 1<<15) + "}"),
		"json field":          []byte(`{"Kids":[{}` + strings.Repeat(",{}", 1<<17) + "]}"),
		"json 1e6 deep":       deep("[", "", 1e6),
	} {
		for _, v := range codecTargets() {
			c := Codec(MsgPack)
			if strings.HasPrefix(name, "json") {
				c = JSON
			}
			var err error
			took := redistest.Allocated(func() { err = c.Unmarshal(data, v) })
			if took > codecMost(c, len(data)) {
				t.Errorf("%s into %T: %d MiB allocated, err %v", name, v, took>>20, err)
			}
		}
	}
}

// Marshal refuses values that Unmarshal would refuse.
func TestMarshal_Refuses(t *testing.T) {
	deep := any(nil)
	for range 513 {
		deep = []any{deep}
	}
	var interned struct {
		A, B string `msgpack:",intern"`
	}
	interned.A, interned.B = "same", "same"
	for name, tt := range map[string]struct {
		c Codec
		v any
	}{
		"nil pointers to large structs": {MsgPack, make([]*codecBig, 1<<17)},
		"the same in JSON":              {JSON, make([]*codecBig, 1<<17)},
		"513 levels":                    {MsgPack, deep},
		"interned strings":              {MsgPack, interned},
		"two values from one method":    {MsgPack, codecTwice{}},
		"no value from one method":      {MsgPack, msgpack.RawMessage(nil)},
		"channels":                      {MsgPack, make(chan int)},
		"functions":                     {JSON, func() {}},
	} {
		if data, err := tt.c.Marshal(tt.v); err == nil || data != nil {
			t.Errorf("%s: %.20x, %v", name, data, err)
		}
	}
	for _, n := range []int{1, 1000, 1 << 16} {
		if _, err := MsgPack.Marshal(make([]codecBig, n/16)); err != nil {
			t.Error(err)
		}
	}
}

type codecTwice struct{}

func (codecTwice) MarshalMsgpack() ([]byte, error) { return []byte{1, 2}, nil }

type (
	panicsCustom struct{}
	panicsMsg    struct{}
	panicsBinary struct{}
	panicsText   struct{}
	panicsJSON   struct{}
)

func (panicsCustom) EncodeMsgpack(*msgpack.Encoder) error  { panic("encode") }
func (*panicsCustom) DecodeMsgpack(*msgpack.Decoder) error { panic("decode") }
func (panicsMsg) MarshalMsgpack() ([]byte, error)          { panic("encode") }
func (*panicsMsg) UnmarshalMsgpack([]byte) error           { panic("decode") }
func (panicsBinary) MarshalBinary() ([]byte, error)        { panic("encode") }
func (*panicsBinary) UnmarshalBinary(b []byte) error       { _ = b[8]; return nil }
func (*panicsText) MarshalText() ([]byte, error)           { panic(errors.New("encode")) }
func (*panicsText) UnmarshalText([]byte) error             { panic(errors.New("decode")) }
func (*panicsJSON) MarshalJSON() ([]byte, error)           { panic("encode") }
func (*panicsJSON) UnmarshalJSON([]byte) error             { panic("decode") }

// A panic of a user's method becomes an error.
func TestCodecs_Panics(t *testing.T) {
	for _, tt := range []struct {
		c    Codec
		v    any
		data string
	}{
		{MsgPack, new(panicsCustom), "\x01"},
		{MsgPack, new(panicsMsg), "\x01"},
		{MsgPack, new(panicsBinary), "\xc4\x01x"},
		{MsgPack, new(panicsText), "\xa1x"},
		{MsgPack, &[]panicsCustom{{}}, "\x91\x01"},
		{MsgPack, &map[string]panicsBinary{"": {}}, "\x81\xa0\xc4\x01x"},
		{MsgPack, &struct{ F panicsMsg }{}, "\x81\xa1F\x01"},
		{JSON, new(panicsJSON), "1"},
		{JSON, new(panicsText), `"x"`},
		{JSON, &struct{ F panicsJSON }{}, `{"F":1}`},
	} {
		if data, err := tt.c.Marshal(reflect.ValueOf(tt.v).Elem().Interface()); err == nil || data != nil {
			t.Errorf("%T.Marshal(%T): %x, %v", tt.c, tt.v, data, err)
		} else if !strings.HasPrefix(err.Error(), "singlefill: panic in ") {
			t.Errorf("%T.Marshal(%T): %v", tt.c, tt.v, err)
		}
		if err := tt.c.Unmarshal([]byte(tt.data), tt.v); err == nil {
			t.Errorf("%T.Unmarshal(%T) is no error", tt.c, tt.v)
		} else if !strings.HasPrefix(err.Error(), "singlefill: panic in ") {
			t.Errorf("%T.Unmarshal(%T): %v", tt.c, tt.v, err)
		}
		testRoundTrip(t, tt.c, "the codec still works")
	}
	// The decoder itself panics on these documents.
	if err := MsgPack.Unmarshal([]byte("\x82\xa1A\xa1x\xa1A\xa1y"), new(struct{ A any })); err == nil {
		t.Error("a field given twice is no error")
	}
	if err := MsgPack.Unmarshal([]byte("\x81\xa1S\x01"), new(struct{ S fmt.Stringer })); err == nil {
		t.Error("a number in a Stringer is no error")
	}
	for _, c := range []Codec{MsgPack, JSON, Raw} {
		for _, v := range []any{nil, 5, (*string)(nil)} {
			if err := c.Unmarshal([]byte("1"), v); err == nil {
				t.Errorf("%T.Unmarshal into %T is no error", c, v)
			}
		}
	}
}

// Types whose methods keep what they are given.
type (
	keepsDecoder struct{}
	keepsBytes   struct{}
	looksAround  struct{} // a type whose method is called while another value is decoded
)

var (
	keptDecoder  *msgpack.Decoder
	keptReader   io.Reader
	keptBytes    []byte
	leakedValues []string
)

const keepsBytesExt = 77

// registerExt registers an extension for the length of a test.
func registerExt(t *testing.T) {
	msgpack.RegisterExt(keepsBytesExt, (*keepsBytes)(nil))
	t.Cleanup(func() { msgpack.UnregisterExt(keepsBytesExt) })
}

func (*keepsDecoder) DecodeMsgpack(d *msgpack.Decoder) error {
	keptDecoder, keptReader = d, d.Buffered()
	return d.Skip()
}

func (*keepsBytes) MarshalMsgpack() ([]byte, error) { return []byte("kept"), nil }
func (*keepsBytes) UnmarshalMsgpack(b []byte) error { keptBytes = b; return nil }

func (*looksAround) UnmarshalText([]byte) error {
	for _, r := range []io.Reader{keptReader, keptDecoder.Buffered()} {
		if r == nil {
			continue
		}
		if b, _ := io.ReadAll(r); len(b) > 0 {
			leakedValues = append(leakedValues, string(b))
		}
	}
	if string(keptBytes) != "kept" {
		leakedValues = append(leakedValues, string(keptBytes))
	}
	return nil
}

// A decoder or buffer that a method keeps shows no later value.
func TestUnmarshal_KeptDecoder(t *testing.T) {
	registerExt(t)
	keptDecoder, keptReader, keptBytes, leakedValues = nil, nil, nil, nil // other tests call these methods, too
	type other struct {
		Name string
		Look looksAround
		Rest string
	}
	data := []byte("\x83\xa4Name\xa6secret\xa4Look\xa1x\xa4Rest\xa6secret")
	for range 100 { // a pool does not always return what was put in
		for _, keeps := range []struct {
			data string
			v    any
		}{
			{"\x01", new(keepsDecoder)},
			{"\x91\x01", new([]keepsDecoder)},
			{"\x81\xa1F\x01", &struct{ F *keepsDecoder }{}},
			{"\x81\xa1k\x01", &map[string]keepsDecoder{}},
			{"\xd6\x4dkept", new(any)},
			{"\x91\xd6\x4dkept", new([]any)},
			{"\xd6\x4dkept", new(*keepsBytes)},
		} {
			if err := MsgPack.Unmarshal([]byte(keeps.data), keeps.v); err != nil {
				t.Fatalf("%T: %v", keeps.v, err)
			}
			if keptDecoder == nil || keptBytes == nil {
				continue
			}
			var v other
			if err := MsgPack.Unmarshal(data, &v); err != nil || v.Name != "secret" || v.Rest != "secret" {
				t.Fatalf("%+v, %v", v, err)
			}
			if len(leakedValues) > 0 {
				t.Fatalf("%T has got %q", keeps.v, leakedValues)
			}
		}
	}
}

// Raw stores bytes and strings unchanged, and refuses other types.
func TestRaw(t *testing.T) {
	testRoundTrip(t, Raw, "text \xff\x00")
	testRoundTrip(t, Raw, "")
	testRoundTrip(t, Raw, []byte("bytes"))
	testRoundTrip(t, Raw, []byte{})
	testRoundTrip(t, Raw, codecToken("named"))
	testRoundTrip(t, Raw, codecBytes("named"))
	testRoundTrip(t, Raw, json.RawMessage("{not even json"))

	data, err := Raw.Marshal([]byte("exactly these"))
	if err != nil || string(data) != "exactly these" {
		t.Errorf("%q, %v", data, err)
	}
	var b []byte
	if data, err = Raw.Marshal(b); err != nil || len(data) != 0 {
		t.Errorf("nil bytes: %q, %v", data, err)
	}
	if err := Raw.Unmarshal(nil, &b); err != nil || b == nil || len(b) != 0 {
		t.Errorf("nil bytes came back as %#v, %v", b, err)
	}
	for _, v := range []any{5, nil, codecItem{}, []string{"a"}, new(string), &[]byte{}, [2]byte{}} {
		if data, err := Raw.Marshal(v); err == nil {
			t.Errorf("Raw.Marshal(%T): %q", v, data)
		}
	}
	for _, v := range []any{new(int), new(codecItem), new([]string), new(*string), "text", []byte("x"), new([2]byte)} {
		if err := Raw.Unmarshal([]byte("x"), v); err == nil {
			t.Errorf("Raw.Unmarshal into %T is no error", v)
		}
	}
}

type anyCodec []int // a Codec that is not comparable

func (anyCodec) Marshal(any) ([]byte, error) { return nil, nil }
func (anyCodec) Unmarshal([]byte, any) error { return nil }

// Takes refuses types that Raw cannot encode.
func TestTakes(t *testing.T) {
	for _, v := range []any{"", []byte{}, codecToken(""), json.RawMessage{}} {
		if err := Takes(Raw, reflect.TypeOf(v)); err != nil {
			t.Errorf("%T: %v", v, err)
		}
	}
	for _, typ := range []reflect.Type{
		reflect.TypeFor[int](), reflect.TypeFor[any](), reflect.TypeFor[*string](), reflect.TypeFor[[]string](), reflect.TypeFor[[4]byte](),
	} {
		if err := Takes(Raw, typ); err == nil {
			t.Errorf("%v is no error", typ)
		}
		for _, c := range []Codec{MsgPack, JSON, anyCodec{}, nil} {
			if err := Takes(c, typ); err != nil {
				t.Errorf("%T, %v: %v", c, typ, err)
			}
		}
	}
	want := "singlefill: Options.Codec Raw takes []byte or string, not codec.codecItem"
	if err := Takes(Raw, reflect.TypeFor[codecItem]()); err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}
