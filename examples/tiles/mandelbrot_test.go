package main

import (
	"bytes"
	"context"
	"errors"
	"image"
	"image/color"
	"image/png"
	"strings"
	"testing"
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

// badCoordinates maps bad coordinates to what the error says about them.
var badCoordinates = map[string]string{
	"":                               "z/x/y is allowed",
	"5/12":                           "z/x/y is allowed",
	"5/12/9/1":                       "z/x/y is allowed",
	"a/b/c":                          "three whole numbers",
	"5/12/9.png":                     "three whole numbers",
	"5/+12/9":                        "three whole numbers",
	"5/-1/9":                         "three whole numbers",
	"5/0x1/9":                        "three whole numbers",
	"5/ 1/9":                         "three whole numbers",
	"5/1e1/9":                        "three whole numbers",
	"5/99999999999999999999/9":       "three whole numbers",
	"31/0/0":                         "0 to 30 is allowed",
	"0/1/0":                          "0 to 0 are allowed",
	"5/32/0":                         "0 to 31 are allowed",
	"5/0/32":                         "0 to 31 are allowed",
	"18446744073709551615/0/0":       "0 to 30 is allowed",
	strings.Repeat("1", 1000) + "/0": "z/x/y is allowed",
}

func TestParseCoordinates_Refused(t *testing.T) {
	t.Parallel()
	for text, want := range badCoordinates {
		got, err := parseCoordinates(text)
		if err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 200 {
			t.Errorf("%.50q: %v, %v; want %q", text, got, err, want)
		}
	}
}

func TestRender_Deterministic(t *testing.T) {
	t.Parallel()
	at := coordinates{6, 5, 30}
	first, err := render(t.Context(), at)
	if err != nil {
		t.Fatal(err)
	}
	second, err := render(t.Context(), at)
	if err != nil || !bytes.Equal(first, second) {
		t.Errorf("two pictures of tile %v differ, %v", at, err)
	}
	img, err := png.Decode(bytes.NewReader(first))
	if err != nil || img.Bounds() != image.Rect(0, 0, 256, 256) {
		t.Errorf("%v, %v", img.Bounds(), err)
	}
}

func TestRender_Set(t *testing.T) {
	t.Parallel()
	data, err := render(t.Context(), coordinates{0, 0, 0})
	if err != nil {
		t.Fatal(err)
	}
	img, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
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

func TestRender_Context(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(nil)
	if _, err := render(ctx, coordinates{0, 0, 0}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
