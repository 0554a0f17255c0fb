package entry

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A golden entry is a row of testdata/entries.json, which other languages can read, too.
type golden struct {
	Name       string `json:"name"`
	Stored     string `json:"stored_hex"`
	NotFound   bool   `json:"not_found"`
	Expired    bool   `json:"expired"`
	FreshUntil int64  `json:"fresh_until_ms"`
	WrittenAt  int64  `json:"written_at_ms"`
	Format     Format `json:"format"`  // 0: an entry of an earlier version of this package, which said none
	Version    uint32 `json:"version"` // Options.Version of its writer
	LoadTime   int64  `json:"load_time_ms"`
	Payload    string `json:"payload_hex"`
	Refused    bool   `json:"refused"`
}

func goldenEntries(t testing.TB) (all []golden) {
	t.Helper()
	data, err := os.ReadFile("testdata/entries.json")
	redistest.Must(t, err)
	redistest.Must(t, json.Unmarshal(data, &all))
	if len(all) < 10 {
		t.Fatalf("%d golden entries", len(all))
	}
	return all
}

func goldenBytes(t testing.TB, text string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(text, " ", ""))
	redistest.Must(t, err)
	return b
}

// Entries are encoded and parsed as documented; what contradicts itself is refused.
func TestEntry_Golden(t *testing.T) {
	t.Parallel()
	for _, g := range goldenEntries(t) {
		stored := goldenBytes(t, g.Stored)
		e, err := Parse(stored)
		if g.Refused {
			if err == nil {
				t.Errorf("%s: no error", g.Name)
			}
			continue
		}
		want := Entry{
			NotFound: g.NotFound, Expired: g.Expired, FreshUntil: time.UnixMilli(g.FreshUntil), WrittenAt: time.UnixMilli(g.WrittenAt), Format: g.Format, Version: g.Version,
			LoadTime: time.Duration(g.LoadTime) * time.Millisecond, ID: IDOf(stored), Payload: goldenBytes(t, g.Payload),
		}
		if err != nil || !reflect.DeepEqual(e, want) {
			t.Errorf("%s: got %+v, %v, want %+v", g.Name, e, err, want)
		}
		got, err := want.Encode()
		redistest.Must(t, err)
		if copy(got[27:35], stored[27:35]); !bytes.Equal(got, stored) { // these bytes are random
			t.Errorf("%s: got %x, want %x", g.Name, got, stored)
		}
	}
	longest := Entry{LoadTime: math.MaxInt64}
	data, err := longest.Encode()
	redistest.Must(t, err)
	if e, err := Parse(data); err != nil || e.LoadTime != math.MaxUint32*time.Millisecond {
		t.Errorf("a load of 292 years is read as %v, %v", e.LoadTime, err)
	}
}

// The formats of the codecs are written in entries, and so must never change, nor be equal.
func TestFormatOf_Stays(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]Format{
		"":             0x1dc5,
		"msgpack":      0x172b,
		"json":         0x2243,
		"raw":          0x12f1,
		"zstd+msgpack": 0x5045,
		"zstd+json":    0x30e1,
		"zstd+raw":     0x3db3,
		"zstd+":        0x2093,
	} {
		if got := FormatOf(name); got != want {
			t.Errorf("%q has the format %#04x, want %#04x", name, got, want)
		}
	}
	if f := FormatOf("\x00\x00"); f < 1 || f > 1<<15-1 {
		t.Errorf("format %#x", f)
	}
}

// Entries, and expired ones, have unique headers.
func TestEntry_UniqueHeaders(t *testing.T) {
	t.Parallel()
	seen := make(map[string]bool)
	for range 10_000 {
		data, err := Entry{FreshUntil: time.UnixMilli(1), Payload: []byte("v")}.Encode()
		redistest.Must(t, err)
		fresh, random := Stale(time.UnixMilli(1))
		for _, h := range []string{Header(data), Header(patched(t, data, time.UnixMilli(1))), random} {
			if seen[h] || len(h) != HeaderLen && len(h) != 8 || fresh != "\x00\x00\x00\x00\x00\x00\x00\x01" {
				t.Fatalf("header or random bytes %x of two entries", h)
			}
			seen[h] = true
		}
	}
}

// patched returns data after Expire: the same bytes if Expire refused them.
func patched(t testing.TB, data []byte, now time.Time) []byte {
	t.Helper()
	before, b := bytes.Clone(data), bytes.Clone(data)
	for _, p := range Expire(Header(data), now) {
		if p.At < 0 || p.At+int64(len(p.Bytes)) > HeaderLen {
			t.Fatalf("%x is patched outside of its header: %+v", data, p)
		}
		copy(b[p.At:], p.Bytes)
	}
	if !bytes.Equal(data, before) {
		t.Errorf("Expire has changed %x to %x", before, data)
	}
	return b
}

// Expire patches a header as documented.
func TestExpire_Patches(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(1700000000000)
	for _, c := range []struct{ before, after string }{
		{ // fresh
			"c1 01 00 0000018bcfe5687b 0000018bcfe56418 000005dc 00000007 0000000000000000 7061796c6f6164",
			"c1 01 02 0000018bcfe56800 0000018bcfe56418 000005dc 00000007 0000000000000000 7061796c6f6164"},
		{ // until now
			"c1 01 00 0000018bcfe56800 0000000000000000 00000000 00000000 0000000000000000",
			"c1 01 02 0000018bcfe56800 0000000000000000 00000000 00000000 0000000000000000"},
		{ // stale for 1 ms
			"c1 01 01 0000018bcfe567ff 0000000000000000 00000000 00000000 0000000000000000",
			"c1 01 03 0000018bcfe567ff 0000000000000000 00000000 00000000 0000000000000000"},
		{ // expired before
			"c1 01 02 0000000000000001 0000000000000000 00000000 00000001 0000000000000000 76",
			"c1 01 02 0000000000000001 0000000000000000 00000000 00000001 0000000000000000 76"},
		{ // a writer's clock far ahead
			"c1 01 00 7fffffffffffffff 7fffffffffffffff 00000000 00000000 0000000000000000",
			"c1 01 02 0000018bcfe56800 7fffffffffffffff 00000000 00000000 0000000000000000"},
		{ // unknown flags stay, so that Parse still refuses it
			"c1 01 80 7fffffffffffffff 0000000000000000 00000000 00000000 0000000000000000",
			"c1 01 82 0000018bcfe56800 0000000000000000 00000000 00000000 0000000000000000"},
	} {
		got := patched(t, goldenBytes(t, c.before), now)
		random := bytes.Clone(got[27:35])
		clear(got[27:35])
		if want := goldenBytes(t, c.after); !bytes.Equal(got, want) || bytes.Equal(random, make([]byte, 8)) {
			t.Errorf("%s is patched to %x with random %x, want %x", c.before, got, random, want)
		}
	}
	whole := goldenBytes(t, goldenEntries(t)[0].Stored)
	for _, header := range []string{"", "garbage", Header(whole)[:34], "\xc0" + Header(whole)[1:], "\xc1\x00" + Header(whole)[2:], "\xc1\x02" + Header(whole)[2:]} {
		if p := Expire(header, now); p != nil {
			t.Errorf("%x is no header and is patched: %+v", header, p)
		}
	}
}

// Parse accepts only bytes that Encode could have written, and never panics.
func FuzzEntry(f *testing.F) {
	for _, g := range goldenEntries(f) {
		f.Add(goldenBytes(f, g.Stored))
	}
	f.Add([]byte("some text of somebody else, long enough"))
	f.Fuzz(func(t *testing.T, data []byte) {
		before := bytes.Clone(data)
		e, err := Parse(data)
		if !bytes.Equal(before, data) {
			t.Fatalf("parsing has changed %x to %x", before, data)
		}
		if err != nil {
			return
		}
		again, err := e.Encode()
		redistest.Must(t, err)
		copy(again[27:35], data[27:35])
		if !bytes.Equal(again, data) {
			t.Errorf("%x is parsed as %+v, which is %x", data, e, again)
		}
		if len(e.Payload) > len(data) || Header(data) != string(data[:35]) {
			t.Errorf("%x: %d bytes of payload, header %x", data, len(e.Payload), Header(data))
		}
	})
}
