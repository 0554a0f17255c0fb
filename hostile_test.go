package singlefill_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// In these tests somebody else has written to our keys. Whatever it is counts as a miss, is counted, loaded
// once and overwritten; nobody gets an error for it, or waits longer than for a dead holder.

const hostileHeaderLen = 35

// hostileHeader is a valid header of an entry for a payload of n bytes, fresh for an hour.
func hostileHeader(n int) []byte {
	h := make([]byte, hostileHeaderLen)
	h[0], h[1] = 0xC1, 1
	binary.BigEndian.PutUint64(h[3:], uint64(time.Now().Add(time.Hour).UnixMilli()))
	binary.BigEndian.PutUint32(h[23:], uint32(n))
	copy(h[27:], "hostile!")
	return h
}

func hostileEntry(payload string) []byte { return append(hostileHeader(len(payload)), payload...) }

// hostileWith returns a valid entry with one byte of its header changed.
func hostileWith(entry []byte, at int, to byte) []byte {
	entry = slices.Clone(entry)
	entry[at] = to
	return entry
}

// A hostileCache is a cache of T with a loader and a look at its keys.
type hostileCache[T any] struct {
	*singlefill.Cache[T]
	rdb   redis.UniversalClient
	ns    string
	right T
	loads int
	bad   []error
}

func newHostileCache[T any](t testing.TB, rdb redis.UniversalClient, codec singlefill.Codec, right T) *hostileCache[T] {
	t.Helper()
	h := &hostileCache[T]{rdb: rdb, ns: redistest.Namespace(t), right: right}
	var mu sync.Mutex
	var err error
	h.Cache, err = singlefill.New(rdb, h.ns, time.Hour, &singlefill.Options[T]{
		Codec: codec, RedisTimeout: 3 * time.Second, LockTTL: 10 * time.Second,
		Trace: &singlefill.Trace{BadValue: func(_ context.Context, _ string, err error) {
			mu.Lock()
			defer mu.Unlock()
			h.bad = append(h.bad, err)
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close() })
	return h
}

func (h *hostileCache[T]) value(key string) string { return h.ns + ":{" + key + "}" }

func (h *hostileCache[T]) load(context.Context, string) (T, error) {
	h.loads++
	return h.right, nil
}

func hostileEqual[T any](a, b T) bool { return fmt.Sprintf("%#v", a) == fmt.Sprintf("%#v", b) }

// overcomes fails the test unless what is under the key is a bad value, and then is not any more.
func (h *hostileCache[T]) overcomes(t *testing.T, key string) {
	t.Helper()
	ctx := t.Context()
	before := h.Stats()
	loads, bad := h.loads, len(h.bad)
	if v, err := h.Get(ctx, key); err != singlefill.ErrMiss {
		t.Errorf("Get = %#v, %v, want ErrMiss", v, err)
	}
	if n := h.Stats().BadValues - before.BadValues; n != 1 || len(h.bad)-bad != 1 || h.bad[bad] == nil {
		t.Errorf("Get has counted %d bad values and told %v", n, h.bad[bad:])
	}
	v, err := h.GetOrLoad(ctx, key, h.load)
	if err != nil || !hostileEqual(v, h.right) || h.loads != loads+1 {
		t.Fatalf("GetOrLoad = %#v, %v after %d loads", v, err, h.loads-loads)
	}
	if n := h.Stats().BadValues - before.BadValues; n != 2 {
		t.Errorf("%d bad values were counted at two looks", n)
	}
	v, err = h.GetOrLoad(ctx, key, h.load)
	if err != nil || !hostileEqual(v, h.right) || h.loads != loads+1 {
		t.Errorf("the second GetOrLoad = %#v, %v after %d loads", v, err, h.loads-loads)
	}
	if v, err := h.Get(ctx, key); err != nil || !hostileEqual(v, h.right) {
		t.Errorf("the second Get = %#v, %v", v, err)
	}
	if n := h.rdb.Exists(ctx, h.value(key)+":lock").Val(); n != 0 {
		t.Error("the lock is left behind")
	}
	if ttl := h.rdb.PTTL(ctx, h.value(key)).Val(); ttl <= 0 || ttl > time.Hour {
		t.Errorf("the entry lives for %v", ttl)
	}
}

// hostileBytes is what everybody's cache must take for a miss.
func hostileBytes() map[string][]byte {
	good := hostileEntry("\xa5right") // msgpack
	bytes := map[string][]byte{
		"nothing":                       {},
		"one byte":                      {0xC1},
		"msgpack array of 4 Gi":         []byte("\xdd\xff\xff\xff\xff"),
		"msgpack map of 4 Gi":           []byte("\xdf\xff\xff\xff\xff"),
		"foreign text":                  []byte("a text of somebody else, which is longer than a header"),
		"foreign JSON":                  []byte(`{"a":"document of somebody else, longer than a header"}`),
		"header alone, with a length":   good[:hostileHeaderLen],
		"another magic":                 hostileWith(good, 0, 0xC2),
		"version 0":                     hostileWith(good, 1, 0),
		"a later version":               hostileWith(good, 1, 2),
		"the last version":              hostileWith(good, 1, 255),
		"an unknown flag":               hostileWith(good, 2, 1<<2),
		"all flags":                     hostileWith(good, 2, 255),
		"not found, with a payload":     hostileWith(good, 2, 1),
		"a length of 4 Gi":              hostileWith(hostileWith(hostileWith(hostileWith(good, 23, 255), 24, 255), 25, 255), 26, 255),
		"one byte more than the length": append(slices.Clone(good), 0),
		"two entries":                   append(slices.Clone(good), good...),
		"zeros":                         make([]byte, 100),
	}
	for n := range len(good) {
		bytes[fmt.Sprintf("an entry cut to %d bytes", n)] = good[:n]
	}
	return bytes
}

type hostileItem struct {
	Name string
	N    []int
}

//fault:foreign-key
//fault:bad-bytes
func TestForeignBytesAreAMissForEveryCodec(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		testHostile(t, rdb, "MsgPack", singlefill.MsgPack, hostileItem{"right", []int{1}}, map[string]string{
			"msgpack array of 4 Gi":    "\xdd\xff\xff\xff\xff",
			"msgpack array of 2 Gi":    "\xdd\x7f\xff\xff\xff",
			"msgpack map of 4 Gi":      "\xdf\xff\xff\xff\xff",
			"msgpack bytes of 4 Gi":    "\xc6\xff\xff\xff\xff",
			"msgpack text of 4 Gi":     "\xdb\xff\xff\xff\xff",
			"a million levels":         strings.Repeat("\x91", 1<<20),
			"another type":             "\xa5right",
			"a list":                   "\x93\x01\x02\x03",
			"a byte too many":          "\x80\x00",
			"JSON":                     `{"Name":"right"}`,
			"no payload":               "",
			"the byte never used":      "\xc1",
			"an item of another shape": "\x82\xa4Name\x01\xa1N\xa1x",
		})
		testHostile(t, rdb, "JSON", singlefill.JSON, hostileItem{"right", []int{1}}, map[string]string{
			"MsgPack":               "\x82\xa4Name\xa1x\xa1N\x90",
			"msgpack array of 4 Gi": "\xdd\xff\xff\xff\xff",
			"another type":          `"right"`,
			"a number too big":      `{"N":[1e400]}`,
			"a byte too many":       `{}x`,
			"half a document":       `{"Name":"ri`,
			"a million levels":      strings.Repeat("[", 1<<20),
			"no payload":            "",
		})
		testHostile(t, rdb, "Raw", singlefill.Raw, "right", nil)
		testHostile(t, rdb, "Raw bytes", singlefill.Raw, []byte("right"), nil)
	})
}

// testHostile puts foreign bytes, and valid headers before the foreign payloads, under a key.
func testHostile[T any](t *testing.T, rdb redis.UniversalClient, name string, codec singlefill.Codec, right T, payloads map[string]string) {
	t.Run(name, func(t *testing.T) {
		h := newHostileCache(t, rdb, codec, right)
		put := func(t *testing.T, what string, data []byte) {
			if err := rdb.Set(t.Context(), h.value("k"), data, time.Minute).Err(); err != nil {
				t.Fatal(err)
			}
			// A client that caches by itself learns of it a little later.
			redistest.Await(t, "the bytes are seen", func() bool {
				got, err := rdb.Get(t.Context(), h.value("k")).Bytes()
				return err == nil && slices.Equal(got, data)
			})
			h.overcomes(t, "k")
			if h.Stats().RedisErrors != 0 {
				t.Errorf("%d errors of Redis were counted", h.Stats().RedisErrors)
			}
			if t.Failed() {
				t.Fatalf("with %s", what)
			}
		}
		for what, data := range hostileBytes() {
			put(t, what, data)
		}
		for what, payload := range payloads {
			put(t, what+", after a header", hostileEntry(payload))
		}
		for _, forever := range []bool{false, true} {
			for what, write := range hostileTypes(h.value("k")) {
				if err := rdb.Del(t.Context(), h.value("k")).Err(); err != nil {
					t.Fatal(err)
				}
				if err := write(t.Context(), rdb); err != nil {
					t.Fatal(what, err)
				}
				if !forever {
					rdb.PExpire(t.Context(), h.value("k"), time.Minute)
				}
				redistest.Await(t, "the "+what+" is seen", func() bool {
					return strings.HasPrefix(fmt.Sprint(rdb.Get(t.Context(), h.value("k")).Err()), "WRONGTYPE")
				})
				h.overcomes(t, "k")
			}
		}
	})
}

// hostileTypes writes keys that are no strings.
func hostileTypes(key string) map[string]func(ctx context.Context, rdb redis.UniversalClient) error {
	return map[string]func(ctx context.Context, rdb redis.UniversalClient) error{
		"list": func(ctx context.Context, rdb redis.UniversalClient) error { return rdb.RPush(ctx, key, "x").Err() },
		"set":  func(ctx context.Context, rdb redis.UniversalClient) error { return rdb.SAdd(ctx, key, "x").Err() },
		"hash": func(ctx context.Context, rdb redis.UniversalClient) error { return rdb.HSet(ctx, key, "f", "x").Err() },
		"zset": func(ctx context.Context, rdb redis.UniversalClient) error {
			return rdb.ZAdd(ctx, key, redis.Z{Member: "x"}).Err()
		},
	}
}

func TestAStaleEntryIsAMissAndNoBadValue(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	h := newHostileCache(t, rdb, singlefill.Raw, "right")
	for _, fresh := range []int64{0, -1, 1, time.Now().Add(-time.Hour).UnixMilli(), -1 << 63} {
		entry := hostileEntry("old")
		binary.BigEndian.PutUint64(entry[3:], uint64(fresh))
		rdb.Set(t.Context(), h.value("k"), entry, time.Minute)
		loads := h.loads
		if _, err := h.Get(t.Context(), "k"); err != singlefill.ErrMiss {
			t.Errorf("fresh until %d: Get = %v", fresh, err)
		}
		if v, err := h.GetOrLoad(t.Context(), "k", h.load); v != "right" || err != nil || h.loads != loads+1 {
			t.Errorf("fresh until %d: GetOrLoad = %q, %v", fresh, v, err)
		}
		if v, err := h.Get(t.Context(), "k"); v != "right" || err != nil {
			t.Errorf("fresh until %d: the second Get = %q, %v", fresh, v, err)
		}
	}
	if n := h.Stats().BadValues; n != 0 {
		t.Errorf("%d bad values were counted", n)
	}
}

//fault:foreign-key
func TestForeignBytesUnderTheLockKeyAreNoLock(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		h := newHostileCache(t, rdb, singlefill.Raw, "right")
		for what, text := range map[string]string{
			"nothing":             "",
			"a word":              "garbage",
			"a word like a lock":  "Hello",
			"a letter":            "H",
			"text":                "a text of somebody else that is longer than a token",
			"numbers":             "12345678901234567890123456789012345678901234567890",
			"zeros":               strings.Repeat("\x00", 40),
			"a failure of nobody": "F" + strings.Repeat("x", 26) + "E" + "foreign",
		} {
			for _, ttl := range []time.Duration{0, time.Hour} {
				if err := errors.Join(rdb.Del(t.Context(), h.value("k")).Err(), rdb.Set(t.Context(), h.value("k")+":lock", text, ttl).Err()); err != nil {
					t.Fatal(err)
				}
				h.loadsOnce(t, fmt.Sprintf("%s for %v", what, ttl))
			}
		}
		// A holder without an end is none of ours.
		if err := errors.Join(rdb.Del(t.Context(), h.value("k")).Err(), rdb.Set(t.Context(), h.value("k")+":lock", "H"+strings.Repeat("x", 42), 0).Err()); err != nil {
			t.Fatal(err)
		}
		h.loadsOnce(t, "a holder without an end")
		for what, write := range hostileTypes(h.value("k") + ":lock") {
			if err := errors.Join(rdb.Del(t.Context(), h.value("k")).Err(), write(t.Context(), rdb)); err != nil {
				t.Fatal(err)
			}
			h.loadsOnce(t, what)
		}
		if s := h.Stats(); s.BadValues != 0 || s.RedisErrors != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// loadsOnce fails the test unless the key can be loaded at once, and is a hit then.
func (h *hostileCache[T]) loadsOnce(t *testing.T, what string) {
	t.Helper()
	redistest.Await(t, "the client sees that the value is gone", func() bool {
		return errors.Is(h.rdb.Get(t.Context(), h.value("k")).Err(), redis.Nil)
	})
	loads, waits := h.loads, h.Stats().Waits
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	for range 2 {
		if v, err := h.GetOrLoad(ctx, "k", h.load); err != nil || !hostileEqual(v, h.right) {
			t.Errorf("with %s at the lock: GetOrLoad = %#v, %v", what, v, err)
			h.rdb.Del(t.Context(), h.value("k")+":lock") // for the rows after it
			return
		}
	}
	if h.loads != loads+1 || h.Stats().Waits != waits {
		t.Errorf("with %s at the lock: %d loads, %d waits", what, h.loads-loads, h.Stats().Waits-waits)
	}
	if n := h.rdb.Exists(t.Context(), h.value("k")+":lock").Val(); n != 0 {
		t.Errorf("with %s at the lock: it is left behind", what)
	}
}

// Whoever waits for a load and finds the lock overwritten has not learned how that load ended.
//
//fault:bad-bytes
func TestForeignBytesUnderTheLockKeyAreNobodysFailure(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	admin := s.Admin()
	h := newHostileCache(t, s.Client(t), singlefill.Raw, "right")
	for _, text := range []string{"a text of somebody else that is longer than a token", "garbage", "Hello"} {
		if err := admin.Set(t.Context(), h.value("k")+":lock", "H"+strings.Repeat("x", 42), time.Minute).Err(); err != nil {
			t.Fatal(err)
		}
		s.ResetCalls()
		done := make(chan error)
		go func() {
			v, err := h.GetOrLoad(context.Background(), "k", h.load)
			if err == nil && v != h.right {
				err = fmt.Errorf("got %q", v)
			}
			done <- err
		}()
		redistest.Await(t, "somebody waits", func() bool { return s.Calls("pttl") > 0 })
		if err := admin.Set(t.Context(), h.value("k")+":lock", text, time.Minute).Err(); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Errorf("with %q at the lock: GetOrLoad = %v", text, err)
		}
		if err := h.Delete(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
	}
}

// FuzzStoredBytes writes any bytes under a key: the caller gets a value, for no more memory than the bytes are worth.
func FuzzStoredBytes(f *testing.F) {
	for _, data := range hostileBytes() {
		f.Add(data, false)
		f.Add(data, true)
	}
	f.Add([]byte(strings.Repeat("\x91", 100_000)), true)
	f.Add([]byte(strings.Repeat("\xc0", 100_000)), true)
	f.Add([]byte(`[`+strings.Repeat(`{},`, 1000)+`{}]`), true)
	f.Fuzz(func(t *testing.T, data []byte, header bool) {
		if header {
			data = hostileEntry(string(data))
		}
		_, rdb := redistest.StartMini(t)
		fuzzStored(t, rdb, "msgpack", singlefill.MsgPack, any("right"), data)
		fuzzStored(t, rdb, "structs", singlefill.MsgPack, []hostileItem{{Name: "right"}}, data)
		fuzzStored(t, rdb, "maps", singlefill.MsgPack, map[string][]string{"right": nil}, data)
		fuzzStored(t, rdb, "json", singlefill.JSON, any("right"), data)
		fuzzStored(t, rdb, "raw", singlefill.Raw, "right", data)
	})
}

// hostileMost is what looking at n foreign bytes may allocate: what the codecs allow themselves for them, and
// the copies of them on their way.
func hostileMost(n int) uint64 { return 64<<20 + uint64(n)*(64+64) }

func fuzzStored[T any](t *testing.T, rdb *redis.Client, name string, codec singlefill.Codec, right T, data []byte) {
	t.Helper()
	h := newHostileCache(t, rdb, codec, right)
	if err := rdb.Set(t.Context(), h.value("k"), data, time.Minute).Err(); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := h.GetOrLoad(t.Context(), "k", h.load)
	runtime.ReadMemStats(&after)
	if err != nil && !(err == singlefill.ErrNotFound && h.loads == 0) {
		t.Errorf("%s: GetOrLoad = %v", name, err)
	}
	if used := after.TotalAlloc - before.TotalAlloc; used > 2*hostileMost(len(data)) { // it may have looked twice
		t.Errorf("%s: %d bytes were allocated for %d", name, used, len(data))
	}
	// A hit is right to be one: the next look says the same.
	if n := h.Stats(); h.loads > 1 || n.RedisErrors != 0 || h.loads == 0 && n.BadValues != 0 {
		t.Errorf("%s: %d loads, %+v", name, h.loads, n)
	}
	loads := h.loads
	if _, err := h.GetOrLoad(t.Context(), "k", h.load); err != nil && err != singlefill.ErrNotFound || h.loads != loads {
		t.Errorf("%s: the second GetOrLoad = %v, %d loads", name, err, h.loads)
	}
}
