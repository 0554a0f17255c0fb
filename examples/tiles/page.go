package main

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"
)

//go:embed page
var pageFiles embed.FS

// newPage returns the handler of the page and of its buttons. Only the page itself, opened on this
// machine, may kill processes: no script of another page in the same browser may, and no other host
// name that resolves to this machine.
func newPage(f *fleet, port int) http.Handler {
	files, err := fs.Sub(pageFiles, "page")
	if err != nil {
		panic(err) // it is embedded
	}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	mux.HandleFunc("GET /fleet", f.serveState)
	mux.HandleFunc("POST /kill/{name}", f.serveKill)
	sameOrigin := http.NewCrossOriginProtection().Handler(mux)

	hosts := []string{local(port), fmt.Sprintf("localhost:%d", port)}
	var sources []string // of tiles and events
	for _, host := range []string{"127.0.0.1", "localhost"} {
		for p := port - processes; p < port; p++ {
			sources = append(sources, fmt.Sprintf("http://%s:%d", host, p))
		}
	}
	policy := "default-src 'self'; img-src 'self' blob:; connect-src 'self' " + strings.Join(sources, " ") + "; frame-ancestors 'none'"
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(hosts, r.Host) {
			http.Error(w, fmt.Sprintf("host %.100q: %s is allowed", r.Host, strings.Join(hosts, " or ")), http.StatusForbidden)
			return
		}
		w.Header().Set("Content-Security-Policy", policy)
		w.Header().Set("Cache-Control", "no-store")
		sameOrigin.ServeHTTP(w, r)
	})
}

// serveState answers GET /fleet with a stream: the states of all processes, at first and after each
// change.
func (f *fleet) serveState(w http.ResponseWriter, r *http.Request) {
	var told []childState
	stream(w, r, func(send func(id string, message any)) {
		if now := f.state(); !slices.Equal(now, told) {
			send("", now)
			told = now
		}
	})
}

// serveKill answers POST /kill/name.
func (f *fleet) serveKill(w http.ResponseWriter, r *http.Request) {
	switch err := f.kill(r.PathValue("name")); {
	case err == nil:
		w.WriteHeader(http.StatusNoContent)
	case errors.Is(err, errUnknown):
		http.Error(w, err.Error(), http.StatusNotFound)
	default:
		http.Error(w, err.Error(), http.StatusConflict)
	}
}
