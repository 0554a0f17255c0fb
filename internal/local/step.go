package local

import (
	"math"
	"strings"
	"time"
)

// The acts of the fill lock consist of the commands below. They return no errors.

// Get returns a text, or "".
func (t *Step) Get(key string) (string, error) {
	if it := t.find(key); it != nil {
		return it.text, nil
	}
	return "", nil
}

// GetRange returns a part of a text. to is the last byte of it.
func (t *Step) GetRange(key string, from, to int64) (string, error) {
	text, err := t.Get(key)
	from = min(from, int64(len(text)))
	return text[from:max(from, min(to+1, int64(len(text))))], err
}

// PTTL returns how long a key lives: -1 if it has no end, -2 if there is none, both in ns, as go-redis has it.
func (t *Step) PTTL(key string) (time.Duration, error) {
	switch it := t.find(key); {
	case it == nil:
		return -2, nil
	case it.end.IsZero():
		return -1, nil
	default:
		return it.end.Sub(t.now).Truncate(time.Millisecond), nil
	}
}

// Time returns the time.
func (t *Step) Time() (time.Time, error) { return t.now, nil }

// Set writes a text.
func (t *Step) Set(key, text string, life time.Duration) {
	t.put(key, text, after(t.now, life), t.tagged)
}

// SetNX is Set of a key that holds nothing.
func (t *Step) SetNX(key, text string, life time.Duration) {
	if t.find(key) == nil {
		t.put(key, text, after(t.now, life), nil)
	}
}

// SetRange writes a part of a text.
func (t *Step) SetRange(key string, at int64, part string) {
	old, end, of := "", time.Time{}, (*Tagging)(nil)
	if it := t.find(key); it != nil {
		old, end, of = it.text, it.end, it.tagged
	}
	text := []byte(old + strings.Repeat("\x00", max(0, int(at)+len(part)-len(old))))
	copy(text[at:], part)
	t.put(key, string(text), end, of)
}

// PExpire changes how long a key lives, if there is one.
func (t *Step) PExpire(key string, life time.Duration) {
	if it := t.find(key); it != nil {
		it.end = after(t.now, life)
	}
}

// Del removes a key.
func (t *Step) Del(key string) {
	if it := t.find(key); it != nil {
		t.remove(it)
	}
}

// after returns when a time will have passed, to the millisecond.
func after(now time.Time, life time.Duration) time.Time {
	return now.Add(life.Truncate(time.Millisecond))
}

// forever is as long as a Duration can be.
const forever time.Duration = math.MaxInt64
