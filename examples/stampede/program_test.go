//go:build unix

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A program is a run of this program in a separate process group.
type program struct {
	*exec.Cmd
	stdout, stderr bytes.Buffer
	svg            string
}

func start(t *testing.T, how, url string, args ...string) *program {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &program{svg: filepath.Join(t.TempDir(), "x.svg")}
	p.Cmd = exec.Command(self, append(args, "-svg="+p.svg)...)
	p.Env = append(os.Environ(), asProgram+"="+how, victimDir+"="+p.svg+".victim", "REDIS_URL="+url)
	p.Stdout, p.Stderr = &p.stdout, &p.stderr
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Kill(-p.Process.Pid, syscall.SIGKILL) })
	return p
}

// checkGone fails the test if a worker is left. Call it after Wait.
func (p *program) checkGone(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(-p.Process.Pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("processes are left: %v", err)
	}
	if t.Failed() {
		t.Logf("stdout:\n%s\nstderr:\n%s", &p.stdout, &p.stderr)
	}
}

func TestProgram_RealRedis(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := start(t, asItIs, "redis://"+server.Addr, "-processes=2", "-goroutines=4", "-load=10ms", "-keys=2")
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
	p.checkGone(t)
	if text := p.stdout.String(); strings.ContainsAny(text, "\x1b\r█░") || !strings.HasSuffix(text, "The picture is in "+p.svg+".\n") {
		t.Errorf("%q", text)
	}
	asked := 0
	for _, c := range contenders {
		_, line, _ := strings.Cut(p.stdout.String(), "\n"+c.name)
		var calls, loads int
		if _, err := fmt.Sscanf(strings.ReplaceAll(line, ",", ""), "%d calls %d loads", &calls, &loads); err != nil || loads == 0 {
			t.Errorf("%s: %d calls, %d loads, %v", c.name, calls, loads, err)
		}
		asked += calls
	}
	if want := fmt.Sprintf("All %s answers were right.\n", thousands(asked)); !strings.Contains(p.stdout.String(), want) {
		t.Errorf("it does not say %q", want)
	}
	if n, err := server.Admin().DBSize(t.Context()).Result(); n != 0 || err != nil {
		t.Errorf("%d keys are left, %v", n, err)
	}
	picture, err := os.ReadFile(p.svg)
	if err != nil {
		t.Fatal(err)
	}
	elementsOf(t, picture)
}

func TestProgram_Interrupt(t *testing.T) {
	t.Parallel()
	for name, whole := range map[string]bool{"by kill": false, "by the terminal": true} { // the terminal signals the whole group
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			p := start(t, asItIs, "redis://"+server.Addr, "-processes=3", "-goroutines=4")
			redistest.Await(t, "it has begun", func() bool {
				n, err := server.Admin().DBSize(t.Context()).Result()
				return err == nil && n > 0
			})
			pid := p.Process.Pid
			if whole {
				pid = -pid
			}
			if err := syscall.Kill(pid, syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			if err := p.Wait(); err == nil || !strings.Contains(p.stderr.String(), "stampede: interrupted\n") {
				t.Errorf("%v", err)
			}
			p.checkGone(t)
			if n, err := server.Admin().DBSize(t.Context()).Result(); n != 0 || err != nil {
				t.Errorf("%d keys are left, %v", n, err)
			}
			if _, err := os.Stat(p.svg); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("there is a picture: %v", err)
			}
		})
	}
}

func TestProgram_DyingWorker(t *testing.T) {
	t.Parallel()
	for how, want := range map[string][]string{
		string(isReady):  {"no protection: process ", ": exit status 7\nthis worker dies"},
		string(isAsking): {"no protection: process ", ": exit status 7\nthis worker dies"},
		string(hasAsked): {"no protection: process ", ": exit status 7\nthis worker dies"},
		talkNonsense:     {"no protection: process ", ": signal: killed"},
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			p := start(t, how, "", "-processes=3", "-goroutines=2")
			err := p.Wait()
			for _, want := range want {
				if err == nil || !strings.Contains(p.stderr.String(), want) {
					t.Errorf("%v; no %q", err, want)
				}
			}
			p.checkGone(t)
		})
	}
}

func TestProgram_KilledParent(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := start(t, asItIs, "redis://"+server.Addr, "-processes=2", "-goroutines=2")
	redistest.Await(t, "it has begun", func() bool {
		n, err := server.Admin().DBSize(t.Context()).Result()
		return err == nil && n > 0
	})
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	p.Wait()
	redistest.Await(t, "the workers are gone", func() bool {
		return errors.Is(syscall.Kill(-p.Process.Pid, 0), syscall.ESRCH)
	})
}

func TestProgram_NoServer(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{"redis://127.0.0.1:1": "the Redis of REDIS_URL does not answer", "nonsense": "REDIS_URL: "} {
		p := start(t, asItIs, url)
		if err := p.Wait(); err == nil || !strings.Contains(p.stderr.String(), want) || p.stdout.Len() > 0 {
			t.Errorf("%s: %v", url, err)
		}
		p.checkGone(t)
	}
}

func TestProgram_Help(t *testing.T) {
	t.Parallel()
	p := start(t, asItIs, "", "-h")
	if err := p.Wait(); err != nil || !strings.HasPrefix(p.stdout.String(), "Usage: stampede") || p.stderr.Len() > 0 {
		t.Errorf("%v", err)
	}
	p.checkGone(t)
}
