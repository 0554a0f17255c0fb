package read

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/codec"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
)

const (
	// auditDelay is the time between a difference and the second look at the entry. A writer changes the
	// source and then calls Delete. A look at once mostly finds Deletes that are on their way.
	auditDelay = time.Second

	// maxAudits is how many audits of one cache run at once.
	maxAudits = 100
)

// audits are the keys with a running audit.
type audits struct {
	mu   sync.Mutex
	keys map[string]bool
}

func (a *audits) begin(key string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.keys[key] || len(a.keys) >= maxAudits {
		return false
	}
	if a.keys == nil {
		a.keys = make(map[string]bool)
	}
	a.keys[key] = true
	return true
}

func (a *audits) end(key string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.keys, key)
}

// audited reports whether to audit a hit.
func (c *Reader) audited(fresh bool) bool {
	return c.Audit > 0 && fresh && rand.Float64() < c.Audit
}

// auditHit audits a hit in Redis.
func (c *Reader) auditHit(ctx context.Context, key string, load fill.Loader, l *value.Lookup) {
	e := l.Entry
	c.audit(ctx, load, e.ID, event.AuditInfo{Key: key, Age: e.Age(l.At)}, func() (any, error) {
		if e.NotFound {
			return nil, value.ErrNotFound
		}
		return c.Store.Type.DecodeEntry(key, &e)
	})
}

// auditNear audits a hit in memory.
func (c *Reader) auditNear(ctx context.Context, key string, load fill.Loader, s value.Served) {
	served, kept := s.Info(), s.Copy
	c.audit(ctx, load, served.Entry, event.AuditInfo{Key: key, Age: served.Age, Near: true}, func() (any, error) { return c.Store.ValueOf(key, kept) })
}

// audit compares an entry that has been served with the source, in the background. Its load is a fill of
// the key, so no other load runs beside it, and it runs like a refresh: only if no fill of the key does, and
// a slot is free. The fill ends without a result, so callers that have joined it read again.
func (c *Reader) audit(ctx context.Context, load fill.Loader, id uint64, info event.AuditInfo, served func() (any, error)) {
	if c.Client.Away(c.Store.Key(info.Key)) || !c.audits.begin(info.Key) {
		return
	}
	ctx = client.Detach(ctx)
	run := func(l *flight.Load, f *flight.Fill[fill.Result]) {
		defer c.Fills.Over()
		defer c.audits.end(info.Key)
		now, loaded, err := c.loadForAudit(ctx, l, f, load)
		if !loaded {
			return
		}
		differs := false
		if info.Err = err; err == nil || c.User.IsNotFound(err) {
			differs, info.Err = c.differs(info.Key, now, err, served)
		}
		if differs {
			info.Stale, info.Err = c.stillThere(ctx, info.Key, id)
		}
		c.Events.AuditDone(ctx, info)
	}
	if !c.Fills.Refresh([]string{info.Key}, []string{""}, func(_ []int, fills []*flight.Fill[fill.Result]) func(*flight.Load) {
		return func(l *flight.Load) { run(l, fills[0]) }
	}) {
		c.audits.end(info.Key)
	}
}

// loadForAudit calls the Loader for at most LoadTimeout, and ends the fill. Its context ends when a call
// joins, when the key is invalidated, and when the cache is closed. It returns false if no slot is free.
func (c *Reader) loadForAudit(ctx context.Context, l *flight.Load, f *flight.Fill[fill.Result],
	load fill.Loader) (v any, loaded bool, err error) {
	defer c.Fills.End(f, nil, 0, 0)
	slot := c.Slots.NewSlot(l)
	defer slot.Release()
	if !slot.TryLease(ctx) {
		return nil, false, nil
	}
	ctx, cancel := context.WithCancel(flight.Inside(ctx, l))
	defer cancel()
	c.Fills.BeginLoad(f, cancel)
	done := make(chan struct{})
	var now any
	var failure error
	go func() {
		defer l.End(l.Begin())
		returned := false
		defer func() {
			if !returned {
				failure = c.User.Panicked(recover(), true).Err
			}
			close(done)
		}()
		now, failure = c.User.Load(ctx, []string{f.Key}, load)(f.Key)
		returned = true
	}()
	timeout := time.NewTimer(c.LoadTimeout)
	defer timeout.Stop()
	for closing := c.Closing; ; {
		select {
		case <-done:
			return now, true, failure
		case <-l.Woken:
			if c.Fills.Wanted(f) {
				cancel()
			}
		case <-closing:
			closing = nil
			cancel()
		case <-c.Fills.Aborting().Done():
			return nil, true, flight.ErrClosed
		case <-timeout.C:
			return nil, true, fmt.Errorf("singlefill: the load for an audit took longer than LoadTimeout (%v): %w", c.LoadTimeout, context.DeadlineExceeded)
		}
	}
}

// differs compares the outcome of a load with what was served, both as the codec returns them. Values also
// count as equal if they encode to the same bytes, which they never do if the codec encrypts them with random nonces.
func (c *Reader) differs(key string, now any, err error, served func() (any, error)) (bool, error) {
	old, oldErr := served()
	if oldErr != nil && oldErr != value.ErrNotFound {
		return false, oldErr
	}
	if err != nil || oldErr != nil {
		return (err == nil) != (oldErr == nil), nil
	}
	data, err := c.Store.Type.Encode(key, now)
	if err != nil {
		return false, err
	}
	if now, err = c.Store.Type.Decode(key, data); err != nil || codec.Equal(now, old) {
		return false, err
	}
	oldData, err := c.Store.Type.Encode(key, old)
	return err == nil && !bytes.Equal(data, oldData), err
}

// stillThere reports whether the key holds the entry of this ID after auditDelay.
func (c *Reader) stillThere(ctx context.Context, key string, id uint64) (bool, error) {
	select {
	case <-time.After(auditDelay):
	case <-c.Closing:
		return false, flight.ErrClosed
	}
	valueKey := c.Store.Key(key)
	found, err := client.Do(ctx, c.Client, "audit", valueKey, func(ctx context.Context) (string, error) {
		return c.Client.Redis.GetRange(ctx, valueKey, entry.RandomAt, entry.HeaderLen-1).Result()
	})
	return err == nil && found == entry.Random(id), err
}
