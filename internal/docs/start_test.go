package main

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/singlefilltest"
)

// The code of docs/start.md is in TestStart, but for its indentation.
func TestStart_Blocks(t *testing.T) {
	t.Parallel()
	code := unindented(read(t, "internal/docs/start_test.go"))
	for _, block := range blocks(read(t, "docs/start.md"), "go") {
		if !strings.Contains(code, unindented(block)) {
			t.Errorf("TestStart does not run this code of docs/start.md:\n%s", block)
		}
	}
}

func unindented(code string) string {
	var lines strings.Builder
	for line := range strings.Lines(code) {
		lines.WriteString(strings.TrimSpace(line) + "\n")
	}
	return lines.String()
}

// A row is a row of the database, which takes a second to read.
type row struct {
	mu      sync.Mutex
	name    string
	queries int
}

func (r *row) User(ctx context.Context, _ string) (User, error) {
	r.mu.Lock()
	r.queries++
	u := User{r.name}
	r.mu.Unlock()
	select {
	case <-time.After(time.Second):
		return u, nil
	case <-ctx.Done():
		return u, ctx.Err()
	}
}

func (r *row) Rename(_ context.Context, _, name string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.name = name
	return nil
}

// want checks a call, and that the source was asked as often as docs/start.md says.
func (r *row) want(t *testing.T, name string, queries int, u User, err error) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if u.Name != name || err != nil || r.queries != queries {
		t.Errorf("got %v, %v, after %d queries; want %s after %d", u, err, r.queries, name, queries)
	}
}

type User struct{ Name string }

// Each step of docs/start.md does what the page says.
func TestStart(t *testing.T) {
	run := func(name string, step func(t *testing.T, db *row, rdb *redis.Client, fleet []*singlefill.Cache[User]) error) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rdb := singlefilltest.Redis(t)
				var fleet []*singlefill.Cache[User] // processes
				for range 3 {
					users, err := singlefill.New[User](rdb, "users", 5*time.Minute, nil)
					redistest.Must(t, err)
					defer users.Close()
					fleet = append(fleet, users)
				}
				redistest.Must(t, step(t, &row{name: "Ada"}, rdb, fleet))
			})
		})
	}

	run("a map", func(t *testing.T, db *row, _ *redis.Client, _ []*singlefill.Cache[User]) error {
		var mu sync.Mutex
		known := make(map[string]User)

		userOf := func(ctx context.Context, id string) (User, error) {
			mu.Lock()
			defer mu.Unlock()
			if u, ok := known[id]; ok {
				return u, nil
			}
			u, err := db.User(ctx, id) // slow
			if err == nil {
				known[id] = u
			}
			return u, err
		}

		for range 2 {
			u, err := userOf(t.Context(), "42")
			db.want(t, "Ada", 1, u, err)
		}
		return nil
	})

	run("one process", func(t *testing.T, db *row, _ *redis.Client, _ []*singlefill.Cache[User]) error {
		ctx := t.Context()
		users, err := singlefill.NewLocal[User]("users", 5*time.Minute, nil)
		if err != nil {
			return err
		}
		defer users.Close()

		u, err := users.GetOrLoad(ctx, "42", db.User)

		db.want(t, "Ada", 1, u, err)
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() {
				u, err := users.GetOrLoad(ctx, "43", db.User)
				db.want(t, "Ada", 2, u, err)
			})
		}
		all.Wait()
		return nil
	})

	run("a fleet", func(t *testing.T, db *row, rdb *redis.Client, fleet []*singlefill.Cache[User]) error {
		ctx := t.Context()
		var all sync.WaitGroup
		for _, users := range fleet {
			for range 50 {
				all.Go(func() {
					u, err := users.GetOrLoad(ctx, "42", db.User)
					db.want(t, "Ada", 1, u, err)
				})
			}
		}
		all.Wait()

		users, err := singlefill.New[User](rdb, "users", 5*time.Minute, nil) // once per process
		if err != nil {
			return err
		}
		defer users.Close()

		u, err := users.GetOrLoad(ctx, "42", db.User)

		db.want(t, "Ada", 1, u, err)
		return nil
	})

	run("a change", func(t *testing.T, db *row, _ *redis.Client, fleet []*singlefill.Cache[User]) error {
		ctx, users := t.Context(), fleet[0]
		var early sync.WaitGroup
		early.Go(func() { _, _ = fleet[1].GetOrLoad(ctx, "42", db.User) })
		defer early.Wait()
		synctest.Wait() // it has read the old row
		change := func() error {
			if err := db.Rename(ctx, "42", "Ada Lovelace"); err != nil { // commits
				return err
			}
			return users.Delete(context.WithoutCancel(ctx), "42")
		}
		err := change()
		for _, users := range fleet {
			u, err := users.GetOrLoad(ctx, "42", db.User)
			db.want(t, "Ada Lovelace", 2, u, err)
		}
		return err
	})

	run("without Redis", func(t *testing.T, db *row, rdb *redis.Client, fleet []*singlefill.Cache[User]) error {
		singlefilltest.Disconnect(t, rdb)
		var all sync.WaitGroup
		for _, users := range fleet {
			for range 50 {
				all.Go(func() {
					u, err := users.GetOrLoad(t.Context(), "42", db.User)
					db.want(t, "Ada", len(fleet), u, err)
				})
			}
		}
		all.Wait()
		if err := fleet[0].Delete(t.Context(), "42"); err == nil {
			t.Error("Delete returned nil")
		}
		return nil
	})
}
