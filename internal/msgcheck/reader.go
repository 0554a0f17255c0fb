package msgcheck

import (
	"errors"
	"io"
)

var errExt = errors.New("msgpack extension in the place of a map")

// A Reader reads a checked document for the decoder.
//
// The guarantees of Check hold only for a decoder that reads headers where Check found them. If the
// target is a map, msgpack's decoder skips the header of an extension and takes the payload for the
// map: in d7 ff df ff ff ff ff 00 00 00, a well-formed timestamp, it finds a map of 4 G entries and
// allocates them. The bytes do not show whether the target is a map, but the way of reading does:
// the decoder reads a payload at once, and a header byte by byte. So ReadByte of a Reader fails at
// the start of that payload.
type Reader struct {
	data []byte
	pos  int
	run  []byte // data up to where ReadByte fails next: ext[0] or the end
	ext  []int
}

// Reset moves r to the start of doc.
func (r *Reader) Reset(doc Doc) {
	*r = Reader{data: doc.data, run: doc.data, ext: doc.ext}
	if len(doc.ext) > 0 {
		r.skipExt()
	}
}

// skipExt drops the payloads before pos.
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

// UnreadByte implements io.ByteScanner. It must follow ReadByte.
func (r *Reader) UnreadByte() error {
	r.pos--
	return nil
}
