package redistest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// A MiniLink loses what is sent into its black hole, counts it, and delivers again afterwards.
func TestMiniLink_BlackHole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		link, rdb := StartMiniLink(t)
		set := func(value string) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			return rdb.WithTimeout(100*time.Millisecond).Set(ctx, "k", value, time.Minute).Err()
		}
		Must(t, set("before"))
		link.BlackHoleAt("SET")
		if err := rdb.Get(t.Context(), "k").Err(); err != nil || link.Swallows() {
			t.Fatalf("before the command: GET says %v", err)
		}
		if err := set("lost"); err == nil || !link.Swallows() {
			t.Fatalf("in the black hole SET says %v", err)
		}
		if v, _ := link.Mini.Get("k"); v != "before" {
			t.Errorf("the server has %q", v)
		}
		link.BlackHole(false)
		Must(t, set("after"))
		if v, _ := link.Mini.Get("k"); v != "after" {
			t.Errorf("the server has %q", v)
		}
		if commands, probes := link.Sent(); commands < 4 || probes < 1 {
			t.Errorf("%d commands and %d probes were sent", commands, probes)
		}
	})
}
