package cachetest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
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

// RefreshKinds make entries that every read refreshes. One is stale. The other one soon will be, and its
// load took so long that an early refresh is certain.
var RefreshKinds = map[string]func(payload string) entry.Entry{
	"stale": func(payload string) entry.Entry {
		now := time.Now()
		return entry.Entry{FreshUntil: now.Add(-time.Second), WrittenAt: now.Add(-time.Minute), Payload: []byte(payload)}
	},
	"early": func(payload string) entry.Entry {
		now := time.Now()
		return entry.Entry{FreshUntil: now.Add(time.Second), WrittenAt: now.Add(-time.Minute), LoadTime: 1000 * time.Hour, Payload: []byte(payload)}
	},
}

// StaleLife is the life of every entry, unless a test says otherwise.
const StaleLife = time.Hour

// StaleOptions are two windows of a Raw cache of which nothing is random.
func StaleOptions(whileRevalidate, ifError time.Duration) *singlefill.Options[string] {
	return &singlefill.Options[string]{
		Codec: singlefill.Raw, Jitter: -1, EarlyRefresh: -1, StaleWhileRevalidate: whileRevalidate, StaleIfError: ifError,
	}
}

// SetStale stores a value and returns when it has been stale for late.
func SetStale(t testing.TB, c *singlefill.Cache[string], key, value string, late time.Duration) {
	t.Helper()
	redistest.Must(t, c.Set(t.Context(), key, value))
	time.Sleep(StaleLife + late)
}

// OldCache returns a cache whose values live for a second. Its key k has been stale for late.
func OldCache[T any](t *testing.T, rdb *redis.Client, opts singlefill.Options[T], value T,
	late time.Duration) *singlefill.Cache[T] {
	t.Helper()
	opts.Jitter = -1
	c, err := singlefill.New(rdb, "ns", time.Second, &opts)
	redistest.Must(t, err)
	t.Cleanup(func() { c.Close() })
	redistest.Must(t, c.Set(t.Context(), "k", value))
	time.Sleep(time.Second + late)
	return c
}

// WantOld wants the value that SetStale stored, at once, stale for late; err is the reason.
func (a Answer) WantOld(t testing.TB, what string, late time.Duration, err error) {
	t.Helper()
	a.Want(t, what, Answer{Value: "old", Info: singlefill.ValueInfo{Stale: true, Age: StaleLife + late, Err: err}})
}

// WantRemote is WantOld with a failure of which Redis says. It may be an earlier one of this process.
func (a Answer) WantRemote(t testing.TB, what string, late time.Duration, text string) {
	t.Helper()
	var remote *singlefill.RemoteError
	if !errors.As(a.Info.Err, &remote) || remote.Message != text || strings.Contains(a.Info.Err.Error(), "process") {
		t.Errorf("%s: the reason is %v, want a RemoteError %q", what, a.Info.Err, text)
	}
	a.WantOld(t, what, late, a.Info.Err)
}

// WantFresh wants a value that was stored at this instant, at once.
func (a Answer) WantFresh(t testing.TB, what, value string) {
	t.Helper()
	a.Want(t, what, Answer{Value: value})
}
