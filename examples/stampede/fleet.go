package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// headStart is the time between an order and the moment at which all processes begin, so that
	// the order reaches all of them before.
	headStart = 100 * time.Millisecond

	// patience is how long a process may take to end after its orders have ended. Then it is
	// killed.
	patience = 2 * time.Second
)

// runFleet runs one contender in separate processes.
func runFleet(ctx context.Context, p plan, contender int, s *server, show *progress) (recording, error) {
	ctx, cancel := context.WithCancel(ctx)
	r := recording{Contender: contenders[contender].name, Load: p.Load}
	var fleet []*process
	defer func() {
		cancel()
		for _, w := range fleet {
			_ = w.wait()
		}
	}()
	for i := range p.Processes {
		w, err := startProcess(ctx, i, task{Plan: p, Contender: contender, Namespace: s.contenderNamespace(contender), URL: s.url})
		if err != nil {
			return r, err
		}
		fleet = append(fleet, w)
	}
	all := func(do func(w *process) error) error {
		var g errgroup.Group
		for _, w := range fleet {
			g.Go(func() error {
				err := do(w)
				if err != nil {
					cancel() // ends the other processes
				}
				return err
			})
		}
		return g.Wait()
	}

	if err := all(func(w *process) error { _, err := w.expect(isReady, show); return err }); err != nil {
		return r, err
	}
	for phase := range phases {
		r.Began[phase] = time.Now().Add(headStart)
		show.begin(phase, r.Began[phase])
		if err := all(func(w *process) error {
			if err := w.orders.Encode(order{Phase: phase, Origin: r.Began[cold], At: r.Began[phase]}); err != nil {
				return w.died(err)
			}
			_, err := w.expect(hasAsked, show)
			return err
		}); err != nil {
			return r, err
		}
		r.Ended = time.Now()
	}
	var mu sync.Mutex // protects r
	err := all(func(w *process) error {
		m, err := w.expect(hasReported, show)
		if err != nil {
			return err
		}
		if err := w.wait(); err != nil {
			return w.died(err)
		}
		mu.Lock()
		defer mu.Unlock()
		r.add(w.number, *m.Report)
		return nil
	})
	return r, err
}

// A process is a worker, seen from its parent.
type process struct {
	number   int
	orders   *json.Encoder
	messages *json.Decoder
	kill     func() error
	wait     func() error // returns when the process has ended; it may be called again
	stderr   *bytes.Buffer
}

func startProcess(ctx context.Context, number int, t task) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	description, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), workerEnv+"="+string(description))
	p := &process{number: number, stderr: new(bytes.Buffer), wait: sync.OnceValue(cmd.Wait)}
	cmd.Stderr = p.stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Cancel = in.Close
	cmd.WaitDelay = patience
	p.orders, p.messages = json.NewEncoder(in), json.NewDecoder(out)
	p.kill = func() error { return cmd.Process.Kill() }
	return p, cmd.Start()
}

// expect waits until the worker reports state. It shows all reports until then.
func (p *process) expect(state state, show *progress) (message, error) {
	for {
		var m message
		if err := p.messages.Decode(&m); err != nil {
			return m, p.died(err)
		}
		show.update(p.number, m)
		if m.State == state {
			return m, nil
		}
	}
}

// died returns why the worker has ended, or why it is being killed.
func (p *process) died(err error) error {
	if !errors.Is(err, io.EOF) {
		_ = p.kill()
	}
	if ended := p.wait(); ended != nil {
		err = ended
	}
	return fmt.Errorf("process %d: %w\n%s", p.number+1, err, bytes.TrimSpace(p.stderr.Bytes()))
}
