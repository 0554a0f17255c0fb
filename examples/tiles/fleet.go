package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"
)

const (
	// leastAway keeps a process that ends right after its start from using up the machine.
	leastAway = 10 * time.Millisecond

	// patience is how long a process may take to end after its input has ended. Then it is killed.
	patience = 2 * time.Second

	redisName = "redis"
)

// plan returns the tasks of all processes, whose ports begin with first. With a redisURL no process
// is the Redis.
func plan(first int, redisURL string) (tasks []task) {
	pagePort := first + processes
	if redisURL == "" {
		redisAddr := local(pagePort + 1)
		tasks = append(tasks, task{Name: redisName, Listen: redisAddr})
		redisURL = "redis://" + redisAddr
	}
	for port := first; port < pagePort; port++ {
		tasks = append(tasks, task{Name: strconv.Itoa(port), Listen: local(port), RedisURL: redisURL, PagePort: pagePort})
	}
	return tasks
}

// A fleet is a group of processes of this program. Each is started again after it has ended.
type fleet struct {
	children []*child
	kept     sync.WaitGroup
	end      context.CancelFunc
}

// startFleet returns when all processes are ready. A process that ends is started again after away.
func startFleet(tasks []task, away time.Duration) (*fleet, error) {
	ctx, end := context.WithCancel(context.Background())
	f := &fleet{end: end}
	for _, t := range tasks {
		c := &child{task: t}
		if err := c.start(ctx); err != nil {
			f.close()
			return nil, err
		}
		f.children = append(f.children, c)
		f.kept.Go(func() { c.keep(ctx, away) })
	}
	return f, nil
}

// close ends all processes, and returns when none is left.
func (f *fleet) close() {
	f.end()
	f.kept.Wait()
}

// state returns the states of all processes, in the order of the plan.
func (f *fleet) state() (all []childState) {
	for _, c := range f.children {
		c.mu.Lock()
		all = append(all, c.state)
		c.mu.Unlock()
	}
	return all
}

var (
	errUnknown = errors.New("there is no such process")
	errDown    = errors.New("the process is not running")
)

// kill kills a process, and returns when it is dead.
func (f *fleet) kill(name string) error {
	for _, c := range f.children {
		if c.task.Name == name {
			return c.kill()
		}
	}
	return errUnknown
}

// A child is one of the processes, running or not.
type child struct {
	task task

	mu    sync.Mutex
	state childState    // protected by mu
	cmd   *exec.Cmd     // protected by mu
	gone  chan struct{} // protected by mu: closed when cmd has ended
}

type childState struct {
	Name    string `json:"name"`
	PID     int    `json:"pid"`     // 0: not running
	Since   int64  `json:"since"`   // the time of its latest start or end, in Unix ms
	Returns int64  `json:"returns"` // if not running: the time of its next start, in Unix ms
}

// start starts the process, and returns when it is ready.
func (c *child) start(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	description, err := json.Marshal(c.task)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), taskEnv+"="+string(description))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.Cancel = in.Close
	cmd.WaitDelay = patience
	if err := cmd.Start(); err != nil {
		return err
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return fmt.Errorf("process %s ended before it was ready: %w", c.task.Name, errors.Join(cmd.Wait(), ctx.Err()))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state = childState{Name: c.task.Name, PID: cmd.Process.Pid, Since: time.Now().UnixMilli()}
	c.cmd, c.gone = cmd, make(chan struct{})
	return nil
}

// keep waits for the end of the process and starts it again, until ctx ends.
func (c *child) keep(ctx context.Context, away time.Duration) {
	for {
		err := c.cmd.Wait()
		c.mu.Lock()
		now := time.Now()
		c.state.PID, c.state.Since, c.state.Returns = 0, now.UnixMilli(), now.Add(away).UnixMilli()
		close(c.gone)
		c.mu.Unlock()
		for {
			if ctx.Err() != nil {
				return
			}
			log.Printf("process %s has ended (%v), and will be started again in %v", c.task.Name, err, away)
			select {
			case <-time.After(away):
			case <-ctx.Done():
				return
			}
			if err = c.start(ctx); err == nil {
				break
			}
		}
	}
}

func (c *child) kill() error {
	c.mu.Lock()
	cmd, gone, up := c.cmd, c.gone, c.state.PID != 0
	c.mu.Unlock()
	if !up {
		return errDown
	}
	if err := cmd.Process.Kill(); err != nil {
		return errDown // it has just ended
	}
	<-gone
	return nil
}
