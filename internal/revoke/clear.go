package revoke

import (
	"context"
	"errors"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/masters"
	"github.com/singlefill/singlefill/internal/tags"
)

// A Space is all that Redis has of a namespace.
type Space struct {
	keys      *Keys
	masters   *masters.Finder
	namespace string
	lockTTL   time.Duration
	tags      *tags.Index // nil: no value has tags
	events    *event.Sink
}

func NewSpace(keys *Keys, namespace string, lockTTL time.Duration, index *tags.Index, events *event.Sink) *Space {
	return &Space{keys: keys, masters: masters.New(keys.client, namespace), namespace: namespace, lockTTL: lockTTL, tags: index, events: events}
}

// Clear removes every value of the namespace, and supersedes every load that is in flight, in any process.
func (s *Space) Clear(ctx context.Context) error {
	defer s.forgetAll()
	err := s.clearKnown(ctx)
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return ctx.Err()
	}
	return err
}

// forgetAll is Invalidated for all keys.
func (s *Space) forgetAll() {
	s.keys.fills.SupersedeAll()
	s.keys.store.ForgetAll()
}

// clearKnown clears, and then completes the books of tags, if there are any: all that is stored afterwards is noted
// under its tags. A process that finds the books complete relies on the memory of all having been told.
func (s *Space) clearKnown(ctx context.Context) error {
	if s.tags == nil {
		return s.clearAndTell(ctx)
	}
	proof, unproven := s.tags.Prove(ctx)
	if err := s.clearAndTell(ctx); err != nil {
		return err
	}
	if unproven == nil {
		_ = s.tags.Complete(ctx, proof) // if it fails, which is traced, the next DeleteTag clears again
	}
	return nil
}

// clearAndTell removes what a namespace has, and tells the memory of other processes; also after an error, since
// a part of the values may have been removed.
func (s *Space) clearAndTell(ctx context.Context) error {
	err := s.sweep(ctx, s.RemoveValues, true)
	detached := client.Detach(ctx)
	err = errors.Join(err, s.keys.log.AppendAll(detached))
	s.keys.log.WakeOthers(detached)
	return err
}
