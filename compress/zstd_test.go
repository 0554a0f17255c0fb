package compress_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/compress"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

const magic = "\xC1zst"

var prose = strings.Repeat("It was a bright cold day in April. ", 100)

// What is written has this format, and is read.
func TestZstd_Format(t *testing.T) {
	t.Parallel()
	noise := make([]byte, 4<<10)
	rand.NewChaCha8([32]byte{}).Read(noise)
	for _, test := range []struct {
		what, value, begins string
		opts                *compress.Options
		compressed, refused bool
	}{
		{what: "prose", value: prose, compressed: true},
		{what: "below the least size", value: prose[:1023]},
		{what: "of the least size", value: prose[:1024], compressed: true},
		{what: "a least size of one byte", value: prose[:100], opts: &compress.Options{MinSize: 1}, compressed: true},
		{what: "turned off", value: prose, opts: &compress.Options{MinSize: -1}},
		{what: "noise", value: string(noise)},
		{what: "empty", value: ""},
		{what: "the magic bytes, short", value: magic, begins: magic + "\x00" + magic},
		{what: "the magic bytes, turned off", value: magic + "\x01" + prose, opts: &compress.Options{MinSize: -1}, refused: true},
		{what: "the magic bytes, compressed", value: magic + prose, compressed: true},
		{what: "the magic bytes, noise", value: magic + string(noise), begins: magic + "\x00" + magic},
	} {
		codec := compress.Zstd(singlefill.Raw, test.opts)
		data, err := codec.Marshal(test.value)
		if (err != nil) != test.refused {
			t.Fatalf("%s: %v", test.what, err)
		}
		if test.refused {
			continue
		}
		begins := cmp.Or(test.begins, test.value)
		if test.compressed {
			begins = magic + "\x01\x28\xb5\x2f\xfd"
			if len(data) >= len(test.value) {
				t.Errorf("%s: %d bytes of %d", test.what, len(data), len(test.value))
			}
		}
		if !strings.HasPrefix(string(data), begins) {
			t.Errorf("%s: begins with %.20q, want %.20q", test.what, data, begins)
		}
		for reader, by := range map[string]singlefill.Codec{
			"the same codec": codec, "one that is turned off": compress.Zstd(singlefill.Raw, &compress.Options{MinSize: -1}),
		} {
			var got string
			if err := by.Unmarshal(data, &got); err != nil || got != test.value {
				t.Errorf("%s: %s reads %.20q, %v", test.what, reader, got, err)
			}
		}
	}
}

// Bytes that an earlier version has written, and bytes of the inner codec alone, are read.
func TestZstd_Golden(t *testing.T) {
	t.Parallel()
	const golden = "c17a73740128b52ffd24405d000020616263640154040227397d1f9c9a"
	data, err := hex.DecodeString(golden)
	redistest.Must(t, err)
	want := strings.Repeat("abcd", 16)
	var got string
	if err := compress.Zstd(singlefill.Raw, nil).Unmarshal(data, &got); err != nil || got != want {
		t.Errorf("got %q, %v", got, err)
	}
	for _, inner := range []singlefill.Codec{singlefill.MsgPack, singlefill.JSON} {
		type T struct{ Name string }
		data, err := inner.Marshal(T{prose})
		redistest.Must(t, err)
		var got T
		if err := compress.Zstd(inner, nil).Unmarshal(data, &got); err != nil || got.Name != prose {
			t.Errorf("%T: got %.20q, %v", inner, got.Name, err)
		}
	}
}

// frame returns compressed bytes of n zeros that tell a size.
func frame(t testing.TB, n int, size uint64) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil, zstd.WithSingleSegment(true), zstd.WithEncoderCRC(false))
	redistest.Must(t, err)
	b := append([]byte(magic+"\x01"), w.EncodeAll(make([]byte, n), nil)...)
	b[len(magic)+1+4] |= 0xC0 // the size has 8 bytes
	var h zstd.Header
	plain := w.EncodeAll(make([]byte, n), nil)
	redistest.Must(t, h.Decode(plain))
	b = append(b[:len(magic)+1+5], binary.LittleEndian.AppendUint64(nil, size)...)
	return append(b, plain[h.HeaderSize:]...)
}

// Damaged and hostile bytes are an error, before the memory that they claim is taken.
func TestZstd_HostileBytes(t *testing.T) { // not parallel: it counts memory
	codec := compress.Zstd(singlefill.Raw, nil)
	whole, err := codec.Marshal(prose)
	redistest.Must(t, err)
	bomb, err := zstd.NewWriter(nil, zstd.WithSingleSegment(true))
	redistest.Must(t, err)
	zeros := bomb.EncodeAll(make([]byte, 256<<20), []byte(magic+"\x01"))
	damaged := bytes.Clone(whole)
	damaged[len(damaged)/2] ^= 0x40
	var v string
	if err := codec.Unmarshal(frame(t, 1000, 1000), &v); err != nil || len(v) != 1000 {
		t.Fatalf("an honest frame: %v", err)
	}
	for what, data := range map[string][]byte{
		"a bomb":                   zeros,
		"a size of a terabyte":     frame(t, 1000, 1<<40),
		"a size of all bits":       frame(t, 1000, 1<<64-1),
		"more than it tells":       frame(t, 1<<20, 100),
		"less than it tells":       frame(t, 100, 1000),
		"two frames":               append(bytes.Clone(whole), whole[len(magic)+1:]...),
		"cut off":                  whole[:len(whole)-5],
		"damaged":                  damaged,
		"only the header":          []byte(magic + "\x01"),
		"no header":                []byte(magic + "\x01\x00\x00\x00\x00"),
		"an unknown kind":          []byte(magic + "\x02abc"),
		"a frame to skip":          []byte(magic + "\x01\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"),
		"a frame without its size": []byte(magic + "\x01\x28\xb5\x2f\xfd\x00\x58\x01\x00\x00"),
	} {
		var err error
		n := redistest.Allocated(func() { err = codec.Unmarshal(data, new(string)) })
		if err == nil {
			t.Errorf("%s: no error", what)
		}
		if n > 4<<20 {
			t.Errorf("%s: %d bytes allocated", what, n)
		}
	}
}

// The bound covers the decompressed bytes and the value that the inner codec makes of them: each nil of an array
// becomes a string of 16 bytes.
func TestZstd_BoundOfAll(t *testing.T) { // not parallel: it counts memory
	nils := func(codec singlefill.Codec, n int) []byte {
		w, err := zstd.NewWriter(nil, zstd.WithSingleSegment(true))
		redistest.Must(t, err)
		plain := append(binary.BigEndian.AppendUint32([]byte{0xdd}, uint32(n)), bytes.Repeat([]byte{0xc0}, n)...)
		switch codec {
		case singlefill.JSON:
			plain = []byte("[" + strings.Repeat(`"",`, n-1) + `""]`)
		case singlefill.Raw:
			plain = bytes.Repeat([]byte{'x'}, 16*n)
		}
		return w.EncodeAll(plain, []byte(magic+"\x01"))
	}
	for _, c := range []struct {
		name    string
		inner   singlefill.Codec
		n       int
		refused bool
		garbage uint64 // how many times the bound may be taken: see the bounds of MsgPack and JSON
	}{
		{"MsgPack", singlefill.MsgPack, 1 << 20, false, 2},
		{"MsgPack", singlefill.MsgPack, 5 << 20, true, 1},
		{"JSON", singlefill.JSON, 1 << 20, false, 6},
		{"JSON", singlefill.JSON, 5 << 20, true, 1},
		{"Raw", singlefill.Raw, 1 << 20, false, 1},
		{"Raw", singlefill.Raw, 3 << 20, true, 1},
	} {
		data := nils(c.inner, c.n)
		codec := compress.Zstd(c.inner, nil)
		var v any = new([]string)
		if c.inner == singlefill.Raw {
			v = new(string)
		}
		var err error
		most := 64<<20 + 64*uint64(len(data))
		n := redistest.Allocated(func() { err = codec.Unmarshal(data, v) })
		if (err != nil) != c.refused || n > c.garbage*most {
			t.Errorf("%s: %d bytes of %d items: %v, with %d MiB", c.name, len(data), c.n, err, n>>20)
		}
	}
	long := make([]string, 5<<20)
	for _, inner := range []singlefill.Codec{singlefill.MsgPack, singlefill.JSON} {
		codec := compress.Zstd(inner, nil)
		data, err := codec.Marshal(long)
		if err != nil {
			continue // the inner codec refuses it
		}
		if err := codec.Unmarshal(data, new([]string)); err != nil {
			t.Errorf("%T: what was encoded is refused: %v", inner, err)
		}
	}
}

// New judges T by the inner codec, and Near copies its values as with the inner codec.
func TestZstd_TellsItsInnerCodec(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	if _, err := singlefill.New(rdb, "ns", time.Hour, &singlefill.Options[func()]{Codec: compress.Zstd(nil, nil)}); err == nil {
		t.Error("New takes a func")
	}
	if _, err := singlefill.New(rdb, "ns", time.Hour, &singlefill.Options[int]{Codec: compress.Zstd(singlefill.Raw, nil)}); err == nil {
		t.Error("New takes an int with Raw")
	}
}

// Zstd around a codec with ForKey has ForKey, and passes the key on.
func TestZstd_ForKey(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	codec := compress.Zstd(cachetest.KeyedCodec{Codec: singlefill.MsgPack}, nil)
	c := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[string]{Codec: codec})
	redistest.Must(t, c.Set(t.Context(), "k", prose))
	cachetest.WantGet(t, c, "k", prose, nil)
	data, _ := cachetest.Stored(t, rdb, "ns:{k}")
	if len(data) > len(prose) {
		t.Errorf("%d bytes are stored, want them compressed", len(data))
	}
	redistest.Must(t, rdb.Set(t.Context(), "ns:{other}", data, time.Hour).Err())
	cachetest.WantGet(t, c, "other", "", singlefill.ErrMiss)
	if _, ok := compress.Zstd(nil, nil).(interface {
		ForKey(namespace, key string) singlefill.Codec
	}); ok {
		t.Error("Zstd has ForKey around a codec without it")
	}
}

// Compression can be turned on and off while other processes read. Those without this package take no compressed
// bytes for a value, also with Raw.
func TestZstd_RunningFleet(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, inner := range []singlefill.Codec{singlefill.MsgPack, singlefill.Raw} {
			for _, value := range []string{prose, "short"} {
				testRunningFleet(t, rdb, inner, value)
			}
		}
	})
}

func testRunningFleet(t *testing.T, rdb redis.UniversalClient, inner singlefill.Codec, value string) {
	ctx, ns := t.Context(), redistest.Namespace(t)
	var caches []*singlefill.Cache[string]
	for _, codec := range []singlefill.Codec{
		compress.Zstd(inner, nil), compress.Zstd(inner, &compress.Options{MinSize: -1}), inner,
	} {
		caches = append(caches, cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: codec}))
	}
	for i, writer := range caches {
		for j, reader := range caches {
			key := fmt.Sprint(i, j)
			redistest.Must(t, writer.Set(ctx, key, value))
			v, err := reader.GetOrLoad(ctx, key, func(context.Context, string) (string, error) { return "loaded", nil })
			want, bad := value, int64(0)
			if i == 0 && j == 2 {
				want, bad = "loaded", 1
			}
			if n := reader.Stats().BadValues; err != nil || v != want || n < bad || bad == 0 && n > 0 && j < 2 {
				t.Errorf("%T: what %d has written, %d reads as %.20q, %v, with %d bad values", inner, i, j, v, err, n)
			}
		}
	}
}

// No bytes make Unmarshal panic, or take more memory than it allows; what Marshal writes is read.
func FuzzZstd(f *testing.F) {
	codec := compress.Zstd(singlefill.Raw, &compress.Options{MinSize: 1})
	for _, seed := range []string{"", prose, magic, magic + "\x00" + magic, magic + "\x01", string(frame(f, 100, 100)), string(frame(f, 100, 1<<62))} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		data, err := codec.Marshal(in)
		var out []byte
		if err == nil {
			err = codec.Unmarshal(data, &out)
		}
		if err != nil || !bytes.Equal(in, out) {
			t.Errorf("%x came back as %x, %v", in, out, err)
		}
		var v []byte
		if codec.Unmarshal(in, &v) == nil && len(v) > 64<<20+64*len(in) {
			t.Errorf("%d bytes became %d", len(in), len(v))
		}
	})
}
