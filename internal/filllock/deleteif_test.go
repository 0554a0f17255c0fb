package filllock

import (
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

func (b *fixture) deleteIf(data string, want bool) {
	b.t.Helper()
	deleted, repeated, err := DeleteIf(b.t.Context(), b.client, b.Keys, entry.IDOf([]byte(data)))
	if deleted != want || repeated || err != nil {
		b.t.Errorf("DeleteIf = %t, %t, %v, want %t; at first %s", deleted, repeated, err, want, b.held)
	}
}

// DeleteIf removes the entry and its lock if the key still holds that entry. Otherwise it changes nothing.
func TestDeleteIf_Entry(t *testing.T) {
	t.Parallel()
	until := time.Now().Add(time.Hour)
	locks := []state{{}, held(me), held(other, "boom"), failed(other), abandoned(other), {text: "garbage", forever: true}, {list: true}}
	eachBackend(t, func(t *testing.T, f backend) {
		for _, lock := range locks {
			data := entryUntil(until, 0, "\x00payload\r\n")
			b := f.holding(t, state{text: data}, lock)
			b.deleteIf(entryUntil(until, 0, "\x00payload\r\n"), false)
			b.wantBoth(state{text: data}, lock)
			b.deleteIf(data, true)
			b.wantBoth(state{}, state{})
			b.deleteIf(data, false)
			for _, value := range []state{{}, {empty: true}, {list: true}, {text: "garbage"}, {text: data[:30]}, {text: entryA}} {
				b := f.holding(t, value, lock)
				b.deleteIf(data, false)
				b.wantBoth(value, lock)
			}
		}
	})
}

// A client that has lost the reply of DeleteIf sends it again, and is answered that there is no such entry: it
// says that the command may have been sent before.
func TestDeleteIf_LostReply(t *testing.T) {
	t.Parallel()
	s := redistest.Shared(t)
	p := redistest.NewProxy(t, s.Addr)
	data := entryUntil(time.Now().Add(time.Hour), 0, "payload")
	b := backend{p.Client(t), s.Admin()}.holding(t, state{text: data}, held(other))
	lost := p.On(redistest.Command("EVAL"), redistest.DropReply).Times(1)
	deleted, repeated, err := DeleteIf(t.Context(), b.client, b.Keys, entry.IDOf([]byte(data)))
	if deleted || !repeated || err != nil || lost.Fired() != 1 {
		t.Errorf("DeleteIf = %t, %t, %v, with %d replies lost", deleted, repeated, err, lost.Fired())
	}
	b.wantBoth(state{}, state{})
}
