package filllock

import (
	"encoding/binary"
	"math"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

func (b *fixture) expire() error {
	return Expire(b.t.Context(), b.client, []Pair{b.Keys})
}

// entryUntil returns an entry that is fresh until the given time.
func entryUntil(until time.Time, flags byte, payload string) string {
	data, err := entry.Entry{FreshUntil: until, WrittenAt: time.UnixMilli(1e12), LoadTime: time.Second, Payload: []byte(payload)}.Encode()
	if err != nil {
		panic(err)
	}
	data[2] = flags
	return string(data)
}

// wantExpired checks that the value is what Expire, called between begun and ended, makes of data:
// the same bytes but for the flag, the time until which it is fresh, which is now if it was later,
// and other random bytes.
func (b *fixture) wantExpired(data string, begun, ended time.Time) {
	b.t.Helper()
	got, _ := b.get(b.Keys.Value)
	if len(got.text) != len(data) {
		b.t.Errorf("%x has become %+v", data, got)
		return
	}
	old, now := binary.BigEndian.Uint64([]byte(data)[3:]), binary.BigEndian.Uint64([]byte(got.text)[3:])
	low, high := min(old, uint64(begun.UnixMilli())), min(old, uint64(ended.UnixMilli()))
	if now < low || now > high {
		b.t.Errorf("fresh until %d instead of %d, want %d to %d", now, old, low, high)
	}
	if got.text[27:35] == data[27:35] {
		b.t.Errorf("%x can be taken for the entry before", got.text)
	}
	want := []byte(data)
	want[2] |= 2
	copy(want[3:11], got.text[3:11])
	copy(want[27:35], got.text[27:35])
	if got.text != string(want) {
		b.t.Errorf("%x has become %x, want %x", data, got.text, want)
	}
}

// Expire marks an entry stale, releases the lock, and changes nothing else.
func TestExpire_Entry(t *testing.T) {
	t.Parallel()
	var entries []state
	for _, until := range []time.Time{
		time.Now().Add(time.Hour), time.Now().Add(-time.Hour), time.UnixMilli(0), time.UnixMilli(1),
		time.UnixMilli(1 << 53), time.UnixMilli(1<<53 + 1), time.UnixMilli(math.MaxInt64), time.UnixMilli(-1),
	} {
		for _, flags := range []byte{0, 1, 2, 3, 4, 0x80, 0xfd, 0xff} {
			for _, payload := range []string{"", "payload", "\x00\xff\r\n" + entryA} {
				entries = append(entries, state{text: entryUntil(until, flags, payload)})
			}
		}
	}
	whole := entryUntil(time.Now().Add(time.Hour), 0, "payload")
	entries = append(entries, state{text: whole, forever: true}, state{text: whole[:35]}, state{text: whole[:36]}, state{text: whole + "more"})
	locks := []state{{}, held(me), held(other, "boom"), failed(other), failedUntil(life, other, "boom"), abandoned(other), {text: "garbage", forever: true}, {empty: true}, {list: true}}
	eachBackend(t, func(t *testing.T, f backend) {
		for i, value := range entries {
			b := f.holding(t, value, locks[i%len(locks)])
			_, ttl := b.get(b.Keys.Value)
			begun := time.Now()
			if err := b.expire(); err != nil {
				t.Errorf("Expire of %+v: %v", value, err)
			}
			b.wantExpired(value.text, begun, time.Now())
			b.want(b.Keys.Lock, state{}, 0)
			if got, rest := b.get(b.Keys.Value); got.forever != value.forever || rest > ttl || rest < ttl-10*time.Second {
				t.Errorf("%+v lives for %v, and had %v", got, rest, ttl)
			}
		}
	})
}

// Expire removes a value that is not an entry.
func TestExpire_Garbage(t *testing.T) {
	t.Parallel()
	whole := entryUntil(time.Now().Add(time.Hour), 0, "payload")
	eachBackend(t, func(t *testing.T, f backend) {
		for _, value := range []state{
			{}, {empty: true}, {list: true}, {list: true, forever: true}, {text: "garbage"}, {text: whole[:34]}, {text: whole[:1]},
			{text: entryA}, {text: "\xc0" + whole[1:]}, {text: "\xc1\x02" + whole[2:]}, {text: "\xc1\x00" + whole[2:], forever: true},
		} {
			for _, lock := range []state{{}, held(other, "boom"), {list: true}} {
				b := f.holding(t, value, lock)
				if err := b.expire(); err != nil {
					t.Errorf("Expire of %+v: %v", value, err)
				}
				b.wantBoth(state{}, state{})
			}
		}
	})
}

// expireOnce runs the script.
func (b *fixture) expireOnce(fresh, random string) (stale int) {
	b.t.Helper()
	stale, err := b.admin.Eval(b.t.Context(), wake.Lua+expireLua, []string{b.Keys.Value, b.Keys.Lock}, fresh, random).Int()
	redistest.Must(b.t, err)
	return stale
}

// Expire that arrives twice, perhaps late, has the effect of one.
//
//fault:repeated-command
func TestExpire_Twice(t *testing.T) {
	t.Parallel()
	for _, open := range []func(testing.TB) backend{openMini, openReal} {
		now := time.Now()
		fresh, random := entry.Stale(now)
		data := entryUntil(now.Add(time.Hour), 0, "payload")
		b := open(t).holding(t, state{text: data}, state{})
		b.expireOnce(fresh, random)
		b.wantExpired(data, now, now)
		once, _ := b.get(b.Keys.Value)
		b.expireOnce(fresh, random)
		b.want(b.Keys.Value, once, 0)

		// An entry that was stale before keeps its time.
		later, random2 := entry.Stale(now.Add(time.Minute))
		b.expireOnce(later, random2)
		b.wantExpired(once.text, now, now)

		b.set(b.Keys.Value, state{}) // Delete
		if stale := b.expireOnce(fresh, random); stale != 0 {
			t.Error("there was something to make stale after a Delete")
		}
		b.want(b.Keys.Value, state{}, 0)

		newer := entryUntil(now.Add(2*time.Hour), 0, "newer")
		b.set(b.Keys.Value, state{text: newer})
		b.expireOnce(fresh, random)
		b.wantExpired(newer, now, now)
	}
}
