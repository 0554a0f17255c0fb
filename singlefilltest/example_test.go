package singlefilltest_test

import (
	"fmt"
	"testing"

	"github.com/singlefill/singlefill/singlefilltest"
)

// printer prints what a test would report.
type printer struct{ testing.TB }

func (printer) Errorf(format string, args ...any) { fmt.Printf(format+"\n", args...) }

// The cache encodes a value, and the codec reports a field that it drops.
func ExampleCodec() {
	type Item struct {
		Name  string
		price int
	}
	type Order struct{ Items []Item }

	var t printer // a test passes its *testing.T
	codec := singlefilltest.Codec(t, nil)
	order := Order{[]Item{{"tea", 0}, {"cup", 0}, {"pot", 42}}}
	if _, err := codec.Marshal(order); err != nil { // as the cache does
		fmt.Println(err)
	}
	// Output: singlefilltest: Order.Items[2].price is lost: 42 became 0
}
