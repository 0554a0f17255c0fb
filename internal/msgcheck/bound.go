package msgcheck

import (
	"encoding"
	"encoding/json"
	"fmt"
	"math/bits"
	"reflect"
	"sync"

	"github.com/vmihailenco/msgpack/v5"
)

const (
	boundBase   = 64 << 20 // bytes that any document may decode into
	boundFactor = 64       // plus bytes for each byte of the document
)

// A Cost is what decoding into a type allocates for one of each of Counts, in bytes: at each level, and
// at most.
type Cost struct {
	unit
	typ    reflect.Type
	levels [maxLevels]unit

	// Private is set if decoding into the type may call a method that gets the decoder or its buffer:
	// a method of a type within it or, if it contains an interface, of any type registered for an
	// extension. That decoder must not be reused.
	Private bool
}

// A unit is the bytes of the largest slice element, map entry and map of one entry.
type unit struct{ item, entry, table uint64 }

// Bound returns an error if decoding a document of size bytes with these counts may allocate more
// than 64 MiB + 64 × size. Its estimate is
//
//	Items × item + Entries × entry + Maps × table
//
// where item, entry and table are the bytes of the largest slice element, map entry and map of one
// entry reachable from the type. This is an upper bound, since the counts do not say which element
// is of which type. It excludes temporary garbage (about as much again, with JSON up to five times
// as much), strings (as long as the document) and custom decoders.
//
// If that is too much, the estimate is made for each level of the document by itself, with the largest
// elements that the type has at that level: the items of an array do not cost what its neighbours in a
// slice of arrays cost. levels is called only then.
func (c *Cost) Bound(n Counts, size int, levels func() *Levels) error {
	return c.Within(boundBase+boundFactor*uint64(size), n, size, levels)
}

// Within is Bound with another budget of bytes.
func (c *Cost) Within(budget uint64, n Counts, size int, levels func() *Levels) error {
	if left := budget; c.unit.spend(&left, n) {
		return nil
	}
	left := budget
	for i, n := range levels() {
		if !c.levels[i].spend(&left, n) {
			return fmt.Errorf("%d bytes with %d items and %d entries may take more than %d MiB as %v",
				size, n.Items, n.Entries, budget>>20, c.typ)
		}
	}
	return nil
}

// spend takes the estimate of n from the budget. It returns false if that does not suffice.
func (u unit) spend(budget *uint64, n Counts) bool {
	for _, part := range [...]struct{ n, cost uint64 }{
		{uint64(n.Items), u.item},
		{uint64(n.Entries), u.entry},
		{uint64(n.Maps), u.table},
	} {
		over, sum := bits.Mul64(part.n, part.cost)
		if over > 0 || sum > *budget {
			return false
		}
		*budget -= sum
	}
	return true
}

// costs caches the *Cost of each reflect.Type.
var costs sync.Map

// CostOf returns the cost of typ, which may be nil.
func CostOf(typ reflect.Type) *Cost {
	if known, ok := costs.Load(typ); ok {
		return known.(*Cost)
	}
	c := &Cost{typ: typ}
	if typ != nil {
		v := visitor{Cost: c, seen: make(map[visit]bool)}
		v.visit(visit{typ: typ})
	}
	costs.Store(typ, c)
	return c
}

// decodesItself reports whether a type has a decoding method, which may decode what is within it at any
// level.
func decodesItself(typ reflect.Type) bool {
	for _, method := range decodingMethods {
		if typ.Implements(method) || reflect.PointerTo(typ).Implements(method) {
			return true
		}
	}
	return false
}

var decodingMethods = []reflect.Type{
	customDecoder, unmarshaler, reflect.TypeFor[json.Unmarshaler](),
	reflect.TypeFor[encoding.BinaryUnmarshaler](), reflect.TypeFor[encoding.TextUnmarshaler](),
}

var (
	customDecoder = reflect.TypeFor[msgpack.CustomDecoder]()
	unmarshaler   = reflect.TypeFor[msgpack.Unmarshaler]()
)

func meetsDecoder(typ reflect.Type) bool {
	p := reflect.PointerTo(typ)
	return typ.Kind() == reflect.Interface || p.Implements(customDecoder) || p.Implements(unmarshaler)
}

// A visitor visits the types within a type.
type visitor struct {
	*Cost
	seen map[visit]bool // ends recursive types
}

// A visit is to a type whose values are at a level: their items are, if they have any. With deeper they
// may be at any deeper level, too.
type visit struct {
	typ    reflect.Type
	level  int
	deeper bool
}

// visit raises the costs to the costs of a type and of all types within it.
func (c visitor) visit(v visit) {
	v.level = min(v.level, maxLevels-1)
	if decodesItself(v.typ) {
		v.deeper = true
	}
	if c.seen[v] {
		return
	}
	c.seen[v] = true
	c.Private = c.Private || meetsDecoder(v.typ)
	within := func(typ reflect.Type, levels int) {
		c.visit(visit{typ, v.level + levels, v.deeper})
	}
	switch typ := v.typ; typ.Kind() {
	case reflect.Interface: // []any and map[string]any
		v.deeper = true
		c.raise(v, unit{wordsInterface + valueInterface,
			entryCost(wordsString, wordsInterface) + valueInterface, tableCost(wordsString, wordsInterface)})
	case reflect.Pointer:
		within(typ.Elem(), 0)
	case reflect.Slice:
		c.raise(v, unit{item: uint64(typ.Elem().Size()) + valueCost(typ.Elem(), 0)})
		within(typ.Elem(), 1)
	case reflect.Array:
		c.raise(v, unit{item: valueCost(typ.Elem(), 0)})
		within(typ.Elem(), 1)
	case reflect.Map:
		key, elem := uint64(typ.Key().Size()), uint64(typ.Elem().Size())
		c.raise(v, unit{
			entry: entryCost(key, elem) + valueCost(typ.Key(), 0) + valueCost(typ.Elem(), 0),
			table: tableCost(key, elem),
		})
		within(typ.Key(), 1)
		within(typ.Elem(), 1)
	case reflect.Struct:
		embedded := valueCost(typ, 0)
		for i := range typ.NumField() {
			f := typ.Field(i)
			if !f.IsExported() && !f.Anonymous {
				continue
			}
			// A struct is encoded as a map of its fields, or as an array.
			cost := embedded + valueCost(f.Type, 0)
			c.raise(v, unit{item: cost, entry: cost})
			within(f.Type, 1)
			if f.Anonymous {
				within(f.Type, 0) // its fields are promoted
			}
		}
	}
}

// raise notes what a type costs at the levels of a visit.
func (c visitor) raise(v visit, cost unit) {
	c.unit.raise(cost)
	c.levels[v.level].raise(cost)
	for i := v.level; v.deeper && i < maxLevels; i++ {
		c.levels[i].raise(cost)
	}
}

func (u *unit) raise(to unit) {
	u.item, u.entry, u.table = max(u.item, to.item), max(u.entry, to.entry), max(u.table, to.table)
}

const (
	wordsString    = 16 // size of a string and of an interface, without what they point to
	wordsInterface = 16
	valueInterface = mapHeader // the largest value in an any: an empty map
	maxHops        = 16        // reached only by types that embed or point to themselves
)

// valueCost returns what one value of typ allocates outside its own typ.Size().
func valueCost(typ reflect.Type, hops int) uint64 {
	if hops == maxHops {
		return 0
	}
	switch typ.Kind() {
	case reflect.Interface:
		return valueInterface
	case reflect.Pointer:
		return uint64(typ.Elem().Size()) + valueCost(typ.Elem(), hops+1)
	case reflect.Map:
		return mapHeader
	case reflect.Struct: // decoding a promoted field allocates the embedded structs
		var sum uint64
		for i := range typ.NumField() {
			if f := typ.Field(i); f.Anonymous {
				sum += valueCost(f.Type, hops+1)
			}
		}
		return sum
	}
	return 0
}

// Go's maps have a header, and tables of groups of eight slots. A key or element above 128 bytes is
// stored by a pointer. A table is between 7/16 and 7/8 full, so an entry takes up to 16/7 slots.
const (
	mapHeader = 48
	mapGroup  = 8
	mapInline = 128
)

func slotSize(size uint64) uint64 {
	if size > mapInline {
		return 8
	}
	return size
}

func entryCost(key, elem uint64) uint64 {
	cost := (slotSize(key) + slotSize(elem) + 1) * 16 / 7
	for _, size := range [...]uint64{key, elem} {
		if size > mapInline {
			cost += size
		}
	}
	return cost
}

func tableCost(key, elem uint64) uint64 {
	return mapHeader + mapGroup*(slotSize(key)+slotSize(elem)+1)
}
