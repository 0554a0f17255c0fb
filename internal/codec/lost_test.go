package codec

import (
	"bytes"
	"database/sql"
	"encoding/json"
	"errors"
	"log/slog"
	"math/big"
	"net/netip"
	"net/url"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

type (
	// Unseen has no exported field.
	Unseen   struct{ n int }
	unseenIn struct{ Unseen }
	callback struct{ f func() }
	//lint:ignore U1000 a codec is asked about the type
	locked struct{ mu sync.Mutex }
	//lint:ignore U1000 a codec is asked about the type
	counted   struct{ Locks, n int }
	noCopy    struct{}
	cacheLine struct{ _ [8]byte }
	lockBox   struct {
		sync.Mutex
		n int
	}
	loop struct {
		N    int
		Next *loop
		H    []Unseen
	}
	loopKept struct {
		N    int
		Next *loopKept
		All  map[string][]loopKept
		next *loopKept
	}
	option[T any] struct{ v T }
	// with has a field beside one that is kept.
	with[T any] struct {
		N int
		V T
	}

	// These have methods for one of the codecs only.
	jsonOnly   struct{ n int }
	binaryOnly struct{ n int }
	// readsJSON has no method to encode.
	readsJSON struct{ n int }
	// unseens stores what its elements could not store by themselves.
	unseens []Unseen
	// given has an encoder that the program has registered.
	given struct{ n int }
)

func (j jsonOnly) MarshalJSON() ([]byte, error)     { return json.Marshal(j.n) }
func (j *jsonOnly) UnmarshalJSON(data []byte) error { return json.Unmarshal(data, &j.n) }

func (b binaryOnly) MarshalBinary() ([]byte, error)     { return json.Marshal(b.n) }
func (b *binaryOnly) UnmarshalBinary(data []byte) error { return json.Unmarshal(data, &b.n) }

func (r *readsJSON) UnmarshalJSON(data []byte) error { return json.Unmarshal(data, &struct{}{}) }

func (u unseens) MarshalText() ([]byte, error) { return json.Marshal(len(u)) }
func (u *unseens) UnmarshalText(text []byte) error {
	var n int
	err := json.Unmarshal(text, &n)
	*u = make(unseens, n)
	return err
}

// JSON takes a URL, most of which have no user, and drops the user.
func TestJSON_UserOfURL(t *testing.T) {
	in, out := url.URL{Scheme: "http", User: url.UserPassword("u", "p"), Host: "h"}, new(url.URL)
	data, err := JSON.Marshal(in)
	if err = errors.Join(Takes(JSON, reflect.TypeOf(in)), err, JSON.Unmarshal(data, out)); err != nil || out.String() != "http://@h" {
		t.Errorf("%v came back as %v, %v", &in, out, err)
	}
}

// A codec refuses a type if it keeps nothing of a field that it stores. It takes the type if such a value comes back:
// a field that holds no data, that is not exported, that may be left out, or whose type encodes itself.
func TestTakes_FieldThatIsLost(t *testing.T) {
	msgpack.Register(given{},
		func(e *msgpack.Encoder, v reflect.Value) error { return e.EncodeInt(v.Field(0).Int()) },
		func(d *msgpack.Decoder, v reflect.Value) error {
			n, err := d.DecodeInt()
			v.Set(reflect.ValueOf(given{n}))
			return err
		})
	link := &url.URL{Scheme: "http", Host: "h", Path: "/x"}
	var started atomic.Int64
	started.Store(1)
	const both, fits = "MsgPack JSON", ""
	for _, c := range []struct {
		v               any
		refusedBy, part string
	}{
		{with[Unseen]{1, Unseen{1}}, both, "T.V, of type codec.Unseen"},
		{with[*Unseen]{1, &Unseen{1}}, both, "T.V, of type codec.Unseen"},
		{struct {
			N string
			H Unseen `msgpack:",omitempty" json:",omitempty"` // JSON leaves out no struct
		}{"x", Unseen{1}}, both, "T.H"},
		{with[map[string][]*[1]Unseen]{1, map[string][]*[1]Unseen{"": {{{1}}}}}, both, "T.V[][][], of type codec.Unseen"},
		{map[string]with[*Unseen]{"": {1, &Unseen{1}}}, both, "T[].V"},
		{struct {
			Unseen
			N int
		}{Unseen{1}, 1}, both, "T.Unseen, of type codec.Unseen"},
		{struct {
			*Unseen
			N int
		}{&Unseen{1}, 1}, both, "T.Unseen, of type *codec.Unseen"},
		{struct {
			unseenIn
			N int
		}{unseenIn{Unseen{1}}, 1}, both, "T.unseenIn.Unseen"},
		{with[callback]{1, callback{func() {}}}, both, "T.V, of type codec.callback"},
		{with[func()]{1, func() {}}, both, "T.V, of type func()"},
		{loop{1, nil, []Unseen{{1}}}, both, "T.H[], of type codec.Unseen"},
		{&lockBox{n: 1}, both, "it: "},
		{with[*lockBox]{1, &lockBox{n: 1}}, both, "T.V, of type codec.lockBox"},
		{struct {
			E struct{}
			n int
		}{n: 1}, both, "it: "},
		{map[Unseen]int{{1}: 1}, both, ""},
		{with[option[int]]{1, option[int]{1}}, both, "T.V, of type codec.option[int]"},
		{with[*time.Location]{1, time.FixedZone("x", 60)}, both, "T.V, of type time.Location"},
		{with[*atomic.Int64]{1, &started}, both, "T.V, of type atomic.Int64"},
		{with[*bytes.Buffer]{1, bytes.NewBufferString("x")}, both, "T.V, of type bytes.Buffer"},
		{with[*slog.Logger]{1, slog.Default()}, both, "T.V, of type slog.Logger"},
		{with[*url.Userinfo]{1, url.User("u")}, both, "T.V, of type url.Userinfo"},
		{with[jsonOnly]{1, jsonOnly{1}}, "MsgPack", "T.V, of type codec.jsonOnly"},
		{with[*binaryOnly]{1, &binaryOnly{1}}, "JSON", "T.V, of type codec.binaryOnly"},
		{with[readsJSON]{1, readsJSON{1}}, both, "T.V, of type codec.readsJSON"},
		{with[given]{1, given{1}}, "JSON", "T.V, of type codec.given"},

		{&struct {
			sync.Mutex
			N  int
			RW *sync.RWMutex
			M  map[string]*sync.Mutex
			W  sync.WaitGroup
			O  sync.Once
			L  *locked
		}{N: 1, RW: new(sync.RWMutex), M: map[string]*sync.Mutex{"": {}}, L: new(locked)}, fits, ""},
		{struct {
			noCopy
			N    int
			Set  map[string]struct{}
			None [0]Unseen
			_    [0]func()
			Line cacheLine
			More struct {
				E struct{}
				P [2]noCopy
			}
		}{N: 1, Set: map[string]struct{}{"": {}}}, fits, ""},
		{struct {
			hidden
			counted
			n    Unseen
			Drop Unseen  `msgpack:"-" json:"-"`
			Nil  *Unseen `msgpack:",omitempty" json:",omitempty"`
		}{counted: counted{Locks: 1}}, fits, ""},
		{loopKept{1, &loopKept{N: 2}, map[string][]loopKept{"": {{N: 1}}}, nil}, fits, ""},
		{option[int]{1}, both, "it: "},
		{with[unseens]{1, unseens{{}, {}}}, fits, ""},
		{unseens{{}, {}}, fits, ""},
		{struct {
			Link *url.URL
			Addr netip.Addr
			Big  *big.Int
			Raw  json.RawMessage
			Null sql.NullString
			Any  any
		}{link, netip.MustParseAddr("::1"), big.NewInt(1), json.RawMessage("1"), sql.NullString{String: "x", Valid: true}, "x"}, fits, ""},
		{struct{ *url.URL }{link}, "MsgPack", "T.URL"}, // its methods are called on nil
	} {
		testTakes(t, c.v, c.refusedBy, c.part, func(in, out reflect.Value) bool {
			return Equal(in.Interface(), out.Interface())
		})
	}
	_ = loopKept{next: nil}
}
