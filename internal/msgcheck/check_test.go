package msgcheck

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/singlefill/singlefill/internal/redistest"
)

const maxDepth = 512

func decode(doc Doc, v any) error {
	var r Reader
	r.Reset(doc)
	return msgpack.NewDecoder(&r).Decode(v)
}

// repeat returns a document of prefix and n times unit.
func repeat(prefix, unit string, n int) []byte {
	return []byte(prefix + strings.Repeat(unit, n))
}

// Check refuses documents that would kill the decoder.
//
//fault:bad-bytes
func TestCheck_Refuses(t *testing.T) {
	for name, data := range map[string][]byte{
		"nothing":                  nil,
		"array32 of 4 G":           []byte("\xdd\xff\xff\xff\xff"),
		"array32 of 2 G":           []byte("\xdd\x7f\xff\xff\xff"),
		"map32 of 4 G":             []byte("\xdf\xff\xff\xff\xff"),
		"map32 of 2 G":             []byte("\xdf\x7f\xff\xff\xff"),
		"map32 whose double wraps": repeat("\xdf\x80\x00\x00\x00", "\xc0", 100),
		"bin32 of 4 G":             []byte("\xc6\xff\xff\xff\xff"),
		"str32 of 4 G":             []byte("\xdb\xff\xff\xff\xff"),
		"ext32 of 4 G":             []byte("\xc9\xff\xff\xff\xff\x01"),
		"array of one too many":    []byte("\x93\xc0\xc0"),
		"map without last value":   []byte("\x82\xc0\xc0\xc0"),
		"map of more than half":    repeat("\xde\x00\x33", "\xc0", 101),
		"each array claims all":    repeat("", "\xdc\x00\x40", 100),
		"arrays, 1e4 deep":         repeat("", "\x91", 1e4),
		"arrays, 1e4 deep, closed": append(repeat("", "\x91", 1e4), 0xc0),
		"maps, 1e6 deep, closed":   append(repeat("", "\x81\xa0", 1e6), 0xc0),
		"arrays, 1e7 deep, closed": append(repeat("", "\x91", 1e7), 0xc0),
		"513 deep":                 append(repeat("", "\x91", 513), 0xc0),
		"c1":                       []byte("\xc1"),
		"c1 in an array":           []byte("\x92\xc0\xc1"),
		"two values":               []byte("\xc0\xc0"),
		"header without type":      []byte("\xd4"),
		"ext8 without payload":     []byte("\xc7\x01\x05"),
		"fixext16 short of one":    repeat("\xd8\x05", "x", 15),
		"float64 short of one":     repeat("\xcb", "x", 7),
		"interned string":          []byte("\x92\xa3abc\xd4\x80\x00"),
		"interned string, ext8":    []byte("\xc7\x01\x80\x00"),
		"no extension and a map":   []byte("\x92\xc7\x00\x05\x80"),
		"no extension and a map16": []byte("\x92\xc8\x00\x00\x05\xde\x00\x00"),
		"no extension and a map32": []byte("\x92\xc9\x00\x00\x00\x00\x05\xdf\x00\x00\x00\x00"),
		"no extension and nil":     []byte("\x92\x91\xc7\x00\x05\xc0"),
	} {
		if doc, err := Check(data, maxDepth); err == nil {
			t.Errorf("%s: accepted, %+v", name, doc.Counts)
		}
	}
}

// Check counts elements, entries and maps.
func TestCheck_Counts(t *testing.T) {
	for _, tt := range []struct {
		data string
		want Counts
	}{
		{"\xc0", Counts{}},
		{"\x90", Counts{}},
		{"\x80", Counts{}},
		{"\x93\xc0\x90\x91\xc0", Counts{Items: 4}},
		{"\x82\xa1a\xc0\xa1b\x81\xa0\x92\x01\x02", Counts{Items: 2, Entries: 3, Maps: 2}},
		{"\xdf\x00\x00\x00\x01\xa0\xdd\x00\x00\x00\x01\xc0", Counts{Items: 1, Entries: 1, Maps: 1}},
		{"\xc7\x00\x05", Counts{}},
		{string(append(repeat("", "\x91", 512), 0xc0)), Counts{Items: 512}},
		{string(repeat("\xdd\x00\x10\x00\x00", "\xc0", 1<<20)), Counts{Items: 1 << 20}},
	} {
		doc, err := Check([]byte(tt.data), maxDepth)
		if err != nil || doc.Counts != tt.want {
			t.Errorf("%.20x: %+v, %v; want %+v", tt.data, doc.Counts, err, tt.want)
		}
	}
}

// Check agrees with the decoder on the size of every code.
func TestCheck_EveryCode(t *testing.T) {
	payload := bytes.Repeat([]byte{0}, 64)
	for c := range 256 {
		data := append([]byte{byte(c)}, payload...)
		r := bytes.NewReader(data)
		if err := msgpack.NewDecoder(r).Skip(); err != nil {
			if c != 0xc1 {
				t.Fatalf("%#x: %v", c, err)
			}
			continue
		}
		size := len(data) - r.Len()
		if _, err := Check(data[:size], maxDepth); err != nil {
			t.Errorf("%#x with %d bytes: %v", c, size, err)
		}
		if _, err := Check(data[:size-1], maxDepth); err == nil {
			t.Errorf("%#x with %d bytes: accepted", c, size-1)
		}
		if _, err := Check(data[:size+1], maxDepth); err == nil {
			t.Errorf("%#x with %d bytes: accepted", c, size+1)
		}
	}
}

// isWhole reports whether the decoder, which reads each header in its own way, finds exactly one
// whole value in data.
func isWhole(data []byte) bool {
	r := bytes.NewReader(data)
	return msgpack.NewDecoder(r).Skip() == nil && r.Len() == 0
}

// agrees checks that Check accepts exactly one whole value, and refuses others only for documented
// reasons.
func agrees(t *testing.T, data []byte) {
	t.Helper()
	_, err := Check(data, maxDepth)
	why := fmt.Sprint(err)
	if strings.Contains(why, "not supported") || strings.Contains(why, "nested deeper") {
		return
	}
	if strconv.IntSize == 32 { // there Skip finds an array of 2 GiB and more empty, or panics
		return
	}
	if whole := isWhole(data); (err == nil) != whole {
		t.Fatalf("%x: Check says %v, the decoder that it is whole: %t", data, err, whole)
	}
}

// Check agrees with the decoder on containers that resemble the previous one, and on documents with
// one byte changed.
func TestCheck_AgreesWithDecoder(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	words := []any{nil, true, 1, -1, 200, 1 << 20, int64(1 << 40), 1.5, float32(2), "", "a", "ab", strings.Repeat("x", 31),
		strings.Repeat("x", 32), strings.Repeat("x", 300), []byte("b"), time.Unix(1, 0), time.Unix(1, 1), []any{}, map[string]any{}}
	for range 100 {
		var likeness []any
		for range rnd.IntN(80) {
			likeness = append(likeness, words[rnd.IntN(len(words))])
		}
		var items []any
		for range rnd.IntN(20) {
			item := slices.Clone(likeness)
			for range min(len(item), rnd.IntN(3)) {
				item[rnd.IntN(len(item))] = words[rnd.IntN(len(words))]
			}
			if len(items) > 0 && rnd.IntN(3) == 0 {
				item = append(item, items[len(items)-1])
			}
			items = append(items, item)
		}
		data, err := msgpack.Marshal(items)
		redistest.Must(t, err)
		if _, err := Check(data, maxDepth); err != nil {
			t.Fatalf("%x: %v", data, err)
		}
		for range 30 {
			changed := slices.Clone(data[:rnd.IntN(len(data)+1)])
			agrees(t, changed)
			changed = slices.Clone(data)
			changed[rnd.IntN(len(changed))] = byte(rnd.IntN(256))
			agrees(t, changed)
		}
	}
}

// Reader refuses an extension where the decoder expects a map and would skip the extension's
// header.
func TestReader_MapsInExtensions(t *testing.T) {
	for _, data := range []string{
		"\xd7\xff\xdf\x00\x10\x00\x00\x00\x00\x00",                             // a time, or a map of 1 Mi entries
		"\xd7\xff\x81\xa0\xdd\x00\x10\x00\x00\x00",                             // an array of 1 Mi within the payload
		"\xd6\xff\xde\xff\xff\x00",                                             // map16
		"\x92\xd7\xff\xc0\xdd\x00\x10\x00\x00\x00\x00\xc0",                     // nil for the map, then an array
		"\xc7\x05\x01\xdf\x00\x10\x00\x00",                                     // ext8
		"\xc8\x00\x05\x01\xdf\x00\x10\x00\x00",                                 // ext16
		"\xc9\x00\x00\x00\x05\x01\xdf\x00\x10\x00\x00",                         // ext32
		"\x81\xa1M\xd7\xff\xdf\x00\x10\x00\x00\x00\x00\x00",                    // in a struct
		"\xd4\x01\x81\xa0\xd4\x01\x81\xa0\xc0"[:3],                             // would nest without a container
		"\x81\xa0\xc7\x0c\xff\xdf\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00", // in a map of maps
		// After a time.
		"\x82\xa1T\xd7\xff\xdf\x00\x10\x00\x00\x00\x00\x00\xa1M\xd7\xff\xdf\x00\x10\x00\x00\x00\x00\x00",
	} {
		doc, err := Check([]byte(data), maxDepth)
		if err != nil {
			t.Errorf("%x: %v", data, err)
			continue
		}
		for _, v := range []any{
			new(map[string]any), new(map[string]string), new(map[int]int), new([]map[string]any),
			new(map[string]map[string]any), new(any), new([]any), new(struct {
				T time.Time
				M map[string]any
			}),
		} {
			if n := redistest.Allocated(func() { err = decode(doc, v) }); n > 1<<16 {
				t.Errorf("%x into %T: allocated %d bytes, err %v", data, v, n, err)
			}
		}
	}
}

// Reader lets valid times pass.
func TestReader_Times(t *testing.T) {
	for _, nsec := range []int64{0, 1, 0x80 << 22, 0x8f<<22 + 5, 0xc0 << 22, 0xde << 22, 0xdf << 22, 999999999} {
		for _, sec := range []int64{0, 1700000000, 0x80000000, 0x8fffffff, 1 << 33, 1 << 35, -1} {
			want := time.Unix(sec, nsec)
			data, err := msgpack.Marshal(map[string]any{"t": want, "ts": []time.Time{want, want}})
			redistest.Must(t, err)
			doc, err := Check(data, maxDepth)
			redistest.Must(t, err)
			var got struct {
				T  time.Time   `msgpack:"t"`
				Ts []time.Time `msgpack:"ts"`
			}
			if err := decode(doc, &got); err != nil || !got.T.Equal(want) || !got.Ts[1].Equal(want) {
				t.Errorf("%v came back as %v, %v", want, got, err)
			}
			var anys map[string]any
			if err := decode(doc, &anys); err != nil || !anys["t"].(time.Time).Equal(want) {
				t.Errorf("%v came back as %v, %v", want, anys, err)
			}
		}
	}
}

type (
	big    struct{ B [1024]byte }
	wide   [128]byte
	inner  struct{ X, Y [100]int }
	Middle struct {
		*Innermost
		M int
	}
	Innermost struct {
		Deep [64]int
		D    int
	}
	embeds struct{ *Middle }
	tree   map[string]tree
	node   struct {
		Next *node
		Kids []node
		Pad  [64]int
	}
)

// Bound's estimate is at least what decoding allocates, apart from temporary garbage, which may be
// as much again: a slice and its header are allocated twice.
func TestBound_IsUpperBound(t *testing.T) {
	const n = 1 << 14
	list := "\xdd\x00\x00\x40\x00"
	for _, tt := range []struct {
		unit string
		v    any
	}{
		{"\xc0", new([]big)},
		{"\x80", new([]*big)},
		{"\x80", new([]**inner)},
		{"\x05", new([]int)},
		{"\xa2ab", new([]string)},
		{"\xc4\x01x", new([][]byte)},
		{"\x90", new([][]int)},
		{"\x91\xc0", new([][]big)},
		{"\x91\x91\xc0", new([][][]int)},
		{"\xc0", new([][8]int)},
		{"\x91\x80", new([][2]*big)},
		{"\x80", new([]map[string]string)},
		{"\x81\xa0\xa0", new([]map[string]string)},
		{"\x81\xa0\xc0", new([]map[string]wide)},
		{"\x81\xa0\xc0", new([]map[string]big)},
		{"\x81\xa0\x80", new([]map[string]*big)},
		{"\x81\xa0\x81\xa0\x81\xa0\x80", new([]tree)},
		{"\x81\xa1D\x01", new([]embeds)},
		{"\x81\xa1D\x01", new([]*embeds)},
		{"\x81\xa4Next\x81\xa4Next\x80", new([]node)},
		{"\x81\xa4Kids\x92\xc0\xc0", new([]node)},
		{"\xc0", new(any)},
		{"\x05", new(any)},
		{"\x80", new(any)},
		{"\x90", new(any)},
		{"\x91\xc0", new(any)},
		{"\x91\x91\x91\x91\xc0", new(any)},
		{"\x81\xa0\xc0", new(any)},
		{"\x81\xa0\x81\xa0\x81\xa0\xc0", new(any)},
		{"\x89\xa1a\x80\xa1b\x80\xa1c\x80\xa1d\x80\xa1e\x80\xa1f\x80\xa1g\x80\xa1h\x80\xa1i\x80", new([]map[string]any)},
		{"\xd6\xff\x00\x00\x00\x00", new(any)},
		{"\xd6\xff\x00\x00\x00\x00", new([]*time.Time)},
		{"\x91\xca\x00\x00\x00\x00", new([][64]float32)},
		{"\xc0", new([][64]float32)},
		{"\x81\xa1V\x91\xc0", new([]struct{ V [][64]float32 })},
		{"\x81\xa1V\x91\xc0", new([]promotes)},
		{"\x91\x91\xc0", new([]wrapped)},
		{"\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\xc0", new([]listOf)},
	} {
		doc, err := Check(repeat(list, tt.unit, n), maxDepth)
		if err != nil {
			t.Fatalf("%x: %v", tt.unit, err)
		}
		c := CostOf(reflect.TypeOf(tt.v))
		reckoned := uint64(0) // the lower one of the two estimates
		for i, n := range doc.Levels() {
			u := c.levels[i]
			reckoned += uint64(n.Items)*u.item + uint64(n.Entries)*u.entry + uint64(n.Maps)*u.table
		}
		if atMost := uint64(doc.Items)*c.item + uint64(doc.Entries)*c.entry + uint64(doc.Maps)*c.table; reckoned > atMost {
			t.Errorf("%x into %T: reckoned %d by level and %d in all", tt.unit, tt.v, reckoned, atMost)
		}
		took := redistest.Allocated(func() {
			if err := decode(doc, tt.v); err != nil {
				t.Errorf("%x into %T: %v", tt.unit, tt.v, err)
			}
		})
		t.Logf("%-24.24x into %-28T %4d bytes each, reckoned %4d", tt.unit, tt.v, took/n, reckoned/n)
		if allowed := 2*reckoned + 72*uint64(doc.Items+doc.Entries) + 16*uint64(len(doc.data)) + 1<<16; took > allowed {
			t.Errorf("%x into %T: took %d, reckoned %d", tt.unit, tt.v, took, reckoned)
		}
	}
}

// Bound refuses more than 64 MiB + 64 bytes per byte of the document. Items of an array do not cost what an array
// costs that is an item of a slice, and what is at one level does not cost what is at another one. CostOf ends on
// recursive types.
func TestBound(t *testing.T) {
	vectors := Levels{{Items: 40}, {Items: 40 * 768}}
	for _, tt := range []struct {
		n    Levels
		size int
		v    any
		ok   bool
	}{
		{Levels{}, 0, []big{}, true},
		{Levels{{Items: 65536}}, 0, []big{}, true},
		{Levels{{Items: 65537}}, 0, []big{}, false},
		{Levels{{Items: 65536 + 16}}, 256, []big{}, true},
		{Levels{{Items: 65536 + 17}}, 256, []big{}, false},
		{Levels{{Items: 1 << 20}}, 1 << 20, []big{}, false}, // 1 GiB from 1 MiB of nils
		{Levels{{Items: 1 << 20}}, 1 << 20, []int{}, true},
		{Levels{{Items: 1 << 30}}, 1 << 30, []any{}, true},
		{Levels{{Entries: 1 << 29}}, 1 << 30, map[string]any{}, true},
		{Levels{{Entries: 1 << 20}}, 2 << 20, map[string]big{}, false},
		{Levels{{Entries: 1 << 20}}, 2 << 20, struct{ P *big }{}, false},
		{Levels{{Entries: 1 << 20}}, 2 << 20, struct{ p *big }{}, true},
		{Levels{{Entries: 1 << 20}}, 2 << 20, big{}, true},
		{Levels{{Items: math.MaxInt, Entries: math.MaxInt, Maps: math.MaxInt}}, math.MaxInt, "", true},
		{Levels{{Items: math.MaxInt / 64}}, 1 << 20, []big{}, false}, // the product exceeds 64 bits
		{Levels{{Items: 1 << 20}}, 1 << 20, nil, true},

		{vectors, 4 * 40 * 769, [][768]float32{}, true},
		{vectors, 4 * 40 * 769, new([][768]float32), true},
		{vectors, 4 * 40 * 769, []*[768]float32{}, true},
		{vectors, 4 * 40 * 769, []any{}, true},
		{vectors, 4 * 40 * 769, [][][768]float32{}, false},
		{Levels{{Items: 40 * 768}, {Items: 40}}, 4 * 40 * 769, [][768]float32{}, false}, // nils for vectors
		{Levels{{Entries: 40, Maps: 1}, {Items: 40 * 768}}, 4 * 40 * 768, map[string][768]float32{}, true},
		{Levels{{Entries: 1, Maps: 1}, {Items: 40}, {Items: 40 * 768}}, 4 * 40 * 769, struct{ V [][768]float32 }{}, true},
		{Levels{{Entries: 1, Maps: 1}, {Items: 40 * 768}}, 4 * 40 * 768, struct{ V [][768]float32 }{}, false},
		{Levels{{Entries: 1, Maps: 1}, {Items: 1 << 20}}, 4 << 20, promotes{}, false},
		{Levels{{}, {Items: 1 << 20}}, 4 << 20, wrapped{}, false},
		{Levels{{}, {}, {Items: 1 << 20}}, 4 << 20, wrapped{}, false},
		{Levels{maxLevels - 1: {Items: 1 << 20}}, 4 << 20, nested{}, false},

		{Levels{{Items: 1 << 10}}, 1 << 10, node{}, true},
		{Levels{}, 0, new(loop), true},
		{Levels{}, 0, tower{}, true},
		{Levels{}, 0, map[string]loop{}, true},
	} {
		var all Counts
		for _, n := range tt.n {
			all.Items, all.Entries, all.Maps = all.Items+n.Items, all.Entries+n.Entries, all.Maps+n.Maps
		}
		err := CostOf(reflect.TypeOf(tt.v)).Bound(all, tt.size, func() *Levels { return &tt.n })
		if (err == nil) != tt.ok {
			t.Errorf("%+v, %d bytes, %T: %v", tt.n[:3], tt.size, tt.v, err)
		}
	}
}

type (
	promotes struct{ *Promoted }
	Promoted struct{ V []big }
	listOf   []listOf
	nested   struct {
		Big  []big
		More []nested
	}

	// wrapped decodes its items one level deeper than its type says.
	wrapped []big
)

func (w *wrapped) DecodeMsgpack(d *msgpack.Decoder) error {
	if n, err := d.DecodeArrayLen(); err != nil || n != 1 {
		return err
	}
	return d.Decode((*[]big)(w))
}

// The levels of a document tell where its items and entries are.
func TestLevels(t *testing.T) {
	// [[1, 2, nil], {"a": [], "b": ["x"]}, "[,:", 3.5]
	const packed = "\x94\x93\x01\x02\xc0\x82\xa1a\x90\xa1b\x91\xa1x\xa3[,:\xca\x00\x00\x00\x00"
	doc, err := Check([]byte(packed), maxDepth)
	redistest.Must(t, err)
	want := Levels{{Items: 4}, {Items: 3, Entries: 2, Maps: 1}, {Items: 1}}
	if got := *doc.Levels(); got != want {
		t.Errorf("levels of msgpack: %v, want %v", got[:3], want[:3])
	}
	// JSON counts what is in an empty array, and the comma between two entries.
	want = Levels{{Items: 4}, {Items: 4, Entries: 2, Maps: 1}, {Items: 2}}
	if got := *JSONLevels([]byte(`[[1, 2, null], {"a": [], "b": ["x"]}, "[,:\"]]", 3.5]`)); got != want {
		t.Errorf("levels of JSON: %v, want %v", got[:3], want[:3])
	}
	if doc, err = Check([]byte(strings.Repeat("\x91", maxDepth)+"\xc0"), maxDepth); err != nil {
		t.Fatal(err)
	}
	if n := doc.Levels()[maxLevels-1].Items; n != maxDepth-maxLevels+1 {
		t.Errorf("%d items at the last level", n)
	}
}

type (
	loop  *loop
	tower struct{ *tower }
)

// Check agrees with the decoder, accepts what the encoder writes, and what it accepts decodes
// within bounds.
func FuzzCheck(f *testing.F) {
	f.Add([]byte("\x81\xa1a\xc0"), "seed", int64(1), []byte{1})
	f.Add([]byte("\xd7\xff\xdf\x00\x10\x00\x00\x00\x00\x00"), "", int64(-1<<40), []byte(nil))
	f.Add([]byte("\x92\xd4\x01\x81\xa0\xc0"), strings.Repeat("x", 300), int64(1<<40), make([]byte, 300))
	f.Add([]byte("\xdd\xff\xff\xff\xff"), "", int64(0), []byte{})
	f.Add([]byte("\xc7\x05\x01\xdf\x00\x10\x00\x00"), "", int64(0), []byte{})
	f.Add([]byte("\x82\xa1I\x01\xa1S\x92\xa0\xa1x"), "", int64(0), []byte{})
	f.Add([]byte("\x92\xc7\x00\x05\x81\xa0\xc7\x00\x05"), "", int64(0), []byte{})
	f.Fuzz(func(t *testing.T, data []byte, s string, i int64, b []byte) {
		agrees(t, data)
		doc, err := Check(data, maxDepth)
		if err == nil {
			var sum Counts
			for _, n := range doc.Levels() {
				sum.Items, sum.Entries, sum.Maps = sum.Items+n.Items, sum.Entries+n.Entries, sum.Maps+n.Maps
			}
			if sum != doc.Counts {
				t.Fatalf("%+v, but %+v by level", doc.Counts, sum)
			}
			if n := doc.Items + doc.Entries; n > len(data) || doc.Maps > doc.Entries {
				t.Fatalf("%+v in %d bytes", doc.Counts, len(data))
			}
			for _, v := range []any{
				new(any), new([]int), new(map[string]string), new([]struct {
					I int
					S []string
					M map[string]any
					P *[]time.Time
				}), new(map[string]any), new(tree), new([]map[int]any), new([]byte), new(string), new(time.Time),
			} {
				if n := redistest.Allocated(func() { _ = decode(doc, v) }); n > 1<<20+2000*uint64(len(data)) {
					t.Fatalf("%T took %d bytes for %d", v, n, len(data))
				}
			}
		}
		made, err := msgpack.Marshal(map[string]any{
			s: i, "b": b, "t": time.Unix(i, i&0x3fffffff), "n": []any{s, b, i, nil, map[string]any{s: b}},
			"f": float64(i), "d": []string{s, s},
		})
		redistest.Must(t, err)
		if _, err := Check(made, maxDepth); err != nil {
			t.Fatalf("%x: %v", made, err)
		}
	})
}
