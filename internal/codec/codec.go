// Package codec has the codecs that singlefill provides to encode and decode values.
package codec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"sync"

	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/msgcheck"
	"github.com/vmihailenco/msgpack/v5"
)

// The codecs of package singlefill, where they are documented.
var (
	MsgPack msgPackCodec
	JSON    jsonCodec
	Raw     rawCodec
)

// maxNesting is the deepest nesting of msgpack: far above real data, far below a stack overflow.
const maxNesting = 512

type msgPackCodec struct{}

func (msgPackCodec) Marshal(v any) (data []byte, err error) {
	defer recoverTo(&err, "MsgPack.Marshal")
	if data, err = msgpack.Marshal(addressable(v)); err != nil {
		return nil, err
	}
	if _, err := checkMsgPack(data, msgcheck.CostOf(reflect.TypeOf(v))); err != nil {
		return nil, err
	}
	return data, nil
}

func (msgPackCodec) Unmarshal(data []byte, v any) (err error) {
	defer recoverTo(&err, "MsgPack.Unmarshal")
	cost := msgcheck.CostOf(reflect.TypeOf(v))
	doc, err := checkMsgPack(data, cost)
	if err != nil {
		return err
	}
	d, reuse := decoders.Get().(*decoder), len(data) <= maxReused && !cost.Private
	d.reader.Reset(doc)
	d.Reset(&d.reader)
	err = d.Decode(v)
	d.reader.Reset(msgcheck.Doc{}) // a user's method may have kept d
	if err == nil && reuse {
		decoders.Put(d)
	}
	return err
}

// decoders are decoders that may be reused. msgpack.Unmarshal would reuse all of its decoders, even
// those that a failed decode left in the middle of a recording, and those that a user's method may
// have kept.
//
// Decoders are pooled only for types whose methods cannot keep them, and only after a success. A
// method may keep the decoder; a failed decode may leave it in the middle of a recording. Either
// would show one value to the reader of another. See TestUnmarshal_KeptDecoder.
var decoders = sync.Pool{New: func() any { return &decoder{Decoder: msgpack.NewDecoder(nil)} }}

// maxReused limits the bytes given to a reused decoder, since it keeps a buffer as long as the
// longest string.
const maxReused = 256 << 10

type decoder struct {
	*msgpack.Decoder
	reader msgcheck.Reader
}

// checkMsgPack returns data as a document that is safe to decode into a type of this cost.
func checkMsgPack(data []byte, cost *msgcheck.Cost) (msgcheck.Doc, error) {
	doc, err := msgcheck.Check(data, maxNesting)
	if err == nil {
		err = cost.Bound(doc.Counts, len(data), doc.Levels)
	}
	if err != nil {
		return msgcheck.Doc{}, fmt.Errorf("singlefill: %w", err)
	}
	return doc, nil
}

// Within returns an error if decoding data into v may take more than most bytes. Package compress asks for it, whose
// few bytes can become many.
func (msgPackCodec) Within(most int64, data []byte, v any) error {
	doc, err := msgcheck.Check(data, maxNesting)
	if err == nil {
		err = msgcheck.CostOf(reflect.TypeOf(v)).Within(uint64(max(0, most)), doc.Counts, len(data), doc.Levels)
	}
	return err
}

type jsonCodec struct{}

func (jsonCodec) Marshal(v any) (data []byte, err error) {
	defer recoverTo(&err, "JSON.Marshal")
	if data, err = json.Marshal(addressable(v)); err != nil {
		return nil, err
	}
	if err := checkJSON(data, v); err != nil {
		return nil, err
	}
	return data, nil
}

// Unmarshal does not check lengths and nesting: JSON declares no lengths, and encoding/json refuses
// more than 10,000 levels and anything after the value.
func (jsonCodec) Unmarshal(data []byte, v any) (err error) {
	defer recoverTo(&err, "JSON.Unmarshal")
	if err := checkJSON(data, v); err != nil {
		return err
	}
	return json.Unmarshal(data, v)
}

// checkJSON counts every delimiter as an element. It also counts those inside strings, which does
// no harm: with a comma in fifty bytes of prose, only a T with elements of more than 50 × 64 bytes
// comes near the limit.
func checkJSON(data []byte, v any) error {
	n, levels := countJSON(data)
	if err := msgcheck.CostOf(reflect.TypeOf(v)).Bound(n, len(data), levels); err != nil {
		return fmt.Errorf("singlefill: json: %w", err)
	}
	return nil
}

func countJSON(data []byte) (msgcheck.Counts, func() *msgcheck.Levels) {
	count := func(c string) int { return bytes.Count(data, []byte(c)) }
	n := msgcheck.Counts{Items: count("[") + count(","), Entries: count(":"), Maps: count("{")}
	return n, func() *msgcheck.Levels { return msgcheck.JSONLevels(data) }
}

func (jsonCodec) Within(most int64, data []byte, v any) error {
	n, levels := countJSON(data)
	return msgcheck.CostOf(reflect.TypeOf(v)).Within(uint64(max(0, most)), n, len(data), levels)
}

// addressable returns a pointer to a copy of v. Methods with a pointer receiver are called only on
// addressable values. Unmarshal, which gets a pointer, calls them, so Marshal must, too.
func addressable(v any) any {
	typ := reflect.TypeOf(v)
	if typ == nil || typ.Kind() == reflect.Pointer {
		return v
	}
	p := reflect.New(typ)
	p.Elem().Set(reflect.ValueOf(v))
	return p.Interface()
}

// recoverTo turns a panic of a user's method into *err.
func recoverTo(err *error, op string) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("singlefill: panic in %s: %s", op, foreign.Text(p))
	}
}

type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error) {
	typ := reflect.TypeOf(v)
	switch {
	case isString(typ):
		return []byte(reflect.ValueOf(v).String()), nil
	case isBytes(typ):
		return reflect.ValueOf(v).Bytes(), nil
	}
	return nil, fmt.Errorf("singlefill: Raw takes []byte or string, not %v", typ)
}

func (rawCodec) Unmarshal(data []byte, v any) error {
	p := reflect.ValueOf(v)
	if p.Kind() != reflect.Pointer || p.IsNil() {
		return fmt.Errorf("singlefill: Raw needs a pointer, not %T", v)
	}
	switch to := p.Elem(); {
	case isString(to.Type()):
		to.SetString(string(data))
	case isBytes(to.Type()):
		to.SetBytes(append([]byte{}, data...))
	default:
		return fmt.Errorf("singlefill: Raw takes []byte or string, not %v", to.Type())
	}
	return nil
}

func (rawCodec) Within(most int64, data []byte, _ any) error {
	if int64(len(data)) > most {
		return fmt.Errorf("%d bytes are more than %d", len(data), most)
	}
	return nil
}

func isString(typ reflect.Type) bool { return typ != nil && typ.Kind() == reflect.String }

func isBytes(typ reflect.Type) bool {
	return typ != nil && typ.Kind() == reflect.Slice && typ.Elem().Kind() == reflect.Uint8
}

// Own reports whether c is a codec of this package. The values that it decodes are trees and share
// nothing, except for types that decode themselves.
func Own(c any) bool {
	switch c.(type) {
	case msgPackCodec, jsonCodec, rawCodec:
		return true
	}
	return false
}

// Takes returns an error if c is a codec of this package that cannot store values of typ, or keeps
// nothing of them.
func Takes(c any, typ reflect.Type) error {
	if _, raw := c.(rawCodec); raw && !isString(typ) && !isBytes(typ) {
		return fmt.Errorf("singlefill: Options.Codec Raw takes []byte or string, not %v", typ)
	}
	if j := judgeOf(c); j != nil {
		return j.check(typ)
	}
	return nil
}
