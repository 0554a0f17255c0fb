package redistest

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

func init() {
	Role("mortal", func(p *Child) {
		p.Say("ready")
		_, _ = p.Next()
		panic("told to die")
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

// A child that dies fails the test with its output.
func TestProcess_Dies(t *testing.T) {
	t.Parallel()
	p := Spawn(t, "mortal")
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
