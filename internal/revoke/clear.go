package revoke

import (
	"context"
	"errors"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/tags"
)

// A Space is all that Redis has of a namespace.
type Space struct {
	*Keys
	LockTTL time.Duration
	Events  *event.Sink
	Tags    *tags.Index // nil: no value has tags
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
	s.Fills.SupersedeAll()
	if s.Near != nil {
		s.Near.ForgetAll()
	}
}

// clearKnown clears, and then completes the books of tags, if there are any: all that is stored afterwards is noted
// under its tags. A process that finds the books complete relies on the memory of all having been told.
func (s *Space) clearKnown(ctx context.Context) error {
	if s.Tags == nil {
		return s.clearAndTell(ctx)
	}
	proof, unproven := s.Tags.Prove(ctx)
	if err := s.clearAndTell(ctx); err != nil {
		return err
	}
	if unproven == nil {
		_ = s.Tags.Complete(ctx, proof) // if it fails, which is traced, the next DeleteTag clears again
	}
	return nil
}

// clearAndTell removes what a namespace has, and tells the memory of other processes; also after an error, since
// a part of the values may have been removed.
func (s *Space) clearAndTell(ctx context.Context) error {
	err := s.sweep(ctx, s.RemoveValues, true)
	if s.Near != nil {
		detached := client.Detach(ctx)
		err = errors.Join(err, s.Near.AppendAll(detached))
		s.Near.WakeOthers(detached)
	}
	return err
}
