package browser

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
)

// patience affects only how long a failing test takes.
const patience = 2 * time.Minute

// A page is the page of the map in a browser.
type page struct {
	t     *testing.T
	ctx   context.Context
	fleet *fleet

	mu      sync.Mutex
	console []chromedp.ConsoleMessage // protected by mu
}

func openPage(t *testing.T, f *fleet) *page {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(chromium(t)), chromedp.WindowSize(1280, 800))
	if os.Getuid() == 0 {
		options = append(options, chromedp.NoSandbox) // as root Chromium refuses to use its sandbox
	}
	ctx, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	p := &page{t: t, ctx: ctx, fleet: f}
	p.do(chromedp.EmulateViewport(1280, 800))
	messages := chromedp.Console(ctx)
	go func() {
		for m, err := range messages {
			if err != nil {
				return
			}
			p.mu.Lock()
			p.console = append(p.console, m)
			p.mu.Unlock()
		}
	}()
	p.do(chromedp.Navigate(f.url))
	p.awaitMap()
	return p
}

// chromium returns the path of the browser. Without a browser it skips the test, or fails it if
// CHROMIUM_REQUIRED=1.
func chromium(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	const install = "there is no Chromium: install it to run this test (Debian: apt-get install chromium)"
	if os.Getenv("CHROMIUM_REQUIRED") == "1" {
		t.Fatal(install)
	}
	t.Skip(install)
	return ""
}

func (p *page) do(actions ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	if err := chromedp.Do(p.ctx, actions...); err != nil {
		p.t.Fatal(err)
	}
}

// await waits until an expression is true in the page.
func (p *page) await(what, expression string) {
	p.t.Helper()
	if _, err := chromedp.Run(p.ctx, chromedp.Poll[chromedp.Void](expression, chromedp.WithPollingTimeout(patience))); err != nil {
		p.screenshot("failed")
		p.t.Fatalf("%s: %v", what, err)
	}
}

func evaluate[T any](p *page, expression string) T {
	p.t.Helper()
	v, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		p.t.Fatalf("%s: %v", expression, err)
	}
	return v
}

// text returns the text of the element with an id.
func (p *page) text(id string) string {
	p.t.Helper()
	return evaluate[string](p, fmt.Sprintf("document.getElementById(%q).textContent", id))
}

// awaitMap waits until the map shows every tile of the view.
func (p *page) awaitMap() {
	p.t.Helper()
	p.await("the map is complete", `document.getElementById("map").ariaBusy === "false"`)
	if len(p.shown()) == 0 {
		p.screenshot("failed")
		p.t.Fatal("the map is empty")
	}
}

// shown returns the names of the visible tiles.
func (p *page) shown() []string {
	p.t.Helper()
	tiles := evaluate[[]string](p, `[...document.querySelectorAll(".tile.here:not(.below)")].filter(t => t.querySelector("img")?.naturalWidth === 256).map(t => t.dataset.tile)`)
	if n := evaluate[int](p, `Number(document.getElementById("map").dataset.tiles)`); n != len(tiles) {
		p.t.Errorf("the map shows %d of %d tiles: %v", len(tiles), n, tiles)
	}
	return tiles
}

// drag pans with the mouse.
func (p *page) drag(dx, dy float64) {
	p.t.Helper()
	const x, y = 450, 400
	p.do(chromedp.MouseEvent(chromedp.MousePressed, x, y, chromedp.ButtonLeft, chromedp.ClickCount(1)))
	for i := range 5 {
		part := float64(i+1) / 5
		p.do(chromedp.MouseEvent(chromedp.MouseMoved, x+part*dx, y+part*dy, chromedp.ButtonLeft))
	}
	p.do(chromedp.MouseEvent(chromedp.MouseReleased, x+dx, y+dy, chromedp.ButtonLeft, chromedp.ClickCount(1)))
	p.awaitMap()
}

// wheel zooms by one notch.
func (p *page) wheel(x, y, dy float64) {
	p.t.Helper()
	p.do(chromedp.MouseEvent(input.DispatchMouseEventTypeMouseWheel, x, y, func(e *input.DispatchMouseEventParams) {
		e.DeltaX, e.DeltaY = 1e-9, dy // Chromium needs both, and cdproto does not send 0
	}))
	p.awaitMap()
}

func (p *page) press(key string) {
	p.t.Helper()
	p.do(chromedp.Focus(chromedp.ID("map")), chromedp.KeyEvent(key))
	p.awaitMap()
}

func (p *page) click(selector string) {
	p.t.Helper()
	p.do(chromedp.Click(chromedp.CSS(selector)))
}

// zoomTo clicks a zoom button, and checks that the page shows the level.
func (p *page) zoomTo(button, level string) {
	p.t.Helper()
	p.click("#" + button)
	p.awaitMap()
	if tiles := p.shown(); !strings.HasPrefix(tiles[0], level+"/") {
		p.t.Errorf("after %s: %v", button, tiles)
	}
}

// card returns the selector of the part of the page for one process.
func card(name string) string { return fmt.Sprintf("article[data-name=%q]", name) }

// kill clicks the button of a process, and waits until the page shows that it is down.
func (p *page) kill(name string) {
	p.t.Helper()
	p.click(card(name) + " button")
	p.await(name+" is down", fmt.Sprintf("document.querySelector(%q)", card(name)+".down"))
	if !evaluate[bool](p, fmt.Sprintf("document.querySelector(%q).disabled", card(name)+" button")) {
		p.t.Errorf("%s is down, and can be killed", name)
	}
}

// screenshot writes a picture to the artifacts of the test, which are kept with -artifacts.
func (p *page) screenshot(name string) {
	p.t.Helper()
	data, err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot())
	if err == nil {
		err = os.WriteFile(filepath.Join(p.t.ArtifactDir(), name+".png"), data, 0o644)
	}
	if err != nil {
		p.t.Errorf("screenshot: %v", err)
	}
}

// lost has the messages that Chromium writes to the console when a connection to a killed process
// breaks, or cannot be made. No script can prevent them.
var lost = []string{
	"net::ERR_CONNECTION_REFUSED",
	"net::ERR_CONNECTION_RESET",
	"net::ERR_EMPTY_RESPONSE",              // reset before a response
	"net::ERR_INCOMPLETE_CHUNKED_ENCODING", // reset in a response
	"net::ERR_SOCKET_NOT_CONNECTED",        // reset before a request
}

// checkConsole fails the test for everything in the console except lost connections to killed
// processes.
func (p *page) checkConsole(killed ...int) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.console {
		u, err := url.Parse(m.URL)
		if err != nil {
			p.t.Error(err)
			continue
		}
		port, _ := strconv.Atoi(u.Port())
		reason, failed := strings.CutPrefix(m.Text, "Failed to load resource: ")
		if m.Source != "network" || !failed || !slices.Contains(lost, reason) || !slices.Contains(killed, port) {
			p.t.Errorf("console: %s %s %s %s", m.Type, m.Source, m.Text, m.URL)
		}
	}
}
