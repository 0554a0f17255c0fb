// Package msgcheck checks encoded bytes before they are decoded. Check walks MessagePack and
// refuses documents that would kill the decoder; Bound refuses documents that would decode into far
// more memory than their length suggests.
//
// The MessagePack decoder trusts every declared length: five bytes can make it allocate gigabytes,
// a megabyte of nested arrays can overflow its stack, and neither ends in an error that can be
// recovered from.
package msgcheck

import "fmt"

// Counts counts what decoding a document may allocate for. Each count is at most the document's
// length in bytes.
type Counts struct {
	Items   int // elements of all arrays
	Entries int // entries of all maps: a key and its value are one
	Maps    int // maps with at least one entry
}

// A Doc is a checked document.
type Doc struct {
	Counts
	data []byte
	// ext has the offsets, ascending, of the extension payloads whose first byte could be taken for
	// the header of a map; see Reader.
	ext []int
}

// inlineDepth is the depth up to which Check allocates nothing.
const inlineDepth = 32

// internedStr is the extension type of references to earlier strings of the document.
const internedStr = -128

// Check walks every header of data, which must hold exactly one value, and returns its counts. It
// guarantees that every length and scalar lies within data, that no array or map declares more
// elements than the remaining bytes could hold, and that at most maxDepth containers are open at a
// time.
//
// It refuses two things that the encoder can write, since the decoder would read them in a way that
// Reader must forbid. One is references to interned strings, which only fields with the option
// intern use. The other is an extension of no bytes before a map or nil: where the decoder expects
// a map, it reads the extension as a part of that map, so that the maps of a flat array would be
// nested without limit.
//
// Bytes are checked before they are decoded, and an extension without bytes before a map is
// refused. Such an extension is valid MessagePack. But the decoder believes declared lengths, and
// takes the extension for a part of the map after it, so that a flat array nests without limit. A
// process cannot recover from running out of memory or stack. Marshal applies the same limits;
// otherwise it would write a value that is a miss at every read. See TestCheck_Refuses and
// TestMarshal_Refuses.
func Check(data []byte, maxDepth int) (Doc, error) {
	doc := Doc{data: data}
	var inline [inlineDepth]int
	open := inline[:0] // values missing from each open container except the innermost
	left := 1          // values missing from the innermost; at first, from the document
	pos := 0
	var guess guesses
	for {
		// The first byte of most values determines their size.
		for left > 0 && uint(pos) < uint(len(data)) {
			place := uint(left) % uint(len(guess))
			size := guess[place]
			if s := sizes[data[pos]]; s != size {
				size = s
				guess[place] = s
			}
			if size == 0 {
				break
			}
			pos += int(size)
			left--
		}
		if left == 0 {
			if len(open) == 0 {
				break
			}
			left = open[len(open)-1]
			open = open[:len(open)-1]
			continue
		}
		if pos >= len(data) {
			return Doc{}, fmt.Errorf("msgpack cut short after %d bytes", len(data))
		}
		h, err := parse(data, pos)
		if err != nil {
			return Doc{}, err
		}
		pos = h.next
		left--
		children := h.n
		switch h.kind {
		case ext:
			if err := doc.noteExt(pos, h.n); err != nil {
				return Doc{}, err
			}
			fallthrough
		case plain:
			pos += h.n
			continue
		case array:
			doc.Items += h.n
		case mapping:
			children *= 2
			doc.Entries += h.n
			doc.Maps += min(h.n, 1)
		}
		if children == 0 {
			continue
		}
		if len(open) == maxDepth {
			return Doc{}, fmt.Errorf("msgpack nested deeper than %d", maxDepth)
		}
		open = append(open, left)
		left = children
	}
	if pos != len(data) {
		return Doc{}, errEnd(data, pos)
	}
	return doc, nil
}

// guesses are the sizes of the values of the previous container, by the number of values missing
// from it. Most containers resemble the previous one, and if a guess is right the processor need
// not wait for one byte to know where the next one is. That makes Check twice as fast.
type guesses [64]uint8

// noteExt notes an extension with a payload of n bytes at pos.
func (d *Doc) noteExt(pos, n int) error {
	if int8(d.data[pos-1]) == internedStr {
		return fmt.Errorf("msgpack interned string before byte %d: not supported", pos)
	}
	if pos < len(d.data) && mapLike(d.data[pos]) {
		if n == 0 {
			return fmt.Errorf("msgpack extension of no bytes before a map or nil at byte %d: not supported", pos)
		}
		d.ext = append(d.ext, pos)
	}
	return nil
}

func errEnd(data []byte, pos int) error {
	if pos > len(data) {
		return fmt.Errorf("msgpack cut short after %d bytes", len(data))
	}
	return fmt.Errorf("msgpack followed by %d stray bytes", len(data)-pos)
}

type kind uint8

const (
	plain   kind = iota // n payload bytes follow the header
	ext                 // the same; the last byte of the header is the type
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

// codes describes 0xc0 to 0xdf, the codes that do not contain their length: the width of the length
// field, or the fixed length.
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

// sizes is the size of a plain value by its first byte, or 0 if that does not determine the size.
var sizes = func() (sizes [256]uint8) {
	for c := range sizes {
		switch code := codes[c%32]; {
		case c < 0x80 || c >= 0xe0: // fixint
			sizes[c] = 1
		case c >= 0xc0:
			if code.kind == plain && code.width == 0 {
				sizes[c] = 1 + code.n
			}
		case c >= 0xa0: // fixstr
			sizes[c] = 1 + uint8(c&0x1f)
		}
	}
	return sizes
}()

// parse parses the header at pos, which is within data, and checks that what it declares can fit in
// the bytes after it.
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
	// A map needs twice its n; Check finds out if they are missing.
	if h.n > len(data)-h.next {
		return h, errLength(uint64(h.n), data, pos)
	}
	return h, nil
}

// parseLong is parse for the codes 0xc0 to 0xdf.
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
	n := uint64(code.n) // 64 bits even where int has 32
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

// mapLike reports whether the decoder takes c for the start of a map or for nil.
func mapLike(c byte) bool {
	return c>>4 == 0x8 || c == 0xc0 || c == 0xde || c == 0xdf
}
