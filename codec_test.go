package singlefill_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

type person struct {
	Name  string
	Age   int
	Tags  []string
	Attrs map[string]int
	Boss  *person
}

func newPerson() person {
	return person{"Ann", 42, []string{"a", "b"}, map[string]int{"x": 1}, &person{Name: "Bob"}}
}

func testRoundTrip[T any](t *testing.T, rdb redis.UniversalClient, opts *singlefill.Options[T], value T) {
	c := cachetest.NewCache(t, rdb, opts)
	cachetest.GoGet(t.Context(), c, "loaded", cachetest.Gives(value)).Want(t, value)
	cachetest.GoGet(t.Context(), c, "loaded", cachetest.MustNotLoad[T](t)).Want(t, value)
	cachetest.WantGet(t, c, "loaded", value, nil)
	redistest.Must(t, c.Set(t.Context(), "set", value))
	cachetest.GoGet(t.Context(), c, "set", cachetest.MustNotLoad[T](t)).Want(t, value)
	cachetest.WantGet(t, c, "set", value, nil)
}

// Values of every codec come back as they were loaded or set. Empty values are hits like any other.
func TestCodec_RoundTrip(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, codec := range []singlefill.Codec{singlefill.MsgPack, singlefill.JSON} {
			testRoundTrip[*person](t, rdb, &singlefill.Options[*person]{Codec: codec}, nil)
			testRoundTrip(t, rdb, &singlefill.Options[person]{Codec: codec}, newPerson())
			testRoundTrip(t, rdb, &singlefill.Options[person]{Codec: codec}, person{})
			testRoundTrip[[]int](t, rdb, &singlefill.Options[[]int]{Codec: codec}, nil)
			testRoundTrip(t, rdb, &singlefill.Options[[]int]{Codec: codec}, []int{})
			testRoundTrip(t, rdb, &singlefill.Options[map[string]int]{Codec: codec}, map[string]int{})
			testRoundTrip(t, rdb, &singlefill.Options[string]{Codec: codec}, "")
			testRoundTrip(t, rdb, &singlefill.Options[int]{Codec: codec}, 0)
			testRoundTrip[any](t, rdb, &singlefill.Options[any]{Codec: codec}, nil)
		}
		testRoundTrip(t, rdb, &cachetest.Raw, "")
		testRoundTrip(t, rdb, &cachetest.Raw, "a\x00\xff\r\n")
		testRoundTrip(t, rdb, &singlefill.Options[[]byte]{Codec: singlefill.Raw}, bytes.Repeat([]byte{0xc1, 0}, 1<<16))
	})
}

// failures are how a method of a codec may fail.
var failures = map[string]func(any) error{
	"error": func(any) error { return errors.New("no") },
	"panic": func(any) error { panic("a codec") },
}

// A value that cannot be encoded is returned to all callers that waited and not stored. Set of it returns
// an error and leaves the value before it.
//
//fault:bad-value
func TestCodec_MarshalFails(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		for name, marshal := range failures {
			t.Run(name, func(t *testing.T) {
				ns := redistest.Namespace(t)
				var e cachetest.Events
				c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: cachetest.BadCodec{Codec: singlefill.JSON, OnMarshal: marshal}, Trace: e.Trace()})
				src := cachetest.NewSource[string](t)
				first, load := src.Begin(t.Context(), t, c, "k")
				joins := cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t)
				load.Give("v")
				first.Want(t, "v")
				joins.Want(t, "v")
				cachetest.WantStored(t, rdb, ns, "k", "")
				good := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.JSON})
				redistest.Must(t, good.Set(t.Context(), "set", "old"))
				if err := c.Set(t.Context(), "set", "new"); err == nil {
					t.Error("Set succeeds")
				}
				cachetest.WantGet(t, good, "set", "old", nil)
				if record, found := cachetest.Stored(t, rdb, ns+":{k}:lock"); found {
					t.Errorf("the lock key holds %q", record)
				}
				_ = c.Close()
				if s := c.Stats(); s.StoreErrors != 1 || s.Stored != 0 || s.Loads != 1 || s.LoadErrors != 0 {
					t.Errorf("%+v, want one store error", s)
				}
				e.Want(t, "load", "start k", "done k <nil>, store error true, stored false, fenced false, unlocked false", "miss k", "miss k")
			})
		}
	})
}

// What could be encoded, but not be read as a T, is an error of Set: Marshal does not know that T is an any.
func TestCodec_NotReadBack(t *testing.T) {
	t.Parallel()
	const n = 300_000 // in a []map[string]int8 they take less memory than in an any
	many := make([]map[string]int8, n)
	for i := range many {
		many[i] = map[string]int8{"": 1}
	}
	c, err := singlefill.NewLocal("ns", time.Hour, &singlefill.Options[any]{Codec: unwrapping{singlefill.MsgPack}})
	redistest.Must(t, err)
	redistest.Must(t, c.Set(t.Context(), "k", "old"))
	for _, v := range []any{many, map[int]string{1: "x"}} {
		cachetest.WantErrText(t, "Set", c.Set(t.Context(), "k", v), fmt.Sprintf("what %T becomes cannot be read as interface {}", v))
	}
	cachetest.WantGet[any](t, c, "k", "old", nil)
	redistest.Must(t, c.Set(t.Context(), "k", many[:n/10]))
	_, err = c.Get(t.Context(), "k")
	redistest.Must(t, errors.Join(err, c.Close()))
}

// A value that cannot be decoded is loaded again.
//
//fault:bad-value
func TestCodec_UnmarshalFails(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		for name, unmarshal := range failures {
			t.Run(name, func(t *testing.T) {
				ns := redistest.Namespace(t)
				good := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.JSON})
				redistest.Must(t, good.Set(t.Context(), "k", "v"))
				c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: cachetest.BadCodec{Codec: singlefill.JSON, OnUnmarshal: unmarshal}})
				cachetest.WantGet(t, c, "k", "", singlefill.ErrMiss)
				cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("w")).Want(t, "w")
				cachetest.WantGet(t, good, "k", "w", nil)
				if n := c.Stats().BadValues; n != 2 {
					t.Errorf("%d bad values, want 2", n)
				}
			})
		}
	})
}

// A named codec says what it writes and what it reads.
type named struct {
	singlefill.Codec
	formats []string
}

func (n named) Formats() []string { return n.formats }

// What one codec has written is a miss for another one, however it was stored and what has been changed in its
// header since; a codec may say that it reads more. Entries of an older version do not say what has written them.
//
//fault:another-codec
func TestCodec_BytesOfAnother(t *testing.T) {
	t.Parallel()
	codecs := []singlefill.Codec{
		singlefill.MsgPack, singlefill.JSON, singlefill.Raw,
		struct{ singlefill.Codec }{singlefill.Raw},
		named{singlefill.Raw, []string{"mine"}},
		named{singlefill.Raw, []string{"ours", "mine", "raw"}},
	}
	reads := map[[2]int]bool{{5, 4}: true, {5, 2}: true}
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ctx, ns := t.Context(), redistest.Namespace(t)
		var caches []*singlefill.Cache[string]
		for _, codec := range codecs {
			caches = append(caches, cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: codec, StaleIfError: time.Hour}))
		}
		const value = "5"
		for w, writer := range caches {
			stores := map[string]func(key string) error{
				"Set": func(key string) error { return writer.Set(ctx, key, value) },
				"load": func(key string) error {
					cachetest.GoGet(ctx, writer, key, cachetest.Gives(value)).Want(t, value)
					return nil
				},
				"many": func(key string) error {
					_, err := writer.GetOrLoadMany(ctx, []string{key}, cachetest.GivesMany(map[string]string{key: value}))
					return err
				},
				"Expire": func(key string) error { return errors.Join(writer.Set(ctx, key, value), writer.Expire(ctx, key)) },
			}
			for store, call := range stores {
				for r, reader := range caches {
					key, before := fmt.Sprint(store, w, r), reader.Stats().BadValues
					redistest.Must(t, call(key))
					cachetest.AwaitSeen(t, rdb, look, ns, key)
					var loaded error // what serves a stale value
					if store == "Expire" {
						loaded = errors.New("no")
					}
					own := r == w || reads[[2]int{r, w}]
					got, err := reader.GetOrLoad(ctx, key, func(ctx context.Context, key string) (string, error) {
						if v, _, ok := singlefill.Previous[string](ctx, key); ok != own {
							t.Errorf("%s: what %d has written, %d has as its previous value: %q, %t", store, w, r, v, ok)
						}
						return "loaded", loaded
					})
					bad := reader.Stats().BadValues - before
					good := got == value && err == nil && bad == 0
					if !own {
						good = err == loaded && (err != nil || got == "loaded") && bad > 0
					}
					if !good {
						t.Errorf("%s: what %d has written, %d reads as %q, %v, with %d bad values", store, w, r, got, err, bad)
					}
				}
			}
		}
		for r, reader := range caches {
			payload, err := codecs[r].Marshal(value)
			redistest.Must(t, err)
			cachetest.PutEntry(t, look, ns, "old", entry.Entry{FreshUntil: time.Now().Add(time.Hour), WrittenAt: time.Now(), Payload: payload}, time.Hour)
			cachetest.AwaitSeen(t, rdb, look, ns, "old")
			cachetest.WantGet(t, reader, "old", value, nil)
		}
	})
}

// What an encrypting codec has written under one key is a bad value under any other key and namespace, and so a miss
// that a load replaces.
//
//fault:bad-bytes
func TestCodec_CopiedEntry(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx, ns, elsewhere := t.Context(), redistest.Namespace(t), redistest.Namespace(t)
		opts := &singlefill.Options[person]{Codec: sealedBy(t, 1), StaleIfError: time.Hour}
		here, there := cachetest.NewCacheIn(t, rdb, ns, opts), cachetest.NewCacheIn(t, rdb, elsewhere, opts)
		ann, bob := newPerson(), person{Name: "Bob"}
		redistest.Must(t, here.Set(ctx, "ann", ann))
		data, _ := cachetest.Stored(t, rdb, ns+":{ann}")
		if strings.Contains(data, ann.Name) {
			t.Errorf("Redis has the name: %q", data)
		}
		for _, to := range []struct {
			*singlefill.Cache[person]
			ns, key string
		}{{here, ns, "bob"}, {there, elsewhere, "ann"}} {
			redistest.Must(t, rdb.Set(ctx, to.ns+":{"+to.key+"}", data, time.Hour).Err())
			cachetest.AwaitSeen(t, rdb, rdb, to.ns, to.key)
			cachetest.WantGet(t, to.Cache, to.key, person{}, singlefill.ErrMiss)
			if n := to.Stats().BadValues; n != 1 {
				t.Errorf("%d bad values, want 1", n)
			}
			if got, err := to.GetMany(ctx, []string{to.key}); len(got) > 0 || err != nil {
				t.Errorf("GetMany of the copy %s in %s: %+v, %v", to.key, to.ns, got, err)
			}
			cachetest.GoGet(ctx, to.Cache, to.key, func(ctx context.Context, key string) (person, error) {
				if v, _, ok := singlefill.Previous[person](ctx, key); ok {
					t.Errorf("the copy is the previous value: %+v", v)
				}
				return bob, nil
			}).Want(t, bob)
			cachetest.WantGet(t, to.Cache, to.key, bob, nil)
		}
		cachetest.WantGet(t, here, "ann", ann, nil)
	})
}

// sealedBy returns the codec of the example with these secrets, of which the last one encrypts.
func sealedBy(t *testing.T, numbers ...byte) sealed {
	t.Helper()
	secrets := make(map[byte][]byte)
	for _, n := range numbers {
		secrets[n] = bytes.Repeat([]byte{n}, 32)
	}
	s, err := newSealed(singlefill.MsgPack, numbers[len(numbers)-1], secrets)
	redistest.Must(t, err)
	return s
}

// While the secret of an encrypting codec is rotated, what the old one has encrypted is read. What a secret has
// encrypted that a process does not have is a miss there.
func TestCodec_Rotation(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	ns := redistest.Namespace(t)
	with := func(secrets ...byte) *singlefill.Cache[person] {
		return cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[person]{Codec: sealedBy(t, secrets...)})
	}
	caches := []*singlefill.Cache[person]{with(1), with(2, 1), with(1, 2), with(2)} // the four stages
	reads := [][]bool{
		{true, true, true, false},
		{true, true, true, false},
		{false, true, true, true},
		{false, true, true, true},
	}
	for w, writer := range caches {
		key := fmt.Sprint("by", w)
		redistest.Must(t, writer.Set(t.Context(), key, newPerson()))
		for r, reader := range caches {
			v, err := reader.Get(t.Context(), key)
			if read := err == nil && v.Name == "Ann"; read != reads[w][r] || !read && err != singlefill.ErrMiss {
				t.Errorf("stage %d reads of stage %d: %+v, %v", r, w, v, err)
			}
		}
	}
}

// A codec with ForKey gets the namespace and the key of each value, however the value is stored and read: no value is
// a bad one.
func TestCodec_ForKey(t *testing.T) {
	t.Parallel()
	for name, codec := range map[string]singlefill.Codec{
		"cloned":  sealedBy(t, 1),
		"decoded": cachetest.KeyedCodec{Codec: singlefill.MsgPack},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) { testForKey(t, rdb, codec) })
		})
	}
}

func testForKey(t *testing.T, rdb redis.UniversalClient, codec singlefill.Codec) {
	ctx, ns := t.Context(), redistest.Namespace(t)
	opts := &singlefill.Options[*person]{Codec: codec, StaleIfError: time.Hour}
	writer := cachetest.NewCacheIn(t, rdb, ns, opts)
	if !cachetest.HitsMayBeLate(t) {
		opts.Near = new(singlefill.Near)
	}
	reader := cachetest.NewCacheIn(t, rdb, ns, opts)
	named := func(key string) *person { return &person{Name: key, Tags: []string{key}} }
	redistest.Must(t, writer.Set(ctx, "set", named("set")))
	redistest.Must(t, writer.SetMany(ctx, map[string]*person{"setmany": named("setmany")}))
	cachetest.GoGet(ctx, writer, "load", cachetest.Gives(named("load"))).Want(t, named("load"))
	_, err := writer.GetOrLoadMany(ctx, []string{"many"}, cachetest.GivesMany(map[string]*person{"many": named("many")}))
	redistest.Must(t, err)
	want := make(map[string]*person)
	var keys []string
	for _, key := range []string{"set", "setmany", "load", "many"} {
		keys, want[key] = append(keys, key), named(key)
		cachetest.GoGet(ctx, reader, key, cachetest.MustNotLoad[*person](t)).Want(t, named(key))
		cachetest.WantGet(t, reader, key, named(key), nil)
	}
	got, err := reader.GetMany(ctx, keys)
	cachetest.WantValue(t, got, err, want)
	redistest.Must(t, writer.Expire(ctx, "set"))
	cachetest.AwaitSeen(t, rdb, rdb, ns, "set")
	cachetest.GoGet(ctx, writer, "set", func(ctx context.Context, key string) (*person, error) {
		old, _, _ := singlefill.Previous[*person](ctx, key)
		cachetest.WantValue(t, old, nil, named("set"))
		return nil, cachetest.ErrSource
	}).Want(t, named("set"))
	for name, c := range map[string]*singlefill.Cache[*person]{"writer": writer, "reader": reader} {
		if n := c.Stats().BadValues; n != 0 {
			t.Errorf("%s: %d bad values", name, n)
		}
	}
}

// An unwrapping codec wraps another one, and says so.
type unwrapping struct{ singlefill.Codec }

func (u unwrapping) Unwrap() singlefill.Codec { return u.Codec }

// New refuses a wrapper that loses the method ForKey of what it wraps, at any depth.
func TestCodec_ForKeyIsLost(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	keyed := cachetest.KeyedCodec{Codec: singlefill.MsgPack}
	for _, codec := range []singlefill.Codec{unwrapping{keyed}, unwrapping{unwrapping{keyed}}, unwrapping{sealedBy(t, 1)}} {
		_, err := singlefill.New(rdb, "ns", time.Hour, &singlefill.Options[string]{Codec: codec})
		cachetest.WantErrText(t, fmt.Sprintf("New with %+v", codec), err, "ForKey")
	}
}

// A codec that exits its goroutine fails the load, with Redis or without it, and its caller does not load again and
// again.
func TestCodec_Exits(t *testing.T) {
	exits := func(any) error { runtime.Goexit(); return nil }
	for _, down := range []bool{false, true} {
		cachetest.RunInBubble(t, fmt.Sprint("Marshal, down ", down), func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
			c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Codec: cachetest.BadCodec{Codec: singlefill.Raw, OnMarshal: exits}})
			if down {
				_ = rdb.Close()
			}
			src := &cachetest.TimedSource{Value: "v"}
			_, err := c.GetOrLoad(t.Context(), "k", src.Load)
			if !isPanic(err) {
				t.Errorf("got %v, want a PanicError", err)
			}
			src.WantLoads(t, "the call", 1)
		})
	}
}

// A decoder calls a function with the bytes before it decodes them.
type decoder struct {
	singlefill.Codec
	on func(data string)
}

func (d decoder) Unmarshal(data []byte, v any) error {
	d.on(string(data))
	return d.Codec.Unmarshal(data, v)
}

// A codec that exits while a call for many keys reads some of them keeps these from no other call, although the call
// waits for others.
func TestCodec_ExitsInOneRead(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		values := make(map[string]string)
		for _, key := range manyKeys(257) { // the last one is read on its own
			values[key] = key
		}
		goOn := make(chan struct{})
		var exited atomic.Bool
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Codec: decoder{singlefill.Raw, func(data string) {
			switch {
			case data == "k0256":
				<-goOn
			case data == "k0000" && exited.CompareAndSwap(false, true):
				runtime.Goexit()
			}
		}}})
		redistest.Must(t, c.SetMany(t.Context(), values))
		load := cachetest.Fails[string](errors.New("a key is loaded"))
		last := cachetest.GoGet(t.Context(), c, "k0256", load)
		synctest.Wait()
		all := make(chan error, 1)
		go func() {
			_, err := c.GetOrLoadMany(t.Context(), manyKeys(257), cachetest.FailsMany[string](errors.New("keys are loaded")))
			all <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := c.GetOrLoad(ctx, "k0000", load)
		redistest.Must(t, err)
		close(goOn)
		if err := <-all; !isPanic(err) {
			t.Errorf("got %v, want a PanicError", err)
		}
		last.Want(t, "k0256")
	})
}

// The first caller can change its value before the others have theirs, even if the codec's bytes
// are the value's own.
func TestCodec_AliasedBytes(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		codec := aliasing{make(chan struct{})}
		c := cachetest.NewCache(t, rdb, &singlefill.Options[[]byte]{Codec: codec})
		src := cachetest.NewSource[[]byte](t)
		one := cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t)
		load := src.Next(t)
		two := cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t)
		load.Give([]byte("value"))
		var first cachetest.Ending[[]byte]
		select {
		case first = <-one.Answer:
			one = two
		case first = <-two.Answer:
		}
		cachetest.WantValue(t, first.Value, first.Err, []byte("value"))
		copy(first.Value, "CHANGED")
		close(codec.changed)
		one.Want(t, []byte("value"))
	})
}

// aliasing is a codec whose bytes are the value's own, as the contract of Marshal allows.
type aliasing struct{ changed chan struct{} }

func (aliasing) Marshal(v any) ([]byte, error) { return v.([]byte), nil }

func (c aliasing) Unmarshal(data []byte, v any) error {
	<-c.changed
	*v.(*[]byte) = bytes.Clone(data)
	return nil
}

// Bytes that are no entry are a miss, are counted, and are replaced by the load.
//
//fault:bad-bytes
//fault:foreign-key
func TestBadBytes_AreAMiss(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		whole := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.Raw})
		redistest.Must(t, whole.Set(t.Context(), "whole", "some value"))
		entry, _ := cachetest.Stored(t, rdb, ns+":{whole}")
		garbage := map[string]string{
			"nothing":      "",
			"text":         "a text of another program, long enough for a header",
			"short":        entry[:20],
			"truncated":    entry[:len(entry)-1],
			"overlong":     entry + "x",
			"not msgpack":  entry, // of a cache with another codec
			"other format": entry[:1] + "\x02" + entry[2:],
		}
		for name, data := range garbage {
			t.Run(name, func(t *testing.T) {
				c := cachetest.NewCacheIn[int](t, rdb, ns+name, nil)
				redistest.Must(t, rdb.Set(t.Context(), ns+name+":{k}", data, time.Hour).Err())
				cachetest.WantGet(t, c, "k", 0, singlefill.ErrMiss)
				cachetest.GoGet(t.Context(), c, "k", cachetest.Gives(7)).Want(t, 7)
				cachetest.WantGet(t, c, "k", 7, nil)
				if n := c.Stats().BadValues; n < 2 {
					t.Errorf("%d bad values counted, want at least 2", n)
				}
			})
		}
		t.Run("of another type", func(t *testing.T) {
			c := cachetest.NewCacheIn[int](t, rdb, ns+"list", nil)
			for _, key := range []string{":{k}", ":{k}:lock"} {
				redistest.Must(t, rdb.RPush(t.Context(), ns+"list"+key, "a").Err())
			}
			cachetest.GoGet(t.Context(), c, "k", cachetest.Gives(7)).Want(t, 7)
			cachetest.WantGet(t, c, "k", 7, nil)
		})
	})
}
