// Package entry defines the format of a value key.
package entry

import (
	"encoding/binary"
	"errors"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"time"
)

// An Entry is the content of a value key: a header of 35 bytes, the version of T if it is not 0, then the codec's
// payload. Numbers are big-endian.
//
//	 0      magic 0xC1, which begins neither msgpack nor UTF-8 text
//	 1      version of this layout, 1
//	 2      flags: bit 0 the source has no such value; bit 1 expired early; bit 2 has a version; the others are 0
//	 3..10  fresh until, Unix time in ms
//	11..12  the format of the payload, see Format; 0 or 0xFFFF: not said
//	13..18  written at, Unix time in ms
//	19..22  how long the load took, ms (0: not loaded, but Set)
//	23..26  length of what follows the header, bytes
//	27..34  random, so that no two entries ever written are equal
//	35..38  with flag bit 2: Options.Version, not 0
//	35..    or 39..: payload; empty with flag bit 0
//
// Everything about the payload is in the header, so that no user value can be taken for a marker.
// The length is needed because a codec such as Raw cannot tell a truncated payload from a short
// one. The times are by the writer's clock. Redis' own TTL is the hard limit of an entry's life; no
// time in the header prolongs it.
//
// An earlier version has no format: its time of 8 bytes begins with 0 0 or, before 1970, with FF FF. It takes
// an entry with a format for an entry that was written in the far future, so its age is 0. An earlier version of this
// package refuses an entry with a version as a bad value.
//
// The scripts of package filllock know the length of the header; expire.lua and delete_if.lua also know
// the offsets of its fields.
type Entry struct {
	NotFound bool
	// Expired is set if Expire marked the entry stale, at FreshUntil. Then it is stale for readers
	// with any clock.
	Expired    bool
	FreshUntil time.Time
	WrittenAt  time.Time
	Format     Format // of the payload; 0: not said, or there is none
	Version    uint32 // of T in the process that wrote the entry
	LoadTime   time.Duration
	ID         uint64 // the random bytes; Encode chooses them
	Payload    []byte
}

// A Format tells what has encoded a payload: the hash of a name that codecs give to their bytes.
type Format uint16

// FormatOf returns the format of a name. It has 15 bits, since an earlier version takes it for the beginning of a
// time, which must not be negative.
func FormatOf(name string) Format {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	return max(1, Format(h.Sum32()&maxFormat))
}

const (
	HeaderLen  = 35
	VersionLen = 4 // of the version behind the header
	RandomAt   = 27

	maxFormat = 1<<15 - 1

	magic         = 0xC1
	layout        = 1
	flagNotFound  = 1 << 0
	flagExpired   = 1 << 1
	flagVersioned = 1 << 2

	// Offsets of the fields.
	flagsAt    = 2
	freshAt    = 3
	formatAt   = 11
	loadTimeAt = 19
	lengthAt   = 23
)

// Age returns the time since the entry was written, or 0 if the clocks of writer and reader
// disagree.
func (e Entry) Age(now time.Time) time.Duration { return max(0, now.Sub(e.WrittenAt)) }

// PayloadAt returns where the payload begins in the encoded entry.
func (e Entry) PayloadAt() int {
	if e.Version != 0 {
		return HeaderLen + VersionLen
	}
	return HeaderLen
}

// Encode returns a new header and the payload.
func (e Entry) Encode() ([]byte, error) {
	at := e.PayloadAt()
	rest := uint64(at-HeaderLen) + uint64(len(e.Payload))
	if rest > math.MaxUint32 {
		return nil, errors.New("singlefill: value takes more than 4 GiB")
	}
	b := make([]byte, at, at+len(e.Payload))
	b[0], b[1] = magic, layout
	if e.NotFound {
		b[flagsAt] |= flagNotFound
	}
	if e.Expired {
		b[flagsAt] |= flagExpired
	}
	if e.Version != 0 {
		b[flagsAt] |= flagVersioned
		binary.BigEndian.PutUint32(b[HeaderLen:], e.Version)
	}
	binary.BigEndian.PutUint64(b[freshAt:], uint64(e.FreshUntil.UnixMilli()))
	binary.BigEndian.PutUint64(b[formatAt:], uint64(e.WrittenAt.UnixMilli()))
	if e.Format != 0 {
		binary.BigEndian.PutUint16(b[formatAt:], uint16(e.Format))
	}
	binary.BigEndian.PutUint32(b[loadTimeAt:], uint32(min(e.LoadTime.Milliseconds(), math.MaxUint32)))
	binary.BigEndian.PutUint32(b[lengthAt:], uint32(rest))
	binary.BigEndian.PutUint64(b[RandomAt:], rand.Uint64())
	return append(b, e.Payload...), nil
}

// Parse parses the header of b. The payload aliases b.
func Parse(b []byte) (Entry, error) {
	e, err := ParseHeader(b, int64(len(b)))
	if err == nil {
		e.Payload = b[e.PayloadAt():]
	}
	return e, err
}

// ParseHeader parses the header and the version of an entry of size bytes, which b begins with. It returns no payload.
func ParseHeader(b []byte, size int64) (Entry, error) {
	var version uint32
	headerLen := int64(HeaderLen)
	if len(b) >= HeaderLen+VersionLen && b[flagsAt]&flagVersioned != 0 {
		version, headerLen = binary.BigEndian.Uint32(b[HeaderLen:]), HeaderLen+VersionLen
	}
	switch {
	case len(b) < HeaderLen:
		return Entry{}, errors.New("singlefill: entry is shorter than its header")
	case b[0] != magic:
		return Entry{}, errors.New("singlefill: not an entry")
	case b[1] != layout:
		return Entry{}, errors.New("singlefill: entry of an unknown layout")
	case b[flagsAt]&^(flagNotFound|flagExpired|flagVersioned) != 0:
		return Entry{}, errors.New("singlefill: entry with unknown flags")
	case b[flagsAt]&flagVersioned != 0 && version == 0:
		return Entry{}, errors.New("singlefill: entry without the version that it announces")
	case int64(binary.BigEndian.Uint32(b[lengthAt:])) != size-HeaderLen:
		return Entry{}, errors.New("singlefill: entry is truncated or overlong")
	case b[flagsAt]&flagNotFound != 0 && size > headerLen:
		return Entry{}, errors.New("singlefill: not-found entry with a payload")
	}
	written, format := int64(binary.BigEndian.Uint64(b[formatAt:])), Format(binary.BigEndian.Uint16(b[formatAt:]))
	if format > maxFormat {
		format = 0
	}
	if format != 0 {
		const bits = 64 - 48
		written = written << bits >> bits
	}
	return Entry{
		NotFound:   b[flagsAt]&flagNotFound != 0,
		Expired:    b[flagsAt]&flagExpired != 0,
		FreshUntil: time.UnixMilli(int64(binary.BigEndian.Uint64(b[freshAt:]))),
		WrittenAt:  time.UnixMilli(written),
		Format:     format,
		Version:    version,
		LoadTime:   time.Duration(binary.BigEndian.Uint32(b[loadTimeAt:])) * time.Millisecond,
		ID:         IDOf(b),
	}, nil
}

// IDOf returns the ID of the entry that b is.
func IDOf(b []byte) uint64 { return binary.BigEndian.Uint64(b[RandomAt:]) }

// Random returns the bytes of a header from RandomAt on.
func Random(id uint64) string { return string(binary.BigEndian.AppendUint64(nil, id)) }

// Size returns how many bytes the entry has that begins with b, as its header tells, or len(b) if it has none.
func Size(b []byte) int64 {
	if len(b) < HeaderLen || b[0] != magic {
		return int64(len(b))
	}
	return HeaderLen + int64(binary.BigEndian.Uint32(b[lengthAt:]))
}

// Header returns the part of stored bytes by which the scripts distinguish entries.
func Header[B []byte | string](b B) string {
	return string(b[:min(len(b), HeaderLen)])
}

// A Patch overwrites stored bytes.
type Patch struct {
	At    int64
	Bytes string
}

// Stale returns the values that expire.lua writes into a header: now, and new random bytes.
func Stale(now time.Time) (fresh, random string) {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:], uint64(now.UnixMilli()))
	binary.BigEndian.PutUint64(b[8:], rand.Uint64())
	return string(b[:8]), string(b[8:])
}

// Expire returns the patches that mark the entry with this header stale, as expire.lua does, or
// none if it is not a header. An entry that was stale before keeps its time.
func Expire(header string, now time.Time) []Patch {
	if len(header) < HeaderLen || header[0] != magic || header[1] != layout {
		return nil
	}
	fresh, random := Stale(now)
	if until := header[freshAt:formatAt]; until < fresh {
		fresh = until
	}
	return []Patch{{flagsAt, string([]byte{header[flagsAt] | flagExpired}) + fresh}, {RandomAt, random}}
}
