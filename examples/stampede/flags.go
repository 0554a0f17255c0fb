package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A plan is the workload, the same for all contenders.
type plan struct {
	Processes  int
	Goroutines int // in each process
	Keys       int
	Load       time.Duration // how long one load takes
	TTL        time.Duration // the life of a value
	Pause      time.Duration // of a goroutine between two calls, on average, in the expiring phase
	Expiring   time.Duration // length of the expiring phase
	svg        string        // the file of the picture
	command    string        // that runs this plan
}

// timed derives the other times from that of a load, so that the picture looks the same for short
// and long loads.
func (p plan) timed() plan {
	p.TTL = 15 * p.Load
	p.Pause = max(p.Load, 50*time.Millisecond) // a shorter pause would make this a benchmark
	p.Expiring = 3*(p.TTL+2*p.Load) + p.TTL/3  // values expire and are loaded again three times
	return p
}

// estimate returns about how long the run takes, with a second to start and end the processes.
func (p plan) estimate() time.Duration {
	return (time.Duration(len(contenders))*(p.Load+p.Expiring) + time.Second).Round(time.Second)
}

func (p plan) String() string {
	return fmt.Sprintf("%s of %s, %s. A load takes %s, a value lives %s",
		count(p.Processes, "process", "processes"), count(p.Goroutines, "goroutine", "goroutines"), count(p.Keys, "key", "keys"),
		tidy(p.Load), tidy(p.TTL))
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return thousands(n) + " " + many
}

// parseFlags returns flag.ErrHelp, and a usage text, if args ask for help.
func parseFlags(args []string) (p plan, usage string, err error) {
	p = plan{Processes: 8, Goroutines: 50, Keys: 1, Load: 100 * time.Millisecond, command: "go run ./examples/stampede"}
	flags := flag.NewFlagSet("stampede", flag.ContinueOnError)
	var text strings.Builder
	flags.SetOutput(&text)
	flags.Usage = func() {} // otherwise every error prints it
	flags.Var(&bounded[int]{&p.Processes, 1, 64, strconv.Atoi}, "processes", "`number` of processes that ask, 1 to 64")
	flags.Var(&bounded[int]{&p.Goroutines, 1, 1000, strconv.Atoi}, "goroutines", "`number` of goroutines in each process, 1 to 1000")
	flags.Var(&bounded[int]{&p.Keys, 1, 100, strconv.Atoi}, "keys", "`number` of keys that they ask for, 1 to 100")
	flags.Var(&bounded[time.Duration]{&p.Load, 10 * time.Millisecond, 10 * time.Second, time.ParseDuration}, "load",
		"`time` that one load takes, 10ms to 10s; the whole run takes about 170 times as long")
	flags.StringVar(&p.svg, "svg", "stampede.svg", "`file` to write the picture to")
	if err = flags.Parse(args); err != nil {
		text.Reset()
		fmt.Fprint(&text, "Usage: stampede [flags]\n\n"+
			"Compares what a cold key and an expiring key cost: without protection, with singleflight alone, with singlefill.\n"+
			"It embeds a Redis, unless the environment variable REDIS_URL names one.\n\n")
		flags.PrintDefaults()
		return p, text.String(), err
	}
	if flags.NArg() > 0 {
		return p, "", fmt.Errorf("argument %q: only flags are allowed; -h explains them", flags.Arg(0))
	}
	flags.Visit(func(f *flag.Flag) {
		if f.Name != "svg" {
			p.command += fmt.Sprintf(" -%s=%v", f.Name, f.Value)
		}
	})
	return p.timed(), "", checkFile(p.svg)
}

// A bounded is a flag whose value must be from least to most.
type bounded[T cmp.Ordered] struct {
	value       *T
	least, most T
	parse       func(string) (T, error)
}

func (b *bounded[T]) Set(s string) error {
	v, err := b.parse(s)
	if err != nil || v < b.least || v > b.most {
		return fmt.Errorf("%v to %v is allowed", b.least, b.most)
	}
	*b.value = v
	return nil
}

func (b *bounded[T]) String() string {
	if b.value == nil { // package flag calls it on the zero value, too
		return ""
	}
	return fmt.Sprint(*b.value)
}

// checkFile checks before the run that its picture can be written.
func checkFile(name string) error {
	refuse := func(why error) error {
		return fmt.Errorf("invalid value %q for flag -svg: a file in a directory that can be written to is allowed: %w", name, why)
	}
	if name == "" {
		return refuse(errors.New("it is empty"))
	}
	if info, err := os.Stat(name); err == nil && !info.Mode().IsRegular() {
		return refuse(errors.New("it is not a file"))
	}
	probe, err := os.CreateTemp(filepath.Dir(name), ".stampede-*")
	if err != nil {
		return refuse(err)
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
}

// writeFile writes the whole file or nothing.
func writeFile(name string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), ".stampede-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}
