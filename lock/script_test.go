package lock_test

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// token returns a token as long as the token of an attempt.
func token(who string) string { return strings.Repeat(who, 26) }

// takeFor takes the lock for a process that dies at once.
func takeFor(t testing.TB, rdb *redis.Client, kind, name string) {
	t.Helper()
	mortal := redis.NewClient(rdb.Options())
	mustAcquire(t, newLocker(t, kind, mortal, name, nil))
	_ = mortal.Close()
}

// learn makes the server know all scripts, so that each later step is one command.
func learn(t testing.TB, rdb *redis.Client) {
	t.Helper()
	for text := range opOfText {
		redistest.Must(t, rdb.ScriptLoad(t.Context(), text).Err())
	}
}

// A script is sent in full only if the server does not know it, and no step takes a second command.
func TestScripts_SentInFull(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb)
		l := newLocker(t, kind, rdb, "n", nil)
		c := record(m)
		verbs := func() string {
			synctest.Wait()
			defer c.reset()
			var verbs []string
			for _, args := range c.all() {
				verbs = append(verbs, args[0])
			}
			return strings.Join(verbs, " ")
		}
		lease := mustAcquire(t, l)
		wantBusy(t, l)
		mustRelease(t, lease)
		if s := verbs(); s != "EVALSHA EVALSHA EVALSHA" {
			t.Errorf("a known script: %s", s)
		}
		flush := func() {
			redistest.Must(t, rdb.ScriptFlush(t.Context()).Err())
		}
		flush()
		lease = mustAcquire(t, l)
		flush()
		time.Sleep(leaseTTL / 2)
		flush()
		mustRelease(t, lease)
		if s := verbs(); s != strings.TrimSpace(strings.Repeat("EVALSHA EVAL ", 3)) {
			t.Errorf("a forgotten script: %s", s)
		}
		for _, text := range []string{"ERR some error", "NOPERM this user has no permissions", "OOM command not allowed", "LOADING Redis is loading"} {
			lease = mustAcquire(t, l)
			c.reset()
			m.SetError(text)
			if err := lease.Release(t.Context()); err == nil {
				t.Errorf("%s: Release = nil", text)
			}
			m.SetError("")
			if s := verbs(); strings.Contains(s, "EVAL ") || strings.HasSuffix(s, "EVAL") {
				t.Errorf("%s: %s", text, s)
			}
			time.Sleep(2 * leaseTTL)
		}
	})
}

// No script gets a time of the client. With one, a client whose clock is wrong would be served
// before others, or take what others hold.
//
//fault:process-clock
func TestScripts_NoClientTime(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		c := record(m)
		rdb := redistest.NewMiniClient(t, m)
		session := func() (got []string) {
			c.reset()
			for _, kind := range kinds {
				l := newLocker(t, kind, rdb, kind, nil)
				lease := mustTry(t, l)
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // time for a renewal
				if _, err := l.Acquire(ctx); !errors.Is(err, lock.ErrBusy) {
					t.Error(kind, err)
				}
				cancel()
				mustRelease(t, lease)
				synctest.Wait()
			}
			for _, args := range c.all() {
				text := tokenPattern.ReplaceAllString(strings.Join(args[2:], " "), "TOKEN")
				text = seenTime.ReplaceAllString(text, "UNTIL")
				got = append(got, serverTime.ReplaceAllString(text, "SINCE"))
			}
			slices.Sort(got)
			return slices.Compact(got)
		}
		before := session()
		time.Sleep(1000*time.Hour + 17*time.Millisecond)
		if after := session(); len(before) != 8+4+3 || !slices.Equal(before, after) {
			t.Errorf("at first they got\n%s\nlater\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
		}
	})
}

var tokenPattern = regexp.MustCompile(`[A-Z2-7]{26}`)

// seenTime matches a time of the server's clock as it was last seen, after which a command takes nothing.
var seenTime = regexp.MustCompile(`\b\d{15,16}\b`)

// serverTime matches a time that the server has told a waiter, and the waiter tells the server.
var serverTime = regexp.MustCompile(`\b0000\d{16}\b`)
