package redistest

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
)

// NoRetry configures a client that sends each command once.
func NoRetry(o *redis.Options) { o.MaxRetries = -1 }

// Must ends the test if there was an error. Call it in the goroutine of the test.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Do sends a command of which only the success matters, and fails the test without it.
func Do(t testing.TB, admin *redis.Client, args ...any) {
	t.Helper()
	if err := admin.Do(context.Background(), args...).Err(); err != nil {
		t.Errorf("%v: %v", args, err)
	}
}

// Allocated returns how many bytes a call of f allocates, and what else runs at that time.
func Allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// Heap returns how many bytes of the heap are in use, and not by pools, which keep their memory for one collection.
func Heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Exists reports whether the server has the key.
func Exists(t testing.TB, rdb redis.UniversalClient, key string) bool {
	t.Helper()
	n, err := rdb.Exists(context.Background(), key).Result()
	Must(t, err)
	return n == 1
}

// ErrorsSaid returns how often servers have answered with an error of the code.
func ErrorsSaid(t testing.TB, code string, servers ...*Server) (all int) {
	t.Helper()
	for _, s := range servers {
		info, err := s.admin.Info(context.Background(), "errorstats").Result()
		Must(t, err)
		var n int
		_, count, _ := strings.Cut(info, "errorstat_"+code+":count=")
		fmt.Sscan(count, &n)
		all += n
	}
	return all
}

// User makes a user of the server with such rights, as ACL SETUSER takes them, and returns what
// makes a client that user. The user is gone after the test.
func (s *Server) User(t testing.TB, rights ...string) func(*redis.Options) {
	t.Helper()
	name := fmt.Sprint("user", users.Add(1))
	args := []any{"acl", "setuser", name, "on", ">pw"}
	for _, right := range rights {
		args = append(args, right)
	}
	Do(t, s.admin, args...)
	t.Cleanup(func() { s.admin.Do(context.Background(), "acl", "deluser", name) })
	return func(o *redis.Options) { o.Username, o.Password = name, "pw" }
}

var users atomic.Int64

// Refused returns the commands, keys and channels that the server has refused to the user of rdb.
func (s *Server) Refused(t testing.TB, rdb *redis.Client) (refused []string) {
	t.Helper()
	entries, err := s.admin.ACLLog(context.Background(), 128).Result()
	Must(t, err)
	for _, e := range entries {
		if e.Username == rdb.Options().Username {
			refused = append(refused, e.Object)
		}
	}
	return refused
}
