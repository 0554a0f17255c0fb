// Package versions runs an older version of the library beside this one on one Redis, as during a
// deployment.
package versions

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// older is the commit of the older version, until there is a tag.
const older = "fcd81bc85dd5aeccee07e5696161b3f368119721"

// build builds the role of this package in the tree of the last tag, or of the older version.
func build(t *testing.T) (binary string) {
	t.Helper()
	const root, pkg = "../../..", "internal/tests/versions"
	run := func(name string, args ...string) string {
		t.Helper()
		out, err := exec.Command(name, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s %q: %v\n%s", name, args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	if err := exec.Command("git", "-C", root, "cat-file", "-e", older+"^{commit}").Run(); err != nil {
		if os.Getenv("REDIS_REQUIRED") == "1" {
			t.Fatalf("this tree has no history with %.10s: %v", older, err)
		}
		t.Skipf("this tree has no history with %.10s: %v", older, err)
	}
	tree := filepath.Join(t.TempDir(), "tree")
	run("git", "clone", "-q", "--no-checkout", root, tree)
	commit := older
	if tags := run("git", "-C", tree, "tag", "--list", "v*", "--sort=-version:refname", "--merged", "HEAD"); tags != "" {
		commit, _, _ = strings.Cut(tags, "\n")
	}
	run("git", "-C", tree, "checkout", "-q", commit)
	redistest.Must(t, os.MkdirAll(filepath.Join(tree, pkg), 0o700))
	data, err := os.ReadFile("peer_test.go")
	redistest.Must(t, err)
	redistest.Must(t, os.WriteFile(filepath.Join(tree, pkg, "peer_test.go"), data, 0o600))
	binary = filepath.Join(t.TempDir(), "old.test")
	// With -trimpath it is compiled once, although the folder is another one each time.
	run("go", "-C", tree, "test", "-trimpath", "-vet=off", "-c", "-o", binary, "./"+pkg)
	return binary
}

// TestVersions runs each scenario with the older version as the first of two processes, and as the second.
//
//fault:two-versions
func TestVersions(t *testing.T) {
	t.Parallel()
	old := build(t)
	current, err := os.Executable()
	redistest.Must(t, err)
	for order, binaries := range map[string][2]string{"old, new": {old, current}, "new, old": {current, old}} {
		for name, scenario := range map[string]func(t *testing.T, s *redistest.Server, a, b *redistest.Process){
			"values": values, "one load": oneLoad, "invalidation": invalidation, "killed": killed, "near": near, "locks": locks,
		} {
			t.Run(name+"/"+order, func(t *testing.T) {
				t.Parallel()
				s := redistest.Start(t)
				args := []string{s.Addr, "ns"}
				if name == "near" {
					args = append(args, name)
				}
				var peers [2]*redistest.Process
				for i, binary := range binaries {
					peers[i] = redistest.SpawnFrom(t, binary, "peer", args...)
					peers[i].Expect("ready")
				}
				scenario(t, s, peers[0], peers[1])
			})
		}
	}
}

// tells sends a line and wants the next line in answer.
func tells(t *testing.T, p *redistest.Process, line, want string) {
	t.Helper()
	p.Send(line)
	if got := p.Line(); got != want {
		t.Fatalf("%s: %q, want %q", line, got, want)
	}
}

// says wants the next line.
func says(t *testing.T, p *redistest.Process, want string) {
	t.Helper()
	if got := p.Line(); !strings.HasPrefix(got, want) {
		t.Fatalf("%q, want %q", got, want)
	}
}

// begins makes a process load a key that is not there.
func begins(t *testing.T, p *redistest.Process, key string) {
	t.Helper()
	tells(t, p, "get "+key, "loads "+key)
}

// loads makes a process load a value, whole.
func loads(t *testing.T, p *redistest.Process, key, value string) {
	t.Helper()
	begins(t, p, key)
	tells(t, p, "give "+value, "got "+key+": "+value)
}

// One version reads what the other has stored.
func values(t *testing.T, _ *redistest.Server, a, b *redistest.Process) {
	loads(t, a, "loaded", "v")
	tells(t, b, "get loaded", "got loaded: v")
	tells(t, a, "set k w", "done")
	tells(t, b, "get k", "got k: w")
}

// A process waits for the load of the other version, is woken by it, and shares its failure.
func oneLoad(t *testing.T, s *redistest.Server, a, b *redistest.Process) {
	for _, end := range []string{"give v", "fail boom"} {
		key := strings.Fields(end)[1]
		begins(t, a, key)
		b.Send("get " + key)
		redistest.Await(t, "the other process listens", func() bool {
			heard, err := s.Admin().PubSubShardNumSub(t.Context(), "ns:{"+key+"}:lock").Result()
			return err == nil && heard["ns:{"+key+"}:lock"] > 0
		})
		a.Send(end)
		want := map[string]string{"give v": "got v: v", "fail boom": "failed boom: "}[end]
		says(t, a, want)
		says(t, b, want)
	}
}

// Delete, Set, Expire and Clear of one version win over a load in flight of the other.
func invalidation(t *testing.T, _ *redistest.Server, a, b *redistest.Process) {
	for _, by := range []string{"delete k", "expire k", "clear", "set k new"} {
		begins(t, a, "k")
		tells(t, b, by, "done")
		tells(t, a, "give old", "got k: old") // it began before
		if by != "set k new" {
			loads(t, b, "k", "new")
		}
		tells(t, a, "get k", "got k: new")
		tells(t, b, "delete k", "done")
	}
}

// When a process of one version is killed during a load, the other one loads after LockTTL.
func killed(t *testing.T, _ *redistest.Server, a, b *redistest.Process) {
	begins(t, a, "k")
	a.Kill()
	loads(t, b, "k", "v")
}

// What one version invalidates leaves the memory of the other within MaxLag.
func near(t *testing.T, _ *redistest.Server, a, b *redistest.Process) {
	for _, by := range []string{"delete k", "expire k", "clear", "set k new"} {
		loads(t, a, "k", "old")
		for range 3 {
			tells(t, a, "get k", "got k: old") // also from memory
		}
		tells(t, b, by, "done")
		done := time.Now()
		for current := false; !current; {
			begun := time.Now()
			a.Send("get k")
			switch line := a.Line(); {
			case line == "loads k":
				tells(t, a, "give new", "got k: new")
				current = true
			case line == "got k: new":
				current = true
			case line != "got k: old" || begun.Sub(done) > maxLag:
				t.Fatalf("%v after %s: %s", begun.Sub(done), by, line)
			}
		}
		tells(t, a, "delete k", "done")
	}
}

// The locks of both versions exclude each other, and their fences grow.
func locks(t *testing.T, _ *redistest.Server, a, b *redistest.Process) {
	for _, kind := range []string{"mutex", "fair mutex", "semaphore"} {
		last := 0
		for range 2 {
			a.Send("try " + kind)
			fence, err := strconv.Atoi(a.Expect("fence "))
			redistest.Must(t, err)
			if fence <= last {
				t.Errorf("%s: fence %d after %d", kind, fence, last)
			}
			last = fence
			b.Send("try " + kind)
			says(t, b, "error ")
			tells(t, a, "release "+kind, "done")
			a, b = b, a
		}
	}
}
