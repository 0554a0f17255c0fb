package cachetest

import "github.com/singlefill/singlefill"

// A BadCodec asks marshal and unmarshal, unless they are nil, whether to fail.
type BadCodec struct {
	singlefill.Codec
	OnMarshal, OnUnmarshal func(v any) error
}

// Formats returns the formats of the codec that it wraps.
func (c BadCodec) Formats() []string {
	if f, ok := c.Codec.(interface{ Formats() []string }); ok {
		return f.Formats()
	}
	return nil
}

func (c BadCodec) Marshal(v any) ([]byte, error) {
	if c.OnMarshal != nil {
		if err := c.OnMarshal(v); err != nil {
			return nil, err
		}
	}
	return c.Codec.Marshal(v)
}

func (c BadCodec) Unmarshal(data []byte, v any) error {
	if c.OnUnmarshal != nil {
		if err := c.OnUnmarshal(v); err != nil {
			return err
		}
	}
	return c.Codec.Unmarshal(data, v)
}
