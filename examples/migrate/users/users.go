// Package users is what the programs have in common: a database of users, and the write that keeps
// two caches of it correct while one replaces the other.
package users

import (
	"context"
	"errors"
	"time"
)

// A User is a row of the database.
type User struct {
	ID, Name string
	Password string `json:"-"` // no cache may hold it
}

// ErrNoUser is returned for an id that the database does not have.
var ErrNoUser = errors.New("no such user")

// A Cache is read in front of the database. Each program has two, Before and After.
type Cache interface {
	User(ctx context.Context, id string) (User, error)
	Forget(ctx context.Context, id string) error
}

// Rename commits a new name, then deletes the user from every cache that any process still reads.
// A cache that fails or hangs does not keep the others from being asked.
func Rename(ctx context.Context, db *DB, id, name string, caches ...Cache) error {
	if err := db.Rename(ctx, id, name); err != nil {
		return err
	}
	var errs []error
	for _, c := range caches {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		errs = append(errs, c.Forget(ctx, id))
		cancel()
	}
	return errors.Join(errs...)
}
