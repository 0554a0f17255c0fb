package cachetest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

// What is in Redis.

// Stored returns what a key holds. It asks by a script, which no client answers from its cache.
func Stored(t testing.TB, rdb redis.UniversalClient, key string) (data string, found bool) {
	t.Helper()
	data, err := rdb.Eval(context.Background(), "return redis.call('GET', KEYS[1])", []string{key}).Text()
	if client.ScriptsRefused(err) { // as the client of NewLocal does
		data, err = rdb.Get(context.Background(), key).Result()
	}
	if err != nil && !errors.Is(err, redis.Nil) {
		t.Fatal(err)
	}
	return data, err == nil
}

// WantStored checks which value of a Raw cache is in Redis; "" is for none.
func WantStored(t testing.TB, rdb redis.UniversalClient, namespace, key, want string) {
	t.Helper()
	const header = 35 // bytes
	data, found := Stored(t, rdb, namespace+":{"+key+"}")
	switch {
	case want == "" && found:
		t.Errorf("%q is in Redis, want nothing", data)
	case want != "" && (len(data) < header || data[header:] != want):
		t.Errorf("%q is in Redis, want %q", data, want)
	}
}

// WantUnlocked checks that no process holds the fill lock of a key.
func WantUnlocked(t testing.TB, rdb redis.UniversalClient, namespace, key string) {
	t.Helper()
	if record, _ := Stored(t, rdb, namespace+":{"+key+"}:lock"); strings.HasPrefix(record, "H") {
		t.Errorf("the fill lock is still held: %q", record)
	}
}

// PutEntry writes an entry as another process would have done.
func PutEntry(t testing.TB, look redis.UniversalClient, ns, key string, e entry.Entry,
	ttl time.Duration) (data string) {
	t.Helper()
	b, err := e.Encode()
	if err == nil {
		err = look.Set(context.Background(), ns+":{"+key+"}", b, ttl).Err()
	}
	redistest.Must(t, err)
	return string(b)
}

// GetEntry returns the entry that a key holds.
func GetEntry(t testing.TB, look redis.UniversalClient, ns, key string) (data string, e entry.Entry) {
	t.Helper()
	data, _ = Stored(t, look, ns+":{"+key+"}")
	e, err := entry.Parse([]byte(data))
	if err != nil {
		t.Fatalf("%s holds no entry: %v", key, err)
	}
	return data, e
}

// AwaitSeen waits until the client sees what a key holds: its own cache may be late.
func AwaitSeen(t testing.TB, rdb, look redis.UniversalClient, ns, key string) {
	t.Helper()
	redistest.Await(t, "the client sees what is stored under "+key, func() bool {
		data, _ := Stored(t, look, ns+":{"+key+"}")
		return rdb.Get(context.Background(), ns+":{"+key+"}").Val() == data
	})
}
