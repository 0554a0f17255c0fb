package redistest

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func assertLeaks(t *testing.T, found []string, want ...string) {
	t.Helper()
	all := strings.Join(found, "\n")
	if len(found) != len(want) {
		t.Errorf("%d leaks, not %d:\n%s", len(found), len(want), all)
	}
	for _, text := range want {
		if !strings.Contains(all, text) {
			t.Errorf("%q is missing from\n%s", text, all)
		}
	}
}

// A connection that is not closed is a leak.
func TestLeaks_Connection(t *testing.T) {
	t.Parallel()
	s := Start(t)
	forgotten := redis.NewClient(quiet(s.Addr))
	Must(t, forgotten.Ping(t.Context()).Err())
	assertLeaks(t, s.leaks(t.Name(), 10*time.Millisecond), "a connection to "+s.Addr)
	_ = forgotten.Close()
	assertLeaks(t, s.leaks(t.Name(), leakLimit))
}

// A key without a TTL is a leak, unless the test planted it.
func TestLeaks_KeyWithoutTTL(t *testing.T) {
	t.Parallel()
	s := Start(t)
	// Planted keys stay planted when the test runs again.
	bad := fmt.Sprintf("bad %x", rand.Uint64())
	for key, ttl := range map[string]time.Duration{
		"ns:{good}": time.Minute, "ns:{" + bad + "}": 0, "{" + bad + " too}:lock": 0, "tally": 0, "ns:{planted}": 0,
	} {
		Must(t, s.Admin().Set(t.Context(), key, "v", ttl).Err())
	}
	Planted(t, "{planted}")
	assertLeaks(t, s.leaks(t.Name(), leakLimit), `"ns:{`+bad+`}"`, `"{`+bad+` too}:lock"`)
	Planted(t, bad)
	assertLeaks(t, s.leaks(t.Name(), leakLimit))
}

// Planted holds for a test, its subtests, and the tests that it is a subtest of.
func TestPlanted_Subtests(t *testing.T) {
	t.Parallel()
	t.Run("sub", func(t *testing.T) { Planted(t, "{x}") })
	name := t.Name()
	for test, want := range map[string]bool{
		name + "/sub": true, name + "/sub/sub": true, name: true, "": true,
		name + "/other": false, name + "Other": false, name + "/su": false,
	} {
		if got := isPlanted(test, "ns:{x}"); got != want {
			t.Errorf("%q: %t", test, got)
		}
	}
	if isPlanted(name, "ns:{y}") {
		t.Error("another key passes for planted")
	}
}

// A key without a TTL in a miniredis is a leak.
func TestLeaks_MiniKeyWithoutTTL(t *testing.T) {
	t.Parallel()
	r := &failures{TB: t}
	m, c := StartMini(t)
	c.Set(t.Context(), "ns:{good}", "v", time.Minute)
	checkMini(r, m)
	assertLeaks(t, r.said)
	c.Set(t.Context(), "ns:{bad}", "v", 0)
	checkMini(r, m)
	assertLeaks(t, r.said, `"ns:{bad}"`)
	c.Del(t.Context(), "ns:{bad}")
}

// A server that is dead or frozen is not checked for leaks.
func TestLeaks_DeadOrFrozenServer(t *testing.T) {
	t.Parallel()
	s := Start(t)
	s.Admin().Set(t.Context(), "ns:{bad}", "v", 0)
	s.Freeze()
	assertLeaks(t, s.leaks(t.Name(), leakLimit))
	s.Thaw()
	assertLeaks(t, s.leaks(t.Name(), leakLimit), "ns:{bad}")
	s.Kill()
	assertLeaks(t, s.leaks(t.Name(), leakLimit))
}

// failures replaces a test that is expected to fail.
type failures struct {
	testing.TB
	said []string
}

func (f *failures) Helper() {}
func (f *failures) Errorf(format string, args ...any) {
	f.said = append(f.said, fmt.Sprintf(format, args...))
}
