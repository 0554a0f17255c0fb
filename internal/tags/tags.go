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
// What is lost is found out by an epoch, which each book is given at its birth, by another replication ID, and by
// indexes that are gone although the book says that values have their tags. The tags are then read from the values:
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
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/masters"
)

// An Index is the tags of one namespace.
type Index struct {
	books
	seen [bookCount]atomic.Pointer[string] // see Seen
}

// New returns the index of a namespace. A mark is kept for at least markLife. A load that takes longer is
// refused once marks have been dropped. storing is how long it takes to store a value that has been noted.
func New(c *client.Client, namespace string, markLife, storing time.Duration) *Index {
	return &Index{books: books{client: c, masters: masters.New(c, namespace), namespace: namespace, markLife: markLife, storing: storing}}
}
