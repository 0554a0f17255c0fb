package redistest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
)

// childEnv is set for a test binary that runs as a child, to the name of its role.
const childEnv = "SINGLEFILL_CHILD"

// expectLimit is how long a test waits for a line or the end of a child.
const expectLimit = 30 * time.Second

// roles is written by init functions only.
var roles = make(map[string]func(*Child))

// Role registers what a child process can do. Call it from an init function: the child is the test
// binary itself, and looks up its role before any test runs. The child ends when run returns.
func Role(name string, run func(p *Child)) {
	if roles[name] != nil {
		panic("redistest: two roles are named " + name)
	}
	roles[name] = run
}

// A Child is a child process, seen from inside.
type Child struct {
	Args []string // the arguments of Spawn

	lines chan string
	mu    sync.Mutex // protects the order of lines on stdout
}

// childGrace is how long a role may go on after its parent has ended.
const childGrace = 5 * time.Second

// runChild never returns. When the input of a child closes, its parent has ended or told it to end.
// The role may then return because Next returns false; after childGrace the process exits.
func runChild(name string) {
	run := roles[name]
	if run == nil {
		fmt.Fprintf(os.Stderr, "redistest: no role is named %q\n", name)
		os.Exit(3)
	}
	c := &Child{Args: os.Args[1:], lines: make(chan string, 1024)}
	go c.read()
	run(c)
	os.Exit(0)
}

func (c *Child) read() {
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 16<<20)
	for in.Scan() {
		c.lines <- in.Text()
	}
	close(c.lines)
	time.Sleep(childGrace)
	os.Exit(4)
}

// Next returns the next line from the parent. ok is false if there are no more lines; the role
// should return then.
func (c *Child) Next() (line string, ok bool) {
	line, ok = <-c.lines
	return line, ok
}

// Say sends a line to the parent. Lines of concurrent goroutines do not mix.
func (c *Child) Say(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	fmt.Fprintf(os.Stdout, format+"\n", args...)
}

// A Process is a child process, seen from the test. Only methods of proc may be called from
// goroutines other than the test's.
type Process struct {
	*proc
	t         testing.TB
	role      string
	input     io.WriteCloser
	lines     chan string // that it has said, and that were not read; closed when it has ended
	said, log tail        // its output on stdout and on stderr
}

// unread is how many lines a child may say that the test does not read. After that it has to wait.
const unread = 1 << 16

// Spawn starts the test binary again as a child with a role and args. The child is killed when the
// test ends.
func Spawn(t testing.TB, role string, args ...string) *Process {
	t.Helper()
	binary, err := os.Executable()
	Must(t, err)
	return SpawnFrom(t, binary, role, args...)
}

// SpawnFrom is Spawn of another test binary, which has the role.
func SpawnFrom(t testing.TB, binary, role string, args ...string) *Process {
	t.Helper()
	var err error
	p := &Process{t: t, role: role, lines: make(chan string, unread)}
	cmd := exec.Command(binary, args...)
	cmd.Env = append(os.Environ(), childEnv+"="+role)
	out, in := io.Pipe()
	cmd.Stdout, cmd.Stderr = io.MultiWriter(&p.said, in), &p.log
	p.input, err = cmd.StdinPipe()
	Must(t, err)
	p.proc, err = startProc(cmd)
	Must(t, err)
	go p.read(bufio.NewReader(out))
	go func() { <-p.done; _ = in.Close() }()
	t.Cleanup(p.Kill)
	return p
}

func (p *Process) read(out *bufio.Reader) {
	defer close(p.lines)
	for {
		line, err := out.ReadString('\n')
		if err != nil {
			return
		}
		p.lines <- strings.TrimSuffix(line, "\n")
	}
}

// Send sends the child a line, which its Next returns.
func (p *Process) Send(line string) {
	p.t.Helper()
	if _, err := io.WriteString(p.input, line+"\n"); err != nil {
		p.fail(fmt.Sprintf("could not be told %q: %v", line, err))
	}
}

// Expect waits for a line that starts with prefix, skips others, and returns the rest of that line.
// It fails the test after 30 s, or when the child ends without that line.
func (p *Process) Expect(prefix string) string {
	p.t.Helper()
	deadline := time.After(expectLimit)
	for {
		if rest, found := strings.CutPrefix(p.line(prefix, deadline), prefix); found {
			return rest
		}
	}
}

// Line waits for the next line, and fails like Expect.
func (p *Process) Line() string {
	p.t.Helper()
	return p.line("", time.After(expectLimit))
}

func (p *Process) line(want string, deadline <-chan time.Time) string {
	p.t.Helper()
	what := fmt.Sprintf("did not say %q within %v", want, expectLimit)
	select {
	case line, ok := <-p.lines:
		if ok {
			return line
		}
		what = fmt.Sprintf("ended (%v) before it said %q", p.err, want)
	case <-deadline:
	}
	p.fail(what)
	return ""
}

func (p *Process) fail(what string) {
	p.t.Helper()
	p.t.Fatalf("child %s %s\nit said:\n%s\nand on stderr:\n%s", p.role, what, &p.said, &p.log)
}

// Wait waits until the child ends by itself, and returns its exit error. It fails the test after 30
// s.
func (p *Process) Wait() error {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(expectLimit):
		p.fail(fmt.Sprintf("did not end within %v", expectLimit))
	}
	return p.err
}
