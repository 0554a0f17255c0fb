package tags

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// A Proof is what was known of the books before all values were removed, or noted: epoch and history.
type Proof [bookCount]string

// Prove begins new books, and returns a Proof, to be given to Complete when all values have been removed, or
// noted. The old books may name tags whose indexes are lost, and what was noted in them may be lost.
func (x *books) Prove(ctx context.Context) (*Proof, error) {
	p := new(Proof)
	if x.client.Local != nil { // which loses nothing
		return p, nil
	}
	return p, inParallel(bookCount, func(number int) (err error) {
		p[number], err = x.prove(ctx, number)
		return err
	})
}

func (x *books) prove(ctx context.Context, number int) (string, error) {
	server, err := x.server(ctx, number)
	if err != nil {
		return "", err
	}
	book := x.book(number)
	// Marks may have been made since an earlier try.
	epoch, err := x.change(ctx, book, func(p redis.Pipeliner, try string) {
		p.Unlink(ctx, book)
		p.HSet(ctx, book, "e", try, "n", 0)
	})
	return epoch + " " + server.history, err
}

// Complete notes that the indexes have each value that is stored, unless a book has been lost since Prove.
func (x *books) Complete(ctx context.Context, proof *Proof) error {
	if x.client.Local != nil {
		return nil
	}
	return inParallel(bookCount, func(number int) error {
		book := x.book(number)
		_, err := x.change(ctx, book, func(p redis.Pipeliner, _ string) { p.HSet(ctx, book, "k", proof[number]) })
		return err
	})
}
