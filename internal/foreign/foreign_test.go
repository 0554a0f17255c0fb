package foreign

import (
	"errors"
	"io"
	"testing"
)

type (
	code     int
	stringer struct{ text string }
	failure  struct{ text string }
	vector   struct{ with any }
)

func (s *stringer) String() string { return s.text }
func (f *failure) Error() string   { return f.text }
func (vector) Error() string       { return "a vector" }

// Text shows what the runtime shows of a panic, and the type of everything else.
func TestText(t *testing.T) {
	endless := map[string]any{}
	endless["self"] = endless
	for want, v := range map[string]any{
		"EOF":                       io.EOF,
		"a failure":                 &failure{"a failure"},
		"a stringer":                &stringer{"a stringer"},
		"a text":                    "a text",
		"7":                         code(7),
		"1.5":                       1.5,
		"(1+2i)":                    1 + 2i,
		"true":                      true,
		"(*foreign.failure)":        (*failure)(nil),
		"(*foreign.stringer)":       (*stringer)(nil),
		"(map[string]interface {})": endless,
		"([]int)":                   []int{1},
		"(<nil>)":                   nil,
	} {
		if got := Text(v); got != want {
			t.Errorf("Text is %q, want %q", got, want)
		}
	}
}

// Is finds what errors.Is finds, and nothing where that panics.
func TestIs(t *testing.T) {
	if !Is(errors.Join(errors.New("no"), io.EOF), io.EOF) || Is(io.EOF, io.ErrUnexpectedEOF) {
		t.Error("Is differs from errors.Is")
	}
	if Is(vector{[]int{1}}, vector{[]int{1}}) {
		t.Error("errors that cannot be compared are the same")
	}
}
