package local_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/local"
	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

func newClient(t testing.TB, size int) *redis.Client {
	rdb, free := local.New("", size)
	t.Cleanup(free)
	return rdb
}

// A step is one command, or several.
type step func(ctx context.Context, c redis.Cmdable) redis.Cmder

// randomStep returns a command on one of few keys, so that most find what others have left.
func randomStep(r *rand.Rand, ns string) step {
	n := func(of int) string { return fmt.Sprint(r.IntN(of)) }
	text, hash, set := ns+":{"+n(3)+"}", ns+":{"+n(2)+"}:hash", ns+":{"+n(2)+"}:set"
	value := strings.Repeat(n(10), r.IntN(4))
	from, to, score := int64(r.IntN(6)), int64(r.IntN(8)), float64(r.IntN(9))
	field, other := "f"+n(4), "f"+n(4)
	life := time.Duration(1+r.IntN(9)) * time.Hour
	return []step{
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Get(ctx, text) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.GetRange(ctx, text, from, to) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Set(ctx, text, []byte(value), life) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder {
			return c.Set(ctx, text, value, life+time.Millisecond)
		},
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.SetNX(ctx, text, value, life) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.SetRange(ctx, text, from, value) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Del(ctx, text, hash) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Unlink(ctx, set, text) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Exists(ctx, text, hash, set) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.PTTL(ctx, text) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.PTTL(ctx, hash) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.PExpire(ctx, text, life) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.PExpire(ctx, set, life) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.PExpire(ctx, hash, 0) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.HGet(ctx, hash, field) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.HMGet(ctx, hash, field, other) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder {
			return c.HSet(ctx, hash, field, value, other, 7)
		},
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.HSetNX(ctx, hash, field, value) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.HDel(ctx, hash, field, other) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.HRandFieldWithValues(ctx, hash, 9) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder {
			return c.ZAddGT(ctx, set, redis.Z{Score: score, Member: field}, redis.Z{Score: score + 0.5, Member: other})
		},
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.ZRem(ctx, set, field, other) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder {
			return c.ZRangeByScoreWithScores(ctx, set, &redis.ZRangeBy{Min: "-inf", Max: "+inf", Count: 1 + to})
		},
		func(ctx context.Context, c redis.Cmdable) redis.Cmder {
			return c.ZRemRangeByScore(ctx, set, fmt.Sprint(from), fmt.Sprint(to))
		},
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.ZScan(ctx, set, 0, "", 500) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Scan(ctx, 0, ns+":{*}", 1<<30) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder {
			return c.Scan(ctx, 0, client.Literal(ns)+":{*}:set", 1<<30)
		},
	}[r.IntN(27)]
}

// said returns what a command has returned. Times are rounded, and replies without an order are sorted.
func said(cmd redis.Cmder) string {
	switch cmd := cmd.(type) {
	case *redis.DurationCmd:
		return fmt.Sprint(cmd.Val().Round(time.Minute), int64(min(cmd.Val(), 0)), cmd.Err())
	case *redis.KeyValueSliceCmd:
		all := cmd.Val()
		slices.SortFunc(all, func(a, b redis.KeyValue) int { return strings.Compare(a.Key, b.Key) })
		return fmt.Sprint(all, cmd.Err())
	case *redis.ScanCmd:
		all, cursor := cmd.Val()
		if cmd.Name() == "scan" {
			slices.Sort(all)
		}
		return fmt.Sprint(all, cursor, cmd.Err())
	}
	return cmd.String()
}

// The client answers as a real server does, alone, in pipelines and in transactions, and its transactions fail if
// what they watch has changed.
func TestClient_AgreesWithRedis(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	ns := redistest.Namespace(t)
	redistest.Planted(t, ns)
	clients := []*redis.Client{redistest.Shared(t).Client(t), newClient(t, 1000)}
	var tags []string // in different slots, as a transaction may disturb others of its slot
	for n := 0; len(tags) < 3; n++ {
		tag := fmt.Sprintf("{w%d}", n)
		if !slices.ContainsFunc(tags, func(other string) bool { return local.Slot(other) == local.Slot(tag) }) {
			tags = append(tags, tag)
		}
	}
	failed := 0
	for i := range 4000 {
		var steps []step
		for range 1 + r.IntN(4) {
			steps = append(steps, randomStep(r, ns))
		}
		way, watched, touched := r.IntN(4), r.IntN(3), r.IntN(3)
		var all [2][]string
		for side, rdb := range clients {
			run := func(p redis.Pipeliner) error {
				for _, do := range steps {
					do(t.Context(), p)
				}
				return nil
			}
			var cmds []redis.Cmder
			var err error
			switch way {
			case 0:
				for _, do := range steps {
					cmds = append(cmds, do(t.Context(), rdb))
				}
			case 1:
				cmds, err = rdb.Pipelined(t.Context(), run)
			case 2:
				cmds, err = rdb.TxPipelined(t.Context(), run)
			case 3: // all that is written is in the slot that is watched
				key := ns + ":" + tags[watched]
				err = rdb.Watch(t.Context(), func(tx *redis.Tx) error {
					all[side] = append(all[side], said(tx.Get(t.Context(), key)))
					rdb.Set(t.Context(), ns+":"+tags[touched], i, time.Hour)
					cmds, err = tx.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
						p.Set(t.Context(), key, i, time.Hour)
						p.Del(t.Context(), key+":lock")
						return nil
					})
					return err
				}, key)
				if errors.Is(err, redis.TxFailedErr) {
					failed++
				}
			}
			for _, cmd := range cmds {
				all[side] = append(all[side], said(cmd))
			}
			all[side] = append(all[side], fmt.Sprint(err))
		}
		if !slices.Equal(all[0], all[1]) {
			t.Fatalf("step %d, way %d:\nRedis %q\nlocal %q", i, way, all[0], all[1])
		}
	}
	if failed == 0 {
		t.Error("no transaction has failed")
	}
}

// A transaction fails if a key that it would write has ended since its WATCH: to patch what has ended would make a
// key of it that never ends.
func TestClient_WatchedKeyEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rdb := newClient(t, 10)
		redistest.Must(t, rdb.Set(t.Context(), "{a}", "old", time.Second).Err())
		err := rdb.Watch(t.Context(), func(tx *redis.Tx) error {
			time.Sleep(time.Second)
			_, err := tx.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
				p.SetRange(t.Context(), "{a}", 0, "new")
				return nil
			})
			return err
		}, "{a}")
		if n := rdb.DBSize(t.Context()).Val(); err != redis.TxFailedErr || n != 0 {
			t.Errorf("%v, and %d keys", err, n)
		}
	})
}

// Transactions at once that watch one key do not disturb each other, and each is one step.
func TestClient_TransactionsAtOnce(t *testing.T) {
	t.Parallel()
	rdb := newClient(t, 10)
	const callers, each = 50, 20
	done := make(chan error, callers)
	for range callers {
		go func() {
			var err error
			for i := 0; i < each && err == nil; i++ {
				err = rdb.Watch(t.Context(), func(tx *redis.Tx) error {
					n, err := tx.Get(t.Context(), "{n}").Int()
					if err != nil && err != redis.Nil {
						return err
					}
					_, err = tx.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
						p.Set(t.Context(), "{n}", n+1, time.Hour)
						return nil
					})
					return err
				}, "{n}")
				if err == nil && i%2 == 0 { // others end without EXEC
					err = rdb.Watch(t.Context(), func(*redis.Tx) error { return nil }, "{n}")
				}
			}
			done <- err
		}()
	}
	for range callers {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if n, err := rdb.Get(t.Context(), "{n}").Int(); n != callers*each || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}

// What has ended is freed without any command, and so are values above the size, the oldest ones as a rule.
func TestClient_Frees(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rdb := newClient(t, 100)
		size := func() int64 { return rdb.DBSize(t.Context()).Val() }
		for i := range 1000 {
			redistest.Must(t, rdb.Set(t.Context(), fmt.Sprintf("a:{%d}", i), "v", time.Hour).Err())
			redistest.Must(t, rdb.Set(t.Context(), fmt.Sprintf("a:{%d}:lock", i), "v", 90*time.Second).Err())
			redistest.Must(t, rdb.Get(t.Context(), "a:{0}").Err()) // it is in use
		}
		if n := size(); n != 100+1000 {
			t.Errorf("%d keys, want 100 values and 1000 locks", n)
		}
		if n := rdb.Exists(t.Context(), "a:{0}", "a:{1}", "a:{2}", "a:{999}").Val(); n != 2 {
			t.Errorf("%d are left, want the first and the last", n)
		}
		time.Sleep(2*time.Minute + time.Second)
		synctest.Wait()
		if n := size(); n != 100 {
			t.Errorf("%d keys, want the values", n)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := size(); n != 0 {
			t.Errorf("%d keys have ended and are kept", n)
		}
	})
}

// A caller may change what it has got, or given.
func TestClient_OwnsItsBytes(t *testing.T) {
	t.Parallel()
	rdb := newClient(t, 10)
	given := []byte("abc")
	redistest.Must(t, rdb.Set(t.Context(), "k", given, time.Hour).Err())
	given[0] = 'x'
	for range 2 {
		got, err := rdb.Get(t.Context(), "k").Bytes()
		if string(got) != "abc" || err != nil {
			t.Fatalf("%q, %v", got, err)
		}
		got[0] = 'x'
	}
}
