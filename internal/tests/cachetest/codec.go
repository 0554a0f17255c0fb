package cachetest

import (
	"bytes"
	"errors"

	"github.com/singlefill/singlefill"
)

// A KeyedCodec binds what Codec encodes to a namespace and a key.
type KeyedCodec struct {
	singlefill.Codec
	place string
}

func (c KeyedCodec) ForKey(namespace, key string) singlefill.Codec {
	c.place = namespace + "/" + key + "/"
	return c
}

func (c KeyedCodec) Marshal(v any) ([]byte, error) {
	if c.place == "" {
		return nil, errors.New("not bound to a key")
	}
	data, err := c.Codec.Marshal(v)
	return append([]byte(c.place), data...), err
}

func (c KeyedCodec) Unmarshal(data []byte, v any) error {
	rest, ok := bytes.CutPrefix(data, []byte(c.place))
	if c.place == "" || !ok {
		return errors.New("not bound to this key")
	}
	return c.Codec.Unmarshal(rest, v)
}

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
