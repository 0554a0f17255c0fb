// Package browser tests the page of examples/tiles in Chromium. It is a separate module, so that
// singlefill does not depend on the library that drives the browser. Its tests do not run in
// parallel: each keeps all processors busy.
package browser

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

func TestMap_KilledProcessAndRedis(t *testing.T) {
	chromium(t)
	f := startFleet(t, "-away=1h") // killed processes stay away
	p := openPage(t, f)

	// The page reads the visible tiles again, so there are hits without any action.
	seen := p.shown()
	f.await(t, "there are hits", func() bool { return f.sum().Hits > 0 })
	p.await("the page shows them", `[...document.querySelectorAll("dd[data-count=Hits]")].some(dd => Number(dd.textContent) > 0)`)
	p.await("the page shows hits in memory", `[...document.querySelectorAll("dd[data-count=NearHits]")].some(dd => Number(dd.textContent) > 0)`)
	p.click("#again") // from here on the actions below cause all requests

	// The page asks all processes for each tile, and one of them computes it.
	begin := p.text("place")
	look := func() { seen = append(seen, p.shown()...) }
	p.drag(-300, 120)
	look()
	p.wheel(500, 300, -120)
	look()
	p.press(kb.ArrowRight)
	look()
	p.press("-")
	look()
	f.await(t, "all is reported", f.settled)
	checkOnce(t, f.computed(0), seen)
	asked := evaluate[int64](p, `Number(document.getElementById("asked").textContent)`)
	if s := f.sum(); asked < 3*s.Loads || s.Waits == 0 {
		t.Errorf("not all were asked for each tile: the page has asked %d times, and the fleet has counted %+v", asked, s)
	}
	f.await(t, "the page has counted as many", func() bool { return p.text("computed") == fmt.Sprint(f.reported()) })
	if twice := p.text("twice"); twice != "0" {
		t.Errorf("the page says that %s tiles were computed twice", twice)
	}

	// The page asks one process for each tile. It gets the tiles that other processes have
	// computed.
	before := f.sum().Hits
	p.click("input[value=turn]")
	p.press("0")
	look()
	p.press("+") // from the whole set this leads to the start, not into the black centre
	look()
	if place := p.text("place"); place != begin {
		t.Errorf("the map began at %s, and is at %s", begin, place)
	}
	f.await(t, "all is reported", f.settled)
	checkOnce(t, f.computed(0), seen)
	f.await(t, "there are hits", func() bool { return f.sum().Hits > before })
	p.screenshot("fleet")
	p.checkConsole()

	// The map goes on when a process is killed.
	killed := f.ports[1]
	p.click("input[value=all]")
	p.kill(fmt.Sprint(killed))
	first := len(f.computed(0))
	p.zoomTo("zoom-in", "4")
	p.click("input[value=turn]")
	p.drag(200, 300)
	p.screenshot("without a process")
	for _, l := range f.computed(first) {
		if l.port == killed {
			t.Errorf("%d was killed, and computed %s", l.port, l.Tile)
		}
	}
	checkOnce(t, f.computed(0), nil)
	p.checkConsole(killed)

	// It also goes on when Redis is killed.
	p.click("input[value=all]")
	p.kill("redis")
	first = len(f.computed(0))
	p.zoomTo("zoom-in", "5")
	p.drag(-150, -100)
	f.await(t, "tiles are computed without Redis", func() bool {
		return slices.ContainsFunc(f.computed(first), func(l load) bool { return l.Unlocked })
	})
	p.await("the page shows it", `Number(document.getElementById("unlocked").textContent) > 0`)

	// Without the lock each process computes a tile, and the page counts that.
	f.await(t, "all is reported", f.settled)
	tiles := make(map[string]bool)
	for _, l := range f.computed(first) {
		tiles[l.Tile] = true
	}
	twice := len(f.computed(first)) - len(tiles)
	if twice == 0 {
		t.Error("no tile was computed twice")
	}
	f.await(t, fmt.Sprintf("the page says that %d were computed twice", twice), func() bool { return p.text("twice") == fmt.Sprint(twice) })

	// Commands failed, and no request.
	p.await("the page shows Redis errors", `[...document.querySelectorAll("dd[data-count=RedisErrors]")].some(dd => Number(dd.textContent) > 0)`)
	for id, want := range map[string]string{"failed": "0", "note-failed": "No request has failed."} {
		if got := p.text(id); got != want {
			t.Errorf("%s is %q, want %q", id, got, want)
		}
	}
	for _, id := range []string{"note-errors", "note-unlocked"} {
		if !evaluate[bool](p, fmt.Sprintf("document.getElementById(%q).checkVisibility()", id)) {
			t.Errorf("%s is not visible", id)
		}
	}
	p.screenshot("without Redis")
	p.checkConsole(killed)
}

// The page counts the requests that a killed process does not answer, and shows every tile.
func TestFailedRequests_KilledProcess(t *testing.T) {
	chromium(t)
	f := startFleet(t, "-away=500ms")
	p := openPage(t, f)
	killed := f.ports[1]
	for range 10 { // a process may have answered everything before it is dead
		asked := p.text("asked")
		p.click("#zoom-in")
		p.await("the page asks", fmt.Sprintf(`document.getElementById("asked").textContent !== %q`, asked))
		p.click(card(fmt.Sprint(killed)) + " button")
		p.awaitMap()
		p.await("the process is back", fmt.Sprintf("document.querySelector(%q)", card(fmt.Sprint(killed))+" button:enabled"))
		if p.text("failed") != "0" {
			break
		}
	}
	if p.text("failed") == "0" {
		t.Error("the page has counted no failed request")
	}
	p.checkConsole(killed)
}

func TestMap_ReturningProcessAndRedis(t *testing.T) {
	chromium(t)
	f := startFleet(t, "-away=500ms")
	p := openPage(t, f)
	killed := f.ports[2]
	for _, name := range []string{fmt.Sprint(killed), "redis"} {
		pid := fmt.Sprintf("document.querySelector(%q).textContent", card(name)+" .status")
		before := evaluate[string](p, pid)
		p.click(card(name) + " button")
		p.await(name+" is back", fmt.Sprintf("%s.startsWith('process') && %s !== %q", pid, pid, before))
	}
	p.await("all ask Redis", `!document.querySelector("article.down, article.trouble")`)

	// A new Redis is empty. Each tile is computed once more, and new tiles once.
	p.zoomTo("zoom-in", "4")
	f.await(t, "nothing is being computed", func() bool { return f.sum().Loading == 0 })
	first := len(f.computed(0))
	p.click("input[value=turn]")
	p.zoomTo("zoom-in", "5")
	seen := p.shown()
	p.drag(-300, 300)
	seen = append(seen, p.shown()...)
	f.await(t, "all is reported", func() bool {
		return f.sum().Loading == 0 && !slices.ContainsFunc(seen, func(tile string) bool { return !f.hasComputed(tile, first) })
	})
	checkOnce(t, f.computed(first), seen)
	f.await(t, "the process that was killed computes, too", func() bool {
		return slices.ContainsFunc(f.computed(first), func(l load) bool { return l.port == killed })
	})
	p.screenshot("all are back")
	p.checkConsole(killed)
}

// The button computes the shown level again, and no other one.
func TestMap_Clear(t *testing.T) {
	chromium(t)
	f := startFleet(t)
	p := openPage(t, f)
	f.await(t, "nothing is being computed", f.settled)
	p.click("#clear") // the first one clears every level
	p.awaitMap()
	p.zoomTo("zoom-in", "4")
	p.zoomTo("zoom-out", "3")
	f.await(t, "nothing is being computed", f.settled)
	first, seen := len(f.computed(0)), p.shown()
	p.click("#clear")
	f.await(t, "the level is computed again", func() bool {
		return f.settled() && !slices.ContainsFunc(seen, func(tile string) bool { return !f.hasComputed(tile, first) })
	})
	p.awaitMap()
	p.zoomTo("zoom-in", "4")
	for _, l := range f.computed(first) {
		if !strings.HasPrefix(l.Tile, "3/") {
			t.Errorf("%s was computed again", l.Tile)
		}
	}
	if n := p.text("twice"); n != "0" {
		t.Errorf("the page counts %s tiles as computed twice", n)
	}
	p.checkConsole()
}

// The counts of a process are on one line, and so is each of their labels, also with large numbers.
func TestCards_OneLine(t *testing.T) {
	chromium(t)
	p := openPage(t, startFleet(t))
	for _, width := range []int64{1024, 1280, 1400, 1920} {
		p.do(chromedp.EmulateViewport(width, 800))
		broken := evaluate[[]string](p, `(() => {
			for (const dd of document.querySelectorAll("article dd")) dd.textContent = "88888";
			const line = parseFloat(getComputedStyle(document.querySelector("article dt")).fontSize) * 2;
			const wraps = list => [...list.querySelectorAll("dt")].filter(dt => dt.offsetHeight >= line || dt.offsetTop !== list.querySelector("dt").offsetTop);
			const broken = [...document.querySelectorAll("aside dl")].flatMap(wraps).map(dt => dt.textContent);
			return broken.concat([...document.querySelectorAll("article")].filter(a => a.scrollWidth > a.clientWidth).map(a => a.dataset.name));
		})()`)
		p.screenshot(fmt.Sprint("cards at ", width))
		if len(broken) > 0 {
			t.Errorf("%d px: not on one line, or too wide: %v", width, broken)
		}
	}
}

// checkOnce fails the test for tiles that were computed more than once, or without Redis, and for
// tiles in seen that were not computed at all.
func checkOnce(t *testing.T, loads []load, seen []string) {
	t.Helper()
	by := make(map[string][]int)
	for _, l := range loads {
		by[l.Tile] = append(by[l.Tile], l.port)
		if l.Unlocked {
			t.Errorf("tile %s was computed without Redis", l.Tile)
		}
	}
	for tile, ports := range by {
		if len(ports) > 1 {
			t.Errorf("tile %s was computed by %v", tile, ports)
		}
	}
	for _, tile := range seen {
		if len(by[tile]) == 0 {
			t.Errorf("tile %s is shown, and no process reports that it computed it", tile)
		}
	}
}

func (f *fleet) hasComputed(tile string, first int) bool {
	return slices.ContainsFunc(f.computed(first), func(l load) bool { return l.Tile == tile })
}

func (f *fleet) await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s; loads: %v", patience, what, f.computed(0))
		}
	}
}
