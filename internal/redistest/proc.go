package redistest

import (
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// A proc is an OS process that does not outlive this test binary. Its exported methods may be called
// from any goroutine.
type proc struct {
	cmd    *exec.Cmd
	done   chan struct{} // closed when the process has ended and its output is read
	err    error         // what Wait returned; read it after done
	frozen atomic.Bool
}

// startProc starts cmd. The goroutine that forks stays on its OS thread until the process has
// ended, because Linux sends Pdeathsig when the forking thread ends, and the Go runtime may end a
// thread at any time. Otherwise a child could be killed in the middle of a test.
func startProc(cmd *exec.Cmd) (*proc, error) {
	cmd.SysProcAttr = dieWithParent()
	cmd.WaitDelay = 5 * time.Second // in case a grandchild keeps the output open
	p := &proc{cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		defer close(p.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
		}
	}()
	return p, <-started
}

func (p *proc) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Pid returns the process id.
func (p *proc) Pid() int { return p.cmd.Process.Pid }

// Signal sends the process a signal.
func (p *proc) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Kill ends the process like a crash, by SIGKILL, so that it cannot clean up, and returns when it has
// ended. It ignores the error of a process that has ended already.
func (p *proc) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// Freeze stops the process without closing its connections. It returns only when the process has
// stopped, which could run another command between the signal and the stop.
func (p *proc) Freeze() {
	p.frozen.Store(true)
	suspend(p.cmd.Process)
	poll(awaitLimit, func() bool { return p.ended() || stopped(p.Pid()) })
}

// Thaw continues a frozen process.
func (p *proc) Thaw() {
	resume(p.cmd.Process)
	p.frozen.Store(false)
}

// A tail is a writer that keeps the last part of a process's output, for the message of a failing
// test.
type tail struct {
	mu   sync.Mutex
	text []byte // protected by mu
}

const tailSize = 16 << 10

func (w *tail) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = append(w.text, b...)
	if over := len(w.text) - tailSize; over > 0 {
		w.text = append(w.text[:0], w.text[over:]...)
	}
	return len(b), nil
}

func (w *tail) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.text)
}
