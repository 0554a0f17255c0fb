package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// The role "server" is the service. Redis counts its queries, which answer when the test tells them
// to.
func init() {
	redistest.Role("server", func(p *redistest.Child) {
		counter := redis.NewClient(&redis.Options{Addr: p.Args[0]})
		os.Setenv("REDIS_URL", "redis://"+p.Args[0])
		answer := make(chan struct{})
		go func() {
			if _, ok := p.Next(); ok {
				close(answer)
			}
		}()
		query := func(ctx context.Context, id string) (Product, error) {
			if err := counter.Incr(ctx, "queries").Err(); err != nil {
				return Product{}, err
			}
			p.Say("query %s", id)
			select {
			case <-answer:
			case <-ctx.Done():
				return Product{}, ctx.Err()
			}
			return Product{ID: id, Name: "Product " + id}, nil
		}
		err := run(append([]string{"-listen=127.0.0.1:0"}, p.Args[1:]...), testDatabase{newMemory(), query})
		p.Say("ended %v", err)
	})
}

// A testDatabase has another query.
type testDatabase struct {
	*memory
	query singlefill.Loader[Product]
}

func (d testDatabase) Product(ctx context.Context, id string) (Product, error) {
	return d.query(ctx, id)
}

// A process is one running service.
type process struct {
	*redistest.Process
	addr   string
	client *http.Client
}

func start(t *testing.T, redisAddr string, flags ...string) *process {
	t.Helper()
	p := &process{Process: redistest.Spawn(t, "server", append([]string{redisAddr}, flags...)...)}
	p.addr = p.Expect("listening on http://")
	transport := new(http.Transport)
	t.Cleanup(transport.CloseIdleConnections)
	p.client = &http.Client{Transport: transport}
	return p
}

// answerQueries lets the queries of p answer, including later ones.
func (p *process) answerQueries() { p.Send("answer") }

func (p *process) get(ctx context.Context, path string) (status int, body string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.addr+path, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return resp.StatusCode, strings.TrimSpace(string(data)), err
}

// check fails the test unless the service answers path in this way.
func (p *process) check(t *testing.T, path string, wantStatus int, wantBody string) {
	t.Helper()
	if status, body, err := p.get(t.Context(), path); status != wantStatus || !strings.Contains(body, wantBody) || err != nil {
		t.Errorf("GET %s: %d %q, %v; want %d %q", path, status, body, err, wantStatus, wantBody)
	}
}

func (p *process) checkEnd(t *testing.T) {
	t.Helper()
	if err := p.Expect("ended "); err != "<nil>" {
		t.Errorf("run returned %s", err)
	}
}

func startFleet(t *testing.T) (*redistest.Server, []*process) {
	t.Helper()
	server := redistest.Start(t)
	var fleet []*process
	for range 3 {
		fleet = append(fleet, start(t, server.Addr, "-timeout=25s"))
	}
	return server, fleet
}

// checkOneQuery fails the test unless all processes together have made exactly one query.
func checkOneQuery(t *testing.T, server *redistest.Server) {
	t.Helper()
	if n, err := server.Admin().Get(t.Context(), "queries").Result(); n != "1" || err != nil {
		t.Errorf("%s queries, %v", n, err)
	}
}

const product42 = `{"id":"42","name":"Product 42"}`

func TestServer_Stampede(t *testing.T) {
	t.Parallel()
	server, fleet := startFleet(t)
	const each = 50
	var sent atomic.Int64
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		WroteRequest: func(httptrace.WroteRequestInfo) { sent.Add(1) },
	})
	var wg sync.WaitGroup
	for _, p := range fleet {
		for range each {
			wg.Go(func() {
				if status, body, err := p.get(ctx, "/products/42"); status != http.StatusOK || body != product42 || err != nil {
					t.Errorf("%d %q, %v", status, body, err)
				}
			})
		}
	}
	redistest.Await(t, "all requests are in flight", func() bool { return sent.Load() == int64(len(fleet)*each) })
	for _, p := range fleet {
		p.answerQueries()
	}
	wg.Wait()
	checkOneQuery(t, server)
}

func TestServer_SIGTERM(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := start(t, server.Addr, "-timeout=25s")
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		p.check(t, "/products/42", http.StatusOK, product42)
	}()
	p.Expect("query 42")
	redistest.Must(t, p.Signal(syscall.SIGTERM))
	redistest.Await(t, "no new connections are taken", func() bool {
		conn, err := net.Dial("tcp", p.addr)
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	select {
	case <-answered:
		t.Error("the request in flight was answered before its query")
	default:
	}
	p.answerQueries()
	<-answered
	p.checkEnd(t)
	if err := p.Wait(); err != nil {
		t.Errorf("exit: %v", err)
	}
	if n, err := server.Admin().Exists(t.Context(), "products:{42}").Result(); n != 1 || err != nil {
		t.Errorf("the value is not in Redis: %d, %v", n, err)
	}
}
