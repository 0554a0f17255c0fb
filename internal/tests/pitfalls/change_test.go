package pitfalls_test

import (
	"testing"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Two versions of a type. In the second each user has a Role.
type (
	user1 struct{ Name string }
	user2 struct{ Name, Role string }
)

// A value of the old type is half empty as one of the new type, and is no error.
func TestChange_SameNamespace(t *testing.T) {
	t.Parallel()
	for _, codec := range []singlefill.Codec{singlefill.MsgPack, singlefill.JSON} {
		ns := redistest.Namespace(t)
		before := cachetest.NewCacheIn(t, client(t), ns, &singlefill.Options[user1]{Codec: codec})
		after := cachetest.NewCacheIn(t, client(t), ns, &singlefill.Options[user2]{Codec: codec})
		redistest.Must(t, before.Set(t.Context(), "ann", user1{"Ann"}))
		cachetest.GoGet(t.Context(), after, "ann", cachetest.Gives(user2{"Ann", "admin"})).Want(t, user2{Name: "Ann"})
	}
}

// A release is a version of a program, as docs/pitfalls.md has them: the namespace that it reads, and those in which
// it deletes.
type release struct {
	reads   string
	deletes []string
}

// A new namespace in one deployment loses Deletes of processes that do not know it. In three
// deployments none is lost.
func TestChange_NewNamespace(t *testing.T) {
	t.Parallel()
	ns, caches := redistest.Namespace(t), make(map[string]*singlefill.Cache[int])
	for _, name := range []string{"users", "users2"} {
		caches[name] = cachetest.NewCacheIn[int](t, client(t), ns+name, nil)
	}
	version := 0
	// lost lets each release in turn change the user, and returns how often a release then has an old value.
	lost := func(fleet ...release) (n int) {
		for _, writer := range append(fleet, fleet...) {
			version++
			for _, name := range writer.deletes {
				redistest.Must(t, caches[name].Delete(t.Context(), "ann"))
			}
			for _, reader := range fleet {
				v, err := caches[reader.reads].GetOrLoad(t.Context(), "ann", cachetest.Gives(version))
				redistest.Must(t, err)
				if v != version {
					n++
				}
			}
		}
		return n
	}
	both := []string{"users", "users2"}
	releases := []release{{"users", []string{"users"}}, {"users", both}, {"users2", both}, {"users2", []string{"users2"}}}
	if n := lost(releases[0], releases[3]); n == 0 {
		t.Error("nothing is lost in one deployment")
	}
	for i, next := range releases[1:] { // while the next one is deployed, both run
		if n := lost(releases[i], next) + lost(next, next); n > 0 {
			t.Errorf("in deployment %d: %d old values", i+1, n)
		}
	}
}
