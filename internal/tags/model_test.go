package tags

import "testing"

// The model runs two loads of one key and two invalidations of its tag in every order of their steps, and
// loses a part of what the tags are kept in at any moment: an exhaustive search, as model checkers do.
// After an invalidation has returned, no value is stored that the source had before it.

// An order is a protocol: how a load and an invalidation go.
type order struct {
	name string
	load []step // after the lock has been taken

	noMark      bool // loads do not look at marks
	leaveLock   bool // an invalidation removes the value alone
	pop         bool // an invalidation takes the keys out of the index when it reads them
	remove      bool // or at its end
	anyEpoch    bool // loads do not compare epochs
	noFloor     bool // dropped marks leave nothing
	unnoticed   bool // an index that is gone counts as never used
	begunAgain  bool // a note begins an index that is gone
	notIntact   bool // an invalidation does not look for the index again
	trustsBirth bool // a new book counts as complete
}

type step byte

const (
	sequence step = iota // read the sequence
	source               // ask the source
	index                // write the index
	check                // look at the mark
	note                 // both in one step
	store                // store the value if the lock is still held
)

var built = []step{sequence, source, note, store}

// wrong are orders that leave old values.
var wrong = []order{
	{name: "the mark is looked at before the index is written", load: []step{sequence, source, check, index, store}},
	{name: "the mark is looked at behind the store", load: []step{sequence, source, index, store, check}},
	{name: "the value is stored before the index is written", load: []step{sequence, source, store, index}},
	{name: "there are no marks", load: built, noMark: true},
	{name: "the sequence is read after the source", load: []step{source, sequence, note, store}},
	{name: "the lock is left", load: built, leaveLock: true},
	{name: "the index is emptied when it is read", load: built, pop: true},
	{name: "the index is emptied at the end", load: built, remove: true},
	{name: "epochs are not compared", load: built, anyEpoch: true},
	{name: "dropped marks leave no floor", load: built, noFloor: true},
	{name: "a lost index is taken for an unused one", load: built, unnoticed: true},
	{name: "a lost index is begun again", load: built, begunAgain: true},
	{name: "the index is not looked for again", load: built, notIntact: true},
	{name: "a new book is trusted", load: built, trustsBirth: true},
}

// A world is a state of everything.
type world struct {
	source, entry int8 // versions; 0: none
	lock          int8 // the load that holds it; 0: none
	exists        bool // the index
	index         bool // has the key
	book          book
	loads         [2]loadState
	invals        [2]invalState
	lost, dropped bool // a fault has happened
	another       bool // another key has been noted
}

type book struct {
	epoch, n, mark, floor int8
	used, complete        bool
}

type loadState struct {
	at       int8 // in order.load, plus 1; 0: no lock yet
	done     bool
	epoch, n int8
	value    int8
}

type invalState struct {
	at           int8 // see world.invalidate
	found        bool // the key, in the index
	proof        int8 // epoch
	over, begins bool
}

func (b *book) begin() { *b = book{epoch: b.epoch + 1} }

// next returns the worlds that may follow.
func (w world) next(o *order) (worlds []world) {
	for i := range w.loads {
		if v := w; v.stepLoad(o, i) {
			worlds = append(worlds, v)
		}
	}
	for i := range w.invals {
		if v := w; (i == 0 || w.invals[0].begins) && v.stepInval(o, i) { // the source changes in order
			worlds = append(worlds, v)
		}
	}
	if w.lost && w.dropped || w.lost && w.another || w.dropped && w.another {
		return worlds // two of these are enough
	}
	if !w.lost {
		v := w
		v.lost, v.exists, v.index = true, false, false
		if w.exists {
			worlds = append(worlds, v)
		}
		v = w
		v.lost = true
		v.book.begin()
		v.book.complete = o.trustsBirth
		worlds = append(worlds, v)
	}
	if !w.dropped && w.book.mark > 0 {
		v := w
		v.dropped, v.book.mark = true, 0
		if !o.noFloor {
			v.book.floor = w.book.mark
		}
		worlds = append(worlds, v)
	}
	if !w.another {
		v := w
		v.another = true
		v.write(o)
		worlds = append(worlds, v)
	}
	return worlds
}

// write is the beginning of a note. It reports whether the book is still the same.
func (w *world) write(o *order) bool {
	if w.book.used && !w.exists && !o.begunAgain {
		w.book.begin()
		w.book.complete = o.trustsBirth
		return false
	}
	w.exists, w.book.used = true, true
	return true
}

func (w *world) stepLoad(o *order, i int) bool {
	l, b := &w.loads[i], &w.book
	me := int8(i + 1)
	switch {
	case l.done:
		return false
	case l.at == 0 && w.entry != 0: // a hit
		l.done = true
		return true
	case l.at == 0:
		if w.lock != 0 {
			return false
		}
		w.lock, l.at = me, 1
		return true
	}
	refused := false
	switch s := o.load[l.at-1]; s {
	case sequence:
		l.epoch, l.n = b.epoch, b.n
	case source:
		l.value = w.source
	case index, check, note:
		if s != check && !w.write(o) {
			refused = !o.anyEpoch
		}
		if s != index && !o.noMark {
			refused = refused || !o.anyEpoch && l.epoch != b.epoch || b.mark > l.n || b.floor > l.n
		}
		if s != check && !refused {
			w.exists, w.index, b.used = true, true, true
		}
	case store:
		if w.lock == me {
			w.entry, w.lock = l.value, 0
		}
	}
	if l.at++; refused || int(l.at) > len(o.load) {
		l.done = true
		if w.lock == me {
			w.lock = 0
		}
	}
	return true
}

// The steps of an invalidation.
const (
	change = iota
	mark
	read
	remove
	look
	prove // and the next ones: Clear
	clearLocks
	clearValues
	complete
)

func (w *world) stepInval(o *order, i int) bool {
	v, b := &w.invals[i], &w.book
	if v.over {
		return false
	}
	at := v.at
	v.at++
	switch at {
	case change:
		w.source, v.begins = int8(i+2), true
	case mark:
		if b.used && !w.exists && !o.unnoticed {
			b.begin()
			b.complete = o.trustsBirth
		}
		b.n++
		b.mark = b.n
		if !b.complete {
			v.at = prove
		} else if !w.exists {
			v.over = true // a tag that no value has
		}
	case read:
		if v.found = w.index; o.pop {
			w.exists, w.index, b.used = false, false, false
		}
	case remove:
		if v.found {
			if w.entry = 0; !o.leaveLock {
				w.lock = 0
			}
		}
	case look:
		if !o.notIntact && !o.pop && !(b.complete && w.exists) {
			v.at = prove
			break
		}
		if v.over = true; o.remove && v.found {
			w.exists, w.index, b.used = false, false, false
		}
	case prove:
		if b.complete {
			b.begin()
		}
		v.proof = b.epoch
	case clearLocks:
		w.lock = 0
	case clearValues:
		w.entry, w.lock = 0, 0
	case complete:
		b.complete, v.over = b.complete || b.epoch == v.proof, true
	}
	return true
}

// old reports whether a value is stored that an invalidation has promised to remove.
func (w world) old() bool {
	least := int8(0)
	for i, v := range w.invals {
		if v.over {
			least = int8(i + 2)
		}
	}
	return w.entry != 0 && w.entry < least
}

// search visits every world of an order, until it finds an old value.
func search(o *order) (worlds int, old bool) {
	cold := world{source: 1, book: book{complete: true}}
	warm := cold
	warm.entry, warm.exists, warm.index, warm.book.used = 1, true, true, true
	fresh := world{source: 1, entry: 1, book: book{complete: o.trustsBirth}} // stored before there were tags
	todo := []world{cold, warm, fresh}
	seen := make(map[world]bool)
	for len(todo) > 0 {
		w := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if seen[w] {
			continue
		}
		seen[w] = true
		if w.old() {
			return len(seen), true
		}
		todo = append(todo, w.next(o)...)
	}
	return len(seen), false
}

func TestModel(t *testing.T) {
	t.Parallel()
	worlds, old := search(&order{load: built})
	if old {
		t.Error("the protocol leaves an old value")
	}
	t.Logf("%d worlds", worlds)
	for _, o := range wrong {
		if _, old := search(&o); !old {
			t.Errorf("%s: no old value is found", o.name)
		}
	}
}
