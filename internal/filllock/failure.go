package filllock

import (
	"strings"
	"unicode/utf8"
)

// The failure record is what a failed load leaves in the lock key for the processes that waited for
// it: a letter, then text.
const (
	NotFoundRecord = "N" // the source has no such value, and that is not stored
	errorLetter    = "E" // then the text
	namedLetter    = "S" // then the name of a sentinel error or "", perhaps noStale, a zero byte, and the text
	noStale        = "\x01"
	maxText        = 1024
)

// A Failure is what processes tell each other of an error.
type Failure struct {
	Name    string // of the sentinel error that it wraps, without control characters, or ""
	Text    string
	NoStale bool // no old value may be served in its place
}

// Record returns the record of a failure. The text is cut to 1 KiB at a character boundary.
func (f Failure) Record() string {
	text := f.Text
	if len(text) > maxText {
		cut := maxText
		for cut > maxText-utf8.UTFMax && !utf8.RuneStart(text[cut]) {
			cut--
		}
		text = text[:cut]
	}
	name := f.Name
	if f.NoStale {
		name += noStale
	}
	if name != "" {
		return namedLetter + name + "\x00" + text
	}
	return errorLetter + text
}

// ParseFailure returns the failure of a record.
func ParseFailure(record string) (f Failure) {
	named, ok := strings.CutPrefix(record, namedLetter)
	if !ok {
		return Failure{Text: strings.TrimPrefix(record, errorLetter)}
	}
	f.Name, f.Text, _ = strings.Cut(named, "\x00")
	f.Name, f.NoStale = strings.CutSuffix(f.Name, noStale)
	return f
}
