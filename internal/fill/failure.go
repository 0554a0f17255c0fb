package fill

import (
	"strings"
	"unicode/utf8"
)

// A word is what a load that brought no value leaves in the lock key, for those who have waited for it in other
// processes: a letter, then text.
const (
	NotFoundRecord = "N" // the source has no such thing, and that is not remembered
	errorLetter    = "E"
	maxText        = 1024
)

// FailureRecord makes the word for an error's text, cut to 1 KiB at the edge of a character.
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

// FailureText returns the text of an ErrorWord.
func FailureText(word string) string { return strings.TrimPrefix(word, errorLetter) }
