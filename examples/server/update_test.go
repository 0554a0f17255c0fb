package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
	"github.com/singlefill/singlefill/singlefilltest"
)

// A world is the service in a bubble, with a Redis that can be silenced and product 42 in the cache.
type world struct {
	*memory
	*service
	rdb     *redis.Client
	renamed func() // called right after the commit
}

func (w *world) Rename(ctx context.Context, id, name string) (change, error) {
	c, err := w.memory.Rename(ctx, id, name)
	w.renamed()
	return c, err
}

// inWorld runs a test in a bubble, in which a worker works off the outbox.
func inWorld(t *testing.T, test func(t *testing.T, w *world)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rdb := singlefilltest.Redis(t)
		shared := settings()
		shared.Codec = singlefilltest.Codec(t, nil)
		caches, err := openCaches(rdb, shared)
		redistest.Must(t, err)
		w := &world{memory: newMemory(), rdb: rdb, renamed: func() {}}
		outbox, err := lock.NewMutex(rdb, "outbox", nil)
		redistest.Must(t, err)
		metrics, err := observe(caches, outbox)
		redistest.Must(t, err)
		w.service = &service{caches: caches, db: w, outbox: outbox, metrics: metrics, timeout: 2 * time.Second}
		ctx, cancel := context.WithCancel(t.Context())
		stopped := make(chan struct{})
		go func() { defer close(stopped); w.workOff(ctx) }()
		defer func() { cancel(); <-stopped; caches.shutdown(context.Background()) }()

		w.check(t, http.MethodGet, "", http.StatusOK, `"Product 42"`)
		w.check(t, http.MethodGet, "", http.StatusOK, `"Product 42"`)
		if s := caches.products.Stats(); s.Hits != 1 {
			t.Fatalf("the product is not in the cache: %+v", s)
		}
		test(t, w)
	})
}

// send returns what the service answers to a request.
func (w *world) send(ctx context.Context, method, path, body string) *httptest.ResponseRecorder {
	rec := httptest.NewRecorder()
	w.routes().ServeHTTP(rec, httptest.NewRequestWithContext(ctx, method, path, strings.NewReader(body)))
	return rec
}

// check fails the test unless the service answers in this way to a request for product 42, and answers to any
// request without a body.
func (w *world) check(t *testing.T, method, body string, wantStatus int, wantBody string) {
	t.Helper()
	checkAnswer(t, w.send(t.Context(), method, "/products/42", body), wantStatus, wantBody)
}

func (w *world) answers(t *testing.T, method, path string, wantStatus int, wantBody string) {
	t.Helper()
	checkAnswer(t, w.send(t.Context(), method, path, ""), wantStatus, wantBody)
}

func checkAnswer(t *testing.T, rec *httptest.ResponseRecorder, wantStatus int, wantBody string) {
	t.Helper()
	if rec.Code != wantStatus || !strings.Contains(rec.Body.String(), wantBody) {
		t.Errorf("%d %q, want %d %q", rec.Code, rec.Body, wantStatus, wantBody)
	}
}

const (
	teapot = `{"name": "Teapot"}`
	kettle = `{"name": "Kettle"}`
)

// checkOutbox fails the test unless so many changes are in the outbox.
func (w *world) checkOutbox(t *testing.T, want int) {
	t.Helper()
	if changes, err := w.Outbox(t.Context()); len(changes) != want || err != nil {
		t.Errorf("the outbox has %v, %v; want %d changes", changes, err, want)
	}
}

// A read after an update returns the new product, and nothing is left to the outbox.
func TestRename(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.check(t, http.MethodPut, teapot, http.StatusNoContent, "")
		w.checkOutbox(t, 0)
		w.check(t, http.MethodGet, "", http.StatusOK, `"Teapot"`)
	})
}

// The outbox deletes what changed while Redis did not answer, as soon as it answers.
func TestRename_RedisSilent(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		resume := singlefilltest.Silence(t, w.rdb)
		w.check(t, http.MethodPut, teapot, http.StatusAccepted, "")
		w.check(t, http.MethodPut, kettle, http.StatusAccepted, "")
		time.Sleep(time.Minute)
		w.checkOutbox(t, 2)
		resume()
		time.Sleep(2 * time.Second)
		w.checkOutbox(t, 0)
		w.check(t, http.MethodGet, "", http.StatusOK, `"Kettle"`)
	})
}

// The outbox deletes what a process committed that died before it could.
func TestRename_ProcessDies(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		if _, err := w.memory.Rename(t.Context(), "42", "Teapot"); err != nil { // of another process
			t.Fatal(err)
		}
		w.check(t, http.MethodGet, "", http.StatusOK, `"Product 42"`)
		time.Sleep(2 * time.Second)
		w.checkOutbox(t, 0)
		w.check(t, http.MethodGet, "", http.StatusOK, `"Teapot"`)
	})
}
