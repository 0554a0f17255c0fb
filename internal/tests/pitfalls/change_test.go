package pitfalls_test

import (
	"context"
	"testing"

	"github.com/redis/go-redis/v9"

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
		if err := before.Set(t.Context(), "ann", user1{"Ann"}); err != nil {
			t.Fatal(err)
		}
		v, err := after.GetOrLoad(t.Context(), "ann", func(context.Context, string) (user2, error) { return user2{"Ann", "admin"}, nil })
		if v != (user2{Name: "Ann"}) || err != nil {
			t.Errorf("%T: %+v, %v", codec, v, err)
		}
	}
}

// A release is a version of the program, as docs/pitfalls.md has them.
type release struct {
	name    string
	reads   string   // namespace
	deletes []string // namespaces
}

// A program is a process that runs a release.
type program struct {
	release
	get    func(t *testing.T, source user2) user2
	delete func(t *testing.T)
}

// start starts a release. Namespaces with "2" have the new type.
func (r release) start(t *testing.T, rdb redis.UniversalClient, ns string) *program {
	p := &program{release: r}
	users1 := cachetest.NewCacheIn[user1](t, rdb, ns+"users", nil)
	users2 := cachetest.NewCacheIn[user2](t, rdb, ns+"users2", nil)
	p.get = func(t *testing.T, source user2) user2 {
		if r.reads == "users2" {
			v, err := users2.GetOrLoad(t.Context(), "ann", func(context.Context, string) (user2, error) { return source, nil })
			if err != nil {
				t.Error(err)
			}
			return v
		}
		v, err := users1.GetOrLoad(t.Context(), "ann", func(context.Context, string) (user1, error) { return user1{source.Name}, nil })
		if err != nil {
			t.Error(err)
		}
		return user2{v.Name, source.Role} // it does not know of roles
	}
	p.delete = func(t *testing.T) {
		for _, namespace := range r.deletes {
			var err error
			if namespace == "users2" {
				err = users2.Delete(t.Context(), "ann")
			} else {
				err = users1.Delete(t.Context(), "ann")
			}
			if err != nil {
				t.Error(err)
			}
		}
	}
	return p
}

// lostDeletes lets each program in turn change the user, and returns how often one of the others then
// has an old or a half-empty value.
func lostDeletes(t *testing.T, programs ...*program) (n int) {
	for i, writer := range append(programs, programs...) {
		source := user2{Name: string(rune('A' + i)), Role: "admin"}
		writer.delete(t)
		for _, reader := range programs {
			if reader.get(t, source) != source {
				n++
			}
		}
	}
	return n
}

// A new namespace in one deployment loses Deletes of processes that do not know it. In three
// deployments none is lost, and no value is half empty.
func TestChange_NewNamespace(t *testing.T) {
	t.Parallel()
	rdb := client(t)
	old := release{"old", "users", []string{"users"}}
	hasty := release{"hasty", "users2", []string{"users2"}}
	ns := redistest.Namespace(t)
	if n := lostDeletes(t, old.start(t, rdb, ns), hasty.start(t, rdb, ns)); n == 0 {
		t.Error("nothing is lost in one deployment")
	}

	both := []string{"users", "users2"}
	releases := []release{old, {"1", "users", both}, {"2", "users2", both}, {"3", "users2", []string{"users2"}}}
	ns = redistest.Namespace(t)
	for i := 1; i < len(releases); i++ { // while the next one is deployed, both run
		for _, fleet := range [][]release{{releases[i-1], releases[i]}, {releases[i], releases[i]}} {
			if n := lostDeletes(t, fleet[0].start(t, rdb, ns), fleet[1].start(t, rdb, ns)); n > 0 {
				t.Errorf("while %s and %s run: %d old or half-empty values", fleet[0].name, fleet[1].name, n)
			}
		}
	}
}
