package redistest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// A test must leave no connection and no key without a TTL. Both are checked when a server is
// stopped, unless its test has killed or frozen it.

// Planted declares that t creates keys without a TTL on purpose, whose names contain one of the
// texts.
func Planted(t testing.TB, texts ...string) {
	planted.mu.Lock()
	defer planted.mu.Unlock()
	for _, text := range texts {
		planted.by = append(planted.by, plant{t.Name(), text})
	}
}

var planted struct {
	mu sync.Mutex
	by []plant // protected by mu
}

type plant struct{ test, text string }

// isPlanted reports whether the test, one of its subtests, or a test that it is a subtest of has
// planted the key. If test is "", any test may have planted it.
func isPlanted(test, key string) bool {
	planted.mu.Lock()
	defer planted.mu.Unlock()
	for _, p := range planted.by {
		related := test == "" || strings.HasPrefix(p.test+"/", test+"/") || strings.HasPrefix(test+"/", p.test+"/")
		if related && strings.Contains(key, p.text) {
			return true
		}
	}
	return false
}

// isModuleKey reports whether key looks like a key of this module, all of which have a hash tag,
// and not like a counter of a test.
func isModuleKey(key string) bool { return strings.Contains(key, "{") }

// check fails the test for leaks on its servers.
func check(t testing.TB, servers ...*Server) {
	t.Helper()
	for _, s := range servers {
		for _, leak := range s.leaks(t.Name()) {
			t.Error(leak)
		}
	}
}

// leaks returns the leaks on the server after a test. All clients of the test are closed then, so
// every other connection is a leak, unless it ends within leakLimit.
func (s *Server) leaks(test string) (found []string) {
	_ = s.admin.Close()
	if s.ended() || s.frozen.Load() {
		return nil
	}
	opt := quiet(s.Addr)
	opt.PoolSize, opt.MaxRetries, opt.DialerRetries, opt.ReadTimeout = 1, -1, 1, time.Second
	rdb := redis.NewClient(opt)
	defer rdb.Close()
	var clients []string
	var err error
	if poll(leakLimit, func() bool {
		clients, err = otherClients(rdb)
		return len(clients) == 0
	}); err != nil {
		return nil
	}
	for _, client := range clients {
		found = append(found, fmt.Sprintf("redistest: a connection to %s was left behind: %s", s.Addr, client))
	}
	keys, err := keysWithoutTTL(rdb, test)
	if err != nil {
		return nil
	}
	for _, key := range keys {
		found = append(found, fmt.Sprintf("redistest: a key on %s has no TTL: %q", s.Addr, key))
	}
	return found
}

// otherClients returns the clients of a server other than rdb and other servers: masters, replicas,
// and a node of its cluster that has moved keys to it.
func otherClients(rdb *redis.Client) (found []string, err error) {
	ctx := context.Background()
	id, err := rdb.ClientID(ctx).Result()
	if err != nil {
		return nil, err
	}
	list, err := rdb.ClientList(ctx).Result()
	for line := range strings.Lines(list) {
		switch {
		case strings.HasPrefix(line, fmt.Sprintf("id=%d ", id)):
		case strings.Contains(line, " flags=S"), strings.Contains(line, " flags=M"):
		case strings.Contains(line, " cmd=restore-asking "):
		default:
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found, err
}

// keysWithoutTTL returns the keys of this module that have no TTL, except those that the test has planted.
func keysWithoutTTL(rdb *redis.Client, test string) (found []string, err error) {
	ctx := context.Background()
	keys := rdb.Scan(ctx, 0, "*{*", 1000).Iterator()
	for keys.Next(ctx) {
		ttl, err := rdb.PTTL(ctx, keys.Val()).Result()
		if err != nil {
			return nil, err
		}
		if ttl == -1 && isModuleKey(keys.Val()) && !isPlanted(test, keys.Val()) {
			found = append(found, keys.Val())
		}
	}
	return found, keys.Err()
}

// checkLocal is check for the client of NewLocal.
func checkLocal(t testing.TB, rdb *redis.Client) {
	t.Helper()
	keys, err := keysWithoutTTL(rdb, t.Name())
	if err != nil || len(keys) > 0 {
		t.Errorf("redistest: keys without a TTL: %q, %v", keys, err)
	}
}

// checkMini is check for a miniredis, whose connections are all made by net.Pipe.
func checkMini(t testing.TB, m *miniredis.Miniredis) {
	t.Helper()
	for _, key := range m.Keys() {
		// A key that has expired since has no TTL, and does not exist.
		if m.TTL(key) == 0 && m.Exists(key) && isModuleKey(key) && !isPlanted(t.Name(), key) {
			t.Errorf("redistest: a key has no TTL: %q", key)
		}
	}
}
