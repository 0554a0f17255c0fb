package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/lock"
	"github.com/singlefill/singlefill/singlefilltest"
	"go.opentelemetry.io/otel/trace/noop"
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
		if err != nil {
			t.Fatal(err)
		}
		w := &world{memory: newMemory(), rdb: rdb, renamed: func() {}}
		outbox, err := lock.NewMutex(rdb, "outbox", nil)
		if err != nil {
			t.Fatal(err)
		}
		metrics, err := observe(caches, outbox, noop.NewTracerProvider())
		if err != nil {
			t.Fatal(err)
		}
		w.service = &service{caches: caches, db: w, outbox: outbox, metrics: metrics, timeout: 2 * time.Second}
		ctx, cancel := context.WithCancel(t.Context())
		stopped := make(chan struct{})
		go func() { defer close(stopped); w.workOff(ctx) }()
		defer func() { cancel(); <-stopped; caches.close() }()

		w.check(t, http.MethodGet, "", http.StatusOK, `"Product 42"`)
		w.check(t, http.MethodGet, "", http.StatusOK, `"Product 42"`)
		if s := caches.products.Stats(); s.Hits != 1 {
			t.Fatalf("the product is not in the cache: %+v", s)
		}
		test(t, w)
	})
}

// check fails the test unless the service answers in this way.
func (w *world) check(t *testing.T, method, body string, wantStatus int, wantBody string) {
	t.Helper()
	w.checkWith(t, t.Context(), method, body, wantStatus, wantBody)
}

func (w *world) checkWith(t *testing.T, ctx context.Context, method, body string, wantStatus int, wantBody string) {
	t.Helper()
	rec := httptest.NewRecorder()
	w.routes().ServeHTTP(rec, httptest.NewRequestWithContext(ctx, method, "/products/42", strings.NewReader(body)))
	if rec.Code != wantStatus || !strings.Contains(rec.Body.String(), wantBody) {
		t.Errorf("%s: %d %q, want %d %q", method, rec.Code, rec.Body, wantStatus, wantBody)
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

// The next read returns the new product although the client left right after the commit.
func TestRename_ClientLeaves(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		ctx, leave := context.WithCancel(t.Context())
		w.renamed = leave
		w.checkWith(t, ctx, http.MethodPut, teapot, http.StatusNoContent, "")
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

// A request that changes nothing is refused.
func TestRename_Refused(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for _, body := range []string{"", "{", `{"name": ""}`, `{"name": "` + strings.Repeat("x", 2000) + `"}`} {
			w.check(t, http.MethodPut, body, http.StatusBadRequest, "want")
		}
		rec := httptest.NewRecorder()
		w.routes().ServeHTTP(rec, httptest.NewRequest(http.MethodPut, "/products/1000", strings.NewReader(teapot)))
		if rec.Code != http.StatusNotFound {
			t.Errorf("unknown product: %d", rec.Code)
		}
		w.checkOutbox(t, 0)
	})
}

// The outbox keeps the changes that came after those that are done.
func TestMemory_Outbox(t *testing.T) {
	t.Parallel()
	m := newMemory()
	for i := range 300 {
		if _, err := m.Rename(t.Context(), "42", fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []int{256, 44, 0} {
		changes, err := m.Outbox(t.Context())
		if len(changes) != want || err != nil {
			t.Fatalf("%d changes, %v; want %d", len(changes), err, want)
		}
		if err := m.Done(t.Context(), changes); err != nil {
			t.Fatal(err)
		}
	}
}
