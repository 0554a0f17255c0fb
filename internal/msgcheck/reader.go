package msgcheck

import (
	"errors"
	"io"
)

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
	data []byte
	pos  int
	run  []byte // data up to where ReadByte fails next, which is ext[0] or the end
	ext  []int
}

// Reset puts r at the start of doc.
func (r *Reader) Reset(doc Doc) {
	*r = Reader{data: doc.data, run: doc.data, ext: doc.ext}
	r.skipExt()
}

// skipExt passes the payloads before pos.
func (r *Reader) skipExt() {
	for len(r.ext) > 0 && r.ext[0] < r.pos {
		r.ext = r.ext[1:]
	}
	r.run = r.data
	if len(r.ext) > 0 {
		r.run = r.data[:r.ext[0]]
	}
}

// Read implements io.Reader.
func (r *Reader) Read(p []byte) (int, error) {
	if r.pos == len(r.data) && len(p) > 0 {
		return 0, io.EOF
	}
	n := copy(p, r.data[r.pos:])
	r.pos += n
	if r.pos > len(r.run) {
		r.skipExt()
	}
	return n, nil
}

// ReadByte implements io.ByteScanner.
func (r *Reader) ReadByte() (byte, error) {
	pos := r.pos
	if uint(pos) < uint(len(r.run)) {
		r.pos = pos + 1
		return r.run[pos], nil
	}
	if pos < len(r.data) {
		return 0, errExt
	}
	return 0, io.EOF
}

// UnreadByte implements io.ByteScanner. It is called only after ReadByte.
func (r *Reader) UnreadByte() error {
	r.pos--
	return nil
}
