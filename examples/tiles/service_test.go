package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/singlefilltest"
)

func TestMain(m *testing.M) {
	if _, child := os.LookupEnv(taskEnv); child { // the processes of the fleet run this program
		main()
		return
	}
	redistest.Main(m)
}

const testPort = 9999 // of a page that is not served

// A peer is one process of a fleet, inside the test.
type peer struct {
	name, url string
	stats     func() singlefill.Stats
}

func startPeer(t *testing.T, rdb redis.UniversalClient, name string,
	render func(context.Context, coordinates) ([]byte, error)) peer {
	t.Helper()
	feed := newFeed()
	options := cacheOptions(feed.trace())
	options.Codec = singlefilltest.Codec(t, nil)
	options.RedisTimeout, options.LockTTL = 9*time.Second, 29*time.Second // a machine that stands still is no dead Redis
	tiles, err := newCache(rdb, options)
	redistest.Must(t, err)
	t.Cleanup(func() { tiles.Close() })
	s := &service{name: name, tiles: tiles, render: render}
	h := httptest.NewServer(s.handler(feed, testPort))
	t.Cleanup(h.Close)
	t.Cleanup(h.CloseClientConnections)
	return peer{name, h.URL, tiles.Stats}
}

func get(t *testing.T, url string, header ...string) (*http.Response, string) {
	t.Helper()
	return do(t, http.MethodGet, url, header...)
}

// do fails the test without ending it if there is no answer.
func do(t *testing.T, method, url string, header ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Error(err)
		return new(http.Response), ""
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	if host := req.Header.Get("Host"); host != "" {
		req.Host = host
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Error(err)
		return new(http.Response), ""
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
	}
	return resp, string(body)
}

func TestService_ThreeProcesses(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var computed atomic.Int64
	finish := make(chan struct{})
	var fleet []peer
	for i := range processes {
		fleet = append(fleet, startPeer(t, server.Client(t), fmt.Sprint("process ", i), func(_ context.Context, at coordinates) ([]byte, error) {
			computed.Add(1)
			<-finish
			return []byte("picture of " + at.String()), nil
		}))
	}
	const each = 5
	var by sync.Map
	var asking sync.WaitGroup
	for _, s := range fleet {
		for range each {
			asking.Go(func() {
				resp, body := get(t, s.url+"/tiles/5/012/9")
				if resp.StatusCode != http.StatusOK || body != "picture of 5/12/9" || resp.Header.Get("Content-Type") != "image/png" {
					t.Errorf("%s: %q, %v", resp.Status, body, resp.Header)
				}
				by.Store(resp.Header.Get("Tile-Process"), true)
			})
		}
	}
	redistest.Await(t, "one computes, and others have looked", func() bool { return computed.Load() > 0 && server.Calls("get") >= processes })
	close(finish)
	asking.Wait()
	if n := computed.Load(); n != 1 {
		t.Errorf("the tile was computed %d times", n)
	}
	for _, s := range fleet {
		wanted := int64(0)
		if _, ok := by.Load(s.name); ok {
			wanted = 1
		}
		if n := s.stats().Loads; n != wanted {
			t.Errorf("%s has counted %d loads, and the answers name it %d times", s.name, n, wanted)
		}
	}
}

// A zoom level is cleared for all processes, and only by the page.
func TestService_Clear(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	var computed atomic.Int64
	draw := func(context.Context, coordinates) ([]byte, error) {
		computed.Add(1)
		return []byte("picture"), nil
	}
	a, b := startPeer(t, rdb, "a", draw), startPeer(t, rdb, "b", draw)
	page := []string{"Origin", fmt.Sprintf("http://localhost:%d", testPort)}
	clear := func(zoom string, want int, header ...string) {
		t.Helper()
		if resp, body := do(t, http.MethodPost, a.url+"/clear/"+zoom, header...); resp.StatusCode != want {
			t.Errorf("clear %s: %s %s, want %d", zoom, resp.Status, body, want)
		}
	}
	clear("1", http.StatusNoContent, page...) // the first one clears everything
	for _, tile := range []string{"/tiles/1/0/0", "/tiles/1/1/0", "/tiles/2/0/0"} {
		get(t, b.url+tile)
	}
	clear("1", http.StatusForbidden)
	clear("1", http.StatusForbidden, "Origin", "http://elsewhere.example")
	clear("99", http.StatusBadRequest, page...)
	clear("x", http.StatusBadRequest, page...)
	clear("1", http.StatusNoContent, page...)
	redistest.Await(t, "each tile of the level is computed once more", func() bool {
		for _, tile := range []string{"/tiles/1/0/0", "/tiles/1/1/0", "/tiles/2/0/0"} {
			get(t, b.url+tile)
		}
		return computed.Load() == 5
	})
}

func TestService_WithoutRedis(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	server.Kill()
	s := startPeer(t, server.Client(t), "8080", func(context.Context, coordinates) ([]byte, error) { return []byte("picture"), nil })
	if resp, body := get(t, s.url+"/tiles/0/0/0"); resp.StatusCode != http.StatusOK || body != "picture" {
		t.Errorf("%s %s", resp.Status, body)
	}
	if stats := s.stats(); stats.LoadsUnlocked != 1 || stats.RedisErrors == 0 {
		t.Errorf("%+v", stats)
	}
}

// A listener reads server-sent events, as a browser does.
type listener struct {
	t     *testing.T
	lines *bufio.Scanner
	stop  context.CancelFunc
	id    string // of the last event with an id
}

func listen(t *testing.T, url, lastID string) *listener {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(stop)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	redistest.Must(t, err)
	if lastID != "" {
		req.Header.Set("Last-Event-ID", lastID)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	redistest.Must(t, err)
	t.Cleanup(func() { resp.Body.Close() })
	if kind := resp.Header.Get("Content-Type"); resp.StatusCode != http.StatusOK || kind != "text/event-stream" {
		t.Fatalf("%s, %s", resp.Status, kind)
	}
	return &listener{t: t, lines: bufio.NewScanner(resp.Body), stop: stop, id: lastID}
}

// next returns the next event for which wanted reports true. It skips the events before. A stream has no
// end, so next closes it after a minute.
func next[E any](l *listener, what string, wanted func(E) bool) E {
	l.t.Helper()
	defer time.AfterFunc(time.Minute, l.stop).Stop()
	for l.lines.Scan() {
		line := l.lines.Text()
		if id, ok := strings.CutPrefix(line, "id: "); ok {
			l.id = id
		}
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			var e E
			if err := json.Unmarshal([]byte(data), &e); err != nil {
				l.t.Fatalf("%s: %v", data, err)
			}
			if wanted(e) {
				return e
			}
		}
	}
	l.t.Fatalf("the stream ended before %s: %v", what, l.lines.Err())
	panic("not reached")
}

func TestFeed_Events(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	s := startPeer(t, rdb, "8080", func(context.Context, coordinates) ([]byte, error) { return []byte("picture"), nil })
	events := listen(t, s.url+"/events", "")
	next(events, "stats at the beginning", func(c count) bool { return c.Kind == "stats" && c.Stats == singlefill.Stats{} })
	get(t, s.url+"/tiles/5/12/9")
	next(events, "the load", func(e event) bool { return e.Kind == "load" && e.Tile == "5/12/9" && !e.Unlocked && e.At > 0 })
	next(events, "its count", func(c count) bool { return c.Kind == "stats" && c.Stats.Loads == 1 && c.Stats.Hits == 0 })
	get(t, s.url+"/tiles/5/12/9")
	next(events, "the hit", func(c count) bool { return c.Kind == "stats" && c.Stats.Loads == 1 && c.Stats.Hits == 1 })
	events.stop()

	get(t, s.url+"/tiles/5/13/9")
	isLoad := func(e event) bool { return e.Kind == "load" }
	again := listen(t, s.url+"/events", events.id)
	if e := next(again, "the load since", isLoad); e.Tile != "5/13/9" {
		t.Errorf("who comes again hears of %s once more", e.Tile)
	}
	for _, id := range []string{"", "another process/1", "nonsense"} {
		late := listen(t, s.url+"/events", id)
		if e := next(late, "the first load", isLoad); e.Tile != "5/12/9" {
			t.Errorf("with id %q one hears of %s first", id, e.Tile)
		}
	}
}
