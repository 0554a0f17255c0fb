package local

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// run executes a command, and returns its reply: see answer.
func (s *Store) run(args []string) any {
	if s.closed.Load() {
		return redis.ErrClosed
	}
	name := args[0]
	if len(args) > 1 {
		switch name {
		case "get", "getrange", "set", "setrange", "pttl", "pexpire":
			t := s.Begin(args[1])
			defer t.End()
			return t.run(name, args[1], args[2:])
		case "del", "unlink", "exists":
			return s.runKeys(name, args[1:])
		}
	}
	switch name {
	case "time":
		return time.Now()
	case "scan": // cursor, match, pattern, ...
		return s.scan(args[3])
	case "dbsize":
		return s.size()
	case "info": // which names the process of a server
		return ""
	case "ping":
		return "OK"
	}
	return refusal(fmt.Sprintf("ERR unknown command '%s'", name)) // as with a server that runs no scripts
}

func (t *Step) run(name, key string, args []string) any {
	switch name {
	case "get":
		if it := t.find(key); it != nil {
			return it.text
		}
		return nil
	case "getrange":
		text, _ := t.GetRange(key, number(args[0]), number(args[1]))
		return text
	case "set":
		return t.set(key, args)
	case "setrange":
		if args[1] != "" {
			t.SetRange(key, number(args[0]), args[1])
		}
		text, _ := t.Get(key)
		return int64(len(text))
	case "pttl":
		left, _ := t.PTTL(key)
		if left < 0 {
			return int64(left)
		}
		return left.Milliseconds()
	}
	if t.find(key) == nil {
		return int64(0)
	}
	switch name {
	case "pexpire":
		t.PExpire(key, times(args[0], time.Millisecond))
	case "del", "unlink":
		t.Del(key)
	}
	return int64(1)
}

// set executes SET with PX, EX and NX.
func (t *Step) set(key string, args []string) any {
	options := args[1:]
	if slices.Contains(options, "nx") && t.find(key) != nil {
		return nil
	}
	var end time.Time
	for i, unit := range map[string]time.Duration{"px": time.Millisecond, "ex": time.Second} {
		if at := slices.Index(options, i); at >= 0 {
			end = after(t.now, times(options[at+1], unit))
		}
	}
	t.put(key, args[0], end, nil)
	return "OK"
}

func (s *Store) runKeys(name string, keys []string) any {
	n := int64(0)
	for _, key := range keys {
		t := s.Begin(key)
		n += t.run(name, key, nil).(int64)
		t.End()
	}
	return n
}

func (s *Store) size() (n int64) {
	for i := range s.stripes {
		st := &s.stripes[i]
		st.mu.Lock()
		n += int64(len(st.items))
		st.mu.Unlock()
	}
	return n
}

// scan returns all keys that match a pattern of Literals and stars.
func (s *Store) scan(pattern string) scanned {
	found, now := scanned{}, time.Now()
	for i := range s.stripes {
		st := &s.stripes[i]
		st.mu.Lock()
		for key, it := range st.items {
			if !it.ended(now) && matches(key, pattern) {
				found = append(found, key)
			}
		}
		st.mu.Unlock()
	}
	return found
}

func matches(s, pattern string) bool {
	for ; pattern != ""; s, pattern = s[1:], pattern[1:] {
		if pattern[0] == '*' {
			for !matches(s, pattern[1:]) {
				if s == "" {
					return false
				}
				s = s[1:]
			}
			return true
		}
		if pattern[0] == '\\' && len(pattern) > 1 {
			pattern = pattern[1:]
		}
		if s == "" || s[0] != pattern[0] {
			return false
		}
	}
	return s == ""
}

// number reads what this library has written.
func number(text string) int64 {
	n, _ := strconv.ParseInt(text, 10, 64)
	return n
}

// times returns a number of units, at most as many as a Duration has.
func times(text string, unit time.Duration) time.Duration {
	return time.Duration(min(number(text), int64(forever/unit))) * unit
}
