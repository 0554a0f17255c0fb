package msgcheck

import (
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

// A Cost is what decoding into a type allocates for one of each of Counts, in bytes.
type Cost struct {
	typ                reflect.Type
	item, entry, table uint64
	private            bool
}

// Bound returns an error if decoding a document of size bytes with these counts may allocate more
// than 64 MiB + 64 × size. Its estimate is
//
//	Items × item + Entries × entry + Maps × table
//
// where item, entry and table are the bytes of the largest slice element, map entry and map of one
// entry reachable from the type. This is an upper bound, since the counts do not say which element
// is of which type. It excludes temporary garbage (about as much again, with JSON up to five times
// as much), strings (as long as the document) and custom decoders.
func (c *Cost) Bound(n Counts, size int) error {
	budget := boundBase + boundFactor*uint64(size)
	for _, part := range [...]struct{ n, cost uint64 }{
		{uint64(n.Items), c.item},
		{uint64(n.Entries), c.entry},
		{uint64(n.Maps), c.table},
	} {
		over, sum := bits.Mul64(part.n, part.cost)
		if over > 0 || sum > budget {
			return fmt.Errorf("%d bytes with %d items and %d entries may take more than %d MiB as %v",
				size, n.Items, n.Entries, (boundBase+boundFactor*uint64(size))>>20, c.typ)
		}
		budget -= sum
	}
	return nil
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
		c.visit(typ, make(map[reflect.Type]bool))
	}
	costs.Store(typ, c)
	return c
}

// Private reports whether decoding into the type may call a method that gets the decoder or its
// buffer: a method of a type within it or, if it contains an interface, of any type registered for
// an extension. That decoder must not be reused.
func (c *Cost) Private() bool { return c.private }

var (
	customDecoder = reflect.TypeFor[msgpack.CustomDecoder]()
	unmarshaler   = reflect.TypeFor[msgpack.Unmarshaler]()
)

func meetsDecoder(typ reflect.Type) bool {
	p := reflect.PointerTo(typ)
	return typ.Kind() == reflect.Interface || p.Implements(customDecoder) || p.Implements(unmarshaler)
}

// visit raises c to the costs of typ and of all types within it. seen ends recursive types.
func (c *Cost) visit(typ reflect.Type, seen map[reflect.Type]bool) {
	if seen[typ] {
		return
	}
	seen[typ] = true
	c.private = c.private || meetsDecoder(typ)
	switch typ.Kind() {
	case reflect.Interface: // []any and map[string]any
		c.raise(wordsInterface+valueInterface, entryCost(wordsString, wordsInterface)+valueInterface, tableCost(wordsString, wordsInterface))
	case reflect.Pointer:
		c.visit(typ.Elem(), seen)
	case reflect.Slice:
		c.raise(uint64(typ.Elem().Size())+valueCost(typ.Elem(), 0), 0, 0)
		c.visit(typ.Elem(), seen)
	case reflect.Array:
		c.raise(valueCost(typ.Elem(), 0), 0, 0)
		c.visit(typ.Elem(), seen)
	case reflect.Map:
		key, elem := uint64(typ.Key().Size()), uint64(typ.Elem().Size())
		c.raise(0, entryCost(key, elem)+valueCost(typ.Key(), 0)+valueCost(typ.Elem(), 0), tableCost(key, elem))
		c.visit(typ.Key(), seen)
		c.visit(typ.Elem(), seen)
	case reflect.Struct:
		embedded := valueCost(typ, 0)
		for i := range typ.NumField() {
			f := typ.Field(i)
			if !f.IsExported() && !f.Anonymous {
				continue
			}
			// A struct is encoded as a map of its fields, or as an array.
			v := embedded + valueCost(f.Type, 0)
			c.raise(v, v, 0)
			c.visit(f.Type, seen)
		}
	}
}

func (c *Cost) raise(item, entry, table uint64) {
	c.item, c.entry, c.table = max(c.item, item), max(c.entry, entry), max(c.table, table)
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
