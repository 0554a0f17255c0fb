// Package entry is the format of what a value key holds.
package entry

import (
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"time"
)

// An Entry is what a value key holds: a header of 27 bytes, then the codec's payload.
// Numbers are big-endian.
//
//	 0      magic 0xC1, which begins neither msgpack nor UTF-8 text
//	 1      format version, 1
//	 2      flags: bit 0 the source has no such thing; the others are 0
//	 3..10  fresh until, Unix time in ms
//	11..14  how long the load took, ms (0: not loaded, but Set)
//	15..18  length of the payload, bytes
//	19..26  random, so that no two entries ever written are alike
//	27..    payload; empty with flag bit 0
//
// All that says what the payload is stands outside of it: no user value can be taken for a marker.
// The length is there because a codec such as Raw cannot tell a truncated payload from a short one.
// Redis' own TTL is the hard limit of an entry's life; no time in here prolongs it.
type Entry struct {
	NotFound   bool
	FreshUntil time.Time
	LoadTime   time.Duration
	Payload    []byte
}

const (
	HeaderLen    = 27
	entryMagic   = 0xC1
	entryVersion = 1
	flagNotFound = 1 << 0
)

// Encode writes a header, new each time, and the payload.
func (e Entry) Encode() ([]byte, error) {
	if uint64(len(e.Payload)) > math.MaxUint32 {
		return nil, errors.New("singlefill: value takes more than 4 GiB")
	}
	b := make([]byte, HeaderLen, HeaderLen+len(e.Payload))
	b[0], b[1] = entryMagic, entryVersion
	if e.NotFound {
		b[2] = flagNotFound
	}
	binary.BigEndian.PutUint64(b[3:], uint64(e.FreshUntil.UnixMilli()))
	binary.BigEndian.PutUint32(b[11:], uint32(min(e.LoadTime.Milliseconds(), math.MaxUint32)))
	binary.BigEndian.PutUint32(b[15:], uint32(len(e.Payload)))
	binary.BigEndian.PutUint64(b[19:], rand.Uint64())
	return append(b, e.Payload...), nil
}

// Parse takes the header off b. The payload aliases b.
func Parse(b []byte) (Entry, error) {
	switch {
	case len(b) < HeaderLen:
		return Entry{}, errors.New("singlefill: entry is shorter than its header")
	case b[0] != entryMagic:
		return Entry{}, errors.New("singlefill: not an entry")
	case b[1] != entryVersion:
		return Entry{}, errors.New("singlefill: entry of an unknown version")
	case b[2]&^flagNotFound != 0:
		return Entry{}, errors.New("singlefill: entry with unknown flags")
	case uint64(binary.BigEndian.Uint32(b[15:])) != uint64(len(b)-HeaderLen):
		return Entry{}, errors.New("singlefill: entry is truncated or overlong")
	case b[2]&flagNotFound != 0 && len(b) > HeaderLen:
		return Entry{}, errors.New("singlefill: not-found entry with a payload")
	}
	return Entry{
		NotFound:   b[2]&flagNotFound != 0,
		FreshUntil: time.UnixMilli(int64(binary.BigEndian.Uint64(b[3:]))),
		LoadTime:   time.Duration(binary.BigEndian.Uint32(b[11:])) * time.Millisecond,
		Payload:    b[HeaderLen:],
	}, nil
}

// Header returns the part of stored bytes by which the scripts tell one entry from another.
func Header[B []byte | string](b B) string {
	return string(b[:min(len(b), HeaderLen)])
}
