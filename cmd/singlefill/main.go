package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	redis.SetLogger(noLog{}) // errors are on stderr, once
	x := &execution{
		stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv,
		ask: isTerminal(os.Stdin), live: isTerminal(os.Stdout), progress: isTerminal(os.Stderr),
	}
	status := x.run(ctx, os.Args[1:])
	stop()
	os.Exit(status)
}

type noLog struct{}

func (noLog) Printf(context.Context, string, ...any) {}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// An execution is one run of the command.
type execution struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	getenv         func(string) string

	// Whether stdin, stdout and stderr are terminals.
	ask, live, progress bool

	// Set by run.
	rdb     redis.UniversalClient
	url     string
	json    bool
	timeout time.Duration

	shown time.Time // when showProgress last wrote
}

// A command is a subcommand. prepare adds its flags, and returns what to do with the arguments.
type command struct {
	name, args, help string
	min, max         int // arguments
	prepare          func(x *execution, flags *flag.FlagSet) func(ctx context.Context, args []string) error
}

var commands = []command{
	{"ls", "[NAMESPACE]", "list the keys of a namespace, or the namespaces", 0, 1, prepareList},
	{"get", "NAMESPACE KEY", "show an entry and its payload", 2, 2, prepareGet},
	{"ttl", "NAMESPACE KEY", "show what is left of an entry", 2, 2, prepareTTL},
	{"del", "NAMESPACE KEY...", "delete keys, and refuse loads of them that are in flight", 2, many, prepareDelete},
	{"expire", "NAMESPACE KEY...", "make values stale without removing them", 2, many, prepareExpire},
	{"clear", "NAMESPACE", "delete all keys of a namespace, or those that have a tag", 1, 1, prepareClear},
	{"tags", "NAMESPACE", "show the tags of a namespace, and how many keys each has", 1, 1, prepareTags},
	{"locks", "[NAMESPACE]", "show the loads in flight in a namespace, or the locks of package lock", 0, 1, prepareLocks},
}

const many = 1 << 20

// errUsage has been explained on stderr.
var errUsage = errors.New("usage")

// run executes a command line, and returns the exit status.
func (x *execution) run(ctx context.Context, args []string) int {
	switch err := x.execute(ctx, args); {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case err == errUsage:
		return 2
	case ctx.Err() != nil:
		fmt.Fprintln(x.stderr, "singlefill: interrupted")
		return 1
	default:
		fmt.Fprintln(x.stderr, "singlefill:", strings.TrimPrefix(err.Error(), "singlefill: "))
		return 1
	}
}

func (x *execution) execute(ctx context.Context, args []string) error {
	x.timeout = 3 * time.Second
	before := x.flags("singlefill")
	before.Usage = func() {}
	err := before.Parse(args)
	name, args := before.Arg(0), before.Args()[min(1, before.NArg()):]
	switch {
	case errors.Is(err, flag.ErrHelp), name == "help":
		x.usage(x.stdout)
		return nil
	case err != nil, name == "":
		x.usage(x.stderr)
		return errUsage
	case name == "version": // asks no server
		if len(args) > 0 {
			return x.wrong("usage: singlefill version")
		}
		if info, ok := debug.ReadBuildInfo(); ok {
			fmt.Fprintln(x.stdout, info.Main.Version)
		}
		return nil
	}
	i := slices.IndexFunc(commands, func(c command) bool { return c.name == name })
	if i < 0 {
		fmt.Fprintf(x.stderr, "singlefill: there is no command %q\n\n", name)
		x.usage(x.stderr)
		return errUsage
	}
	c := commands[i]
	flags := x.flags(c.name)
	flags.Usage = func() {
		fmt.Fprintf(flags.Output(), "usage: singlefill %s [flags] %s\n\n%s.\n\n", c.name, c.args, strings.ToUpper(c.help[:1])+c.help[1:])
		flags.PrintDefaults()
	}
	do := c.prepare(x, flags)
	args, err = parse(flags, args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return err
	case err != nil:
		return errUsage
	case len(args) < c.min || len(args) > c.max:
		return x.wrong("usage: singlefill %s [flags] %s", c.name, c.args)
	case x.timeout < time.Millisecond:
		return x.wrong("singlefill: -timeout is %v: at least 1ms is allowed", x.timeout)
	}
	if len(args) > 0 { // the first is a namespace, of which the library says whether a cache can have it
		c, err := singlefill.NewLocal[any](args[0], time.Hour, nil)
		if err != nil {
			return x.wrong("%v", err)
		}
		_ = c.Close()
	}
	if x.rdb, err = connect(ctx, x.url, x.getenv("REDIS_URL"), x.timeout); err != nil {
		return err
	}
	defer x.rdb.Close()
	return do(ctx, args)
}

// flags returns the flags that all commands have. They stand before the name of the command or behind it: what is set
// before is the default behind.
func (x *execution) flags(name string) *flag.FlagSet {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(x.stderr)
	flags.Func("redis", "`URL` of the server (default $REDIS_URL, or "+defaultURL+")", func(url string) error {
		x.url = url
		return nil
	})
	flags.BoolVar(&x.json, "json", x.json, "print JSON")
	flags.DurationVar(&x.timeout, "timeout", x.timeout, "bound on each Redis command")
	return flags
}

// wrong explains what is wrong with the command line.
func (x *execution) wrong(format string, args ...any) error {
	fmt.Fprintf(x.stderr, format+"\n", args...)
	return errUsage
}

// parse parses flags before, between and behind the arguments, and returns these. Behind "--" nothing is
// a flag.
func parse(flags *flag.FlagSet, args []string) (rest []string, err error) {
	var literal []string
	if i := slices.Index(args, "--"); i >= 0 {
		args, literal = args[:i], args[i+1:]
	}
	for {
		if err := flags.Parse(args); err != nil {
			return nil, err
		}
		if args = flags.Args(); len(args) == 0 {
			return append(rest, literal...), nil
		}
		rest, args = append(rest, args[0]), args[1:]
	}
}

func (x *execution) usage(w io.Writer) {
	fmt.Fprintln(w, "usage: singlefill [-redis URL] [-timeout d] [-json] COMMAND [flags] ...")
	fmt.Fprintln(w)
	for _, c := range commands {
		fmt.Fprintf(w, "  %-26s %s\n", c.name+" "+c.args, c.help)
	}
	fmt.Fprintf(w, "  %-26s %s\n", "version", "print the version of this command")
	fmt.Fprintln(w, "\nThe server is -redis, $REDIS_URL, or "+defaultURL+". singlefill COMMAND -h lists the flags of a command,")
	fmt.Fprintln(w, "which stand behind its name.")
}

func (x *execution) printJSON(v any) error {
	e := json.NewEncoder(x.stdout)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
