package main

import (
	"context"
	"errors"
	"hash/fnv"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A cache with all options reads and writes no key that docs/compatibility.md does not name, and each has a
// TTL.
func TestKeys_Named(t *testing.T) {
	t.Parallel()
	page := read(t, "docs/compatibility.md")
	var documented []*regexp.Regexp
	for _, m := range regexp.MustCompile("(?m)^\\| `(users:[^`]*)`").FindAllStringSubmatch(page, -1) {
		pattern := regexp.QuoteMeta(m[1])
		pattern = strings.ReplaceAll(pattern, `\{users:0\}`, `\{users:[0-7]\}`)
		if strings.HasSuffix(pattern, ":loads") { // "and with a suffix"
			pattern += "(:[a-z]+)?"
		}
		documented = append(documented, regexp.MustCompile("^"+pattern+"$"))
	}
	seen := make([]bool, len(documented))
	mini, rdb := redistest.StartMini(t)
	look := func() {
		for _, key := range mini.Keys() {
			i := slices.IndexFunc(documented, func(p *regexp.Regexp) bool { return p.MatchString(key) })
			if i < 0 {
				t.Errorf("the page does not name the key %q", key)
				continue
			}
			seen[i] = true
			redistest.Await(t, key+" has a TTL, or is gone", func() bool { // in the next command of its pipeline
				ttl, err := rdb.PTTL(t.Context(), key).Result()
				return err == nil && ttl != -1
			})
		}
	}
	users, err := singlefill.New(rdb, "users", time.Hour, &singlefill.Options[string]{
		MaxFleetLoads: 1, Near: &singlefill.Near{}, Tags: func(string, string) []string {
			look() // also while DeleteTag reads the values
			return []string{"eu"}
		},
	})
	redistest.Must(t, err)
	defer users.Close()
	_, err = users.GetOrLoad(t.Context(), "42", func(context.Context, string) (string, error) {
		look()
		return "v", nil
	})
	redistest.Must(t, err)
	look()
	redistest.Must(t, users.Delete(t.Context(), "43"))
	look()
	redistest.Must(t, users.DeleteTag(t.Context(), "us"))
	for i, p := range documented {
		if !seen[i] && !strings.Contains(p.String(), "told") && !strings.Contains(p.String(), "check") {
			t.Errorf("no key matches %s", p)
		}
	}
}

// A program that deletes value and lock in one command keeps a load in flight from being stored.
func TestDelete_ByAnotherProgram(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	users, err := singlefill.New[string](rdb, "users", time.Hour, nil)
	redistest.Must(t, err)
	defer users.Close()
	_, err = users.GetOrLoad(t.Context(), "42", func(ctx context.Context, _ string) (string, error) {
		return "old", rdb.Del(ctx, "users:{42}", "users:{42}:lock").Err()
	})
	redistest.Must(t, err)
	if _, err := users.Get(t.Context(), "42"); !errors.Is(err, singlefill.ErrMiss) {
		t.Errorf("Get after the load: %v, want ErrMiss", err)
	}
}

// Records of the log of Near are as docs/compatibility.md says.
func TestLog_Records(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	users, err := singlefill.New(rdb, "users", time.Hour, &singlefill.Options[string]{Near: &singlefill.Near{}})
	redistest.Must(t, err)
	defer users.Close()
	h := fnv.New64a()
	_, _ = h.Write([]byte("users:{42}")) // it never fails
	for _, test := range []struct {
		do   func() error
		want string
	}{
		{func() error { return users.Delete(t.Context(), "42") }, string(h.Sum(nil))},
		{func() error { return users.Clear(t.Context()) }, "*"},
	} {
		redistest.Must(t, test.do())
		records, err := rdb.XRevRangeN(t.Context(), "users:log", "+", "-", 1).Result()
		redistest.Must(t, err)
		if len(records) != 1 || len(records[0].Values) != 1 {
			t.Fatalf("records: %v, want one with one field", records)
		}
		for _, value := range records[0].Values {
			if value != test.want {
				t.Errorf("the record is %q, want %q", value, test.want)
			}
		}
	}
}
