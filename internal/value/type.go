package value

import (
	"time"

	"github.com/singlefill/singlefill/internal/codec"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/near"
)

// A Type is all that knows the T of a cache. Everything else holds a value as a pointer to a T; nil stands for
// none. So it is compiled once.
type Type struct {
	Formats codec.Formats
	Policy  Policy

	// Encode and Decode return a panic of the codec as an error: the codec may be the user's, and the
	// bytes hostile.
	Encode func(key string, value any) (payload []byte, err error)
	Decode func(key string, payload []byte) (value any, err error)

	// Clone returns a pointer to a T that shares no mutable memory with value once it is copied. It is
	// nil if T is not plain, or if the codec is the user's and may share parts of values.
	Clone func(value any) any

	// Boxed is Box for the T of a value.
	Boxed func(value any) *near.Copy

	// Life is TTLFunc, or nil: it takes the place of Policy.TTL.
	Life func(key string, value any) time.Duration

	// Tags is Options.Tags, or nil. It returns a panic as an error.
	Tags func(key string, value any) ([]string, error)
}

// DecodeEntry decodes the payload of an entry of key, unless another codec has written it.
func (t *Type) DecodeEntry(key string, e *entry.Entry) (any, error) {
	if err := t.Formats.Check(e.Format); err != nil {
		return nil, err
	}
	return t.Decode(key, e.Payload)
}
