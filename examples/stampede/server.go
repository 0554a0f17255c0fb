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

// A server is the Redis that all processes use, with a namespace for this run only.
type server struct {
	url       string
	kind      string
	namespace string
	embedded  *miniredis.Miniredis // nil: the Redis of REDIS_URL
}

// openServer connects to url, or embeds a Redis if url is empty.
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
		mini.ClockTTL(true) // otherwise no key would expire
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
	options.DisableIdentity = true // miniredis supports neither this nor the next one
	options.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewClient(options), nil
}

// contenderNamespace returns a separate namespace for each contender.
func (s *server) contenderNamespace(i int) string { return fmt.Sprintf("%s-%d", s.namespace, i) }

// close deletes what this run has left in Redis.
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
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second) // also after an interrupt
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
