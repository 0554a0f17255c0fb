package singlefill_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
)

// embeddedRedis returns a client of an embedded server, so that the examples run anywhere.
func embeddedRedis() (rdb *redis.Client, stop func()) {
	mini, err := miniredis.Run()
	if err != nil {
		panic(err)
	}
	mini.ClockTTL(true) // or nothing would ever expire
	rdb = redis.NewClient(&redis.Options{Addr: mini.Addr()})
	return rdb, func() { rdb.Close(); mini.Close() }
}

// A key is loaded once, however many callers ask for it at the same time, in however many processes.
func Example() {
	rdb, stop := embeddedRedis()
	defer stop()

	type User struct{ Name string }
	users, err := singlefill.New[User](rdb, "users", 5*time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer users.Close()

	var loads, failures atomic.Int64
	loadUser := func(ctx context.Context, id string) (User, error) {
		loads.Add(1)
		time.Sleep(50 * time.Millisecond) // a slow query
		return User{Name: "user " + id}, nil
	}

	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			user, err := users.GetOrLoad(context.Background(), "42", loadUser)
			if err != nil || user.Name != "user 42" {
				failures.Add(1)
			}
		})
	}
	wg.Wait()
	fmt.Println("loads:", loads.Load(), "failures:", failures.Load())
	// Output: loads: 1 failures: 0
}

// Several caches share one client. Their namespaces keep their keys apart.
func Example_sharedClient() {
	rdb, stop := embeddedRedis()
	defer stop()

	names, err := singlefill.New[string](rdb, "names", time.Hour, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer names.Close()
	ages, err := singlefill.New[int](rdb, "ages", time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ages.Close()

	ctx := context.Background()
	fmt.Println(names.GetOrLoad(ctx, "42", func(ctx context.Context, id string) (string, error) { return "Ada", nil }))
	fmt.Println(ages.GetOrLoad(ctx, "42", func(ctx context.Context, id string) (int, error) { return 36, nil }))
	// Output:
	// Ada <nil>
	// 36 <nil>
}

// A handler gives each request a deadline. The deadline ends that request only: the load goes on and
// fills the cache.
func Example_httpHandler() {
	rdb, stop := embeddedRedis()
	defer stop()
	pages, err := singlefill.New[string](rdb, "pages", time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pages.Close()

	render := func(ctx context.Context, name string) (string, error) {
		if name != "home" {
			return "", singlefill.ErrNotFound
		}
		return "Welcome", nil
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
		defer cancel()
		page, err := pages.GetOrLoad(ctx, strings.TrimPrefix(r.URL.Path, "/"), render)
		switch {
		case errors.Is(err, singlefill.ErrNotFound):
			http.NotFound(w, r)
		case errors.Is(err, context.DeadlineExceeded):
			http.Error(w, "try again", http.StatusGatewayTimeout)
		case err != nil:
			http.Error(w, "something went wrong", http.StatusInternalServerError)
		default:
			fmt.Fprint(w, page)
		}
	})

	for _, path := range []string{"/home", "/away"} {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		fmt.Println(w.Code, strings.TrimSpace(w.Body.String()))
	}
	// Output:
	// 200 Welcome
	// 404 404 page not found
}

// These options keep a request from waiting long for a server that is down. New sends no command. Its
// errors say what is wrong with an argument, and what is allowed.
func ExampleNew() {
	rdb := redis.NewClient(&redis.Options{
		Addr:                  "127.0.0.1:6379",
		ContextTimeoutEnabled: true, // a deadline also ends the wait for a reply, and hits are cheaper
		DialTimeout:           500 * time.Millisecond,
		MaxRetries:            1, // a connection may have broken while it was idle
		DialerRetries:         1,
	})
	defer rdb.Close()
	users, err := singlefill.New[string](rdb, "users", 5*time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer users.Close()

	_, err = singlefill.New(rdb, "prices", time.Minute, &singlefill.Options[int]{Jitter: 2})
	fmt.Println(err)
	// Output: singlefill: Options.Jitter is 2: a fraction below 1 is allowed, or a negative number for none
}

// A namespace carries the version of its type. During a deployment old processes use the namespace
// users/1 and new ones users/2. Neither reads the entries of the other, and the old entries expire.
func ExampleNew_version() {
	rdb, stop := embeddedRedis()
	defer stop()
	type userV1 struct{ Name string }
	type userV2 struct{ First, Last string }
	before, err := singlefill.New[userV1](rdb, "users/1", 5*time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer before.Close()
	after, err := singlefill.New[userV2](rdb, "users/2", 5*time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer after.Close()

	ctx := context.Background()
	if err := before.Set(ctx, "42", userV1{"Ada Lovelace"}); err != nil {
		fmt.Println(err)
	}
	_, err = after.Get(ctx, "42")
	fmt.Println(errors.Is(err, singlefill.ErrMiss))
	// Output: true
}

// A load goes on when the request that started it has ended. Close waits until the load has been
// stored for the next process. Close the server first, then the cache, then the client.
func ExampleCache_Close() {
	rdb, stop := embeddedRedis()
	defer stop()
	reports, err := singlefill.New[string](rdb, "reports", time.Hour, nil)
	if err != nil {
		fmt.Println(err)
		return
	}

	ctx, leave := context.WithCancel(context.Background())
	left := make(chan struct{})
	_, err = reports.GetOrLoad(ctx, "2030-01", func(ctx context.Context, month string) (string, error) {
		leave()
		<-left
		return "all is well", ctx.Err()
	})
	fmt.Println(err)
	close(left)
	reports.Close()

	next, err := singlefill.New[string](rdb, "reports", time.Hour, nil) // the next process
	if err != nil {
		fmt.Println(err)
		return
	}
	defer next.Close()
	fmt.Println(next.Get(context.Background(), "2030-01"))
	// Output:
	// context canceled
	// all is well <nil>
}

// A Loader that panics fails only its own load. The stack is that of the Loader.
func ExamplePanicError() {
	rdb, stop := embeddedRedis()
	defer stop()
	prices, err := singlefill.New[int](rdb, "prices", time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()

	var list []int
	_, err = prices.GetOrLoad(context.Background(), "tea", func(ctx context.Context, item string) (int, error) {
		return list[7], nil
	})
	var panicked *singlefill.PanicError
	if errors.As(err, &panicked) {
		fmt.Println(panicked.Value)
		fmt.Println("stack:", bytes.Contains(panicked.Stack, []byte("ExamplePanicError")))
	}
	// Output:
	// runtime error: index out of range [7] with length 0
	// stack: true
}

// A waiter gets the text of an error from another process. So does a caller that gets a stale value
// because that load has failed.
func ExampleRemoteError() {
	rdb, stop := embeddedRedis()
	defer stop()
	opts := &singlefill.Options[int]{StaleIfError: time.Hour, RetryAfter: time.Minute}
	here, err := singlefill.New(rdb, "prices", time.Minute, opts)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer here.Close()
	elsewhere, err := singlefill.New(rdb, "prices", time.Minute, opts) // stands for another process
	if err != nil {
		fmt.Println(err)
		return
	}
	defer elsewhere.Close()

	ctx := context.Background()
	if err := errors.Join(here.Set(ctx, "tea", 7), here.Expire(ctx, "tea")); err != nil {
		fmt.Println(err)
	}
	errDown := errors.New("price service is down")
	load := func(ctx context.Context, item string) (int, error) { return 0, errDown }
	_, info, _ := here.GetOrLoadInfo(ctx, "tea", load)
	fmt.Println(info.Err == errDown)

	var remote *singlefill.RemoteError
	_, info, _ = elsewhere.GetOrLoadInfo(ctx, "tea", load)
	if errors.As(info.Err, &remote) {
		fmt.Println(remote.Key, remote.Message, "the same error:", errors.Is(remote, errDown))
	}
	// Output:
	// true
	// tea price service is down the same error: false
}

// While Redis does not answer, each process asks the source, once at a time per key. Delete returns an
// error.
func Example_redisIsDown() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, DialerRetries: 1}) // nothing listens there
	defer rdb.Close()
	names, err := singlefill.New(rdb, "names", time.Hour, &singlefill.Options[string]{RedisTimeout: 20 * time.Millisecond})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer names.Close()

	ctx := context.Background()
	load := func(ctx context.Context, id string) (string, error) { return "Ada", nil }
	fmt.Println(names.GetOrLoad(ctx, "42", load))
	fmt.Println("loaded without the lock:", names.Stats().LoadsUnlocked)
	fmt.Println("deleted:", names.Delete(ctx, "42") == nil)
	// Output:
	// Ada <nil>
	// loaded without the lock: 1
	// deleted: false
}
