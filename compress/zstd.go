// Package compress has a [singlefill.Codec] that compresses what another one encodes.
//
//	users, err := singlefill.New(rdb, "users", time.Hour, &singlefill.Options[User]{
//		Codec: compress.Zstd(singlefill.MsgPack, nil),
//	})
//
// # In a running fleet
//
// Entries that were written without compression are read, and stay as they are until they are written again. A
// process without this package takes a compressed entry for a bad value, which is a miss: it loads. So turn
// compression on in two deployments:
//
//  1. all processes get Zstd with a negative MinSize: they read compressed entries and write none;
//  2. all processes get the MinSize that you want.
//
// Turn it off in the same way: first a negative MinSize, and when the last compressed entry has expired,
// after the ttl and the longer stale window, the inner codec alone.
//
// # Format
//
// What is compressed begins with the bytes C1 7A 73 74, which begin neither MessagePack nor JSON, and a byte
// that tells what follows: 1, a frame of Zstandard (RFC 8878) whose header has the size of its content; or 0,
// bytes as they are, which the inner codec began with C1 7A 73 74. All else is the inner codec's. A value of
// Raw that was written without compression and begins with these four bytes is not read as it was; with a negative
// MinSize it is an error when it is written.
package compress

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/singlefill/singlefill"
)

// Options tune [Zstd]. Nil, like the zero value, means the defaults. They may get fields: write literals with
// the names of the fields.
type Options struct {
	// MinSize is how many bytes a value has at least that is compressed. Shorter ones take hardly less
	// space, and each takes time. Default: 1024. Negative: no value is compressed; those that are, are
	// read.
	MinSize int
}

const (
	magic     = "\xC1zst"
	headerLen = len(magic) + 1

	plain      = 0
	compressed = 1
)

// Zstd returns a codec that compresses what codec encodes, with Zstandard at the default level of
// github.com/klauspost/compress. It keeps the compressed bytes only if they are fewer. A nil codec stands
// for [singlefill.MsgPack], nil opts for the defaults.
//
// Unmarshal estimates how much memory the decompressed bytes and the value would take together. It refuses
// compressed bytes, before it takes that memory, if the estimate is more than 64 MiB + 64 × their length. Marshal
// does not compress a value that Unmarshal would refuse. The estimate leaves out garbage: an accepted decode may
// allocate about twice the bound with MsgPack, and six times with JSON. With a codec other than MsgPack, JSON and Raw
// the estimate counts the decompressed bytes only.
//
// The errors are the errors of codec, errors about damaged bytes, and with a negative MinSize an error for a value that
// begins like compressed bytes.
//
// An encrypting codec goes around Zstd, since encrypted bytes cannot be compressed. Zstd has the optional method ForKey
// if codec has it.
func Zstd(codec singlefill.Codec, opts *Options) singlefill.Codec {
	z := zstdCodec{inner: codec, minSize: 1024}
	if codec == nil {
		z.inner = singlefill.MsgPack
	}
	if opts != nil && opts.MinSize != 0 {
		z.minSize = opts.MinSize
	}
	if _, ok := z.inner.(keyed); ok {
		return keyedCodec{z}
	}
	return z
}

// A keyed codec binds what it encodes to a key.
type keyed interface {
	ForKey(namespace, key string) singlefill.Codec
}

// A keyedCodec compresses what a keyed codec encodes.
type keyedCodec struct{ zstdCodec }

func (k keyedCodec) ForKey(namespace, key string) singlefill.Codec {
	z := k.zstdCodec
	z.inner = z.inner.(keyed).ForKey(namespace, key)
	return z
}

type zstdCodec struct {
	inner   singlefill.Codec
	minSize int // negative: nothing is compressed
}

// Unwrap returns the inner codec, by which singlefill.New judges the type of a cache.
func (z zstdCodec) Unwrap() singlefill.Codec { return z.inner }

// Formats tells apart entries that were compressed, or may be. A codec that compresses none writes the format of the
// inner codec.
func (z zstdCodec) Formats() []string {
	inner := []string{""}
	if f, ok := z.inner.(interface{ Formats() []string }); ok && len(f.Formats()) > 0 {
		inner = f.Formats()
	}
	var all []string
	for _, name := range inner {
		all = append(all, name, "zstd+"+name)
	}
	if z.minSize >= 0 {
		all[0], all[1] = all[1], all[0]
	}
	return all
}

func (z zstdCodec) Marshal(v any) ([]byte, error) {
	data, err := z.inner.Marshal(v)
	if err != nil {
		return nil, err
	}
	if z.minSize >= 0 && len(data) >= z.minSize {
		c, err := coders()
		if err != nil {
			return nil, err
		}
		b := c.EncodeAll(data, header(compressed, len(data)/2))
		if len(b) < len(data) && z.bounded(len(b), data, v) == nil {
			return b, nil
		}
	}
	if strings.HasPrefix(string(data[:min(len(data), len(magic))]), magic) {
		if z.minSize < 0 { // the entry names the format of the inner codec, by which processes without Zstd read it
			return nil, errors.New("singlefill/compress: the value begins with C1 7A 73 74: with a negative MinSize it cannot be stored so that all read it")
		}
		return append(header(plain, len(data)), data...), nil
	}
	return data, nil
}

func header(kind byte, size int) []byte {
	return append(append(make([]byte, 0, headerLen+size), magic...), kind)
}

func (z zstdCodec) Unmarshal(data []byte, v any) error {
	if len(data) < headerLen || string(data[:len(magic)]) != magic {
		return z.inner.Unmarshal(data, v)
	}
	kind, body := data[len(magic)], data[headerLen:]
	switch kind {
	case plain:
		return z.inner.Unmarshal(body, v)
	case compressed:
		decompressed, err := decompress(body, limit(len(data)))
		if err == nil {
			err = z.bounded(len(data), decompressed, v)
		}
		if err != nil {
			return fmt.Errorf("singlefill/compress: %w", err)
		}
		return z.inner.Unmarshal(decompressed, v)
	}
	return fmt.Errorf("singlefill/compress: unknown kind %d of compression", kind)
}

// bounded returns an error if n bytes may not become what they decompress to, together with its value.
func (z zstdCodec) bounded(n int, decompressed []byte, v any) error {
	left := limit(n) - int64(len(decompressed))
	if inner, ok := z.inner.(interface {
		Within(most int64, data []byte, v any) error
	}); ok {
		return inner.Within(left, decompressed, v)
	}
	if left < 0 {
		return fmt.Errorf("%d bytes become %d, which is too many", n, len(decompressed))
	}
	return nil
}

// limit returns how much memory n bytes may take: the rule of singlefill.MsgPack.
func limit(n int) int64 { return 64<<20 + 64*int64(n) }

// decompress decodes one frame, whose header says how long the result is.
func decompress(frame []byte, most int64) ([]byte, error) {
	var h zstd.Header
	if err := h.Decode(frame); err != nil {
		return nil, err
	}
	switch {
	case h.Skippable || !h.HasFCS:
		return nil, errors.New("a frame does not tell its size")
	case h.FrameContentSize > uint64(most):
		return nil, fmt.Errorf("a frame of %d bytes tells a size of %d: at most %d is allowed", len(frame), h.FrameContentSize, most)
	}
	c, err := coders()
	if err != nil {
		return nil, err
	}
	data, err := c.DecodeAll(frame, make([]byte, 0, h.FrameContentSize))
	if err == nil && uint64(len(data)) != h.FrameContentSize {
		err = errors.New("a frame has another size than it tells")
	}
	return data, err
}

// coders are shared by all codecs: EncodeAll and DecodeAll may be called concurrently, and keep memory for
// as many calls as there are processors.
var coders = sync.OnceValues(func() (c struct {
	*zstd.Encoder
	*zstd.Decoder
}, err error) {
	if c.Encoder, err = zstd.NewWriter(nil, zstd.WithSingleSegment(true)); err != nil {
		return c, err
	}
	c.Decoder, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecodeAllCapLimit(true))
	return c, err
})
