package singlefill

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/quick"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// strangeKeys are keys that a mapping might stumble over.
func strangeKeys() []string {
	keys := []string{
		"42", "a", "user:42", "{", "}", "{}", "}{", "}}", "}a", "{a}", "a{b}c", "a}b", "a}", "a{", "{a", "{}a", "%", "%7D",
		"%7Da", "%25", "%257D", "%25a", "a%", "}:lock", "a:lock", "a}:lock", ":lock", "lock", "a}:lock}", "{a}:lock",
		"\x00", "a\x00b", "\r\n", " ", "\xff\xfe", "a\xc3", "ключ", "鍵", "🔑", "*", "[a-z]",
	}
	return append(keys, strings.Repeat("k", 64<<10), strings.Repeat("}", 64<<10))
}

func keyCache(namespace string) *Cache[string] { return &Cache[string]{namespace: namespace} }

func TestKeyNamesAreAsDocumented(t *testing.T) {
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
		name := keyCache("users").valueKey(key)
		if name != want {
			t.Errorf("the value of %q is named %q, want %q", key, name, want)
		}
		if lock := lockKey(name); lock != want+":lock" {
			t.Errorf("the lock of %q is named %q, want %q", key, lock, want+":lock")
		}
	}
}

// TestAPairIsInTheSlotOfItsKey asks a real node. A key with a brace within, or one that begins with a brace or
// '%', has no slot that its names could share; value and lock of it are in one slot all the same.
//
//fault:strange-keys
func TestAPairIsInTheSlotOfItsKey(t *testing.T) {
	t.Parallel()
	node := redistest.SharedCluster(t).Nodes[0].Admin()
	slot := func(name string) int64 {
		n, err := node.ClusterKeySlot(t.Context(), name).Result()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	keys := strangeKeys()
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		b := make([]byte, 1+rnd.IntN(8))
		for i := range b {
			b[i] = "ab{}%:\x00\xff"[rnd.IntN(8)]
		}
		keys = append(keys, string(b))
	}
	for _, namespace := range []string{"users", "a:b%"} {
		c := keyCache(namespace)
		for _, key := range keys {
			value, lock := slot(c.valueKey(key)), slot(lockKey(c.valueKey(key)))
			if value != lock {
				t.Errorf("%.50q: the value is in slot %d, the lock in %d", key, value, lock)
			}
			if own := slot(key); value != own && !strings.ContainsAny(key, "{}") && key[0] != '%' {
				t.Errorf("%.50q is in slot %d, its value in %d", key, own, value)
			}
		}
	}
}

// checkNames reports an error if two keys, perhaps of two namespaces, share a name of any kind.
func checkNames(namespaceA, a, namespaceB, b string) error {
	valueA, valueB := keyCache(namespaceA).valueKey(a), keyCache(namespaceB).valueKey(b)
	same := namespaceA == namespaceB && a == b
	switch {
	case (valueA == valueB) != same:
		return fmt.Errorf("values of %q %q and %q %q: %q, %q", namespaceA, a, namespaceB, b, valueA, valueB)
	case (lockKey(valueA) == lockKey(valueB)) != same:
		return fmt.Errorf("locks of %q %q and %q %q: %q, %q", namespaceA, a, namespaceB, b, lockKey(valueA), lockKey(valueB))
	case valueA == lockKey(valueB) || valueB == lockKey(valueA):
		return fmt.Errorf("value and lock of %q %q and %q %q: %q, %q", namespaceA, a, namespaceB, b, valueA, valueB)
	}
	return nil
}

//fault:two-names
func TestNoTwoKeysShareAName(t *testing.T) {
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
	const letters = "ab{}%25D7:lock"
	check := func(n uint64, a, b []byte) bool {
		for _, s := range [][]byte{a, b} {
			for i := range s {
				s[i] = letters[int(s[i])%len(letters)]
			}
		}
		a, b = append(a, letters[n%14]), append(b, letters[n/14%14])
		if len(a) > 4 && len(b) > 4 {
			a, b = a[:4], b[:4]
		}
		err := checkNames("users", string(a), namespaces[n/196%uint64(len(namespaces))], string(b))
		if err != nil {
			t.Log(err)
		}
		return err == nil
	}
	if err := quick.Check(check, &quick.Config{MaxCount: 20_000}); err != nil {
		t.Error(err)
	}
}

func FuzzNamesOfKeys(f *testing.F) {
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

// TestStrangeKeysAreKeys uses each key as any other, on a cluster, where a pair in two slots fails.
//
//fault:strange-keys
func TestStrangeKeysAreKeys(t *testing.T) {
	t.Parallel()
	c, err := New(redistest.SharedCluster(t).Client(t), redistest.Namespace(t), time.Hour, &Options[string]{
		RedisTimeout: 5 * time.Second, LockTTL: 20 * time.Second, LoadTimeout: time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	keys := strangeKeys()
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
	if err := c.Delete(t.Context(), keys...); err != nil {
		t.Error(err)
	}
	for _, key := range keys {
		if v, err := c.Get(t.Context(), key); err != ErrMiss {
			t.Errorf("%.50q after Delete: got %q, %v", key, v, err)
		}
	}
	if s := c.Stats(); s.Loads != int64(len(keys)) || s.RedisErrors != 0 {
		t.Errorf("%+v, want %d loads and no errors", s, len(keys))
	}
}
