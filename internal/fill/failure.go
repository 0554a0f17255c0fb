package fill

import (
	"strings"
	"unicode/utf8"
)

// The failure record is what a failed load leaves in the lock key for the processes that waited for
// it: a letter, then text.
const (
	NotFoundRecord = "N" // the source has no such value, and that is not stored
	errorLetter    = "E"
	maxText        = 1024
)

// FailureRecord returns the record of an error's text, cut to 1 KiB at a character boundary.
func FailureRecord(text string) string {
	if len(text) > maxText {
		cut := maxText
		for cut > maxText-utf8.UTFMax && !utf8.RuneStart(text[cut]) {
			cut--
		}
		text = text[:cut]
	}
	return errorLetter + text
}

// FailureText returns the text of a FailureRecord.
func FailureText(failure string) string { return strings.TrimPrefix(failure, errorLetter) }
