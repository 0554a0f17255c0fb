package local

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// run executes a command, and returns its reply: see answer. The caller holds mu.
func (s *store) run(args []string) any {
	if s.closed {
		return redis.ErrClosed
	}
	name := args[0]
	if len(args) > 1 {
		switch key, rest := args[1], args[2:]; name {
		case "get", "getrange", "set", "setrange":
			return s.runText(name, key, rest)
		case "hget", "hmget", "hset", "hsetnx", "hdel", "hrandfield":
			return s.runHash(name, key, rest)
		case "zadd", "zrem", "zrangebyscore", "zremrangebyscore", "zscan":
			return s.runSorted(name, key, rest)
		case "del", "unlink", "exists", "pttl", "pexpire":
			return s.runKeys(name, args[1:])
		}
	}
	switch name {
	case "time":
		return time.Now()
	case "scan": // cursor, match, pattern, ...
		return s.scan(args[3])
	case "dbsize":
		return int64(len(s.values) + len(s.rest))
	case "info": // which names the process of a server
		return ""
	case "multi", "watch", "unwatch", "ping":
		return "OK"
	case "exec":
		return []any(nil) // each command has its reply
	}
	return refusal(fmt.Sprintf("ERR unknown command '%s'", name)) // as with a server that runs no scripts
}

func (s *store) runText(name, key string, args []string) any {
	if name == "set" {
		return s.set(key, args)
	}
	it := s.find(key)
	if it == nil {
		if name == "get" {
			return nil
		}
		it = new(item)
	}
	switch name {
	case "setrange":
		if args[1] != "" {
			it = s.change(key)
			at := int(number(args[0]))
			end := at + len(args[1])
			it.text += strings.Repeat("\x00", max(0, end-len(it.text)))
			it.text = it.text[:at] + args[1] + it.text[end:]
		}
		return int64(len(it.text))
	case "getrange":
		from := min(number(args[0]), int64(len(it.text)))
		return it.text[from:max(from, min(number(args[1])+1, int64(len(it.text))))]
	}
	return it.text
}

// set executes SET with PX, EX and NX.
func (s *store) set(key string, args []string) any {
	options := args[1:]
	if slices.Contains(options, "nx") && s.find(key) != nil {
		return nil
	}
	var end time.Time
	for i, unit := range map[string]time.Duration{"px": time.Millisecond, "ex": time.Second} {
		if at := slices.Index(options, i); at >= 0 {
			end = after(options[at+1], unit)
		}
	}
	it := s.change(key)
	it.text, it.end = args[0], end
	return "OK"
}

func (s *store) runKeys(name string, keys []string) any {
	n := int64(0)
	switch it := s.find(keys[0]); name {
	case "pttl":
		switch {
		case it == nil:
			return int64(-2)
		case it.end.IsZero():
			return int64(-1)
		}
		return time.Until(it.end).Milliseconds()
	case "pexpire":
		if it != nil {
			s.touch(keys[0])
			it.end = after(keys[1], time.Millisecond)
			n = 1
		}
	case "exists":
		for _, key := range keys {
			if s.find(key) != nil {
				n++
			}
		}
	default:
		for _, key := range keys {
			if s.find(key) != nil {
				s.remove(key)
				n++
			}
		}
	}
	return n
}

// after returns when a number of units will have passed. More of them than a Duration has never pass.
func after(text string, unit time.Duration) time.Time {
	return time.Now().Add(time.Duration(min(number(text), int64(math.MaxInt64/unit))) * unit)
}

func (s *store) runHash(name, key string, args []string) any {
	it := s.find(key)
	if it == nil {
		it = new(item)
	}
	switch name {
	case "hget":
		return it.field(args[0])
	case "hmget":
		var all []any
		for _, field := range args {
			all = append(all, it.field(field))
		}
		return all
	case "hrandfield": // with values
		var some []any
		for field, value := range it.fields {
			if len(some) == 2*int(number(args[0])) {
				break
			}
			some = append(some, field, value)
		}
		return some
	case "hdel":
		n := int64(0)
		for _, field := range args {
			if it.field(field) != nil {
				delete(it.fields, field)
				n++
			}
		}
		s.changedParts(key, n, len(it.fields))
		return n
	}
	if name == "hsetnx" && it.field(args[0]) != nil {
		return int64(0)
	}
	it = s.change(key)
	if it.fields == nil {
		it.fields = make(map[string]string)
	}
	before := len(it.fields)
	for i := 0; i < len(args); i += 2 {
		it.fields[args[i]] = args[i+1]
	}
	return int64(len(it.fields) - before)
}

func (it *item) field(name string) any {
	if value, ok := it.fields[name]; ok {
		return value
	}
	return nil
}

// changedParts notes that n parts of what a key held are gone, and others are left.
func (s *store) changedParts(key string, n int64, left int) {
	switch {
	case n > 0 && left == 0:
		s.remove(key)
	case n > 0:
		s.touch(key)
	}
}

func (s *store) runSorted(name, key string, args []string) any {
	if name == "zadd" { // GT score member ...
		it, added := s.change(key), int64(0)
		for i := 1; i < len(args); i += 2 {
			added += it.members.raise(args[i+1], float(args[i]))
		}
		return added
	}
	it := s.find(key)
	if it == nil {
		it = new(item)
	}
	z := &it.members
	switch name {
	case "zscan":
		all := scanned{}
		for _, m := range z.order {
			all = append(all, m.member, strconv.FormatFloat(m.score, 'f', -1, 64))
		}
		return all
	case "zrangebyscore":
		limit := len(z.order)
		if at := slices.Index(args, "limit"); at >= 0 {
			limit = int(number(args[at+2]))
		}
		var all []any
		for _, m := range z.between(float(args[0]), float(args[1]), limit) {
			all = append(all, m.member, m.score)
		}
		return all
	}
	n := int64(0)
	gone := args
	if name == "zremrangebyscore" {
		gone = nil
		for _, m := range z.between(float(args[0]), float(args[1]), len(z.order)) {
			gone = append(gone, m.member)
		}
	}
	for _, member := range gone {
		n += z.remove(member)
	}
	s.changedParts(key, n, len(z.order))
	return n
}

// scan returns all keys that match a pattern of Literals and stars.
func (s *store) scan(pattern string) scanned {
	found := scanned{}
	for _, table := range []map[string]*item{s.values, s.rest} {
		for key, it := range table {
			if !it.ended() && matches(key, pattern) {
				found = append(found, key)
			}
		}
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

// number and float read what this library has written.
func number(text string) int64 {
	n, _ := strconv.ParseInt(text, 10, 64)
	return n
}

func float(text string) float64 {
	f, _ := strconv.ParseFloat(text, 64)
	return f
}
