package tags

import (
	"context"
	"crypto/rand"
	_ "embed"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

//go:embed lua/mark.lua
var markLua string

var markScript = client.NewScript(bookLua + markLua)

// Marked is what an invalidation knows of its tags.
type Marked struct {
	Complete bool // the indexes have each value that is stored
	books    []markedBook
	keys     []string // without Redis, in place of the indexes
}

type markedBook struct {
	number int
	server server
	known  string   // under which the book is complete; empty: it is not
	tags   []string // those that have an index
}

// Mark begins to invalidate tags. Values with these tags that are loaded now will not be stored, unless
// they are in an index by then.
func (x *Index) Mark(ctx context.Context, tags []string) (m Marked, err error) {
	if x.client.Local != nil {
		return Marked{Complete: true, keys: x.client.Local.Mark(x.namespace, tags, x.markLife)}, nil
	}
	pages := pagesOf([]Note{{Tags: tags}})
	m.books = make([]markedBook, len(pages))
	err = inParallel(len(pages), func(i int) (err error) {
		m.books[i], err = x.markPage(ctx, pages[i])
		return err
	})
	m.Complete = !slices.ContainsFunc(m.books, func(b markedBook) bool { return b.known == "" })
	return m, err
}

func (x *Index) markPage(ctx context.Context, p page) (b markedBook, err error) {
	b.number = p.book
	if b.server, err = x.server(ctx, p.book); err != nil { // before the mark, which another server may lack
		return b, err
	}
	reply, err := x.mark(ctx, p, b.server.history)
	for i, yes := range reply.exists {
		if yes {
			b.tags = append(b.tags, p.tags[i].tag)
		}
	}
	b.known = reply.known
	return b, err
}

// A markReply is the reply to mark.lua.
type markReply struct {
	known  string
	exists []bool // for each tag
}

func (x *Index) mark(ctx context.Context, p page, history string) (m markReply, err error) {
	keys := []any{x.book(p.book)}
	args := []any{rand.Text(), bookLife.Milliseconds(), x.markLife.Milliseconds(), history}
	for _, t := range p.tags {
		keys, args = append(keys, x.index(t.tag)), append(args, t.tag)
	}
	reply, err := x.run(ctx, markScript, keys, args)
	if client.ScriptsRefused(err) {
		return client.Do(ctx, x.client, op, x.book(p.book), func(ctx context.Context) (markReply, error) {
			return x.watchMark(ctx, p, history)
		})
	}
	if err != nil {
		return m, err
	}
	fields, _ := reply.([]any)
	if len(fields) != len(keys) {
		return m, fmt.Errorf("unexpected reply %v", reply)
	}
	m.known, _ = fields[0].(string)
	for _, field := range fields[1:] {
		m.exists = append(m.exists, field == int64(1))
	}
	return m, nil
}

// Seen reports whether this process has seen the books of m complete before, since their epochs began. If
// not, it may have values in memory that were stored before, and that are in no index. When it has
// forgotten them, SetSeen notes that.
func (x *Index) Seen(m Marked) bool {
	for _, b := range m.books {
		if seen := x.seen[b.number].Load(); seen == nil || *seen != b.known {
			return false
		}
	}
	return true
}

// SetSeen notes what Seen is to report.
func (x *Index) SetSeen(m Marked) {
	for _, b := range m.books {
		x.seen[b.number].Store(&b.known)
	}
}

// KeysOf calls each with the keys in the indexes of m. It reports whether all that was read since Mark was there. An
// index may have been lost before it was read, and even be complete again by now. A server may have been replaced by
// another that lacks a part of it, or the mark; or restarted, and then goes on from a cursor of its former process in
// another order.
func (x *Index) KeysOf(ctx context.Context, m Marked, each func(keys []string) error) (intact bool, err error) {
	for keys := range slices.Chunk(m.keys, client.Batch) {
		if err := each(keys); err != nil {
			return false, err
		}
	}
	for _, b := range m.books {
		for _, tag := range b.tags {
			if err := x.Keys(ctx, tag, each); err != nil {
				return false, err
			}
		}
	}
	lost := make([]bool, len(m.books))
	err = inParallel(len(lost), func(i int) error {
		intact, err := x.intact(ctx, m.books[i])
		lost[i] = !intact
		return err
	})
	return !slices.Contains(lost, true), err
}

// Keys calls each with the keys in the index of a tag, a few hundred at a time. A key may come twice.
func (x *Index) Keys(ctx context.Context, tag string, each func(keys []string) error) error {
	index := x.index(tag)
	for cursor := uint64(0); ; {
		scan, err := client.Do(ctx, x.client, op, index, func(ctx context.Context) (scan *redis.ScanCmd, err error) {
			_, err = client.Pipelined(ctx, x.client.Redis, func(p redis.Pipeliner) {
				scan = p.ZScan(ctx, index, cursor, "", 500)
				// A write, though of nothing: a replica may be behind, and must not answer.
				p.ZRemRangeByScore(ctx, index, "-1", "0")
			})
			return scan, err
		})
		if err != nil {
			return err
		}
		members, next := scan.Val()
		keys := make([]string, 0, len(members)/2)
		for i := 0; i < len(members); i += 2 {
			keys = append(keys, members[i])
		}
		if len(keys) > 0 {
			if err := each(keys); err != nil {
				return err
			}
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

func (x *Index) intact(ctx context.Context, b markedBook) (bool, error) {
	if len(b.tags) > 0 {
		book, indexes := x.book(b.number), make([]string, len(b.tags))
		for i, tag := range b.tags {
			indexes[i] = x.index(tag)
		}
		intact, err := client.Do(ctx, x.client, op, book, func(ctx context.Context) (bool, error) {
			var state *redis.SliceCmd
			var exist *redis.IntCmd
			_, err := client.Pipelined(ctx, x.client.Redis, func(p redis.Pipeliner) {
				state, exist = p.HMGet(ctx, book, "e", "k"), p.Exists(ctx, indexes...)
				p.HDel(ctx, book, "") // nothing: see Keys
			})
			if err != nil {
				return false, err
			}
			same := fmt.Sprint(state.Val()[0], " ", b.server.history) == b.known && state.Val()[1] == b.known
			return same && exist.Val() == int64(len(indexes)), nil
		})
		if err != nil || !intact {
			return false, err
		}
	}
	now, err := x.server(ctx, b.number)
	return now == b.server, err
}
