package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"math"
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

// The map begins where a visitor who only zooms in sees something at every level: less than a third
// of the view is the black inside of the set, and the shades of neighbouring points differ.
func TestStart_EveryZoom(t *testing.T) {
	t.Parallel()
	script, err := pageFiles.ReadFile("page/map.js")
	if err != nil {
		t.Fatal(err)
	}
	var x, y float64
	var zoom int
	_, line, _ := strings.Cut(string(script), "\nconst start = ")
	if _, err := fmt.Sscanf(line, "{x: %g, y: %g, zoom: %d};", &x, &y, &zoom); err != nil {
		t.Fatalf("no start in map.js: %v", err)
	}
	const width, height, apart = 910, 800, 6 // pixels
	for z := zoom; z <= maxZoom; z++ {
		pixel := 4 / math.Ldexp(tileSize, z)
		shade := func(right, down int) color.RGBA {
			return shadeOf(escape(4*x-2.5+pixel*float64(right), 2-4*y-pixel*float64(down), 300+40*z))
		}
		points, black, edges := 0, 0, 0
		for right := -width / 2; right < width/2; right += 2 * apart {
			for down := -height / 2; down < height/2; down += 2 * apart {
				points++
				here := shade(right, down)
				if here == shadeOf(-1) {
					black++
				}
				if math.Abs(float64(here.R)-float64(shade(right+apart, down).R)) > 12 {
					edges++
				}
			}
		}
		if black*3 > points || edges*20 < points {
			t.Errorf("at zoom level %d: of %d points %d are black, and %d lie at an edge", z, points, black, edges)
		}
	}
}
