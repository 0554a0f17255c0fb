package tags

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// What the books keep is bounded by what lives, however many tags have had values and have been deleted: a
// command drops more of what has ended than it adds.
func TestTags_BooksAreBounded(t *testing.T) {
	t.Parallel()
	const some = 100 // values of a call, or tags
	many := func(round int) map[string]string {
		values := make(map[string]string)
		for i := range some {
			values[fmt.Sprint("k", i)] = fmt.Sprint("r", round, "-", i)
		}
		return values
	}
	for name, use := range map[string]func(c *singlefill.Cache[string], t *testing.T, round int) error{
		"loads": func(c *singlefill.Cache[string], t *testing.T, round int) error {
			var tags []string
			for i := range 32 {
				tags = append(tags, fmt.Sprint("r", round, "-", i))
			}
			_, err := c.GetOrLoad(t.Context(), "k", cachetest.Gives(strings.Join(tags, " ")))
			return err
		},
		"SetMany": func(c *singlefill.Cache[string], t *testing.T, round int) error {
			return c.SetMany(t.Context(), many(round))
		},
		"DeleteTag": func(c *singlefill.Cache[string], t *testing.T, round int) error {
			var tags []string
			for i := range some {
				tags = append(tags, fmt.Sprint("r", round, "-", i))
			}
			return c.DeleteTag(t.Context(), tags...)
		},
	} {
		for _, scripts := range []bool{true, false} {
			cachetest.RunInBubble(t, fmt.Sprintf("%s/scripts=%v", name, scripts), func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				if !scripts {
					o := *rdb.Options()
					o.Protocol = 2 // miniredis answers HRANDFIELD as go-redis expects it
					rdb = redis.NewClient(&o)
					t.Cleanup(func() { _ = rdb.Close() })
					rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
						if strings.HasPrefix(cmds[0].Name(), "eval") {
							return fmt.Errorf("NOPERM")
						}
						return nil
					}))
				}
				opts := tagged
				opts.Tags = func(_, v string) []string { return strings.Fields(v) }
				opts.TTLFunc = func(string, string) time.Duration { return time.Second }
				opts.RedisTimeout, opts.LockTTL, opts.LoadTimeout = time.Second, 4*time.Second, 5*time.Second
				c := cachetest.NewCacheIn(t, rdb, "ns", &opts)
				redistest.Must(t, c.Clear(t.Context()))
				const rounds = 30
				for round := range rounds {
					redistest.Must(t, use(c, t, round))
					time.Sleep(11 * time.Second) // values, marks and locks end
				}
				fields := 0
				for _, key := range m.Keys() {
					if strings.HasSuffix(key, ":book") {
						names, err := m.HKeys(key)
						redistest.Must(t, err)
						fields += len(names)
					}
				}
				if fields > 3*some {
					t.Errorf("%d fields are left of %d rounds", fields, rounds)
				}
			})
		}
	}
}
