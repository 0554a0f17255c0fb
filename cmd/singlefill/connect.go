package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

const defaultURL = "redis://127.0.0.1:6379"

// connect returns a client of the server at a URL, which may be a node of a Cluster or a Sentinel. The
// server has answered.
func connect(ctx context.Context, flag, env string, timeout time.Duration) (redis.UniversalClient, error) {
	address, source := flag, "-redis"
	if address == "" {
		address, source = env, "REDIS_URL"
	}
	if address == "" {
		address, source = defaultURL, "-redis"
	}
	if !strings.Contains(address, "://") {
		address = "redis://" + address
	}
	rdb, err := open(address, timeout)
	if err != nil {
		return nil, fmt.Errorf("%s is not the URL of a Redis: %w", source, withoutPassword(err, address))
	}
	if client, ok := rdb.(*redis.Client); ok {
		// INFO tells whether the server is a node of a Cluster. Other servers may refuse it.
		info, err := client.Info(ctx, "cluster").Result()
		var refused redis.Error
		switch {
		case err != nil && !errors.As(err, &refused):
			client.Close()
			return nil, fmt.Errorf("%s: %w", source, unanswered(err, address))
		case strings.Contains(info, "cluster_enabled:1"):
			o := client.Options()
			client.Close()
			return redis.NewClusterClient(&redis.ClusterOptions{
				Addrs: []string{o.Addr}, Username: o.Username, Password: o.Password, TLSConfig: o.TLSConfig,
				DialTimeout: timeout, ReadTimeout: timeout, WriteTimeout: timeout, MaxRetries: o.MaxRetries, ContextTimeoutEnabled: true,
			}), nil
		}
		return rdb, nil
	}
	if err := rdb.Ping(ctx).Err(); err != nil {
		rdb.Close()
		return nil, fmt.Errorf("%s: %w", source, unanswered(err, address))
	}
	return rdb, nil
}

func open(address string, timeout time.Duration) (redis.UniversalClient, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	switch query := u.Query(); {
	case query.Has("master_name"):
		o, err := redis.ParseFailoverURL(address)
		if err != nil {
			return nil, err
		}
		o.DialTimeout, o.DialerRetries, o.ContextTimeoutEnabled = cmp.Or(o.DialTimeout, timeout), 1, true
		o.ReadTimeout, o.WriteTimeout = cmp.Or(o.ReadTimeout, timeout), cmp.Or(o.WriteTimeout, timeout)
		return redis.NewFailoverClient(o), nil
	case query.Has("addr"):
		o, err := redis.ParseClusterURL(address)
		if err != nil {
			return nil, err
		}
		o.DialTimeout, o.ContextTimeoutEnabled = cmp.Or(o.DialTimeout, timeout), true
		o.ReadTimeout, o.WriteTimeout = cmp.Or(o.ReadTimeout, timeout), cmp.Or(o.WriteTimeout, timeout)
		return redis.NewClusterClient(o), nil
	}
	o, err := redis.ParseURL(address)
	if err != nil {
		return nil, err
	}
	o.DialTimeout, o.DialerRetries, o.ContextTimeoutEnabled = cmp.Or(o.DialTimeout, timeout), 1, true
	o.ReadTimeout, o.WriteTimeout = cmp.Or(o.ReadTimeout, timeout), cmp.Or(o.WriteTimeout, timeout)
	return redis.NewClient(o), nil
}

// unanswered returns why the server at a URL did not answer, without the password. A server that expects
// TLS closes the connection.
func unanswered(err error, address string) error {
	closed := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
	err = withoutPassword(err, address)
	if closed && !strings.HasPrefix(address, "rediss:") {
		return fmt.Errorf("the server closed the connection: if it expects TLS, use rediss:// in place of redis:// (%w)", err)
	}
	return err
}

// withoutPassword returns err without the password of the URL, which errors of package url contain.
func withoutPassword(err error, address string) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		return e.Err
	}
	if u, parseErr := url.Parse(address); parseErr == nil && u.User != nil {
		if password, _ := u.User.Password(); password != "" && strings.Contains(err.Error(), password) {
			return errors.New(strings.ReplaceAll(err.Error(), password, "xxxxx"))
		}
	}
	return err
}
