package compress_test

import (
	"fmt"
	"strings"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/compress"
)

func ExampleZstd() {
	type Page struct{ Text string }
	page := Page{strings.Repeat("It was a bright cold day in April. ", 100)}

	codec := compress.Zstd(singlefill.MsgPack, nil) // for Options.Codec
	data, err := codec.Marshal(page)
	if err != nil {
		fmt.Println(err)
		return
	}
	var read Page
	err = codec.Unmarshal(data, &read)
	fmt.Println(len(page.Text) > 20*len(data), read == page, err)
	// Output: true true <nil>
}
