//go:build !race

// A search has one goroutine and takes ten times as long with -race: scripts/test runs it without.

package tags

import "testing"

// The model runs two loads of one key, or a load and a Set, and two invalidations in every order of their steps,
// and loses a part of what the tags are kept in at any moment, or lets a Set stand still until its note ends: an
// exhaustive search, as model checkers do.
// The value of the key has a tag. One of the invalidations, or both, are of this tag: after one has returned,
// neither Redis nor the memory of another process has a value that the source had before it, or that a Set
// had stored before it.

// An order is a protocol: how a load, a Set and an invalidation go.
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
	intactBook  bool // or looks whether the book is complete, but not whether it is still the same

	anyProof   bool // a rebuild completes any book
	keepLocks  bool // it leaves the locks
	locksLast  bool // or removes them when it has read the values
	noteNone   bool // it does not note the values that it keeps
	noteLast   bool // or notes them after the proof has been written
	noRecord   bool // it tells the memory of others of no more than the keys that it deletes
	setsBefore bool // a Set does not look whether its note is still there when it has stored its value
	setsLate   bool // nor how long ago that was
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
	{name: "another book is taken for the one that was marked", load: built, intactBook: true},
	{name: "a book is completed that was lost meanwhile", load: built, anyProof: true},
	{name: "a rebuild leaves the locks", load: built, keepLocks: true},
	{name: "a rebuild removes the locks when it has read the values", load: built, locksLast: true},
	{name: "a rebuild does not note what it keeps", load: built, noteNone: true},
	{name: "a rebuild notes what it keeps after the proof", load: built, noteLast: true},
	{name: "a rebuild leaves what other processes have in memory", load: built, noRecord: true},
	{name: "a note is lost between a Set's note and its store", load: built, setsBefore: true},
	{name: "a note ends before the value of a Set that was frozen", load: built, setsLate: true},
}

// A world is a state of everything.
type world struct {
	source, entry int8 // versions; 0: none
	memory        int8 // what another process has in memory
	lock          int8 // the load that holds it; 0: none
	exists        bool // the index
	index         bool // has the key
	ending        bool // the key leaves the index before a value ends that is stored now
	book          book
	loads         [2]loadState
	set           setState
	invals        [2]invalState
	near          bool // other processes have memory
	fewFaults     bool
	lost, dropped bool // a fault has happened
	another       bool // another key has been noted
}

// setVersion is the version of the value of a Set. It is not older than any other.
const setVersion = 9

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

type setState struct {
	at    int8 // 0: it has not begun
	done  bool
	late  bool // it was frozen for longer than its note allows for
	epoch int8 // of its note
}

type invalState struct {
	at           int8 // see world.stepInval
	other        bool // of a tag that the value does not have
	found        bool // the key, in the index
	value        int8 // that a rebuild has read
	epoch        int8 // that was marked
	proof        int8 // epoch
	over, begins bool
	afterSet     bool
}

func (b *book) begin(o *order) { *b = book{epoch: b.epoch + 1, complete: o.trustsBirth} }

// next returns the worlds that may follow.
func (w world) next(o *order) (worlds []world) {
	for i := range w.loads {
		if v := w; v.stepLoad(o, i) {
			worlds = append(worlds, v)
		}
	}
	if v := w; v.stepSet(o) {
		worlds = append(worlds, v)
	}
	for i := range w.invals {
		if v := w; (i == 0 || w.invals[0].begins) && v.stepInval(o, i) { // the source changes in order
			worlds = append(worlds, v)
		}
	}
	if v := w; w.near && w.entry != 0 && w.entry != w.memory {
		v.memory = w.entry // a hit in another process
		worlds = append(worlds, v)
	}
	return append(append(worlds, w.freezes(o)...), w.faults(o)...)
}

// freezes returns the worlds that follow if a Set stands still between its note and its store, or if what was noted
// before that store ends. All values that were stored until then have ended, too, and so have the locks of loads that
// had noted the key.
func (w world) freezes(o *order) (worlds []world) {
	if v := w; w.set.at == 0 && !w.lost && v.stepSet(o) {
		v.set.late, v.ending, v.lost = true, true, true // one fault is enough: see faults
		worlds = append(worlds, v)
	}
	if !w.ending || !w.index {
		return worlds
	}
	v := w
	v.index, v.ending = false, w.set.at == 1
	if w.entry != setVersion {
		v.entry = 0
	}
	if l := w.loads[0]; !l.done && int(l.at) == len(o.load) {
		v.lock = 0
	}
	unused := v
	unused.exists, unused.book.used = false, false
	return append(worlds, v, unused)
}

// faults returns the worlds that follow by a fault. Two of the three kinds are enough, and one for most
// beginnings.
func (w world) faults(o *order) (worlds []world) {
	if w.lost && w.dropped || w.lost && w.another || w.dropped && w.another {
		return nil
	}
	if !w.lost {
		lose := func(index, book, everything bool) {
			v := w
			v.lost = true
			if index || everything {
				v.exists, v.index = false, false
			}
			if book || everything {
				v.book.begin(o)
			}
			if everything {
				v.entry, v.lock = 0, 0
			}
			worlds = append(worlds, v)
		}
		if w.exists {
			lose(true, false, false)
		}
		lose(false, true, false)
		lose(true, true, false)
		if w.near {
			lose(false, false, true)
		}
	}
	if w.fewFaults {
		return worlds
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
		w.book.begin(o)
		return false
	}
	w.exists, w.book.used = true, true
	return true
}

// note notes the key in the book that there is.
func (w *world) note(o *order) {
	w.write(o)
	w.exists, w.index, w.book.used = true, true, true
	w.ending = w.ending && w.set.at == 1
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
			w.note(o)
		}
	case store:
		if w.lock == me {
			w.entry, w.lock = l.value, 0
		}
	}
	if l.at++; refused || int(l.at) > len(o.load) {
		*l = loadState{done: true}
		if w.lock == me {
			w.lock = 0
		}
	}
	return true
}

func (w *world) stepSet(o *order) bool {
	s := &w.set
	if s.done {
		return false
	}
	switch s.at++; s.at {
	case 1:
		w.note(o)
		s.epoch = w.book.epoch
	case 2:
		w.entry, w.lock, s.done = setVersion, 0, o.setsBefore
	case 3:
		if s.epoch != w.book.epoch || s.late && !o.setsLate {
			w.note(o)
		}
		s.done, s.epoch, s.late = true, 0, false
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
	prove // and the next ones: rebuild
	removeLocks
	readValues
	noteKept
	removeRead
	tellAll
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
		if v.begins, v.afterSet = true, w.set.done && w.set.at > 0; !v.other {
			w.source = int8(i + 2)
		}
	case mark:
		if b.used && !w.exists && !o.unnoticed {
			b.begin(o)
		}
		if b.n++; !v.other {
			b.mark = b.n
		}
		v.epoch = b.epoch
		if !b.complete {
			v.at = prove
		} else if !w.exists || v.other {
			v.over = true // a tag that no value has
		}
	case read:
		if v.found = w.index; o.pop {
			w.exists, w.index, b.used = false, false, false
		}
	case remove:
		if v.found {
			w.delete(!o.leaveLock)
		}
	case look:
		same := o.intactBook || b.epoch == v.epoch
		if !o.notIntact && !o.pop && !(b.complete && same && w.exists) {
			v.at, v.found = mark, false
			break
		}
		if v.over = true; o.remove && v.found {
			w.exists, w.index, b.used = false, false, false
		}
	case prove:
		b.begin(o)
		v.proof = b.epoch
	case removeLocks:
		if !o.keepLocks && !o.locksLast {
			w.lock = 0
		}
	case readValues:
		v.value = w.entry
	case noteKept:
		if o.locksLast {
			w.lock = 0
		}
		if v.value != 0 && v.other && !o.noteNone && !o.noteLast {
			w.note(o)
		}
	case removeRead:
		if v.value != 0 && !v.other {
			w.delete(true)
		}
	case tellAll:
		if !o.noRecord {
			w.memory = 0
		}
	case complete:
		b.complete, v.over = b.complete || b.epoch == v.proof || o.anyProof, !o.noteLast
	case complete + 1:
		if v.over = true; v.value != 0 && v.other {
			w.note(o)
		}
	}
	if v.over { // what it knew does not matter any more
		*v = invalState{other: v.other, over: true, begins: true, afterSet: v.afterSet}
	}
	return true
}

// delete is a Delete of the key, which also tells the memory of others.
func (w *world) delete(lock bool) {
	if w.entry, w.memory = 0, 0; lock {
		w.lock = 0
	}
}

// old reports whether there is a value that an invalidation has promised to remove.
func (w world) old() bool {
	for i, v := range w.invals {
		for _, kept := range []int8{w.entry, w.memory} {
			if kept != 0 && v.over && !v.other && (kept < int8(i+2) || v.afterSet && kept == setVersion) {
				return true
			}
		}
	}
	return false
}

// search visits every world of an order, until it finds an old value. few leaves out faults beside a loss.
func search(o *order, few bool) (worlds int, old bool) {
	var todo []world
	for _, others := range [][2]bool{{false, false}, {true, false}, {false, true}} {
		for kind := range 3 { // two loads; a load and a Set; a load and memory
			cold := world{source: 1, book: book{epoch: 1, complete: true}}
			cold.invals[0].other, cold.invals[1].other = others[0], others[1]
			cold.loads[1].done, cold.set.done, cold.near = kind > 0, kind != 1, kind == 2
			cold.fewFaults = few || kind > 0 || others != [2]bool{}
			warm := cold
			warm.entry, warm.exists, warm.index, warm.book.used = 1, true, true, true
			fresh := cold // stored before there were tags
			fresh.entry, fresh.book.complete = 1, o.trustsBirth
			todo = append(todo, cold, warm, fresh)
		}
	}
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
	worlds, old := search(&order{load: built}, testing.Short())
	if old {
		t.Error("the protocol leaves an old value")
	}
	t.Logf("%d worlds", worlds)
	if testing.Short() {
		return
	}
	for _, o := range wrong {
		t.Run(o.name, func(t *testing.T) {
			t.Parallel()
			if _, old := search(&o, false); !old {
				t.Error("no old value is found")
			}
		})
	}
}
