package main

import (
	"context"
	"encoding/json"
	"errors"
	"log"
	"net/http"
	"time"

	"github.com/singlefill/singlefill/lock"
)

// rename answers 204 if all later reads of this process return the new name, and reads of other processes
// a second later; and 202 if some may return the old one until the outbox has been worked off.
func (s *service) rename(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Name string `json:"name"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<10)).Decode(&body); err != nil || body.Name == "" {
		http.Error(w, `want {"name": "..."}`, http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), s.timeout)
	defer cancel()
	renamed, err := s.db.Rename(ctx, r.PathValue("id"), body.Name)
	if err != nil { // if it has been committed nevertheless, the outbox has it
		s.fail(w, r, err)
		return
	}
	// After the commit the old product must go, even if the client has gone.
	ctx, cancel = context.WithTimeout(context.WithoutCancel(r.Context()), time.Second)
	defer cancel()
	if err := s.invalidate(ctx, renamed); err != nil {
		log.Printf("product %q was renamed, and is left to the outbox: %v", renamed.ProductID, err)
		w.WriteHeader(http.StatusAccepted)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// invalidate deletes changed products from the cache, and then the changes from the outbox. Between
// the two the process may die: to delete a product again does no harm.
func (s *service) invalidate(ctx context.Context, changes ...change) error {
	ids := make([]string, len(changes))
	for i, c := range changes {
		ids[i] = c.ProductID
	}
	if err := s.changed(ctx, ids...); err != nil {
		return err
	}
	return s.db.Done(ctx, changes)
}

// workOff invalidates once a second what the outbox has: changes of requests that could not do so,
// since Redis did not answer or their process died. Each process of a fleet runs it; a lock has one of
// them work at a time, which saves work and is not needed for more.
func (s *service) workOff(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := s.workOffOnce(ctx); err != nil && ctx.Err() == nil {
			log.Printf("outbox: %v", err)
		}
	}
}

func (s *service) workOffOnce(ctx context.Context) error {
	changes, err := s.db.Outbox(ctx)
	if err != nil || len(changes) == 0 {
		return err
	}
	lease, err := s.outbox.TryAcquire(ctx)
	if errors.Is(err, lock.ErrBusy) {
		return nil // another process is at it
	}
	if err != nil {
		return err
	}
	err = s.invalidate(lease.Context(), changes...)
	return errors.Join(err, lease.Release(ctx))
}
