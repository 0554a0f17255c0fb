package singlefill

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// The place may be granted in the same moment in which another process brings the value.
func TestWhoLeavesBeforeItEntersGivesItsPlaceInTheFleetBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		_, rdb := redistest.StartMini(t)
		c, err := New[string](rdb, "ns", time.Minute, &Options[string]{MaxFleetLoads: 1})
		if err != nil {
			t.Fatal(err)
		}
		held := func() int64 { return rdb.Exists(t.Context(), "{ns:loads}:lock").Val() }
		m := c.newClaim()
		m.queue(t.Context())
		synctest.Wait()
		if held() != 1 {
			t.Error("no place was granted")
		}
		m.free(t.Context())
		synctest.Wait()
		if held() != 0 {
			t.Error("the place is still held")
		}
	})
}
