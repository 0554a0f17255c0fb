package main

import (
	"bytes"
	"context"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"math"
	"strconv"
	"strings"
)

const (
	tileSize = 256
	maxZoom  = 30 // a dozen levels deeper, neighbouring samples would be the same float64
	samples  = 3  // of each pixel, in each direction
)

// Coordinates name a tile as in other maps: at zoom level Z the world is 2^Z tiles wide and high.
type coordinates struct{ Z, X, Y uint64 }

func (c coordinates) String() string { return fmt.Sprintf("%d/%d/%d", c.Z, c.X, c.Y) }

// parseCoordinates parses z/x/y, and returns an error if the tile does not exist.
func parseCoordinates(text string) (c coordinates, err error) {
	parts := strings.Split(text, "/")
	if len(parts) != 3 {
		return c, fmt.Errorf("tile %.100q: z/x/y is allowed", text)
	}
	for i, part := range []*uint64{&c.Z, &c.X, &c.Y} {
		if *part, err = strconv.ParseUint(parts[i], 10, 64); err != nil {
			return c, fmt.Errorf("tile %.100q: three whole numbers, z/x/y, are allowed", text)
		}
	}
	if c.Z > maxZoom {
		return c, fmt.Errorf("tile %.100q: z is %d: 0 to %d is allowed", text, c.Z, maxZoom)
	}
	if last := uint64(1)<<c.Z - 1; c.X > last || c.Y > last {
		return c, fmt.Errorf("tile %.100q: at zoom level %d x and y of 0 to %d are allowed", text, c.Z, last)
	}
	return c, nil
}

// render returns a tile of the Mandelbrot set as PNG. It takes some tenths of a second of processor
// time.
func render(ctx context.Context, c coordinates) ([]byte, error) {
	// The world is the square from -2.5-2i to 1.5+2i.
	step := 4 / math.Ldexp(tileSize*samples, int(c.Z))
	left := -2.5 + 4*math.Ldexp(float64(c.X), -int(c.Z))
	top := 2 - 4*math.Ldexp(float64(c.Y), -int(c.Z))
	limit := 300 + 40*int(c.Z) // deeper levels need more steps to tell which points are inside

	img := image.NewRGBA(image.Rect(0, 0, tileSize, tileSize))
	for y := range tileSize {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		for x := range tileSize {
			var r, g, b uint32
			for i := range samples * samples {
				re := left + step*(float64(x*samples+i%samples)+0.5)
				im := top - step*(float64(y*samples+i/samples)+0.5)
				shade := shadeOf(escape(re, im, limit))
				r, g, b = r+uint32(shade.R), g+uint32(shade.G), b+uint32(shade.B)
			}
			const n = samples * samples
			img.SetRGBA(x, y, color.RGBA{uint8(r / n), uint8(g / n), uint8(b / n), 255})
		}
	}
	var out bytes.Buffer
	err := png.Encode(&out, img)
	return out.Bytes(), err
}

// escape returns the number of steps of z = z² + c after which z is far away, with a fraction that
// makes colours smooth. It returns a negative number if z stays near for limit steps.
func escape(cr, ci float64, limit int) float64 {
	const far = 1 << 16 // the square of a distance
	var zr, zi, oldR, oldI float64
	for n, look := 1, 8; n <= limit; n++ {
		zr, zi = zr*zr-zi*zi+cr, 2*zr*zi+ci
		if d := zr*zr + zi*zi; d > far {
			return math.Max(0, float64(n)+1-math.Log2(math.Log2(d)/2))
		}
		if zr == oldR && zi == oldI {
			return -1 // z repeats itself for ever
		}
		if n == look {
			oldR, oldI, look = zr, zi, 2*look
		}
	}
	return -1
}

// shades are the colours, which repeat: the closer to the edge of the set, the more often.
var shades = makeShades([]color.RGBA{
	{0x10, 0x16, 0x24, 255}, {0x2b, 0x3d, 0x5c, 255}, {0x7d, 0x93, 0xad, 255}, {0xe9, 0xe4, 0xd6, 255},
	{0xa8, 0x9c, 0x8d, 255}, {0x45, 0x42, 0x4c, 255},
})

func makeShades(stops []color.RGBA) (all [1024]color.RGBA) {
	for i := range all {
		at := float64(i) / float64(len(all)) * float64(len(stops))
		from, to := stops[int(at)], stops[(int(at)+1)%len(stops)]
		part := at - math.Floor(at)
		part = part * part * (3 - 2*part)
		mix := func(a, b uint8) uint8 { return uint8(math.Round(float64(a) + part*(float64(b)-float64(a)))) }
		all[i] = color.RGBA{mix(from.R, to.R), mix(from.G, to.G), mix(from.B, to.B), 255}
	}
	return all
}

func shadeOf(steps float64) color.RGBA {
	if steps < 0 {
		return color.RGBA{0x0a, 0x0e, 0x16, 255}
	}
	return shades[int(math.Log2(1+steps)*150)%len(shades)]
}
