package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

const (
	// The test binary is also the program and its workers. asProgram says so, or how one of its workers is to die.
	asProgram = "STAMPEDE_TEST_PROGRAM"

	// victimDir is the directory that the worker that is to die makes.
	victimDir = "STAMPEDE_TEST_VICTIM"
)

func TestMain(m *testing.M) {
	_, isWorker := os.LookupEnv(workerEnv)
	switch how := os.Getenv(asProgram); {
	case how == "" && !isWorker:
		redistest.Main(m)
	case !isWorker || how == asItIs || os.Getenv(victimDir) == "" || os.Mkdir(os.Getenv(victimDir), 0o700) != nil:
		main()
	case how == talkNonsense:
		fmt.Println("nonsense")
		io.Copy(io.Discard, os.Stdin) // and waits
	default:
		dieAfter(state(how))
	}
}

const asItIs, talkNonsense = "as it is", "talks nonsense"

// dieAfter is a worker that dies once it has said that it is in a state.
func dieAfter(s state) {
	err := work(os.Getenv(workerEnv), os.Stdin, writerFunc(func(b []byte) (int, error) {
		n, err := os.Stdout.Write(b)
		if bytes.Contains(b, []byte(`"`+s+`"`)) {
			fmt.Fprintln(os.Stderr, "this worker dies")
			os.Exit(7)
		}
		return n, err
	}))
	fmt.Fprintln(os.Stderr, "its orders have ended:", err)
	os.Exit(8)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// The values live longer than the run, however slow the machine is, so that each key is cold once.
func TestEachKeyIsLoadedOnceWithSinglefillOnly(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	out, err := os.Create(filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	p := plan{Processes: 3, Goroutines: 8, Keys: 2, Load: 100 * ms, TTL: time.Minute, Pause: 20 * ms, Expiring: 200 * ms, svg: filepath.Join(dir, "x.svg")}
	runs, err := compare(t.Context(), p, "", out)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range runs {
		c, e := r.summary(cold), r.summary(expiring)
		if want := p.Processes * p.Goroutines * p.Keys; c.calls != want || c.errors+e.errors > 0 {
			t.Errorf("%s: %d cold calls, not %d; %d errors, the first one %q", r.Contender, c.calls, want, c.errors+e.errors, r.FirstError)
		}
		switch {
		case i == 0 && c.perRefill() <= 1:
			t.Errorf("no stampede to prevent: %+v", c)
		case i == 1 && c.loads != p.Processes*p.Keys:
			t.Errorf("with singleflight there were %d loads, not one in each process for each key", c.loads)
		case i == 2 && (c.loads != p.Keys || c.most != 1):
			t.Errorf("with singlefill there were %d loads, up to %d of a key at one time, not one for each of %d keys", c.loads, c.most, p.Keys)
		}
		if e.loads > 0 {
			t.Errorf("%s: %d loads of values that live long", r.Contender, e.loads)
		}
		if i == 0 && (c.commands != c.calls+c.loads || e.commands != e.calls) {
			t.Errorf("not a GET for each call and a SET for each load: %+v, %+v", c, e)
		}
		for _, l := range r.Loads {
			if l.Process < 0 || l.Process >= p.Processes || l.Goroutine < 0 || l.Goroutine >= p.Goroutines || l.Ended-l.Began < p.Load {
				t.Errorf("%s: %+v", r.Contender, l)
			}
		}
	}
	picture, err := os.ReadFile(p.svg)
	if err != nil {
		t.Fatal(err)
	}
	if got := texts(elementsOf(t, picture)); len(got) < 20 {
		t.Errorf("the picture says only %q", got)
	}
}

// A value lives shorter here than a phase takes to begin.
func TestValuesExpireOnTheEmbeddedRedis(t *testing.T) {
	t.Parallel()
	p := plan{Processes: 2, Goroutines: 4, Keys: 1, Load: 10 * ms, TTL: 20 * ms, Pause: 20 * ms, Expiring: 500 * ms}
	s, err := openServer(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer s.close(p)
	for i, c := range contenders {
		page := &page{out: os.Stderr}
		r, err := runFleet(t.Context(), p, i, s, page.progress(i, p))
		if err != nil {
			t.Fatal(err)
		}
		if e := r.summary(expiring); e.calls == 0 || e.loads == 0 || e.errors > 0 {
			t.Errorf("%s: %+v, %s", c.name, e, r.FirstError)
		}
	}
}

// A program is a run of this one in a group of processes of its own.
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

// checkGone fails the test if a worker is left. It is for after Wait.
func (p *program) checkGone(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(-p.Process.Pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("processes are left: %v", err)
	}
	if t.Failed() {
		t.Logf("stdout:\n%s\nstderr:\n%s", &p.stdout, &p.stderr)
	}
}

func TestRunOnARealRedisLeavesNothingAndNoEscapes(t *testing.T) {
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

func TestInterruptEndsAllProcessesAndDeletesTheKeys(t *testing.T) {
	t.Parallel()
	for name, whole := range map[string]bool{"by kill": false, "by the terminal": true} { // which tells the whole group
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			p := start(t, asItIs, "redis://"+server.Addr, "-processes=3", "-goroutines=4")
			redistest.Await(t, "it is under way", func() bool {
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

func TestWorkerThatDiesEndsTheRunWithWhatItSaid(t *testing.T) {
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

func TestWorkersEndWithTheirParent(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := start(t, asItIs, "redis://"+server.Addr, "-processes=2", "-goroutines=2")
	redistest.Await(t, "it is under way", func() bool {
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

func TestRunRefusesAServerThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{"redis://127.0.0.1:1": "the Redis of REDIS_URL does not answer", "nonsense": "REDIS_URL: "} {
		p := start(t, asItIs, url)
		if err := p.Wait(); err == nil || !strings.Contains(p.stderr.String(), want) || p.stdout.Len() > 0 {
			t.Errorf("%s: %v", url, err)
		}
		p.checkGone(t)
	}
}

func TestHelpGoesToStandardOutput(t *testing.T) {
	t.Parallel()
	p := start(t, asItIs, "", "-h")
	if err := p.Wait(); err != nil || !strings.HasPrefix(p.stdout.String(), "Usage: stampede") || p.stderr.Len() > 0 {
		t.Errorf("%v", err)
	}
	p.checkGone(t)
}
