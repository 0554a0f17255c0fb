package main

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// An invalid flag is refused with its name, its value and what is allowed.
func TestParseFlags_Refused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, c := range []struct {
		arg  string
		want []string
	}{
		{"-processes=0", []string{`"0"`, "-processes", "1 to 64 is allowed"}},
		{"-processes=65", []string{`"65"`, "-processes", "1 to 64 is allowed"}},
		{"-processes=many", []string{`"many"`, "-processes", "1 to 64 is allowed"}},
		{"-goroutines=-1", []string{`"-1"`, "-goroutines", "1 to 1000 is allowed"}},
		{"-goroutines=1001", []string{`"1001"`, "-goroutines", "1 to 1000 is allowed"}},
		{"-keys=0", []string{`"0"`, "-keys", "1 to 100 is allowed"}},
		{"-keys=101", []string{`"101"`, "-keys", "1 to 100 is allowed"}},
		{"-load=9ms", []string{`"9ms"`, "-load", "10ms to 10s is allowed"}},
		{"-load=1m", []string{`"1m"`, "-load", "10ms to 10s is allowed"}},
		{"-load=100", []string{`"100"`, "-load", "10ms to 10s is allowed"}},
		{"-svg=", []string{`""`, "-svg", "a file in a directory that can be written to is allowed"}},
		{"-svg=" + dir, []string{dir, "-svg", "a file in a directory that can be written to is allowed"}},
		{"-svg=" + dir + "/none/x.svg", []string{"none/x.svg", "-svg", "a file in a directory that can be written to is allowed"}},
		{"-color", []string{"-color"}},
		{"fast", []string{`"fast"`, "only flags are allowed"}},
	} {
		_, _, err := parseFlags([]string{c.arg})
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v; want %s", c.arg, err, want)
			}
		}
	}
}

// Flags may have their minimum and maximum values.
func TestParseFlags_Limits(t *testing.T) {
	t.Parallel()
	svg := "-svg=" + filepath.Join(t.TempDir(), "x.svg")
	for _, args := range [][]string{
		{svg, "-processes=1", "-goroutines=1", "-keys=1", "-load=10ms"},
		{svg, "-processes=64", "-goroutines=1000", "-keys=100", "-load=10s"},
	} {
		p, _, err := parseFlags(args)
		if err != nil {
			t.Errorf("%s: %v", args, err)
		}
		if p.TTL <= p.Load || p.Pause >= p.TTL || p.Expiring <= 3*p.TTL {
			t.Errorf("%s: with these times no value expires three times: %+v", args, p)
		}
	}
}

// The default run is short.
func TestParseFlags_DefaultIsShort(t *testing.T) {
	t.Parallel()
	p, _, err := parseFlags([]string{"-svg=" + filepath.Join(t.TempDir(), "x.svg")})
	if err != nil || p.estimate() < 15*time.Second || p.estimate() > 20*time.Second {
		t.Errorf("%v, %v", p.estimate(), err)
	}
}

// The printed command is the command of the run.
func TestParseFlags_Command(t *testing.T) {
	t.Parallel()
	svg := "-svg=" + filepath.Join(t.TempDir(), "x.svg")
	for want, args := range map[string][]string{
		"go run ./examples/stampede":                  {svg},
		"go run ./examples/stampede -keys=3 -load=1s": {"-load", "1s", svg, "-keys", "3"},
		"go run ./examples/stampede -processes=8":     {"-processes=8", svg},
	} {
		if p, _, err := parseFlags(args); err != nil || p.command != want {
			t.Errorf("%s: %q, %v; want %q", args, p.command, err, want)
		}
	}
}

// Help explains all flags.
func TestParseFlags_Help(t *testing.T) {
	t.Parallel()
	_, usage, err := parseFlags([]string{"-h"})
	if err != flag.ErrHelp {
		t.Errorf("%v", err)
	}
	for _, want := range []string{"-processes", "(default 8)", "-goroutines", "(default 50)", "-keys", "(default 1)", "-load", "(default 100ms)", "-svg", `(default "stampede.svg")`, "REDIS_URL"} {
		if !strings.Contains(usage, want) {
			t.Errorf("no %s in\n%s", want, usage)
		}
	}
}

// A file is replaced as a whole, and no temporary file remains.
func TestWriteFile_Replaces(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	name := filepath.Join(dir, "x.svg")
	for _, text := range []string{"old and long", "new"} {
		if err := checkFile(name); err != nil {
			t.Fatal(err)
		}
		if err := writeFile(name, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(name); err != nil || string(got) != text {
			t.Errorf("%q, %v", got, err)
		}
	}
	if err := writeFile(filepath.Join(dir, "none", "x.svg"), nil); err == nil {
		t.Error("a file in no directory was written")
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
}
