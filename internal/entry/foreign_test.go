package entry_test

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

func TestMain(m *testing.M) { redistest.Main(m) }

// In these tests another program has written to the cache's keys. Its bytes are a miss, are
// counted, and are overwritten by one load. No caller gets an error for them, or waits longer than
// for a dead holder.

const entryHeaderLen = 35

// foreignHeader returns a valid header for a payload of n bytes, which is fresh for an hour.
func foreignHeader(n int) []byte {
	h := make([]byte, entryHeaderLen)
	h[0], h[1] = 0xC1, 1
	binary.BigEndian.PutUint64(h[3:], uint64(time.Now().Add(time.Hour).UnixMilli()))
	binary.BigEndian.PutUint32(h[23:], uint32(n))
	copy(h[27:], "foreign!")
	return h
}

func foreignEntry(payload string) []byte { return append(foreignHeader(len(payload)), payload...) }

// withByte returns a copy of data with another byte at one place.
func withByte(data []byte, at int, to byte) []byte {
	data = slices.Clone(data)
	data[at] = to
	return data
}

// A foreignCache is a cache of T with a Loader that returns right.
type foreignCache[T any] struct {
	*singlefill.Cache[T]
	rdb   redis.UniversalClient
	ns    string
	right T
	loads int
	bad   []error // reported by Trace.BadValue
}

func newForeignCache[T any](t testing.TB, rdb redis.UniversalClient, codec singlefill.Codec, right T) *foreignCache[T] {
	t.Helper()
	h := &foreignCache[T]{rdb: rdb, ns: redistest.Namespace(t), right: right}
	var mu sync.Mutex
	var err error
	h.Cache, err = singlefill.New(rdb, h.ns, time.Hour, &singlefill.Options[T]{
		Codec: codec, RedisTimeout: 3 * time.Second, LockTTL: 10 * time.Second,
		EarlyRefresh: -1, // a header may claim any load time
		Trace: &singlefill.Trace{BadValue: func(_ context.Context, _ string, err error) {
			mu.Lock()
			defer mu.Unlock()
			h.bad = append(h.bad, err)
		}},
	})
	redistest.Must(t, err)
	t.Cleanup(func() { _ = h.Close() })
	return h
}

func (h *foreignCache[T]) value(key string) string { return h.ns + ":{" + key + "}" }

func (h *foreignCache[T]) load(context.Context, string) (T, error) {
	h.loads++
	return h.right, nil
}

func sameValue[T any](a, b T) bool { return fmt.Sprintf("%#v", a) == fmt.Sprintf("%#v", b) }

// wantOvercome fails the test unless the key has a bad value, which one load replaces.
func (h *foreignCache[T]) wantOvercome(t *testing.T, key string) {
	t.Helper()
	ctx := t.Context()
	before := h.Stats()
	loads, bad := h.loads, len(h.bad)
	if v, err := h.Get(ctx, key); err != singlefill.ErrMiss {
		t.Errorf("Get = %#v, %v, want ErrMiss", v, err)
	}
	if n := h.Stats().BadValues - before.BadValues; n != 1 || len(h.bad)-bad != 1 || h.bad[bad] == nil {
		t.Errorf("Get has counted %d bad values and reported %v", n, h.bad[bad:])
	}
	v, err := h.GetOrLoad(ctx, key, h.load)
	if err != nil || !sameValue(v, h.right) || h.loads != loads+1 {
		t.Fatalf("GetOrLoad = %#v, %v after %d loads", v, err, h.loads-loads)
	}
	if n := h.Stats().BadValues - before.BadValues; n != 2 {
		t.Errorf("%d bad values were counted by two reads", n)
	}
	v, err = h.GetOrLoad(ctx, key, h.load)
	if err != nil || !sameValue(v, h.right) || h.loads != loads+1 {
		t.Errorf("the second GetOrLoad = %#v, %v after %d loads", v, err, h.loads-loads)
	}
	if v, err := h.Get(ctx, key); err != nil || !sameValue(v, h.right) {
		t.Errorf("the second Get = %#v, %v", v, err)
	}
	if n := h.rdb.Exists(ctx, h.value(key)+":lock").Val(); n != 0 {
		t.Error("the lock is left behind")
	}
	if ttl := h.rdb.PTTL(ctx, h.value(key)).Val(); ttl <= 0 || ttl > time.Hour {
		t.Errorf("the entry has a TTL of %v", ttl)
	}
}

// foreignBytes are a miss for every codec.
func foreignBytes() map[string][]byte {
	good := foreignEntry("\xa5right") // msgpack
	bytes := map[string][]byte{
		"nothing":                       {},
		"one byte":                      {0xC1},
		"msgpack array of 4 Gi":         []byte("\xdd\xff\xff\xff\xff"),
		"msgpack map of 4 Gi":           []byte("\xdf\xff\xff\xff\xff"),
		"foreign text":                  []byte("a text of another program, which is longer than a header"),
		"foreign JSON":                  []byte(`{"a":"document of another program, longer than a header"}`),
		"header alone, with a length":   good[:entryHeaderLen],
		"another magic":                 withByte(good, 0, 0xC2),
		"version 0":                     withByte(good, 1, 0),
		"a later version":               withByte(good, 1, 2),
		"the last version":              withByte(good, 1, 255),
		"an unknown flag":               withByte(good, 2, 1<<2),
		"all flags":                     withByte(good, 2, 255),
		"not found, with a payload":     withByte(good, 2, 1),
		"a length of 4 Gi":              withByte(withByte(withByte(withByte(good, 23, 255), 24, 255), 25, 255), 26, 255),
		"one byte more than the length": append(slices.Clone(good), 0),
		"two entries":                   append(slices.Clone(good), good...),
		"zeros":                         make([]byte, 100),
	}
	for n := range len(good) {
		bytes[fmt.Sprintf("an entry cut to %d bytes", n)] = good[:n]
	}
	return bytes
}

type foreignItem struct {
	Name string
	N    []int
}

// Foreign bytes under a value key are a miss, whatever the codec.
//
//fault:foreign-key
//fault:bad-bytes
func TestForeignBytes_AreAMiss(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		testForeign(t, rdb, "MsgPack", singlefill.MsgPack, foreignItem{"right", []int{1}}, map[string]string{
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
		testForeign(t, rdb, "JSON", singlefill.JSON, foreignItem{"right", []int{1}}, map[string]string{
			"MsgPack":               "\x82\xa4Name\xa1x\xa1N\x90",
			"msgpack array of 4 Gi": "\xdd\xff\xff\xff\xff",
			"another type":          `"right"`,
			"a number too big":      `{"N":[1e400]}`,
			"a byte too many":       `{}x`,
			"half a document":       `{"Name":"ri`,
			"a million levels":      strings.Repeat("[", 1<<20),
			"no payload":            "",
		})
		testForeign(t, rdb, "Raw", singlefill.Raw, "right", nil)
		testForeign(t, rdb, "Raw bytes", singlefill.Raw, []byte("right"), nil)
	})
}

// testForeign puts foreign bytes under a key, and foreign payloads behind a valid header.
func testForeign[T any](t *testing.T, rdb redis.UniversalClient, name string, codec singlefill.Codec, right T,
	payloads map[string]string) {
	t.Run(name, func(t *testing.T) {
		h := newForeignCache(t, rdb, codec, right)
		put := func(t *testing.T, what string, data []byte) {
			redistest.Must(t, rdb.Set(t.Context(), h.value("k"), data, time.Minute).Err())
			// A client with its own cache sees them a little later.
			redistest.Await(t, "the bytes are seen", func() bool {
				got, err := rdb.Get(t.Context(), h.value("k")).Bytes()
				return err == nil && slices.Equal(got, data)
			})
			h.wantOvercome(t, "k")
			if h.Stats().RedisErrors != 0 {
				t.Errorf("%d errors of Redis were counted", h.Stats().RedisErrors)
			}
			if t.Failed() {
				t.Fatalf("with %s", what)
			}
		}
		for what, data := range foreignBytes() {
			put(t, what, data)
		}
		for what, payload := range payloads {
			put(t, what+", after a header", foreignEntry(payload))
		}
		for _, forever := range []bool{false, true} {
			for what, write := range foreignTypes(h.value("k")) {
				redistest.Must(t, rdb.Del(t.Context(), h.value("k")).Err())
				if err := write(t.Context(), rdb); err != nil {
					t.Fatal(what, err)
				}
				if !forever {
					rdb.PExpire(t.Context(), h.value("k"), time.Minute)
				}
				redistest.Await(t, "the "+what+" is seen", func() bool {
					return strings.HasPrefix(fmt.Sprint(rdb.Get(t.Context(), h.value("k")).Err()), "WRONGTYPE")
				})
				h.wantOvercome(t, "k")
			}
		}
	})
}

// foreignTypes make keys that are no strings.
func foreignTypes(key string) map[string]func(ctx context.Context, rdb redis.UniversalClient) error {
	return map[string]func(ctx context.Context, rdb redis.UniversalClient) error{
		"list": func(ctx context.Context, rdb redis.UniversalClient) error { return rdb.RPush(ctx, key, "x").Err() },
		"set":  func(ctx context.Context, rdb redis.UniversalClient) error { return rdb.SAdd(ctx, key, "x").Err() },
		"hash": func(ctx context.Context, rdb redis.UniversalClient) error { return rdb.HSet(ctx, key, "f", "x").Err() },
		"zset": func(ctx context.Context, rdb redis.UniversalClient) error {
			return rdb.ZAdd(ctx, key, redis.Z{Member: "x"}).Err()
		},
	}
}

// An expired entry is a miss, and no bad value.
func TestForeignBytes_ExpiredEntry(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	h := newForeignCache(t, rdb, singlefill.Raw, "right")
	for _, fresh := range []int64{0, -1, 1, time.Now().Add(-time.Hour).UnixMilli(), -1 << 63} {
		data := foreignEntry("old")
		binary.BigEndian.PutUint64(data[3:], uint64(fresh))
		rdb.Set(t.Context(), h.value("k"), data, time.Minute)
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

// Foreign bytes under a lock key are no lock.
//
//fault:foreign-key
func TestForeignBytes_UnderLockKey(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		h := newForeignCache(t, rdb, singlefill.Raw, "right")
		for what, text := range map[string]string{
			"nothing":            "",
			"a word":             "garbage",
			"a word like a lock": "Hello",
			"a letter":           "H",
			"text":               "a text of another program that is longer than a token",
			"numbers":            "12345678901234567890123456789012345678901234567890",
			"zeros":              strings.Repeat("\x00", 40),
			"a foreign failure":  "F" + strings.Repeat("x", 26) + "E" + "foreign",
		} {
			for _, ttl := range []time.Duration{0, time.Hour} {
				redistest.Must(t, errors.Join(rdb.Del(t.Context(), h.value("k")).Err(), rdb.Set(t.Context(), h.value("k")+":lock", text, ttl).Err()))
				h.wantLoadedOnce(t, fmt.Sprintf("%s for %v", what, ttl))
			}
		}
		// Locks of this library have a TTL.
		redistest.Must(t, errors.Join(rdb.Del(t.Context(), h.value("k")).Err(), rdb.Set(t.Context(), h.value("k")+":lock", "H"+strings.Repeat("x", 42), 0).Err()))
		h.wantLoadedOnce(t, "a lock without a TTL")
		for what, write := range foreignTypes(h.value("k") + ":lock") {
			redistest.Must(t, errors.Join(rdb.Del(t.Context(), h.value("k")).Err(), write(t.Context(), rdb)))
			h.wantLoadedOnce(t, what)
		}
		if s := h.Stats(); s.BadValues != 0 || s.RedisErrors != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// wantLoadedOnce fails the test unless the key is loaded at once, and is a hit afterwards.
func (h *foreignCache[T]) wantLoadedOnce(t *testing.T, what string) {
	t.Helper()
	redistest.Await(t, "the client sees that the value is gone", func() bool {
		return errors.Is(h.rdb.Get(t.Context(), h.value("k")).Err(), redis.Nil)
	})
	loads, waits := h.loads, h.Stats().Waits
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	for range 2 {
		if v, err := h.GetOrLoad(ctx, "k", h.load); err != nil || !sameValue(v, h.right) {
			t.Errorf("with %s under the lock key: GetOrLoad = %#v, %v", what, v, err)
			h.rdb.Del(t.Context(), h.value("k")+":lock") // for the next row
			return
		}
	}
	if h.loads != loads+1 || h.Stats().Waits != waits {
		t.Errorf("with %s under the lock key: %d loads, %d waits", what, h.loads-loads, h.Stats().Waits-waits)
	}
	if n := h.rdb.Exists(t.Context(), h.value("k")+":lock").Val(); n != 0 {
		t.Errorf("with %s under the lock key: it is left behind", what)
	}
}

// FuzzStoredBytes stores any bytes. A caller gets a value all the same, and the memory that is
// allocated is in proportion to the bytes.
func FuzzStoredBytes(f *testing.F) {
	for _, data := range foreignBytes() {
		f.Add(data, false)
		f.Add(data, true)
	}
	f.Add([]byte(strings.Repeat("\x91", 100_000)), true)
	f.Add([]byte(strings.Repeat("\xc0", 100_000)), true)
	f.Add([]byte(`[`+strings.Repeat(`{},`, 1000)+`{}]`), true)
	f.Add(withByte(foreignEntry("slow"), 19, 'K'), false) // its load took two weeks
	f.Fuzz(func(t *testing.T, data []byte, header bool) {
		if header {
			data = foreignEntry(string(data))
		}
		_, rdb := redistest.StartMini(t)
		fuzzStored(t, rdb, "msgpack", singlefill.MsgPack, any("right"), data)
		fuzzStored(t, rdb, "structs", singlefill.MsgPack, []foreignItem{{Name: "right"}}, data)
		fuzzStored(t, rdb, "maps", singlefill.MsgPack, map[string][]string{"right": nil}, data)
		fuzzStored(t, rdb, "json", singlefill.JSON, any("right"), data)
		fuzzStored(t, rdb, "raw", singlefill.Raw, "right", data)
	})
}

// mayAllocate returns how much a read of n foreign bytes may allocate: the limits of the codecs,
// and copies of the bytes on their way.
func mayAllocate(n int) uint64 { return 64<<20 + uint64(n)*(64+64) }

func fuzzStored[T any](t *testing.T, rdb *redis.Client, name string, codec singlefill.Codec, right T, data []byte) {
	t.Helper()
	h := newForeignCache(t, rdb, codec, right)
	redistest.Must(t, rdb.Set(t.Context(), h.value("k"), data, time.Minute).Err())
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := h.GetOrLoad(t.Context(), "k", h.load)
	runtime.ReadMemStats(&after)
	if err != nil && !(err == singlefill.ErrNotFound && h.loads == 0) {
		t.Errorf("%s: GetOrLoad = %v", name, err)
	}
	if used := after.TotalAlloc - before.TotalAlloc; used > 2*mayAllocate(len(data)) { // GetOrLoad may read twice
		t.Errorf("%s: %d bytes were allocated for %d", name, used, len(data))
	}
	// A hit must be a hit again.
	if n := h.Stats(); h.loads > 1 || n.RedisErrors != 0 || h.loads == 0 && n.BadValues != 0 {
		t.Errorf("%s: %d loads, %+v", name, h.loads, n)
	}
	loads := h.loads
	if _, err := h.GetOrLoad(t.Context(), "k", h.load); err != nil && err != singlefill.ErrNotFound || h.loads != loads {
		t.Errorf("%s: the second GetOrLoad = %v, %d loads", name, err, h.loads)
	}
}
