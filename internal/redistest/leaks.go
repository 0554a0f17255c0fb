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

// A test must leave no connection and no key without an end behind. Both are looked
// for when a server is stopped, in what it has then; a server that cannot be asked
// then, because its test has killed or frozen it, is not.

// Planted says that t puts keys on a server on purpose that have no TTL, under names
// that keys of this module might have: those that contain one of the texts.
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

// isPlanted reports whether the test has planted the key, or one of its subtests, or
// one that it is a subtest of; if test is "", whether any has.
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

// isModuleKey tells the keys of this module, all of which have a hash tag, from what
// tests count and keep on the side.
func isModuleKey(key string) bool { return strings.Contains(key, "{") }

// check fails the test for what is left on its servers.
func check(t testing.TB, servers ...*Server) {
	t.Helper()
	for _, s := range servers {
		for _, leak := range s.leaks(t.Name()) {
			t.Error(leak)
		}
	}
}

// leaks says what is left on the server after a test. All its clients are closed
// then, so that whoever is still connected has been forgotten.
func (s *Server) leaks(test string) (found []string) {
	_ = s.admin.Close()
	if s.proc.ended() || s.proc.frozen.Load() {
		return nil
	}
	opt := quiet(s.Addr)
	opt.PoolSize, opt.MaxRetries, opt.DialerRetries, opt.ReadTimeout = 1, -1, 1, time.Second
	rdb := redis.NewClient(opt)
	defer rdb.Close()
	var clients []string
	var err error
	if poll(leakLimit, func() bool {
		clients, err = strangers(rdb)
		return len(clients) == 0
	}); err != nil {
		return nil
	}
	for _, client := range clients {
		found = append(found, fmt.Sprintf("redistest: a connection to %s was left behind: %s", s.Addr, client))
	}
	keys, err := immortal(rdb)
	if err != nil {
		return nil
	}
	for _, key := range keys {
		if !isPlanted(test, key) {
			found = append(found, fmt.Sprintf("redistest: a key on %s has no TTL: %q", s.Addr, key))
		}
	}
	return found
}

// strangers returns the clients of a server other than rdb itself and those of its
// kind: masters and replicas, a node of its cluster that has moved keys to it.
func strangers(rdb *redis.Client) (found []string, err error) {
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

// immortal returns the keys of this module that have no TTL.
func immortal(rdb *redis.Client) (found []string, err error) {
	ctx := context.Background()
	keys := rdb.Scan(ctx, 0, "*{*", 1000).Iterator()
	for keys.Next(ctx) {
		ttl, err := rdb.PTTL(ctx, keys.Val()).Result()
		if err != nil {
			return nil, err
		}
		if ttl == -1 && isModuleKey(keys.Val()) {
			found = append(found, keys.Val())
		}
	}
	return found, keys.Err()
}

// checkMini is check for a miniredis, to which nobody is connected but by net.Pipe.
func checkMini(t testing.TB, m *miniredis.Miniredis) {
	t.Helper()
	for _, key := range m.Keys() {
		if m.TTL(key) == 0 && isModuleKey(key) && !isPlanted(t.Name(), key) {
			t.Errorf("redistest: a key has no TTL: %q", key)
		}
	}
}
