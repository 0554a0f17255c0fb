package singlefill

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/redistest"
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

func keyCache(namespace string) *engine { return &engine{namespace: namespace} }

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
		name := keyCache("users").valueKey(key)
		if name != want {
			t.Errorf("the value of %q is named %q, want %q", key, name, want)
		}
		if lock := pairOf(name).Lock; lock != want+":lock" {
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
	valueA, valueB := keyCache(namespaceA).valueKey(a), keyCache(namespaceB).valueKey(b)
	same := namespaceA == namespaceB && a == b
	switch {
	case (valueA == valueB) != same:
		return fmt.Errorf("values of %q %q and %q %q: %q, %q", namespaceA, a, namespaceB, b, valueA, valueB)
	case (pairOf(valueA).Lock == pairOf(valueB).Lock) != same:
		return fmt.Errorf("locks of %q %q and %q %q: %q, %q", namespaceA, a, namespaceB, b, pairOf(valueA).Lock, pairOf(valueB).Lock)
	case valueA == pairOf(valueB).Lock || valueB == pairOf(valueA).Lock:
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

// The next step of a fill follows from the reply, from whether a caller waits, and from whether the
// value can end it.
func TestDecide(t *testing.T) {
	none := view{}
	wanted, servable, both := view{wanted: true}, view{servable: true}, view{wanted: true, servable: true}
	for _, test := range []struct {
		status string
		view   view
		want   step
	}{
		{filllock.Hit, none, askAgain},
		{filllock.Hit, wanted, askAgain},
		{filllock.Hit, servable, takeValue},
		{filllock.Hit, both, takeValue},
		{filllock.Locked, none, loadLocked},
		{filllock.Locked, wanted, loadLocked},
		{filllock.Locked, servable, loadLocked},
		{filllock.Locked, both, loadLocked},
		{filllock.Busy, none, leave},
		{filllock.Busy, wanted, waitForLock},
		{filllock.Busy, servable, leave},
		{filllock.Busy, both, waitForLock},
		{filllock.Failed, none, takeFailure},
		{filllock.Failed, wanted, takeFailure},
		{filllock.Failed, servable, takeFailure},
		{filllock.Failed, both, takeFailure},
		{filllock.Free, none, leave},
		{filllock.Free, wanted, waitForSlot},
		{filllock.Free, servable, leave},
		{filllock.Free, both, waitForSlot},
		{filllock.Gone, none, leave},
		{filllock.Gone, wanted, askAgain},
		{filllock.Gone, servable, leave},
		{filllock.Gone, both, askAgain},
		{filllock.Refused, none, retryNew},
		{filllock.Refused, wanted, retryNew},
		{filllock.Refused, servable, retryNew},
		{filllock.Refused, both, retryNew},
	} {
		if got := decide(filllock.Reply{Status: test.status}, test.view); got != test.want {
			t.Errorf("%s, %+v: step %d, want %d", test.status, test.view, got, test.want)
		}
	}
}

// earlyCache returns a cache that only decides on early refreshes; it sends nothing.
func earlyCache(t *testing.T, beta float64) *Cache[string] {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"})
	t.Cleanup(func() { _ = rdb.Close() })
	c, err := New(rdb, "early", time.Hour, &Options[string]{EarlyRefresh: beta})
	redistest.Must(t, err)
	return c
}

// earlyHit is the decision of one hit, left before the end of an entry whose load took loadTime.
func earlyHit(c *Cache[string], left, loadTime time.Duration) bool {
	now := time.Now()
	return c.engine.due(&lookup{
		result: result{entry: entry.Entry{FreshUntil: now.Add(left), LoadTime: loadTime}, at: now, freshness: fresh, hit: true},
	})
}

// A hit refreshes early with the probability of XFetch.
//
// Of 40,000 draws with a probability of at least 0.13, a tenth is 8 standard errors or more.
func TestEarlyRefresh_Probability(t *testing.T) {
	t.Parallel()
	const draws, loadTime = 40_000, 100 * time.Millisecond
	for _, beta := range []float64{0.5, 1, 1.5, 2} {
		for _, x := range []float64{0, 0.5, 1, 2} { // time left, as a multiple of β·δ
			t.Run(fmt.Sprintf("beta %v, %v left", beta, x), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c := earlyCache(t, beta)
					n := 0
					for range draws {
						if earlyHit(c, time.Duration(x*beta*float64(loadTime)), loadTime) {
							n++
						}
					}
					if got, want := float64(n)/draws, math.Exp(-x); math.Abs(got/want-1) > 0.1 {
						t.Errorf("refreshed by %.4f of the hits, want %.4f", got, want)
					}
				})
			})
		}
	}
}

// No hit refreshes a value early whose load took no time, or if EarlyRefresh is off.
func TestEarlyRefresh_Never(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, test := range []struct {
			name     string
			beta     float64
			loadTime time.Duration
		}{
			{"off", -1, time.Hour},
			{"a load time of 0", 1, 0},
			{"a load time of 0 and a high β", 1e9, 0},
		} {
			c := earlyCache(t, test.beta)
			for _, left := range []time.Duration{time.Hour, time.Second, time.Millisecond, 1, 0} {
				for range 1000 {
					if earlyHit(c, left, test.loadTime) {
						t.Fatalf("%s: refreshed, %v before the end", test.name, left)
					}
				}
			}
		}
	})
}
