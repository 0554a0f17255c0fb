package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill"
)

type Product struct {
	ID   string `json:"id"`
	Name string `json:"name"`
}

// A Catalog is what the service says of all products.
type Catalog struct {
	Products int `json:"products"`
	Renamed  int `json:"renamed"`
}

// errOverloaded means that the database answers no more queries at this time.
var errOverloaded = errors.New("the database is overloaded")

// A change is a row of the outbox: the product has been changed, and the cache may still have the
// old one.
type change struct {
	Seq       int64 // differs between changes of the same product
	ProductID string
}

// database is what the service needs of its database. Methods return singlefill.ErrNotFound, wrapped,
// for a product that does not exist.
type database interface {
	// Product is a Loader.
	//
	//	SELECT id, name FROM products WHERE id = $1
	Product(ctx context.Context, id string) (Product, error)

	// Catalog is a Loader.
	//
	//	SELECT count(*), count(renamed_at) FROM products
	Catalog(ctx context.Context, key string) (Catalog, error)

	// Rename changes a product, and adds the change to the outbox in the same transaction. So no
	// change is forgotten, whatever happens after the commit.
	//
	//	BEGIN;
	//	UPDATE products SET name = $2 WHERE id = $1;
	//	INSERT INTO outbox (product_id) VALUES ($1) RETURNING seq;
	//	COMMIT;
	Rename(ctx context.Context, id, name string) (change, error)

	// Outbox returns the oldest changes in the outbox.
	//
	//	SELECT seq, product_id FROM outbox ORDER BY seq LIMIT 256
	Outbox(ctx context.Context) ([]change, error)

	// Done removes changes from the outbox.
	//
	//	DELETE FROM outbox WHERE seq = ANY($1)
	Done(ctx context.Context, changes []change) error
}

// memory stands for a database of 999 products with a slow query.
type memory struct {
	mu     sync.Mutex        // a transaction
	names  map[string]string // of products that have been renamed
	outbox []change
	seq    int64

	queries atomic.Int64 // running
}

// maxQueries is how many queries run at once; the database refuses others.
const maxQueries = 32

// query stands for the time that a query takes.
func (m *memory) query(ctx context.Context) error {
	defer m.queries.Add(-1)
	if m.queries.Add(1) > maxQueries {
		return errOverloaded
	}
	select {
	case <-time.After(500 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func newMemory() *memory { return &memory{names: make(map[string]string)} }

func (m *memory) Product(ctx context.Context, id string) (Product, error) {
	if err := m.query(ctx); err != nil {
		return Product{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	name, renamed := m.names[id]
	if !renamed {
		name = "Product " + id
	}
	return Product{ID: id, Name: name}, exists(id)
}

func (m *memory) Catalog(ctx context.Context, _ string) (Catalog, error) {
	if err := m.query(ctx); err != nil {
		return Catalog{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return Catalog{Products: 999, Renamed: len(m.names)}, nil
}

func (m *memory) Rename(ctx context.Context, id, name string) (change, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := exists(id); err != nil {
		return change{}, err
	}
	m.seq++
	c := change{m.seq, id}
	m.names[id], m.outbox = name, append(m.outbox, c)
	return c, nil
}

func (m *memory) Outbox(context.Context) ([]change, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.outbox[:min(256, len(m.outbox))]), nil
}

func (m *memory) Done(_ context.Context, changes []change) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.outbox = slices.DeleteFunc(m.outbox, func(c change) bool { return slices.Contains(changes, c) })
	return nil
}

func exists(id string) error {
	if n, err := strconv.Atoi(id); err != nil || n < 1 || n > 999 {
		return fmt.Errorf("product %q: %w", id, singlefill.ErrNotFound)
	}
	return nil
}
