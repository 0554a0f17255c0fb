package codec

import (
	"fmt"
	"slices"

	"github.com/singlefill/singlefill/internal/entry"
)

// Formats are what a cache knows of the formats of its codec.
type Formats struct {
	Written entry.Format
	read    []entry.Format
	name    string
}

// FormatsOf returns the formats of a codec. A codec without names has the empty one.
func FormatsOf(c any) Formats {
	names := []string{""}
	if f, ok := c.(interface{ Formats() []string }); ok {
		if said := f.Formats(); len(said) > 0 {
			names = said
		}
	}
	f := Formats{Written: entry.FormatOf(names[0]), name: names[0]}
	for _, name := range names {
		f.read = append(f.read, entry.FormatOf(name))
	}
	return f
}

// Check returns an error if an entry names a format that the codec does not read.
func (f *Formats) Check(found entry.Format) error {
	if found == 0 || slices.Contains(f.read, found) {
		return nil
	}
	by := quoted(NameOf(found))
	if NameOf(found) == "" && found != entry.FormatOf("") {
		by = fmt.Sprintf("a codec with format %#04x", uint16(found))
	}
	return fmt.Errorf("singlefill: %s has written the entry, and Options.Codec is %s", by, quoted(f.name))
}

// NameOf returns the name of a format of this repository, or nothing.
func NameOf(f entry.Format) string {
	for _, name := range []string{"msgpack", "json", "raw", "zstd+msgpack", "zstd+json", "zstd+raw"} {
		if entry.FormatOf(name) == f {
			return name
		}
	}
	return ""
}

func quoted(name string) string {
	if name == "" {
		return "a codec without Formats"
	}
	return fmt.Sprintf("codec %q", name)
}

func (msgPackCodec) Formats() []string { return []string{"msgpack"} }
func (jsonCodec) Formats() []string    { return []string{"json"} }
func (rawCodec) Formats() []string     { return []string{"raw"} }
