package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

const (
	// asProgram is the environment variable that makes the test binary the program, or one of its
	// workers, and says how one of the workers dies.
	asProgram = "STAMPEDE_TEST_PROGRAM"

	// victimDir is the variable that names a directory. The worker that creates it dies.
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
		io.Copy(io.Discard, os.Stdin) // wait
	default:
		dieAfter(state(how))
	}
}

const asItIs, talkNonsense = "as it is", "talks nonsense"

// dieAfter runs a worker that dies as soon as it has reported s.
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

// The values live longer than the run, even on a slow machine, so each key is cold once.
func TestRun_ColdKeys(t *testing.T) {
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

// A value lives for less time than a phase takes to begin.
func TestRun_ExpiringKeys(t *testing.T) {
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
