package redistest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

func init() {
	Role("echo", func(p *Child) {
		p.Say("ready %s", strings.Join(p.Args, ","))
		for line, ok := p.Next(); ok; line, ok = p.Next() {
			if line == "die" {
				panic("told to die")
			}
			p.Say("noise")
			p.Say("echo %s", line)
		}
		p.Say("bye")
	})
	Role("parent", func(p *Child) {
		// This process is killed; does its own child end with it?
		cmd := exec.Command("sleep", "600")
		child, err := startProc(cmd)
		if err != nil {
			panic(err)
		}
		p.Say("child %d", cmd.Process.Pid)
		<-child.done
	})
}

// A child receives arguments and lines, and its lines arrive.
func TestProcess_Lines(t *testing.T) {
	t.Parallel()
	p := Spawn(t, "echo", "a", "b c")
	if got := p.Expect("ready "); got != "a,b c" {
		t.Errorf("args %q", got)
	}
	for i := range 100 {
		p.Send(fmt.Sprint("line ", i))
	}
	if got := p.Line(); got != "noise" {
		t.Errorf("first line %q", got)
	}
	for i := range 100 {
		if got := p.Expect("echo "); got != fmt.Sprint("line ", i) {
			t.Errorf("echo %d: %q", i, got)
		}
	}
	p.CloseInput()
	p.Expect("bye")
	if err := p.Wait(); err != nil {
		t.Errorf("end: %v", err)
	}
}

// Kill ends a child by SIGKILL.
func TestProcess_Kill(t *testing.T) {
	t.Parallel()
	p := Spawn(t, "echo")
	p.Expect("ready")
	p.Kill()
	var exit *exec.ExitError
	if err := p.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("end: %v", err)
	}
}

// A frozen child runs no thread until it is thawed.
func TestProcess_Freeze(t *testing.T) {
	t.Parallel()
	p := Spawn(t, "echo")
	p.Expect("ready")
	p.Freeze()
	p.Send("late")
	if !stopped(p.proc.cmd.Process.Pid) {
		t.Error("threads run")
	}
	if line, ok := p.output.next(); ok {
		t.Errorf("a frozen child said %q", line)
	}
	p.Thaw()
	p.Expect("echo late")
}

// A child that dies fails the test with its output.
func TestProcess_Dies(t *testing.T) {
	t.Parallel()
	p := Spawn(t, "echo")
	p.Send("die")
	r := &record{TB: t}
	p.t = r
	r.run(func() { p.Expect("never") })
	for _, want := range []string{"never", "exit status 2", "ready", "told to die"} {
		if !strings.Contains(r.text, want) {
			t.Errorf("the report lacks %q:\n%s", want, r.text)
		}
	}
}

// A child ends when its parent is killed.
func TestProcess_KilledParent(t *testing.T) {
	t.Parallel()
	if dieWithParent() == nil {
		t.Skip("this system cannot tie a child to its parent")
	}
	p := Spawn(t, "parent")
	var pid int
	if _, err := fmt.Sscan(p.Expect("child "), &pid); err != nil {
		t.Fatal(err)
	}
	p.Kill()
	Await(t, "the grandchild is gone", func() bool {
		// It may remain a zombie.
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || strings.Contains(string(stat), ") Z")
	})
}
