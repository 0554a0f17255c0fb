package cache_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A call that begins after a Clear in another process never gets what was loaded before it, in
// whatever order reads, loads and the steps of the Clear come.
func TestClear_AgainAndAgain(t *testing.T) {
	t.Parallel()
	const rounds = 20
	f := newFleet(t)
	ctx := t.Context()
	_, err := f.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := range 20_000 { // a Clear takes many steps, and loads begin before it and end in it
			p.Set(ctx, fmt.Sprintf("other:{%d}", i), "", time.Hour)
		}
		return nil
	})
	redistest.Must(t, err)
	keys := keysOf("k", 6)
	change := func(version int) {
		_, err := f.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
			for _, key := range keys {
				p.Set(ctx, sourceKey(f.namespace, key), version, 0)
			}
			return nil
		})
		redistest.Must(t, err)
	}
	change(1)
	short := config{Direct: true, TTL: 50 * time.Millisecond} // there are always loads
	clears := f.start(short)
	readers := f.startAll(3, short)
	for _, p := range append(readers, clears) {
		p.order(order{Op: "versions", Tag: "read", Names: keys, N: len(keys) + 1, Plan: plan{Source: true, Sleep: 5 * time.Millisecond}})
	}
	for version := 2; version < 2+rounds; version++ {
		change(version)
		clears.do(order{Op: "clear"})
		redistest.Must(t, f.rdb.Set(ctx, clearedKey(f.namespace), version, 0).Err())
		for _, p := range readers { // each call is made again
			before := p.tally("read").Counts
			redistest.Await(t, "all readers have made two more calls", func() bool {
				for i, n := range p.tally("read").Counts {
					if n < before[i]+2 {
						return false
					}
				}
				return true
			})
		}
	}
	for _, p := range append(readers, clears) {
		p.order(order{Op: "stop", Tag: "read"})
		for o, n := range p.done("read") {
			t.Errorf("%s: %d times %v", p.name, n, o)
		}
	}
}
