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
