package bench

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

// BenchmarkTags stores 100,000 values of 100 B with SetMany, without tags and with two each: one that half of
// the values have, and one that fifty have. Then it deletes the half: by DeleteTag, and by UNLINKs in
// pipelines of a program that knows the keys. B/member is what the server needs for a key
// under a tag, and B/member-of-fifty what the index of a tag with fifty keys takes for each of them.
func BenchmarkTags(b *testing.B) {
	keys := 100_000
	if quick {
		keys = 1000
	}
	s := redistest.Start(b)
	rdb := open(b, s.Addr)
	ctx := b.Context()
	value := strings.Repeat("x", 100)
	values, half := make(map[string]string), []string(nil)
	for i := range keys {
		key := fmt.Sprintf("user-%08d", i)
		if values[key] = value; i%2 == 0 {
			half = append(half, key)
		}
	}
	tagsOf := func(key, _ string) []string {
		i, _ := strconv.Atoi(strings.TrimPrefix(key, "user-"))
		return []string{fmt.Sprint("half:", i%2), fmt.Sprint("fifty:", i/50)}
	}
	memory := func() float64 {
		_, text, _ := strings.Cut(s.Admin().Info(ctx, "memory").Val(), "used_memory:")
		text, _, _ = strings.Cut(text, "\r")
		n, _ := strconv.ParseFloat(text, 64)
		return n
	}
	var fifty float64 // bytes
	contenders := []struct {
		name               string
		tags               func(key, v string) []string
		remove             func(c *singlefill.Cache[string], ns string) error
		set, removed, used []float64
	}{
		{name: "with two tags, DeleteTag", tags: tagsOf, remove: func(c *singlefill.Cache[string], _ string) error { return c.DeleteTag(ctx, "half:0") }},
		{name: "without, UNLINK by hand", remove: func(_ *singlefill.Cache[string], ns string) error { return unlink(ctx, rdb, ns, half) }},
	}
	for round := range rounds(b) {
		for i := range contenders {
			k := &contenders[(i+round)%len(contenders)]
			redistest.Must(b, s.Admin().FlushDB(ctx).Err())
			ns := redistest.Namespace(b)
			c, err := singlefill.New(rdb, ns, time.Hour, &singlefill.Options[string]{Tags: k.tags})
			if err == nil {
				err = c.Clear(ctx)
			}
			before, begun := memory(), time.Now()
			if err == nil {
				err = c.SetMany(ctx, values)
			}
			k.set = append(k.set, float64(time.Since(begun)))
			k.used = append(k.used, memory()-before)
			if k.tags != nil {
				index := s.Admin().Keys(ctx, ns+":tags:*:fifty:0:index").Val()[0]
				fifty = float64(s.Admin().MemoryUsage(ctx, index, 0).Val()) / 50
			}
			begun = time.Now()
			if err == nil {
				err = k.remove(c, ns)
			}
			k.removed = append(k.removed, float64(time.Since(begun)))
			redistest.Must(b, err)
			if found, err := c.GetMany(ctx, half); err != nil || len(found) > 0 {
				b.Fatalf("%s: %d values are left, %v", k.name, len(found), err)
			}
			_ = c.Close()
		}
	}
	with, without := contenders[0], contenders[1]
	for _, k := range contenders {
		report(b, k.name, func(b *testing.B) {
			b.ReportMetric(Median(k.set)/1e6, "SetMany-ms")
			b.ReportMetric(Median(k.removed)/1e6, "remove-ms")
			b.ReportMetric(Median(ratios(k.set, without.set)), "SetMany-x")
			b.ReportMetric(Median(ratios(k.removed, without.removed)), "remove-x")
		})
	}
	report(b, "memory", func(b *testing.B) {
		b.ReportMetric((Median(with.used)-Median(without.used))/float64(2*keys), "B/member")
		b.ReportMetric(fifty, "B/member-of-fifty")
	})
}

// unlink removes values as a program does that knows their keys.
func unlink(ctx context.Context, rdb *redis.Client, ns string, keys []string) error {
	for len(keys) > 0 {
		n := min(len(keys), 500)
		_, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
			for _, key := range keys[:n] {
				p.Unlink(ctx, ns+":{"+key+"}")
			}
			return nil
		})
		if err != nil {
			return err
		}
		keys = keys[n:]
	}
	return nil
}

// BenchmarkTagsLost deletes a tag of every tenth value, of values of 100 B with two tags each: when what is known of the
// tags has been lost, so that all values are read; when it is known; and by Clear, which removes all values.
// Meanwhile others read.
func BenchmarkTagsLost(b *testing.B) {
	for _, keys := range []int{100_000, 1_000_000} {
		b.Run(fmt.Sprint(keys), func(b *testing.B) {
			if quick {
				keys = 2000
			}
			removeTagged(b, keys, func(i int) []string {
				return []string{fmt.Sprint("deleted:", i%10 == 0), fmt.Sprint("fifty:", i/50)}
			})
		})
	}
}

// BenchmarkTagsLarge does the same with one tag, which all of 200,000 values have.
func BenchmarkTagsLarge(b *testing.B) {
	keys := 200_000
	if quick {
		keys = 2000
	}
	removeTagged(b, keys, func(int) []string { return []string{"deleted:true"} })
}

func removeTagged(b *testing.B, keys int, tagsOf func(i int) []string) {
	s := redistest.Start(b)
	ctx := b.Context()
	rdb, namespace := open(b, s.Addr), redistest.Namespace(b)
	c := must(singlefill.New(rdb, namespace, time.Hour, &singlefill.Options[string]{
		Tags: func(key, _ string) []string { return tagsOf(must(strconv.Atoi(key))) },
	}))
	b.Cleanup(func() { _ = c.Close() })
	payload := must(singlefill.MsgPack.Marshal(strings.Repeat("x", 100)))
	now := time.Now()
	value := string(must(entry.Entry{FreshUntil: now.Add(time.Hour), WrittenAt: now, Payload: payload}.Encode()))
	left := 0
	for i := range keys {
		if tagsOf(i)[0] != "deleted:true" {
			left++
		}
	}
	store := func() {
		redistest.Must(b, c.Clear(ctx))
		if known := must(s.Admin().Keys(ctx, namespace+":tags:*").Result()); len(known) > 0 {
			redistest.Must(b, s.Admin().Unlink(ctx, known...).Err()) // the books, and the indexes
		}
		populateWith(b, s, namespace, keys, value)
	}
	storeNoted := func() { store(); redistest.Must(b, c.DeleteTag(ctx, "none")) }
	deleteTag := func() error { return c.DeleteTag(ctx, "deleted:true") }
	compareRemovals(b, s, namespace, []removal{
		{name: "DeleteTag, tags lost", store: store, remove: deleteTag, left: left},
		{name: "DeleteTag, tags known", store: storeNoted, remove: deleteTag, left: left},
		{name: "Clear", store: store, remove: func() error { return c.Clear(ctx) }},
	})
}
