package codec

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net/netip"
	"net/url"
	"reflect"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

type (
	uuid [4]byte // like google/uuid's: an array, with text and binary methods

	Stamped struct {
		time.Time
		Note string
	}
	Identified struct {
		uuid
		Amount int
	}
	At struct {
		netip.Addr
		Port uint16
	}
	Link      struct{ *url.URL }
	Named     struct{ Stamped }
	Wrapped   struct{ time.Time }
	WrappedBy struct {
		Wrapped
		By string
	}
	DropsBeside struct {
		time.Time
		Note string `msgpack:"-" json:"-"`
		note string
	}
	Tagged struct {
		At   time.Time `msgpack:"at" json:"at"`
		Note string
	}
	Two struct {
		time.Time
		*big.Int
		Note string
	}

	// OwnTime encodes all of itself, though what it embeds has methods, too.
	OwnTime struct {
		time.Time
		Note string
	}
	OwnLink struct{ *url.URL }
	// Generic has the methods of what it embeds, and Owned its own ones.
	Generic[T any] struct {
		time.Time
		Value T
	}
	Owned[T any] struct {
		time.Time
		Value T
	}

	// Pointed has methods with pointer receivers only.
	Pointed struct{ n int }
	// Receives can be decoded from the bytes to which it is encoded without its method.
	Receives struct{ N int }
	Holder   struct{ In [1]Pointed }
	Color    int
	// Level and Computed have no method to decode.
	Level    int
	Computed struct{ N int }
	// These have no method to encode. Kind and Odd refuse their zeros; MsgPack has a decoder for Registered.
	Duration   struct{ time.Duration }
	Grade      int
	Kind       string
	Blob       struct{ N int }
	Tags       []string
	Odd        int
	Registered int
	Interned   struct {
		Note string `msgpack:",intern"`
	}
)

func (u uuid) MarshalText() ([]byte, error)   { return fmt.Appendf(nil, "%x", u[:]), nil }
func (u uuid) MarshalBinary() ([]byte, error) { return u[:], nil }
func (u *uuid) UnmarshalText(text []byte) error {
	_, err := hex.Decode(u[:], text)
	return err
}
func (u *uuid) UnmarshalBinary(data []byte) error {
	if len(data) != len(u) {
		return errors.New("wrong length")
	}
	copy(u[:], data)
	return nil
}

func ownText(at time.Time, v any) ([]byte, error) {
	return fmt.Appendf(nil, "%d %v", at.Unix(), v), nil
}
func ownFrom(text []byte, at *time.Time, v any) error {
	var unix int64
	_, err := fmt.Sscan(string(text), &unix, v)
	*at = time.Unix(unix, 0).UTC()
	return err
}

func (o OwnTime) MarshalBinary() ([]byte, error)  { return ownText(o.Time, o.Note) }
func (o *OwnTime) UnmarshalBinary(b []byte) error { return ownFrom(b, &o.Time, &o.Note) }
func (o OwnTime) MarshalJSON() ([]byte, error)    { return json.Marshal(Tagged{o.Time, o.Note}) }
func (o *OwnTime) UnmarshalJSON(b []byte) error {
	var t Tagged
	err := json.Unmarshal(b, &t)
	o.Time, o.Note = t.At, t.Note
	return err
}
func (o Owned[T]) MarshalBinary() ([]byte, error)  { return ownText(o.Time, o.Value) }
func (o *Owned[T]) UnmarshalBinary(b []byte) error { return ownFrom(b, &o.Time, &o.Value) }
func (o Owned[T]) MarshalJSON() ([]byte, error)    { return json.Marshal([]any{o.Unix(), o.Value}) }
func (o *Owned[T]) UnmarshalJSON(b []byte) error {
	var unix int64
	err := json.Unmarshal(b, &[]any{&unix, &o.Value})
	o.Time = time.Unix(unix, 0).UTC()
	return err
}
func (l OwnLink) MarshalText() ([]byte, error) { return []byte(l.String()), nil }
func (l *OwnLink) UnmarshalText(text []byte) (err error) {
	l.URL, err = url.Parse(string(text))
	return err
}
func (l *OwnLink) UnmarshalBinary(data []byte) error { return l.UnmarshalText(data) }

func (p *Pointed) MarshalText() ([]byte, error) { return fmt.Append(nil, p.n), nil }
func (p *Pointed) UnmarshalText(text []byte) error {
	_, err := fmt.Sscan(string(text), &p.n)
	return err
}
func (r *Receives) MarshalJSON() ([]byte, error)          { return fmt.Appendf(nil, `{"N":%d}`, r.N), nil }
func (r Receives) EncodeMsgpack(e *msgpack.Encoder) error { return e.EncodeInt(int64(r.N)) }
func (r *Receives) DecodeMsgpack(d *msgpack.Decoder) (err error) {
	r.N, err = d.DecodeInt()
	return err
}

func (Level) MarshalText() ([]byte, error) { return []byte("low"), nil }
func (c Computed) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, `{"N":%d,"Twice":%d}`, c.N, 2*c.N), nil
}

func (d *Duration) UnmarshalText(text []byte) (err error) {
	d.Duration, err = time.ParseDuration(string(text))
	return err
}
func (g *Grade) UnmarshalText(text []byte) error {
	_, err := fmt.Sscan(string(text), (*int)(g))
	return err
}
func (k *Kind) UnmarshalText(text []byte) error {
	if *k = Kind(text); *k != "song" {
		return errors.New("unknown kind")
	}
	return nil
}
func (b *Blob) UnmarshalBinary(data []byte) error { return json.Unmarshal(data, &b.N) }
func (o *Odd) UnmarshalJSON(data []byte) error {
	err := json.Unmarshal(data, (*int)(o))
	if err == nil && *o%2 == 0 {
		err = errors.New("not odd")
	}
	return err
}
func (o *Odd) UnmarshalMsgpack(data []byte) error {
	return o.UnmarshalJSON([]byte{'0' + data[len(data)-1]})
}
func (*Registered) UnmarshalText([]byte) error { return errors.New("not called") }
func (*Tags) UnmarshalText([]byte) error       { return nil }

func (c Color) MarshalText() ([]byte, error) { return []byte([]string{"", "red"}[c]), nil }
func (c *Color) UnmarshalText(text []byte) error {
	*c = Color(len(text) / 3)
	return nil
}

// Takes refuses a struct that a codec stores by the methods of its embedded field alone, what has no method in a
// map, and keys that change; and nothing that comes back.
func TestTakes_Methods(t *testing.T) {
	at := time.Unix(1700000000, 0).UTC()
	link, err := url.Parse("https://example.com/a?b=c")
	if err != nil {
		t.Fatal(err)
	}
	msgpack.Register(Registered(0),
		func(e *msgpack.Encoder, v reflect.Value) error { return e.EncodeInt(v.Int()) },
		func(d *msgpack.Decoder, v reflect.Value) error {
			n, err := d.DecodeInt64()
			v.SetInt(n)
			return err
		})
	id, addr := uuid{1, 2, 3, 4}, netip.MustParseAddr("10.0.0.1")
	const both, fits = "MsgPack JSON", ""
	for _, c := range []struct {
		v               any
		refusedBy, part string
	}{
		{Stamped{at, "x"}, both, "T.Note, of type string"},
		{&Stamped{at, "x"}, both, "T.Note"},
		{map[string][]Stamped{"": {{at, "x"}}}, both, "T[][].Note"},
		{Named{Stamped{at, "x"}}, both, "T.Stamped.Note"},
		{Identified{id, 1}, both, "T.Amount, of type int"},
		{At{addr, 80}, both, "T.Port, of type uint16"},
		{WrappedBy{Wrapped{at}, "x"}, both, "T.By, of type string"},
		{Link{link}, "MsgPack", "T.URL, of type *url.URL"},
		{struct {
			*url.URL
			N int
		}{link, 1}, "MsgPack", "T.URL, of type *url.URL"},
		{struct {
			*time.Time
			N int
		}{&at, 1}, both, "T.Time, of type *time.Time"},
		{struct{ Links []Link }{[]Link{{link}}}, "MsgPack", "T.Links[].URL, of type *url.URL"},
		{Generic[int]{at, 1}, both, "T.Value, of type int"},
		{Two{at, big.NewInt(1), "x"}, both, "T."},
		{map[string]Pointed{"": {1}}, both, "T[], of type codec.Pointed"},
		{map[string]Holder{"": {[1]Pointed{{1}}}}, both, "T[].In[], of type codec.Pointed"},
		{map[string]big.Int{"": *big.NewInt(1)}, both, "T[], of type big.Int"},
		{map[any]int{1: 1}, both, ""},
		{map[[1]any]int{{1}: 1}, both, ""},
		{map[struct{ K any }]int{{1}: 1}, both, ""},
		{map[[2]int]string{{1, 2}: "x"}, "JSON", ""},
		{map[bool]string{true: "x"}, "JSON", ""},
		{Level(1), both, "it: "},
		{map[string][]Level{"": {1}}, both, "T[][], of type codec.Level"},
		{Computed{N: 1}, fits, ""},
		{struct{ Length Duration }{Duration{time.Minute}}, both, "T.Length, of type codec.Duration"},
		{struct{ Duration }{Duration{time.Minute}}, both, "it: "},
		{map[string][]Grade{"": {1}}, both, "T[][], of type codec.Grade"},
		{map[Grade]int{1: 1}, "MsgPack", "T[key], of type codec.Grade"},
		{struct {
			M map[Grade]int
			G Grade
		}{map[Grade]int{1: 1}, 1}, both, "of type codec.Grade"},
		{Blob{1}, "MsgPack", "it: "},
		{[]Kind{"song"}, fits, ""},
		{map[Kind]Kind{"song": "song"}, fits, ""},
		{[]Registered{1}, "JSON", "T[], of type codec.Registered"},
		{[]Odd{1}, fits, ""},
		{Tags(nil), fits, ""},
		{[]Interned{{"xxxx"}, {"xxxx"}}, "MsgPack", "T[].Note, of type string"},
		{map[positive]int{1: 1}, fits, ""},
		{map[Color]int{1: 1}, fits, ""},
		{map[uuid]int{id: 1}, fits, ""},
		{map[netip.Addr]int{addr: 1}, fits, ""},
		{map[string]*Pointed{"": {1}}, fits, ""},
		{map[string][]Pointed{"": {{1}}}, fits, ""},
		{map[string]Receives{"": {1}}, fits, ""},
		{map[string]*big.Int{"": big.NewInt(1)}, fits, ""},
		{Wrapped{at}, fits, ""},
		{struct{ Wrapped }{Wrapped{at}}, fits, ""},
		{DropsBeside{Time: at}, fits, ""},
		{Tagged{at, "x"}, fits, ""},
		{OwnTime{at, "x"}, fits, ""},
		{OwnLink{link}, fits, ""},
		{Owned[int]{at, 1}, fits, ""},
		{map[string]Owned[string]{"": {at, "x"}}, fits, ""},
	} {
		testTakes(t, c.v, c.refusedBy, c.part, equalValues)
	}
	_ = DropsBeside{note: ""}
}
