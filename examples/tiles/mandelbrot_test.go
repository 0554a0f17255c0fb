package main

import (
	"bytes"
	"image/color"
	"image/png"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

func TestParseCoordinates_Accepted(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]coordinates{
		"0/0/0":                      {0, 0, 0},
		"1/1/0":                      {1, 1, 0},
		"5/12/9":                     {5, 12, 9},
		"30/1073741823/1073741823":   {30, 1<<30 - 1, 1<<30 - 1},
		"0005/012/00000000000000009": {5, 12, 9},
	} {
		got, err := parseCoordinates(text)
		if got != want || err != nil {
			t.Errorf("%s: %v, %v", text, got, err)
		}
		if again, err := parseCoordinates(got.String()); again != want || err != nil {
			t.Errorf("%s, written as %s: %v, %v", text, got, again, err)
		}
	}
}

// The picture shows which points are in the set.
func TestRender_Set(t *testing.T) {
	t.Parallel()
	data, err := render(t.Context(), coordinates{0, 0, 0})
	redistest.Must(t, err)
	img, err := png.Decode(bytes.NewReader(data))
	redistest.Must(t, err)
	at := func(c complex128) color.Color { // 64 pixels to 1
		return color.RGBAModel.Convert(img.At(int((real(c)+2.5)*64), int((2-imag(c))*64)))
	}
	black := color.RGBAModel.Convert(shadeOf(-1))
	for _, c := range []complex128{0, -1, -0.2 + 0.3i, -0.12 - 0.74i} {
		if got := at(c); got != black {
			t.Errorf("%v is in the set, and is %v", c, got)
		}
	}
	for _, c := range []complex128{1, -2.2, 1i + 0.5, -2i} {
		if got := at(c); got == black {
			t.Errorf("%v is not in the set, and is black", c)
		}
	}
}
