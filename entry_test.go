package singlefill

import (
	"bytes"
	"encoding/hex"
	"math"
	"strings"
	"testing"
	"time"
)

// golden entries: their random bytes, 19 to 26, are zero here.
var goldenEntries = []struct {
	name  string
	entry entry
	hex   string
}{
	{"a value", entry{freshUntil: time.UnixMilli(1700000000123), loadTime: 1500 * time.Millisecond, payload: []byte("payload")},
		"c1 01 00 0000018bcfe5687b 000005dc 00000007 0000000000000000 7061796c6f6164"},
	{"an empty value that was set", entry{freshUntil: time.UnixMilli(1)},
		"c1 01 00 0000000000000001 00000000 00000000 0000000000000000"},
	{"not found", entry{notFound: true, freshUntil: time.UnixMilli(math.MaxInt64), loadTime: time.Millisecond},
		"c1 01 01 7fffffffffffffff 00000001 00000000 0000000000000000"},
	{"before 1970, and loaded for longer than a header can say", entry{freshUntil: time.UnixMilli(-1), loadTime: math.MaxInt64},
		"c1 01 00 ffffffffffffffff ffffffff 00000000 0000000000000000"},
}

func goldenBytes(t testing.TB, text string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(text, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestEntriesAreAsDocumented(t *testing.T) {
	t.Parallel()
	for _, g := range goldenEntries {
		want := goldenBytes(t, g.hex)
		got, err := g.entry.encode()
		if err != nil {
			t.Fatal(err)
		}
		clear(got[19:27])
		if !bytes.Equal(got, want) {
			t.Errorf("%s: got %x, want %x", g.name, got, want)
		}
		e, err := parseEntry(want)
		if err != nil {
			t.Errorf("%s: %v", g.name, err)
		}
		loadTime := min(g.entry.loadTime, math.MaxUint32*time.Millisecond)
		if e.notFound != g.entry.notFound || !e.freshUntil.Equal(g.entry.freshUntil) || e.loadTime != loadTime || !bytes.Equal(e.payload, g.entry.payload) {
			t.Errorf("%s: got %+v, want %+v", g.name, e, g.entry)
		}
	}
}

func TestNoTwoEntriesShareAHeader(t *testing.T) {
	t.Parallel()
	e := entry{freshUntil: time.UnixMilli(1), payload: []byte("v")}
	seen := make(map[string]bool)
	for range 10_000 {
		data, err := e.encode()
		if err != nil {
			t.Fatal(err)
		}
		if h := header(data); seen[h] || len(h) != 27 {
			t.Fatalf("header %x, %d bytes, of two entries", h, len(h))
		} else {
			seen[h] = true
		}
	}
}

func TestAnEntryThatContradictsItselfIsRefused(t *testing.T) {
	t.Parallel()
	whole := goldenBytes(t, goldenEntries[0].hex)
	none := goldenBytes(t, goldenEntries[2].hex)
	with := func(b []byte, at int, x byte) []byte {
		b = bytes.Clone(b)
		b[at] = x
		return b
	}
	for name, data := range map[string][]byte{
		"nothing":                       nil,
		"shorter than a header":         whole[:26],
		"no payload":                    whole[:27],
		"truncated":                     whole[:len(whole)-1],
		"overlong":                      append(bytes.Clone(whole), 0),
		"another magic":                 with(whole, 0, 0xc0),
		"version 0":                     with(whole, 1, 0),
		"version 2":                     with(whole, 1, 2),
		"an unknown flag":               with(whole, 2, 2),
		"the highest flag":              with(whole, 2, 0x80),
		"not found, with a payload":     with(whole, 2, 1),
		"not found, overlong":           append(bytes.Clone(none), 0),
		"not found, of a length":        with(none, 18, 1),
		"a length of 4 GiB":             with(whole, 15, 0xff),
		"a length one less than it has": with(whole, 18, 6),
	} {
		if e, err := parseEntry(data); err == nil {
			t.Errorf("%s: %x passes for %+v", name, data, e)
		}
	}
}

// FuzzEntry: what passes for an entry is one, byte by byte, and whatever does not is refused without a panic.
func FuzzEntry(f *testing.F) {
	for _, g := range goldenEntries {
		f.Add(goldenBytes(f, g.hex))
	}
	f.Add([]byte("some text of somebody else, long enough"))
	f.Fuzz(func(t *testing.T, data []byte) {
		before := bytes.Clone(data)
		e, err := parseEntry(data)
		if !bytes.Equal(before, data) {
			t.Fatalf("parsing has changed %x to %x", before, data)
		}
		if err != nil {
			return
		}
		again, err := e.encode()
		if err != nil {
			t.Fatal(err)
		}
		copy(again[19:27], data[19:27])
		if !bytes.Equal(again, data) {
			t.Errorf("%x is parsed as %+v, which is %x", data, e, again)
		}
		if len(e.payload) > len(data) || header(data) != string(data[:27]) {
			t.Errorf("%x: %d bytes of payload, header %x", data, len(e.payload), header(data))
		}
	})
}
