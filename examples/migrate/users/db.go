package users

import (
	"context"
	"sync"
)

// A DB stands for a database. It counts its reads, and tests can hold them, make them fail and make
// them panic. Its zero value has no users.
type DB struct {
	mu    sync.Mutex
	names map[string]string // by id
	reads int
	next  func(ctx context.Context) error // of the next read
}

// User reads a user. What a hook does happens after the row has been read.
func (db *DB) User(ctx context.Context, id string) (User, error) {
	db.mu.Lock()
	db.reads++
	name, ok := db.names[id]
	hook := db.next
	db.next = nil
	db.mu.Unlock()
	if hook != nil {
		if err := hook(ctx); err != nil {
			return User{}, err
		}
	}
	if !ok {
		return User{}, ErrNoUser
	}
	return User{ID: id, Name: name, Password: "secret"}, nil
}

// Rename gives the user a name, and creates the user if there is none.
func (db *DB) Rename(_ context.Context, id, name string) error {
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.names == nil {
		db.names = make(map[string]string)
	}
	db.names[id] = name
	return nil
}

// Reads returns how many reads have begun.
func (db *DB) Reads() int {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.reads
}

// OnNext makes the next read call hook, once it has read its row.
func (db *DB) OnNext(hook func(ctx context.Context) error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.next = hook
}

// HoldNext makes the next read wait, with the row that it has read, until release is called or the
// context of the read ends. held is closed when it waits.
func (db *DB) HoldNext() (held <-chan struct{}, release func()) {
	waits, over := make(chan struct{}), make(chan struct{})
	db.OnNext(func(ctx context.Context) error {
		close(waits)
		select {
		case <-over:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return waits, sync.OnceFunc(func() { close(over) })
}
