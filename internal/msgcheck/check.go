// Package msgcheck looks at encoded bytes before they are decoded. Check walks
// MessagePack and refuses what its decoder would die of; Bound refuses what
// would decode into far more memory than its length suggests.
//
// The MessagePack decoder believes every declared length: five bytes can make
// it allocate gigabytes, a megabyte of nested arrays can overflow its stack,
// and neither ends in an error that could be recovered from.
package msgcheck

import (
	"errors"
	"fmt"
	"io"
	"slices"
)

// Counts says how many things in a document decoding may allocate for. Each
// is at most the document's length in bytes.
type Counts struct {
	Items   int // elements of all arrays
	Entries int // entries of all maps: a key and its value are one
	Maps    int // maps with at least one entry
}

// Doc is a checked document.
type Doc struct {
	Counts
	data []byte
	// ext holds the offsets, ascending, of the extension payloads whose first
	// byte could be taken for the header of a map; see Reader.
	ext []int
}

// inlineDepth is the depth up to which Check allocates nothing.
const inlineDepth = 32

// internedStr is the extension type by which the encoder refers back to an
// earlier string of the document.
const internedStr = -128

// Check walks every header of data, which must hold exactly one value, and
// returns what it counted. It guarantees that every length and scalar lies
// within data, that no array or map declares more elements than the bytes
// left could hold, and that at most maxDepth containers are open at a time.
//
// References to interned strings are refused. They serve only fields with the
// option intern, and they are the one extension that the decoder reads in the
// way that Reader must forbid.
func Check(data []byte, maxDepth int) (Doc, error) {
	doc := Doc{data: data}
	var inline [inlineDepth]int
	open := inline[:0] // values missing from each open container but the innermost
	left := 1          // and from that one; at first from the document
	missing := 1       // values missing in all
	pos := 0
	for {
		// Each missing value takes a byte at least. This holds all sums below
		// under len(data), so that none can overflow.
		if missing > len(data)-pos {
			return Doc{}, fmt.Errorf("msgpack cut short: %d values missing at byte %d of %d", missing, pos, len(data))
		}
		h, err := parse(data, pos)
		if err != nil {
			return Doc{}, err
		}
		pos = h.next
		missing--
		left--
		children := 0
		switch h.kind {
		case plain:
			pos += h.n
		case ext:
			if int8(data[pos-1]) == internedStr {
				return Doc{}, fmt.Errorf("msgpack interned string before byte %d: not supported", pos)
			}
			if h.n > 0 && mapLike(data[pos]) {
				doc.ext = append(doc.ext, pos)
			}
			pos += h.n
		case array:
			children = h.n
			doc.Items += h.n
		case mapping:
			children = 2 * h.n
			doc.Entries += h.n
			doc.Maps += min(h.n, 1)
		}
		if children > 0 {
			if len(open) == maxDepth {
				return Doc{}, fmt.Errorf("msgpack nested deeper than %d", maxDepth)
			}
			open = append(open, left)
			left = children
			missing += children
			continue
		}
		for left == 0 && len(open) > 0 {
			left = open[len(open)-1]
			open = open[:len(open)-1]
		}
		if left == 0 {
			break
		}
	}
	if pos != len(data) {
		return Doc{}, fmt.Errorf("msgpack followed by %d stray bytes", len(data)-pos)
	}
	return doc, nil
}

type kind uint8

const (
	plain   kind = iota // n payload bytes follow the header
	ext                 // likewise; the last byte of the header is the type
	array               // n values follow
	mapping             // 2n values follow
	invalid
)

// A header is the code of a value with its length field.
type header struct {
	kind kind
	n    int // payload bytes, array items or map entries
	next int // offset of the first byte after the header
}

// codes describes 0xc0 to 0xdf, the codes that do not hold their length
// themselves: the width of the length field, or else the fixed length.
var codes = [32]struct {
	kind     kind
	width, n uint8
}{
	0x01: {kind: invalid},
	0x04: {width: 1}, 0x05: {width: 2}, 0x06: {width: 4}, // bin
	0x07: {ext, 1, 0}, 0x08: {ext, 2, 0}, 0x09: {ext, 4, 0},
	0x0a: {n: 4}, 0x0b: {n: 8}, // float
	0x0c: {n: 1}, 0x0d: {n: 2}, 0x0e: {n: 4}, 0x0f: {n: 8}, // uint
	0x10: {n: 1}, 0x11: {n: 2}, 0x12: {n: 4}, 0x13: {n: 8}, // int
	0x14: {ext, 0, 1}, 0x15: {ext, 0, 2}, 0x16: {ext, 0, 4}, 0x17: {ext, 0, 8}, 0x18: {ext, 0, 16},
	0x19: {width: 1}, 0x1a: {width: 2}, 0x1b: {width: 4}, // str
	0x1c: {array, 2, 0}, 0x1d: {array, 4, 0},
	0x1e: {mapping, 2, 0}, 0x1f: {mapping, 4, 0},
}

// parse reads the header at pos, which is within data, and checks that what
// it declares can fit in the bytes after it.
func parse(data []byte, pos int) (header, error) {
	c := data[pos]
	h := header{next: pos + 1}
	switch {
	case c < 0x80 || c >= 0xe0: // fixint
	case c < 0x90:
		h.kind, h.n = mapping, int(c&0x0f)
	case c < 0xa0:
		h.kind, h.n = array, int(c&0x0f)
	case c < 0xc0: // fixstr
		h.n = int(c & 0x1f)
	default:
		return parseLong(data, pos)
	}
	// A map needs twice its n; that Check finds in its sum.
	if h.n > len(data)-h.next {
		return h, errLength(uint64(h.n), data, pos)
	}
	return h, nil
}

// parseLong is parse for the codes from 0xc0 to 0xdf.
func parseLong(data []byte, pos int) (header, error) {
	code := codes[data[pos]-0xc0]
	if code.kind == invalid {
		return header{}, fmt.Errorf("msgpack code %#x at byte %d", data[pos], pos)
	}
	end := pos + 1 + int(code.width)
	h := header{kind: code.kind, next: end}
	if code.kind == ext {
		h.next++
	}
	if h.next > len(data) {
		return h, fmt.Errorf("msgpack cut short in the header at byte %d of %d", pos, len(data))
	}
	n := uint64(code.n) // 64 bits also where int has 32
	for _, b := range data[pos+1 : end] {
		n = n<<8 | uint64(b)
	}
	need := n
	if h.kind == mapping {
		need = 2 * n
	}
	if need > uint64(len(data)-h.next) {
		return h, errLength(n, data, pos)
	}
	h.n = int(n)
	return h, nil
}

func errLength(n uint64, data []byte, pos int) error {
	return fmt.Errorf("msgpack length %d at byte %d of %d: more than the bytes left", n, pos, len(data))
}

// mapLike reports whether the decoder takes c for the start of a map or nil.
func mapLike(c byte) bool {
	return c>>4 == 0x8 || c == 0xc0 || c == 0xde || c == 0xdf
}

var errExt = errors.New("msgpack extension in the place of a map")

// Reader reads a checked document for the decoder.
//
// Check can vouch only for a decoder that reads headers where Check found
// them. Where the target is a map, msgpack's decoder steps over the header of
// an extension and takes the payload for the map: in d7 ff df ff ff ff ff 00
// 00 00, a well-formed timestamp, it finds a map of 4 G entries and allocates
// them. Whether the target is a map cannot be seen from the bytes, but the
// way of reading tells: a payload is taken whole, a header byte by byte.
// Reader therefore fails ReadByte at the start of such a payload.
type Reader struct {
	doc Doc
	pos int
}

// NewReader returns a Reader at the start of doc.
func NewReader(doc Doc) *Reader { return &Reader{doc: doc} }

// Read implements io.Reader.
func (r *Reader) Read(p []byte) (int, error) {
	if r.pos == len(r.doc.data) && len(p) > 0 {
		return 0, io.EOF
	}
	n := copy(p, r.doc.data[r.pos:])
	r.pos += n
	return n, nil
}

// ReadByte implements io.ByteScanner.
func (r *Reader) ReadByte() (byte, error) {
	if r.pos == len(r.doc.data) {
		return 0, io.EOF
	}
	if len(r.doc.ext) > 0 {
		if _, found := slices.BinarySearch(r.doc.ext, r.pos); found {
			return 0, errExt
		}
	}
	c := r.doc.data[r.pos]
	r.pos++
	return c, nil
}

// UnreadByte implements io.ByteScanner. It is called only after ReadByte.
func (r *Reader) UnreadByte() error {
	r.pos--
	return nil
}
