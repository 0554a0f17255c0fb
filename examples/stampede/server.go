package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// A server is the Redis that all processes use, with names for this run.
type server struct {
	url       string
	kind      string
	namespace string
	embedded  *miniredis.Miniredis // nil if REDIS_URL names the server
}

// openServer embeds a server if url is empty.
func openServer(ctx context.Context, url string) (*server, error) {
	s := &server{
		url:       url,
		kind:      "the Redis of REDIS_URL",
		namespace: fmt.Sprintf("stampede-%d", time.Now().UnixNano()),
	}
	if url == "" {
		mini, err := miniredis.Run()
		if err != nil {
			return nil, err
		}
		mini.ClockTTL(true) // otherwise values would never expire
		s.url, s.kind, s.embedded = "redis://"+mini.Addr(), "embedded miniredis", mini
		return s, nil
	}
	rdb, err := newClient(url)
	if err != nil {
		return nil, fmt.Errorf("REDIS_URL: %w", err)
	}
	defer rdb.Close()
	if err := rdb.Ping(ctx).Err(); err != nil {
		return nil, fmt.Errorf("the Redis of REDIS_URL does not answer: %w", err)
	}
	return s, nil
}

func newClient(url string) (*redis.Client, error) {
	options, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	options.ContextTimeoutEnabled = true
	options.MaxRetries = 1
	options.DialerRetries = 1
	// Miniredis supports neither identities nor maintenance notifications.
	options.DisableIdentity = true
	options.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewClient(options), nil
}

// contenderNamespace returns the namespace of contender i.
func (s *server) contenderNamespace(i int) string { return fmt.Sprintf("%s-%d", s.namespace, i) }

// close deletes the keys of this run.
func (s *server) close(p plan) error {
	if s.embedded != nil {
		s.embedded.Close()
		return nil
	}
	rdb, err := newClient(s.url)
	if err != nil {
		return err
	}
	defer rdb.Close()
	// Even after an interrupt.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var errs []error
	for i := range contenders {
		errs = append(errs, forget(ctx, rdb, s.contenderNamespace(i), keyNames(p.Keys)))
	}
	return errors.Join(errs...)
}

func keyNames(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("key %d", i+1))
	}
	return names
}
