package near

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/maypok86/otter/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/local"
	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

const (
	logKey = "near:log"
	maxLag = time.Second
)

// A tier is a Tier whose log is read when a test says so.
type tier struct {
	*Tier
	drops int
}

func newTier(rdb redis.UniversalClient) *tier {
	x := new(tier)
	c := client.New(rdb, 5*time.Second, func(context.Context, string, error) {}, func(error) {}, nil)
	x.Tier = New(c, logKey, local.Limits{Keys: 100}, maxLag, func(func(<-chan struct{})) {})
	x.Dropped = func() { x.drops++ }
	return x
}

// inBubble runs a test with a tier that has read the log, and with the log as another process has
// it.
func inBubble(t *testing.T, run func(t *testing.T, x *tier, other *Log, rdb *redis.Client)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		_, rdb := redistest.StartMini(t)
		x, other := newTier(rdb), newTier(rdb)
		x.read(t)
		run(t, x, &other.Log, rdb)
	})
}

func (x *tier) read(t testing.TB) {
	t.Helper()
	redistest.Must(t, x.catchUp())
}

func lasting() *Copy { return &Copy{End: math.MaxInt64} }

// keep keeps a value of key, which is its own value key, as if a command had just found it.
func (x *tier) keep(key string) { x.Put(key, x.Generation(key), lasting()) }

func (x *tier) want(t testing.TB, what, key string, kept bool) {
	t.Helper()
	if v, _, _ := x.Get(key); v != nil != kept {
		t.Errorf("%s: a value of %s is kept: %v, want %v", what, key, !kept, kept)
	}
}

// A record makes the values of its keys useless, also those in transit when it is read, and no other ones.
//
//fault:near-late-reply
func TestTier_Record(t *testing.T) {
	inBubble(t, func(t *testing.T, x *tier, other *Log, _ *redis.Client) {
		x.keep("a")
		x.keep("b")
		transit := x.Generation("a")
		redistest.Must(t, other.Append(t.Context(), []string{"a", "c"}))
		x.want(t, "before it is read", "a", true)
		x.read(t)
		x.want(t, "after a record of a", "a", false)
		x.want(t, "after a record of a", "b", true)
		x.Put("a", transit, lasting())
		x.want(t, "sent before the record was read", "a", false)
		x.keep("a")
		x.read(t)
		x.want(t, "sent after the record was read", "a", true)
		if x.drops != 0 {
			t.Error("everything was dropped")
		}
	})
}

// When the last record that a process knows is lost, the process drops everything: also what is in transit.
func TestTier_RecordsLost(t *testing.T) {
	inBubble(t, func(t *testing.T, x *tier, other *Log, rdb *redis.Client) {
		x.keep("a")
		transit := x.Generation("b")
		redistest.Must(t, other.Append(t.Context(), []string{"a", "b"}))
		redistest.Must(t, rdb.Del(t.Context(), logKey).Err())
		redistest.Must(t, other.Append(t.Context(), []string{"c"}))
		x.read(t)
		x.want(t, "a record of it is lost", "a", false)
		x.Put("b", transit, lasting())
		x.want(t, "sent before", "b", false)
		if x.drops != 1 {
			t.Errorf("%d drops, want 1", x.drops)
		}
		x.keep("a")
		x.read(t)
		x.want(t, "sent after that", "a", true)
	})
}

// A log that has expired while nothing used it has lost its records, but that is no fault to tell.
func TestTier_IdleLogExpires(t *testing.T) {
	inBubble(t, func(t *testing.T, x *tier, other *Log, rdb *redis.Client) {
		x.keep("a")
		time.Sleep(x.life)
		redistest.Must(t, rdb.Del(t.Context(), logKey).Err())
		redistest.Must(t, other.Append(t.Context(), []string{"b"}))
		x.read(t)
		x.want(t, "the log has expired", "a", false)
		if x.drops != 0 {
			t.Errorf("%d drops are told, want none", x.drops)
		}
	})
}

// The proof is as old as its command, however late the reply.
//
//fault:near-late-reply
func TestTier_AgeOfTheProof(t *testing.T) {
	inBubble(t, func(t *testing.T, x *tier, _ *Log, rdb *redis.Client) {
		rdb.AddHook(redistest.Pipelines(func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error {
			err := next(ctx, cmds)
			time.Sleep(maxLag * 3 / 4)
			return err
		}))
		x.read(t)
		if _, _, proven := x.Get("a"); !proven {
			t.Error("there is no proof, 3/4 of MaxLag after the log was read")
		}
		time.Sleep(maxLag/4 - 1)
		if _, _, proven := x.Get("a"); !proven {
			t.Error("there is no proof just before MaxLag")
		}
		time.Sleep(time.Nanosecond)
		if _, _, proven := x.Get("a"); proven {
			t.Error("there is a proof MaxLag after the log was asked")
		}
	})
}

// The generations change before the proof is noted: a reader that sees the proof sees them, too.
func TestTier_GenerationsBeforeProof(t *testing.T) {
	inBubble(t, func(t *testing.T, x *tier, _ *Log, rdb *redis.Client) {
		x.keep("a")
		redistest.Must(t, rdb.Del(t.Context(), logKey).Err())
		time.Sleep(maxLag)
		proven := true
		x.Dropped = func() { _, _, proven = x.Get("a") }
		if x.read(t); proven {
			t.Error("there is a proof while the values are dropped")
		}
		if _, _, proven := x.Get("a"); !proven {
			t.Error("there is no proof afterwards")
		}
	})
}

// A hint that has to wait for the next one to be due does not hold up Close.
func TestTier_CloseWhileAHintWaits(t *testing.T) {
	inBubble(t, func(t *testing.T, x *tier, _ *Log, rdb *redis.Client) {
		redistest.Must(t, rdb.Set(t.Context(), x.toldKey(), "", time.Hour).Err())
		closing, ended := make(chan struct{}), make(chan struct{})
		x.Tier.background = func(run func(<-chan struct{})) {
			go func() {
				defer close(ended)
				run(closing)
			}()
		}
		x.WakeOthers(t.Context())
		synctest.Wait()
		time.Sleep(time.Second)
		began := time.Now()
		close(closing)
		<-ended
		if d := time.Since(began); d > 0 {
			t.Errorf("Close waits for a hint for %v", d)
		}
	})
}

// What has ended or was invalidated is freed, and nothing else. Nothing runs when nothing is left.
func TestTier_Sweep(t *testing.T) {
	inBubble(t, func(t *testing.T, x *tier, _ *Log, _ *redis.Client) {
		x.background(t)
		x.Put("ends", x.Generation("ends"), &Copy{End: time.Second})
		x.Put("ends later", x.Generation("ends later"), &Copy{End: sweepEvery * 3 / 2})
		x.keep("deleted")
		x.Forget("deleted")
		x.Put("replaced", x.Generation("replaced"), &Copy{End: time.Second})
		x.keep("replaced")
		for _, want := range [][]string{{"ends later", "replaced"}, {"replaced"}} {
			time.Sleep(sweepEvery)
			synctest.Wait()
			if keys := slices.Sorted(x.values.Keys()); !slices.Equal(keys, want) {
				t.Errorf("in memory is %q, want %q", keys, want)
			}
		}
		x.Forget("replaced")
		time.Sleep(sweepEvery)
		synctest.Wait()
		if x.sweeping.Load() {
			t.Error("a timer runs for nothing")
		}
		x.Put("after that", x.Generation("after that"), new(Copy))
		time.Sleep(sweepEvery)
		synctest.Wait()
		if n := x.values.EstimatedSize(); n > 0 {
			t.Errorf("%d values are left of those put later", n)
		}
	})
}

// MaxBytes bounds what is kept by its length, and Size bounds it, too. A value that has no room is not kept.
func TestTier_Bytes(t *testing.T) {
	t.Parallel()
	const limit = 1 << 20
	for size, most := range map[uint32]int{10: 100, 1 << 10: 100, 100 << 10: 10, 2 << 20: 0} {
		x := newTier(nil)
		x.values = otter.Must(limited(&otter.Options[string, *Copy]{Executor: x.maintain}, local.Limits{Keys: 100, Bytes: limit}))
		for i := range 1000 {
			key := fmt.Sprint(i)
			c := lasting()
			c.Bytes = size
			x.Put(key, x.Generation(key), c)
		}
		x.values.CleanUp()
		if n := x.values.EstimatedSize(); n > most || n < most*9/10 {
			t.Errorf("%d values of %d bytes are kept, want %d", n, size, most)
		}
	}
}

// A Tier that has never been asked for a value takes next to no memory, and has nothing to forget.
func TestTier_Empty(t *testing.T) {
	inBubble(t, func(t *testing.T, x *tier, _ *Log, _ *redis.Client) {
		x.Forget("a")
		x.ForgetAll()
		if x.stripes.Load() != nil {
			t.Error("it has allocated the generations of keys")
		}
		g := x.Generation("a")
		x.Forget("a")
		x.Put("a", g, lasting())
		x.want(t, "invalidated after the first generation was taken", "a", false)
	})
}

// Close does not wait for a sweep.
func TestTier_CloseDuringASweep(t *testing.T) {
	inBubble(t, func(t *testing.T, x *tier, _ *Log, _ *redis.Client) {
		x.Put("ended", x.Generation("ended"), new(Copy))
		closing := make(chan struct{})
		close(closing)
		x.free(closing)
		if x.values.EstimatedSize() != 1 {
			t.Error("the sweep goes on")
		}
	})
}

// Calls that ask for the first generation at the same time get generations of the same stripes.
func TestTier_FirstGenerations(t *testing.T) {
	t.Parallel()
	for range 20 {
		x := newTier(nil)
		x.most.Keys = 1 << 20 // takes a while to allocate
		generations := make([]Generation, 8)
		var asking sync.WaitGroup
		for i := range generations {
			asking.Go(func() { generations[i] = x.Generation("a") })
		}
		asking.Wait()
		x.Forget("a")
		for _, g := range generations {
			if x.stripe(g.stripe).Load() == g.number {
				t.Fatal("one does not notice that its key was invalidated")
			}
		}
	}
}

// What a hit reads of a copy is in one line of memory, together with a string behind it: see Copy.
func TestCopy_OneLine(t *testing.T) {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		t.Skip("lines are counted for processors of 64 bits")
	}
	var box struct {
		_ Copy
		_ string
	}
	if begins, size := unsafe.Offsetof(Copy{}.checked), unsafe.Sizeof(box); begins != 64 || size <= 112 || size > 128 {
		t.Errorf("a hit reads a copy from byte %d on, want 64; with a string it has %d bytes, want 113 to 128", begins, size)
	}
}
