package singlefill

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"sync"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/flight"
)

// AuditInfo describes to [Trace.AuditDone] how a fresh hit compares with the source: see
// [Options.Audit].
type AuditInfo struct {
	Key string
	// Stale reports that the source had another value, and Redis the same entry a second later.
	Stale bool
	Age   time.Duration // of the value, when it was served
	Near  bool          // it was served from memory
	// Err is why nothing was found out: the load failed, its value could not be encoded, Redis did
	// not answer, or the cache was closed.
	Err error
}

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
func (c *engine) audited(fresh bool) bool {
	return c.opts.audit > 0 && fresh && rand.Float64() < c.opts.audit
}

// auditHit audits a hit in Redis.
func (c *engine) auditHit(ctx context.Context, key string, load loader, l *lookup) {
	e := l.entry
	c.audit(ctx, load, entry.Header(l.data), AuditInfo{Key: key, Age: e.Age(l.at)}, func() (any, error) {
		if e.NotFound {
			return nil, ErrNotFound
		}
		return c.values.decode(e.Payload)
	})
}

// auditNear audits a hit in memory.
func (c *engine) auditNear(ctx context.Context, key string, load loader, n *nearValue, age time.Duration) {
	c.audit(ctx, load, n.header, AuditInfo{Key: key, Age: age, Near: true}, func() (any, error) { return c.nearCopy(n) })
}

// audit compares an entry that has been served with the source, in the background. Like a refresh it
// runs only if a slot is free. It leaves out a key that is loaded or audited at this time.
func (c *engine) audit(ctx context.Context, load loader, header string, info AuditInfo, served func() (any, error)) {
	if c.fills.Has(info.Key) || c.client.Away(c.valueKey(info.Key)) || !c.audits.begin(info.Key) {
		return
	}
	ctx = client.Detach(ctx)
	c.fills.Go(func() {
		defer c.audits.end(info.Key)
		node := c.fills.NewLoad(nil)
		slot := c.slots.NewSlot(node)
		if !slot.TryLease(ctx) {
			return
		}
		now, err := c.loadForAudit(node.Inside(withFills(ctx)), node, info.Key, load)
		slot.Release()
		differs := false
		if info.Err = err; err == nil || isNotFound(err) {
			differs, info.Err = c.differs(now, err, served)
		}
		if differs {
			info.Stale, info.Err = c.stillThere(ctx, info.Key, header)
		}
		c.auditDone(ctx, info)
	})
}

// loadForAudit calls the Loader for at most LoadTimeout. Its context ends when the cache is closed.
func (c *engine) loadForAudit(ctx context.Context, node *flight.Load, key string, load loader) (v any, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	var loaded any
	var failure error
	go func() {
		defer node.Begin()()
		returned := false
		defer func() {
			if !returned {
				failure = panicked(recover())
			}
			close(done)
		}()
		loaded, failure = load.load(ctx, key)
		returned = true
	}()
	timeout := time.NewTimer(c.opts.loadTimeout)
	defer timeout.Stop()
	for closing := c.closing; ; {
		select {
		case <-done:
			return loaded, failure
		case <-closing:
			closing = nil
			cancel()
		case <-timeout.C:
			return nil, fmt.Errorf("singlefill: audit of %.100q took longer than LoadTimeout (%v): %w", key, c.opts.loadTimeout, context.DeadlineExceeded)
		}
	}
}

// differs compares the outcome of a load with what was served, both as the codec returns them.
func (c *engine) differs(now any, err error, served func() (any, error)) (bool, error) {
	old, oldErr := served()
	if oldErr != nil && oldErr != ErrNotFound {
		return false, oldErr
	}
	if err != nil || oldErr != nil {
		return (err == nil) != (oldErr == nil), nil
	}
	data, err := c.values.encode(now)
	if err != nil {
		return false, err
	}
	if now, err = c.values.decode(data); err != nil || reflect.DeepEqual(now, old) {
		return false, err
	}
	oldData, err := c.values.encode(old)
	return err == nil && !bytes.Equal(data, oldData), err // equal bytes: a NaN differs from itself
}

// stillThere reports whether the key holds the same entry after auditDelay: no two entries ever
// written have the same header.
func (c *engine) stillThere(ctx context.Context, key, header string) (bool, error) {
	select {
	case <-time.After(auditDelay):
	case <-c.closing:
		return false, ErrClosed
	}
	valueKey := c.valueKey(key)
	found, err := client.Do(ctx, c.client, "audit", valueKey, func(ctx context.Context) (string, error) {
		return c.client.Redis.GetRange(ctx, valueKey, 0, entry.HeaderLen-1).Result()
	})
	return err == nil && found == header, err
}
