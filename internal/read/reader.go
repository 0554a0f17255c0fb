package read

import (
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
)

// Parts are what a Reader is made of.
type Parts struct {
	Client  *client.Client
	Store   *value.Store
	Fills   *flight.Fills[fill.Result]
	Filler  *fill.Filler
	Slots   *flight.Slots
	User    fill.User
	Events  *event.Sink
	Closing <-chan struct{}

	StaleAfter  time.Duration // 0: off
	LoadTimeout time.Duration
	MaxBatch    int
	Audit       float64
}

// A Reader carries out the calls of one cache that read.
type Reader struct {
	Parts
	reads  *flight.Reads[value.Lookup, *ask]
	audits audits
}

func New(p Parts) *Reader {
	return &Reader{Parts: p, reads: flight.NewReads[value.Lookup, *ask]()}
}

// Drain waits until no call of GetOrLoad or GetOrLoadMany is reading, since it may still start a load. Calls of Drain
// must not overlap.
func (c *Reader) Drain() { c.reads.Drain() }
