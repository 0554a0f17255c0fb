package wait

import (
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/wake"
)

// An Ear hears the wake-ups of one key.
type Ear struct {
	client *client.Client
	key    string
	tell   func() // is called when the ear has been told something
	sub    *wake.Subscription
	told   atomic.Uint32
}

const (
	change  = 1 // the subscription has become complete, or has ceased to be
	message = 2
)

// NewEar returns an ear that hears nothing yet.
func NewEar(c *client.Client, key string, tell func()) *Ear {
	return &Ear{client: c, key: key, tell: tell}
}

func (e *Ear) listen() {
	if e.sub != nil {
		return
	}
	e.sub = e.client.Listen(e.key, func(_ string, isMessage bool) {
		if isMessage {
			e.told.Or(message)
		} else {
			e.told.Or(change)
		}
		e.tell()
	})
}

// complete reports whether the ear has heard every wake-up since a time.
func (e *Ear) complete(since time.Time) bool { return e.sub != nil && e.sub.Complete(since) }

// Told adds what the ear has been told since the last call.
func (e *Ear) Told(seen *Look) bool {
	told := e.told.Swap(0)
	seen.Told = seen.Told || told != 0
	seen.Message = seen.Message || told&message != 0
	return told != 0
}

// Found notes that the awaited load has ended. If a poll has found that out that no wake-up brought
// forward, wake-ups get lost.
func (e *Ear) Found(heard Heard) {
	if heard.complete && e.sub != nil {
		e.sub.Missed(heard.since)
	}
}

// Close ends the listening.
func (e *Ear) Close() {
	if e.sub != nil {
		e.sub.Close()
	}
	e.sub = nil
}
