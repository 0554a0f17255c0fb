package tags

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// Sequences are the sequences of all books at one time. A sequence that Redis did not tell is
// empty.
type Sequences struct {
	of     [bookCount]string
	err    error  // why one is empty
	memory uint64 // without Redis, in place of them
}

// Sequences reads the sequences. It creates the books that do not exist. A load begins then, so it does not wait
// while the breaker is open.
func (x *books) Sequences(ctx context.Context) *Sequences {
	s := new(Sequences)
	if x.client.Local != nil {
		s.memory = x.client.Local.Sequence()
		return s
	}
	numbers := make([]int, bookCount)
	for i := range numbers {
		numbers[i] = i
	}
	nodes := client.ByNode(x.client, numbers, x.book)
	errs := make([]error, len(nodes))
	err := inParallel(len(nodes), func(i int) error { // all of them: most tags have no book on a dead node
		if errs[i] = x.client.Refusal(x.book(nodes[i][0])); errs[i] == nil {
			errs[i] = x.read(ctx, nodes[i], s)
		}
		return nil
	})
	s.err = errors.Join(append(errs, err)...)
	return s
}

// Missing returns an error if Redis did not tell a sequence that values with these tags need.
func (s *Sequences) Missing(tags []string) error {
	for _, tag := range tags {
		if s.of[bookOf(tag)] == "" {
			return s.err
		}
	}
	return nil
}

// read reads the sequences of books of one node.
func (x *books) read(ctx context.Context, numbers []int, into *Sequences) error {
	states, err := client.Do(ctx, x.client, op, x.book(numbers[0]), func(ctx context.Context) (states []*redis.SliceCmd, err error) {
		states = make([]*redis.SliceCmd, len(numbers))
		_, err = client.Pipelined(ctx, x.client.Redis, func(p redis.Pipeliner) {
			for i, number := range numbers {
				states[i] = p.HMGet(ctx, x.book(number), "e", "n")
			}
		})
		for i, number := range numbers {
			if err == nil && states[i].Val()[0] == nil {
				states[i], err = x.create(ctx, x.book(number))
			}
		}
		return states, err
	})
	if err != nil {
		return err
	}
	for i, number := range numbers {
		into.of[number] = fmt.Sprintf("%v %v", states[i].Val()...)
	}
	return nil
}

// create creates a book, unless another process has.
func (x *books) create(ctx context.Context, book string) (state *redis.SliceCmd, err error) {
	err = client.Transaction(ctx, x.client.Redis, func(p redis.Pipeliner) { // never without a TTL
		p.HSetNX(ctx, book, "e", rand.Text())
		p.HSetNX(ctx, book, "n", 0)
		p.PExpire(ctx, book, bookLife)
		state = p.HMGet(ctx, book, "e", "n")
	})
	return state, err
}
