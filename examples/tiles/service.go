package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
)

// A Tile is what the cache holds.
type Tile struct {
	PNG     []byte
	Process string // the name of the process that computed it
	Took    time.Duration
}

// requestTimeout is longer than a busy machine needs for the tiles of one view.
const requestTimeout = 25 * time.Second

type service struct {
	name   string
	tiles  *singlefill.Cache[Tile]
	render func(ctx context.Context, at coordinates) ([]byte, error)
}

func newCache(rdb redis.UniversalClient, options *singlefill.Options[Tile]) (*singlefill.Cache[Tile], error) {
	return singlefill.New(rdb, "tiles", time.Minute, options)
}

func cacheOptions(trace *singlefill.Trace) *singlefill.Options[Tile] {
	return &singlefill.Options[Tile]{
		// A button of the page clears a zoom level.
		Tags: func(tile string, _ Tile) []string {
			zoom, _, _ := strings.Cut(tile, "/")
			return []string{zoomTag(zoom)}
		},
		// An expired tile is served at once, and computed again in the background.
		StaleWhileRevalidate: 5 * time.Minute,
		// A process that has shown a tile keeps it in memory. No code changes a Tile, so requests share it.
		Near: &singlefill.Near{Share: true},
		// A load keeps a processor busy, and the embedded Redis may have to wait for one.
		MaxLoads:     max(1, runtime.GOMAXPROCS(0)/processes),
		RedisTimeout: 1500 * time.Millisecond,
		Trace:        trace,
	}
}

func zoomTag(zoom string) string { return "zoom:" + zoom }

// clear answers POST /clear/z: all tiles of a zoom level are computed again, also those that are being
// computed now.
func (s *service) clear(w http.ResponseWriter, r *http.Request) {
	zoom, err := strconv.ParseUint(r.PathValue("zoom"), 10, 8)
	if err != nil || zoom > maxZoom {
		http.Error(w, fmt.Sprintf("zoom %.100q: 0 to %d is allowed", r.PathValue("zoom"), maxZoom), http.StatusBadRequest)
		return
	}
	if err := s.tiles.DeleteTag(r.Context(), zoomTag(strconv.FormatUint(zoom, 10))); err != nil {
		log.Printf("clear of zoom level %d: %v", zoom, err)
		http.Error(w, "some tiles may be left, try again", http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// tile answers GET /tiles/z/x/y.
func (s *service) tile(w http.ResponseWriter, r *http.Request) {
	at, err := parseCoordinates(r.PathValue("tile"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
	defer cancel()
	tile, err := s.tiles.GetOrLoad(ctx, at.String(), func(ctx context.Context, _ string) (Tile, error) {
		begun := time.Now()
		picture, err := s.render(ctx, at)
		return Tile{picture, s.name, time.Since(begun)}, err
	})
	switch {
	case err == nil:
		w.Header().Set("Content-Type", "image/png")
		w.Header().Set("Cache-Control", "no-store") // otherwise the browser would not ask the fleet again
		w.Header().Set("Tile-Process", tile.Process)
		w.Header().Set("Tile-Took", strconv.FormatInt(tile.Took.Milliseconds(), 10))
		_, _ = w.Write(tile.PNG)
	case errors.Is(err, context.DeadlineExceeded): // the load goes on, and a later request finds its value
		http.Error(w, "this takes too long, try again", http.StatusGatewayTimeout)
	case r.Context().Err() != nil: // the client has left
	default:
		log.Printf("tile %s: %v", at, err)
		http.Error(w, "something went wrong", http.StatusInternalServerError)
	}
}
