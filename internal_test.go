package singlefill

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/value"
)

// strangeKeys are keys that are hard to map to names.
func strangeKeys() []string {
	keys := []string{
		"42", "a", "user:42", "{", "}", "{}", "}{", "}}", "}a", "{a}", "a{b}c", "a}b", "a}", "a{", "{a", "{}a", "%", "%7D",
		"%7Da", "%25", "%257D", "%25a", "a%", "}:lock", "a:lock", "a}:lock", ":lock", "lock", "a}:lock}", "{a}:lock",
		"\x00", "a\x00b", "\r\n", " ", "\xff\xfe", "a\xc3", "ключ", "鍵", "🔑", "*", "[a-z]",
	}
	return append(keys, strings.Repeat("k", 64<<10), strings.Repeat("}", 64<<10))
}

// Keys have their documented names in Redis.
func TestKeys_Names(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]string{
		"42":   "users:{42}",
		"}":    "users:{%7D}",
		"}a}":  "users:{%7Da}}",
		"%":    "users:{%25}",
		"%7D":  "users:{%257D}",
		"a}b%": "users:{a}b%}",
		"{":    "users:{{}",
	} {
		name := value.Key("users", key)
		if name != want {
			t.Errorf("the value of %q is named %q, want %q", key, name, want)
		}
		if lock := filllock.PairOf(name).Lock; lock != want+":lock" {
			t.Errorf("the lock of %q is named %q, want %q", key, lock, want+":lock")
		}
	}
}

// No two keys share a name, in whatever namespaces. FuzzKeys tries others.
//
//fault:two-names
func TestKeys_NoTwoShareAName(t *testing.T) {
	t.Parallel()
	namespaces := []string{"users", "user", "users:", "users:a", ":lock", "%7D"}
	keys := strangeKeys()
	keys = keys[:len(keys)-2] // the long ones are like others
	for _, a := range keys {
		for _, b := range keys {
			for _, ns := range namespaces {
				if err := checkNames(namespaces[0], a, ns, b); err != nil {
					t.Error(err)
				}
			}
		}
	}
}

// checkNames reports an error if two keys, perhaps of two namespaces, share a name of any kind.
func checkNames(namespaceA, a, namespaceB, b string) error {
	valueA, valueB := value.Key(namespaceA, a), value.Key(namespaceB, b)
	same := namespaceA == namespaceB && a == b
	switch {
	case (valueA == valueB) != same:
		return fmt.Errorf("values of %q %q and %q %q: %q, %q", namespaceA, a, namespaceB, b, valueA, valueB)
	case (filllock.PairOf(valueA).Lock == filllock.PairOf(valueB).Lock) != same:
		return fmt.Errorf("locks of %q %q and %q %q: %q, %q", namespaceA, a, namespaceB, b, filllock.PairOf(valueA).Lock, filllock.PairOf(valueB).Lock)
	case valueA == filllock.PairOf(valueB).Lock || valueB == filllock.PairOf(valueA).Lock:
		return fmt.Errorf("value and lock of %q %q and %q %q: %q, %q", namespaceA, a, namespaceB, b, valueA, valueB)
	}
	return nil
}

// FuzzKeys looks for two keys that share a name.
func FuzzKeys(f *testing.F) {
	for i, key := range strangeKeys()[:40] {
		f.Add("users", key, "users", strangeKeys()[(i*7)%40])
	}
	f.Fuzz(func(t *testing.T, namespaceA, a, namespaceB, b string) {
		if checkNamespace(namespaceA) != nil || checkNamespace(namespaceB) != nil || a == "" || b == "" {
			return // New or the call refuses them
		}
		if err := checkNames(namespaceA, a, namespaceB, b); err != nil {
			t.Error(err)
		}
	})
}

// Strange keys are keys like any other, and their value and lock are in one slot: a cluster refuses a pair in two.
//
//fault:strange-keys
func TestKeys_StrangeKeys(t *testing.T) {
	t.Parallel()
	c, err := New(redistest.SharedCluster(t).Client(t), redistest.Namespace(t), time.Hour, &Options[string]{
		RedisTimeout: 5 * time.Second, LockTTL: 20 * time.Second, LoadTimeout: time.Minute,
	})
	redistest.Must(t, err)
	defer c.Close()
	keys := slices.Compact(slices.Sorted(slices.Values(append(strangeKeys(), redistest.RandomKeys()...))))
	for i, key := range keys {
		want := fmt.Sprint("value ", i)
		v, err := c.GetOrLoad(t.Context(), key, func(_ context.Context, got string) (string, error) {
			if got != key {
				t.Errorf("the Loader of %.50q is asked for %.50q", key, got)
			}
			return want, nil
		})
		if err != nil || v != want {
			t.Errorf("%.50q: got %q, %v; want %q", key, v, err, want)
		}
	}
	for i, key := range keys {
		if v, err := c.Get(t.Context(), key); err != nil || v != fmt.Sprint("value ", i) {
			t.Errorf("%.50q: got %q, %v; want value %d", key, v, err, i)
		}
	}
	redistest.Must(t, c.Delete(t.Context(), keys...))
	for _, key := range keys {
		if v, err := c.Get(t.Context(), key); err != ErrMiss {
			t.Errorf("%.50q after Delete: got %q, %v", key, v, err)
		}
	}
	if s := c.Stats(); s.Loads != int64(len(keys)) || s.RedisErrors != 0 {
		t.Errorf("%+v, want %d loads and no errors", s, len(keys))
	}
}
