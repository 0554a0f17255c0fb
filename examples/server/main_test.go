package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// The role "server" is the service, whose queries answer when the test tells them to.
func init() {
	redistest.Role("server", func(p *redistest.Child) {
		os.Setenv("REDIS_URL", "redis://"+p.Args[0])
		answer := make(chan struct{})
		go func() {
			if _, ok := p.Next(); ok {
				close(answer)
			}
		}()
		query := func(ctx context.Context, id string) (Product, error) {
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

// A process is killed during a query. Another one takes its place within the deadline of the requests that come then.
//
//fault:killed-holder
func TestServer_KilledHolder(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	start := func() (*redistest.Process, string) {
		p := redistest.Spawn(t, "server", server.Addr)
		return p, "http://" + p.Expect("listening on http://") + "/products/42"
	}
	holder, there := start()
	other, here := start()
	go http.Get(there) // fails
	holder.Expect("query 42")
	other.Send("answer")
	holder.Kill()
	var all sync.WaitGroup
	for range 30 {
		all.Go(func() {
			resp, err := http.Get(here)
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Errorf("after a kill: %s", resp.Status)
			}
		})
	}
	all.Wait()
}

// A request in flight is answered at the end of the service, and its value is stored.
func TestServer_SIGTERM(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := redistest.Spawn(t, "server", server.Addr, "-timeout=25s")
	addr := p.Expect("listening on http://")
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		resp, err := http.Get("http://" + addr + "/products/42")
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if got, want := strings.TrimSpace(string(body)), `{"id":"42","name":"Product 42"}`; got != want || err != nil {
			t.Errorf("%s %s, %v; want %s", resp.Status, got, err, want)
		}
	}()
	p.Expect("query 42")
	redistest.Must(t, p.Signal(syscall.SIGTERM))
	redistest.Await(t, "no new connections are taken", func() bool {
		conn, err := net.Dial("tcp", addr)
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
	p.Send("answer")
	<-answered
	if err := p.Expect("ended "); err != "<nil>" {
		t.Errorf("run returned %s", err)
	}
	if err := p.Wait(); err != nil {
		t.Errorf("exit: %v", err)
	}
	if !redistest.Exists(t, server.Admin(), "products:{42}") {
		t.Error("the value is not in Redis")
	}
}
