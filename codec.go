package singlefill

import "github.com/singlefill/singlefill/internal/codec"

// A Codec turns values into bytes and back. It must be safe for concurrent use.
type Codec interface {
	// Marshal encodes v, a value of the cache's T, which it must not change. What it returns may share
	// memory with v: the cache copies it before anyone else gets v. An error fails the Set, not the load.
	Marshal(v any) ([]byte, error)

	// Unmarshal decodes data into v, a pointer to a zero T. It must neither change data nor keep any part
	// of it, and must bear any bytes: whoever can write to Redis chose them. Its error makes them a miss.
	Unmarshal(data []byte, v any) error
}

// The codecs of this package. A panic in the encoding or decoding methods of a user's type is an error.
//
// MsgPack and JSON refuse bytes that could take more than
//
//	64 MiB + 64 × the length of the bytes
//
// of memory as a T, for a byte or two can stand for a whole element: a megabyte of nils decodes into a million
// structs. What they could take is the number of array items times the largest slice element within T, and
// likewise for map entries and maps: see internal/msgcheck. That is an over-estimate, so a T of many small
// numbers next to few huge structs can meet the limit unjustly. Marshal applies the same limit: a value that
// could not be read back is an error when it is written, not a miss at every read.
// A T that is an interface is judged there by the value in it.
var (
	// MsgPack is the default: fast, compact, and it keeps nil apart from empty. To know:
	//
	//   - Fields are named by the tag `msgpack:"name"` or by their Go name; json tags are ignored.
	//     Unexported fields are dropped. The tag's option intern is not supported.
	//   - A field unknown to T is ignored, a missing one stays zero: entries of an older T decode without
	//     an error. Change the namespace with the schema.
	//   - Integers wrap silently: 300 read into an int8 is 44. Widen fields, do not narrow them.
	//   - A time.Time comes back as the same instant in Local: compare with Equal.
	//   - In an any, numbers come back as the narrowest type, slices as []any, structs as map[string]any.
	//   - More than 512 levels of nesting are refused. A value that contains itself is a fatal stack overflow.
	MsgPack Codec = codec.MsgPack

	// JSON is encoding/json: readable by others and stricter, at about twice the cost of MsgPack.
	// In an any, numbers come back as float64; invalid UTF-8 in strings is replaced.
	JSON Codec = codec.JSON

	// Raw stores []byte and string, also as named types, as they are. It cannot tell nil from empty:
	// a nil slice comes back empty.
	Raw Codec = codec.Raw
)
