// Package tags finds the keys whose values have a tag, so exactly that a value which is loaded while its
// tag is invalidated is found, too.
//
// The tags of a namespace are spread over a few books. A book has a sequence, which counts invalidations.
// A load of a value goes
//
//  1. read the sequences;
//  2. ask the source;
//  3. note the key in the index of each tag, unless the tag has a mark above that sequence ([Index.Note]);
//  4. store the value, if the fill lock is still held;
//
// and an invalidation of a tag
//
//  1. increment the sequence, and mark the tag with it ([Index.Mark]);
//  2. read the index;
//  3. remove each value together with its lock.
//
// If the key is noted before the mark is written, the invalidation finds it, and either the value or the
// lock without which the value is not stored. If it comes after the mark, the mark refuses it, unless the
// sequence was read after the mark, too: then the source was asked after the invalidation had begun. Any
// other order of these steps, or an invalidation that removes the keys it has found from the index, leaves
// old values. A model of the protocol found that, which visits every state: internal/tags/model_test.go of commit
// b4cfbbe. Before you change the protocol, take the model from there.
//
// Members leave an index when their values have ended, whatever has become of the values before. Set is
// right without a proof: a Set at the same time as an invalidation may come before or after it.
//
// What is lost is found out by an epoch, which each book is given at its birth, by another replication ID, and by indexes that are gone
// although the book says that values have their tags. The tags are then read from the values:
//
//  1. begin new books ([Index.Prove]);
//  2. remove the locks: a load whose note is lost is not stored;
//  3. read the values, note those that stay, and remove or expire those that have the tag;
//  4. complete the books, unless one has another epoch by then ([Index.Complete]).
//
// A Set looks whether its note is still there when it has stored its value, and notes it again otherwise
// ([Index.Stored]): the values may have been read in between. If its process dies in between, or the Set fails,
// and the tags have been lost at that moment, an invalidation does not find the value until it ends.
//
// A note ends when a value ends that was stored at most a time for storing after it. A process that stores a value
// later, because it was frozen in between, notes it again.
//
// One book, and so one slot, for all tags would be simpler, but all indexes of a Cluster would be on one master. A
// book is in the slot of its indexes, so each script is one step. The sorted sets are trimmed as members are added,
// also where the server could end members by itself (HPEXPIRE): one way for all servers.
package tags

import (
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/foreign"
)

//go:embed lua/book.lua
var bookLua string

//go:embed lua/note.lua
var noteLua string

//go:embed lua/mark.lua
var markLua string

var (
	noteScript = client.NewScript(bookLua + noteLua)
	markScript = client.NewScript(bookLua + markLua)
)

// An Index is the tags of one namespace.
type Index struct {
	client    *client.Client
	namespace string
	markLife  time.Duration
	storing   time.Duration                 // a value is stored at most this long after its note, or noted again
	seen      [books]atomic.Pointer[string] // see Seen
}

// New returns the index of a namespace. A mark is kept for at least markLife. A load that takes longer is
// refused once marks have been dropped. storing is how long it takes to store a value that has been noted.
func New(c *client.Client, namespace string, markLife, storing time.Duration) *Index {
	return &Index{client: c, namespace: namespace, markLife: markLife, storing: storing}
}

// books is how many books a namespace has. In a Cluster each may be on another master, with the indexes of
// its tags. All processes must agree on it.
const books = 8

// bookLife is how long a book lives after the last command for it, at least. When it has ended, the
// next invalidation cannot know that no index was lost.
const bookLife = 24 * time.Hour

// op is the purpose of all commands for tags.
const op = "tag"

func bookOf(tag string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(tag))
	return int(h.Sum32() % books)
}

// No key of a value, lock, log or semaphore of any namespace ends like these.

func (x *Index) book(number int) string {
	return fmt.Sprintf("%s:tags:{%s:%d}:book", x.namespace, x.namespace, number)
}

func (x *Index) index(tag string) string {
	return fmt.Sprintf("%s:tags:{%s:%d}:%s:index", x.namespace, x.namespace, bookOf(tag), tag)
}

// Sequences are the sequences of all books at one time. A sequence that Redis did not tell is
// empty.
type Sequences struct {
	of  [books]string
	err error // why one is empty
}

// Sequences reads the sequences. It creates the books that do not exist. A load begins then, so it does not wait
// while the breaker is open.
func (x *Index) Sequences(ctx context.Context) *Sequences {
	s := new(Sequences)
	numbers := make([]int, books)
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
func (x *Index) read(ctx context.Context, numbers []int, into *Sequences) error {
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
func (x *Index) create(ctx context.Context, book string) (state *redis.SliceCmd, err error) {
	err = client.Transaction(ctx, x.client.Redis, func(p redis.Pipeliner) { // never without a TTL
		p.HSetNX(ctx, book, "e", rand.Text())
		p.HSetNX(ctx, book, "n", 0)
		p.PExpire(ctx, book, bookLife)
		state = p.HMGet(ctx, book, "e", "n")
	})
	return state, err
}

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
// that it has not.
func (x *Index) NoteEach(ctx context.Context, notes []Note, since *Sequences) (noted *Noted, failed map[string]error) {
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
	epochs [books]string
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
	var at [books]int // in pages, plus 1
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
			args = append(args, x.noted(key).Milliseconds(), key.Key)
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

// noted returns how long a key is noted.
func (x *Index) noted(n Note) time.Duration { return min(n.Life, math.MaxInt64-x.storing) + x.storing }

// run runs a script on one book.
func (x *Index) run(ctx context.Context, script client.Script, keys, args []any) (any, error) {
	call := append(append(script.Call(len(keys), len(args)), keys...), args...)
	what := client.Command{Op: op, Key: keys[0].(string), Within: x.client.Timeout, Again: client.Always}
	reply := client.Run(ctx, x.client, what, client.ScriptCall{Script: script, Args: call}, func(cmd *redis.Cmd) (any, error) {
		reply, err := cmd.Result()
		if client.ScriptsRefused(err) {
			return err, nil // not a failure: there is another way
		}
		return reply, err
	})
	if refused, is := reply.Value.(error); is && reply.Err == nil {
		reply.Err = refused
	}
	return reply.Value, reply.Err
}

// Marked is what an invalidation knows of its tags.
type Marked struct {
	Complete bool // the indexes have each value that is stored
	books    []markedBook
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

// A server is what is known of the server that has a book. Where several have the keys, it is the history, which names
// the data of the server, and of the replicas that have all of it. A server that takes over from another one has a new
// history: it may have lost what the old one has acknowledged last. The values are on other servers, which still have
// them. Where one server has everything, it then has lost the values, too, since they are stored after their keys are
// noted. There it is the process.
type server struct{ history, process string }

func (x *Index) server(ctx context.Context, number int) (server, error) {
	key := x.book(number)
	return client.Do(ctx, x.client, op, key, func(ctx context.Context) (s server, err error) {
		master, several, err := x.client.Servers.MasterOf(ctx, x.namespace, key)
		switch {
		case err != nil:
		case several:
			s.history, err = master.History(ctx)
		default:
			s.process, err = master.Process(ctx)
		}
		return s, err
	})
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

// A Proof is what was known of the books before all values were removed, or noted: epoch and history.
type Proof [books]string

// Prove begins new books, and returns a Proof, to be given to Complete when all values have been removed, or
// noted. The old books may name tags whose indexes are lost, and what was noted in them may be lost.
func (x *Index) Prove(ctx context.Context) (*Proof, error) {
	p := new(Proof)
	return p, inParallel(books, func(number int) (err error) {
		p[number], err = x.prove(ctx, number)
		return err
	})
}

func (x *Index) prove(ctx context.Context, number int) (string, error) {
	server, err := x.server(ctx, number)
	if err != nil {
		return "", err
	}
	book := x.book(number)
	epoch, err := x.change(ctx, book, func(p redis.Pipeliner, try string) { // marks may have been made since an earlier try
		p.Unlink(ctx, book)
		p.HSet(ctx, book, "e", try, "n", 0)
	})
	return epoch + " " + server.history, err
}

// Complete notes that the indexes have each value that is stored, unless a book has been lost since Prove.
func (x *Index) Complete(ctx context.Context, proof *Proof) error {
	return inParallel(books, func(number int) error {
		book := x.book(number)
		_, err := x.change(ctx, book, func(p redis.Pipeliner, _ string) { p.HSet(ctx, book, "k", proof[number]) })
		return err
	})
}

// change changes a book in one step. It then lives for bookLife, perhaps for less than before: until the
// next note. Each try has a name, and change returns the name of the last one.
func (x *Index) change(ctx context.Context, book string, by func(p redis.Pipeliner, try string)) (string, error) {
	return client.Do(ctx, x.client, op, book, func(ctx context.Context) (string, error) {
		try := rand.Text()
		return try, client.Transaction(ctx, x.client.Redis, func(p redis.Pipeliner) {
			by(p, try)
			p.PExpire(ctx, book, bookLife)
		})
	})
}

// inParallel calls do with each of n numbers, for as many at a time as there are books. After an error it calls
// do no more.
func inParallel(n int, do func(i int) error) error {
	var next, failed atomic.Int64
	errs := make([]error, min(n, books))
	work := func(worker int) {
		for i := int(next.Add(1)) - 1; i < n && failed.Load() == 0; i = int(next.Add(1)) - 1 {
			errs[worker] = foreign.ErrGoexit
			if errs[worker] = do(i); errs[worker] != nil {
				failed.Add(1)
			}
		}
	}
	var all sync.WaitGroup
	for worker := 1; worker < len(errs); worker++ {
		all.Go(func() { work(worker) })
	}
	if n > 0 {
		work(0)
	}
	all.Wait()
	return errors.Join(errs...)
}
