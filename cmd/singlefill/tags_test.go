package main

import (
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// tags lists what a namespace has, clear -tag deletes by them, and no other command takes their keys for
// entries, namespaces or locks.
func TestTags(t *testing.T) {
	each(t, func(t *testing.T, c terminal, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		cache := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Tags: func(_, v string) []string { return strings.Fields(v) }})
		check(t, cache.SetMany(t.Context(), map[string]string{"k1": "eu}", "k2": "eu} us", "k3": "us", "k4": ""}))
		if got, want := c.ok("tags", ns), "TAG  KEYS\neu}  2\nus   2\n"; got != want {
			t.Errorf("tags writes\n%s, want\n%s", got, want)
		}
		if got := c.ok("tags", "-json", ns); !strings.Contains(got, `"tag": "eu}"`) || !strings.Contains(got, `"keys": 2`) {
			t.Errorf("tags -json writes %s", got)
		}
		if got := c.ok("ls"); strings.Contains(got, ns+":tags") {
			t.Errorf("ls takes tags for a namespace:\n%s", got)
		}
		if _, _, found := c.listed(ns); found != 4 {
			t.Errorf("ls finds %d keys, want 4", found)
		}
		c.fails(1, "not all tags of the namespace "+ns+" are known, and 0 values were deleted", "clear", "-yes", "-tag", "eu}", ns)
		if _, _, found := c.listed(ns); found != 4 {
			t.Errorf("%d values are left, want 4: the tags of a program are not known", found)
		}
		check(t, cache.DeleteTag(t.Context(), "other"))
		if got := c.ok("clear", "-yes", "-tag", "eu}", "-tag", "none", ns); got != "2 values deleted\n" {
			t.Errorf("clear -tag writes %q", got)
		}
		if keys, _, _ := c.listed(ns); strings.Join(keys, " ") != "k3 k4" {
			t.Errorf("clear -tag leaves %q, want k3 and k4", keys)
		}
		c.fails(1, "no value of the namespace "+ns+"-none has a tag", "tags", ns+"-none")
		c.fails(1, "stdin is no terminal", "clear", "-tag", "us", ns)
		unknown := cachetest.NewCacheIn(t, rdb, ns+"-unknown", &singlefill.Options[string]{})
		check(t, unknown.Set(t.Context(), "k", "us"))
		c.fails(1, "call DeleteTag", "clear", "-yes", "-tag", "us", ns+"-unknown")
		c.ok("get", ns+"-unknown", "k")
	})
}
