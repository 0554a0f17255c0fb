package singlefill_test

import (
	"context"
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// foreignEntry returns a payload of another program behind a valid header, which is fresh for an hour.
func foreignEntry(payload string) []byte {
	h := make([]byte, 35)
	h[0], h[1] = 0xC1, 1
	binary.BigEndian.PutUint64(h[3:], uint64(time.Now().Add(time.Hour).UnixMilli()))
	binary.BigEndian.PutUint32(h[23:], uint32(len(payload)))
	copy(h[27:], "foreign!")
	return append(h, payload...)
}

type foreignItem struct {
	Name string
	N    []int
}

// FuzzStoredBytes stores any bytes under the key of a value. A caller gets a value all the same, from one
// load, and the memory that is allocated is in proportion to the bytes.
func FuzzStoredBytes(f *testing.F) {
	slow := foreignEntry("slow")
	slow[19] = 'K' // its load took two weeks
	for _, data := range []string{
		"", "\xc1", "\xdd\xff\xff\xff\xff", "\xdf\xff\xff\xff\xff",
		"a text of another program, which is longer than a header",
		string(foreignEntry("\xa5right")), string(foreignEntry("\xa5right"))[:36], string(slow),
		"\xa5right", "\x93\x01\x02\x03", "\x80\x00", "\x82\xa4Name\x01\xa1N\xa1x", `{"Name":"ri`, `{"N":[1e400]}`,
		strings.Repeat("\x91", 1<<20), strings.Repeat("[", 1<<20), strings.Repeat("\xc0", 100_000),
		`[` + strings.Repeat(`{},`, 1000) + `{}]`,
	} {
		f.Add([]byte(data), false)
		f.Add([]byte(data), true)
	}
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
	ns := redistest.Namespace(t)
	c, err := singlefill.New(rdb, ns, time.Hour, &singlefill.Options[T]{
		Codec: codec, RedisTimeout: 3 * time.Second, LockTTL: 10 * time.Second,
		EarlyRefresh: -1, // a header may claim any load time
	})
	redistest.Must(t, err)
	defer c.Close()
	loads := 0
	load := func(context.Context, string) (T, error) { loads++; return right, nil }
	redistest.Must(t, rdb.Set(t.Context(), ns+":{k}", data, time.Minute).Err())
	used := redistest.Allocated(func() { _, err = c.GetOrLoad(t.Context(), "k", load) })
	if err != nil && !(err == singlefill.ErrNotFound && loads == 0) {
		t.Errorf("%s: GetOrLoad = %v", name, err)
	}
	if used > 2*mayAllocate(len(data)) { // GetOrLoad may read twice
		t.Errorf("%s: %d bytes were allocated for %d", name, used, len(data))
	}
	// A hit must be a hit again, and bytes that are none are counted.
	if n := c.Stats(); loads > 1 || n.RedisErrors != 0 || (loads == 0) != (n.BadValues == 0) {
		t.Errorf("%s: %d loads, %+v", name, loads, n)
	}
	first := loads
	if _, err := c.GetOrLoad(t.Context(), "k", load); err != nil && err != singlefill.ErrNotFound || loads != first {
		t.Errorf("%s: the second GetOrLoad = %v, %d loads", name, err, loads)
	}
}
