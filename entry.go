package singlefill

import (
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"time"
)

// An entry is what a value key holds: a header of 27 bytes, then the codec's payload.
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
type entry struct {
	notFound   bool
	freshUntil time.Time
	loadTime   time.Duration
	payload    []byte
}

const (
	headerLen    = 27
	entryMagic   = 0xC1
	entryVersion = 1
	flagNotFound = 1 << 0
)

func (e entry) encode() ([]byte, error) {
	if uint64(len(e.payload)) > math.MaxUint32 {
		return nil, errors.New("singlefill: value takes more than 4 GiB")
	}
	b := make([]byte, headerLen, headerLen+len(e.payload))
	b[0], b[1] = entryMagic, entryVersion
	if e.notFound {
		b[2] = flagNotFound
	}
	binary.BigEndian.PutUint64(b[3:], uint64(e.freshUntil.UnixMilli()))
	binary.BigEndian.PutUint32(b[11:], uint32(min(e.loadTime.Milliseconds(), math.MaxUint32)))
	binary.BigEndian.PutUint32(b[15:], uint32(len(e.payload)))
	binary.BigEndian.PutUint64(b[19:], rand.Uint64())
	return append(b, e.payload...), nil
}

// parseEntry takes the header off b. The payload aliases b.
func parseEntry(b []byte) (entry, error) {
	switch {
	case len(b) < headerLen:
		return entry{}, errors.New("singlefill: entry is shorter than its header")
	case b[0] != entryMagic:
		return entry{}, errors.New("singlefill: not an entry")
	case b[1] != entryVersion:
		return entry{}, errors.New("singlefill: entry of an unknown version")
	case b[2]&^flagNotFound != 0:
		return entry{}, errors.New("singlefill: entry with unknown flags")
	case uint64(binary.BigEndian.Uint32(b[15:])) != uint64(len(b)-headerLen):
		return entry{}, errors.New("singlefill: entry is truncated or overlong")
	case b[2]&flagNotFound != 0 && len(b) > headerLen:
		return entry{}, errors.New("singlefill: not-found entry with a payload")
	}
	return entry{
		notFound:   b[2]&flagNotFound != 0,
		freshUntil: time.UnixMilli(int64(binary.BigEndian.Uint64(b[3:]))),
		loadTime:   time.Duration(binary.BigEndian.Uint32(b[11:])) * time.Millisecond,
		payload:    b[headerLen:],
	}, nil
}

// header returns the part of stored bytes by which the scripts tell one entry from another.
func header[B []byte | string](b B) string {
	return string(b[:min(len(b), headerLen)])
}
