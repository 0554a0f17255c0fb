package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

const defaultURL = "redis://127.0.0.1:6379"

// connect returns a client of the server at a URL, which may be a node of a Cluster or a Sentinel. The
// server has answered.
func connect(ctx context.Context, flag, env string, timeout time.Duration) (redis.UniversalClient, error) {
	address, source := cmp.Or(flag, env, defaultURL), "-redis"
	if flag == "" && env != "" {
		source = "REDIS_URL"
	}
	if !strings.Contains(address, "://") {
		address = "redis://" + address
	}
	rdb, err := open(address, timeout)
	if err != nil {
		return nil, fmt.Errorf("%s is not the URL of a Redis: %w", source, err)
	}
	if server, ok := rdb.(*redis.Client); ok {
		// INFO tells whether the server is a node of a Cluster. Other servers may refuse it.
		info, err := server.Info(ctx, "cluster").Result()
		switch {
		case err != nil && !client.Refused(err):
			server.Close()
			return nil, fmt.Errorf("%s: %w", source, unanswered(err, address))
		case strings.Contains(info, "cluster_enabled:1"):
			o := server.Options()
			server.Close()
			return clusterOf(&redis.ClusterOptions{
				Addrs: []string{o.Addr}, Username: o.Username, Password: o.Password, TLSConfig: o.TLSConfig,
				DialTimeout: o.DialTimeout, MaxRetries: o.MaxRetries, ContextTimeoutEnabled: true,
				ReadTimeout: cmp.Or(o.ReadTimeout, -1), WriteTimeout: cmp.Or(o.WriteTimeout, -1), // 0: none
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

var errURL = errors.New("it cannot be parsed: percent-encode special characters of user and password")

// open returns a client of a URL. At / ? and # it ends a password that is not encoded: no error then has what follows.
func open(address string, timeout time.Duration) (redis.UniversalClient, error) {
	u, err := url.Parse(address)
	if err != nil || u.Fragment != "" || u.Scheme == "unix" && u.Port() != "" {
		return nil, errURL
	}
	cut, query := strings.Contains(u.Path+u.RawQuery, "@"), u.Query()
	for _, name := range []string{"dial_timeout", "read_timeout", "write_timeout"} {
		if query.Get(name) == "" {
			query.Set(name, timeout.String())
		}
	}
	u.RawQuery = query.Encode()
	if query.Has("master_name") {
		var o *redis.FailoverOptions
		if o, err = redis.ParseFailoverURL(u.String()); err == nil {
			o.DialerRetries, o.ContextTimeoutEnabled = 1, true
			rdb := redis.NewFailoverClient(o)
			rdb.AddHook(silence(fmt.Sprintf("the master %q of the Sentinels %s", o.MasterName, strings.Join(o.SentinelAddrs, " "))))
			return rdb, nil
		}
	} else if query.Has("addr") {
		var o *redis.ClusterOptions
		if o, err = redis.ParseClusterURL(u.String()); err == nil {
			o.ContextTimeoutEnabled = true
			return clusterOf(o), nil
		}
	} else {
		var o *redis.Options
		if o, err = redis.ParseURL(u.String()); err == nil {
			o.DialerRetries, o.ContextTimeoutEnabled = 1, true
			rdb := redis.NewClient(o)
			rdb.AddHook(silence(o.Addr))
			return rdb, nil
		}
	}
	if cut {
		err = errURL
	}
	return nil, err
}

func clusterOf(o *redis.ClusterOptions) *redis.ClusterClient {
	rdb := redis.NewClusterClient(o)
	rdb.OnNewNode(func(node *redis.Client) { node.AddHook(silence(node.Options().Addr)) })
	return rdb
}

// silence is a hook that names the server in the errors of commands that time out. go-redis does not name a server
// that takes connections, and does not answer on them.
type silence string

func (s silence) DialHook(next redis.DialHook) redis.DialHook { return next }

func (s silence) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		return s.named(next(ctx, cmd)) // which becomes the error of cmd
	}
}

func (s silence) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := s.named(next(ctx, cmds))
		for _, cmd := range cmds {
			cmd.SetErr(s.named(cmd.Err()))
		}
		return err
	}
}

func (s silence) named(err error) error {
	var timeout net.Error
	if !errors.As(err, &timeout) || !timeout.Timeout() {
		return err
	}
	return unansweredBy{string(s), err}
}

// An unansweredBy is a timeout, for go-redis, too.
type unansweredBy struct {
	server string
	error
}

func (u unansweredBy) Error() string { return u.server + " does not answer: " + u.error.Error() }
func (u unansweredBy) Unwrap() error { return u.error }
func (u unansweredBy) Timeout() bool { return true }

// unanswered returns why the server at a URL did not answer, without the password. A server that expects
// TLS closes the connection.
func unanswered(err error, address string) error {
	reason := err.Error()
	if u, err := url.Parse(address); err == nil && u.User != nil {
		if password, _ := u.User.Password(); password != "" {
			reason = strings.ReplaceAll(reason, password, "xxxxx")
		}
	}
	if (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)) && !strings.HasPrefix(address, "rediss:") {
		return fmt.Errorf("the server closed the connection: if it expects TLS, use rediss:// in place of redis:// (%s)", reason)
	}
	return errors.New(reason)
}
