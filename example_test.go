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

// embeddedRedis lets the examples run anywhere. A service makes a client of its Redis instead.
func embeddedRedis() (rdb *redis.Client, stop func()) {
	mini, err := miniredis.Run()
	if err != nil {
		panic(err)
	}
	mini.ClockTTL(true) // or nothing would ever expire
	rdb = redis.NewClient(&redis.Options{Addr: mini.Addr()})
	return rdb, func() { rdb.Close(); mini.Close() }
}

// However many ask for a key at once, in whatever process, it is loaded once.
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

// One client serves any number of caches. Their namespaces keep them apart.
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

// A handler gives each request a deadline of its own. It ends that request only: the load goes on and fills
// the cache.
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

// A client that keeps no request waiting for a server that is gone, and a cache on it. New sends nothing; it says
// what is wrong with its arguments, and what is allowed.
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

// A load goes on when the request that began it is gone. Close waits until it has been stored, for whoever comes
// next: the order is server, cache, client.
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

// A Loader that panics fails its own load and takes nobody down. The stack is the Loader's.
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

// Of a load in another process its waiters get the error's text. So do those who are served an old value because
// that load has failed a moment ago.
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

// While Redis cannot be asked the source answers, asked once per process at a time. Delete says that it could not
// be done.
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
