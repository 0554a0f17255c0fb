package tags

import (
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/local"
)

//go:embed lua/note.lua
var noteLua string

var noteScript = client.NewScript(bookLua + noteLua)

// A Note says that a value under Key, with Tags, is about to be stored, and that Redis keeps it for Life.
type Note struct {
	Key  string
	Tags []string
	Life time.Duration
}

// Note notes keys under the tags of their values, before the values are stored: all of them, or it returns an error.
func (x *Index) Note(ctx context.Context, notes []Note) (*Noted, error) {
	noted, failed := x.NoteEach(ctx, notes, nil)
	for _, err := range failed {
		return nil, err
	}
	return noted, nil
}

// ErrInvalidated is the error of a Note one of whose tags has been invalidated since the load.
var ErrInvalidated = errors.New("tags: a tag has been invalidated")

// NoteEach is Note, but other notes do not fail with one. since are the sequences before the load of all of these
// values, of which none is missing; nil: they were not loaded. It returns what it has noted, and the errors of the keys
// that it has not. Without Redis there is nothing to note.
func (x *Index) NoteEach(ctx context.Context, notes []Note, since *Sequences) (noted *Noted, failed map[string]error) {
	if x.client.Local != nil {
		return nil, nil
	}
	n := &Noted{sent: time.Now()}
	var whole, cut []page
	for _, p := range x.notePages(ctx, pagesOf(notes), since) {
		if keys := p.byKey(); len(keys) > 1 && (p.err == ErrInvalidated || client.Refused(p.err)) {
			cut = append(cut, keys...) // one of them may be to blame
		} else {
			whole = append(whole, p)
		}
	}
	failed = make(map[string]error)
	for _, p := range append(whole, x.notePages(ctx, cut, since)...) {
		known := n.epochs[p.book]
		switch {
		case p.err != nil:
			p.fail(failed)
			continue
		case known != "" && known != p.epoch:
			p.epoch = "lost in between" // no book has this epoch
		}
		n.epochs[p.book] = p.epoch
	}
	for _, note := range notes {
		if failed[note.Key] == nil {
			n.notes = append(n.notes, note)
		}
	}
	return n, failed
}

// notePages notes pages, and sets their outcomes. A load does not wait for a book while the breaker is open.
func (x *Index) notePages(ctx context.Context, pages []page, since *Sequences) []page {
	_ = inParallel(len(pages), func(i int) error { // each page has its error
		p := &pages[i]
		if p.err = x.client.Refusal(x.book(p.book)); p.err != nil && since != nil {
			return nil
		}
		p.epoch, p.err = x.note(ctx, *p, since)
		if p.err == nil && p.epoch == "" {
			p.err = ErrInvalidated
		}
		return nil
	})
	return pages
}

// byKey returns a page for each key of a page.
func (p page) byKey() (pages []page) {
	at := make(map[string]int)
	for _, t := range p.tags {
		for _, note := range t.keys {
			i, ok := at[note.Key]
			if !ok {
				i = len(pages)
				at[note.Key] = i
				pages = append(pages, page{book: p.book})
			}
			pages[i].tags = append(pages[i].tags, tagged{t.tag, []Note{note}})
			pages[i].pairs++
		}
	}
	return pages
}

// fail notes why the keys of a page are not noted.
func (p page) fail(failed map[string]error) {
	for _, t := range p.tags {
		for _, note := range t.keys {
			if failed[note.Key] == nil || failed[note.Key] == ErrInvalidated {
				failed[note.Key] = p.err
			}
		}
	}
}

// Noted is what Note has written.
type Noted struct {
	notes  []Note
	epochs [bookCount]string
	sent   time.Time
}

// age returns for how long the notes have been written, at most. The monotonic clock may stand still while a
// machine sleeps, and the wall clock may be set back.
func (n *Noted) age() time.Duration {
	now := time.Now()
	return max(now.Sub(n.sent), now.Round(0).Sub(n.sent.Round(0)))
}

// Stored is called when some of the values have been stored. It notes all of them again if a note may end before
// its value; and, unless the values were stored under locks, which a rebuild removes, if a note may have been lost
// before: then the values may have been read in between. All who find out a later loss find the values. n is nil if
// nothing was noted.
func (x *Index) Stored(ctx context.Context, n *Noted, locked bool) (err error) {
	if n == nil {
		return nil
	}
	again := n.age() > x.storing
	if !again && !locked {
		again, err = x.lost(ctx, n)
	}
	if again && err == nil {
		var noted *Noted
		if noted, err = x.Note(ctx, n.notes); err == nil {
			*n = *noted
		}
	}
	return err
}

// lost reports whether one of the notes may have been lost.
func (x *Index) lost(ctx context.Context, n *Noted) (bool, error) {
	var numbers []int
	for number, epoch := range n.epochs {
		if epoch != "" {
			numbers = append(numbers, number)
		}
	}
	nodes := client.ByNode(x.client, numbers, x.book)
	lost := make([]bool, len(nodes))
	err := inParallel(len(nodes), func(i int) (err error) {
		lost[i], err = x.lostOf(ctx, n, nodes[i])
		return err
	})
	return slices.Contains(lost, true), err
}

// lostOf is lost for books of one node.
func (x *Index) lostOf(ctx context.Context, n *Noted, numbers []int) (bool, error) {
	return client.Do(ctx, x.client, op, x.book(numbers[0]), func(ctx context.Context) (bool, error) {
		epochs := make([]*redis.StringCmd, len(numbers))
		_, err := client.Pipelined(ctx, x.client.Redis, func(p redis.Pipeliner) {
			for i, number := range numbers {
				epochs[i] = p.HGet(ctx, x.book(number), "e")
			}
			p.HDel(ctx, x.book(numbers[0]), "") // nothing: see Keys
		})
		if errors.Is(err, redis.Nil) {
			return true, nil
		}
		lost := false // the caller may have left
		for i, number := range numbers {
			lost = lost || epochs[i].Val() != n.epochs[number]
		}
		return lost, err
	})
}

// A page is what one command notes in a book.
type page struct {
	book  int
	tags  []tagged
	pairs int // of a tag and a key

	// The outcome of notePages.
	epoch string // of the book
	err   error
}

// pageLen is how many pairs a page has at most. A server takes a millisecond or two for them if each has another tag.
const pageLen = 32

// A tagged is a tag with its keys.
type tagged struct {
	tag  string
	keys []Note
}

func pagesOf(notes []Note) (pages []page) {
	var at [bookCount]int // in pages, plus 1
	type place struct{ page, tag int }
	places := make(map[string]place)
	for _, note := range notes {
		for _, tag := range note.Tags {
			number := bookOf(tag)
			if at[number] == 0 || pages[at[number]-1].pairs == pageLen {
				pages = append(pages, page{book: number})
				at[number] = len(pages)
			}
			p := &pages[at[number]-1]
			of, ok := places[tag]
			if !ok || of.page != at[number] {
				of = place{at[number], len(p.tags)}
				places[tag] = of
				p.tags = append(p.tags, tagged{tag: tag})
			}
			p.tags[of.tag].keys = append(p.tags[of.tag].keys, note)
			p.pairs++
		}
	}
	return pages
}

// note returns the epoch of the book, or "" if it refuses the note.
func (x *Index) note(ctx context.Context, p page, since *Sequences) (string, error) {
	sequence := ""
	if since != nil {
		sequence = since.of[p.book]
	}
	keys := []any{x.book(p.book)}
	args := []any{sequence, rand.Text(), bookLife.Milliseconds()}
	for _, t := range p.tags {
		keys = append(keys, x.index(t.tag))
		args = append(args, t.tag, len(t.keys))
		for _, key := range t.keys {
			args = append(args, x.noted(key.Life).Milliseconds(), key.Key)
		}
	}
	reply, err := x.run(ctx, noteScript, keys, args)
	if client.ScriptsRefused(err) {
		return client.Do(ctx, x.client, op, x.book(p.book), func(ctx context.Context) (string, error) {
			return x.watchNote(ctx, p, sequence)
		})
	}
	epoch, _ := reply.(string)
	return epoch, err
}

// Without Redis the tags are in the [local.Store] of the client, and nothing of them is ever lost. A load reads the
// sequence, asks the source, and stores its value. The store looks at the marks of its tags, and adds the key to the
// keys of each, in one step: see [local.Step.Tag]. So there is no book, and no note.

// Tagging returns what a store in memory has to know of the tags of a value. since are the sequences before its load;
// nil: it was not loaded.
func (x *Index) Tagging(key string, tags []string, since *Sequences) local.Tagging {
	t := local.Tagging{Key: key, Tags: tags, Since: local.Unproved}
	if x != nil {
		t.Space = x.namespace
	}
	if since != nil {
		t.Since = since.memory
	}
	return t
}
