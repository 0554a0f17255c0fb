package singlefill_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// However rarely a waiter asks by then, it does not sleep past the end of the lock of a holder that may be dead.
func TestAWaiterAsksRightAfterTheEndOfTheHoldersLock(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		const life, keys = 10 * time.Second, 20
		ns := redistest.Namespace(t)
		c := newCacheIn(t, rdb, ns, &raw)
		begun := time.Now()
		var calls []*call[string]
		for k := range keys {
			key := fmt.Sprint(k)
			dead := "H" + strings.Repeat("T", 26) + fmt.Sprintf("%016d", k)
			if err := rdb.Set(t.Context(), ns+":{"+key+"}:lock", dead, life).Err(); err != nil {
				t.Fatal(err)
			}
			calls = append(calls, goGet(t.Context(), c, key, gives("v")))
		}
		for _, a := range calls {
			a.want(t, "v")
		}
		if d := time.Since(begun); d < life || d > life+6*time.Millisecond {
			t.Errorf("the last of %d keys was loaded after %v, want %v and at most 6ms", keys, d, life)
		}
	})
}
