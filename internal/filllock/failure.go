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
	namedLetter    = "S" // then the name of a sentinel error, a zero byte, and the text
	maxText        = 1024
)

// FailureRecord returns the record of an error's text, cut to 1 KiB at a character boundary. name is
// the name of the sentinel error that the error wraps, without a zero byte, or "".
func FailureRecord(name, text string) string {
	if len(text) > maxText {
		cut := maxText
		for cut > maxText-utf8.UTFMax && !utf8.RuneStart(text[cut]) {
			cut--
		}
		text = text[:cut]
	}
	if name != "" {
		return namedLetter + name + "\x00" + text
	}
	return errorLetter + text
}

// ParseFailure returns the name and the text of a FailureRecord.
func ParseFailure(record string) (name, text string) {
	if named, ok := strings.CutPrefix(record, namedLetter); ok {
		name, text, _ = strings.Cut(named, "\x00")
		return name, text
	}
	return "", strings.TrimPrefix(record, errorLetter)
}
